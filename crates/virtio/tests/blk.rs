//! A block queue from ring to store and back: every request type, both ring formats, and drivers
//! that lie.

use std::os::fd::BorrowedFd;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc;

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, Geometry, Operation, RamStore, Readiness,
    dropped_tags,
};
use sidecore_block_contract::Asking;
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};
use sidecore_reactor::{Arm, CoreContext, EventFd, IdleMode, Pollable, Polled, Unit};
use sidecore_ring::driver::{Buffer, DriverRing, RawDescriptor, RawRing};
use sidecore_ring::{RingFormat, RingLayout, RingState};
use sidecore_spec_virtio::blk::feature;
use sidecore_spec_virtio::blk::request_type::{DISCARD, FLUSH, GET_ID, IN, OUT, WRITE_ZEROES};
use sidecore_spec_virtio::{descriptor, feature as features};
use sidecore_units::Nanos;
use sidecore_virtio::blk::{BlkDevice, BlkOptions, BlkQueue};
use sidecore_virtio::{QueueResources, StartError};

const MEMORY_BYTES: u64 = 1 << 20;
const DISK_BYTES: u64 = 1 << 20;
const HEADER: u64 = 0x4_0000;
const STATUS: u64 = 0x4_1000;
const DATA: u64 = 0x5_0000;
const SIZE: u16 = 8;

fn memory() -> (GuestMemory, std::fs::File) {
    let file = std::fs::File::from(
        rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap(),
    );
    file.set_len(MEMORY_BYTES).unwrap();
    let spec = RegionSpec {
        guest_address: GuestAddress(0),
        user_address: UserAddress(0),
        len_bytes: MEMORY_BYTES,
        file: file.try_clone().unwrap().into(),
        file_offset_bytes: 0,
    };
    (GuestMemory::map(vec![spec]).unwrap(), file)
}

/// A driver, a disk, and one queue between them.
struct Rig {
    memory: GuestMemory,
    file: std::fs::File,
    device: Arc<BlkDevice>,
    queue: BlkQueue,
    driver: DriverRing,
    layout: RingLayout,
    kick: EventFd,
    call: EventFd,
    err: EventFd,
    now: u64,
    /// Requests that came back.
    answered: u32,
}

fn duplicate(event: &EventFd) -> Option<OwnedFd> {
    use std::os::fd::AsFd;
    Some(event.as_fd().try_clone_to_owned().unwrap())
}

struct Setup {
    format: RingFormat,
    store: Arc<dyn BlockDevice>,
    options: BlkOptions,
    /// Features that the driver refuses.
    refused: u64,
    mode: IdleMode,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            format: RingFormat::Split,
            store: Arc::new(RamStore::new(Geometry::new(DISK_BYTES, 512)).unwrap()),
            options: BlkOptions {
                serial: "serial-0123456789abcdef".into(),
                ..BlkOptions::default()
            },
            refused: 0,
            mode: IdleMode::Interrupt,
        }
    }
}

impl Rig {
    fn new(setup: Setup) -> Self {
        let (memory, file) = memory();
        let device = Arc::new(BlkDevice::new("disk", setup.options, setup.store.geometry()));
        let layout = RingLayout {
            event_idx: true,
            indirect: true,
            ..RingLayout::compact(UserAddress(0), setup.format, SIZE)
        };
        let (kick, call, err) =
            (EventFd::new().unwrap(), EventFd::new().unwrap(), EventFd::new().unwrap());
        let resources = QueueResources {
            memory: memory.clone(),
            layout,
            features: device.features() & !setup.refused,
            kick: duplicate(&kick),
            call: duplicate(&call),
            err: duplicate(&err),
            log: None,
            is_enabled: true,
        };
        let layout_for_driver = RingLayout { indirect: false, ..layout };
        let driver = DriverRing::new(&memory, &layout_for_driver, 2, 4, None).unwrap();
        let channel = setup.store.open_channel(&CoreContext::default(), SIZE.into()).unwrap();
        let state = RingState::fresh(setup.format);
        let queue =
            BlkQueue::new(&device, 0, resources, state, channel, setup.mode, EventFd::peer_signal)
                .unwrap();
        Self { memory, file, device, queue, driver, layout, kick, call, err, now: 0, answered: 0 }
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        self.memory.write_slice(GuestAddress(address), bytes, &mut RegionHint::default()).unwrap();
    }

    fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory
            .read_slice(GuestAddress(address), &mut bytes, &mut RegionHint::default())
            .unwrap();
        bytes
    }

    fn header(&self, kind: u32, sector: u64) {
        self.write(HEADER, &kind.to_le_bytes());
        self.write(HEADER + 4, &[0; 4]);
        self.write(HEADER + 8, &sector.to_le_bytes());
        self.write(STATUS, &[0xff]);
    }

    fn poll(&mut self) -> Polled {
        self.now += 100;
        self.queue.poll(Nanos(self.now), 64)
    }

    /// One request of these buffers: its status byte, and what the ring says was written.
    fn run(&mut self, chain: &[Buffer]) -> Option<(u8, u32)> {
        self.driver.describe(0, chain).unwrap();
        self.driver.push(0).unwrap();
        self.driver.publish();
        for _ in 0..4 {
            self.poll();
        }
        let used = self.driver.pop().unwrap()?;
        self.answered += 1;
        Some((self.read(STATUS, 1)[0], used.written_bytes))
    }

    fn request(&mut self, kind: u32, sector: u64, data: &[Buffer]) -> Option<(u8, u32)> {
        self.header(kind, sector);
        let mut chain = vec![Buffer::to_device(HEADER, 16)];
        chain.extend_from_slice(data);
        chain.push(Buffer::from_device(STATUS, 1));
        self.run(&chain)
    }

    fn raw(&self) -> RawRing {
        RawRing::new(&self.memory, &self.layout).unwrap()
    }
}

#[test]
fn what_is_written_is_read_back_in_both_formats_and_any_framing() {
    for format in [RingFormat::Split, RingFormat::Packed] {
        let mut rig = Rig::new(Setup {
            format,
            options: BlkOptions { packed: true, ..BlkOptions::default() },
            ..Setup::default()
        });
        let pattern: Vec<u8> = (0..4096_u32).map(|i| (i * 7 % 251) as u8).collect();
        rig.write(DATA, &pattern);
        let pieces = [Buffer::to_device(DATA, 512), Buffer::to_device(DATA + 512, 3584)];
        assert_eq!(rig.request(OUT, 3, &pieces), Some((0, 1)), "{format:?}");
        rig.write(DATA, &[0; 4096]);
        let odd = [Buffer::from_device(DATA, 1), Buffer::from_device(DATA + 1, 4095)];
        assert_eq!(rig.request(IN, 3, &odd), Some((0, 4097)), "{format:?}");
        assert_eq!(rig.read(DATA, 4096), pattern);
        // Header, data and status need not have buffers of their own (2.7.4.2).
        rig.header(OUT, 100);
        rig.write(HEADER + 16, &pattern[..1024]);
        let merged = [
            Buffer::to_device(HEADER, 10),
            Buffer::to_device(HEADER + 10, 1030),
            Buffer::from_device(STATUS, 1),
        ];
        assert_eq!(rig.run(&merged), Some((0, 1)));
        rig.header(IN, 100);
        let merged = [Buffer::to_device(HEADER, 16), Buffer::from_device(STATUS - 1024, 1025)];
        assert_eq!(rig.run(&merged), Some((0, 1025)));
        assert_eq!(rig.read(STATUS - 1024, 1024), &pattern[..1024]);
    }
}

