//! One I/O queue pair: requests in slots.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use sidecore_ring::driver::SharedMemory;
use sidecore_ring::driver::nvme::{CompletionRing, SubmissionRing};
use sidecore_units::SECTOR_BYTES;

use super::doorbells::QueueDoorbells;
use super::identify::NvmeNamespaceInfo;
use super::options::{DataPointers, NvmeOptions};
use super::plan::{PAGE, Plan, QueueParts};
use super::status::NvmeStatus;
use crate::buffers::{Buffers, buffer_methods};
use crate::error::ClientError;
use crate::event;
use crate::options::Notify;
use crate::queue::Counters;
use crate::request::Slot;

/// How many times a spinning client looks in vain before it looks at the clock.
const LOOKS_PER_CLOCK: u32 = 256;

/// A request that the controller is done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvmeCompletion {
    /// Its slot, free for the next request.
    pub slot: Slot,
    /// How it ended.
    pub status: NvmeStatus,
}

/// One I/O queue pair. Nothing between submitting a request and taking its completion allocates, as
/// long as the vector of completions has room; where the doorbells are mapped, there is no system
/// call either.
#[derive(Debug)]
pub struct NvmeQueue {
    pub(super) id: u16,
    pub(super) commands: SubmissionRing,
    pub(super) completions: CompletionRing,
    pub(super) doorbells: QueueDoorbells,
    commands_at: u64,
    completions_at: u64,
    pub(super) namespace: u32,
    /// log2 of the sectors in a logical block.
    pub(super) sector_shift: u32,
    pub(super) slots: Flights,
    pub(super) data: Buffers,
    pub(super) lists: SharedMemory,
    pub(super) lists_at: u64,
    pub(super) list_stride: usize,
    /// Which page each slot's list begins with.
    pub(super) list_of: Box<[u64]>,
    pub(super) aux: SharedMemory,
    pub(super) aux_at: u64,
    pub(super) aux_stride: usize,
    pub(super) max_pieces: usize,
    pub(super) pointers: DataPointers,
    announced_tail: u32,
    /// Completions taken since the head doorbell was rung.
    unannounced: u32,
    notify: Notify,
    event: Option<OwnedFd>,
    pub(super) counters: Counters,
}

/// Which slots are with the controller.
#[derive(Debug)]
pub(super) struct Flights {
    in_flight: Box<[bool]>,
    count: u16,
    free: Vec<u16>,
    /// Commands that the controller will not complete.
    aborted: Vec<u16>,
}

/// Where a queue pair's memory is, for the commands that create it.
pub(crate) struct QueueAddresses {
    pub commands: u64,
    pub command_entries: u32,
    pub completions: u64,
    pub completion_entries: u32,
}

buffer_methods!(NvmeQueue);

impl NvmeQueue {
    pub(crate) fn new(
        id: u16,
        parts: QueueParts,
        plan: &Plan,
        options: &NvmeOptions,
        doorbells: QueueDoorbells,
        event: Option<OwnedFd>,
    ) -> Result<Self, ClientError> {
        let slots = usize::from(options.slots);
        let mut queue = Self {
            id,
            commands_at: parts.commands.guest_address,
            completions_at: parts.completions.guest_address,
            commands: SubmissionRing::new(parts.commands.window, plan.commands)?,
            completions: CompletionRing::new(parts.completions.window, plan.completions)?,
            doorbells,
            namespace: 0,
            sector_shift: 0,
            slots: Flights {
                in_flight: vec![false; slots].into(),
                count: 0,
                free: (0..options.slots).rev().collect(),
                aborted: Vec::with_capacity(slots),
            },
            data: Buffers::new(parts.data, options.slots, options.slot_bytes, plan.data_stride),
            lists_at: parts.lists.guest_address,
            lists: SharedMemory::new(parts.lists.window),
            list_stride: plan.list_stride,
            list_of: vec![0; slots].into(),
            aux_at: parts.aux.guest_address,
            aux: SharedMemory::new(parts.aux.window),
            aux_stride: plan.aux_stride,
            max_pieces: options.max_pieces.into(),
            pointers: options.pointers,
            announced_tail: 0,
            unannounced: 0,
            notify: options.notify,
            event,
            counters: Counters::default(),
        };
        for slot in (0..options.slots).map(Slot) {
            let next_page = queue.data_address(slot) + PAGE as u64;
            queue.write_list(slot, next_page);
        }
        Ok(queue)
    }

