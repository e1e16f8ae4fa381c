//! One queue of the disk: requests in slots.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use sidecore_memory::copy::CACHE_LINE_BYTES;
use sidecore_ring::RingLayout;
use sidecore_ring::driver::{Buffer, DriverRing, RawRing, SharedMemory};
use sidecore_spec_virtio::blk::{
    ID_BYTES, KIND_OFFSET, Range, RequestHeader, SECTOR_OFFSET, UNMAP,
};
use sidecore_units::Sector;

use crate::arena::Part;
use crate::buffers::{Buffers, buffer_methods};
use crate::error::ClientError;
use crate::event;
use crate::options::Notify;
use crate::request::{Completion, Operation, Piece, Slot, Status};

// A slot's line: the header, the status byte and the range of a discard share one cache line, so
// that a request moves one line there and back.
const STATUS: usize = 16;
const RANGE: usize = 32;

/// The device writes a status over this.
const NO_STATUS: u8 = 0xff;

/// How many times a polling client looks in vain before it asks again whether the device wants a
/// kick.
const LOOKS_PER_QUESTION: u32 = 256;

/// Counts of requests and notifications between the client and the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests submitted.
    pub requests: u64,
    /// Requests completed.
    pub completions: u64,
    /// Kicks written.
    pub kicks: u64,
    /// Calls that the device made, as far as they were read.
    pub calls: u64,
}

/// The shape of a slot's descriptors at present: the data's direction and length, `None` when
/// neither is simple.
type Shape = Option<(bool, u32)>;

/// One queue.
#[derive(Debug)]
pub struct BlkQueue {
    ring: DriverRing,
    raw: RawRing,
    layout: RingLayout,
    lines: SharedMemory,
    lines_at: u64,
    data: Buffers,
    max_pieces: u16,
    shapes: Box<[Shape]>,
    free: Vec<u16>,
    kick: OwnedFd,
    call: OwnedFd,
    error: OwnedFd,
    notify: Notify,
    like_kernel: bool,
    looks: u32,
    counters: Counters,
}

/// The arguments of a queue's constructor.
pub(crate) struct Parts {
    pub ring: DriverRing,
    pub raw: RawRing,
    pub layout: RingLayout,
    pub lines: Part,
    pub data: Part,
    pub slot_bytes: u32,
    pub max_pieces: u16,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub error: OwnedFd,
    pub notify: Notify,
    pub like_kernel: bool,
}

buffer_methods!(BlkQueue);

impl BlkQueue {
    pub(crate) fn new(parts: Parts) -> Self {
        let slots = parts.ring.slots();
        Self {
            ring: parts.ring,
            raw: parts.raw,
            layout: parts.layout,
            lines_at: parts.lines.guest_address,
            lines: SharedMemory::new(parts.lines.window),
            data: Buffers::new(parts.data, slots, parts.slot_bytes, parts.slot_bytes as usize),
            max_pieces: parts.max_pieces,
            shapes: vec![None; usize::from(slots)].into(),
            free: (0..slots).rev().collect(),
            kick: parts.kick,
            call: parts.call,
            error: parts.error,
            notify: parts.notify,
            like_kernel: parts.like_kernel,
            looks: 0,
            counters: Counters::default(),
        }
    }

    /// Bytes of lines that a queue of `slots` slots needs.
    pub(crate) fn lines_bytes(slots: u16) -> usize {
        usize::from(slots) * CACHE_LINE_BYTES
    }

    /// How many slots there are.
    #[must_use]
    pub fn slots(&self) -> u16 {
        self.ring.slots()
    }

