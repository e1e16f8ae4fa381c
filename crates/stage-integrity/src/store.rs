//! The store.

use std::io;
use std::sync::Arc;

use sidecore_block::{BlockChannel, BlockDevice, Findings, Geometry, Meter};
use sidecore_reactor::CoreContext;

use crate::bad::BadBlocks;
use crate::channel::IntegrityChannel;
use crate::disk::{Disk, run};
use crate::error::IntegrityError;
use crate::header::{Header, uuid_text};
use crate::journal::Journal;
use crate::layout::{COPIES, COPY_BYTES, Layout};
use crate::opening::{header, open};
use crate::rules::Neglected;
#[cfg(feature = "neglect")]
use crate::rules::Rule;
use crate::shared::Shared;
use crate::tag::Sums;
use crate::tags::Tags;
use crate::users::{User, Users};

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

/// Refuses a store that has something at its start or end: a header, partitions, a filesystem.
async fn require_blank(disk: &mut Disk, below: &Geometry) -> Result<(), IntegrityError> {
    match header(disk, below.capacity_bytes).await {
        Err(IntegrityError::NoHeader) => {}
        Err(error @ IntegrityError::Io(_)) => return Err(error),
        _ => return Err(IntegrityError::HasHeader),
    }
    let len_bytes = below.capacity_bytes.min(BLANK_BYTES);
    let mut bytes = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
    for at_bytes in [0, below.capacity_bytes.saturating_sub(len_bytes)] {
        disk.read(at_bytes, &mut bytes).await?;
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
    run(device, async |disk| write(disk, &below, layout, options).await)?;
    Ok(layout)
}

/// Writes an empty store.
async fn write(
    disk: &mut Disk,
    below: &Geometry,
    layout: Layout,
    options: &FormatOptions,
) -> Result<(), IntegrityError> {
    if !options.force {
        require_blank(disk, below).await?;
    }
    // A store that is not formatted in full has no header.
    let copies_end = COPIES.saturating_mul(COPY_BYTES);
    disk.zero((0, copies_end), false, false).await?;
    disk.flush().await?;
    let has_means = below.write_zeroes;
    disk.zero((copies_end, layout.data_at()), false, has_means).await?;
    disk.zero((layout.data_at(), layout.store_bytes()), true, has_means).await?;
    disk.flush().await?;
    let copy = Header { uuid: options.uuid, layout }.encode();
    for number in 0..COPIES {
        disk.write(number.saturating_mul(COPY_BYTES), &copy).await?;
    }
    disk.flush().await
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
        let shared = run(&*inner, async |disk| {
            let (header, is_damaged) = header(disk, below.capacity_bytes).await?;
            if is_damaged {
                tracing::warn!(store = name, "one copy of the header of the checksums is damaged");
            }
            let shared = shared(name, header, &below, options)?;
            open(&shared, disk).await?;
            Ok(shared)
        })?;
        Ok(Self { inner, shared: Arc::new(shared) })
    }
}

/// The state of a store that is to be opened, without its tags.
fn shared(
    name: &str,
    header: Header,
    below: &Geometry,
    options: &OpenOptions,
) -> Result<Shared, IntegrityError> {
    let Header { uuid, layout } = header;
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
    let tags = Tags::new(layout.blocks, layout.tags_per_unit());
    let too_many = IntegrityError::Memory { blocks: layout.blocks };
    Ok(Shared {
        name: name.to_owned(),
        header,
        layout,
        geometry: geometry(&layout, below),
        sums: Sums::new(&uuid, layout.block_bytes),
        tags: tags.ok_or(too_many.clone())?,
        bad: BadBlocks::new(layout.blocks).ok_or(too_many)?,
        journal: Journal::new(layout.slots),
        users: Users::default(),
        findings: Arc::new(Findings::new(name)),
        is_volatile: below.volatile_cache,
        neglected: options.neglected(),
    })
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

impl BlockDevice for IntegrityStore {
    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        self.inner.meters()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        // Counted before the store knows of its new user, to whom it shows no loss of the last one.
        let user = User::new(&self.shared, self.inner.loss().is_some());
        let open = |depth| self.inner.open_channel(core, depth);
        Ok(Box::new(IntegrityChannel::open(user, depth, open)?))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let data_at = self.shared.layout.data_at();
        self.inner.allocate(offset_bytes.saturating_add(data_at), len_bytes)
    }

    fn fallback(&self) -> Option<String> {
        self.inner.fallback()
    }

    fn loss(&self) -> Option<String> {
        // A guest that lives on has closed its connection, too, if its VMM connects again.
        let has_lost = || self.shared.users.have_lost(self.shared.journal.has_failed());
        self.inner.loss().or_else(|| {
            has_lost().then(|| "a flush of its last user, which is gone, has failed".to_owned())
        })
    }

    fn user_gone(&self) {
        self.shared.users.user_gone();
    }

    fn findings(&self) -> Option<Arc<Findings>> {
        Some(Arc::clone(&self.shared.findings))
    }
}
