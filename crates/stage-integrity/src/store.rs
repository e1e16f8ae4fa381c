//! The store.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use sidecore_block::{BlockChannel, BlockDevice, Findings, Geometry, Meter};
use sidecore_reactor::CoreContext;

use crate::channel::IntegrityChannel;
use crate::disk::{Disk, MOST_BYTES};
use crate::error::IntegrityError;
use crate::header::{Header, uuid_text};
use crate::intents::{Intent, decode};
use crate::journal::Journal;
use crate::layout::{COPIES, COPY_BYTES, Layout};
use crate::rules::{Neglected, Rule};
use crate::shared::Shared;
use crate::tag::{SECTOR_BYTES, Sums, TAGS_PER_SECTOR, Tag, decode_sector, encode_sector};
use crate::tags::Tags;

/// How a store is made.
#[derive(Clone, Copy, Debug)]
pub struct FormatOptions {
    /// The store's identity: random.
    pub uuid: [u8; 16],
    /// Bytes of a block: of the disk's, and of a checksum.
    pub block_bytes: u32,
    /// Slots for intents in each half of the journal; `None` for what suits the store.
    pub slots: Option<u32>,
    /// Whether a store that is not blank is overwritten.
    pub force: bool,
}

/// How a store is opened.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The UUID that the store must have.
    pub uuid: Option<String>,
    /// A rule that is neglected, for simulations.
    #[cfg(feature = "neglect")]
    pub neglect: Option<Rule>,
}

impl OpenOptions {
    /// The usual options, for the store with this UUID, or for any.
    #[must_use]
    pub fn with_uuid(uuid: Option<String>) -> Self {
        Self {
            uuid,
            #[cfg(feature = "neglect")]
            neglect: None,
        }
    }

    fn neglected(&self) -> Neglected {
        #[cfg(feature = "neglect")]
        return Neglected(self.neglect);
        #[cfg(not(feature = "neglect"))]
        Neglected::default()
    }
}

/// Bytes at each end of a store that are zeros if it is blank.
const BLANK_BYTES: u64 = 64 << 10;

/// Reads the header. One copy that can be read suffices.
fn header(disk: &mut Disk, below: &Geometry) -> Result<(Header, bool), IntegrityError> {
    let len_bytes = COPIES.saturating_mul(COPY_BYTES);
    if below.capacity_bytes < len_bytes {
        return Err(IntegrityError::NoHeader);
    }
    let mut copies = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
    let mut failed = None;
    for (number, copy) in (0..COPIES).zip(copies.chunks_exact_mut(COPY_BYTES as usize)) {
        failed = disk.read(number.saturating_mul(COPY_BYTES), copy).err().or(failed);
    }
    Header::of_copies(&copies).map_err(|error| failed.unwrap_or(error))
}

/// Whether a part of the header can be read: then an error elsewhere is one of its place, and not
/// one of the whole store.
fn is_there(disk: &mut Disk) -> bool {
    let mut copy = [0; COPY_BYTES as usize];
    (0..COPIES).any(|number| disk.read(number.saturating_mul(COPY_BYTES), &mut copy).is_ok())
}

/// Refuses a store that has something at its start or end: a header, partitions, a filesystem.
fn require_blank(disk: &mut Disk, below: &Geometry) -> Result<(), IntegrityError> {
    match header(disk, below) {
        Err(IntegrityError::NoHeader) => {}
        Err(error @ IntegrityError::Io(_)) => return Err(error),
        _ => return Err(IntegrityError::HasHeader),
    }
    let len_bytes = below.capacity_bytes.min(BLANK_BYTES);
    let mut bytes = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
    for at_bytes in [0, below.capacity_bytes.saturating_sub(len_bytes)] {
        disk.read(at_bytes, &mut bytes)?;
        if bytes.iter().any(|byte| *byte != 0) {
            return Err(IntegrityError::NotBlank);
        }
    }
    Ok(())
}

