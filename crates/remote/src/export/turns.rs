//! Turns of sessions: each has its share of the requests that are given to the stores.

use std::collections::VecDeque;

use sidecore_units::Nanos;

/// Bytes that a session of weight 1 may have executed in a turn, but for its last request's.
const TURN_BYTES: i64 = 64 << 10;
/// The same in short polls, in which no session waits for much of another one.
const SHORT_TURN_BYTES: i64 = 8 << 10;
/// A request counts as so many bytes at least: small ones cost time as well.
const REQUEST_BYTES_MIN: i64 = 4096;
/// A request counts as so many bytes at most: a discard's bytes cost no time.
const REQUEST_BYTES_MAX: i64 = 64 << 10;

/// The requests of sessions that wait for their turns, by the places of the sessions (deficit
/// round-robin: Shreedhar and Varghese 1995).
///
/// A session that floods its queue takes what the others leave, and never a part of their share: a
/// request waits for one turn of each other session, and for those before it in its own. A session
/// that had no request for a round comes first with its next one, for one turn (RFC 8290, 4.2).
#[derive(Debug)]
pub(crate) struct Turns<T> {
    places: Vec<Place<T>>,
    /// The places that had no request for a round, and have one now.
    fresh: VecDeque<u16>,
    /// The other places. The first one has its turn, if none is fresh. One that was fresh and has
    /// no more requests is here, too, until the round comes to it.
    order: VecDeque<u16>,
    /// The places whose next request is held back by a limit, and until when.
    paused: Vec<(u16, Nanos)>,
    /// The turn of the first place in the order has begun.
    has_begun: bool,
    /// Places that have requests and are not paused.
    waiting: usize,
    /// Bytes of a turn, for a weight of 1.
    turn_bytes: i64,
}

#[derive(Debug)]
struct Place<T> {
    weight: u32,
    /// The rest of its turn; zero or less if that is used up.
    credit: i64,
    /// It is fresh, in the order, or paused.
    is_listed: bool,
    /// Requests, and the bytes that they concern.
    requests: VecDeque<(u64, T)>,
}

impl<T> Place<T> {
    fn new() -> Self {
        Self { weight: 1, credit: 0, is_listed: false, requests: VecDeque::new() }
    }

    #[inline]
    fn share(&self, turn_bytes: i64) -> i64 {
        turn_bytes.saturating_mul(self.weight.into())
    }
}

impl<T> Turns<T> {
    pub const fn new() -> Self {
        Self {
            places: Vec::new(),
            fresh: VecDeque::new(),
            order: VecDeque::new(),
            paused: Vec::new(),
            has_begun: false,
            waiting: 0,
            turn_bytes: TURN_BYTES,
        }
    }

    /// Makes turns short, or long: also the rest of one that has begun.
    #[inline]
    pub const fn set_short(&mut self, is_short: bool) {
        self.turn_bytes = if is_short { SHORT_TURN_BYTES } else { TURN_BYTES };
    }

    /// Makes room for the requests of a place, which has this weight from 1.
    pub fn set(&mut self, place: u16, weight: u32, requests: usize) {
        let index = usize::from(place);
        while self.places.len() <= index {
            self.places.push(Place::new());
        }
        if let Some(place) = self.places.get_mut(index) {
            place.weight = weight.max(1);
            place.requests.reserve(requests);
        }
        self.fresh.reserve(self.places.len());
        self.order.reserve(self.places.len());
        self.paused.reserve(self.places.len());
    }

    /// Queues a request of a place.
    #[inline]
    pub fn push(&mut self, place: u16, len_bytes: u64, request: T) {
        let Some(found) = self.places.get_mut(usize::from(place)) else { return };
        if found.requests.is_empty() {
            self.waiting = self.waiting.saturating_add(1);
            if !std::mem::replace(&mut found.is_listed, true) {
                found.credit = found.share(self.turn_bytes);
                self.fresh.push_back(place);
            }
        }
        found.requests.push_back((len_bytes, request));
    }

