//! The switches: this daemon, Open vSwitch with DPDK, and dpdk-testpmd, each on the server's core.

use std::fmt::Write as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sidecore_driver::{NetClient, NetClientOptions};
use sidecore_guest::root::{ROOTS, Root};

use super::cases::Setting;
use super::frames::station;
use super::{OVS, TESTPMD};
use crate::cores;
use crate::experiment::Experiment;
use crate::process::Process;
use crate::sidecored::{self, Sidecored};

/// Memory of testpmd in MiB, in huge pages that no file names, so that none is left behind.
const TESTPMD_MIB: u64 = 384;
/// Memory of Open vSwitch in MiB: two pools of 262,144 buffers of 3 KB, and what it allocates when
/// a guest connects. With less it takes as many buffers as fit, and may refuse a guest.
const OVS_MIB: u64 = 2048;
/// Memory of the clients of all systems in MiB.
const CLIENTS_MIB: u64 = 640;
/// Open vSwitch tries to connect once a second.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);

/// Huge pages of the DPDK programs and of the clients of all systems.
pub(super) const HUGE_PAGES: u64 = (OVS_MIB + TESTPMD_MIB + CLIENTS_MIB) / 2;

/// A port's vhost-user socket.
pub(super) enum Socket {
    /// The switch listens.
    Listening(PathBuf),
    /// The switch connects, and does so again after the end of each connection.
    Connecting(UnixListener),
}

impl Socket {
    /// Whether a NIC can be connected.
    fn is_ready(&self) -> bool {
        match self {
            Self::Listening(path) => path.exists(),
            Self::Connecting(listener) => is_called(listener, Duration::ZERO),
        }
    }

    /// Connects a NIC.
    ///
    /// # Errors
    /// The switch does not connect, refuses, or hangs up.
    pub(super) fn connect(&self, options: &NetClientOptions) -> Result<NetClient> {
        match self {
            Self::Listening(path) => NetClient::connect(path, options)
                .with_context(|| format!("connecting to {}", path.display())),
            Self::Connecting(listener) => {
                ensure!(is_called(listener, CALL_TIMEOUT), "the switch does not connect");
                let (socket, address) = listener.accept()?;
                NetClient::over(socket, options).with_context(|| format!("on {address:?}"))
            }
        }
    }
}

/// Whether a connection waits, or comes within `timeout`.
fn is_called(listener: &UnixListener, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).ok();
    matches!(poll(&mut [PollFd::new(listener, PollFlags::IN)], timeout.as_ref()), Ok(1))
}

/// A switch as running processes.
pub(super) struct System {
    pub(super) name: String,
    /// The process that forwards, which is frozen between runs.
    pub(super) process: Process,
    /// Those of its ports.
    pub(super) sockets: Vec<Socket>,
    is_peer: bool,
    /// The database of Open vSwitch, which ends after the process that forwards.
    _database: Option<Process>,
}

impl System {
    /// Ends the processes. Those of peers die of the signal, which is no failure of theirs.
    ///
    /// # Errors
    /// A daemon did not end when it was asked to.
    pub(super) fn end(self) -> Result<()> {
        if self.is_peer { Ok(()) } else { self.process.end() }
    }
}

/// Starts this build's daemon, and the one of `--against` if the option is set, in directories
/// whose names begin with `name`.
///
/// # Errors
/// A daemon does not start.
pub(super) fn ours(experiment: &Experiment, name: &str, setting: Setting) -> Result<Vec<System>> {
    let directory = format!("{name}-{}-{}-{}", setting.ports, setting.large, setting.rules);
    let configure = |directory: &Path| configuration(directory, setting);
    let this = experiment.start_configured(&directory, &[], configure)?;
    let before = experiment.start_configured_before(&directory, &[], configure)?;
    let system = |name: String, daemon: Sidecored| {
        let socket = |port| Socket::Listening(daemon.socket(&format!("nic{port}")));
        let sockets = (0..setting.ports).map(socket).collect();
        System { name, process: daemon.process, sockets, is_peer: false, _database: None }
    };
    let mut systems = vec![system(crate::record::OURS.to_owned(), this)];
    systems
        .extend(before.map(|before| system(crate::against::before(crate::record::OURS), before)));
    Ok(systems)
}

