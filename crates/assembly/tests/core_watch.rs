//! A sidecore whose CPU others use notices that, says so, and polls again when it has the CPU for itself.

#[allow(dead_code)]
mod common;
#[path = "common/guest.rs"]
mod guest;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sidecore_assembly::Assembly;
use sidecore_assembly::report::SidecoreReport;
use sidecore_assembly::spec::{IdleMode, SidecoreSpec, Spec, StoreKind, StoreSpec};
use sidecore_driver::{BlkClient, Status};
use sidecore_linux::core_time::core_times;
use sidecore_linux::cpu;
use sidecore_units::CoreId;

use common::device;
use guest::{connect, read, write};

/// Longer than any of it can take: the state is waited for.
const LIMIT: Duration = Duration::from_secs(120);

/// Reads and writes until the sidecore's report is like that; false if the limit is over before.
fn until(assembly: &Assembly, guest: &mut BlkClient, like: impl Fn(&SidecoreReport) -> bool) -> bool {
    let begin = Instant::now();
    for round in 0_u64.. {
        if like(&assembly.stats().sidecores[0]) {
            return true;
        }
        if begin.elapsed() > LIMIT {
            return false;
        }
        let byte = round as u8;
        assert_eq!(write(guest, 8, byte), Status::Ok);
        assert_eq!(read(guest, 8), byte);
    }
    false
}

/// The share of the last second in which something used the CPU, the sidecore's own part left out.
fn others_share(assembly: &Assembly, core: CoreId) -> f64 {
    let look = || {
        let sidecore = &assembly.stats().sidecores[0];
        (core_times(&[core]).unwrap()[0].used.0, sidecore.busy_ns)
    };
    let before = look();
    std::thread::sleep(Duration::from_secs(1));
    let now = look();
    now.0.saturating_sub(before.0).saturating_sub(now.1.saturating_sub(before.1)) as f64 / 1e9
}

#[test]
fn it_notices_busy_neighbours_and_that_they_are_gone() {
    let cores = cpu::allowed_cores().unwrap();
    let [.., ours, core] = cores[..] else {
        eprintln!("skipped: it takes two CPUs");
        return;
    };
    // The guest stays away from the sidecore's CPU.
    cpu::pin_current_thread(ours).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut disk = device(directory.path(), "mem");
    disk.idle = IdleMode::Poll;
    let kind = StoreKind::Ram { size_bytes: 1 << 20, block_bytes: 512 };
    let spec = Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: Some(core) }],
        stores: vec![StoreSpec { name: "mem".to_owned(), kind }],
        controllers: Vec::new(),
        devices: vec![disk],
    };
    let assembly = Assembly::start(&spec).unwrap();
    let mut guest = connect(&spec.devices[0].socket);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                cpu::pin_current_thread(core).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let noticed = until(&assembly, &mut guest, |sidecore| sidecore.warning.is_some());
        let asleep_ns = assembly.stats().sidecores[0].asleep_ns;
        let sleeps = noticed && until(&assembly, &mut guest, |sidecore| sidecore.asleep_ns > asleep_ns);
        stop.store(true, Ordering::Relaxed);
        assert!(noticed, "nobody noticed: {:?}", assembly.stats().sidecores);
        assert!(sleeps, "it goes on polling: {:?}", assembly.stats().sidecores);
    });
    let warning = assembly.stats().sidecores[0].warning.clone().unwrap_or_default();
    assert!(warning.contains(&format!("does not have CPU {}", core.0)) || warning.is_empty(), "{warning}");
    let begin = Instant::now();
    while assembly.stats().sidecores[0].warning.is_some() && begin.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(10));
    }
    if assembly.stats().sidecores[0].warning.is_some() {
        let share = others_share(&assembly, core);
        assert!(share > 0.05, "its core is free, and it does not notice: {:?}", assembly.stats().sidecores);
        eprintln!("skipped: its way back, because this machine is busy with something else");
    }
    assert_eq!(write(&mut guest, 8, 9), Status::Ok);
    assert_eq!(read(&mut guest, 8), 9);
}
