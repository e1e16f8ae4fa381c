//! Stores that lie and fail, and guests on a stage in front of them.

#![allow(dead_code)]

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, Findings, FindingsCounts, Geometry,
    Operation, Readiness,
};
use sidecore_block_contract::{Harness, pattern};
use sidecore_memory::GuestMemory;
use sidecore_reactor::CoreContext;
use sidecore_stage_integrity::{IntegrityStore, OpenOptions};
use sidecore_units::Nanos;

use super::{formatted, ram};

pub const BLOCK: u64 = 4096;
pub const STORE_BYTES: u64 = 5 << 20;
/// The guest's memory in one piece.
pub const SCRATCH: u64 = 0x1_0000_0000;
pub const BAD: Result<(), BlockError> = Err(BlockError::Io { errno: 84 });

/// A fault of the next write of a block's data.
#[derive(Clone, Copy, Debug)]
pub enum Lie {
    /// It is answered, and lost.
    Lost,
    /// Only so many bytes of it are written.
    Torn(u64),
    /// It is written so many bytes behind its place.
    Misdirected(u64),
}

/// Whether a request fails.
pub type Fails = Box<dyn Fn(&BlockRequest) -> bool + Send>;

/// The faults of a store.
#[derive(Default)]
pub struct Tricks {
    /// A fault of a write that begins at this byte.
    pub lie: Mutex<Option<(u64, Lie)>>,
    pub fails: Mutex<Option<Fails>>,
    pub is_read_only: AtomicBool,
}

/// A store that lies about some writes, and fails some requests.
pub struct Liar {
    pub below: Arc<dyn BlockDevice>,
    pub tricks: Arc<Tricks>,
}

struct LiarChannel {
    inner: Box<dyn BlockChannel>,
    tricks: Arc<Tricks>,
    done: Batch,
}

impl BlockDevice for Liar {
    fn geometry(&self) -> Geometry {
        let read_only = self.tricks.is_read_only.load(Ordering::Relaxed);
        Geometry { read_only, ..self.below.geometry() }
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let inner = self.below.open_channel(core, depth)?;
        Ok(Box::new(LiarChannel { inner, tricks: Arc::clone(&self.tricks), done: Batch::new() }))
    }
}

/// Carries out one request.
fn carry_out(channel: &mut dyn BlockChannel, request: Box<BlockRequest>) -> Box<BlockRequest> {
    let (mut batch, mut completed) = (vec![request], Batch::new());
    while completed.is_empty() {
        channel.exchange(Nanos::ZERO, &mut batch, &mut completed);
    }
    completed.remove(0)
}

impl BlockChannel for LiarChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.inner.attach_memory(memory)
    }

    fn submit(&mut self, _: Nanos, batch: &mut Batch) {
        for mut request in batch.drain(..) {
            let (at, len_bytes) = (request.offset_bytes, request.len_bytes);
            if self.tricks.fails.lock().unwrap().as_ref().is_some_and(|fails| fails(&request)) {
                request.result = Err(BlockError::EIO);
                self.done.push(request);
                continue;
            }
            let mut lie = self.tricks.lie.lock().unwrap();
            let strikes = request.operation == Operation::Write
                && lie.as_ref().is_some_and(|(place, _)| *place == at);
            let lie = if strikes { lie.take().map(|(_, lie)| lie) } else { None };
            let mut whole = BlockRequest::blank(4);
            match lie {
                Some(Lie::Lost) => {
                    self.done.push(request);
                    continue;
                }
                Some(Lie::Torn(bytes)) => {
                    whole.segments.bind_part(&request.segments, 0, len_bytes);
                    let part = bytes.min(len_bytes);
                    request.segments.bind_part(&whole.segments, 0, part);
                    request.len_bytes = part;
                }
                Some(Lie::Misdirected(bytes)) => request.offset_bytes += bytes,
                None => {}
            }
            let mut request = carry_out(&mut *self.inner, request);
            if matches!(lie, Some(Lie::Torn(_))) {
                request.segments.bind_part(&whole.segments, 0, len_bytes);
            }
            (request.offset_bytes, request.len_bytes) = (at, len_bytes);
            self.done.push(request);
        }
    }

    fn poll(&mut self, _: Nanos, completed: &mut Batch) {
        completed.append(&mut self.done);
    }

    fn readiness(&self) -> Readiness {
        Readiness::polled(self.done.len())
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A store with checksums in front of one that lies.
pub struct Bench {
    /// The store without its faults.
    pub honest: Arc<dyn BlockDevice>,
    pub below: Arc<dyn BlockDevice>,
    pub tricks: Arc<Tricks>,
    pub device: Arc<dyn BlockDevice>,
    pub findings: Arc<Findings>,
    pub data_at: u64,
}

pub fn stage(below: &Arc<dyn BlockDevice>) -> (Arc<dyn BlockDevice>, Arc<Findings>) {
    let options = OpenOptions::default();
    let store = IntegrityStore::open(Arc::clone(below), "disk", &options).unwrap();
    let findings = store.findings().unwrap();
    (Arc::new(store), findings)
}

impl Bench {
    pub fn new() -> Self {
        let tricks = Arc::default();
        let honest = ram(STORE_BYTES, |it| Geometry { volatile_cache: true, ..it });
        let data_at = formatted(&honest, BLOCK as u32, None).data_at();
        let below = Liar { below: Arc::clone(&honest), tricks: Arc::clone(&tricks) };
        let below: Arc<dyn BlockDevice> = Arc::new(below);
        let (device, findings) = stage(&below);
        Self { honest, below, tricks, device, findings, data_at }
    }

    /// The next write of this block goes wrong.
    pub fn lie(&self, block: u64, lie: Lie) {
        *self.tricks.lie.lock().unwrap() = Some((self.data_at + block * BLOCK, lie));
    }

    /// From now on these requests fail, and no others.
    pub fn fail(&self, fails: impl Fn(&BlockRequest) -> bool + Send + 'static) {
        *self.tricks.fails.lock().unwrap() = Some(Box::new(fails));
    }

    /// Requests of these bytes fail.
    pub fn fail_range(&self, start: u64, end: u64) {
        self.fail(move |request| {
            request.offset_bytes < end && start < request.offset_bytes + request.len_bytes
        });
    }

    pub fn fail_none(&self) {
        *self.tricks.fails.lock().unwrap() = None;
    }

    pub fn guest(&self) -> Harness {
        Harness::new(&self.device, 8)
    }

    /// Opens the store again.
    pub fn reopen(&mut self) {
        (self.device, self.findings) = stage(&self.below);
    }

    pub fn counts(&self) -> FindingsCounts {
        self.findings.counts()
    }
}

pub fn read(guest: &mut Harness, block: u64) -> Result<(), BlockError> {
    guest.poke(SCRATCH, &[0xa5; BLOCK as usize]);
    let request = guest.request(Operation::Read, block * BLOCK, &[(SCRATCH, BLOCK)]);
    guest.run_one(request)
}

/// The size that a flush has by mistake does not matter.
pub fn flush(guest: &mut Harness) {
    for len_bytes in [0, BLOCK] {
        let request = guest.range_request(Operation::Flush, 0, len_bytes);
        assert_eq!(guest.run_one(request), Ok(()));
    }
}

pub fn bytes(seed: u64) -> Vec<u8> {
    pattern(seed, BLOCK as usize)
}
