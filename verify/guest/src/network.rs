//! Two guests on a switch of one daemon: ping, IPv6, a file by TCP with its checksum, VLANs that do
//! not see each other, a guest that claims another's address, a rule, rules that are replaced
//! during a transfer, and a connection that they refuse. A third NIC of one guest is on a second
//! daemon, and its port on the first one. With root, the kernel of a host is on the switch as well:
//! it gives the guests their addresses, and a file.
//!
//! `sidecore-guest-tune` sets a guest up to poll its NIC, and pings are counted with their
//! interrupts; also in guests with the kernel of Debian's backports, which has more to set.

mod far;
mod firewall;
mod host;
mod tune;

use crate::checks::Checks;
use crate::config::{Places, quoted, socket};
use crate::download::{self, Kernel, find_kernel};
use crate::guest::{Guest, NET_A, NET_B};
use crate::initramfs::{self, Extra};
use crate::network::far::VmHost;
use crate::network::host::Host;
use crate::network::tune::Counts;
use crate::progress::Progress;
use crate::qemu::{Cable, Equipment, Nic};
use crate::root::{KernelOf, ROOTS, Root};
use crate::session::Session;
use crate::sidecore::Sidecore;
use crate::{DemoOptions, Prepared, build_guest_tune, json, listen, qemu, write};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The size of the file that the guests send each other.
const FILE_MIB: u64 = 16;

/// The NICs: name, address, VLAN. Each guest has two of them.
const NICS: [(&str, &str, u16); 4] = [
    ("nic-a", "52:54:00:00:00:01", 1),
    ("nic-a10", "52:54:00:00:00:11", 10),
    ("nic-b", "52:54:00:00:00:02", 1),
    ("nic-b20", "52:54:00:00:00:12", 20),
];
/// The link-local address of the NIC `nic-b` (RFC 4291, appendix A).
const LINK_LOCAL_B: &str = "fe80::5054:ff:fe00:2";

/// Runs the demo, prints its results, and writes `demo-net.json` into the target directory.
///
/// # Errors
/// A program or file is not available, or a check failed.
pub fn demo(options: &DemoOptions) -> Result<()> {
    listen()?;
    let progress = Progress::start();
    let prepared = Prepared::new(options, &["sidecored", "sidecore"], &progress)?;
    let accelerator = qemu::Accelerator::choose();
    progress.say(accelerator.explanation());
    let tune = build_guest_tune(options, &progress)?;
    let release = download::kernel(&prepared.cache, &progress)?;
    let roots = options.target.join(ROOTS);
    let backports = Root::kernel(&roots, KernelOf::Backports, |what| progress.say(what))?;
    let backports = find_kernel(&backports.path("")).context("the packages brought no kernel")?;
    let image = |kernel: &Kernel, name: &str| -> Result<PathBuf> {
        let cache = prepared.cache.join(name);
        std::fs::create_dir_all(&cache)
            .with_context(|| format!("cannot create {}", cache.display()))?;
        let static_program = Some(("/sbin/sidecore-guest-tune", tune.clone()));
        let extra = Extra { static_program, ..Extra::default() };
        initramfs::build(&cache, kernel, &prepared.busybox, &extra, &progress)
    };
    let (of_release, of_backports) = (image(&release, "net")?, image(&backports, "net-backports")?);
    let mut stage = prepared.stage(accelerator, &progress);
    stage.initramfs = &of_release;
    let (mut checks, mut counts) = (Checks::default(), Counts::default());
    let busybox = &prepared.busybox;
    Session::hold(&stage, "network", |session| run(session, busybox, &mut counts, &mut checks))?;
    (stage.kernel, stage.initramfs) = (&backports.image, &of_backports);
    Session::hold(&stage, "polled", |session| run_polled(session, &mut counts, &mut checks))?;
    counts.show(&mut checks);
    print!("\n{}", checks.text("Two guests on a switch"));
    write(options, "demo-net.json", &json(&checks)?)?;
    println!("\nWritten to {}", options.target.join("demo-net.json").display());
    let faults = checks.faults();
    if !faults.is_empty() {
        bail!("the demo failed:\n  {}", faults.join("\n  "));
    }
    Ok(())
}

/// Guests with the kernel of Debian's backports: a thread polls the NIC of one.
fn run_polled(session: &mut Session<'_>, counts: &mut Counts, checks: &mut Checks) -> Result<()> {
    let daemon = session.daemon(|places| configuration(places, ""))?;
    let mut guests = boot(session, false, None, checks)?;
    tune::threaded(session, &mut guests[0], counts, checks)?;
    for guest in guests {
        guest.off(session)?;
    }
    daemon.stop(&mut session.inbox)
}

