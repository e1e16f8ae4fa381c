//! The unit that has a device's requests, of those that the device was added to.

use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_block::Operation;
use sidecore_units::Nanos;

/// A device belongs to the session that was attached last of those that have written: of the
/// sessions of one client, and of the clients between whose hosts a guest migrates. A client
/// attaches a device again when the guest's queues start.
///
/// A client may come back by another link or queue, where another unit serves it, while the store
/// has writes of its former session. They would overwrite newer ones, so a unit gives requests to
/// the store only while it holds the device, and holds it while the store has any. Requests of the
/// former session that a unit has not given to the store yet are too late.
#[derive(Debug, Default)]
pub struct Tenure {
    holder: AtomicU64,
    /// When the session was attached whose requests are executed.
    attached_at: AtomicU64,
}

/// Names a unit in this process; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Holder(u64);

impl Holder {
    /// A name that no other unit has.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl Tenure {
    /// Takes hold of a device that no unit holds. False if one does.
    #[inline]
    pub(crate) fn take(&self, holder: Holder) -> bool {
        self.holder.compare_exchange(0, holder.0, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Whether a request of a session that was attached then is to be executed: no session that was
    /// attached later has written. A write makes the session the newest one.
    ///
    /// Reads make it none, because a client reads a device before its guest starts. A flush is
    /// harmless whosever it is, and a VMhost whose guest has left flushes once more at its end.
    #[inline]
    pub(crate) fn serves(&self, attached_at: Nanos, operation: Operation) -> bool {
        let newest = self.attached_at.load(Ordering::Acquire);
        if newest == attached_at.0 || operation == Operation::Flush {
            return true;
        }
        if operation == Operation::Read {
            return newest < attached_at.0;
        }
        self.attached_at.fetch_max(attached_at.0, Ordering::AcqRel) <= attached_at.0
    }

    /// Lets go of a device, of which the store has no request.
    #[inline]
    pub(crate) fn release(&self) {
        self.holder.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_unit_holds_a_device() {
        let (one, other, tenure) = (Holder::new(), Holder::new(), Tenure::default());
        assert_ne!(one, other);
        assert!(tenure.take(one) && !tenure.take(other) && !tenure.take(one));
        tenure.release();
        assert!(tenure.take(other) && !tenure.take(one));
    }

    #[test]
    fn the_session_that_was_attached_last_and_has_written_is_served() {
        use Operation::{Discard, Flush, Read, Write};
        let tenure = Tenure::default();
        let serves = |at, operation| tenure.serves(Nanos(at), operation);
        assert!(serves(5, Write) && serves(5, Write) && serves(5, Read));
        // Another session reads, and has not taken the device by that.
        assert!(serves(9, Read) && serves(9, Flush) && serves(5, Write));
        assert!(serves(9, Discard) && serves(9, Write));
        assert!(!serves(5, Write) && !serves(5, Read) && !serves(5, Discard));
        assert!(serves(5, Flush) && serves(9, Read) && serves(9, Write));
        // It comes back after its guest has started again.
        assert!(serves(12, Write) && !serves(9, Write));
    }
}
