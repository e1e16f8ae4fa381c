//! A channel under test.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use super::{SCRATCH, guest_memory, request};
use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, Geometry, Operation, Tag,
};

/// A channel under test, and the guest that uses it.
pub struct Harness {
    /// The device's geometry.
    pub geometry: Geometry,
    /// The guest's memory, as of [`guest_memory`].
    pub memory: GuestMemory,
    /// The channel.
    pub channel: Box<dyn BlockChannel>,
    started_at: Instant,
    now: Nanos,
    pub(super) next_tag: u64,
    completed: Batch,
    /// Whether the last turn was an exchange: every other one is.
    exchanged: bool,
}

/// The longest that any device may take for a few requests.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

impl Harness {
    /// A new channel of `device`, with memory of its own attached.
    ///
    /// # Panics
    /// The channel cannot be opened.
    #[must_use]
    pub fn new(device: &Arc<dyn BlockDevice>, depth: usize) -> Self {
        let memory = guest_memory();
        let mut channel = device.open_channel(&CoreContext::default(), depth).unwrap();
        channel.attach_memory(&memory).unwrap();
        Self {
            geometry: device.geometry(),
            memory,
            channel,
            started_at: Instant::now(),
            now: Nanos::ZERO,
            next_tag: 1,
            completed: Batch::new(),
            exchanged: false,
        }
    }

    /// The time, of which [`Harness::run`] may have skipped some.
    pub fn now(&mut self) -> Nanos {
        self.now = self.now.max(Nanos::from(self.started_at.elapsed()));
        self.now
    }

    /// A request with a tag and a time.
    pub fn request(
        &mut self,
        operation: Operation,
        offset_bytes: u64,
        pieces: &[(u64, u64)],
    ) -> Box<BlockRequest> {
        let mut request = request(&self.memory, operation, offset_bytes, pieces);
        request.taken_at = self.now();
        request.tag = Some(Tag::from_bits(self.next_tag));
        self.next_tag += 1;
        request
    }

    /// A request for a range of the store, without memory.
    pub fn range_request(
        &mut self,
        operation: Operation,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Box<BlockRequest> {
        let mut request = self.request(operation, offset_bytes, &[]);
        request.len_bytes = len_bytes;
        request
    }

    /// Carries out all of `requests`; returns the results in their order.
    ///
    /// # Panics
    /// They do not all come back, once each, within ten seconds.
    pub fn run(&mut self, requests: Vec<Box<BlockRequest>>) -> Vec<Result<(), BlockError>> {
        let mut pending: BTreeMap<u64, usize> = BTreeMap::new();
        let mut batch = Batch::new();
        for (index, mut request) in requests.into_iter().enumerate() {
            let bits = request.tag.take().expect("the harness made the tag").into_bits();
            request.tag = Some(Tag::from_bits(bits));
            pending.insert(bits, index);
            batch.push(request);
        }
        let mut results = vec![Err(BlockError::EIO); batch.len()];
        let start = Instant::now();
        while !pending.is_empty() {
            let now = self.now();
            let before = self.completed.len();
            self.exchanged = !self.exchanged;
            if self.exchanged {
                self.channel.exchange(now, &mut batch, &mut self.completed);
            } else {
                self.channel.submit(now, &mut batch);
                let now = self.now();
                self.channel.poll(now, &mut self.completed);
            }
            let came_back = self.completed.len() > before;
            for mut request in self.completed.drain(..) {
                let bits =
                    request.tag.take().expect("a request came back without its tag").into_bits();
                let index = pending
                    .remove(&bits)
                    .expect("a request came back twice, or was never submitted");
                results[index] = request.result;
            }
            if !came_back && !pending.is_empty() {
                assert!(start.elapsed() < PATIENCE, "{} requests never came back", pending.len());
                self.wait(Duration::from_millis(1));
            }
        }
        assert_eq!(self.in_flight(), 0, "all came back, yet the channel says some are in flight");
        results
    }

    /// Gives requests to the channel, as many as it takes.
    pub fn submit(&mut self, batch: &mut Batch) {
        let now = self.now();
        self.channel.submit(now, batch);
    }

    /// Requests in the channel.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.channel.readiness().in_flight
    }

    /// Carries out one request.
    ///
    /// # Errors
    /// The request's.
    pub fn run_one(&mut self, request: Box<BlockRequest>) -> Result<(), BlockError> {
        self.run(vec![request])[0]
    }

    /// Waits until the channel has something to do, at most `patience`; says whether it has.
    pub fn wait(&mut self, patience: Duration) -> bool {
        if let Some(deadline) = self.channel.readiness().next.deadline() {
            self.now = self.now().max(deadline);
            return true;
        }
        let Some(fd) = self.channel.wake_fd() else {
            assert_eq!(self.in_flight(), 0, "nothing wakes for what is in flight");
            return true;
        };
        let timeout = Timespec {
            tv_sec: i64::try_from(patience.as_secs()).unwrap(),
            tv_nsec: i64::from(patience.subsec_nanos()),
        };
        let fd = fd.as_fd();
        match rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => ready > 0,
            // Completions may be delivered like signals.
            Err(Errno::INTR) => true,
            Err(error) => panic!("poll: {error}"),
        }
    }

    /// Writes `bytes` to the guest's memory.
    ///
    /// # Panics
    /// Outside of it.
    pub fn poke(&self, address: u64, bytes: &[u8]) {
        self.memory.write_slice(GuestAddress(address), bytes, &mut RegionHint::default()).unwrap();
    }

    /// Reads `len_bytes` of the guest's memory.
    ///
    /// # Panics
    /// Outside of it.
    #[must_use]
    pub fn peek(&self, address: u64, len_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes];
        self.memory
            .read_slice(GuestAddress(address), &mut bytes, &mut RegionHint::default())
            .unwrap();
        bytes
    }

    /// Writes `bytes` to the store.
    ///
    /// # Panics
    /// The write fails.
    pub fn store(&mut self, offset_bytes: u64, bytes: &[u8]) {
        self.poke(SCRATCH, bytes);
        let request =
            self.request(Operation::Write, offset_bytes, &[(SCRATCH, bytes.len() as u64)]);
        assert_eq!(self.run_one(request), Ok(()), "write at {offset_bytes}");
    }

    /// Reads `len_bytes` from the store.
    ///
    /// # Panics
    /// The read fails.
    #[must_use]
    pub fn load(&mut self, offset_bytes: u64, len_bytes: usize) -> Vec<u8> {
        // The parts that a read leaves out must not look like data.
        self.poke(SCRATCH, &vec![0xa5; len_bytes]);
        let request = self.request(Operation::Read, offset_bytes, &[(SCRATCH, len_bytes as u64)]);
        assert_eq!(self.run_one(request), Ok(()), "read at {offset_bytes}");
        self.peek(SCRATCH, len_bytes)
    }

    /// The block size, as an offset.
    #[must_use]
    pub fn block(&self) -> u64 {
        u64::from(self.geometry.block_bytes)
    }
}