#[test]
fn the_other_requests_do_what_they_are_for() {
    let mut rig = Rig::new(Setup::default());
    assert_eq!(rig.request(FLUSH, 0, &[]), Some((0, 1)));
    assert_eq!(rig.request(GET_ID, 0, &[Buffer::from_device(DATA, 20)]), Some((0, 21)));
    assert_eq!(rig.read(DATA, 20), b"serial-0123456789abc");
    rig.write(DATA, &[7; 1024]);
    rig.request(OUT, 8, &[Buffer::to_device(DATA, 1024)]).unwrap();
    for kind in [DISCARD, WRITE_ZEROES] {
        rig.write(DATA, &8_u64.to_le_bytes());
        rig.write(DATA + 8, &1_u32.to_le_bytes());
        rig.write(DATA + 12, &0_u32.to_le_bytes());
        assert_eq!(rig.request(kind, 0, &[Buffer::to_device(DATA, 16)]), Some((0, 1)));
        rig.request(IN, 8, &[Buffer::from_device(DATA, 1024)]).unwrap();
        assert_eq!(rig.read(DATA, 512), [0; 512]);
        assert_eq!(rig.read(DATA + 512, 512), [7; 512], "only what was asked for");
    }
    let stats = rig.device.queue_stats(0).unwrap();
    assert_eq!(stats.flushes.get(), 1);
    assert_eq!((stats.discards.get(), stats.write_zeroes.get()), (1, 1));
    assert_eq!((stats.bytes_read.get(), stats.bytes_written.get()), (2048, 1024));
    assert_eq!(stats.rejected.get(), 0);
}

#[test]
fn what_the_specification_has_a_status_for_gets_it() {
    let mut rig = Rig::new(Setup::default());
    let page = [Buffer::to_device(DATA, 512)];
    assert_eq!(rig.request(99, 0, &[]), Some((2, 1)), "an unknown type");
    assert_eq!(rig.request(IN, 0, &[]), Some((1, 1)), "a read of nothing");
    assert_eq!(
        rig.request(OUT, 0, &[Buffer::to_device(DATA, 100)]),
        Some((1, 1)),
        "not whole blocks"
    );
    assert_eq!(
        rig.request(GET_ID, 0, &[Buffer::from_device(DATA, 19)]),
        Some((1, 1)),
        "no room for the id"
    );
    assert_eq!(rig.request(DISCARD, 0, &page), Some((1, 1)), "more segments than one");
    let mut clear = |flags: u32, sectors: u32, kind: u32| {
        rig.write(DATA, &0_u64.to_le_bytes());
        rig.write(DATA + 8, &sectors.to_le_bytes());
        rig.write(DATA + 12, &flags.to_le_bytes());
        rig.request(kind, 0, &[Buffer::to_device(DATA, 16)]).unwrap().0
    };
    assert_eq!(clear(1, 1, DISCARD), 2, "unmap in a discard");
    assert_eq!(clear(2, 1, WRITE_ZEROES), 2, "an unknown flag");
    assert_eq!(clear(0, 0, WRITE_ZEROES), 1, "no sectors");
    assert!(rig.device.broken().is_none(), "none of this breaks the device");
    assert_eq!(rig.device.queue_stats(0).unwrap().rejected.get(), 8);

    let options = BlkOptions { read_only: true, ..BlkOptions::default() };
    let mut rig = Rig::new(Setup { options, ..Setup::default() });
    assert_eq!(rig.request(OUT, 0, &page), Some((1, 1)), "a write to a read-only disk");
    assert_eq!(
        rig.request(DISCARD, 0, &[Buffer::to_device(DATA, 16)]),
        Some((2, 1)),
        "not offered"
    );

    let store = Arc::new(RamStore::new(Geometry::new(DISK_BYTES, 4096)).unwrap());
    let mut rig = Rig::new(Setup { store, ..Setup::default() });
    assert_eq!(rig.request(OUT, 1, &page), Some((1, 1)), "half a block");
}

type Lie = (&'static str, &'static str, fn(&mut Rig));

