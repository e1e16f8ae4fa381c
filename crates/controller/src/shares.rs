//! Who is served next on a sidecore: weighted round-robin over the virtual
//! functions (thesis 6.3 dequeues them round-robin).
//!
//! Two things can be short, and each needs an answer of its own:
//!
//! * *The store.* At most [`WINDOW`] requests are under way. Who waits for room is
//!   served by deficit round-robin: each has a credit in proportion to its weight,
//!   and a new round begins when nobody who waits has credit left.
//! * *The sidecore's time.* A store that answers at once never fills the window.
//!   Then each function may start only so much in one turn of the reactor, in
//!   proportion to its weight; what is left waits for the next turn, which comes at
//!   once, so that no time is lost.
//!
//! While all weights are equal, the reactor's own round-robin is fair already, and
//! the second one costs nothing.

use sidecore_units::Nanos;

/// Requests under way to the store, of all functions on one sidecore.
pub(crate) const WINDOW: usize = 256;

/// What the heaviest function may start in a turn, in units.
const TURN_UNITS: u64 = 32;

/// A unit of service: a request, and each further page of it.
const UNIT_BYTES_SHIFT: u32 = 12;

/// What a round gives to a weight of 100, in units.
const ROUND_UNITS: u64 = 32;

/// A function's place in the round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(usize);

#[derive(Debug)]
struct Member {
    weight: u64,
    /// Units it may still start in this round; what it overdrew comes off the
    /// next one.
    credit: i64,
    /// Whether it waits for room.
    waiting: bool,
    /// Units started in the present turn.
    started: u64,
    turn: Nanos,
}

/// The functions on one sidecore.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    members: Vec<Option<Member>>,
    under_way: usize,
    waiting: usize,
    heaviest: u64,
    uneven: bool,
    /// How many functions started something in this turn, and in the one before.
    turn: Nanos,
    starters: usize,
    starters_before: usize,
}

/// The answer to [`Shares::may_start`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// Go on.
    Now,
    /// In the next turn.
    NextTurn,
    /// When there is room, and others have had theirs.
    Wait,
}

impl Shares {
    pub(crate) fn join(&mut self, weight: u32) -> Place {
        let member =
            Member { weight: u64::from(weight.max(1)), credit: 0, waiting: false, started: 0, turn: Nanos::ZERO };
        let index = self.members.iter().position(Option::is_none).unwrap_or(self.members.len());
        match self.members.get_mut(index) {
            Some(slot) => *slot = Some(member),
            None => self.members.push(Some(member)),
        }
        self.weigh();
        Place(index)
    }

    pub(crate) fn leave(&mut self, place: Place) {
        self.set_waiting(place, false);
        if let Some(slot) = self.members.get_mut(place.0) {
            *slot = None;
        }
        self.weigh();
    }

    fn weigh(&mut self) {
        let weights = self.members.iter().flatten().map(|member| member.weight);
        let (lightest, heaviest) = (weights.clone().min().unwrap_or(1), weights.max().unwrap_or(1));
        self.heaviest = heaviest;
        self.uneven = lightest != heaviest;
    }

    /// Whether nothing that was asked for so far had to wait: the fast path.
    #[inline]
    pub(crate) fn is_calm(&self) -> bool {
        !self.uneven && self.waiting == 0 && self.under_way < WINDOW
    }

    /// Whether `place` may start something now.
    pub(crate) fn may_start(&mut self, place: Place, now: Nanos) -> Start {
        if self.under_way >= WINDOW {
            return Start::Wait;
        }
        if self.uneven && self.used_up_its_turn(place, now) {
            return Start::NextTurn;
        }
        if self.waiting == 0 || self.credit(place) > 0 {
            return Start::Now;
        }
        let others_first = |(index, member): (usize, &Option<Member>)| {
            index != place.0 && member.as_ref().is_some_and(|member| member.waiting && member.credit > 0)
        };
        if self.members.iter().enumerate().any(others_first) {
            return Start::Wait;
        }
        self.new_round();
        // One that has overdrawn by more than a round's worth waits for another.
        if self.credit(place) > 0 || self.waiting == 0 { Start::Now } else { Start::Wait }
    }

    fn credit(&self, place: Place) -> i64 {
        self.members.get(place.0).and_then(Option::as_ref).map_or(1, |member| member.credit)
    }

    fn new_round(&mut self) {
        for member in self.members.iter_mut().flatten() {
            let share = member.weight.saturating_mul(ROUND_UNITS).checked_div(100).unwrap_or(0).max(1);
            let share = i64::try_from(share).unwrap_or(i64::MAX);
            // Nobody saves up credit while it has nothing to do.
            member.credit = member.credit.min(0).saturating_add(share);
        }
    }

    fn used_up_its_turn(&mut self, place: Place, now: Nanos) -> bool {
        let contended = {
            self.note_turn(now);
            self.starters.max(self.starters_before) > 1
        };
        let heaviest = self.heaviest.max(1);
        let Some(Some(member)) = self.members.get_mut(place.0) else { return false };
        if member.turn != now {
            member.turn = now;
            member.started = 0;
        }
        let share = TURN_UNITS.saturating_mul(member.weight).checked_div(heaviest).unwrap_or(1).max(1);
        contended && member.started >= share
    }