/// Makes a store that keeps checksums. What it held is lost: all of it becomes zeros. Returns the
/// sizes.
///
/// # Errors
/// The store does not suit, or is not blank: then nothing was changed. Or it cannot be written.
pub fn format(device: &dyn BlockDevice, options: &FormatOptions) -> Result<Layout, IntegrityError> {
    let below = device.geometry();
    let layout = Layout::of(&below, options.block_bytes, options.slots);
    let layout = layout.ok_or(IntegrityError::NoRoom {
        capacity_bytes: below.capacity_bytes,
        below_bytes: below.block_bytes,
        block_bytes: options.block_bytes,
    })?;
    if below.read_only {
        return Err(IntegrityError::ReadOnly);
    }
    let mut disk = Disk::open(device)?;
    if !options.force {
        require_blank(&mut disk, &below)?;
    }
    // A store that is not formatted in full has no header.
    let copies_end = COPIES.saturating_mul(COPY_BYTES);
    disk.zero((0, copies_end), false, false)?;
    disk.flush()?;
    let has_means = below.write_zeroes;
    disk.zero((copies_end, layout.data_at()), false, has_means)?;
    disk.zero((layout.data_at(), layout.store_bytes()), true, has_means)?;
    disk.flush()?;
    let copy = Header { uuid: options.uuid, layout }.encode();
    for number in 0..COPIES {
        disk.write(number.saturating_mul(COPY_BYTES), &copy)?;
    }
    disk.flush()?;
    Ok(layout)
}

/// A store whose blocks have checksums.
pub struct IntegrityStore {
    inner: Arc<dyn BlockDevice>,
    shared: Arc<Shared>,
}

impl IntegrityStore {
    /// Opens the store called `name`: reads its tags, and decides about writes that were in flight
    /// when it was last used.
    ///
    /// # Errors
    /// It has no checksums, they are damaged, or it is another store: then nothing was changed. Or
    /// it cannot be read or written.
    pub fn open(
        inner: Arc<dyn BlockDevice>,
        name: &str,
        options: &OpenOptions,
    ) -> Result<Self, IntegrityError> {
        let below = inner.geometry();
        let mut disk = Disk::open(&*inner)?;
        let (Header { uuid, layout }, is_damaged) = header(&mut disk, &below)?;
        let found = uuid_text(&uuid);
        if let Some(wanted) = options.uuid.clone().filter(|wanted| *wanted != found) {
            return Err(IntegrityError::OtherStore { found, wanted });
        }
        let (has_bytes, needs_bytes) = (below.capacity_bytes, layout.store_bytes());
        if has_bytes < needs_bytes {
            return Err(IntegrityError::Shrunk { has_bytes, needs_bytes });
        }
        let most = layout.block_bytes.min(layout.unit_bytes);
        if below.block_bytes > most {
            let has_bytes = below.block_bytes;
            return Err(IntegrityError::Blocks { has_bytes, needs_bytes: most });
        }
        if is_damaged {
            tracing::warn!(store = name, "one copy of the header of the checksums is damaged");
        }
        let tags = Tags::new(layout.blocks, layout.tags_per_unit());
        let tags = tags.ok_or(IntegrityError::Memory { blocks: layout.blocks })?;
        let sums = Sums::new(&uuid, layout.block_bytes);
        let neglected = options.neglected();
        let opening = Opening { name, layout, sums, tags: &tags, neglected };
        opening.run(&mut disk, below.read_only)?;
        let shared = Shared {
            layout,
            geometry: geometry(&layout, &below),
            sums,
            tags,
            journal: Journal::new(layout.slots),
            findings: Arc::new(Findings::new(name)),
            is_volatile: below.volatile_cache,
            neglected,
        };
        Ok(Self { inner, shared: Arc::new(shared) })
    }
}

/// The geometry of the disk.
fn geometry(layout: &Layout, below: &Geometry) -> Geometry {
    Geometry {
        capacity_bytes: layout.capacity_bytes(),
        block_bytes: layout.block_bytes,
        physical_block_bytes: below.physical_block_bytes.max(layout.block_bytes),
        // Tags are durable after a flush.
        volatile_cache: true,
        // A discarded block has the checksum of zeros, so zeros are written.
        discard: below.discard && below.write_zeroes,
        discard_zeroes: below.discard && below.write_zeroes,
        ..*below
    }
}

