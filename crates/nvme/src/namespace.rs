//! A namespace: a store with a number and names.

use std::sync::Arc;

use sidecore_block::BlockDevice;

/// The blocks that a controller serves under one namespace identifier.
#[derive(Clone)]
pub struct Namespace {
    /// Its number on this controller (NSID), from 1.
    pub id: u32,
    /// Where its blocks are.
    pub store: Arc<dyn BlockDevice>,
    /// The size of a logical block in bytes: 512 or 4096, and not smaller than the store's.
    pub block_bytes: u32,
    /// NVMe base 2.0, 4.5.1.6: globally unique, and the same for as long as the volume lives.
    pub nguid: [u8; 16],
    /// RFC 9562, as 4.5.1.5 has it: as unique as the NGUID, and as lasting; zeros if it has none.
    pub uuid: [u8; 16],
}

impl std::fmt::Debug for Namespace {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { id, block_bytes, nguid, .. } = self;
        formatter
            .debug_struct("Namespace")
            .field("id", id)
            .field("block_bytes", block_bytes)
            .field("nguid", nguid)
            .finish()
    }
}