    /// Starts from the beginning, for a controller that knows nothing. What was in flight completes
    /// as aborted.
    pub(crate) fn restart(&mut self, doorbells: QueueDoorbells, namespace: &NvmeNamespaceInfo) {
        self.commands.reset();
        self.completions.reset();
        self.doorbells = doorbells;
        self.namespace = namespace.id;
        self.sector_shift = (u64::from(namespace.block_bytes) / SECTOR_BYTES).max(1).ilog2();
        (self.announced_tail, self.unannounced) = (0, 0);
        let Flights { in_flight, aborted, .. } = &mut self.slots;
        aborted.clear();
        aborted.extend(
            (0..).zip(in_flight.iter()).filter(|(_, in_flight)| **in_flight).map(|(slot, _)| slot),
        );
    }

    pub(crate) fn addresses(&self) -> QueueAddresses {
        QueueAddresses {
            commands: self.commands_at,
            command_entries: self.commands.entries(),
            completions: self.completions_at,
            completion_entries: self.completions.entries(),
        }
    }

    /// Its number, from 1.
    #[must_use]
    pub fn id(&self) -> u16 {
        self.id
    }

    /// How many slots there are.
    #[must_use]
    pub fn slots(&self) -> u16 {
        u16::try_from(self.slots.in_flight.len()).unwrap_or(u16::MAX)
    }

    /// Whether its doorbells are stores, and not messages.
    #[must_use]
    pub fn has_mapped_doorbells(&self) -> bool {
        self.doorbells.are_mapped()
    }