    fn note_turn(&mut self, now: Nanos) {
        if self.turn != now {
            self.turn = now;
            self.starters_before = std::mem::take(&mut self.starters);
        }
    }

    /// `place` starts a request of `len_bytes`.
    #[inline]
    pub(crate) fn started(&mut self, place: Place, len_bytes: u64, now: Nanos) {
        if !self.uneven && self.waiting == 0 {
            return;
        }
        self.charge(place, len_bytes, now);
    }

    fn charge(&mut self, place: Place, len_bytes: u64, now: Nanos) {
        self.note_turn(now);
        let units = (len_bytes >> UNIT_BYTES_SHIFT).max(1);
        let Some(Some(member)) = self.members.get_mut(place.0) else { return };
        if member.turn != now {
            member.turn = now;
            member.started = 0;
        }
        if member.started == 0 {
            self.starters = self.starters.saturating_add(1);
        }
        member.started = member.started.saturating_add(units);
        member.credit = member.credit.saturating_sub(i64::try_from(units).unwrap_or(i64::MAX));
    }

    /// Whether `place` waits for its turn or for room.
    #[inline]
    pub(crate) fn set_waiting(&mut self, place: Place, waiting: bool) {
        let Some(Some(member)) = self.members.get_mut(place.0) else { return };
        if member.waiting != waiting {
            member.waiting = waiting;
            self.waiting = if waiting { self.waiting.saturating_add(1) } else { self.waiting.saturating_sub(1) };
        }
    }

    /// So many requests went to the store.
    #[inline]
    pub(crate) fn went(&mut self, count: usize) {
        self.under_way = self.under_way.saturating_add(count);
    }

    /// So many came back.
    #[inline]
    pub(crate) fn came_back(&mut self, count: usize) {
        self.under_way = self.under_way.saturating_sub(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sidecore whose turns give each function all that it may start, out of an
    /// endless demand; `answers` requests come back after each turn (all, if the
    /// store answers at once). Returns what each was served.
    fn serve(weights: &[u32], turns: u64, answers: Option<usize>) -> Vec<u64> {
        let mut shares = Shares::default();
        let places: Vec<_> = weights.iter().map(|&weight| shares.join(weight)).collect();
        let mut served = vec![0; weights.len()];
        let mut under_way = 0;
        for turn in 1..=turns {
            let now = Nanos(turn);
            for step in 0..places.len() {
                // The reactor starts each turn with another one.
                let index = (step + turn as usize) % places.len();
                // A guest with 64 requests outstanding.
                for _ in 0..64 {
                    if shares.may_start(places[index], now) != Start::Now {
                        shares.set_waiting(places[index], true);
                        break;
                    }
                    shares.started(places[index], 4096, now);
                    shares.went(1);
                    under_way += 1;
                    served[index] += 1;
                }
            }
            let back = answers.map_or(under_way, |answers| under_way.min(answers));
            shares.came_back(back);
            under_way -= back;
        }
        served
    }

    fn ratio(served: &[u64]) -> f64 {
        served[1] as f64 / served[0] as f64
    }

    #[test]
    fn weights_divide_a_slow_store() {
        for weights in [[100, 100], [100, 300], [10, 1000], [1000, 10]] {
            let served = serve(&weights, 20_000, Some(7));
            let wanted = f64::from(weights[1]) / f64::from(weights[0]);
            let got = ratio(&served);
            assert!((got / wanted - 1.0).abs() < 0.1, "{weights:?}: {served:?}, {got}");
        }
    }

    #[test]
    fn weights_divide_the_sidecore_when_the_store_answers_at_once() {
        for weights in [[100, 200], [100, 400], [400, 100]] {
            let served = serve(&weights, 2_000, None);
            let wanted = f64::from(weights[1]) / f64::from(weights[0]);
            assert!((ratio(&served) / wanted - 1.0).abs() < 0.1, "{weights:?}: {served:?}");
        }
    }

    #[test]
    fn nobody_starves() {
        let served = serve(&[1, 1000, 1000], 10_000, Some(5));
        assert!(served[0] > 0, "{served:?}");
    }

    #[test]
    fn one_alone_is_never_held_back_but_by_the_window() {
        let mut shares = Shares::default();
        let place = shares.join(1);
        let _idle = shares.join(1000);
        let mut started = 0;
        while shares.may_start(place, Nanos(1)) == Start::Now {
            shares.started(place, 4096, Nanos(1));
            shares.went(1);
            started += 1;
        }
        assert_eq!(started, WINDOW);
        shares.came_back(1);
        assert_eq!(shares.may_start(place, Nanos(1)), Start::Now);
    }

    #[test]
    fn who_leaves_is_not_waited_for() {
        let mut shares = Shares::default();
        let (one, two) = (shares.join(100), shares.join(100));
        shares.went(WINDOW);
        assert_eq!(shares.may_start(one, Nanos(1)), Start::Wait);
        shares.set_waiting(one, true);
        shares.set_waiting(two, true);
        shares.came_back(1);
        shares.leave(two);
        assert_eq!(shares.may_start(one, Nanos(1)), Start::Now);
        assert_eq!(shares.join(5), two, "its place is taken again");
    }
}
