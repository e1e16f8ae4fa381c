//! The store and its plan.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sidecore_block::{
    BlockChannel, BlockDevice, BlockError, BlockRequest, FilterChannel, Geometry, Meter, Operation,
};
use sidecore_reactor::CoreContext;

/// How a request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The medium failed ([`BlockError::EIO`]).
    Eio,
    /// The store is full ([`BlockError::NoSpace`]).
    NoSpace,
    /// No byte was moved ([`BlockError::Short`]).
    Short,
    /// The stage itself panics, as one with a bug does.
    Panic,
    /// The stage takes a few milliseconds of its sidecore's time, and the request passes.
    Stall,
}

/// The time that a stall takes.
pub const STALL: Duration = Duration::from_millis(2);

/// Which operations a rule is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Affected {
    /// All of them.
    All,
    /// Reads.
    Reads,
    /// Writes.
    Writes,
    /// Flushes.
    Flushes,
    /// Discards and write-zeroes.
    Deallocations,
}

impl Affected {
    fn includes(self, operation: Operation) -> bool {
        match self {
            Self::All => true,
            Self::Reads => operation == Operation::Read,
            Self::Writes => operation == Operation::Write,
            Self::Flushes => operation == Operation::Flush,
            Self::Deallocations => {
                matches!(operation, Operation::Discard | Operation::WriteZeroes { .. })
            }
        }
    }
}

/// When a rule strikes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum When {
    /// At every `n`th affected request of a channel; never if `n` is zero.
    EveryNth(u64),
    /// At random, with this chance in a million.
    PerMillion(u32),
    /// Always where the request touches these bytes of the store: a bad spot.
    Touching(Range<u64>),
}

/// One way to fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// Which operations it is about.
    pub affected: Affected,
    /// When it strikes.
    pub when: When,
    /// The effect of the rule.
    pub fault: Fault,
}

/// All the ways to fail.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// Where randomness comes from.
    pub seed: u64,
    /// The first that applies wins.
    pub rules: Vec<FaultRule>,
}

/// A device that fails as planned and otherwise does what the device below does.
pub struct FaultStore {
    inner: Arc<dyn BlockDevice>,
    plan: FaultPlan,
    channels_opened: AtomicU64,
}

impl FaultStore {
    /// `inner`, failing by `plan`.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockDevice>, plan: FaultPlan) -> Self {
        Self { inner, plan, channels_opened: AtomicU64::new(0) }
    }
}

