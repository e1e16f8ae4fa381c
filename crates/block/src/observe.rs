//! Stages that only look at requests.
//!
//! An observer sees requests after the store has completed them and before their front end does. It
//! is lent them, and cannot keep or change one. So a panic of its code loses none: none of the
//! layers that [contain](crate::contain()) other stages is needed, the observer is left out from
//! then on, and its device goes on.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use sidecore_memory::GuestMemory;
use sidecore_reactor::{CoreClock, CoreContext, caught};
use sidecore_units::Nanos;

use crate::contain::{ChannelStats, LONG, Sampler};
use crate::{
    Batch, BlockChannel, BlockDevice, BlockRequest, Geometry, Mapped, Meter, OpenedStage,
    Readiness, Recording, StageAccount, StageError,
};

/// A stage that only looks at requests.
pub trait Observe: Send + Sync {
    /// The observer of one more channel, on this sidecore.
    fn open_channel(&self, core: &CoreContext) -> Box<dyn Observer>;

    /// The meters that it counts in. Read once.
    fn meters(&self) -> Vec<Arc<Meter>> {
        Vec::new()
    }

    /// The recording that it makes, if it makes one. Read once.
    fn recording(&self) -> Option<Arc<Recording>> {
        None
    }

    /// Whether it sees requests of virtual functions that the store carries out
    /// [at once](BlockChannel::exchange_mapped), whose offsets are those of the virtual disks.
    /// Their time is that of the last poll. Read once.
    fn takes_mapped(&self) -> bool {
        false
    }
}

/// The observer of one channel, on the sidecore of the channel.
pub trait Observer {
    /// Sees requests that have ended, with their results. `now` is the time of the turn. It neither
    /// allocates, locks nor waits.
    fn completed(&mut self, now: Nanos, requests: &[Box<BlockRequest>]);
}

/// The observer that [`observe`] opens, or why it cannot be.
pub type OpenedObserver = Result<Arc<dyn Observe>, StageError>;

/// Opens an observer called `word` of the store called `store`, and has it look at the requests to
/// `below`.
///
/// # Errors
/// The observer's, or its panic.
pub fn observe(
    word: &'static str,
    store: &str,
    below: Arc<dyn BlockDevice>,
    open: impl FnOnce() -> OpenedObserver,
) -> OpenedStage {
    let account = Arc::new(StageAccount::new(word, store));
    let of_stage = Arc::clone(&account);
    let opened = caught(|| -> Result<Observed, StageError> {
        let observe = open()?;
        of_stage.set_recording(observe.recording());
        let (takes_mapped, meters) = (observe.takes_mapped(), observe.meters());
        Ok(Observed { observe: Some(observe), takes_mapped, meters, below, account })
    });
    let opened = opened.map_err(|message| StageError {
        stage: word,
        reason: format!("it has panicked as it was opened: {message}"),
    })?;
    opened.map(|observed| Arc::new(observed) as _)
}

/// A device whose requests are looked at.
struct Observed {
    /// `None` while it is dropped.
    observe: Option<Arc<dyn Observe>>,
    takes_mapped: bool,
    meters: Vec<Arc<Meter>>,
    below: Arc<dyn BlockDevice>,
    account: Arc<StageAccount>,
}

