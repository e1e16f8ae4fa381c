//! A sidecore that loses its CPU to other work reports that, pauses between looks, and polls again
//! when the CPU is free.

// sidecore: runs alone, because the test needs a CPU that becomes free

#[allow(dead_code)]
mod common;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sidecore_assembly::Assembly;
use sidecore_assembly::report::SidecoreReport;
use sidecore_assembly::spec::{IdleMode, SidecoreSpec, Spec, StoreKind, StoreSpec};
use sidecore_driver::{BlkClient, Status};
use sidecore_kit::guest::{connect, read, write};
use sidecore_linux::core_time::CoreTimes;
use sidecore_linux::cpu;
use sidecore_units::CoreId;

use common::device;

const NAME: &str = "sc0";

/// Far longer than a change of state takes. The test waits for the state, not for the time.
const LIMIT: Duration = Duration::from_secs(120);

/// The CPU may be in use by other work of the machine for ever. Then the return cannot be tested.
const BUSY_LIMIT: Duration = Duration::from_secs(40);

/// The longest time in seconds that a free CPU may go unnoticed: more than the sidecore's rule
/// demands.
const FREE_SECONDS: u32 = 10;

fn report(assembly: &Assembly) -> SidecoreReport {
    assembly.stats().sidecores[0].clone()
}

/// Reads and writes until the sidecore's report is as wanted; `None` after [`LIMIT`].
fn until(
    assembly: &Assembly,
    guest: &mut BlkClient,
    is_wanted: impl Fn(&SidecoreReport) -> bool,
) -> Option<SidecoreReport> {
    let begin = Instant::now();
    let mut byte = 0_u8;
    while begin.elapsed() < LIMIT {
        let report = report(assembly);
        if is_wanted(&report) {
            return Some(report);
        }
        byte = byte.wrapping_add(1);
        assert_eq!(write(guest, 8, byte), Status::Ok);
        assert_eq!(read(guest, 8), byte);
    }
    None
}

/// The use of a CPU by other work, read once a second.
struct Neighbours {
    core: CoreId,
    times: CoreTimes,
    schedstat: PathBuf,
}

impl Neighbours {
    fn of(core: CoreId) -> Self {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
        let is_the_sidecore = |task: &PathBuf| {
            std::fs::read_to_string(task.join("comm")).unwrap_or_default().trim() == NAME
        };
        let task = tasks.into_iter().find(is_the_sidecore).expect("the sidecore's thread");
        Self { core, times: CoreTimes::open().unwrap(), schedstat: task.join("schedstat") }
    }

    /// The time that other work has used, and the time that the sidecore has waited to run, time
    /// stolen by the hypervisor below this machine included.
    fn read(&mut self) -> [u64; 2] {
        self.times.refresh().unwrap();
        let text = std::fs::read_to_string(&self.schedstat).unwrap();
        let fields: Vec<u64> =
            text.split_whitespace().map(|field| field.parse().unwrap()).collect();
        let core = self.times.of(self.core).unwrap();
        [core.used.0.saturating_sub(fields[0]), fields[1].saturating_add(core.stolen.0)]
    }

    /// Whether the CPU was free for the next second, with a margin to the sidecore's own rule.
    fn was_free_for_a_second(&mut self) -> bool {
        let before = self.read();
        std::thread::sleep(Duration::from_secs(1));
        let now = self.read();
        now[0].saturating_sub(before[0]) < 60_000_000
            && now[1].saturating_sub(before[1]) < 30_000_000
    }
}

/// Waits until the sidecore has its CPU again. False if the CPU was never free for long enough.
fn is_regained(assembly: &Assembly, core: CoreId) -> bool {
    let mut neighbours = Neighbours::of(core);
    let (begin, mut free) = (Instant::now(), 0);
    while begin.elapsed() < BUSY_LIMIT {
        if report(assembly).warning.is_none() {
            return true;
        }
        free = if neighbours.was_free_for_a_second() { free + 1 } else { 0 };
        assert!(
            free < FREE_SECONDS,
            "the CPU is free, and the sidecore does not notice: {:?}",
            report(assembly)
        );
    }
    false
}

#[test]
fn a_busy_neighbour_is_noticed_and_so_is_its_end() {
    let cores = cpu::allowed_cores().unwrap();
    let [.., ours, core] = cores[..] else {
        sidecore_skip::skip("it takes two CPUs");
        return;
    };
    // The guest stays away from the sidecore's CPU.
    cpu::pin_current_thread(ours).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut disk = device(directory.path(), "mem");
    disk.idle = IdleMode::Poll;
    let kind = StoreKind::Ram { size_bytes: 1 << 20, block_bytes: 512 };
    let spec = Spec {
        sidecores: vec![SidecoreSpec { name: NAME.to_owned(), cpu: Some(core) }],
        stores: vec![StoreSpec::new("mem", kind)],
        controllers: Vec::new(),
        devices: vec![disk],
        ..Spec::default()
    };
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[0].socket);
    // The first request is kicked, because the queue may not be polled yet.
    assert_eq!(write(&mut guest, 8, 1), Status::Ok);
    let kicks = guest.queue(0).unwrap().counters().kicks;
    let stop = AtomicBool::new(false);
    let (noticed, paused) = std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                cpu::pin_current_thread(core).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let noticed = until(&assembly, &mut guest, |sidecore| sidecore.warning.is_some());
        let asleep_ns = report(&assembly).asleep_ns;
        let paused = until(&assembly, &mut guest, |sidecore| sidecore.asleep_ns > asleep_ns);
        stop.store(true, Ordering::Relaxed);
        (noticed, paused)
    });
    let warning = noticed.and_then(|sidecore| sidecore.warning).expect("the lost CPU is noticed");
    assert!(
        warning.contains(&format!("sidecore \"{NAME}\" does not have CPU {} for itself", core.0)),
        "{warning}"
    );
    assert!(warning.contains("cpuset") && warning.contains("adaptive"), "no remedy: {warning}");
    assert!(paused.is_some(), "the sidecore still polls without a pause: {:?}", report(&assembly));
    if is_regained(&assembly, core) {
        assert_eq!(write(&mut guest, 8, 9), Status::Ok);
        let asleep_ns = report(&assembly).asleep_ns;
        assert_eq!(read(&mut guest, 8), 9);
        // The sidecore may have lost the CPU again meanwhile.
        let now = report(&assembly);
        assert!(
            now.asleep_ns == asleep_ns || now.warning.is_some(),
            "the sidecore does not poll: {now:?}"
        );
    } else {
        sidecore_skip::skip(
            "the return to polling, because other work of this machine used the CPU all the time",
        );
    }
    assert_eq!(
        guest.queue(0).unwrap().counters().kicks,
        kicks,
        "the guest of a polled disk never kicks"
    );
}