impl BlockDevice for FaultStore {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        self.inner.meters()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let inner = self.inner.open_channel(core, depth)?;
        let channel = self.channels_opened.fetch_add(1, Ordering::Relaxed);
        let random =
            Random(self.plan.seed.wrapping_add(channel.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let dice = self.plan.rules.iter().map(|rule| Die { rule: rule.clone(), seen: 0 }).collect();
        let mut dice = Dice { dice, random };
        Ok(Box::new(FilterChannel::new(inner, depth, move |request: &BlockRequest| {
            dice.throw(request)
        })))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.inner.allocate(offset_bytes, len_bytes)
    }

    fn fallback(&self) -> Option<String> {
        self.inner.fallback()
    }

    fn loss(&self) -> Option<String> {
        self.inner.loss()
    }
}

/// Sebastiano Vigna's splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// A rule, and how many requests it has seen.
struct Die {
    rule: FaultRule,
    seen: u64,
}

impl Die {
    fn throw(&mut self, request: &BlockRequest, random: &mut Random) -> Option<Fault> {
        if !self.rule.affected.includes(request.operation) {
            return None;
        }
        self.seen = self.seen.wrapping_add(1);
        let strikes = match &self.rule.when {
            When::EveryNth(0) => false,
            When::EveryNth(n) => self.seen.is_multiple_of(*n),
            // The bias of the remainder is one in 2^44.
            When::PerMillion(chance) => random.next() % 1_000_000 < u64::from(*chance),
            When::Touching(bad) => {
                let end = request.offset_bytes.saturating_add(request.len_bytes);
                !bad.is_empty() && request.offset_bytes < bad.end && bad.start < end
            }
        };
        strikes.then_some(self.rule.fault)
    }
}

/// The rules of a channel.
struct Dice {
    dice: Vec<Die>,
    random: Random,
}

impl Dice {
    /// Every die that the request concerns is thrown, so that what one rule
    /// does is not shifted by another.
    fn throw(&mut self, request: &BlockRequest) -> Result<(), BlockError> {
        let mut first = None;
        for die in &mut self.dice {
            first = first.or(die.throw(request, &mut self.random));
        }
        Err(match first {
            None => return Ok(()),
            Some(Fault::Stall) => {
                let begun = Instant::now();
                while begun.elapsed() < STALL {
                    std::hint::spin_loop();
                }
                return Ok(());
            }
            Some(Fault::Eio) => BlockError::EIO,
            Some(Fault::NoSpace) => BlockError::NoSpace,
            Some(Fault::Short) => {
                BlockError::Short { done_bytes: 0, asked_bytes: request.len_bytes }
            }
            #[allow(clippy::panic)] // as its plan says; stages are contained
            Some(Fault::Panic) => panic!("planned by `panic_every`"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidecore_block::{Batch, NullStore, Tag};
    use sidecore_units::Nanos;

    /// The results of `count` requests of 512 bytes, one sector each.
    fn results(
        rules: Vec<FaultRule>,
        operation: Operation,
        count: u64,
    ) -> Vec<Result<(), BlockError>> {
        let null = Arc::new(NullStore::new(Geometry::new(1 << 30, 512)));
        let store = FaultStore::new(null, FaultPlan { seed: 42, rules });
        let mut channel = store.open_channel(&CoreContext::default(), 1).unwrap();
        let mut completed = Batch::new();
        for sector in 0..count {
            let mut request = BlockRequest::blank(0);
            request.operation = operation;
            request.offset_bytes = sector * 512;
            request.len_bytes = 512;
            request.tag = Some(Tag::from_bits(sector));
            channel.submit(Nanos::ZERO, &mut vec![request]);
            channel.poll(Nanos::ZERO, &mut completed);
        }
        assert_eq!(channel.readiness().in_flight, 0);
        completed
            .drain(..)
            .enumerate()
            .map(|(index, mut request)| {
                assert_eq!(request.tag.take().map(Tag::into_bits), Some(index as u64));
                request.result
            })
            .collect()
    }

    fn rule(affected: Affected, when: When, fault: Fault) -> FaultRule {
        FaultRule { affected, when, fault }
    }

    #[test]
    fn every_third_write_fails_and_no_read() {
        let rules = vec![rule(Affected::Writes, When::EveryNth(3), Fault::Eio)];
        let failures: Vec<_> =
            results(rules.clone(), Operation::Write, 7).iter().map(Result::is_err).collect();
        assert_eq!(failures, [false, false, true, false, false, true, false]);
        assert!(results(rules, Operation::Read, 7).iter().all(Result::is_ok));
    }

    #[test]
    fn chance_is_fair_and_the_same_each_time() {
        let rules = vec![rule(Affected::All, When::PerMillion(100_000), Fault::NoSpace)];
        let run = results(rules.clone(), Operation::Read, 10_000);
        let failures = run.iter().filter(|result| **result == Err(BlockError::NoSpace)).count();
        assert!((850..1_150).contains(&failures), "{failures} of 10000 at 10 %");
        assert_eq!(run, results(rules, Operation::Read, 10_000));
    }

    #[test]
    fn a_bad_spot_fails_each_access() {
        let rules = vec![rule(Affected::All, When::Touching(1023..1025), Fault::Eio)];
        let failures: Vec<_> =
            results(rules, Operation::Discard, 4).iter().map(Result::is_err).collect();
        assert_eq!(failures, [false, true, true, false]);
    }

    #[test]
    fn the_first_rule_wins_and_a_short_one_says_what_was_asked() {
        let rules = vec![
            rule(Affected::Flushes, When::EveryNth(1), Fault::Eio),
            rule(Affected::All, When::EveryNth(1), Fault::Short),
        ];
        assert_eq!(results(rules.clone(), Operation::Flush, 1), [Err(BlockError::EIO)]);
        let short = BlockError::Short { done_bytes: 0, asked_bytes: 512 };
        assert_eq!(results(rules, Operation::Read, 1), [Err(short)]);
    }

    #[test]
    fn never_is_never() {
        let rules = vec![
            rule(Affected::All, When::EveryNth(0), Fault::Eio),
            rule(Affected::All, When::PerMillion(0), Fault::Eio),
            rule(Affected::All, When::Touching(512..512), Fault::Eio),
        ];
        assert!(results(rules, Operation::Write, 100).iter().all(Result::is_ok));
    }
}
