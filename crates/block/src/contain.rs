//! Containment of stages: a panic in the code of a stage fails the requests of its device, and
//! nothing else.
//!
//! The layers measure the time that the stage takes itself, too.
//!
//! A contained stage lies between two layers. The one above, [`Contained`], calls the stage and
//! catches its panics. The one below, [`Floor`](floor::Floor), calls the store, so that a panic of
//! the store is not taken for one of the stage, and keeps the store's channel when the stage is
//! dropped. A device without stages has neither.
//!
//! While a stage has a request, its tag and all that is needed to answer it lie in a slot of the
//! layer above. So an unwinding stage may drop requests: they are made anew. None of them is
//! answered before all that the stage has submitted to the store has come back, because the store
//! may write to the buffers until then.

mod account;
mod channel;
mod floor;
mod sampler;
mod stopwatch;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_reactor::{CoreContext, caught};
use sidecore_units::Nanos;

use crate::{BlockChannel, BlockDevice, Geometry, Meter, OpenedStage, StageError};

pub(crate) use account::ChannelStats;
pub use account::{StageAccount, StageCounts, StageThreads};
use channel::ContainedChannel;
use floor::{Floor, Opened};
pub(crate) use sampler::Sampler;

/// A stage that takes longer than this of a turn delays the other units of its sidecore.
pub(crate) const LONG: Nanos = Nanos::from_millis(1);

/// Opens a stage called `word` of the store called `store` in front of `below`, and contains its
/// panics.
///
/// # Errors
/// The stage's, or its panic.
pub fn contain(
    word: &'static str,
    store: &str,
    below: Arc<dyn BlockDevice>,
    open: impl FnOnce(Arc<dyn BlockDevice>) -> OpenedStage,
) -> OpenedStage {
    let account = Arc::new(StageAccount::new(word, store));
    let floor = Arc::new(Floor {
        below: Arc::clone(&below),
        account: Arc::clone(&account),
        is_opening: AtomicBool::new(true),
    });
    let seen = Arc::clone(&floor);
    let opened = caught(|| {
        let stage = open(seen)?;
        let geometry = stage.geometry();
        Ok((stage, geometry))
    });
    floor.is_opening.store(false, Ordering::Release);
    match opened {
        Ok(opened) => {
            let (stage, geometry) = opened?;
            account.set_findings(stage.findings());
            Ok(Arc::new(Contained { stage, below, geometry, account }))
        }
        Err(message) => {
            let reason = format!("it has panicked as it was opened: {message}");
            Err(StageError { stage: word, reason })
        }
    }
}

/// A stage whose panics are contained.
struct Contained {
    stage: Arc<dyn BlockDevice>,
    below: Arc<dyn BlockDevice>,
    geometry: Geometry,
    account: Arc<StageAccount>,
}

impl BlockDevice for Contained {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let opened = core.shared::<Opened>();
        let lower = opened.begin(&self.account, core);
        let channel = match self.account.failure() {
            Some(_) => None,
            None => self.account.contain(&lower, || self.stage.open_channel(core, depth)),
        };
        opened.end(&lower);
        let account = Arc::clone(&self.account);
        let channel = match channel.transpose()? {
            Some(channel) => ContainedChannel::new(account, channel, lower, depth),
            None => {
                let below = self.below.open_channel(core, depth)?;
                ContainedChannel::new_failed(account, below, lower, depth)
            }
        };
        Ok(Box::new(channel))
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

    /// The store is told by this layer, whatever the stage does.
    fn user_gone(&self) {
        // No write has passed a stage that refuses them, but the store may have another user.
        if self.geometry.read_only {
            return;
        }
        if self.account.failure().is_none()
            && let Err(message) = caught(|| self.stage.user_gone())
        {
            self.account.fail(format!("it has panicked: {message}"));
        }
        self.below.user_gone();
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        self.stage.meters()
    }

    fn stages(&self) -> Vec<Arc<StageAccount>> {
        let mut stages = vec![Arc::clone(&self.account)];
        stages.extend(self.below.stages());
        stages
    }
}
