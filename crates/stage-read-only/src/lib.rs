//! A stage that refuses writes, whatever devices are in front of it.
//!
//! Front ends learn it from the geometry, so that guests see a write-protected disk. A request that
//! would write all the same fails with [`BlockError::ReadOnly`] and goes no further. Flushes pass:
//! they cover what others wrote to the store below.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

use std::io;
use std::sync::Arc;

use sidecore_block::{
    BlockChannel, BlockDevice, BlockError, BlockRequest, FilterChannel, Geometry, Meter,
    OpenedStage, Stage,
};
use sidecore_keys::{Key, Values};
use sidecore_reactor::CoreContext;

/// The specification of the stage, which has no keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadOnlyStage;

impl Stage for ReadOnlyStage {
    const WORD: &'static str = "read-only";
    const MEANING: &'static str =
        "Refuses writes: guests see a write-protected disk, whose store others may write.";
    const KEYS: &'static [Key] = &[];

    fn from_values(_values: &Values) -> Self {
        Self
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn open(&self, _: &str, below: Arc<dyn BlockDevice>) -> OpenedStage {
        Ok(Arc::new(ReadOnlyStore { inner: below }))
    }
}

struct ReadOnlyStore {
    inner: Arc<dyn BlockDevice>,
}

impl BlockDevice for ReadOnlyStore {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: true, ..self.inner.geometry() }
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        self.inner.meters()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let inner = self.inner.open_channel(core, depth)?;
        Ok(Box::new(FilterChannel::new(inner, depth, |request: &BlockRequest| {
            if request.operation.is_write() { Err(BlockError::ReadOnly) } else { Ok(()) }
        })))
    }

    fn allocate(&self, _offset_bytes: u64, _len_bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn fallback(&self) -> Option<String> {
        self.inner.fallback()
    }

    fn loss(&self) -> Option<String> {
        self.inner.loss()
    }
}