fn configuration(directory: &Path, setting: Setting) -> Result<String> {
    let mut config = sidecored::head(directory);
    config.push_str("[[switch]]\nname = \"lan\"\nidle = \"poll\"\n");
    for port in 0..setting.ports {
        let socket = directory.join(format!("nic{port}.sock"));
        let mac = station(port.into()).map(|byte| format!("{byte:02x}")).join(":");
        writeln!(
            config,
            "[[device]]\nname = \"nic{port}\"\nfront_end = \"virtio-net\"\nswitch = \"lan\"\n\
             socket = {socket:?}\nmac = \"{mac}\"\npacked = true\nqueues = 1\n\
             queue_size_max = 4096"
        )?;
        if setting.rules {
            writeln!(config, "rules = {:?}", rules())?;
        }
    }
    Ok(config)
}

/// A hundred rules, of which the last one matches packets that begin a connection.
fn rules() -> Vec<String> {
    let others = (1..100).map(|last| format!("ip saddr 192.0.2.{last} udp dport {last} drop"));
    others.chain(["ct state new,established,related accept".to_owned()]).collect()
}

/// The programs of the peers.
pub(super) struct Programs(Root);

impl Programs {
    /// Finds the programs in a cache beside the output of this build, and fetches them into it if
    /// `may_fetch`. Prints why there are none.
    pub(super) fn find(may_fetch: bool) -> Option<Self> {
        let find = || {
            let program = std::env::current_exe()?;
            let target = program.parent().and_then(Path::parent).context("no target directory")?;
            Root::switches(&target.join(ROOTS), may_fetch, |what| eprintln!("  {what}"))
        };
        match find() {
            Ok(root) => Some(Self(root)),
            Err(error) => {
                eprintln!("  no peers: {error:#}");
                None
            }
        }
    }

    /// Starts a peer in a new directory; `None`, with a printed reason, if it does not start here.
    pub(super) fn start(&self, name: &str, directory: &Path, setting: Setting) -> Option<System> {
        let directory = directory.join(format!("{name}-{}-{}", setting.ports, setting.large));
        let started = std::fs::create_dir_all(&directory).map_err(Into::into).and_then(|()| {
            if name == OVS {
                self.open_vswitch(&directory, setting)
            } else {
                self.testpmd(&directory, setting)
            }
        });
        started.map_err(|error| eprintln!("  without {name}: {error:#}")).ok()
    }

    fn testpmd(&self, directory: &Path, setting: Setting) -> Result<System> {
        let drivers =
            ["librte_net_vhost.so.25", "librte_mempool_ring.so.25", "librte_bus_vdev.so.25"];
        let mut command = self.0.command_with("usr/bin/dpdk-testpmd", &drivers)?;
        let (client, server) = (cores::CLIENT, cores::SERVER);
        let memory = memory(TESTPMD_MIB);
        let cores = format!("{client},{server}");
        let main = client.to_string();
        command.extend(["-l", &cores, "--main-lcore", &main].map(str::to_owned));
        command.extend(memory);
        let sockets = sockets(directory, setting);
        for (port, socket) in sockets.iter().enumerate() {
            command.push("--vdev".to_owned());
            command.push(format!("net_vhost{port},iface={},queues=1", text(socket)?));
        }
        // Without a period it ends with its standard input.
        let own = ["--", "--nb-cores=1", "--forward-mode=io", "--auto-start"];
        command.extend(own.map(str::to_owned));
        command.extend(["--total-num-mbufs=65536", "--stats-period=3600"].map(str::to_owned));
        let mut process = Process::start(TESTPMD, &[client, server], &command, directory)?;
        process.wait_until(|output| {
            output.contains("Port statistics") && sockets.iter().all(|socket| socket.exists())
        })?;
        let sockets = sockets.into_iter().map(Socket::Listening).collect();
        Ok(System { name: TESTPMD.to_owned(), process, sockets, is_peer: true, _database: None })
    }

