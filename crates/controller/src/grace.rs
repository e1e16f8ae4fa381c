//! When nobody uses the old any more: grace periods, after which retired tree
//! nodes and freed blocks may be used again.
//!
//! What the hypervisor side takes away, it first takes out of the tree that
//! readers start from. Channels that found the old may still have I/O under way
//! to it. So each change that takes something away starts a new *epoch*, and what
//! was taken waits until every channel has been seen idle, or has said that all
//! it translated before it saw that epoch has completed.
//!
//! A channel pays two plain stores for this each time it goes from idle to busy
//! and back. The full fence that such a handshake needs is the hypervisor's to
//! pay: `membarrier(2)` makes every running thread of the process execute one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::thread::MembarrierCommand;

/// A number for each change that takes something away.
pub(crate) type Epoch = u64;

/// What a channel with no I/O under way shows.
const IDLE: u64 = u64::MAX;

/// All channels of a controller, and the epoch.
pub(crate) struct Epochs {
    current: AtomicU64,
    /// Whether the kernel runs fences on other threads for us.
    remote_fences: bool,
    participants: Mutex<Vec<Arc<Participant>>>,
}

/// What a channel shows of itself: [`IDLE`], or the epoch that it has caught up
/// with. On a cache line of its own: only a grace period reads it elsewhere.
#[repr(align(64))]
#[derive(Debug)]
struct Participant {
    shown: AtomicU64,
    gone: AtomicBool,
}

impl Epochs {
    pub(crate) fn new() -> Self {
        let registered = rustix::thread::membarrier(MembarrierCommand::RegisterPrivateExpedited);
        if let Err(error) = &registered {
            tracing::info!(%error, "no membarrier(2): each batch of requests to a virtual function pays a fence");
        }
        Self { current: AtomicU64::new(1), remote_fences: registered.is_ok(), participants: Mutex::new(Vec::new()) }
    }

    fn participants(&self) -> MutexGuard<'_, Vec<Arc<Participant>>> {
        self.participants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts an epoch: whatever was unpublished until now may be used again
    /// once it has [`passed`](Self::passed).
    pub(crate) fn advance(&self) -> Epoch {
        let epoch = self.current.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        fence(Ordering::SeqCst);
        if self.remote_fences
            && let Err(error) = rustix::thread::membarrier(MembarrierCommand::PrivateExpedited)
        {
            // It was registered, so there is no error that the manual page knows.
            tracing::error!(%error, "membarrier");
        }
        epoch
    }

    /// Whether every channel is idle or has caught up with `epoch`.
    pub(crate) fn passed(&self, epoch: Epoch) -> bool {
        let mut participants = self.participants();
        participants.retain(|participant| !participant.gone.load(Ordering::Acquire));
        participants.iter().all(|participant| participant.shown.load(Ordering::Acquire) >= epoch)
    }
}

/// A channel's side of it.
pub(crate) struct Quiescence {
    epochs: Arc<Epochs>,
    participant: Arc<Participant>,
    /// The epoch that requests are counted under.
    seen: Epoch,
    /// Which of the two counts is the present one.
    parity: bool,
    /// I/O under way that was translated before `seen` was, and since.
    before: usize,
    since: usize,
}

impl Quiescence {
    pub(crate) fn new(epochs: &Arc<Epochs>) -> Self {
        let participant = Arc::new(Participant { shown: AtomicU64::new(IDLE), gone: AtomicBool::new(false) });
        epochs.participants().push(Arc::clone(&participant));
        Self { epochs: Arc::clone(epochs), participant, seen: 0, parity: false, before: 0, since: 0 }
    }

