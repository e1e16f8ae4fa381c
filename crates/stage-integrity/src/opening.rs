//! The opening of a store: what was in flight when it was last used is decided, and the tags in
//! memory are then those of the store.

use crate::disk::Disk;
use crate::error::IntegrityError;
use crate::header::{Header, uuid_text};
use crate::intents::{Intent, decode};
use crate::layout::{COPIES, COPY_BYTES, Layout};
use crate::rules::Rule;
use crate::shared::Shared;
use crate::tag::{SECTOR_BYTES, Sums, TAGS_PER_SECTOR, Tag, decode_sector, encode_sector};

/// Bytes that are read at once: about 50 us of work for a queue that opens the store.
const STEP_BYTES: usize = 64 << 10;

/// Reads the header. One copy that can be read suffices.
pub(crate) async fn header(
    disk: &mut Disk,
    capacity_bytes: u64,
) -> Result<(Header, bool), IntegrityError> {
    let len_bytes = COPIES.saturating_mul(COPY_BYTES);
    if capacity_bytes < len_bytes {
        return Err(IntegrityError::NoHeader);
    }
    let mut copies = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
    let mut failed = None;
    for (number, copy) in (0..COPIES).zip(copies.chunks_exact_mut(COPY_BYTES as usize)) {
        failed = disk.read(number.saturating_mul(COPY_BYTES), copy).await.err().or(failed);
    }
    Header::of_copies(&copies).map_err(|error| failed.unwrap_or(error))
}

/// Whether a part of the header can be read: then an error elsewhere is one of its place, and not
/// one of the whole store.
async fn is_there(disk: &mut Disk) -> bool {
    let mut copy = [0; COPY_BYTES as usize];
    for number in 0..COPIES {
        if disk.read(number.saturating_mul(COPY_BYTES), &mut copy).await.is_ok() {
            return true;
        }
    }
    false
}

/// Opens a store: reads its tags, and decides about writes that were in flight when it was last
/// used. No channel uses it.
pub(crate) async fn open(shared: &Shared, disk: &mut Disk) -> Result<(), IntegrityError> {
    Opening { shared }.run(disk).await
}

/// Opens a store again, as after an unclean end of the daemon.
pub(crate) async fn open_again(shared: &Shared, disk: &mut Disk) -> Result<(), IntegrityError> {
    if shared.neglected.keeps(Rule::OpenAgain) {
        let wanted = &shared.header;
        let (header, _) = header(disk, wanted.layout.store_bytes()).await?;
        if header != *wanted {
            let (found, wanted) = (uuid_text(&header.uuid), uuid_text(&wanted.uuid));
            return Err(IntegrityError::OtherStore { found, wanted });
        }
        shared.tags.mark_unsure();
        open(shared, disk).await?;
    }
    if shared.journal.has_failed() {
        shared.users.keep_loss();
    }
    shared.journal.restart();
    Ok(())
}

/// See [`open`].
struct Opening<'a> {
    shared: &'a Shared,
}

