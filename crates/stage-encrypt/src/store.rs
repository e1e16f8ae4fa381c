//! The store.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_block::{
    BlockChannel, BlockDevice, BlockError, BlockRequest, Geometry, Meter, Operation,
};
use sidecore_luks::{Segment, Xts};
use sidecore_reactor::CoreContext;

use crate::channel::EncryptChannel;

/// Why a header does not fit a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// The data ends behind the store, or has no block.
    Size {
        /// The store's size.
        capacity_bytes: u64,
        /// The end of the first block, or of the data.
        end_bytes: u64,
    },
    /// The data does not start at a block.
    Offset {
        /// The start of the data.
        offset_bytes: u64,
        /// Size of a block of the store.
        block_bytes: u32,
    },
}

impl std::fmt::Display for Misfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Size { capacity_bytes, end_bytes } => write!(
                f,
                "the header's data ends at byte {end_bytes}, behind the store's \
                 {capacity_bytes} bytes; enlarge the store, or name the header that belongs to it"
            ),
            Self::Offset { offset_bytes, block_bytes } => write!(
                f,
                "the header's data starts at byte {offset_bytes}, which is no multiple of the \
                 store's blocks of {block_bytes} bytes; set a smaller `block_bytes`, or name the \
                 header that belongs to the store"
            ),
        }
    }
}

impl std::error::Error for Misfit {}

/// The cipher of a store, and the place of its data.
pub(crate) struct Cipher {
    pub(crate) xts: Xts,
    pub(crate) segment: Segment,
    /// As of the opening.
    geometry: Geometry,
    /// The size of the data, which grows with the store unless the header names it.
    capacity_bytes: AtomicU64,
}

impl Cipher {
    fn geometry(&self) -> Geometry {
        Geometry { capacity_bytes: self.capacity_bytes.load(Ordering::Relaxed), ..self.geometry }
    }

    /// Adopts the size of the store below.
    fn grow(&self, below: &Geometry) {
        if self.segment.len_bytes.is_none() {
            let room = below.capacity_bytes.saturating_sub(self.segment.offset_bytes);
            let whole = room & !u64::from(self.geometry.block_bytes).wrapping_sub(1);
            self.capacity_bytes.fetch_max(whole, Ordering::Relaxed);
        }
    }

    /// Whether a request can be carried out.
    #[inline]
    pub(crate) fn check(&self, request: &BlockRequest) -> Result<(), BlockError> {
        let is_write = request.operation.is_write();
        match request.operation {
            Operation::Flush => return Ok(()),
            _ if is_write && self.geometry.read_only => return Err(BlockError::ReadOnly),
            Operation::WriteZeroes { .. } => return Err(BlockError::Unsupported),
            Operation::Discard if !self.geometry.discard => return Err(BlockError::Unsupported),
            _ => {}
        }
        let (offset_bytes, len_bytes) = (request.offset_bytes, request.len_bytes);
        self.geometry().check(offset_bytes, len_bytes).map_err(|_| BlockError::OutOfBounds)?;
        let has_data = matches!(request.operation, Operation::Read | Operation::Write);
        // Fewer bytes than the range would have bytes of other requests in their place.
        if has_data && request.segments.len_bytes() != len_bytes {
            return Err(BlockError::OutOfBounds);
        }
        Ok(())
    }
}

/// Encrypts the data of the device below.
pub struct EncryptStore {
    inner: Arc<dyn BlockDevice>,
    cipher: Arc<Cipher>,
}

impl EncryptStore {
    /// The data of `segment` on `inner`, decrypted.
    ///
    /// # Errors
    /// The segment does not fit the device.
    pub fn new(
        inner: Arc<dyn BlockDevice>,
        xts: Xts,
        segment: Segment,
        allow_discards: bool,
    ) -> Result<Self, Misfit> {
        let below = inner.geometry();
        let block_bytes = below.block_bytes.max(segment.sector.bytes());
        let mask = u64::from(below.block_bytes).wrapping_sub(1);
        if segment.offset_bytes & mask != 0 {
            let (offset_bytes, block_bytes) = (segment.offset_bytes, below.block_bytes);
            return Err(Misfit::Offset { offset_bytes, block_bytes });
        }
        let room = below.capacity_bytes.saturating_sub(segment.offset_bytes);
        let len_bytes = segment.len_bytes.unwrap_or(room);
        let capacity_bytes = len_bytes & !u64::from(block_bytes).wrapping_sub(1);
        if len_bytes > room || capacity_bytes == 0 {
            let end_bytes = segment.offset_bytes.saturating_add(len_bytes.max(block_bytes.into()));
            return Err(Misfit::Size { capacity_bytes: below.capacity_bytes, end_bytes });
        }
        let geometry = Geometry {
            capacity_bytes,
            block_bytes,
            physical_block_bytes: below.physical_block_bytes.max(block_bytes),
            discard: below.discard && allow_discards,
            discard_zeroes: false,
            write_zeroes: false,
            ..below
        };
        let capacity_bytes = AtomicU64::new(capacity_bytes);
        Ok(Self { inner, cipher: Arc::new(Cipher { xts, segment, geometry, capacity_bytes }) })
    }
}

impl BlockDevice for EncryptStore {
    fn geometry(&self) -> Geometry {
        self.cipher.grow(&self.inner.geometry());
        self.cipher.geometry()
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        self.inner.meters()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let open = |depth| self.inner.open_channel(core, depth);
        Ok(Box::new(EncryptChannel::open(Arc::clone(&self.cipher), depth, open)?))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let offset_bytes = offset_bytes.saturating_add(self.cipher.segment.offset_bytes);
        self.inner.allocate(offset_bytes, len_bytes)
    }

    fn fallback(&self) -> Option<String> {
        self.inner.fallback()
    }

    fn loss(&self) -> Option<String> {
        self.inner.loss()
    }
}