/// Requests that no driver may make, with a word of the reason that the device then gives.
const LIES: &[Lie] = &[
    ("a read past the end", "past the capacity", |rig| {
        rig.request(IN, DISK_BYTES / 512 - 1, &[Buffer::from_device(DATA, 1024)]);
    }),
    ("a sector whose offset overflows", "past the capacity", |rig| {
        rig.request(OUT, u64::MAX, &[Buffer::to_device(DATA, 512)]);
    }),
    ("a discard past the end", "past the capacity", |rig| {
        rig.write(DATA, &(DISK_BYTES / 512).to_le_bytes());
        rig.write(DATA + 8, &1_u32.to_le_bytes());
        rig.write(DATA + 12, &0_u32.to_le_bytes());
        rig.request(DISCARD, 0, &[Buffer::to_device(DATA, 16)]);
    }),
    ("a buffer outside of memory", "outside guest memory", |rig| {
        rig.request(IN, 0, &[Buffer::from_device(MEMORY_BYTES - 256, 512)]);
    }),
    ("a buffer that wraps around", "outside guest memory", |rig| {
        rig.request(IN, 0, &[Buffer::from_device(u64::MAX - 255, 512)]);
    }),
    ("a status outside of memory", "outside guest memory", |rig| {
        rig.header(FLUSH, 0);
        rig.run(&[Buffer::to_device(HEADER, 16), Buffer::from_device(MEMORY_BYTES, 1)]);
    }),
    ("a header outside of memory", "outside guest memory", |rig| {
        rig.run(&[Buffer::to_device(MEMORY_BYTES, 16), Buffer::from_device(STATUS, 1)]);
    }),
    ("a header of 15 bytes", "15 bytes", |rig| {
        rig.run(&[Buffer::to_device(HEADER, 15), Buffer::from_device(STATUS, 1)]);
    }),
    ("no status", "without room for its status", |rig| {
        rig.run(&[Buffer::to_device(HEADER, 16)]);
    }),
    ("a read that brings data", "readable data", |rig| {
        rig.request(IN, 0, &[Buffer::to_device(DATA, 512)]);
    }),
    ("a write that wants data", "writable data", |rig| {
        rig.request(OUT, 0, &[Buffer::from_device(DATA, 512)]);
    }),
    ("a flush that wants data", "writable data", |rig| {
        rig.request(FLUSH, 0, &[Buffer::from_device(DATA, 512)]);
    }),
    ("a segment over size_max", "size_max is 4096", |rig| {
        rig.request(IN, 0, &[Buffer::from_device(DATA, 4608)]);
    }),
    ("an index that jumps", "jumped", |rig| {
        rig.raw().set_available_index(SIZE + 1);
        rig.poll();
    }),
    ("a chain that loops", "looping", |rig| {
        let entry =
            RawDescriptor { address: DATA, len_bytes: 16, flags: descriptor::NEXT, next_or_id: 0 };
        rig.raw().set_descriptor(0, entry);
        rig.raw().set_available_index(1);
        rig.poll();
    }),
    ("memory that shrinks", "truncated", |rig| {
        rig.header(FLUSH, 0);
        rig.driver
            .describe(0, &[Buffer::to_device(HEADER, 16), Buffer::from_device(STATUS, 1)])
            .unwrap();
        rig.driver.push(0).unwrap();
        rig.driver.publish();
        // The ring's first pages stay: the device finds the request, then nothing behind it.
        rig.file.set_len(0x1000).unwrap();
        rig.poll();
    }),
];

