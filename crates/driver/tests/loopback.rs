//! The driver against this project's own disk, in one thread: the waiting side polls the other.

use std::sync::Arc;

use sidecore_block::{BlockDevice, Geometry, RamStore};
use sidecore_driver::{
    BlkQueue, ClientOptions, Completion, Loopback, Notify, Operation, Piece, Slot, Status,
};
use sidecore_memory::GuestMemory;
use sidecore_reactor::{CoreContext, EventFd, IdleMode, Pollable};
use sidecore_ring::{RingFormat, RingState};
use sidecore_units::{Nanos, Sector};
use sidecore_virtio::blk::{self, BlkDevice, BlkOptions};
use sidecore_virtio::{QueueLog, QueueResources};

#[path = "loopback/dirty_log.rs"]
mod dirty_log;

const DISK_BYTES: u64 = 4 << 20;

struct Pair {
    driver: BlkQueue,
    disk: Arc<BlkDevice>,
    device: blk::BlkQueue,
    memory: GuestMemory,
    now: u64,
}

impl Pair {
    fn new(options: &ClientOptions) -> Self {
        Self::with_log(options, None)
    }

    fn with_log(options: &ClientOptions, log: Option<QueueLog>) -> Self {
        let store = RamStore::new(Geometry::new(DISK_BYTES, 512)).unwrap();
        let blk_options =
            BlkOptions { packed: true, serial: "loopback".to_owned(), ..BlkOptions::default() };
        let disk = Arc::new(BlkDevice::new("disk", blk_options, store.geometry()));
        let Loopback { queue, memory, layout, kick, call, error } =
            Loopback::new(options, disk.features()).unwrap();
        assert_eq!(layout.format == RingFormat::Packed, options.packed);
        let resources = QueueResources {
            memory: memory.clone(),
            layout,
            features: disk.features(),
            kick: Some(kick),
            call: Some(call),
            err: Some(error),
            log,
            is_enabled: true,
        };
        let channel =
            store.open_channel(&CoreContext::default(), usize::from(layout.size)).unwrap();
        let fresh = RingState::fresh(layout.format);
        let device = blk::BlkQueue::new(
            &disk,
            0,
            resources,
            fresh,
            channel,
            IdleMode::Poll,
            EventFd::peer_signal,
        )
        .unwrap();
        Self { driver: queue, disk, device, memory, now: 0 }
    }

    fn poll_device(&mut self) {
        self.now += 1000;
        self.device.poll(Nanos(self.now), 64);
    }

    fn all(&mut self, count: usize) -> Vec<Completion> {
        self.driver.publish().unwrap();
        let mut completions = Vec::new();
        for _ in 0..1000 {
            self.poll_device();
            self.driver.poll_completions(&mut completions).unwrap();
            if completions.len() == count {
                return completions;
            }
        }
        panic!("{} of {count} requests completed", completions.len());
    }

    fn one(&mut self) -> Completion {
        self.all(1)[0]
    }
}

fn every_option() -> impl Iterator<Item = ClientOptions> {
    (0..16).map(|bits| ClientOptions {
        packed: bits & 1 != 0,
        event_idx: bits & 2 != 0,
        indirect: bits & 4 != 0,
        notify: if bits & 8 != 0 { Notify::Interrupt } else { Notify::Polled },
        slots: 24,
        max_pieces: 2,
        huge_pages: false,
        ..ClientOptions::default()
    })
}

#[test]
fn blocks_come_back_as_they_were_written_whatever_the_ring() {
    for options in every_option() {
        let mut pair = Pair::new(&options);
        let slots: Vec<Slot> = std::iter::from_fn(|| pair.driver.take_slot()).collect();
        for round in 0..40_u64 {
            for slot in &slots {
                let seed = round * 24 + slot.index() as u64;
                pair.driver.write_data(*slot, 0, &[seed as u8; 4096]);
                pair.driver.submit_write(*slot, Sector(seed % 1000 * 8), 4096).unwrap();
            }
            assert!(
                pair.all(slots.len()).iter().all(|completion| completion.status == Status::Ok),
                "{options:?}"
            );
            for slot in &slots {
                let seed = round * 24 + slot.index() as u64;
                pair.driver.submit_read(*slot, Sector(seed % 1000 * 8), 4096).unwrap();
            }
            for completion in pair.all(slots.len()) {
                assert_eq!((completion.status, completion.written_bytes), (Status::Ok, 4097));
                let seed = round * 24 + completion.slot.index() as u64;
                let mut back = [0; 4096];
                pair.driver.read_data(completion.slot, 0, &mut back);
                assert!(back.iter().all(|byte| *byte == seed as u8), "{options:?}");
            }
        }
        let counters = pair.driver.counters();
        assert_eq!(counters.requests, counters.completions);
        assert!(counters.kicks <= 1, "a polled device needs no kicks: {counters:?}");
    }
}

#[test]
fn the_other_operations() {
    for options in every_option() {
        let mut pair = Pair::new(&options);
        let slot = pair.driver.take_slot().unwrap();
        pair.driver.write_data(slot, 0, &[7; 4096]);
        pair.driver.submit_write(slot, Sector(8), 4096).unwrap();
        assert_eq!(pair.one().status, Status::Ok);
        pair.driver.submit_flush(slot).unwrap();
        assert_eq!(pair.one().status, Status::Ok);
        pair.driver.submit_write_zeroes(slot, Sector(9), 2, true).unwrap();
        assert_eq!(pair.one().status, Status::Ok);
        pair.driver.submit_discard(slot, Sector(12), 1).unwrap();
        assert_eq!(pair.one().status, Status::Ok);
        let pieces = [(1024, 512), (0, 1024)]
            .map(|(offset_bytes, len_bytes)| Piece { offset_bytes, len_bytes });
        pair.driver.submit_scattered(slot, Operation::Read, Sector(8), &pieces).unwrap();
        assert_eq!(pair.one().status, Status::Ok);
        let mut back = [1; 1536];
        pair.driver.read_data(slot, 0, &mut back);
        assert!(
            back[1024..].iter().all(|byte| *byte == 7)
                && back[..1024].iter().all(|byte| *byte == 0)
        );
        pair.driver.submit_get_id(slot).unwrap();
        assert_eq!(pair.one().status, Status::Ok);
        pair.driver.read_data(slot, 0, &mut back[..8]);
        assert_eq!(&back[..8], b"loopback");
        pair.driver.submit_chain(slot, 99, Sector(0), &[]).unwrap();
        assert_eq!(pair.one().status, Status::Unsupported);
    }
}

#[test]
fn a_sleeping_driver_is_called_and_a_polling_one_is_not() {
    for options in every_option() {
        let mut pair = Pair::new(&options);
        let slot = pair.driver.take_slot().unwrap();
        // The one call that a device makes when it starts, for all it knows.
        pair.poll_device();
        pair.driver.take_calls();
        for round in 0..10 {
            pair.driver.submit_read(slot, Sector(round), 512).unwrap();
            pair.driver.publish().unwrap();
            let waits = std::time::Duration::from_millis(1);
            if options.notify == Notify::Interrupt {
                assert!(!pair.driver.wait(waits).unwrap(), "the queue is not served");
            }
            let mut completions = Vec::new();
            while pair.driver.poll_completions(&mut completions).unwrap() == 0 {
                pair.poll_device();
            }
        }
        pair.poll_device();
        assert_eq!(pair.driver.take_calls(), 0, "{options:?}");
    }
}