    /// Open vSwitch with a bridge in user space, and a database, sockets and logs in `directory`.
    fn open_vswitch(&self, directory: &Path, setting: Setting) -> Result<System> {
        let inside = |name: &str| directory.join(name).display().to_string();
        let (file, socket) = (inside("conf.db"), format!("unix:{}", inside("db.sock")));
        let schema = self.0.path("usr/share/openvswitch/vswitch.ovsschema");
        self.tool(directory, "usr/bin/ovsdb-tool", &["create", &file, text(&schema)?])?;
        let mut command = self.in_directory(directory, "usr/sbin/ovsdb-server", &[])?;
        command.extend([file, format!("--remote=p{socket}")]);
        command.push(format!("--unixctl={}", inside("database.ctl")));
        let mut database = Process::start("ovsdb", &[cores::CLIENT], &command, directory)?;
        database.wait_until(|_| directory.join("db.sock").exists())?;
        let database_option = format!("--db={socket}");
        let set = |arguments: &[&str]| {
            let mut all = vec!["--no-wait", &database_option];
            all.extend(arguments);
            self.tool(directory, "usr/bin/ovs-vsctl", &all)
        };
        set(&["init"])?;
        let mask = |core: sidecore_units::CoreId| format!("{:#x}", 1_u64 << core.0);
        set(&[
            "set",
            "Open_vSwitch",
            ".",
            "other_config:dpdk-init=true",
            &format!("other_config:dpdk-lcore-mask={}", mask(cores::CLIENT)),
            &format!("other_config:pmd-cpu-mask={}", mask(cores::SERVER)),
            &format!("other_config:dpdk-extra={}", memory(OVS_MIB).join(" ")),
            &format!("other_config:userspace-tso-enable={}", setting.large),
        ])?;
        set(&["add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev"])?;
        // Ports on whose sockets Open vSwitch listens take no segmentation offload.
        let mut listeners = Vec::new();
        for (port, socket) in sockets(directory, setting).into_iter().enumerate() {
            let port = format!("port{port}");
            let path = format!("options:vhost-server-path={}", text(&socket)?);
            let interface = ["set", "Interface", &port, "type=dpdkvhostuserclient", &path];
            set(&[&["add-port", "br0", &port, "--"], &interface[..]].concat())?;
            listeners.push(Socket::Connecting(UnixListener::bind(&socket)?));
        }
        let path = "usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk";
        let mut command = self.in_directory(directory, path, &["librte_mempool_ring.so.25"])?;
        command.extend([socket, format!("--unixctl={}", inside("switch.ctl"))]);
        command.push("-vconsole:info".to_owned());
        let both = [cores::CLIENT, cores::SERVER];
        let mut process = Process::start(OVS, &both, &command, directory)?;
        process.wait_until(|_| listeners.iter().all(Socket::is_ready))?;
        Ok(System {
            name: OVS.to_owned(),
            process,
            sockets: listeners,
            is_peer: true,
            _database: Some(database),
        })
    }

    /// The words of a command that starts a program of Open vSwitch whose files are in `directory`.
    fn in_directory(
        &self,
        directory: &Path,
        program: &str,
        libraries: &[&str],
    ) -> Result<Vec<String>> {
        let mut command = vec!["env".to_owned()];
        for variable in ["RUNDIR", "DBDIR", "LOGDIR", "SYSCONFDIR"] {
            command.push(format!("OVS_{variable}={}", text(directory)?));
        }
        let data = self.0.path("usr/share/openvswitch");
        command.push(format!("OVS_PKGDATADIR={}", text(&data)?));
        command.extend(self.0.command_with(program, libraries)?);
        Ok(command)
    }

    fn tool(&self, directory: &Path, program: &str, arguments: &[&str]) -> Result<()> {
        let command = self.in_directory(directory, program, &[])?;
        let (first, rest) = command.split_first().context("an empty command")?;
        let output =
            Command::new(first).args(rest).args(arguments).stdin(Stdio::null()).output()?;
        let message = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{program} {}: {message}", arguments.join(" "));
        Ok(())
    }
}

/// The options of a DPDK program that uses so many MiB and no more: what it would take of the huge
/// pages beyond that, the clients would lack.
fn memory(mib: u64) -> [String; 6] {
    let mib = mib.to_string();
    ["--in-memory", "--no-pci", "-m", &mib, "--socket-limit", &mib].map(str::to_owned)
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

fn sockets(directory: &Path, setting: Setting) -> Vec<PathBuf> {
    (0..setting.ports).map(|port| directory.join(format!("port{port}"))).collect()
}