/// A switch with the guests' NICs, and with other devices.
fn configuration(places: &Places<'_>, others: &str) -> Result<String> {
    let keys = quoted(&places.directory.join("keys"))?;
    let mut text = format!("key_directory = {keys}\n{}", places.head()?);
    text.push_str("\n[[switch]]\nname = \"lan\"\n");
    for (name, mac, vlan) in NICS {
        let socket = quoted(&socket(places.directory, name))?;
        text.push_str(&format!(
            "\n[[device]]\nname = \"{name}\"\nfront_end = \"virtio-net\"\nswitch = \"lan\"\n\
             mac = \"{mac}\"\nvlan = {vlan}\nsocket = {socket}\npacked = true\n"
        ));
    }
    text.push_str(others);
    Ok(text)
}

fn run(
    session: &mut Session<'_>,
    busybox: &Path,
    counts: &mut Counts,
    checks: &mut Checks,
) -> Result<()> {
    session.namespace = host::namespace(session);
    let has_host = session.namespace.is_some();
    let others = if has_host { host::DEVICE } else { "" };
    let others = far::iohost(session.directory)? + others;
    let daemon = session.daemon(|places| configuration(places, &others))?;
    let vmhost = VmHost::start(session)?;
    let sidecore = session.sidecore();
    let host = if has_host { Some(Host::start(session, busybox)?) } else { None };
    let mut guests = boot(session, host.is_some(), Some(&vmhost), checks)?;
    reach(session, &mut guests, checks)?;
    if let Some(host) = &host {
        host.check(session, &mut guests, checks)?;
        checks.show(&sidecore, &["list"])?;
    }
    tune::deferred(session, &mut guests[0], counts, checks)?;
    transfer(session, &mut guests, checks)?;
    separate(session, &mut guests, &sidecore, checks)?;
    filter(session, &mut guests, &sidecore, checks)?;
    firewall::check(session, &mut guests, &sidecore, checks)?;
    vmhost.check(session, &mut guests, &sidecore, checks)?;
    for guest in &mut guests {
        let kernel = guest.order(session, "kernel")?.text("kernel")?.to_owned();
        checks.note(session, "the guest's kernel logs no errors", kernel == "none", kernel);
    }
    checks.show(&sidecore, &["net", "list"])?;
    checks.show(&sidecore, &["net", "table", "lan"])?;
    for guest in guests {
        guest.off(session)?;
    }
    vmhost.stop(session)?;
    daemon.stop(&mut session.inbox)
}

/// Boots both guests, one with split rings and one with packed ones, and gives them addresses, or
/// has the host's DHCP server do that. With a VMhost, they have a third NIC.
fn boot(
    session: &mut Session<'_>,
    has_dhcp: bool,
    vmhost: Option<&VmHost>,
    checks: &mut Checks,
) -> Result<[Guest; 2]> {
    let directory = session.directory;
    let sockets = NICS.map(|(name, ..)| socket(directory, name));
    let nics = |guest: usize| -> Vec<Nic<'_>> {
        let own = [2 * guest, 2 * guest + 1].map(|at| Nic {
            name: NICS[at].0,
            mac: NICS[at].1,
            cable: Cable::Daemon(&sockets[at]),
            packed: guest > 0,
        });
        own.into_iter().chain(vmhost.map(|vmhost| vmhost.nic(guest))).collect()
    };
    let (of_a, of_b) = (nics(0), nics(1));
    let bare = Equipment { polled: false, disks: &[], ports: &[], nics: &[] };
    let mut guests = [
        Guest::boot_net(session, NET_A, &Equipment { nics: &of_a, ..bare })?,
        Guest::boot_net(session, NET_B, &Equipment { nics: &of_b, ..bare })?,
    ];
    for (guest, last) in guests.iter_mut().zip([1, 2]) {
        guest.booted(session)?;
        let address = format!("10.0.0.{last}/24");
        if has_dhcp {
            let lease = guest.order(session, "lease eth0")?.text("address")?.to_owned();
            let what = "the host's DHCP server gives a guest its address";
            checks.note(session, what, lease == address, lease);
        } else {
            guest.order(session, &format!("up eth0 {address}"))?;
        }
        guest.order(session, &format!("up eth1 10.0.1.{last}/24"))?;
    }
    Ok(guests)
}

/// The guests ping each other.
fn reach(session: &mut Session<'_>, guests: &mut [Guest; 2], checks: &mut Checks) -> Result<()> {
    let link_local = format!("ping6 {LINK_LOCAL_B} eth0");
    let pings = [
        (0, "ping 10.0.0.2", "the first guest pings the second"),
        (1, "ping 10.0.0.1", "the second guest pings the first"),
        (0, link_local.as_str(), "they find each other by IPv6, too"),
    ];
    for (from, order, what) in pings {
        let received = guests[from].order(session, order)?.text("received")?.to_owned();
        checks.note(session, what, received == "5", format!("{received} of 5"));
    }
    Ok(())
}