#[test]
fn a_lying_driver_breaks_its_device_and_a_reset_brings_it_back() {
    for (name, word, lie) in LIES {
        let options = BlkOptions { size_max_bytes: Some(4096), ..BlkOptions::default() };
        let mut rig = Rig::new(Setup { options, ..Setup::default() });
        lie(&mut rig);
        let reason = rig.device.broken().unwrap_or_else(|| panic!("{name}: the device goes on"));
        assert!(reason.contains(word), "{name}: {reason}");
        assert_eq!(rig.err.drain(), 1, "{name}: the guest is told");
        assert_eq!(rig.answered, 0, "{name}: an answer without a status could pass for a good one");
        for _ in 0..3 {
            assert_eq!(rig.poll(), Polled::Idle, "{name}: it has stopped");
        }
        assert_eq!(rig.queue.arm(), Arm::Armed, "{name}: and does not spin");
        let (reply, answer) = mpsc::channel();
        rig.queue.stop(Box::new(move |state| reply.send(state).unwrap()));
        assert_eq!(rig.poll(), Polled::Finished);
        Box::new(rig.queue).finish();
        answer.try_recv().expect("a broken queue hands its state back");
        rig.device.reset();
        assert!(rig.device.broken().is_none());
    }
    assert_eq!(dropped_tags(), 0);
}

#[test]
fn calls_come_after_the_batch_and_only_if_wanted() {
    let mut rig = Rig::new(Setup::default());
    rig.poll();
    rig.call.drain();
    assert!(!rig.driver.arm_calls());
    rig.request(FLUSH, 0, &[]).unwrap();
    assert_eq!(rig.call.drain(), 1);
    rig.driver.suppress_calls();
    for _ in 0..1000 {
        rig.request(FLUSH, 0, &[]).unwrap();
    }
    assert_eq!(rig.call.drain(), 0);
    assert_eq!(rig.device.queue_stats(0).unwrap().interrupts.get(), 1);
    // A call descriptor that replaces another is signalled: the old one may have been missed.
    rig.queue.set_call(Some(EventFd::peer_signal(std::os::fd::AsFd::as_fd(&rig.call)).unwrap()));
    assert_eq!(rig.call.drain(), 1);
}

#[test]
fn arming_notices_work_that_came_before() {
    let mut rig = Rig::new(Setup::default());
    rig.header(FLUSH, 0);
    rig.driver
        .describe(0, &[Buffer::to_device(HEADER, 16), Buffer::from_device(STATUS, 1)])
        .unwrap();
    assert_eq!(rig.poll(), Polled::Idle);
    rig.driver.push(0).unwrap();
    rig.driver.publish();
    assert!(!rig.driver.kick_wanted(), "it is still polling");
    assert_eq!(rig.queue.arm(), Arm::WorkPending);
    assert_eq!(rig.poll(), Polled::Busy(1));
    rig.driver.pop().unwrap().unwrap();
    rig.poll();
    assert_eq!(rig.queue.arm(), Arm::Armed);
    rig.driver.push(0).unwrap();
    rig.driver.publish();
    assert!(rig.driver.kick_wanted());
    rig.kick.signal();
    rig.queue.on_wake();
    assert_eq!(rig.device.queue_stats(0).unwrap().kicks.get(), 1);
}

/// Takes requests and completes them when told to, as a disk does.
#[derive(Default)]
struct SlowDisk {
    held: Batch,
    log: Arc<std::sync::Mutex<Vec<Operation>>>,
    open: Arc<std::sync::atomic::AtomicBool>,
    error: Option<BlockError>,
}

struct SlowStore(
    Arc<std::sync::Mutex<Vec<Operation>>>,
    Arc<std::sync::atomic::AtomicBool>,
    Option<BlockError>,
);

impl BlockDevice for SlowStore {
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..Geometry::new(DISK_BYTES, 512) }
    }
    fn open_channel(
        &self,
        _core: &CoreContext,
        _depth: usize,
    ) -> std::io::Result<Box<dyn BlockChannel>> {
        Ok(Box::new(SlowDisk {
            held: vec![],
            log: self.0.clone(),
            open: self.1.clone(),
            error: self.2,
        }))
    }
}

