//! The unit that has a device's requests, of those that the device was added to.

use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_block::Operation;

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
    /// The attachment of the session whose requests are executed.
    newest: AtomicU64,
}

/// How an attempt to hold a device ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// The unit holds the device.
    Taken,
    /// Another unit does.
    Waits,
    /// A session that was attached later has written meanwhile: the request is not to be executed.
    Late,
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
    /// Takes hold of a device for a request that the device [serves](Self::serves), unless a unit
    /// holds the device. Before it was held, another unit may have executed a later session's
    /// write.
    #[inline]
    pub(crate) fn take(&self, holder: Holder, attachment: u64, operation: Operation) -> Hold {
        let taken = self.holder.compare_exchange(0, holder.0, Ordering::Acquire, Ordering::Relaxed);
        if taken.is_err() {
            return Hold::Waits;
        }
        if !self.serves(attachment, operation) {
            self.release();
            return Hold::Late;
        }
        Hold::Taken
    }

    /// Whether a request of a session with this attachment is to be executed: no session that was
    /// attached later has written. A write makes the session the newest one.
    ///
    /// Reads make it none, because a client reads a device before its guest starts. A flush is
    /// harmless whosever it is, and a VMhost whose guest has left flushes once more at its end.
    #[inline]
    pub(crate) fn serves(&self, attachment: u64, operation: Operation) -> bool {
        let newest = self.newest.load(Ordering::Acquire);
        if newest == attachment || operation == Operation::Flush {
            return true;
        }
        if operation == Operation::Read {
            return newest < attachment;
        }
        self.newest.fetch_max(attachment, Ordering::AcqRel) <= attachment
    }

    /// Lets go of a device, of which the store has no request.
    #[inline]
    pub(crate) fn release(&self) {
        self.holder.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use Operation::{Discard, Flush, Read, Write};

    use super::*;

    #[test]
    fn one_unit_holds_a_device() {
        let (one, other, tenure) = (Holder::new(), Holder::new(), Tenure::default());
        assert_ne!(one, other);
        let take = |holder| tenure.take(holder, 5, Write);
        assert_eq!([one, other, one].map(take), [Hold::Taken, Hold::Waits, Hold::Waits]);
        tenure.release();
        assert_eq!([other, one].map(take), [Hold::Taken, Hold::Waits]);
    }

    /// Between its check and its hold, a unit is slow.
    #[test]
    fn a_write_is_late_if_another_unit_has_executed_a_later_sessions_meanwhile() {
        let (slow, other, tenure) = (Holder::new(), Holder::new(), Tenure::default());
        for operation in [Write, Read, Discard] {
            let tenure = Tenure::default();
            assert!(tenure.serves(5, operation));
            assert!(tenure.serves(9, Write) && tenure.take(other, 9, Write) == Hold::Taken);
            assert_eq!(tenure.take(slow, 5, operation), Hold::Waits);
            tenure.release();
            assert_eq!(tenure.take(slow, 5, operation), Hold::Late);
            assert_eq!(tenure.take(other, 9, Read), Hold::Taken, "the device is free");
        }
        // While it is held, the later session's write waits for it.
        assert!(tenure.serves(5, Write) && tenure.take(slow, 5, Write) == Hold::Taken);
        assert!(tenure.serves(9, Write) && tenure.take(other, 9, Write) == Hold::Waits);
    }

    #[test]
    fn the_session_that_was_attached_last_and_has_written_is_served() {
        let tenure = Tenure::default();
        let serves = |attachment, operation| tenure.serves(attachment, operation);
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
