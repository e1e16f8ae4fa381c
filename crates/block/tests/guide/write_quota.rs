//! The stage of docs/writing-a-stage.md: writes find no space once they have used up a quota.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_block::{
    BlockChannel, BlockDevice, BlockError, BlockRequest, FilterChannel, Geometry, Meter,
    OpenedStage, Operation, Stage,
};
use sidecore_keys::{Key, Kind, Values, keys};
use sidecore_reactor::CoreContext;

keys! {
    /// The stage as an operator writes it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct WriteQuota {
        plain {}
        keys {
            #[required = "1024"]
            "quota_mib" => quota_mib: u64 = 0, Kind::Number(1, 1 << 40), "required",
                "the MiB that guests may write since the store was opened";
        }
    }
}

impl Stage for WriteQuota {
    const WORD: &'static str = "write-quota";
    const MEANING: &'static str = "Refuses writes beyond a quota, as a full store does.";
    const KEYS: &'static [Key] = Self::KEYS;

    fn from_values(values: &Values) -> Self {
        Self::from_values(values)
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn open(&self, _store: &str, below: Arc<dyn BlockDevice>) -> OpenedStage {
        let left_bytes = Arc::new(AtomicU64::new(self.quota_mib.saturating_mul(1 << 20)));
        Ok(Arc::new(QuotaStore { next: below, left_bytes }))
    }
}

/// The device that the stage makes of the one below it. All sidecores share it.
struct QuotaStore {
    next: Arc<dyn BlockDevice>,
    left_bytes: Arc<AtomicU64>,
}

impl BlockDevice for QuotaStore {
    fn geometry(&self) -> Geometry {
        self.next.geometry()
    }

    /// A channel belongs to one queue on one sidecore: its state needs no lock.
    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let next = self.next.open_channel(core, depth)?;
        let left_bytes = Arc::clone(&self.left_bytes);
        Ok(Box::new(FilterChannel::new(next, depth, move |request: &BlockRequest| {
            judge(request, &left_bytes)
        })))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.next.allocate(offset_bytes, len_bytes)
    }

    fn fallback(&self) -> Option<String> {
        self.next.fallback()
    }

    fn loss(&self) -> Option<String> {
        self.next.loss()
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        self.next.meters()
    }
}

/// Called for each request, on the sidecore: no lock, no allocation, no system call.
fn judge(request: &BlockRequest, left_bytes: &AtomicU64) -> Result<(), BlockError> {
    if request.operation != Operation::Write {
        return Ok(());
    }
    let take = |left: u64| left.checked_sub(request.len_bytes);
    match left_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
        Ok(_) => Ok(()),
        Err(_) => Err(BlockError::NoSpace),
    }
}