    /// The counts so far; kicks are doorbell messages.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Requests that are with the controller.
    #[must_use]
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.slots.count
    }

    /// Takes a slot out of the free ones.
    pub fn take_slot(&mut self) -> Option<Slot> {
        self.slots.free.pop().map(Slot)
    }

    /// Puts a slot back. One whose request is still with the controller, or that is free already,
    /// is ignored.
    pub fn release_slot(&mut self, slot: Slot) {
        if self.slots.is_here(slot) && !self.slots.free.contains(&slot.0) {
            self.slots.free.push(slot.0);
        }
    }

    /// Shows the controller everything that was submitted: one doorbell for all of it, and one for
    /// what was completed if that is due.
    ///
    /// # Errors
    /// The doorbell is a message, and the socket fails.
    #[inline]
    pub fn publish(&mut self) -> Result<(), ClientError> {
        self.announce_head_if_due()?;
        let tail = self.commands.tail();
        if tail != self.announced_tail {
            self.announced_tail = tail;
            self.counters.kicks += u64::from(self.doorbells.ring_tail(tail)?);
        }
        Ok(())
    }

    /// Appends what has completed to `completions`, and returns how much that was.
    ///
    /// # Errors
    /// The controller completed what it was not given.
    #[inline]
    pub fn poll_completions(
        &mut self,
        completions: &mut Vec<NvmeCompletion>,
    ) -> Result<usize, ClientError> {
        let before = completions.len();
        if !self.slots.aborted.is_empty() {
            self.take_aborted(completions);
        }
        let mut head = None;
        while let Some(entry) = self.completions.pop() {
            self.unannounced += 1;
            let (queue, id) = (self.id, entry.command_id);
            if entry.sq_id != queue || !self.slots.land(id) {
                return Err(ClientError::NotInFlight { queue, id });
            }
            head = Some(entry.sq_head);
            completions
                .push(NvmeCompletion { slot: Slot(id), status: NvmeStatus(entry.status >> 1) });
        }
        let count = completions.len() - before;
        match head {
            Some(head) => self.commands.set_head(head)?,
            None if count == 0 => std::hint::spin_loop(),
            None => {}
        }
        self.counters.completions += count as u64;
        Ok(count)
    }

    /// Waits until something has completed, as the options say: spinning or asleep. False when
    /// `timeout` is over.
    ///
    /// # Errors
    /// The eventfd, or a doorbell message.
    pub fn wait(&mut self, timeout: Duration) -> Result<bool, ClientError> {
        if !self.slots.aborted.is_empty() {
            return Ok(true);
        }
        match self.notify {
            Notify::Polled => Ok(self.spin(timeout)),
            Notify::Interrupt => self.sleep(timeout),
        }
    }

    /// Where the controller finds the slot's buffer.
    #[must_use]
    #[inline]
    pub fn data_address(&self, slot: Slot) -> u64 {
        self.data.address(slot)
    }

    /// Takes the interrupts that no wait has taken, and returns their number.
    pub fn take_calls(&mut self) -> u64 {
        let calls = self.event.as_ref().map_or(0, event::drain);
        self.counters.calls += calls;
        calls
    }

    /// The head doorbell is rung when completions to come could lack room; one who wants interrupts
    /// rings it each time, because it says that the last interrupt was heeded.
    #[inline]
    fn announce_head_if_due(&mut self) -> Result<(), ClientError> {
        let capacity = self.completions.entries() - 1;
        let due = match self.notify {
            Notify::Polled => self.unannounced + u32::from(self.slots.count) > capacity,
            Notify::Interrupt => self.unannounced > 0,
        };
        if due { self.announce_head() } else { Ok(()) }
    }

    fn announce_head(&mut self) -> Result<(), ClientError> {
        self.unannounced = 0;
        self.counters.kicks += u64::from(self.doorbells.ring_head(self.completions.head())?);
        Ok(())
    }

    #[cold]
    fn take_aborted(&mut self, completions: &mut Vec<NvmeCompletion>) {
        while let Some(slot) = self.slots.aborted.pop() {
            if self.slots.land(slot) {
                completions
                    .push(NvmeCompletion { slot: Slot(slot), status: NvmeStatus::ABORTED_BY_HOST });
            }
        }
    }

    fn spin(&mut self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut looks = 0_u32;
        while !self.completions.has_next() {
            looks = looks.wrapping_add(1);
            std::hint::spin_loop();
            if looks.is_multiple_of(LOOKS_PER_CLOCK) && Instant::now() >= end {
                return false;
            }
        }
        true
    }

    fn sleep(&mut self, timeout: Duration) -> Result<bool, ClientError> {
        let end = Instant::now() + timeout;
        self.announce_head_if_due()?;
        loop {
            if self.completions.has_next() {
                return Ok(true);
            }
            let Some(event) = &self.event else { return Ok(self.spin(timeout)) };
            let ready = event::wait(event, end, "waiting for an interrupt")?;
            self.take_calls();
            if !ready {
                return Ok(self.completions.has_next());
            }
        }
    }
}

impl Flights {
    /// Whether the slot exists and its request is not with the controller.
    #[inline]
    pub(super) fn is_here(&self, slot: Slot) -> bool {
        self.in_flight.get(slot.index()) == Some(&false)
    }

    /// The request in `slot`, which is here, is with the controller from now on.
    #[inline]
    pub(super) fn depart(&mut self, slot: Slot) {
        if let Some(in_flight) = self.in_flight.get_mut(slot.index()) {
            *in_flight = true;
            self.count += 1;
        }
    }

    /// The request in slot `id` is back; false if there was none.
    #[inline]
    fn land(&mut self, id: u16) -> bool {
        match self.in_flight.get_mut(usize::from(id)) {
            Some(in_flight @ true) => {
                *in_flight = false;
                self.count -= 1;
                true
            }
            _ => false,
        }
    }
}
