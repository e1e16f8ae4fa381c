//! The host of the network's demo: a network namespace with the switch's TAP interface, a DHCP
//! server and a web server.

use crate::checks::Checks;
use crate::guest::Guest;
use crate::session::Session;
use crate::text;
use anyhow::{Context, Result};
use sidecore_kit::namespace::Namespace;
use sidecore_kit::process::{Process, output_of};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::{FILE_MIB, NICS};

/// The interface as a device of the daemon.
pub(super) const DEVICE: &str = "\n[[device]]\nname = \"host\"\nfront_end = \"tap\"\nswitch = \
                                 \"lan\"\ninterface = \"tap0\"\n";
const INTERFACE: &str = "tap0";
const ADDRESS: &str = "10.0.0.254";
const MAC: &str = "52:54:00:00:00:fe";
/// The link-local address of the interface (RFC 4291, appendix A).
const LINK_LOCAL: &str = "fe80::5054:ff:fe00:fe";

/// The servers of the host, which end with this value.
pub(super) struct Host {
    busybox: PathBuf,
    /// The checksum of the web server's file.
    digest: String,
    _servers: [Process; 2],
}

/// A namespace for the daemon and the host, if this user may make one and the kernel has TAP.
pub(super) fn namespace(session: &Session<'_>) -> Option<Namespace> {
    if !Path::new("/dev/net/tun").exists() {
        session.say("no host on the switch: this kernel has no TAP");
        return None;
    }
    let namespace = Namespace::new();
    if let Err(error) = &namespace {
        session.say(format!("no host on the switch: no network namespace: {error}"));
    }
    namespace.ok()
}

impl Host {
    /// Gives the interface an address, and starts the servers.
    pub(super) fn start(session: &Session<'_>, busybox: &Path) -> Result<Self> {
        let namespace = session.namespace.as_ref().context("no namespace")?;
        namespace.ip(&format!("link set {INTERFACE} address {MAC} up"))?;
        namespace.ip(&format!("addr add {ADDRESS}/24 dev {INTERFACE}"))?;
        let files = session.directory.join("files");
        std::fs::create_dir(&files)?;
        let mut content = vec![0; usize::try_from(FILE_MIB << 20)?];
        content.iter_mut().zip(0_u64..).for_each(|(byte, at)| {
            *byte = (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
        });
        let file = files.join("file");
        std::fs::write(&file, &content)?;
        let digest = output_of("sha256sum", &[text(&file)?])?;
        let digest = digest.split_whitespace().next().unwrap_or_default().to_owned();

        let leases: String = NICS
            .iter()
            .filter(|(_, _, vlan)| *vlan == 1)
            .zip(1..)
            .map(|((_, mac, _), last)| format!("static_lease {mac} 10.0.0.{last}\n"))
            .collect();
        let at = |name: &str| session.directory.join(name).display().to_string();
        let (kept, pid) = (at("dhcp.leases"), at("dhcp.pid"));
        let configuration = format!(
            "start 10.0.0.100\nend 10.0.0.200\ninterface {INTERFACE}\nlease_file {kept}\npidfile \
             {pid}\noption subnet 255.255.255.0\noption router {ADDRESS}\n{leases}"
        );
        let of_dhcp = session.directory.join("dhcp.conf");
        std::fs::write(&of_dhcp, configuration)?;
        // It reads the leases that it has kept.
        std::fs::write(&kept, "")?;
        let start = |words: &[&OsStr]| {
            let mut command = namespace.command(busybox.as_os_str());
            command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            Process::start(&mut command).with_context(|| format!("cannot start {words:?}"))
        };
        let listen = format!("{ADDRESS}:80");
        let words = ["httpd", "-f", "-p", &listen, "-h"].map(OsStr::new);
        let web = start(&[&words[..], &[files.as_os_str()]].concat())?;
        let words = ["udhcpd", "-f"].map(OsStr::new);
        let dhcp = start(&[&words[..], &[of_dhcp.as_os_str()]].concat())?;
        Ok(Self { busybox: busybox.to_owned(), digest, _servers: [web, dhcp] })
    }

    /// Guests and host reach each other.
    pub(super) fn check(
        &self,
        session: &mut Session<'_>,
        guests: &mut [Guest; 2],
        checks: &mut Checks,
    ) -> Result<()> {
        let six = format!("ping6 {LINK_LOCAL} eth0");
        for (order, what) in [
            ("ping 10.0.0.254", "a guest pings the host's kernel"),
            (six.as_str(), "and finds it by IPv6"),
        ] {
            let received = guests[0].order(session, order)?.text("received")?.to_owned();
            checks.note(session, what, received == "5", format!("{received} of 5"));
        }
        for (guest, name) in guests.iter_mut().zip(["first", "second"]) {
            let got = guest.order(session, &format!("fetch http://{ADDRESS}/file"))?;
            let is_same = got.text("digest")? == self.digest;
            let what = format!("the {name} guest fetches a file from the host by HTTP");
            let found = format!("{FILE_MIB} MiB, SHA-256 {}...", &self.digest[..8]);
            checks.note(session, &what, is_same, found);
        }
        let namespace = session.namespace.as_ref().context("no namespace")?;
        let mut ping = namespace.command(self.busybox.as_os_str());
        let output = ping.args(["ping", "-c", "5", "10.0.0.2"]).output()?;
        let output = String::from_utf8_lossy(&output.stdout);
        let is_there = output.contains("5 packets received");
        let found = output.lines().find(|line| line.contains("received")).unwrap_or("no answer");
        checks.note(session, "the host pings a guest", is_there, found);
        Ok(())
    }
}