impl BlockDevice for Observed {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let inner = self.below.open_channel(core, depth)?;
        let account = Arc::clone(&self.account);
        let observe = self.observe.as_ref().filter(|_| account.failure().is_none());
        let observer = observe.and_then(|observe| {
            let opened = caught(|| observe.open_channel(core));
            opened.map_err(|message| account.leave_out(&message)).ok()
        });
        let (stats, clock) = (account.open_channel(), core.clock());
        Ok(Box::new(ObservedChannel {
            takes_mapped: self.takes_mapped && inner.takes_mapped(),
            inner,
            observer,
            account,
            stats,
            clock,
            sampler: Sampler::default(),
            now: Nanos::ZERO,
        }))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.below.allocate(offset_bytes, len_bytes)
    }

    fn user_gone(&self) {
        self.below.user_gone();
    }

    fn fallback(&self) -> Option<String> {
        self.below.fallback()
    }

    fn loss(&self) -> Option<String> {
        self.below.loss()
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        let mut meters = self.below.meters();
        meters.extend(self.meters.iter().cloned());
        meters
    }

    fn stages(&self) -> Vec<Arc<StageAccount>> {
        let mut stages = vec![Arc::clone(&self.account)];
        stages.extend(self.below.stages());
        stages
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        let observe = self.observe.take();
        let _ = caught(|| drop(observe)).map_err(|message| self.account.leave_out(&message));
    }
}

/// Requests go to the channel below as they come, so that the stage has no list of its own.
struct ObservedChannel {
    inner: Box<dyn BlockChannel>,
    takes_mapped: bool,
    /// `None` when it has been left out.
    observer: Option<Box<dyn Observer>>,
    account: Arc<StageAccount>,
    stats: Arc<ChannelStats>,
    clock: Option<CoreClock>,
    sampler: Sampler,
    /// The time of the last turn.
    now: Nanos,
}

impl ObservedChannel {
    /// Shows the observer what `run` has appended to `completed`.
    #[inline]
    fn observed(
        &mut self,
        completed: &mut Batch,
        run: impl FnOnce(&mut dyn BlockChannel, &mut Batch),
    ) {
        let start = completed.len();
        run(self.inner.as_mut(), completed);
        let ended = completed.get(start..).unwrap_or_default();
        if !ended.is_empty() {
            self.show(ended);
        }
    }

    #[inline]
    fn show(&mut self, ended: &[Box<BlockRequest>]) {
        let Some(observer) = &mut self.observer else { return };
        if self.account.failure().is_some() {
            // Reports show the stage as left out, so each channel leaves its observer out.
            self.drop_observer();
            return;
        }
        let now = self.now;
        let weight = if self.clock.is_some() { self.sampler.weight(now) } else { 0 };
        let clock = self.clock.as_ref().filter(|_| weight > 0);
        let since = clock.map(|clock| clock());
        let seen = caught(|| observer.completed(now, ended));
        if let (Some(since), Some(clock)) = (since, clock) {
            let spent = clock().since(since);
            self.stats.busy_ns.add(spent.0.saturating_mul(weight));
            if spent >= LONG {
                self.account.long_turn(&self.stats, spent);
            }
        }
        self.stats.requests.add(ended.len() as u64);
        self.stats.turns.add(1);
        if let Err(message) = seen {
            self.account.leave_out(&message);
            self.drop_observer();
        }
    }

    #[cold]
    fn drop_observer(&mut self) {
        let observer = self.observer.take();
        // The first panic is the one that the account reports.
        let _ = caught(|| drop(observer)).map_err(|message| self.account.leave_out(&message));
    }
}

impl Drop for ObservedChannel {
    fn drop(&mut self) {
        self.drop_observer();
    }
}

impl BlockChannel for ObservedChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.inner.attach_memory(memory)
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        self.now = now;
        self.inner.submit(now, batch);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        self.now = now;
        self.observed(completed, |inner, completed| inner.poll(now, completed));
    }

    fn exchange(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) {
        self.now = now;
        self.observed(completed, |inner, completed| inner.exchange(now, batch, completed));
    }

    fn exchange_mapped(&mut self, mapped: &Mapped, batch: &mut Batch, completed: &mut Batch) {
        self.observed(completed, |inner, completed| {
            inner.exchange_mapped(mapped, batch, completed);
        });
    }

    fn takes_mapped(&self) -> bool {
        self.takes_mapped
    }

    fn takes_write_through(&self) -> bool {
        self.inner.takes_write_through()
    }

    fn readiness(&self) -> Readiness {
        self.inner.readiness()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.inner.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}
