//! The guests on the queues of virtual functions.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use sidecore_block::{Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, Operation, Tag};
use sidecore_controller::{ControllerError, FunctionOptions, VirtualFunction};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};
use sidecore_units::Nanos;

use super::Bug;
use super::model::Writes;
use super::register::Moment;
use super::world::World;
use crate::guest::memory;
use crate::history::{Step, System as _};
use crate::volumes::disk::SECTOR_BYTES;
use crate::volumes::model::{fill, stamp_of};

/// Buffers of all guests together, and so the most requests in flight.
const BUFFERS: u64 = 64;
/// The size of a buffer, and so of the largest request, in sectors.
const BUFFER_SECTORS: u64 = 128;
/// The content of a buffer before it is read into.
const UNTOUCHED: u64 = 0xbad_bad_bad;

/// A virtual function in use.
pub(super) struct Guest {
    pub(super) volume: u64,
    read_only: bool,
    /// Each channel with its depth.
    channels: Vec<(Box<dyn BlockChannel>, usize)>,
    /// Declared after the channels, which must be dropped first.
    function: Arc<VirtualFunction>,
}

impl Guest {
    /// The size that the guest sees.
    fn sectors(&self) -> u64 {
        self.function.geometry().capacity_bytes / SECTOR_BYTES as u64
    }
}

/// A request in flight.
pub(super) struct Pending {
    volume: u64,
    operation: Operation,
    sector: u64,
    count: u64,
    issued: Moment,
    writes: Writes,
    buffer: u64,
    /// The store's failures before the request.
    faults: u64,
}

impl fmt::Display for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { volume, operation, sector, count, .. } = self;
        write!(f, "volume {volume}: {operation:?} of {count} sectors from {sector} on")
    }
}

/// The guests' memory, and their requests in flight.
pub(super) struct Requests {
    memory: GuestMemory,
    free: Vec<u64>,
    tags: u64,
    pub(super) pending: BTreeMap<u64, Pending>,
}

impl Requests {
    pub(super) fn new() -> Self {
        let memory = memory(BUFFERS * BUFFER_SECTORS * SECTOR_BYTES as u64);
        Self { memory, free: (0..BUFFERS).collect(), tags: 0, pending: BTreeMap::new() }
    }
}

impl World {
    /// Starts another guest, on a random volume.
    pub(super) fn attach(&mut self) -> Step {
        let Some(volume) = self.any_volume() else { return Ok(()) };
        if self.guests.len() >= 6 {
            return Ok(());
        }
        let Some((name, read_only)) =
            self.model.volumes.get(&volume).map(|it| (it.name.clone(), it.read_only))
        else {
            return Ok(());
        };
        self.note(format!("a guest on volume {volume}"));
        let weight = if self.random.once_in(4) { 1 + self.random.below(1000) as u32 } else { 100 };
        let options = FunctionOptions { weight, ..FunctionOptions::new(name) };
        let function = self.controller.open_function(&options);
        let function = match function {
            // A volume is served once it is durable.
            Err(ControllerError::NotMade(_)) => return Ok(()),
            function => {
                function.map_err(|error| format!("a function of volume {volume}: {error}"))?
            }
        };
        let mut channels = Vec::new();
        for _ in 0..=self.random.below(3) {
            let depth = [1, 4, 16][self.random.below(3) as usize];
            let mut channel =
                function.open_channel(&self.core, depth).map_err(|error| error.to_string())?;
            channel.attach_memory(&self.requests.memory).map_err(|error| error.to_string())?;
            channels.push((channel, depth));
        }
        self.guests.push(Guest { volume, read_only, channels, function });
        Ok(())
    }

    /// Stops a random guest, if it has no request in flight.
    pub(super) fn detach(&mut self) {
        let idle = |guest: &Guest| {
            guest.channels.iter().all(|(channel, _)| channel.readiness().in_flight == 0)
        };
        let index = self.random.below(self.guests.len().max(1) as u64) as usize;
        if self.guests.get(index).is_some_and(idle) {
            let guest = self.guests.swap_remove(index);
            self.note(format!("no guest on volume {} any more", guest.volume));
        }
    }