/// The opening of a store.
struct Opening<'a> {
    name: &'a str,
    layout: Layout,
    sums: Sums,
    tags: &'a Tags,
    neglected: Neglected,
}

impl Opening<'_> {
    /// Reads metadata unit by unit, after an error. An unreadable unit becomes ones: no sector has
    /// them, and zeros would be the tags of new blocks.
    fn read_units(
        &self,
        disk: &mut Disk,
        start: u64,
        bytes: &mut [u8],
    ) -> Result<(), IntegrityError> {
        let mut at = start;
        let mut unreadable = 0_u64;
        for unit in bytes.chunks_mut(self.layout.unit_bytes as usize) {
            if let Err(error) = disk.read(at, unit) {
                if !is_there(disk) {
                    return Err(error);
                }
                unit.fill(0xff);
                unreadable = unreadable.saturating_add(1);
            }
            at = at.saturating_add(unit.len() as u64);
        }
        if unreadable > 0 {
            tracing::error!(
                store = self.name,
                unreadable,
                at_bytes = start,
                "units of checksums or intents cannot be read: reads of their blocks may fail \
                 until they are written again"
            );
        }
        Ok(())
    }

    /// Calls `visit` for each sector of an area, with its place on the store.
    fn each_sector(
        &self,
        disk: &mut Disk,
        (start, end): (u64, u64),
        mut visit: impl FnMut(u64, &[u8]),
    ) -> Result<(), IntegrityError> {
        let mut buffer = vec![0; MOST_BYTES];
        let mut at = start;
        while at < end {
            let count = end.saturating_sub(at).min(MOST_BYTES as u64);
            let count = usize::try_from(count).unwrap_or(MOST_BYTES);
            let bytes = buffer.get_mut(..count).unwrap_or_default();
            if disk.read(at, bytes).is_err() {
                self.read_units(disk, at, bytes)?;
            }
            for sector in bytes.chunks_exact(SECTOR_BYTES) {
                visit(at, sector);
                at = at.saturating_add(SECTOR_BYTES as u64);
            }
        }
        Ok(())
    }

    fn run(&self, disk: &mut Disk, is_read_only: bool) -> Result<(), IntegrityError> {
        self.read_tags(disk)?;
        let intents = self.read_intents(disk)?;
        if !is_read_only && self.neglected.keeps(Rule::FlushFirst) {
            // A daemon that has died may have left writes that are read, and not durable. They are
            // before their slots are used again, and before tags say so.
            disk.flush()?;
        }
        let mut torn = 0_u64;
        for (block, intents) in &intents {
            torn = torn.saturating_add(u64::from(!self.decide(disk, *block, intents)?));
        }
        if torn > 0 {
            tracing::warn!(
                store = self.name,
                torn,
                "blocks were torn when the store was last used: their reads fail until they are \
                 written again"
            );
        }
        if is_read_only { Ok(()) } else { self.write_tags(disk) }
    }

    fn read_tags(&self, disk: &mut Disk) -> Result<(), IntegrityError> {
        let start = self.layout.tags_at();
        let len_bytes = self.layout.units().saturating_mul(self.layout.unit_bytes.into());
        let (mut first, mut damaged) = (0_u64, 0_u64);
        self.each_sector(disk, (start, start.saturating_add(len_bytes)), |at_bytes, sector| {
            let put = |block, tag| self.tags.set(block, tag);
            let is_whole = decode_sector(&self.sums, at_bytes, sector, first, put);
            damaged = damaged.saturating_add(u64::from(!is_whole));
            first = first.saturating_add(TAGS_PER_SECTOR);
        })?;
        if damaged > 0 {
            tracing::error!(
                store = self.name,
                sectors = damaged,
                blocks = damaged.saturating_mul(TAGS_PER_SECTOR),
                "sectors of checksums are damaged: reads of their blocks fail until they are \
                 written again"
            );
        }
        Ok(())
    }

    /// The intents that are newer than the tags, by block.
    fn read_intents(&self, disk: &mut Disk) -> Result<BTreeMap<u64, Vec<Tag>>, IntegrityError> {
        let start = Layout::journal_at();
        let mut intents: BTreeMap<u64, Vec<Tag>> = BTreeMap::new();
        let area = (start, start.saturating_add(self.layout.journal_bytes()));
        self.each_sector(disk, area, |at_bytes, sector| {
            for Intent { block, tag } in decode(&self.sums, at_bytes, sector) {
                let counts = self
                    .tags
                    .get(block)
                    .is_some_and(|now| tag.is_newer(now) || !self.neglected.keeps(Rule::NewerOnly));
                if counts {
                    intents.entry(block).or_default().push(tag);
                }
            }
        })?;
        Ok(intents)
    }

    /// Decides which content a block has that a write was in flight to. Returns whether it has one
    /// of those that it may have.
    fn decide(&self, disk: &mut Disk, block: u64, intents: &[Tag]) -> Result<bool, IntegrityError> {
        let Some(tag) = self.tags.get(block) else { return Ok(true) };
        let mut newest = tag;
        for intent in intents {
            if intent.is_newer(newest) {
                newest = *intent;
            }
        }
        let mut data = vec![0; self.layout.block_bytes as usize];
        if let Err(error) = disk.read(self.layout.at(block), &mut data) {
            if !is_there(disk) {
                return Err(error);
            }
            // As a torn one: its reads fail while it cannot be read, and a write mends it.
            self.tags.set(block, newest);
            self.tags.mark(block);
            return Ok(false);
        }
        let sum = self.sums.at(block, Sums::hash(&data));
        let has_it = |tag: &&Tag| tag.sum == sum && !tag.is_unknown();
        let found = [tag].iter().find(has_it).or_else(|| intents.iter().find(has_it)).copied();
        let is_torn = found.is_none();
        let found = match found {
            Some(found) => found.confirmed_at(newest),
            None if self.neglected.keeps(Rule::TornIsBad) => newest,
            None => newest.next(sum),
        };
        self.tags.set(block, found);
        self.tags.mark(block);
        Ok(!is_torn)
    }

    /// Writes the tags that were decided about.
    fn write_tags(&self, disk: &mut Disk) -> Result<(), IntegrityError> {
        let unit_bytes = u64::from(self.layout.unit_bytes);
        let mut bytes = vec![0; self.layout.unit_bytes as usize];
        let mut next = 0;
        let mut has_written = false;
        while let Some(unit) = self.tags.take_dirty(next) {
            next = unit.saturating_add(1);
            let start = self.layout.tags_at().saturating_add(unit.saturating_mul(unit_bytes));
            let mut first = unit.saturating_mul(self.layout.tags_per_unit());
            let mut at_bytes = start;
            for sector in bytes.chunks_exact_mut(SECTOR_BYTES) {
                encode_sector(&self.sums, at_bytes, sector, |block| self.tags.get(block), first);
                first = first.saturating_add(TAGS_PER_SECTOR);
                at_bytes = at_bytes.saturating_add(SECTOR_BYTES as u64);
            }
            disk.write(start, &bytes)?;
            has_written = true;
        }
        if has_written { disk.flush() } else { Ok(()) }
    }
}

impl BlockDevice for IntegrityStore {
    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        self.inner.meters()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let open = |depth| self.inner.open_channel(core, depth);
        Ok(Box::new(IntegrityChannel::open(Arc::clone(&self.shared), depth, open)?))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let data_at = self.shared.layout.data_at();
        self.inner.allocate(offset_bytes.saturating_add(data_at), len_bytes)
    }

    fn fallback(&self) -> Option<String> {
        self.inner.fallback()
    }

    fn loss(&self) -> Option<String> {
        self.inner.loss()
    }

    fn findings(&self) -> Option<Arc<Findings>> {
        Some(Arc::clone(&self.shared.findings))
    }
}
