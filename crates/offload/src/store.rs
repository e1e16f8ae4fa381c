//! A stage on threads of its own, as a device.

use std::io;
use std::sync::{Arc, Weak};

use sidecore_block::{
    BlockChannel, BlockDevice, Geometry, Meter, OpenedStage, StageAccount, StageThreads,
};
use sidecore_reactor::{CoreContext, Listener};

use crate::below::BelowStore;
use crate::channel::OffloadChannel;
use crate::lane::Lane;
use crate::threads::Threads;

/// The largest number of threads of a stage.
pub const THREADS_MAX: u64 = 16;

/// Opens a stage of type `word` in front of `below`, by `open`, and runs it on `threads` threads of
/// its own.
///
/// # Errors
/// The stage's, or a thread cannot be started.
pub fn offload(
    word: &'static str,
    threads: usize,
    below: Arc<dyn BlockDevice>,
    open: impl FnOnce(Arc<dyn BlockDevice>) -> OpenedStage,
) -> OpenedStage {
    let stage = open(Arc::new(BelowStore(Arc::clone(&below))))?;
    let threads = Arc::new(Threads::start(word, threads)?);
    let account = stage.stages().into_iter().next();
    if let Some(account) = &account {
        let weak: Weak<Threads> = Arc::downgrade(&threads);
        account.set_threads(weak as Weak<dyn StageThreads>);
    }
    Ok(Arc::new(OffloadStore { stage, below, account, threads }))
}

/// A stage on threads of its own.
struct OffloadStore {
    stage: Arc<dyn BlockDevice>,
    below: Arc<dyn BlockDevice>,
    /// The stage's, if its panics are contained.
    account: Option<Arc<StageAccount>>,
    threads: Arc<Threads>,
}

impl BlockDevice for OffloadStore {
    fn geometry(&self) -> Geometry {
        self.stage.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        if self.account.as_ref().is_some_and(|account| account.failure().is_some()) {
            // The stage's code does not run any more, and so needs no thread.
            return self.stage.open_channel(core, depth);
        }
        let listener = Listener::new()?;
        let threads: Vec<_> = self.threads.of_queue(depth).collect();
        // The shares of a queue's depth, none of which is full before all are.
        let each = depth.div_ceil(threads.len().max(1));
        let stage = (&self.stage, self.below.as_ref());
        let lanes = threads.iter().map(|thread| Lane::open(stage, thread, (core, each), &listener));
        let lanes = lanes.collect::<io::Result<Vec<_>>>()?;
        Ok(Box::new(OffloadChannel::new(lanes, depth, listener, Arc::clone(&self.threads))?))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.stage.allocate(offset_bytes, len_bytes)
    }

    fn fallback(&self) -> Option<String> {
        self.stage.fallback()
    }

    fn loss(&self) -> Option<String> {
        self.stage.loss()
    }

    fn user_gone(&self) {
        self.stage.user_gone();
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        self.stage.meters()
    }

    fn stages(&self) -> Vec<Arc<StageAccount>> {
        self.stage.stages()
    }
}
