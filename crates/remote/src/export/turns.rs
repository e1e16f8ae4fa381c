//! Turns of sessions: each has its share of the requests that are given to the stores.

use std::collections::VecDeque;

use sidecore_units::Nanos;

/// Bytes that a session of weight 1 may have executed in a turn, but for its last request's.
const TURN_BYTES: i64 = 64 << 10;
/// A request counts as so many bytes at least: small ones cost time as well.
const REQUEST_BYTES: i64 = 4096;

/// The requests of sessions that wait for their turns, by the places of the sessions (deficit
/// round-robin: Shreedhar and Varghese 1995).
///
/// A session that floods its queue takes what the others leave, and never a part of their share: a
/// request waits for one turn of each other session, and for those before it in its own.
#[derive(Debug)]
pub(crate) struct Turns<T> {
    places: Vec<Place<T>>,
    /// The places that have requests. The first one has its turn.
    order: VecDeque<u16>,
    /// The places whose next request is held back by a limit, and until when.
    paused: Vec<(u16, Nanos)>,
    /// That turn has begun.
    has_begun: bool,
}

#[derive(Debug)]
struct Place<T> {
    weight: u32,
    /// The rest of its turn; zero or less if that is used up.
    credit: i64,
    /// Requests, and the bytes that they concern.
    requests: VecDeque<(u64, T)>,
}

impl<T> Turns<T> {
    pub const fn new() -> Self {
        Self { places: Vec::new(), order: VecDeque::new(), paused: Vec::new(), has_begun: false }
    }

    /// Makes room for the requests of a place, which has this weight from 1.
    pub fn set(&mut self, place: u16, weight: u32, requests: usize) {
        let index = usize::from(place);
        while self.places.len() <= index {
            self.places.push(Place { weight: 1, credit: 0, requests: VecDeque::new() });
        }
        if let Some(place) = self.places.get_mut(index) {
            place.weight = weight.max(1);
            place.requests.reserve(requests);
        }
        self.order.reserve(self.places.len());
        self.paused.reserve(self.places.len());
    }

    /// Queues a request of a place.
    #[inline]
    pub fn push(&mut self, place: u16, len_bytes: u64, request: T) {
        let Some(found) = self.places.get_mut(usize::from(place)) else { return };
        if found.requests.is_empty() {
            self.order.push_back(place);
        }
        found.requests.push_back((len_bytes, request));
    }

    /// Whether no request waits for its turn.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Whether no request is here, also none that a limit holds back.
    #[inline]
    pub fn is_unused(&self) -> bool {
        self.order.is_empty() && self.paused.is_empty()
    }

    /// When the next request that a limit holds back may pass.
    pub fn deadline(&self) -> Option<Nanos> {
        self.paused.iter().map(|(_, until)| *until).min()
    }

    /// Has the places take turns again whose limits let their next request pass by `now`, and those
    /// whose session `is_over`.
    #[inline]
    pub fn resume(&mut self, now: Nanos, is_over: impl Fn(u16) -> bool) {
        let order = &mut self.order;
        self.paused.retain(|(place, until)| {
            let is_due = *until <= now || is_over(*place);
            if is_due {
                order.push_back(*place);
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
        loop {
            let number = *self.order.front()?;
            let place = self.places.get_mut(usize::from(number))?;
            if !self.has_begun {
                self.has_begun = true;
                let share = TURN_BYTES.saturating_mul(place.weight.into());
                place.credit = place.credit.saturating_add(share);
            }
            if place.credit <= 0 {
                // Its debt is taken off its next turn.
                self.order.pop_front();
                self.order.push_back(number);
                self.has_begun = false;
                continue;
            }
            let (len_bytes, request) = place.requests.front()?;
            if let Err(until) = pass(number, *len_bytes, request) {
                self.order.pop_front();
                self.paused.push((number, until));
                place.credit = 0;
                self.has_begun = false;
                continue;
            }
            let (len_bytes, request) = place.requests.pop_front()?;
            let cost = i64::try_from(len_bytes).unwrap_or(i64::MAX);
            place.credit = place.credit.saturating_sub(cost.clamp(REQUEST_BYTES, TURN_BYTES));
            if place.requests.is_empty() {
                place.credit = 0;
                self.order.pop_front();
                self.has_begun = false;
            }
            return Some((len_bytes, request));
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
        let mut turns = turns(&[1; 8]);
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
            assert!(before <= 7 * TURN_BYTES / REQUEST_BYTES, "{before} others came first");
        }
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
