//! Epoch-based reclamation: when retired tree nodes and freed blocks may be reused.
//!
//! The hypervisor side first unpublishes an object, by a change of the tree that readers start
//! from. Channels that found the object before may still have I/O in flight to it. So each such
//! change starts a new *epoch*, and the object is not reused until every channel was idle, or has
//! published that all I/O translated before it saw that epoch has completed.
//!
//! A channel pays two plain stores for this each time it goes from idle to busy and back. The
//! hypervisor side pays for the full fence that such a handshake needs: `membarrier(2)` makes every
//! running thread of the process execute one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::thread::MembarrierCommand;

/// The number of a change that unpublishes objects.
pub(crate) type Epoch = u64;

/// Published by a channel without I/O in flight.
const IDLE: u64 = u64::MAX;

/// The current epoch, and all channels of a controller.
pub(crate) struct Epochs {
    current: AtomicU64,
    /// Whether the kernel executes fences on other threads on our behalf.
    remote_fences: bool,
    participants: Mutex<Vec<Arc<Participant>>>,
}

/// A channel's published state: [`IDLE`], or the epoch that it has caught up with. On a cache line
/// of its own: another thread reads it only when the hypervisor side checks an epoch.
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
            tracing::info!(
                %error,
                "no membarrier(2): each batch of requests to a virtual function pays a fence"
            );
        }
        Self {
            current: AtomicU64::new(1),
            remote_fences: registered.is_ok(),
            participants: Mutex::new(Vec::new()),
        }
    }

    fn participants(&self) -> MutexGuard<'_, Vec<Arc<Participant>>> {
        self.participants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts an epoch: objects unpublished before may be reused once it has
    /// [`passed`](Self::passed).
    pub(crate) fn advance(&self) -> Epoch {
        let epoch = self.current.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        fence(Ordering::SeqCst);
        if self.remote_fences
            && let Err(error) = rustix::thread::membarrier(MembarrierCommand::PrivateExpedited)
        {
            // The process is registered, and membarrier(2) names no other error.
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

/// A channel's side of the handshake.
pub(crate) struct Quiescence {
    epochs: Arc<Epochs>,
    participant: Arc<Participant>,
    /// See [`Epochs`].
    remote_fences: bool,
    /// The epoch under which new requests are counted.
    seen: Epoch,
    /// Which of the two counts is the current one.
    parity: bool,
    /// I/O in flight that was translated before `seen` was published, and after.
    before: usize,
    since: usize,
}

impl Quiescence {
    pub(crate) fn new(epochs: &Arc<Epochs>) -> Self {
        let participant =
            Arc::new(Participant { shown: AtomicU64::new(IDLE), gone: AtomicBool::new(false) });
        epochs.participants().push(Arc::clone(&participant));
        Self {
            epochs: Arc::clone(epochs),
            participant,
            remote_fences: epochs.remote_fences,
            seen: 0,
            parity: false,
            before: 0,
            since: 0,
        }
    }

    /// Publishes the current epoch. Call before a translation.
    #[inline]
    pub(crate) fn enter(&mut self) {
        let current = self.epochs.current.load(Ordering::Acquire);
        if self.before == 0 && self.since == 0 {
            self.enter_idle();
        } else if current != self.seen && self.before == 0 {
            self.seen = current;
            self.parity = !self.parity;
            self.before = std::mem::take(&mut self.since);
        }
    }

    /// [`enter`](Self::enter) of a channel without I/O in flight.
    #[inline]
    pub(crate) fn enter_idle(&mut self) {
        debug_assert!(self.before == 0 && self.since == 0);
        self.seen = self.epochs.current.load(Ordering::Acquire);
        self.participant.shown.store(self.seen, Ordering::Relaxed);
        // The trees must not be read before that store: the hypervisor's membarrier makes the
        // compiler's order the CPU's order.
        if self.remote_fences {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
    }

    /// [`leave`](Self::leave) of a channel without I/O in flight.
    #[inline]
    pub(crate) fn leave_idle(&mut self) {
        debug_assert!(self.before == 0 && self.since == 0);
        self.participant.shown.store(IDLE, Ordering::Release);
    }

    /// The count that I/O translated now belongs to, for [`ended`](Self::ended).
    #[inline]
    pub(crate) fn parity(&self) -> bool {
        self.parity
    }

    /// Counts translated I/O; returns its parity for [`ended`](Self::ended).
    #[inline]
    pub(crate) fn began(&mut self, count: usize) -> bool {
        self.since = self.since.saturating_add(count);
        self.parity
    }

    /// Uncounts completed I/O.
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

    /// Accounts for `began` requests of the current epoch, and for completions of requests from
    /// `since` it was seen and from `before`.
    #[inline]
    pub(crate) fn exchanged(&mut self, began: usize, since: usize, before: usize) {
        self.since = self.since.saturating_add(began).saturating_sub(since);
        if before > 0 {
            self.ended(!self.parity, before);
        }
    }

    /// Publishes that the channel is idle, if it is. Call when no translation follows for now.
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
        assert!(epochs.passed(epoch), "only the new one is in flight");
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