    /// To be called before anything is translated.
    #[inline]
    pub(crate) fn enter(&mut self) {
        let current = self.epochs.current.load(Ordering::Acquire);
        if self.before == 0 && self.since == 0 {
            self.seen = current;
            self.participant.shown.store(current, Ordering::Relaxed);
            // The trees must not be read before that store: the hypervisor's
            // membarrier sees to it that the compiler's order is the CPU's.
            if self.epochs.remote_fences {
                compiler_fence(Ordering::SeqCst);
            } else {
                fence(Ordering::SeqCst);
            }
        } else if current != self.seen && self.before == 0 {
            self.seen = current;
            self.parity = !self.parity;
            self.before = std::mem::take(&mut self.since);
        }
    }

    /// What [`ended`](Self::ended) wants to know of the I/O that is translated now.
    #[inline]
    pub(crate) fn parity(&self) -> bool {
        self.parity
    }

    /// So much I/O was translated; returns what [`ended`](Self::ended) wants to know of it.
    #[inline]
    pub(crate) fn began(&mut self, count: usize) -> bool {
        self.since = self.since.saturating_add(count);
        self.parity
    }

    /// So much I/O completed.
    #[inline]
    pub(crate) fn ended(&mut self, parity: bool, count: usize) {
        if parity == self.parity {
            self.since = self.since.saturating_sub(count);
        } else if count > 0 {
            self.before = self.before.saturating_sub(count);
            if self.before == 0 {
                self.participant.shown.store(self.seen, Ordering::Release);
            }
        }
    }

    /// Accounts for `began` requests of the present epoch, and for completions `since` it was seen and from `before`.
    #[inline]
    pub(crate) fn exchanged(&mut self, began: usize, since: usize, before: usize) {
        self.since = self.since.saturating_add(began).saturating_sub(since);
        if before > 0 {
            self.ended(!self.parity, before);
        }
    }

    /// To be called when nothing is going to be translated for now.
    #[inline]
    pub(crate) fn leave(&mut self) {
        if self.before == 0 && self.since == 0 {
            self.participant.shown.store(IDLE, Ordering::Release);
        }
    }
}

impl Drop for Quiescence {
    fn drop(&mut self) {
        self.participant.gone.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_channel_holds_nothing_up() {
        let epochs = Arc::new(Epochs::new());
        let _channel = Quiescence::new(&epochs);
        let epoch = epochs.advance();
        assert!(epochs.passed(epoch));
    }

    #[test]
    fn io_from_before_holds_the_epoch_up_and_io_from_after_does_not() {
        let epochs = Arc::new(Epochs::new());
        let mut channel = Quiescence::new(&epochs);
        channel.enter();
        let old = channel.began(1);
        let epoch = epochs.advance();
        assert!(!epochs.passed(epoch));
        channel.enter();
        let new = channel.began(1);
        assert_ne!(old, new);
        assert!(!epochs.passed(epoch));
        channel.ended(old, 1);
        assert!(epochs.passed(epoch), "only the new one is under way");
        let second = epochs.advance();
        assert!(!epochs.passed(second));
        channel.ended(new, 1);
        channel.leave();
        assert!(epochs.passed(second));
    }

    #[test]
    fn an_epoch_that_comes_while_an_older_one_is_waited_for_is_taken_up_later() {
        let epochs = Arc::new(Epochs::new());
        let mut channel = Quiescence::new(&epochs);
        channel.enter();
        let first = channel.began(1);
        let one = epochs.advance();
        channel.enter();
        let second = channel.began(1);
        let two = epochs.advance();
        channel.enter();
        let third = channel.began(1);
        channel.ended(first, 1);
        assert!(epochs.passed(one));
        assert!(!epochs.passed(two));
        channel.enter();
        channel.ended(second, 1);
        assert!(!epochs.passed(two), "the third was translated before the second epoch was seen");
        channel.ended(third, 1);
        assert!(epochs.passed(two));
    }

    #[test]
    fn a_channel_that_is_gone_is_forgotten() {
        let epochs = Arc::new(Epochs::new());
        let mut channel = Quiescence::new(&epochs);
        channel.enter();
        let _ = channel.began(1);
        let epoch = epochs.advance();
        assert!(!epochs.passed(epoch));
        drop(channel);
        assert!(epochs.passed(epoch));
    }
}
