//! The unit that has a device's requests, of those that the device was added to.

use std::sync::atomic::{AtomicU64, Ordering};

/// A client may come back by another link or queue, where another unit serves it, while the store
/// has writes of its former session. They would overwrite newer ones, so a unit gives requests to
/// the store only while it holds the device, and holds it while the store has any.
#[derive(Debug, Default)]
pub struct Tenure(AtomicU64);

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
        self.0.compare_exchange(0, holder.0, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Lets go of a device, of which the store has no request.
    #[inline]
    pub(crate) fn release(&self) {
        self.0.store(0, Ordering::Release);
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
}
