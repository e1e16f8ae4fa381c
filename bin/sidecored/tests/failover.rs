//! Failover of an IOhost: two candidates for one disk, a real etcd, and a guest of a VMhost, which
//! sees pauses and no errors.

mod common;

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sidecore_control::report::DeviceState;
use sidecore_driver::{BlkClient, BlkQueue, ClientOptions, Slot, Status};
use sidecore_fuse::{Operation, SlowDisk};
use sidecore_kit::etcd::Etcd;
use sidecore_kit::guest::complete_all;
use sidecore_kit::namespace::Namespace;
use sidecore_kit::process::Process;
use sidecore_kit::wait;
use tempfile::TempDir;

use common::Daemon;
use common::remote::{BLOCK, data, flush, read, submit};

const SOON: Duration = Duration::from_secs(90);
const DISK_BYTES: u64 = 16 << 20;
const BLOCKS: u64 = 32;
/// Kills and hand-overs, in turn, unless `SIDECORE_TAKEOVERS` has another number: 2 at least.
const TAKEOVERS: u64 = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fence {
    Lock,
    /// Kills a candidate and its daemon.
    Command,
}

/// Processes that stop for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stopped {
    /// The owner, with its daemon.
    Owner,
    /// All members of etcd.
    Etcd,
    Both,
}

/// Two hosts that can serve a disk, and the directory that they share.
struct Pair<'a> {
    namespace: &'a Namespace,
    /// The name of their keys in etcd.
    cluster: String,
    sidecore: PathBuf,
    shared: TempDir,
    /// The disk's file.
    disk: PathBuf,
    fence: Fence,
    /// The second candidate is on the VMhost, at the second link of its daemon.
    is_near: bool,
}

impl<'a> Pair<'a> {
    fn new(namespace: &'a Namespace, fence: Fence, disk: Option<PathBuf>) -> Self {
        let shared = tempfile::tempdir().unwrap();
        let disk = disk.unwrap_or_else(|| {
            let path = shared.path().join("disk.img");
            File::create(&path).unwrap().set_len(DISK_BYTES).unwrap();
            path
        });
        let script = shared.path().join("fence");
        // A process that has ended needs no fence.
        let text = format!(
            "#!/bin/sh\npids=$(cat {}/$1.pids) || exit 1\n\
             for pid in $pids; do ! kill -0 $pid || kill -9 $pid || exit 1; done\n",
            shared.path().display()
        );
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
        let (cluster, sidecore) = (format!("{fence:?}"), sidecore());
        Self { namespace, cluster, sidecore, shared, disk, fence, is_near: false }
    }

    /// The socket of a candidate's link.
    fn socket(&self, name: &str) -> PathBuf {
        let is_near = self.is_near && name == "b";
        self.shared.path().join(if is_near { "near.sock" } else { "wire.sock" })
    }

    fn config(&self, name: &str) -> String {
        let (socket, disk) = (self.socket(name), self.disk.display());
        // A file in memory has no direct I/O.
        let direct = !self.disk.starts_with(self.shared.path());
        format!(
            "control_socket = \"{name}.sock\"\n[[sidecore]]\nname = \"io0\"\n\
             [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = {socket:?}\n\
             [[client]]\nname = \"vmhost\"\nlinks = [\"wire\"]\n\
             [[store]]\nname = \"disk\"\ntype = \"file\"\npath = \"{disk}\"\n\
             direct = {direct}\n\
             [[device]]\nname = \"disk1\"\nfront_end = \"vrio\"\nclient = \"vmhost\"\n\
             store = \"disk\"\n"
        )
    }

    fn vmhost(&self) -> Daemon {
        let link = |name: &str, of: &str| {
            let socket = self.socket(of);
            format!("[[link]]\nname = \"{name}\"\ntype = \"memory\"\nsocket = {socket:?}\n")
        };
        let (near, second) = if self.is_near {
            (link("near", "b"), "second_link = \"near\"\n")
        } else {
            (String::new(), "")
        };
        let config = format!(
            "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"vm0\"\n{}{near}\
             [[iohost]]\nname = \"io1\"\nlink = \"wire\"\nclient = \"vmhost\"\n{second}\
             [[store]]\nname = \"r1\"\ntype = \"remote\"\niohost = \"io1\"\ndevice = \"disk1\"\n\
             [[device]]\nname = \"vd0\"\nstore = \"r1\"\nsocket = \"vd0.sock\"\n",
            link("wire", "a")
        );
        Daemon::start(tempfile::tempdir().unwrap(), &config)
    }