    /// The number of places with a request that waits for its turn.
    #[inline]
    pub const fn waiting(&self) -> usize {
        self.waiting
    }

    /// Whether no request waits for its turn.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Whether no request is here, also none that a limit holds back.
    #[inline]
    pub fn is_unused(&self) -> bool {
        self.waiting == 0 && self.paused.is_empty()
    }

    /// When the next request that a limit holds back may pass.
    pub fn deadline(&self) -> Option<Nanos> {
        self.paused.iter().map(|(_, until)| *until).min()
    }

    /// Has the places take turns again whose limits let their next request pass by `now`, and those
    /// whose session `is_over`.
    #[inline]
    pub fn resume(&mut self, now: Nanos, is_over: impl Fn(u16) -> bool) {
        let (order, waiting) = (&mut self.order, &mut self.waiting);
        self.paused.retain(|(place, until)| {
            let is_due = *until <= now || is_over(*place);
            if is_due {
                order.push_back(*place);
                *waiting = waiting.saturating_add(1);
            }
            !is_due
        });
    }

    /// The request whose turn it is, and its bytes. `pass` says whether the limits of a place let a
    /// request of so many bytes pass now, or when; a place that has to wait has no turns.
    #[inline]
    pub fn pop(
        &mut self,
        mut pass: impl FnMut(u16, u64, &T) -> Result<(), Nanos>,
    ) -> Option<(u64, T)> {
        while self.waiting > 0 {
            let (number, is_fresh) = match self.fresh.front() {
                Some(number) => (*number, true),
                None => (*self.order.front()?, false),
            };
            let place = self.places.get_mut(usize::from(number))?;
            let share = place.share(self.turn_bytes);
            if !is_fresh && !std::mem::replace(&mut self.has_begun, true) {
                place.credit = place.credit.saturating_add(share);
            }
            // A long turn becomes a short one.
            place.credit = place.credit.min(share);
            let Some((len_bytes, request)) = place.requests.front() else {
                // It was fresh a round ago, and will be with its next request.
                (place.credit, place.is_listed) = (0, false);
                self.leave(is_fresh);
                continue;
            };
            if place.credit <= 0 {
                // Its debt is taken off its next turn.
                self.leave(is_fresh);
                self.order.push_back(number);
                continue;
            }
            if let Err(until) = pass(number, *len_bytes, request) {
                place.credit = 0;
                self.leave(is_fresh);
                self.paused.push((number, until));
                self.waiting = self.waiting.saturating_sub(1);
                continue;
            }
            let (len_bytes, request) = place.requests.pop_front()?;
            let cost = i64::try_from(len_bytes).unwrap_or(i64::MAX);
            let cost = cost.clamp(REQUEST_BYTES_MIN, REQUEST_BYTES_MAX);
            place.credit = place.credit.saturating_sub(cost);
            if place.requests.is_empty() {
                place.credit = 0;
                place.is_listed = is_fresh;
                self.waiting = self.waiting.saturating_sub(1);
                self.leave(is_fresh);
                if is_fresh {
                    self.order.push_back(number);
                }
            }
            return Some((len_bytes, request));
        }
        None
    }