    /// Sends a random request from a random guest.
    pub(super) fn send_request(&mut self) -> Step {
        let index = self.random.below(self.guests.len().max(1) as u64) as usize;
        let Some(guest) = self.guests.get(index) else { return self.attach() };
        let read_only = guest.read_only;
        // A larger size is served once it is durable.
        let guest_sectors = guest.sectors();
        let size = guest_sectors / self.model.sectors_per_block;
        let operation = match self.random.below(if read_only { 8 } else { 24 }) {
            0..6 => Operation::Read,
            6 | 7 => Operation::Flush,
            8 => Operation::WriteZeroes { may_unmap: true },
            9 => Operation::WriteZeroes { may_unmap: false },
            10 | 11 => Operation::Discard,
            _ => Operation::Write,
        };
        let (sector, count) = match operation {
            Operation::Flush => (0, 0),
            Operation::Write if self.random.once_in(4) => {
                let sectors = self.pick_sectors(size, true);
                self.whole_units(sectors, guest_sectors)
            }
            _ => self.pick_sectors(size, matches!(operation, Operation::Read | Operation::Write)),
        };
        self.submit(index, operation, sector, count)
    }

    /// Random sectors of a volume of so many blocks, mostly at a few hot places.
    fn pick_sectors(&mut self, blocks: u64, is_moved: bool) -> (u64, u64) {
        let spb = self.model.sectors_per_block;
        let sectors = blocks * spb;
        let near = self.random.below(self.habits.hot_sectors.min(sectors));
        let sector = match self.random.below(8) {
            0 => self.random.below(sectors.min(4096 * spb)),
            1 => sectors - 1 - near,
            _ => near,
        };
        let longest = if is_moved {
            self.tuning.longest_write.min(BUFFER_SECTORS)
        } else {
            self.tuning.longest_write
        };
        let count = 1 + if self.random.once_in(2) {
            self.random.below(longest)
        } else {
            self.random.below(2 * spb)
        };
        (sector, count.min(longest).min(sectors - sector))
    }

    /// Sends a request on a random queue of a guest.
    fn submit(&mut self, index: usize, operation: Operation, sector: u64, count: u64) -> Step {
        let Some(guest) = self.guests.get(index) else { return Ok(()) };
        let volume = guest.volume;
        let queue = self.random.below(guest.channels.len() as u64) as usize;
        if guest
            .channels
            .get(queue)
            .is_none_or(|(channel, depth)| channel.readiness().in_flight >= *depth)
        {
            return self.poll(index, queue);
        }
        if operation == Operation::Flush && self.bug == Some(Bug::FlushesAnswered) {
            let issued = self.now();
            self.secure(volume, issued);
            return Ok(());
        }
        let Some(buffer) = self.requests.free.pop() else { return Ok(()) };
        self.note(format!("volume {volume}: {operation:?} of {count} sectors from {sector} on"));
        let issued = self.now();
        let stamps: Vec<(u64, u64)> = match operation {
            Operation::Write => self.stamps_to_write(volume, sector..sector + count),
            // A discard promises nothing about parts of blocks, and in fact leaves them as they
            // are.
            Operation::Discard => {
                self.model.whole_blocks(sector, count).map(|sector| (sector, 0)).collect()
            }
            Operation::WriteZeroes { .. } => {
                (sector..sector + count).map(|sector| (sector, 0)).collect()
            }
            Operation::Read | Operation::Flush => Vec::new(),
        };
        let request = self.request(operation, sector, count, buffer, &stamps)?;
        let model = self.model.volumes.get_mut(&volume);
        let writes = model.map(|model| model.begin(stamps, issued)).unwrap_or_default();
        self.requests.tags += 1;
        let tag = self.requests.tags;
        let faults = self.store.faults();
        self.requests.pending.insert(
            tag,
            Pending { volume, operation, sector, count, issued, writes, buffer, faults },
        );
        let mut batch = Batch::new();
        batch.push(request);
        batch.iter_mut().for_each(|request| request.tag = Some(Tag::from_bits(tag)));
        if self.random.once_in(2) {
            self.exchange(index, queue, &mut batch)?;
        } else if let Some((channel, _)) =
            self.guests.get_mut(index).and_then(|guest| guest.channels.get_mut(queue))
        {
            channel.submit(self.time, &mut batch);
        }
        let is_taken = batch.is_empty();
        batch.iter_mut().filter_map(|request| request.tag.take()).for_each(|tag| {
            tag.into_bits();
        });
        if is_taken { Ok(()) } else { Err("a queue with room takes nothing".to_owned()) }
    }