    fn candidate(&self, name: &str) -> Process {
        let shared = self.shared.path();
        let config = shared.join(format!("{name}.toml"));
        std::fs::write(&config, self.config(name)).unwrap();
        let log = File::create(shared.join(name)).unwrap();
        let mut command = self.namespace.command(self.sidecore.as_ref());
        command.args(["own", "disk", "--name", name, "--lease", "3"]);
        command.args(["--cluster", &self.cluster]);
        match self.fence {
            Fence::Lock => command.arg("--fence-lock"),
            Fence::Command => command.arg("--fence-command").arg(shared.join("fence")),
        };
        command.args(["--etcd", &Etcd::endpoints(), "--record"]).arg(shared.join("disk.owner"));
        command.arg("--path").arg(&self.disk);
        command.args(["--", env!("CARGO_BIN_EXE_sidecored"), "--config"]).arg(config);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Process::start(&mut command).unwrap()
    }

    /// Sends a signal to a candidate and to its daemon, as to a machine that is suspended.
    fn signal_with_its_daemon(&self, name: &str, candidate: &Process, signal: Signal) {
        let pids = self.note_processes(name, candidate);
        for pid in pids.split_whitespace().map(|pid| Pid::from_raw(pid.parse().unwrap()).unwrap()) {
            // The fence may have killed it.
            let _ = kill_process(pid, signal);
        }
    }

    /// Notes a candidate and its daemon for the fence command, by their numbers.
    fn note_processes(&self, name: &str, candidate: &Process) -> String {
        let pid = candidate.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let pids = format!("{pid} {}", children.unwrap());
        std::fs::write(self.shared.path().join(format!("{name}.pids")), &pids).unwrap();
        pids
    }

    /// A guest of a VMhost, when its disk is there.
    fn guest(&self, vmhost: &Daemon) -> BlkClient {
        let control = vmhost.client();
        wait::until("the remote device is attached", SOON, || {
            control.devices().unwrap()[0].state == DeviceState::Waiting
        });
        let socket = vmhost.directory.path().join("vd0.sock");
        BlkClient::connect(socket, &ClientOptions::default()).unwrap()
    }

    /// Whether this is the newest state of a candidate.
    fn is(&self, name: &str, state: &str) -> bool {
        let log = std::fs::read_to_string(self.shared.path().join(name)).unwrap();
        let newest = log.lines().rfind(|line| line.contains("own: disk: "));
        newest.is_some_and(|line| line.contains(&format!("disk: {state}")))
    }

    /// Whether a candidate's log has this text.
    fn says(&self, name: &str, text: &str) -> bool {
        std::fs::read_to_string(self.shared.path().join(name)).unwrap().contains(text)
    }

    fn wait_for(&self, name: &str, state: &str) {
        wait::until(state, SOON, || self.is(name, state));
    }
}

impl Drop for Pair<'_> {
    /// Prints the candidates' logs if the test has failed.
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["a", "b"] {
                let log = std::fs::read_to_string(self.shared.path().join(name));
                eprintln!("{}, candidate {name}:\n{}", self.cluster, log.unwrap_or_default());
            }
        }
    }
}

/// The command line, which is another package's: `cargo test --workspace` builds it.
fn sidecore() -> PathBuf {
    let build = Path::new(env!("CARGO_BIN_EXE_sidecored")).parent().unwrap();
    let program = build.join("sidecore");
    if program.exists() {
        return program;
    }
    let profile = if build.ends_with("release") { "release" } else { "dev" };
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", "sidecore", "--profile", profile]);
    assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
    program
}

/// Writes all blocks again and again, until a batch was answered that began when `is_over` held.
/// Then reads them. Returns the longest time of a batch.
fn survives(
    queue: &mut BlkQueue,
    slots: &[Slot],
    batch: &mut u64,
    is_over: impl Fn() -> bool,
) -> Duration {
    let mut longest = Duration::ZERO;
    loop {
        let was_over = is_over();
        *batch += 1;
        let begin = Instant::now();
        for (index, slot) in (0..BLOCKS).zip(slots) {
            submit(queue, *slot, index, data(index, *batch, BLOCK));
        }
        queue.publish().unwrap();
        let done = complete_all(queue, slots.len());
        assert!(done.iter().all(|done| done.status == Status::Ok), "batch {batch}: {done:?}");
        longest = longest.max(begin.elapsed());
        if was_over {
            break;
        }
    }
    for index in 0..BLOCKS {
        let back = read(queue, slots[0], index, BLOCK);
        assert!(back == data(index, *batch, BLOCK), "batch {batch}, block {index}");
    }
    flush(queue, slots[0]);
    longest
}

