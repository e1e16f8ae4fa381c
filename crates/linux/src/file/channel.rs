//! The path from one queue to the file.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use io_uring::{opcode, squeue, types};
use rustix::fs::FallocateFlags;
use sidecore_block::{Batch, BlockChannel, BlockError, BlockRequest, Next, Operation, Readiness};
use sidecore_memory::GuestMemory;
use sidecore_units::{Nanos, PAGE_BYTES};

use super::bounce::Bounce;
use super::buffers::Buffers;
use super::requests::Requests;
use super::ring::{Completion, FILE, Ring};
use super::slot::{Slot, Verdict, Way};
use super::target::Target;

/// The largest number of memory pieces in one submission; a request with more takes more rounds.
const MAX_PIECES: usize = 128;

/// The largest number of bytes in one submission: below the kernel's limit of 2 GiB less a page.
const MAX_ROUND_BYTES: usize = 1 << 30;

/// The largest number of requests at once: a ring holds 32768 submissions (IORING_MAX_ENTRIES).
const MAX_DEPTH: usize = 32768 - EXTRA_SLOTS;

/// The number of slots in addition to one for each request, for the portions of large requests.
const EXTRA_SLOTS: usize = 32;

/// The source buffer of zeros.
#[repr(align(4096))]
pub(crate) struct Zeros(pub [u8; 64 << 10]);
pub(crate) static ZEROS: Zeros = Zeros([0; 64 << 10]);

/// The largest number of zero pieces in one submission: 1 MiB.
const MAX_ZERO_PIECES: usize = 16;

const NO_PIECE: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

pub(super) struct FileChannel {
    // Before every field that the kernel may still write to: see `drop`.
    ring: Ring,
    target: Arc<Target>,
    buffers: Buffers,
    requests: Requests,
    /// The largest portion.
    portion_bytes: u64,
    slots: Box<[Slot]>,
    /// The indices of free slots.
    free: Vec<u32>,
    /// The requests with a portion that found no slot.
    waiting: VecDeque<u32>,
    /// `MAX_PIECES` entries for each slot.
    pieces: Box<[libc::iovec]>,
    bounce: Option<Bounce>,
    reaped: Vec<Completion>,
    done: Batch,
    /// Whether the kernel has left submissions behind for want of memory, for which it sends no
    /// wake-up.
    stalled: bool,
}

impl FileChannel {
    pub fn open(target: Arc<Target>, depth: usize) -> io::Result<Self> {
        let depth = depth.clamp(1, MAX_DEPTH);
        let slots = if target.limits.is_some() { depth + EXTRA_SLOTS } else { depth };
        let bounce = match target.direct {
            Some(alignment) if alignment.memory_bytes > 1 || alignment.file_bytes > 1 => {
                Some(Bounce::new(slots)?)
            }
            _ => None,
        };
        let portion_bytes = portion_bytes(&target, PAGE_BYTES);
        Ok(Self {
            ring: Ring::new(target.as_fd(), target.fence(), slots as u32)?,
            target,
            buffers: Buffers::none(),
            requests: Requests::new(depth),
            portion_bytes,
            slots: vec![Slot::empty(); slots].into(),
            free: (0..slots as u32).rev().collect(),
            waiting: VecDeque::with_capacity(depth),
            pieces: vec![NO_PIECE; slots * MAX_PIECES].into(),
            bounce,
            reaped: Vec::with_capacity(slots),
            done: Batch::with_capacity(depth),
            stalled: false,
        })
    }

    fn in_kernel(&self) -> usize {
        self.requests.count()
    }

    /// Finds the errors that are known without a system call.
    #[inline]
    fn check(&self, request: &BlockRequest) -> Result<(), BlockError> {
        let geometry = &self.target.geometry;
        if geometry.read_only && request.operation.is_write() {
            return Err(BlockError::ReadOnly);
        }
        if request.operation == Operation::Flush {
            return Ok(());
        }
        if geometry.check(request.offset_bytes, request.len_bytes).is_err() {
            return Err(BlockError::OutOfBounds);
        }
        match request.operation {
            Operation::Read | Operation::Write
                if request.segments.len_bytes() != request.len_bytes =>
            {
                Err(BlockError::OutOfBounds)
            }
            Operation::Discard if !geometry.discard => Err(BlockError::Unsupported),
            _ => Ok(()),
        }
    }

    #[inline]
    fn way_of(&self, request: &BlockRequest) -> Way {
        match request.operation {
            Operation::Read | Operation::Write if self.must_bounce(request) => Way::Bounce,
            Operation::Read | Operation::Write => Way::Transfer,
            Operation::Flush => Way::Sync,
            Operation::Discard => Way::Punch,
            Operation::WriteZeroes { .. } if self.target.zero_by_writing => Way::WriteZeros,
            Operation::WriteZeroes { may_unmap } if may_unmap && self.target.geometry.discard => {
                Way::Punch
            }
            Operation::WriteZeroes { .. } => Way::ZeroRange,
        }
    }

