//! The fates of frames on a bad wire: lost, doubled, overtaken, damaged, cut short, delayed.
//!
//! All that happens follows from a seed, from the order of the frames, and from their times: the
//! same run fails the same way. Simulated links draw from here, and so does the stage that makes a
//! port of a switch a bad wire.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

use sidecore_units::Nanos;

/// The faults of a wire. Chances are per million frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Frames that vanish.
    pub lost: u32,
    /// Frames that arrive twice.
    pub doubled: u32,
    /// Frames that arrive later than those behind them, by up to eight delays.
    pub overtaken: u32,
    /// Frames with a wrong bit, which a checksum of the medium would have missed.
    pub damaged: u32,
    /// Frames that lose their end.
    pub cut_short: u32,
    /// The way of every frame takes at least so long,
    pub delay: Nanos,
    /// and up to so much longer, which does not change the order.
    pub jitter: Nanos,
    /// Shorter frames are padded with zeros to this size: Ethernet's is 46 bytes.
    pub padded_to_bytes: usize,
    /// Longer frames vanish: a path whose MTU is smaller than its ends believe.
    pub black_hole_bytes: usize,
}

impl Default for Faults {
    /// A perfect wire.
    fn default() -> Self {
        Self {
            lost: 0,
            doubled: 0,
            overtaken: 0,
            damaged: 0,
            cut_short: 0,
            delay: Nanos::from_micros(1),
            jitter: Nanos::ZERO,
            padded_to_bytes: 46,
            black_hole_bytes: usize::MAX,
        }
    }
}

/// The faults that befall one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // each is independent of the others
pub struct Fate {
    /// See [`Faults::lost`].
    pub is_lost: bool,
    /// See [`Faults::doubled`].
    pub is_doubled: bool,
    /// See [`Faults::damaged`].
    pub is_damaged: bool,
    /// See [`Faults::cut_short`].
    pub is_cut_short: bool,
    /// A random number: where it is damaged and cut.
    place: u64,
}

impl Fate {
    /// The byte of `len_bytes` whose bits are wrong, and these bits.
    #[must_use]
    pub fn wrong_bit(&self, len_bytes: usize) -> (usize, u8) {
        let bit = self.place.checked_rem((len_bytes as u64).saturating_mul(8)).unwrap_or(0);
        let mask = 1_u8.rotate_left(u32::try_from(bit & 7).unwrap_or(0));
        (usize::try_from(bit >> 3).unwrap_or(0), mask)
    }

    /// The bytes of `len_bytes` that are left, at least one.
    #[must_use]
    pub fn rest(&self, len_bytes: usize) -> usize {
        let rest = self.place.checked_rem(len_bytes as u64).unwrap_or(0).max(1);
        usize::try_from(rest).unwrap_or(1)
    }
}

/// The time of a frame's arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The time.
    pub at: Nanos,
    /// See [`Faults::overtaken`].
    pub is_overtaken: bool,
}

/// Draws fates.
#[derive(Debug)]
pub struct Fates(Random);

impl Fates {
    /// The fates that follow from a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(Random(seed))
    }

    /// Draws the faults of a frame: the same count of numbers, whatever becomes of the frame.
    pub fn draw(&mut self, faults: &Faults) -> Fate {
        let [is_lost, is_doubled, is_damaged, is_cut_short] =
            [faults.lost, faults.doubled, faults.damaged, faults.cut_short]
                .map(|chance| self.0.chance(chance));
        Fate { is_lost, is_doubled, is_damaged, is_cut_short, place: self.0.next() }
    }

    /// Draws the arrival of a frame that is sent now. `latest` is that of the last frame of the
    /// same way that kept its order.
    pub fn arrival(&mut self, faults: &Faults, now: Nanos, latest: &mut Nanos) -> Arrival {
        let is_overtaken = self.0.chance(faults.overtaken);
        let jitter = self.0.below(faults.jitter.0.saturating_add(1));
        let late = self.0.below(faults.delay.0.saturating_mul(8)).saturating_add(1);
        let in_order = now.after(faults.delay).after(Nanos(jitter)).max(*latest);
        if is_overtaken {
            return Arrival { at: in_order.after(Nanos(late)), is_overtaken };
        }
        *latest = in_order;
        Arrival { at: in_order, is_overtaken }
    }
}

/// SplitMix64 (Steele, Lea and Flood 2014).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`; zero if that is zero.
    fn below(&mut self, end: u64) -> u64 {
        self.next().checked_rem(end).unwrap_or(0)
    }

    fn chance(&mut self, per_million: u32) -> bool {
        self.below(1_000_000) < u64::from(per_million)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_are_kept_and_the_same_seed_draws_the_same() {
        let faults = Faults { lost: 100_000, doubled: 50_000, ..Faults::default() };
        let draw = |seed| {
            let mut fates = Fates::new(seed);
            (0..10_000).map(|_| fates.draw(&faults)).collect::<Vec<_>>()
        };
        let all = draw(7);
        let lost = all.iter().filter(|fate| fate.is_lost).count();
        let doubled = all.iter().filter(|fate| fate.is_doubled).count();
        assert!((850..1_150).contains(&lost) && (400..600).contains(&doubled), "{lost} {doubled}");
        assert!(!all.iter().any(|fate| fate.is_damaged || fate.is_cut_short));
        assert_eq!(all, draw(7));
        assert_ne!(all, draw(8));
    }

    #[test]
    fn jitter_keeps_the_order_and_an_overtaken_frame_does_not() {
        let mut fates = Fates::new(1);
        let faults = Faults {
            delay: Nanos(100),
            jitter: Nanos(1_000),
            overtaken: 200_000,
            ..Faults::default()
        };
        let (mut latest, mut overtaken) = (Nanos::ZERO, 0);
        for now in 0..1_000 {
            let before = latest;
            let arrival = fates.arrival(&faults, Nanos(now), &mut latest);
            assert!(arrival.at >= Nanos(now + 100) && arrival.at >= before);
            assert!(arrival.at <= Nanos(now + 100 + 1_000 + 801));
            if arrival.is_overtaken {
                overtaken += 1;
                assert_eq!(latest, before);
            }
        }
        assert!((150..250).contains(&overtaken), "{overtaken}");
    }

    #[test]
    fn places_are_within_the_frame() {
        let mut fates = Fates::new(3);
        for len_bytes in 1..200 {
            let fate = fates.draw(&Faults::default());
            let (at, mask) = fate.wrong_bit(len_bytes);
            assert!(at < len_bytes && mask.is_power_of_two());
            assert!((1..=len_bytes).contains(&fate.rest(len_bytes)));
        }
        let fate = fates.draw(&Faults::default());
        assert_eq!((fate.wrong_bit(0).0, fate.rest(0)), (0, 1));
    }
}