    /// A request over a buffer, whose data is in one piece or in two.
    fn request(
        &mut self,
        operation: Operation,
        sector: u64,
        count: u64,
        buffer: u64,
        stamps: &[(u64, u64)],
    ) -> Result<Box<BlockRequest>, String> {
        let mut request = BlockRequest::blank(2);
        request.operation = operation;
        request.offset_bytes = sector * SECTOR_BYTES as u64;
        request.len_bytes = count * SECTOR_BYTES as u64;
        request.taken_at = self.time;
        request.segments.bind(&self.requests.memory);
        if !matches!(operation, Operation::Read | Operation::Write) {
            return Ok(request);
        }
        let (address, len_bytes) =
            (buffer * BUFFER_SECTORS * SECTOR_BYTES as u64, request.len_bytes);
        let first =
            if self.random.once_in(4) { 1 + self.random.below(len_bytes - 1) } else { len_bytes };
        // The second piece comes first in memory, so that the two do not touch.
        for (address, len_bytes) in
            [(address + len_bytes - first, first), (address, len_bytes - first)]
        {
            if len_bytes > 0 {
                let pushed = request.segments.push(
                    GuestAddress(address),
                    len_bytes,
                    &mut RegionHint::default(),
                );
                pushed.map_err(|error| error.to_string())?;
            }
        }
        let data: Vec<u8> = match operation {
            Operation::Write => stamps.iter().flat_map(|(_, stamp)| fill(*stamp)).collect(),
            _ => fill(UNTOUCHED).repeat(count as usize),
        };
        request.segments.copy_from_slice(0, &data);
        Ok(request)
    }

    /// Polls a random queue.
    pub(super) fn poll_some(&mut self) -> Step {
        let guest = self.random.below(self.guests.len().max(1) as u64) as usize;
        let queues = self.guests.get(guest).map_or(0, |guest| guest.channels.len());
        let queue = self.random.below(queues.max(1) as u64) as usize;
        self.poll(guest, queue)
    }

    pub(super) fn poll_all(&mut self) -> Step {
        for guest in 0..self.guests.len() {
            for queue in 0..self.guests.get(guest).map_or(0, |guest| guest.channels.len()) {
                self.poll(guest, queue)?;
            }
        }
        Ok(())
    }

    fn poll(&mut self, guest: usize, queue: usize) -> Step {
        self.exchange(guest, queue, &mut Batch::new())
    }

    /// Submits `batch` to a queue, and handles the completions.
    fn exchange(&mut self, guest: usize, queue: usize, batch: &mut Batch) -> Step {
        self.time = Nanos(self.time.0 + 1 + self.random.below(2000));
        let only_polls = batch.is_empty() && self.random.once_in(2);
        let mut completed = Batch::new();
        if let Some((channel, _)) =
            self.guests.get_mut(guest).and_then(|guest| guest.channels.get_mut(queue))
        {
            if only_polls {
                channel.poll(self.time, &mut completed);
            } else {
                channel.exchange(self.time, batch, &mut completed);
            }
        }
        let tags: Vec<_> =
            completed.iter_mut().map(|request| request.tag.take().map(Tag::into_bits)).collect();
        for (request, tag) in completed.iter().zip(tags) {
            let pending = tag.and_then(|tag| self.requests.pending.remove(&tag));
            let pending =
                pending.ok_or_else(|| format!("a completion {tag:?} of no request in flight"))?;
            let succeeded = self.check_completion(request, &pending)?;
            self.note(format!("{pending}: {}", if succeeded { "done" } else { "failed" }));
            self.end(&pending, succeeded);
            if succeeded && pending.operation == Operation::Flush {
                self.secure(pending.volume, pending.issued);
            }
        }
        Ok(())
    }

