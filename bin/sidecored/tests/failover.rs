//! Failover of an IOhost: two candidates for one disk, a real etcd, and a guest of a VMhost, which
//! sees pauses and no errors.

mod common;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use sidecore_control::report::DeviceState;
use sidecore_driver::{BlkClient, BlkQueue, ClientOptions, Slot, Status};
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

/// Two hosts that can serve a disk, and the directory that they share.
struct Pair {
    namespace: Namespace,
    sidecore: PathBuf,
    shared: TempDir,
}

impl Pair {
    fn config(&self, name: &str) -> String {
        let shared = self.shared.path().display();
        format!(
            "control_socket = \"{name}.sock\"\n[[sidecore]]\nname = \"io0\"\n\
             [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{shared}/wire.sock\"\n\
             [[client]]\nname = \"vmhost\"\nlinks = [\"wire\"]\n\
             [[store]]\nname = \"disk\"\ntype = \"file\"\npath = \"{shared}/disk.img\"\n\
             direct = false\n\
             [[device]]\nname = \"disk1\"\nfront_end = \"vrio\"\nclient = \"vmhost\"\n\
             store = \"disk\"\n"
        )
    }

    fn vmhost(&self) -> Daemon {
        let config = format!(
            "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"vm0\"\n\
             [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{}/wire.sock\"\n\
             [[iohost]]\nname = \"io1\"\nlink = \"wire\"\nclient = \"vmhost\"\n\
             [[store]]\nname = \"r1\"\ntype = \"remote\"\niohost = \"io1\"\ndevice = \"disk1\"\n\
             [[device]]\nname = \"vd0\"\nstore = \"r1\"\nsocket = \"vd0.sock\"\n",
            self.shared.path().display()
        );
        Daemon::start(tempfile::tempdir().unwrap(), &config)
    }

    fn candidate(&self, name: &str) -> Process {
        let shared = self.shared.path();
        let config = shared.join(format!("{name}.toml"));
        std::fs::write(&config, self.config(name)).unwrap();
        let log = File::create(shared.join(name)).unwrap();
        let mut command = self.namespace.command(self.sidecore.as_ref());
        command.args(["own", "disk", "--name", name, "--lease", "3", "--fence-lock"]);
        command.args(["--etcd", &Etcd::endpoints(), "--record"]).arg(shared.join("disk.owner"));
        command.arg("--path").arg(shared.join("disk.img"));
        command.args(["--", env!("CARGO_BIN_EXE_sidecored"), "--config"]).arg(config);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Process::start(&mut command).unwrap()
    }

    /// Whether this is the newest state of a candidate.
    fn is(&self, name: &str, state: &str) -> bool {
        let log = std::fs::read_to_string(self.shared.path().join(name)).unwrap();
        let newest = log.lines().rfind(|line| line.contains("own: disk: "));
        newest.is_some_and(|line| line.contains(&format!("disk: {state}")))
    }

    fn wait_for(&self, name: &str, state: &str) {
        wait::until(state, SOON, || self.is(name, state));
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
    let shared = tempfile::tempdir().unwrap();
    File::create(shared.path().join("disk.img")).unwrap().set_len(DISK_BYTES).unwrap();
    let pair = Pair { namespace, sidecore: sidecore(), shared };
    let mut names = ["a", "b"];
    let mut owner = pair.candidate(names[0]);
    pair.wait_for(names[0], "serving");
    let mut other = pair.candidate(names[1]);
    pair.wait_for(names[1], "waiting for key");

    let vmhost = pair.vmhost();
    let control = vmhost.client();
    wait::until("the remote device is attached", SOON, || {
        control.devices().unwrap()[0].state == DeviceState::Waiting
    });
    let socket = vmhost.directory.path().join("vd0.sock");
    let mut guest = BlkClient::connect(socket, &ClientOptions::default()).unwrap();
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
