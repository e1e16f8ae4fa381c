//! Sums of counters over channels that open and close.

use std::sync::Arc;

use sidecore_telemetry::CounterSet;

/// The counters of the channels that a device has had.
#[derive(Debug, Default)]
pub(crate) struct Sums<S: CounterSet> {
    /// The counters of the open channels.
    pub(crate) open: Vec<Arc<S>>,
    /// The sum of the closed ones.
    closed: S::Counts,
}

impl<S: CounterSet + Default> Sums<S>
where
    S::Counts: Clone,
{
    /// The counters of one more channel. Their last owner but this is the channel.
    pub(crate) fn open(&mut self) -> Arc<S> {
        self.forget_closed();
        let channel = Arc::<S>::default();
        self.open.push(Arc::clone(&channel));
        channel
    }

    /// The sum of now.
    pub(crate) fn counts(&mut self) -> S::Counts {
        self.forget_closed();
        let mut sum = self.closed.clone();
        for channel in &self.open {
            channel.add_to(&mut sum);
        }
        sum
    }

    /// Keeps the counts of the closed channels, whose counters have no other owner.
    fn forget_closed(&mut self) {
        let Self { open, closed } = self;
        open.retain_mut(|channel| match Arc::get_mut(channel) {
            Some(stats) => {
                stats.add_to(closed);
                false
            }
            None => true,
        });
    }
}