#[test]
fn a_guest_survives_its_iohosts_deaths_and_hand_overs() {
    let namespace = match Namespace::new() {
        Ok(namespace) => namespace,
        Err(error) => return sidecore_skip::skip(error),
    };
    let _etcd = Etcd::start(&namespace, "failover").unwrap();
    let pair = Pair::new(&namespace, Fence::Lock, None);
    let mut names = ["a", "b"];
    let mut owner = pair.candidate(names[0]);
    pair.wait_for(names[0], "serving");
    let mut other = pair.candidate(names[1]);
    pair.wait_for(names[1], "waiting for key");

    let vmhost = pair.vmhost();
    let mut guest = pair.guest(&vmhost);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..BLOCKS).map(|_| queue.take_slot().unwrap()).collect();
    let mut batch = 0;
    let takeovers = std::env::var("SIDECORE_TAKEOVERS").map_or(TAKEOVERS, |n| n.parse().unwrap());
    let mut pauses = [Vec::new(), Vec::new()];
    for round in 1..=takeovers {
        let is_kill = round % 2 == 1;
        let end = if is_kill { Signal::KILL } else { Signal::USR1 };
        owner.signal(end).unwrap();
        let pause = survives(queue, &slots, &mut batch, || pair.is(names[1], "serving"));
        pauses[usize::from(is_kill)].push(pause);
        if is_kill {
            owner.wait_for_end(SOON).unwrap();
            owner = pair.candidate(names[0]);
        }
        std::mem::swap(&mut owner, &mut other);
        names.swap(0, 1);
        pair.wait_for(names[1], "waiting for key");
    }
    drop((owner, other));
    for (mut pauses, of) in pauses.into_iter().zip(["hand-overs", "kills"]) {
        pauses.sort();
        let (median, longest) = (pauses[pauses.len() / 2], pauses.last().unwrap());
        println!("pauses of {} {of}: median {median:?}, {longest:?} at most", pauses.len());
    }
}

/// The link on which a VMhost has its IOhost.
fn link_of(vmhost: &Daemon) -> String {
    vmhost.client().remote().unwrap().iohosts[0].link.clone()
}

#[test]
fn a_guest_goes_from_a_remote_iohost_to_its_own_host_and_back() {
    let namespace = match Namespace::new() {
        Ok(namespace) => namespace,
        Err(error) => return sidecore_skip::skip(error),
    };
    let _etcd = Etcd::start(&namespace, "near").unwrap();
    let mut pair = Pair::new(&namespace, Fence::Lock, None);
    pair.is_near = true;
    let mut far = pair.candidate("a");
    pair.wait_for("a", "serving");
    let mut near = pair.candidate("b");
    pair.wait_for("b", "waiting for key");
    let vmhost = pair.vmhost();
    let mut guest = pair.guest(&vmhost);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..BLOCKS).map(|_| queue.take_slot().unwrap()).collect();
    let mut batch = 0;
    let mut pauses = Vec::new();
    for end in [Signal::USR1, Signal::KILL] {
        for (owner, names, link) in
            [(&mut far, ["a", "b"], "near"), (&mut near, ["b", "a"], "wire")]
        {
            owner.signal(end).unwrap();
            let pause = survives(queue, &slots, &mut batch, || pair.is(names[1], "serving"));
            wait::until(link, SOON, || link_of(&vmhost) == link);
            pauses.push((end, names[0], pause));
            if end == Signal::KILL {
                owner.wait_for_end(SOON).unwrap();
                *owner = pair.candidate(names[0]);
            }
            pair.wait_for(names[0], "waiting for key");
        }
    }
    drop((far, near));
    println!("longest batches, from a (remote) and b (on the VMhost): {pauses:?}");
}