impl BlockChannel for SlowDisk {
    fn submit(&mut self, _now: Nanos, batch: &mut Batch) {
        for request in batch.iter() {
            self.log.lock().unwrap().push(request.operation);
        }
        self.held.append(batch);
    }
    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        if self.open.load(std::sync::atomic::Ordering::Relaxed) {
            for mut request in self.held.drain(..) {
                request.result = self.error.map_or(Ok(()), Err);
                completed.push(request);
            }
        }
    }
    fn readiness(&self) -> Readiness {
        Readiness::polled(self.held.len())
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

fn slow(error: Option<BlockError>) -> (Arc<SlowStore>, Arc<std::sync::Mutex<Vec<Operation>>>) {
    let log = Arc::default();
    let open = Arc::new(std::sync::atomic::AtomicBool::new(true));
    (Arc::new(SlowStore(Arc::clone(&log), open, error)), log)
}

#[test]
fn without_a_cache_a_write_is_flushed_before_it_completes() {
    let page = [Buffer::to_device(DATA, 512)];
    // The driver turns the cache off.
    let (store, log) = slow(None);
    let mut rig = Rig::new(Setup { store, ..Setup::default() });
    rig.request(OUT, 0, &page).unwrap();
    assert_eq!(*log.lock().unwrap(), [Operation::Write]);
    rig.device.write_config(32, &[0]).unwrap();
    assert_eq!(rig.request(OUT, 0, &page), Some((0, 1)));
    assert_eq!(*log.lock().unwrap(), [Operation::Write, Operation::Write, Operation::Flush]);
    assert_eq!(rig.device.queue_stats(0).unwrap().flushes.get(), 0, "the guest asked for none");
    // A driver that cannot flush never gets a cache.
    let (store, log) = slow(None);
    let mut rig = Rig::new(Setup { store, refused: feature::FLUSH, ..Setup::default() });
    rig.request(OUT, 0, &page).unwrap();
    assert_eq!(*log.lock().unwrap(), [Operation::Write, Operation::Flush]);
    // Only that byte of the configuration is writable.
    assert!(rig.device.write_config(0, &[1]).is_err());
    assert!(rig.device.write_config(32, &[1, 0]).is_err());
}

#[test]
fn a_failing_store_fails_that_request_and_is_counted() {
    for (error, status) in
        [(BlockError::EIO, 1), (BlockError::NoSpace, 1), (BlockError::Unsupported, 2)]
    {
        let (store, _) = slow(Some(error));
        let mut rig = Rig::new(Setup { store, ..Setup::default() });
        assert_eq!(rig.request(OUT, 0, &[Buffer::to_device(DATA, 512)]), Some((status, 1)));
        assert_eq!(rig.device.queue_stats(0).unwrap().errors.get(), 1);
        assert!(rig.device.broken().is_none());
    }
}

#[test]
fn an_idle_queue_polls_a_store_that_asks_for_it_and_then_sleeps() {
    let store = Asking::new(Setup::default().store);
    let mut rig = Rig::new(Setup { store: Arc::clone(&store) as _, ..Setup::default() });
    assert_eq!((rig.poll(), rig.queue.arm()), (Polled::Idle, Arm::Armed));
    store.ask();
    assert_eq!(rig.queue.arm(), Arm::CannotSleep);
    assert_eq!((rig.poll(), rig.queue.arm()), (Polled::Idle, Arm::Armed));
    assert!(!store.asks());
    // Its descriptor has woken the sidecore, and would again.
    store.signal();
    rig.queue.on_wake();
    assert_eq!((rig.poll(), rig.queue.arm()), (Polled::Idle, Arm::Armed));
    assert!(store.is_quiet());
}

#[test]
fn a_queue_that_never_sleeps_polls_a_store_that_asks_for_it() {
    let store = Asking::new(Setup::default().store);
    let setup = Setup { store: Arc::clone(&store) as _, mode: IdleMode::Poll, ..Setup::default() };
    let mut rig = Rig::new(setup);
    store.ask();
    for _ in 0..1025 {
        assert_eq!(rig.poll(), Polled::Idle);
    }
    assert!(!store.asks());
}

#[test]
fn stopping_waits_for_what_is_in_flight_and_takes_nothing_new() {
    let (store, log) = slow(None);
    let open = store.1.clone();
    open.store(false, std::sync::atomic::Ordering::Relaxed);
    let mut rig = Rig::new(Setup { store, ..Setup::default() });
    assert_eq!(rig.request(OUT, 0, &[Buffer::to_device(DATA, 512)]), None, "in flight");
    let (reply, answer) = mpsc::channel();
    rig.queue.stop(Box::new(move |state| reply.send(state).unwrap()));
    rig.driver
        .describe(1, &[Buffer::to_device(HEADER, 16), Buffer::from_device(STATUS + 1, 1)])
        .unwrap();
    rig.driver.push(1).unwrap();
    rig.driver.publish();
    for _ in 0..3 {
        assert_ne!(rig.poll(), Polled::Finished);
    }
    assert_eq!(rig.queue.arm(), Arm::CannotSleep, "this store has no wake descriptor");
    open.store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(rig.poll(), Polled::Finished);
    Box::new(rig.queue).finish();
    assert_eq!(answer.try_recv().unwrap(), RingState { next_avail: 1, next_used: 1 });
    assert_eq!(log.lock().unwrap().len(), 1, "the second request is still the ring's");
    assert_eq!(rig.driver.pop().unwrap().unwrap().slot, 0);
}

/// A guest with large requests does not keep the others on its sidecore waiting for all of them.
#[test]
fn a_poll_takes_so_many_bytes_and_no_more() {
    // The limit is 512 KiB, and the request that passes it is still taken.
    for (len_bytes, at_once) in [(300 << 10, 2), (600 << 10, 1)] {
        let (store, log) = slow(None);
        let mut rig = Rig::new(Setup { store, ..Setup::default() });
        for slot in 0..2 {
            let header = HEADER + u64::from(slot) * 0x100;
            rig.write(header, &OUT.to_le_bytes());
            rig.write(header + 4, &[0; 12]);
            let status = Buffer::from_device(STATUS + u64::from(slot), 1);
            let chain = [Buffer::to_device(header, 16), Buffer::to_device(DATA, len_bytes), status];
            rig.driver.describe(slot, &chain).unwrap();
            rig.driver.push(slot).unwrap();
        }
        rig.driver.publish();
        rig.poll();
        assert_eq!(log.lock().unwrap().len(), at_once, "requests of {len_bytes} bytes");
        rig.poll();
        assert_eq!(log.lock().unwrap().len(), 2);
    }
}

#[test]
fn a_queue_that_cannot_be_started_says_why() {
    let (memory, _file) = memory();
    let store = RamStore::new(Geometry::new(DISK_BYTES, 512)).unwrap();
    let device = Arc::new(BlkDevice::new("disk", BlkOptions::default(), store.geometry()));
    let start = |index: u16, size: u16, kick: Option<OwnedFd>| {
        let resources = QueueResources {
            memory: memory.clone(),
            layout: RingLayout {
                format: RingFormat::Split,
                size,
                descriptor_area: UserAddress(0),
                driver_area: UserAddress(0x1000),
                device_area: UserAddress(0x2000),
                event_idx: false,
                indirect: false,
            },
            features: features::VERSION_1,
            kick,
            call: None,
            err: None,
            log: None,
            is_enabled: true,
        };
        let channel = store.open_channel(&CoreContext::default(), size.into()).unwrap();
        let state = RingState::fresh(RingFormat::Split);
        BlkQueue::new(
            &device,
            index,
            resources,
            state,
            channel,
            IdleMode::Poll,
            EventFd::peer_signal,
        )
        .err()
    };
    assert!(start(0, 8, None).is_none());
    assert!(matches!(
        start(1, 8, None),
        Some(StartError::NoSuchQueue { index: 1, queue_count: 1 })
    ));
    assert!(matches!(start(0, 7, None), Some(StartError::Ring { .. })));
    let not_an_eventfd = std::fs::File::open("/dev/null").unwrap().into();
    assert!(matches!(start(0, 8, Some(not_an_eventfd)), Some(StartError::Io { .. })));
}