    /// The counts so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Requests that are with the device.
    #[must_use]
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.ring.in_flight()
    }

    /// Takes a slot out of the free ones.
    pub fn take_slot(&mut self) -> Option<Slot> {
        self.free.pop().map(Slot)
    }

    /// Puts a slot back. One whose request is still with the device, or that is free already, is
    /// ignored.
    pub fn release_slot(&mut self, slot: Slot) {
        if slot.0 < self.slots() && !self.ring.is_in_flight(slot.0) && !self.free.contains(&slot.0)
        {
            self.free.push(slot.0);
        }
    }

    /// Reads `len_bytes` from `sector` on into the slot's buffer.
    ///
    /// # Errors
    /// The slot is in flight, or its buffer is smaller.
    #[inline]
    pub fn submit_read(
        &mut self,
        slot: Slot,
        sector: Sector,
        len_bytes: u32,
    ) -> Result<(), ClientError> {
        self.submit_simple(slot, Operation::Read, sector, len_bytes)
    }

    /// Writes `len_bytes` of the slot's buffer from `sector` on.
    ///
    /// # Errors
    /// As [`BlkQueue::submit_read`].
    #[inline]
    pub fn submit_write(
        &mut self,
        slot: Slot,
        sector: Sector,
        len_bytes: u32,
    ) -> Result<(), ClientError> {
        self.submit_simple(slot, Operation::Write, sector, len_bytes)
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// The slot is in flight.
    pub fn submit_flush(&mut self, slot: Slot) -> Result<(), ClientError> {
        self.submit_chain(slot, Operation::Flush as u32, Sector(0), &[])
    }

    /// Asks for the disk's name: 20 bytes in the slot's buffer.
    ///
    /// # Errors
    /// The slot is in flight.
    pub fn submit_get_id(&mut self, slot: Slot) -> Result<(), ClientError> {
        self.submit_simple(slot, Operation::GetId, Sector(0), ID_BYTES as u32)
    }

    /// Forgets `sectors` sectors from `sector` on.
    ///
    /// # Errors
    /// The slot is in flight.
    pub fn submit_discard(
        &mut self,
        slot: Slot,
        sector: Sector,
        sectors: u32,
    ) -> Result<(), ClientError> {
        self.submit_range(slot, Operation::Discard, sector, sectors, 0)
    }

    /// Zeroes `sectors` sectors from `sector` on, and frees them if `unmap` and the device can.
    ///
    /// # Errors
    /// The slot is in flight.
    pub fn submit_write_zeroes(
        &mut self,
        slot: Slot,
        sector: Sector,
        sectors: u32,
        unmap: bool,
    ) -> Result<(), ClientError> {
        self.submit_range(
            slot,
            Operation::WriteZeroes,
            sector,
            sectors,
            if unmap { UNMAP } else { 0 },
        )
    }

    /// Reads or writes with the data scattered over pieces of the slot's buffer, in their order.
    ///
    /// # Errors
    /// The slot is in flight, a piece is outside of its buffer, or there are more than the options'
    /// `max_pieces`.
    pub fn submit_scattered(
        &mut self,
        slot: Slot,
        operation: Operation,
        sector: Sector,
        pieces: &[Piece],
    ) -> Result<(), ClientError> {
        let device_writes = operation != Operation::Write;
        let buffer = |piece: &Piece| {
            let address = self.data.piece_address(slot, piece)?;
            Ok(Buffer { address, len_bytes: piece.len_bytes, device_writes })
        };
        let buffers = pieces.iter().map(buffer).collect::<Result<Vec<_>, ClientError>>()?;
        self.submit_chain(slot, operation as u32, sector, &buffers)
    }

    /// Sends a request of any type, with any buffers between header and status byte: for tests of
    /// what a device makes of them.
    ///
    /// # Errors
    /// The slot is in flight, or there are more than the options' `max_pieces`.
    pub fn submit_chain(
        &mut self,
        slot: Slot,
        kind: u32,
        sector: Sector,
        data: &[Buffer],
    ) -> Result<(), ClientError> {
        if data.len() > usize::from(self.max_pieces) {
            return Err(ClientError::Request(format!(
                "{} pieces, the queue takes {}",
                data.len(),
                self.max_pieces
            )));
        }
        let line_at = self.line_at(slot);
        let mut chain = Vec::with_capacity(data.len() + 2);
        chain.push(Buffer::to_device(line_at, RequestHeader::BYTES as u32));
        chain.extend_from_slice(data);
        chain.push(Buffer::from_device(line_at + STATUS as u64, 1));
        self.ring.describe(slot.0, &chain)?;
        self.set_shape(slot, None);
        self.send(slot, kind, sector)
    }

    /// Shows the device everything that was submitted, and kicks it if it wants that.
    ///
    /// # Errors
    /// The kick cannot be written.
    #[inline]
    pub fn publish(&mut self) -> Result<(), ClientError> {
        self.ring.publish();
        let wanted = match self.notify {
            // Asked again while there is nothing to be seen, see `poll_completions`.
            Notify::Polled if !self.like_kernel => self.ring.kick_wanted_soon(),
            Notify::Polled | Notify::Interrupt => self.ring.kick_wanted(),
        };
        if wanted { self.kick() } else { Ok(()) }
    }

    /// Kicks the device, wanted or not.
    ///
    /// # Errors
    /// The kick cannot be written.
    pub fn kick(&mut self) -> Result<(), ClientError> {
        self.counters.kicks += 1;
        match rustix::io::write(&self.kick, &1_u64.to_ne_bytes()) {
            // A full eventfd has woken its waiters already.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(errno) => Err(ClientError::io("kicking the device")(errno)),
        }
    }

    /// Appends what has completed to `completions`, and returns how much that was.
    ///
    /// # Errors
    /// The device completed what it was not given.
    #[inline]
    pub fn poll_completions(
        &mut self,
        completions: &mut Vec<Completion>,
    ) -> Result<usize, ClientError> {
        let before = completions.len();
        while let Some(used) = self.ring.pop()? {
            if !self.like_kernel {
                // The lines are fetched together, and for writing: the next request's header goes
                // there.
                self.lines.prefetch_for_write(line(Slot(used.slot)));
            }
            completions.push(Completion {
                slot: Slot(used.slot),
                status: Status::Ok,
                written_bytes: used.written_bytes,
            });
        }
        for completion in &mut completions[before..] {
            completion.status = self.lines.load_u8(line(completion.slot) + STATUS).into();
        }
        let count = completions.len() - before;
        if count == 0 {
            self.look_again()?;
        }
        self.counters.completions += count as u64;
        Ok(count)
    }

    /// Waits until something has completed, as the options say: spinning or asleep. False when
    /// `timeout` is over.
    ///
    /// # Errors
    /// The eventfds.
    pub fn wait(&mut self, timeout: Duration) -> Result<bool, ClientError> {
        match self.notify {
            Notify::Polled => self.spin(timeout),
            Notify::Interrupt => self.sleep(timeout),
        }
    }

    /// The slot's buffer, in guest addresses.
    #[must_use]
    pub fn data_address(&self, slot: Slot) -> u64 {
        self.data.address(slot)
    }

    /// Whether the device has said that the queue is broken (VHOST_USER_SET_VRING_ERR).
    #[must_use]
    pub fn is_broken(&self) -> bool {
        event::is_set(&self.error)
    }

    /// Takes the interrupts that no wait has taken, and returns their number.
    pub fn take_calls(&mut self) -> u64 {
        let calls = event::drain(&self.call);
        self.counters.calls += calls;
        calls
    }

    /// The event that the device signals, for a caller that sleeps on several queues.
    #[must_use]
    pub fn call(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    /// The words of the ring, for tests.
    #[must_use]
    pub fn raw_ring(&self) -> &RawRing {
        &self.raw
    }

    /// Where the ring is.
    #[must_use]
    pub fn layout(&self) -> &RingLayout {
        &self.layout
    }

    #[inline]
    fn submit_simple(
        &mut self,
        slot: Slot,
        operation: Operation,
        sector: Sector,
        len_bytes: u32,
    ) -> Result<(), ClientError> {
        let device_writes = operation != Operation::Write;
        let shape = Some((device_writes, len_bytes));
        if self.like_kernel || self.shapes.get(slot.index()).copied() != Some(shape) {
            self.describe_simple(slot, device_writes, len_bytes)?;
        }
        self.send(slot, operation as u32, sector)
    }

    #[inline(never)]
    fn describe_simple(
        &mut self,
        slot: Slot,
        device_writes: bool,
        len_bytes: u32,
    ) -> Result<(), ClientError> {
        self.data.check_len(len_bytes)?;
        let line_at = self.line_at(slot);
        let chain = [
            Buffer::to_device(line_at, RequestHeader::BYTES as u32),
            Buffer { address: self.data_address(slot), len_bytes, device_writes },
            Buffer::from_device(line_at + STATUS as u64, 1),
        ];
        self.ring.describe(slot.0, &chain)?;
        self.set_shape(slot, Some((device_writes, len_bytes)));
        Ok(())
    }

    fn submit_range(
        &mut self,
        slot: Slot,
        operation: Operation,
        sector: Sector,
        sectors: u32,
        flags: u32,
    ) -> Result<(), ClientError> {
        if self.ring.is_in_flight(slot.0) {
            return Err(ClientError::Request("the slot is in flight".to_owned()));
        }
        let range = line(slot) + RANGE;
        self.lines.write_bytes(range, &Range { sector: sector.0, sectors, flags }.encode());
        let buffer = Buffer::to_device(self.line_at(slot) + RANGE as u64, Range::BYTES as u32);
        self.submit_chain(slot, operation as u32, Sector(0), &[buffer])
    }

    #[inline]
    fn send(&mut self, slot: Slot, kind: u32, sector: Sector) -> Result<(), ClientError> {
        let line = line(slot);
        // Before the header is written: the device may still be reading that of a slot in flight.
        self.ring.push(slot.0)?;
        self.lines.store_u64(line + KIND_OFFSET, kind.into());
        self.lines.store_u64(line + SECTOR_OFFSET, sector.0);
        self.lines.store_u8(line + STATUS, NO_STATUS);
        self.counters.requests += 1;
        Ok(())
    }

    /// Every so often, makes certain that the device is not waiting for a kick that
    /// [`BlkQueue::publish`] missed.
    #[inline]
    fn look_again(&mut self) -> Result<(), ClientError> {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(LOOKS_PER_QUESTION) && self.ring.kick_wanted() {
            return self.kick();
        }
        std::hint::spin_loop();
        Ok(())
    }

    fn spin(&mut self, timeout: Duration) -> Result<bool, ClientError> {
        let end = Instant::now() + timeout;
        while !self.ring.has_used() {
            self.look_again()?;
            if self.looks.is_multiple_of(LOOKS_PER_QUESTION) && Instant::now() >= end {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn sleep(&mut self, timeout: Duration) -> Result<bool, ClientError> {
        let end = Instant::now() + timeout;
        loop {
            if self.ring.has_used() {
                return Ok(true);
            }
            if self.ring.arm_calls() {
                self.ring.suppress_calls();
                return Ok(true);
            }
            let ready = event::wait(&self.call, end, "waiting for a call")?;
            self.ring.suppress_calls();
            self.take_calls();
            if !ready {
                return Ok(self.ring.has_used());
            }
        }
    }

    fn set_shape(&mut self, slot: Slot, shape: Shape) {
        if let Some(old) = self.shapes.get_mut(slot.index()) {
            *old = shape;
        }
    }

    fn line_at(&self, slot: Slot) -> u64 {
        self.lines_at + line(slot) as u64
    }
}

/// Where a slot's line is.
#[inline]
fn line(slot: Slot) -> usize {
    slot.index() * CACHE_LINE_BYTES
}