impl Opening<'_> {
    /// Reads metadata unit by unit, after an error. An unreadable unit becomes ones: no sector has
    /// them, and zeros would be the tags of new blocks.
    async fn read_units(
        &self,
        disk: &mut Disk,
        start: u64,
        bytes: &mut [u8],
    ) -> Result<(), IntegrityError> {
        let mut at = start;
        let mut unreadable = 0_u64;
        for unit in bytes.chunks_mut(self.shared.layout.unit_bytes as usize) {
            if let Err(error) = disk.read(at, unit).await {
                if !is_there(disk).await {
                    return Err(error);
                }
                unit.fill(0xff);
                unreadable = unreadable.saturating_add(1);
            }
            at = at.saturating_add(unit.len() as u64);
        }
        if unreadable > 0 {
            tracing::error!(
                store = self.shared.name,
                unreadable,
                at_bytes = start,
                "units of checksums or intents cannot be read: reads of their blocks may fail \
                 until they are written again"
            );
        }
        Ok(())
    }

    /// Calls `visit` for each sector of an area, with its place on the store.
    async fn each_sector(
        &self,
        disk: &mut Disk,
        (start, end): (u64, u64),
        mut visit: impl FnMut(u64, &[u8]),
    ) -> Result<(), IntegrityError> {
        let mut buffer = vec![0; STEP_BYTES];
        let mut at = start;
        while at < end {
            let count = end.saturating_sub(at).min(STEP_BYTES as u64);
            let count = usize::try_from(count).unwrap_or(STEP_BYTES);
            let bytes = buffer.get_mut(..count).unwrap_or_default();
            if disk.read(at, bytes).await.is_err() {
                self.read_units(disk, at, bytes).await?;
            }
            for sector in bytes.chunks_exact(SECTOR_BYTES) {
                visit(at, sector);
                at = at.saturating_add(SECTOR_BYTES as u64);
            }
        }
        Ok(())
    }

    async fn run(&self, disk: &mut Disk) -> Result<(), IntegrityError> {
        let is_read_only = self.shared.geometry.read_only;
        self.read_tags(disk).await?;
        let intents = self.read_intents(disk).await?;
        if !is_read_only && self.shared.neglected.keeps(Rule::FlushFirst) {
            // A daemon that has died may have left writes that are read, and not durable. They are
            // before their slots are used again, and before tags say so.
            disk.flush().await?;
        }
        let mut torn = 0_u64;
        for intents in intents.chunk_by(|one, other| one.block == other.block) {
            torn = torn.saturating_add(u64::from(!self.decide(disk, intents).await?));
        }
        if torn > 0 {
            tracing::warn!(
                store = self.shared.name,
                torn,
                "blocks were torn when the store was last used: their reads fail until they are \
                 written again"
            );
        }
        if is_read_only { Ok(()) } else { self.write_tags(disk).await }
    }

    async fn read_tags(&self, disk: &mut Disk) -> Result<(), IntegrityError> {
        let start = self.shared.layout.tags_at();
        let len_bytes =
            self.shared.layout.units().saturating_mul(self.shared.layout.unit_bytes.into());
        let (mut first, mut damaged) = (0_u64, 0_u64);
        self.each_sector(disk, (start, start.saturating_add(len_bytes)), |at_bytes, sector| {
            let put = |block, tag| self.shared.tags.put(block, tag);
            let is_whole = decode_sector(&self.shared.sums, at_bytes, sector, first, put);
            damaged = damaged.saturating_add(u64::from(!is_whole));
            first = first.saturating_add(TAGS_PER_SECTOR);
        })
        .await?;
        if damaged > 0 {
            tracing::error!(
                store = self.shared.name,
                sectors = damaged,
                blocks = damaged.saturating_mul(TAGS_PER_SECTOR),
                "sectors of checksums are damaged: reads of their blocks fail until they are \
                 written again"
            );
        }
        Ok(())
    }

    /// The intents that are newer than the tags, in the order of blocks. One list, since a queue
    /// that opens the store frees all of them at once.
    async fn read_intents(&self, disk: &mut Disk) -> Result<Vec<Intent>, IntegrityError> {
        let start = Layout::journal_at();
        let mut intents = Vec::new();
        let area = (start, start.saturating_add(self.shared.layout.journal_bytes()));
        self.each_sector(disk, area, |at_bytes, sector| {
            for intent in decode(&self.shared.sums, at_bytes, sector) {
                let counts = self.shared.tags.get(intent.block).is_some_and(|now| {
                    intent.tag.is_newer(now) || !self.shared.neglected.keeps(Rule::NewerOnly)
                });
                if counts {
                    intents.push(intent);
                }
            }
        })
        .await?;
        intents.sort_by_key(|intent| intent.block);
        Ok(intents)
    }

    /// Decides which content the block of these intents has. Returns whether it has one of those
    /// that it may have.
    async fn decide(&self, disk: &mut Disk, intents: &[Intent]) -> Result<bool, IntegrityError> {
        let Some(block) = intents.first().map(|intent| intent.block) else { return Ok(true) };
        let Some(tag) = self.shared.tags.get(block) else { return Ok(true) };
        let mut newest = tag;
        for intent in intents {
            if intent.tag.is_newer(newest) {
                newest = intent.tag;
            }
        }
        let mut data = vec![0; self.shared.layout.block_bytes as usize];
        if let Err(error) = disk.read(self.shared.layout.at(block), &mut data).await {
            if !is_there(disk).await {
                return Err(error);
            }
            // As a torn one: its reads fail while it cannot be read, and a write mends it.
            self.shared.tags.put(block, newest);
            self.shared.tags.mark(block);
            return Ok(false);
        }
        let sum = self.shared.sums.at(block, Sums::hash(&data));
        let has_it = |tag: &Tag| tag.sum == sum && !tag.is_unknown();
        let mut tags = std::iter::once(tag).chain(intents.iter().map(|intent| intent.tag));
        let found = tags.find(has_it);
        let is_torn = found.is_none();
        let found = match found {
            Some(found) => found.confirmed_at(newest),
            None if self.shared.neglected.keeps(Rule::TornIsBad) => newest,
            None => newest.next(sum),
        };
        self.shared.tags.put(block, found);
        self.shared.tags.mark(block);
        Ok(!is_torn)
    }

    /// Writes the tags that were decided about.
    async fn write_tags(&self, disk: &mut Disk) -> Result<(), IntegrityError> {
        let unit_bytes = u64::from(self.shared.layout.unit_bytes);
        let mut bytes = vec![0; self.shared.layout.unit_bytes as usize];
        let mut next = 0;
        let mut has_written = false;
        while let Some(unit) = self.shared.tags.take_dirty(next) {
            next = unit.saturating_add(1);
            let start =
                self.shared.layout.tags_at().saturating_add(unit.saturating_mul(unit_bytes));
            let mut first = unit.saturating_mul(self.shared.layout.tags_per_unit());
            let mut at_bytes = start;
            for sector in bytes.chunks_exact_mut(SECTOR_BYTES) {
                encode_sector(
                    &self.shared.sums,
                    at_bytes,
                    sector,
                    |block| self.shared.tags.get(block),
                    first,
                );
                first = first.saturating_add(TAGS_PER_SECTOR);
                at_bytes = at_bytes.saturating_add(SECTOR_BYTES as u64);
            }
            disk.write(start, &bytes).await?;
            has_written = true;
        }
        if has_written {
            disk.flush().await?;
        }
        self.shared.tags.are_durable();
        Ok(())
    }
}