    #[inline]
    fn must_bounce(&self, request: &BlockRequest) -> bool {
        let (Some(alignment), true) = (self.target.direct, self.bounce.is_some()) else {
            return false;
        };
        request.segments.pieces().iter().any(|piece| {
            piece.as_ptr().addr() & (alignment.memory_bytes - 1) != 0
                || piece.len_bytes() & (alignment.file_bytes - 1) != 0
        })
    }

    #[inline]
    fn start(&mut self, mut request: Box<BlockRequest>) {
        request.result = self.check(&request);
        let is_empty = request.len_bytes == 0 && request.operation != Operation::Flush;
        if request.result.is_err() || is_empty {
            self.done.push(request);
            return;
        }
        let way = self.way_of(&request);
        match self.requests.begin(request, way) {
            Ok(index) => self.advance(index),
            Err(mut request) => {
                // `submit` counts the requests; this branch ensures that none is lost in any case.
                request.result = Err(BlockError::EIO);
                self.done.push(request);
            }
        }
    }

    /// Starts as many portions of a request as slots are free.
    #[inline]
    fn advance(&mut self, request: u32) {
        while let Some(index) = self.free.pop() {
            let Some((way, bytes)) = self.requests.next_portion(request, self.portion_bytes) else {
                self.free.push(index);
                return;
            };
            self.slots[index as usize] = Slot::new(request, way, bytes);
            self.queue_round(index);
            if !self.requests.has_more(request) {
                return;
            }
        }
        self.waiting.push_back(request);
    }

    /// Queues the next round of the slot's portion.
    #[inline]
    fn queue_round(&mut self, index: u32) {
        let slot = &self.slots[index as usize];
        let Some(request) = self.requests.get(slot.request) else { return };
        let offset_bytes = request.offset_bytes + slot.done_bytes;
        let left_bytes = slot.end_bytes - slot.done_bytes;
        let entry = match slot.way {
            Way::Transfer => {
                let pieces = &mut self.pieces[index as usize * MAX_PIECES..][..MAX_PIECES];
                let count = gather(request, slot.done_bytes, left_bytes, pieces);
                transfer(
                    request.operation,
                    offset_bytes,
                    &pieces[..count],
                    Some((&mut self.buffers, &mut self.ring)),
                )
            }
            Way::Bounce => match &self.bounce {
                Some(bounce) => {
                    let piece = bounce.begin(index, request, slot.done_bytes, slot.end_bytes);
                    transfer(request.operation, offset_bytes, &[piece], None)
                }
                None => return,
            },
            Way::WriteZeros => {
                let pieces = &mut self.pieces[index as usize * MAX_PIECES..][..MAX_ZERO_PIECES];
                let count = gather_zeros(left_bytes, pieces);
                transfer(Operation::Write, offset_bytes, &pieces[..count], None)
            }
            Way::Sync => opcode::Fsync::new(FILE).flags(types::FsyncFlags::DATASYNC).build(),
            Way::Punch => allocate(request, FallocateFlags::PUNCH_HOLE),
            Way::ZeroRange => allocate(request, FallocateFlags::ZERO_RANGE),
        };
        let entry = entry.user_data(u64::from(index));
        // SAFETY: the entry names the guest's memory, which the slot's request keeps mapped; the
        // slot's part of `pieces` and of the bounce buffer, which no other portion uses; or
        // constant zeros. The request leaves its place only after this entry's completion is
        // reaped, and `drop` reaps all completions.
        unsafe { self.ring.push(&entry) };
    }

    fn finish_round(&mut self, completion: Completion) {
        let index = completion.user_data as u32;
        let align_bytes = self.target.direct.map_or(1, |alignment| alignment.file_bytes);
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let Some(request) = self.requests.get(slot.request) else { return };
        if let (Way::Bounce, Some(bounce)) = (slot.way, &self.bounce) {
            bounce.end(index, request, slot.done_bytes, completion.result);
        }
        match slot.judge(request.operation, completion.result, align_bytes) {
            Verdict::Again => self.queue_round(index),
            Verdict::Done(result) => {
                let request = slot.request;
                self.free.push(index);
                if let Some(over) = self.requests.finish_portion(request, result) {
                    if over.result.is_err() {
                        // The request's remaining portions never start.
                        self.waiting.retain(|waiting| *waiting != request);
                    }
                    self.done.push(over);
                }
                while !self.free.is_empty()
                    && let Some(next) = self.waiting.pop_front()
                {
                    self.advance(next);
                }
            }
        }
    }

    /// Submits the queued entries, in one system call for all.
    #[inline]
    fn enter(&mut self) {
        if self.ring.has_queued() {
            self.ring.enter();
            self.stalled = self.ring.has_queued();
        }
    }

    fn reap(&mut self) {
        self.ring.reap(&mut self.reaped);
        let mut reaped = std::mem::take(&mut self.reaped);
        for completion in reaped.drain(..) {
            self.finish_round(completion);
        }
        self.reaped = reaped;
    }
}