    /// Ends a request.
    fn end(&mut self, pending: &Pending, succeeded: bool) {
        let now = self.now();
        self.requests.free.push(pending.buffer);
        if let Some(volume) = self.model.volumes.get_mut(&pending.volume) {
            volume.end(&pending.writes, now, succeeded);
        }
    }

    /// Notes the end of a flush that was `issued` then.
    fn secure(&mut self, volume: u64, issued: Moment) {
        let position = self.store_position();
        if let Some(volume) = self.model.volumes.get_mut(&volume) {
            volume.secure(issued, position);
        }
    }

    /// Checks the result of a request; true if it succeeded.
    fn check_completion(
        &mut self,
        request: &BlockRequest,
        pending: &Pending,
    ) -> Result<bool, String> {
        let Pending { volume, operation, sector, count, issued, .. } = *pending;
        if request.offset_bytes != sector * SECTOR_BYTES as u64
            || request.len_bytes != count * SECTOR_BYTES as u64
        {
            return Err(format!("{} comes back with other bytes", pending));
        }
        let excused = pending.faults != self.store.faults() || self.has_failed;
        match request.result {
            Ok(()) => {}
            Err(BlockError::NoSpace) if operation.is_write() => {
                self.ledger.outcome.refusals += 1;
                return Ok(false);
            }
            Err(BlockError::ReadOnly) if operation.is_write() && self.has_failed => {
                return Ok(false);
            }
            Err(BlockError::Io { .. } | BlockError::NoSpace) if excused => {
                self.ledger.outcome.failures += 1;
                return Ok(false);
            }
            Err(error) => return Err(format!("{} fails: {error}", pending)),
        }
        self.ledger.outcome.requests += 1;
        if operation == Operation::Read {
            let mut data = vec![0; request.len_bytes as usize];
            request.segments.copy_to_slice(0, &mut data);
            let Some(model) = self.model.volumes.get(&volume) else { return Ok(true) };
            for (sector, data) in (sector..).zip(data.chunks_exact(SECTOR_BYTES)) {
                let stamps = &self.ledger.stamps;
                let found = stamp_of(data)
                    .map_err(|word| format!("{}: {word:#x}, and not alone", pending))?;
                model.check_read(sector, issued, found).map_err(|allowed| {
                    let allowed: Vec<_> =
                        allowed.into_iter().map(|stamp| stamps.describe(stamp)).collect();
                    format!(
                        "{}: {sector} reads {} instead of {allowed:?}",
                        pending,
                        stamps.describe(found)
                    )
                })?;
            }
        }
        Ok(true)
    }

    /// Has a guest of each volume read all sectors that were ever written.
    pub(super) fn read_everything(&mut self) -> Step {
        for index in 0..self.guests.len() {
            let Some(guest) = self.guests.get(index) else { continue };
            let Some(volume) = self.model.volumes.get(&guest.volume) else { continue };
            let end = guest.sectors();
            let mut sectors: Vec<u64> = volume.written().filter(|sector| *sector < end).collect();
            sectors.dedup_by_key(|sector| *sector / BUFFER_SECTORS);
            for sector in sectors {
                let first = sector / BUFFER_SECTORS * BUFFER_SECTORS;
                self.submit(index, Operation::Read, first, BUFFER_SECTORS.min(end - first))?;
                self.drain()?;
            }
        }
        Ok(())
    }
}