/// The guests send each other files.
fn transfer(session: &mut Session<'_>, guests: &mut [Guest; 2], checks: &mut Checks) -> Result<()> {
    let network = ("10.0.0", FILE_MIB);
    send(session, guests, (0, 1), network, "from the first guest", checks)?;
    send(session, guests, (1, 0), network, "from the second guest", checks)
}

/// A guest sends another one a file of this size, to its address in this network.
fn send(
    session: &mut Session<'_>,
    guests: &mut [Guest; 2],
    (from, to): (usize, usize),
    (network, mib): (&str, u64),
    what: &str,
    checks: &mut Checks,
) -> Result<()> {
    guests[to].order(session, "listen")?;
    let order = format!("send {network}.{} {mib}", to + 1);
    let sent = guests[from].order(session, &order)?.text("digest")?.to_owned();
    let got = guests[to].order(session, "got")?;
    let is_same = got.text("digest")? == sent && got.number::<u64>("mib")? == mib;
    let what = format!("a file {what} arrives as it was sent");
    let found = format!("{} MiB, SHA-256 {}...", got.text("mib")?, &sent[..8.min(sent.len())]);
    checks.note(session, &what, is_same, found);
    Ok(())
}

/// VLANs and claims of addresses.
fn separate(
    session: &mut Session<'_>,
    [a, _]: &mut [Guest; 2],
    sidecore: &Sidecore,
    checks: &mut Checks,
) -> Result<()> {
    let before = counter(sidecore, "nic-b20", "out_frames")?;
    let received = a.order(session, "ping 10.0.1.2")?.text("received")?.to_owned();
    let leaked = counter(sidecore, "nic-b20", "out_frames")? - before;
    let found = format!("{received} answers, {leaked} frames");
    let is_apart = received == "0" && leaked == 0;
    checks.note(session, "a VLAN gets no frame of another one", is_apart, found);

    a.order(session, &format!("claim eth0 {}", NICS[2].1))?;
    let received = a.order(session, "ping 10.0.0.2")?.text("received")?.to_owned();
    let dropped = counter(sidecore, "nic-a", "dropped_spoofed_mac")?;
    let found = format!("{received} answers, {dropped} frames dropped");
    let is_stopped = received == "0" && dropped > 0;
    checks.note(session, "a guest with another guest's address is stopped", is_stopped, found);
    checks.show(sidecore, &["net", "drops", "nic-a"])?;
    a.order(session, &format!("claim eth0 {}", NICS[0].1))?;
    let received = a.order(session, "ping 10.0.0.2")?.text("received")?.to_owned();
    let found = format!("{received} of 5");
    checks.note(session, "with its own address it is back", received == "5", found);
    Ok(())
}

/// A rule stops one flow and lets another pass, at once and without a new connection of the VMM.
fn filter(
    session: &mut Session<'_>,
    [a, b]: &mut [Guest; 2],
    sidecore: &Sidecore,
    checks: &mut Checks,
) -> Result<()> {
    let file = session.directory.join("ping.rules");
    std::fs::write(&file, "to icmp type echo-request drop # of others\n")?;
    let file = file.to_str().context("a directory that is UTF-8")?;
    sidecore.run(&["net", "rules", "nic-b", "--set", file])?;
    let stopped = a.order(session, "ping 10.0.0.2")?.text("received")?.to_owned();
    let passed = b.order(session, "ping 10.0.0.1")?.text("received")?.to_owned();
    let dropped = counter(sidecore, "nic-b", "dropped_rule_out")?;
    let found = format!("{stopped} and {passed} of 5, {dropped} frames dropped");
    let what = "a rule stops pings of a guest, and lets it ping others";
    let is_right = stopped == "0" && passed == "5" && dropped > 0;
    checks.note(session, what, is_right, found);
    checks.show(sidecore, &["net", "rules", "nic-b"])?;
    sidecore.run(&["net", "rules", "nic-b", "--set", "/dev/null"])?;
    let received = a.order(session, "ping 10.0.0.2")?.text("received")?.to_owned();
    let found = format!("{received} of 5");
    checks.note(session, "without the rule it is reached again", received == "5", found);
    Ok(())
}

/// A counter of a port.
fn counter(sidecore: &Sidecore, port: &str, name: &str) -> Result<u64> {
    let switches: Value = sidecore.json(&["net", "list", "--json"])?;
    let mut ports = switches[0]["ports"].as_array().into_iter().flatten();
    let found = ports.find(|found| found["name"] == port);
    let count = found.and_then(|found| found["counters"][name].as_u64());
    count.with_context(|| format!("sidecore net list shows no {name} of {port}"))
}