fn portion_bytes(target: &Target, page_bytes: u64) -> u64 {
    target.limits.map_or(u64::MAX, |limits| limits.portion_bytes(page_bytes))
}

/// Fills in the request's memory from `skip_bytes` on, at most `most_bytes`, as far as one
/// submission takes.
#[inline]
fn gather(
    request: &BlockRequest,
    skip_bytes: u64,
    most_bytes: u64,
    pieces: &mut [libc::iovec],
) -> usize {
    let mut skip = skip_bytes;
    let mut room = most_bytes.min(MAX_ROUND_BYTES as u64) as usize;
    let mut count = 0;
    for piece in request.segments.pieces() {
        let len = piece.len_bytes();
        if skip >= len as u64 {
            skip -= len as u64;
            continue;
        }
        let Some(next) = pieces.get_mut(count).filter(|_| room > 0) else { break };
        let usable = (len - skip as usize).min(room);
        *next = libc::iovec {
            iov_base: piece.as_ptr().wrapping_add(skip as usize).cast(),
            iov_len: usable,
        };
        room -= usable;
        skip = 0;
        count += 1;
    }
    count
}

fn gather_zeros(len_bytes: u64, pieces: &mut [libc::iovec]) -> usize {
    let mut rest = len_bytes;
    let mut count = 0;
    for piece in pieces {
        let usable = rest.min(ZEROS.0.len() as u64);
        if usable == 0 {
            break;
        }
        *piece =
            libc::iovec { iov_base: ZEROS.0.as_ptr().cast_mut().cast(), iov_len: usable as usize };
        rest -= usable;
        count += 1;
    }
    count
}

/// Makes a submission that reads to or writes from `pieces`, which may be `registered`.
#[inline]
fn transfer(
    operation: Operation,
    offset_bytes: u64,
    pieces: &[libc::iovec],
    registered: Option<(&mut Buffers, &mut Ring)>,
) -> squeue::Entry {
    let is_write = operation.is_write();
    let [piece] = pieces else {
        let count = pieces.len() as u32;
        return if is_write {
            opcode::Writev::new(FILE, pieces.as_ptr(), count).offset(offset_bytes).build()
        } else {
            opcode::Readv::new(FILE, pieces.as_ptr(), count).offset(offset_bytes).build()
        };
    };
    let (memory, len) = (piece.iov_base.cast::<u8>(), piece.iov_len as u32);
    let registered =
        registered.and_then(|(buffers, ring)| buffers.index_of(ring, memory, piece.iov_len));
    match (registered, is_write) {
        (Some(buffer), true) => {
            opcode::WriteFixed::new(FILE, memory, len, buffer).offset(offset_bytes).build()
        }
        (Some(buffer), false) => {
            opcode::ReadFixed::new(FILE, memory, len, buffer).offset(offset_bytes).build()
        }
        (None, true) => opcode::Write::new(FILE, memory, len).offset(offset_bytes).build(),
        (None, false) => opcode::Read::new(FILE, memory, len).offset(offset_bytes).build(),
    }
}

fn allocate(request: &BlockRequest, how: FallocateFlags) -> squeue::Entry {
    let mode = (how | FallocateFlags::KEEP_SIZE).bits();
    opcode::Fallocate::new(FILE, request.len_bytes)
        .offset(request.offset_bytes)
        .mode(mode as i32)
        .build()
}

impl BlockChannel for FileChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.buffers.attach(&mut self.ring, memory);
        self.portion_bytes = portion_bytes(&self.target, memory.page_bytes());
        Ok(())
    }

    fn submit(&mut self, _now: Nanos, batch: &mut Batch) {
        self.buffers.begin_round();
        let room = self.requests.depth() - self.readiness().in_flight;
        for request in batch.drain(..room.min(batch.len())) {
            self.start(request);
        }
        self.enter();
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        if self.in_kernel() > 0 {
            self.reap();
            self.enter();
        }
        completed.append(&mut self.done);
    }

    fn readiness(&self) -> Readiness {
        // The kernel sends no wake-up for submissions that it has not taken.
        let next = if self.stalled || !self.done.is_empty() { Next::Now } else { Next::OnWake };
        Readiness { in_flight: self.in_kernel() + self.done.len(), next }
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.requests.oldest()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.as_fd())
    }
}

impl Drop for FileChannel {
    /// Waits for the kernel, which may be writing to the memory of requests in flight.
    fn drop(&mut self) {
        while self.in_kernel() > 0 {
            if let Err(error) = self.ring.wait() {
                tracing::error!(
                    %error,
                    "cannot wait for io_uring: the memory of its requests is never freed"
                );
                std::mem::forget(std::mem::replace(&mut self.requests, Requests::new(0)));
                std::mem::forget(std::mem::take(&mut self.pieces));
                std::mem::forget(self.bounce.take());
                // The file stays claimed as well.
                std::mem::forget(Arc::clone(&self.target));
                return;
            }
            self.reap();
        }
    }
}