/// Stops the owner, etcd or both, and lets them continue when a successor has fenced the owner or
/// waits for its requests.
fn stop_and_continue(pair: &Pair<'_>, owner: &Process, etcd: &Etcd, stopped: Stopped) {
    if stopped == Stopped::Etcd {
        // Its fence may be asked for.
        pair.note_processes("a", owner);
    } else {
        pair.signal_with_its_daemon("a", owner, Signal::STOP);
    }
    if stopped != Stopped::Owner {
        etcd.signal(Signal::STOP);
        let reason = match stopped {
            Stopped::Both => ("b", "no answer within"),
            _ => ("a", "the lease has ended: the command was killed"),
        };
        wait::until(reason.1, SOON, || pair.says(reason.0, reason.1));
        etcd.signal(Signal::CONT);
    }
    if pair.fence == Fence::Lock && stopped != Stopped::Etcd {
        wait::until("the fence fails", SOON, || pair.says("b", "a live process"));
        pair.signal_with_its_daemon("a", owner, Signal::CONT);
    }
    // The kernel has writes of the dead owner. Without etcd for a while, its supervisor lives.
    let waits =
        ["waiting for requests of a process that has ended", "requests in flight of a process"];
    wait::until("its successor waits for them", SOON, || {
        let any = |name| waits.iter().any(|text| pair.says(name, text));
        any("b") || stopped == Stopped::Etcd && any("a")
    });
    pair.signal_with_its_daemon("a", owner, Signal::CONT);
}

/// Stops the owner, etcd or both while the store holds writes of a guest, to carry them out last.
fn stop_with_writes_in_flight(
    (namespace, etcd): (&Namespace, &Etcd),
    fence: Fence,
    stopped: Stopped,
) -> Option<()> {
    let disk = SlowDisk::mount(DISK_BYTES as usize)?;
    let mut pair = Pair::new(namespace, fence, Some(disk.path()));
    pair.cluster = format!("{fence:?}-{stopped:?}");
    let owner = pair.candidate("a");
    pair.wait_for("a", "serving");
    let other = pair.candidate("b");
    pair.wait_for("b", "waiting for key");
    let vmhost = pair.vmhost();
    let mut guest = pair.guest(&vmhost);
    let queue = guest.queue(0).unwrap();
    let slots: Vec<Slot> = (0..BLOCKS).map(|_| queue.take_slot().unwrap()).collect();
    let mut batch = 0;
    survives(queue, &slots, &mut batch, || true);

    let _releaser = disk.releaser();
    disk.hold(|request| request.operation() == Operation::Write);
    batch += 1;
    for (index, slot) in (0..BLOCKS).zip(&slots) {
        submit(queue, *slot, index, data(index, batch, BLOCK));
    }
    queue.publish().unwrap();
    disk.wait_for_held(|held| !held.is_empty());
    // A successor's writes would be carried out at once, and before these.
    disk.hold_no_more();
    stop_and_continue(&pair, &owner, etcd, stopped);
    assert!(!disk.held().is_empty(), "{fence:?}, {stopped:?}");
    disk.release();
    let done = complete_all(queue, slots.len());
    assert!(done.iter().all(|done| done.status == Status::Ok), "{done:?}");
    for index in 0..BLOCKS {
        let back = read(queue, slots[0], index, BLOCK);
        assert!(back == data(index, batch, BLOCK), "{fence:?}, {stopped:?}, block {index}");
    }
    survives(queue, &slots, &mut batch, || true);
    for index in 0..BLOCKS {
        let at = (index * u64::from(BLOCK)) as usize;
        let last = data(index, batch, BLOCK);
        assert!(disk.bytes(at, BLOCK as usize) == last, "{fence:?}, {stopped:?}, block {index}");
    }
    drop((guest, vmhost, owner, other));
    Some(())
}

#[test]
fn writes_of_an_owner_that_a_slow_store_holds_are_never_seen_later() {
    let namespace = match Namespace::new() {
        Ok(namespace) => namespace,
        Err(error) => return sidecore_skip::skip(error),
    };
    let etcd = Etcd::start(&namespace, "slow").unwrap();
    for fence in [Fence::Lock, Fence::Command] {
        for stopped in [Stopped::Owner, Stopped::Etcd, Stopped::Both] {
            if stop_with_writes_in_flight((&namespace, &etcd), fence, stopped).is_none() {
                return;
            }
        }
    }
}
