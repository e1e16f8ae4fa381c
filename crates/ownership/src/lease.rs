//! A daemon's lease, as far as the daemon may believe in it.

use sidecore_units::Nanos;

/// A lease of etcd.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
    pub(crate) id: i64,
    /// The end of the lease on this host's clock: never later than etcd's end of it.
    pub(crate) ends_at: Nanos,
}

/// The time of a lease on a clock that may be slower than etcd's by this.
pub(crate) const fn shortened(ttl_s: u64, drift_percent: u64) -> Nanos {
    let ttl = Nanos::from_millis(ttl_s.saturating_mul(1_000)).0;
    Nanos((ttl / 100).saturating_mul(100_u64.saturating_sub(drift_percent)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_shortened_and_never_overflows() {
        assert_eq!(shortened(3, 10), Nanos::from_millis(2_700));
        assert_eq!(shortened(3, 0), Nanos::from_millis(3_000));
        assert_eq!(shortened(3, 200), Nanos::ZERO);
        assert!(shortened(u64::MAX, 10) <= Nanos(u64::MAX / 100 * 90));
    }
}