    /// Takes the place whose turn it is out of its list.
    #[inline]
    fn leave(&mut self, is_fresh: bool) {
        if is_fresh {
            self.fresh.pop_front();
        } else {
            self.order.pop_front();
            self.has_begun = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(weights: &[u32]) -> Turns<u16> {
        let mut turns = Turns::new();
        for (place, weight) in (0..).zip(weights) {
            turns.set(place, *weight, 64);
        }
        turns
    }

    fn pop(turns: &mut Turns<u16>) -> Option<(u64, u16)> {
        turns.pop(|_, _, _| Ok(()))
    }

    #[test]
    fn a_place_that_its_limits_hold_back_has_no_turns_until_then() {
        let mut turns = turns(&[1, 1]);
        for place in [0, 1, 0, 1] {
            turns.push(place, 512, place);
        }
        let until = Nanos::from_millis(5);
        let pass = |place, _, request: &u16| {
            assert_eq!(place, *request);
            if place == 0 { Err(until) } else { Ok(()) }
        };
        assert_eq!(
            (turns.pop(pass), turns.pop(pass), turns.pop(pass)),
            (Some((512, 1)), Some((512, 1)), None)
        );
        assert_eq!((turns.deadline(), turns.is_empty()), (Some(until), true));
        assert!(!turns.is_unused(), "its next request waits");
        // More of it changes nothing.
        turns.push(0, 512, 0);
        turns.resume(Nanos(until.0 - 1), |_| false);
        assert_eq!(pop(&mut turns), None);
        turns.resume(until, |_| false);
        assert_eq!(turns.deadline(), None);
        for _ in 0..3 {
            assert_eq!(pop(&mut turns), Some((512, 0)));
        }
        assert_eq!(pop(&mut turns), None);
        assert!(turns.is_unused());
    }

    #[test]
    fn bytes_are_shared_by_weight_whatever_the_size_of_requests() {
        let mut turns = turns(&[1, 1, 3, 1]);
        let sizes = [4096, 65_536, 12_288];
        let mut bytes = [0; 3];
        for (place, size) in (0..).zip(sizes) {
            for _ in 0..100 {
                turns.push(place, size, place);
            }
        }
        for _ in 0..100_000 {
            let (size, place) = pop(&mut turns).unwrap();
            bytes[usize::from(place)] += size;
            turns.push(place, size, place);
        }
        let share = |place: usize| bytes[place] as f64 / bytes[0] as f64;
        assert!((0.98..1.02).contains(&share(1)), "{bytes:?}");
        assert!((2.94..3.06).contains(&share(2)), "{bytes:?}");
    }

    #[test]
    fn a_request_waits_for_one_turn_of_each_other_session() {
        for (is_short, turn_bytes) in [(false, TURN_BYTES), (true, SHORT_TURN_BYTES)] {
            let mut turns = turns(&[1; 8]);
            turns.set_short(is_short);
            for place in (0..8).filter(|place| *place != 5) {
                for _ in 0..1000 {
                    turns.push(place, 512, place);
                }
            }
            for moment in 0..200 {
                for _ in 0..moment % 7 {
                    let (size, place) = pop(&mut turns).unwrap();
                    turns.push(place, size, place);
                }
                turns.push(5, 512, 5);
                let mut before = 0;
                while let Some((size, place)) = pop(&mut turns).filter(|(_, place)| *place != 5) {
                    turns.push(place, size, place);
                    before += 1;
                }
                let turn = turn_bytes / REQUEST_BYTES_MIN;
                assert!(before <= 7 * turn, "{before} others came first");
            }
        }
    }

    #[test]
    fn a_long_turn_becomes_a_short_one() {
        let mut turns = turns(&[1, 1]);
        for place in [0, 1] {
            (0..32).for_each(|_| turns.push(place, 4096, place));
        }
        assert_eq!(pop(&mut turns), Some((4096, 0)));
        turns.set_short(true);
        let next: Vec<_> = (0..6).map_while(|_| pop(&mut turns)).map(|(_, place)| place).collect();
        assert_eq!(next, [0, 0, 1, 1, 0, 0]);
    }

    #[test]
    fn every_request_has_its_turn_in_the_order_of_its_session() {
        let mut turns = turns(&[1, 5]);
        for request in 0..1000_u16 {
            turns.push(request % 2, u64::from(request) * 300, request);
        }
        // Of a place that does not exist.
        turns.push(2, 1, 9999);
        let mut seen = [Vec::new(), Vec::new()];
        while let Some((_, request)) = pop(&mut turns) {
            seen[usize::from(request % 2)].push(request);
        }
        assert!(turns.is_empty());
        assert_eq!((seen[0].len(), seen[1].len()), (500, 500));
        assert!(seen.iter().all(|requests| requests.is_sorted()));
    }
}
