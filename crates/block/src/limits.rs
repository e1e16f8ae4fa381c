//! Rate limits of a virtual function, or of a client: token buckets, one each for reads and writes,
//! requests and bytes.

use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_units::Nanos;

/// A rate, and how much of it may be saved up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Units a second: requests, or bytes. At least one.
    pub per_s: u64,
    /// The units that may come at once after idle time. A larger request passes when the bucket is
    /// full.
    pub burst: u64,
}

/// The rate limits of a virtual function or a client; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Reads a second.
    pub read_iops: Option<Limit>,
    /// Requests a second that change the disk.
    pub write_iops: Option<Limit>,
    /// Bytes read a second.
    pub read_bytes_per_s: Option<Limit>,
    /// Bytes written a second.
    pub write_bytes_per_s: Option<Limit>,
}

impl Limits {
    /// Whether no limit is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

const NANOS_PER_S: u64 = 1_000_000_000;

/// Fractional bits of a unit's cost: enough for a hundred gigabytes a second.
const COST_SHIFT: u32 = 24;

/// A token bucket, shared by all sidecores: one atomic word.
///
/// The state is the *virtual scheduling* form of the generic cell rate algorithm (ITU-T I.371,
/// annex A): the time at which the bucket will be full again.
#[derive(Debug)]
struct Bucket {
    full_at_ns: AtomicU64,
    /// Nanoseconds a unit, with [`COST_SHIFT`] fractional bits.
    cost: u64,
    /// How long an empty bucket takes to fill.
    capacity_ns: u64,
}

impl Bucket {
    fn new(limit: Limit) -> Self {
        let per_s = limit.per_s.max(1);
        let cost = (NANOS_PER_S << COST_SHIFT).checked_div(per_s).unwrap_or(u64::MAX).max(1);
        Self { full_at_ns: AtomicU64::new(0), cost, capacity_ns: nanos(cost, limit.burst.max(1)) }
    }

    /// Takes `units` at `now`.
    ///
    /// # Errors
    /// When to try again, if `now` is too early.
    fn take(&self, now: Nanos, units: u64) -> Result<(), Nanos> {
        let cost_ns = nanos(self.cost, units);
        let room_ns = self.capacity_ns.max(cost_ns);
        let mut full_at_ns = self.full_at_ns.load(Ordering::Relaxed);
        loop {
            let next = full_at_ns.max(now.0).saturating_add(cost_ns);
            if next > now.0.saturating_add(room_ns) {
                return Err(Nanos(next.saturating_sub(room_ns)));
            }
            match self.full_at_ns.compare_exchange_weak(
                full_at_ns,
                next,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok(()),
                Err(changed) => full_at_ns = changed,
            }
        }
    }

    /// Returns units that were taken and not used.
    fn give_back(&self, units: u64) {
        let cost_ns = nanos(self.cost, units);
        let _ = self.full_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |at| {
            Some(at.saturating_sub(cost_ns))
        });
    }
}

fn nanos(cost: u64, units: u64) -> u64 {
    let product = u128::from(cost).saturating_mul(u128::from(units));
    u64::try_from(product >> COST_SHIFT).unwrap_or(u64::MAX)
}

/// The buckets of one direction, shared by all sidecores.
#[derive(Debug, Default)]
pub struct Gate {
    requests: Option<Bucket>,
    bytes: Option<Bucket>,
}

impl Gate {
    /// Makes the buckets of these limits.
    #[must_use]
    pub fn new(iops: Option<Limit>, bytes_per_s: Option<Limit>) -> Self {
        Self { requests: iops.map(Bucket::new), bytes: bytes_per_s.map(Bucket::new) }
    }

    /// Whether there are no limits.
    #[must_use]
    #[inline]
    pub fn is_open(&self) -> bool {
        self.requests.is_none() && self.bytes.is_none()
    }

    /// Lets a request of `len_bytes` through.
    ///
    /// # Errors
    /// When to try again, if `now` is too early.
    pub fn pass(&self, now: Nanos, len_bytes: u64) -> Result<(), Nanos> {
        if let Some(requests) = &self.requests {
            requests.take(now, 1)?;
        }
        if let Some(bytes) = &self.bytes
            && let Err(at) = bytes.take(now, len_bytes)
        {
            if let Some(requests) = &self.requests {
                requests.give_back(1);
            }
            return Err(at);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = NANOS_PER_S;

    /// The number of requests of `units` that pass within `for_ns`, each retried at the time it was
    /// given.
    fn passed(bucket: &Bucket, from_ns: u64, for_ns: u64, units: u64) -> u64 {
        let (mut now, mut count) = (from_ns, 0);
        while now < from_ns + for_ns {
            match bucket.take(Nanos(now), units) {
                Ok(()) => count += 1,
                Err(at) => {
                    assert!(at.0 > now, "told to come back at once");
                    now = at.0;
                }
            }
        }
        count
    }

    #[test]
    fn after_the_burst_the_rate_holds() {
        let bucket = Bucket::new(Limit { per_s: 1000, burst: 50 });
        let first = passed(&bucket, SECOND, SECOND, 1);
        assert!((1049..=1051).contains(&first), "{first}");
        let second = passed(&bucket, 2 * SECOND, SECOND, 1);
        assert!((999..=1001).contains(&second), "{second}");
    }

    #[test]
    fn a_rest_saves_up_no_more_than_the_burst() {
        let bucket = Bucket::new(Limit { per_s: 1000, burst: 50 });
        let _ = passed(&bucket, SECOND, SECOND, 1);
        let mut at_once = 0;
        while bucket.take(Nanos(100 * SECOND), 1).is_ok() {
            at_once += 1;
        }
        assert_eq!(at_once, 50);
    }

    #[test]
    fn a_request_larger_than_the_bucket_passes_when_it_is_full_and_is_paid_for() {
        let bucket = Bucket::new(Limit { per_s: 1000, burst: 10 });
        assert_eq!(bucket.take(Nanos(SECOND), 500), Ok(()));
        let Err(at) = bucket.take(Nanos(SECOND), 1) else { panic!("it was not paid for") };
        assert_eq!(at, Nanos(SECOND + SECOND * 491 / 1000));
    }

    #[test]
    fn fast_limits_are_exact_to_a_thousandth() {
        let bucket = Bucket::new(Limit { per_s: 10_000_000_000, burst: 1 << 20 });
        let count = passed(&bucket, SECOND, SECOND, 4096);
        let bytes = count * 4096;
        assert!((9_990_000_000..=10_020_000_000).contains(&bytes), "{bytes}");
    }

    #[test]
    fn what_the_bytes_refuse_is_not_charged_to_the_requests() {
        let gate = Gate::new(
            Some(Limit { per_s: 10, burst: 2 }),
            Some(Limit { per_s: 1000, burst: 1000 }),
        );
        assert_eq!(gate.pass(Nanos(SECOND), 1000), Ok(()));
        for _ in 0..100 {
            assert!(gate.pass(Nanos(SECOND), 1000).is_err());
        }
        assert_eq!(gate.pass(Nanos(2 * SECOND), 1000), Ok(()));
    }

    #[test]
    fn nothing_overflows() {
        for per_s in [0, 1, u64::MAX] {
            for burst in [0, 1, u64::MAX] {
                let bucket = Bucket::new(Limit { per_s, burst });
                for units in [0, 1, u64::MAX] {
                    let _ = bucket.take(Nanos::MAX, units);
                    let _ = bucket.take(Nanos::ZERO, units);
                    bucket.give_back(units);
                }
            }
        }
    }
}
