//! A store that fails on purpose, the same way each time.
//!
//! # The fault model
//!
//! * A [`Fault`] is an *error*, reported at the next poll: the medium says no (`EIO`), is full
//!   (`ENOSPC`), or moves fewer bytes than it was asked to (`Short`).
//! * A request that fails never reaches the device below: nothing was read,
//!   written, flushed or discarded. `Short` reports that zero bytes were moved.
//! * Which requests fail is decided when they are submitted, by rules, in the
//!   order of the rules; the first that applies wins. A rule counts and draws
//!   over the requests of its operations alone.
//! * Everything follows from the seed and from the order in which channels are
//!   opened and requests submitted to each: the same run fails the same way.
//!
//! Not modelled here: data that is silently wrong, torn or misdirected writes,
//! flushes that lie, requests that never come back. Those need a medium that
//! the test controls in whole, not a device that is wrapped.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_memory::GuestMemory;
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::{Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, Geometry, Next, Operation, Readiness};

/// How a request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The medium failed ([`BlockError::EIO`]).
    Eio,
    /// The store is full ([`BlockError::NoSpace`]).
    NoSpace,
    /// No byte was moved ([`BlockError::Short`]).
    Short,
}

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
            Self::Deallocations => matches!(operation, Operation::Discard | Operation::WriteZeroes { .. }),
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

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let inner = self.inner.open_channel(core, depth)?;
        let channel = self.channels_opened.fetch_add(1, Ordering::Relaxed);
        let random = Random(self.plan.seed.wrapping_add(channel.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        Ok(Box::new(FaultChannel {
            inner,
            dice: self.plan.rules.iter().map(|rule| Die { rule: rule.clone(), seen: 0 }).collect(),
            random,
            depth,
            passed: Batch::with_capacity(depth),
            failed: Batch::with_capacity(depth),
        }))
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

struct FaultChannel {
    inner: Box<dyn BlockChannel>,
    dice: Vec<Die>,
    random: Random,
    depth: usize,
    /// On their way to the device below.
    passed: Batch,
    failed: Batch,
}

impl FaultChannel {
    /// Every die that the request concerns is thrown, so that what one rule
    /// does is not shifted by another.
    fn fault_for(&mut self, request: &BlockRequest) -> Option<Fault> {
        let mut first = None;
        for die in &mut self.dice {
            first = first.or(die.throw(request, &mut self.random));
        }
        first
    }

    fn pass_on(&mut self, now: Nanos) {
        if !self.passed.is_empty() {
            self.inner.submit(now, &mut self.passed);
        }
    }
}

impl BlockChannel for FaultChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.inner.attach_memory(memory)
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let room = self.depth.saturating_sub(self.readiness().in_flight);
        for mut request in batch.drain(..room.min(batch.len())) {
            let Some(fault) = self.fault_for(&request) else {
                self.passed.push(request);
                continue;
            };
            request.result = Err(match fault {
                Fault::Eio => BlockError::EIO,
                Fault::NoSpace => BlockError::NoSpace,
                Fault::Short => BlockError::Short { done_bytes: 0, asked_bytes: request.len_bytes },
            });
            self.failed.push(request);
        }
        self.pass_on(now);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        completed.append(&mut self.failed);
        self.inner.poll(now, completed);
        self.pass_on(now);
    }

    fn readiness(&self) -> Readiness {
        // A failure needs no event to be handed back.
        let next = if self.failed.is_empty() { Next::OnWake } else { Next::Now };
        self.inner.readiness().behind(self.failed.len().saturating_add(self.passed.len()), next)
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.inner.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NullStore, Tag};

    /// The results of `count` requests of 512 bytes, one sector each.
    fn results(rules: Vec<FaultRule>, operation: Operation, count: u64) -> Vec<Result<(), BlockError>> {
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
        let failures: Vec<_> = results(rules.clone(), Operation::Write, 7).iter().map(Result::is_err).collect();
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
        let failures: Vec<_> = results(rules, Operation::Discard, 4).iter().map(Result::is_err).collect();
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
