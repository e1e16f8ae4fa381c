//! The division of a store's slots among all functions of its controller, on all sidecores.
//!
//! Each sidecore follows the same rounds on its own: it counts the units that its functions start,
//! and at intervals the units that other sidecores have started for theirs. The order of events on
//! different sidecores does not matter: credit is granted when no function with queued requests has
//! any left, and taken for service on any sidecore.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sidecore_units::Nanos;

use super::board::{Board, Boards, NUMBERS, Reading};
use super::queues::{LEAD_UNITS, Queues};
use super::window::Window;
use super::{FRACTION, QueuedBy, share, whole_units};

/// The credit of one round for the heaviest function, in units.
const ROUND_UNITS: i64 = 64;

/// The greatest debt, in rounds, for units that other sidecores have started since the last look.
const DEBT_ROUNDS: i64 = 4;

/// The interval between reads of the other sidecores' boards: each read takes cache lines from
/// them.
const LOOK_INTERVAL: Nanos = Nanos::from_micros(50);

/// The interval of a sidecore with requests queued for the store: slots that another sidecore frees
/// must not be idle for long.
const LOOK_INTERVAL_WAITING: Nanos = Nanos::from_micros(20);

/// The time that functions count as competing after a look found them so: requests submitted
/// together also complete together, and then their function has none in the store for a moment.
const LINGER: Nanos = Nanos::from_millis(1);

/// The added interval for each function, because a look takes longer the more functions there are.
const LOOK_INTERVAL_PER_FUNCTION: Nanos = Nanos::from_micros(1);

const NONE: u16 = u16::MAX;

/// A queue's place: its function, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    member: usize,
    queue: usize,
}

/// A function from the point of view of one sidecore.
#[derive(Debug)]
struct Member {
    function: u32,
    weight: u32,
    /// Fractions of a unit that the function may still start in this round; overdraft counts
    /// against the next one.
    credit: i64,
    /// The function's queues on this sidecore.
    queues: Queues,
    in_flight_here: usize,
    /// Units started on this sidecore, as published on the board.
    started_here: u64,
    /// The part of `started_here` that the last look has counted.
    seen_here: u64,
    /// The units by which this sidecore was ahead at the last look of each other sidecore that has
    /// requests of the function queued.
    ahead: i64,
    /// No other function had requests queued: units started are no debt.
    is_free: bool,
    /// The sum over the other sidecores, as of the last look.
    elsewhere: Elsewhere,
    /// The member's contribution to the sums over all members.
    counted: Counted,
}

#[derive(Clone, Copy, Debug, Default)]
struct Elsewhere {
    present: bool,
    /// Sidecores on which the function has requests queued.
    waiting: u32,
    in_flight: usize,
    started: u64,
    /// `started` at the look before, if the function was there.
    before: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    waiting: bool,
    /// The function has queued requests, and credit left that it may use on this sidecore.
    has_credit: bool,
}

impl Member {
    fn is_waiting(&self) -> bool {
        self.queues.wait_for_store() || self.elsewhere.waiting > 0
    }

    fn in_flight(&self) -> usize {
        self.in_flight_here.saturating_add(self.elsewhere.in_flight)
    }

    fn started_since_look(&self) -> i64 {
        i64::try_from(self.started_here.saturating_sub(self.seen_here)).unwrap_or(i64::MAX)
    }

    /// The units that may be started here before those queued on other sidecores.
    fn lead(&self) -> i64 {
        if self.elsewhere.waiting == 0 {
            return i64::MAX;
        }
        LEAD_UNITS
            .cast_signed()
            .saturating_sub(self.ahead)
            .saturating_sub(self.started_since_look())
    }

    /// Accounts for units started since the last look, here and on the other sidecores.
    fn follow(&mut self, contended: bool) {
        let here = self.started_since_look();
        self.seen_here = self.started_here;
        let Some(before) = self.elsewhere.before else { return };
        let there =
            i64::try_from(self.elsewhere.started.saturating_sub(before)).unwrap_or(i64::MAX);
        if contended {
            let least =
                DEBT_ROUNDS.saturating_mul(ROUND_UNITS).saturating_mul(FRACTION).saturating_neg();
            let credit = self.credit.saturating_sub(there.saturating_mul(FRACTION));
            self.credit = credit.max(least.min(self.credit));
        }
        let ahead = there
            .checked_div(i64::from(self.elsewhere.waiting))
            .map_or(0, |of_each| self.ahead.saturating_add(here).saturating_sub(of_each));
        let most = LEAD_UNITS.cast_signed().saturating_mul(2);
        self.ahead = ahead.clamp(most.saturating_neg(), most);
    }
}

/// The store's functions from the point of view of one sidecore. Only that thread uses it.
#[derive(Debug)]
pub(crate) struct StoreShares {
    boards: Arc<Boards>,
    board: Arc<Board>,
    members: Vec<Option<Member>>,
    /// The index of each function in `members`.
    places: Box<[u16]>,
    /// Whether several functions have requests in the store.
    contended: bool,
    contended_until: Nanos,
    /// Members with requests queued for the store, and those of them with credit left to use here.
    waiting: usize,
    with_credit: usize,
    heaviest: u32,
    next_look: Nanos,
    /// Requests in the store, of this sidecore and of the others.
    in_flight_here: usize,
    in_flight_elsewhere: usize,
    /// Sidecores with requests in the store or queued for it.
    sidecores: usize,
    window: Window,
}

impl Drop for StoreShares {
    fn drop(&mut self) {
        self.board.release();
    }
}

impl StoreShares {
    pub(crate) fn new(boards: &Arc<Boards>) -> Self {
        Self {
            boards: Arc::clone(boards),
            board: boards.take(),
            // At full capacity: functions of other sidecores join on the data path.
            members: Vec::with_capacity(NUMBERS),
            places: (0..NUMBERS).map(|_| NONE).collect(),
            contended: false,
            contended_until: Nanos::ZERO,
            waiting: 0,
            with_credit: 0,
            heaviest: 1,
            next_look: Nanos::ZERO,
            in_flight_here: 0,
            in_flight_elsewhere: 0,
            sidecores: 1,
            window: Window::new(),
        }
    }

    /// Whether the controller has several functions with queues.
    #[cfg(test)]
    pub(crate) fn is_shared(&self) -> bool {
        self.boards.is_shared()
    }

    /// Adds a queue of `function`.
    pub(crate) fn join(&mut self, function: u32, weight: u32) -> Place {
        let index = self.member(function, weight);
        let mut queue = 0;
        if let Some(Some(member)) = self.members.get_mut(index) {
            if member.queues.is_empty() {
                (member.started_here, member.seen_here, member.ahead) = (0, 0, 0);
                self.board.show(function, Some(weight));
                self.boards.count(function, true);
            }
            queue = member.queues.add();
        }
        Place { member: index, queue }
    }

    /// Removes a queue, which has `in_flight` requests in the store.
    pub(crate) fn leave(&mut self, place: Place, in_flight: usize) {
        self.moved(place, in_flight, 0);
        let Some(Some(member)) = self.members.get_mut(place.member) else { return };
        member.queues.remove(place.queue);
        if member.queues.is_empty() {
            self.board.show(member.function, None);
            self.boards.count(member.function, false);
        }
        self.recount(place.member);
        self.forget_absent(place.member);
    }

    /// Updates the sums after a change of a member.
    fn recount(&mut self, index: usize) {
        let Some(Some(member)) = self.members.get_mut(index) else { return };
        let waiting = member.is_waiting();
        // A function that is ahead here cannot use its credit here: waiting for the credit would be
        // waiting for another sidecore.
        let now =
            Counted { waiting, has_credit: waiting && member.credit > 0 && member.lead() > 0 };
        let before = std::mem::replace(&mut member.counted, now);
        let count = |sum: usize, before: bool, now: bool| {
            sum.saturating_add(usize::from(now)).saturating_sub(usize::from(before))
        };
        self.waiting = count(self.waiting, before.waiting, now.waiting);
        self.with_credit = count(self.with_credit, before.has_credit, now.has_credit);
    }

    fn recount_all(&mut self) {
        for index in 0..self.members.len() {
            self.recount(index);
        }
    }

    /// The index of a function, which is added if it is new.
    fn member(&mut self, function: u32, weight: u32) -> usize {
        let place = self.places.get(function as usize).copied().unwrap_or(NONE);
        if place != NONE {
            return usize::from(place);
        }
        let member = Some(Member {
            function,
            weight: weight.max(1),
            credit: 0,
            queues: Queues::default(),
            in_flight_here: 0,
            started_here: 0,
            seen_here: 0,
            ahead: 0,
            is_free: false,
            elsewhere: Elsewhere::default(),
            counted: Counted::default(),
        });
        let index = self.members.iter().position(Option::is_none).unwrap_or(self.members.len());
        match self.members.get_mut(index) {
            Some(slot) => *slot = member,
            None => self.members.push(member),
        }
        if let (Some(place), Ok(index)) =
            (self.places.get_mut(function as usize), u16::try_from(index))
        {
            *place = index;
        }
        index
    }

    fn forget_absent(&mut self, index: usize) {
        let Some(slot) = self.members.get_mut(index) else { return };
        if let Some(member) = slot
            && member.queues.is_empty()
            && !member.elsewhere.present
        {
            if let Some(place) = self.places.get_mut(member.function as usize) {
                *place = NONE;
            }
            *slot = None;
        }
    }

    /// The units that `place` may start now, more than zero.
    ///
    /// # Errors
    /// The store has no free slot for the queue, or other functions or other queues of its own
    /// function come first.
    pub(crate) fn allowance(&mut self, place: Place) -> Result<i64, QueuedBy> {
        let Some(Some(member)) = self.members.get(place.member) else { return Ok(i64::MAX) };
        let lead = member.queues.lead(place.queue);
        if lead <= 0 {
            return Err(if member.queues.wait_for_store() {
                QueuedBy::Store
            } else {
                QueuedBy::Turn
            });
        }
        if !self.contended {
            return Ok(lead);
        }
        if member.in_flight() == 0 {
            // A function without requests in the store may always start one.
            return Ok(1);
        }
        let lead = lead.min(member.lead());
        let room = self.room();
        if room == 0 || lead <= 0 {
            return Err(QueuedBy::Store);
        }
        let credit = self.credit(place.member);
        if credit <= 0 { Err(QueuedBy::Store) } else { Ok(whole_units(credit).min(room).min(lead)) }
    }

    /// The number of requests that may be submitted now.
    fn room(&self) -> i64 {
        let window =
            usize::try_from(self.boards.window.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        let here = self.in_flight_here;
        let room = window.saturating_sub(here.saturating_add(self.in_flight_elsewhere));
        // The other sidecores' use is known with a delay, and perhaps always at a bad moment: an
        // equal part of the window belongs to this sidecore.
        let ours = window.checked_div(self.sidecores).unwrap_or(0).saturating_sub(here);
        i64::try_from(room.max(ours)).unwrap_or(i64::MAX)
    }

    /// The credit of a function with queued requests, after a new round if one is due.
    fn credit(&mut self, index: usize) -> i64 {
        let Some(Some(member)) = self.members.get_mut(index) else { return i64::MAX };
        let Counted { waiting, has_credit } = member.counted;
        member.is_free = self.waiting == usize::from(waiting);
        if member.is_free {
            member.credit = member.credit.max(0);
            self.recount(index);
            return i64::MAX;
        }
        if member.credit <= 0 && self.with_credit == usize::from(has_credit) {
            self.new_round();
        }
        self.members.get(index).and_then(Option::as_ref).map_or(i64::MAX, |member| member.credit)
    }

    fn new_round(&mut self) {
        for member in self.members.iter_mut().flatten() {
            let share = share(ROUND_UNITS, member.weight, self.heaviest);
            // A function that was idle has saved up no more than a round.
            let most = share.max(FRACTION).saturating_mul(2);
            member.credit = member.credit.saturating_add(share).min(most);
        }
        self.recount_all();
    }

    /// Charges units that `place` has started.
    pub(crate) fn charge(&mut self, place: Place, units: i64) {
        let Some(Some(member)) = self.members.get_mut(place.member) else { return };
        member.queues.charge(place.queue, units);
        member.started_here = member.started_here.saturating_add(units.unsigned_abs());
        if self.contended && !member.is_free {
            member.credit = member.credit.saturating_sub(units.saturating_mul(FRACTION));
            self.recount(place.member);
        }
    }

    /// Sets whether `place` has requests that it may not start, and whether the store is the
    /// reason.
    pub(crate) fn set_waiting(&mut self, place: Place, waits: bool, for_store: bool) {
        let Some(Some(member)) = self.members.get_mut(place.member) else { return };
        member.queues.set_waiting(place.queue, waits, for_store);
        self.recount(place.member);
    }

    /// Changes the number of requests of `place` in the store.
    pub(crate) fn moved(&mut self, place: Place, from: usize, to: usize) {
        let moved = |count: usize| count.saturating_add(to).saturating_sub(from);
        self.in_flight_here = moved(self.in_flight_here);
        if let Some(Some(member)) = self.members.get_mut(place.member) {
            member.in_flight_here = moved(member.in_flight_here);
        }
    }

    /// Counts completions of the store.
    pub(crate) fn completed(&self, count: usize) {
        let completed = self.board.completed.load(Ordering::Relaxed);
        self.board.completed.store(completed.saturating_add(count as u64), Ordering::Relaxed);
    }

    /// Publishes this sidecore's demands and reads the others', if the interval is over. Call after
    /// completions were collected: a store that completes synchronously then counts as empty.
    pub(crate) fn look(&mut self, now: Nanos) {
        if now < self.next_look {
            return;
        }
        for member in self.members.iter_mut().flatten().filter(|member| !member.queues.is_empty()) {
            let waiting = member.queues.wait_for_store();
            self.board.write(member.function, member.started_here, member.in_flight_here, waiting);
        }
        let is_first = self.look_elsewhere();
        let mut active = 0_usize;
        let mut waiting_here = false;
        let mut heaviest = 1;
        for member in self.members.iter().flatten() {
            waiting_here |= member.queues.wait_for_store();
            if member.is_waiting() || member.in_flight() > 0 {
                active = active.saturating_add(1);
                heaviest = heaviest.max(member.weight);
            }
        }
        self.sidecores = self
            .sidecores
            .saturating_add(usize::from(self.in_flight_here > 0 || waiting_here))
            .max(1);
        // With nothing in the store, what waits for it waits only because of earlier looks.
        let in_store = self.in_flight_here.saturating_add(self.in_flight_elsewhere);
        if active > 1 && in_store > 0 {
            self.heaviest = heaviest;
            self.contended_until = now.after(LINGER);
        }
        self.contended = now < self.contended_until;
        if self.contended && is_first {
            self.measure(now);
        }
        let functions = self.members.len() as u64;
        let more = LOOK_INTERVAL_PER_FUNCTION.0.saturating_mul(functions);
        let interval = if waiting_here { LOOK_INTERVAL_WAITING } else { LOOK_INTERVAL };
        self.next_look = now.after(interval).after(Nanos(more));
    }

    /// Reads the other boards; whether no board before this one has requests in the store.
    fn look_elsewhere(&mut self) -> bool {
        let boards = Arc::clone(&self.boards);
        let mut is_first = true;
        let mut before_ours = true;
        self.in_flight_elsewhere = 0;
        self.sidecores = 0;
        for member in self.members.iter_mut().flatten() {
            let Elsewhere { present, started, .. } = member.elsewhere;
            member.elsewhere =
                Elsewhere { before: present.then_some(started), ..Elsewhere::default() };
        }
        for board in boards.used() {
            if Arc::ptr_eq(board, &self.board) {
                before_ours = false;
                continue;
            }
            let mut is_active = false;
            for reading in board.read() {
                is_active |= reading.in_flight > 0 || reading.waiting;
                self.add(&reading);
            }
            is_first &= !(is_active && before_ours);
            self.sidecores = self.sidecores.saturating_add(usize::from(is_active));
        }
        for index in 0..self.members.len() {
            if let Some(Some(member)) = self.members.get_mut(index) {
                member.follow(self.contended);
            }
            self.recount(index);
            self.forget_absent(index);
        }
        is_first
    }

    fn add(&mut self, reading: &Reading) {
        let index = self.member(reading.function, reading.weight);
        let Some(Some(member)) = self.members.get_mut(index) else { return };
        let elsewhere = &mut member.elsewhere;
        elsewhere.present = true;
        elsewhere.waiting = elsewhere.waiting.saturating_add(u32::from(reading.waiting));
        elsewhere.in_flight = elsewhere.in_flight.saturating_add(reading.in_flight);
        elsewhere.started = elsewhere.started.saturating_add(reading.started);
        self.in_flight_elsewhere = self.in_flight_elsewhere.saturating_add(reading.in_flight);
    }

    fn measure(&mut self, now: Nanos) {
        let completed = self.boards.used().map(|board| board.completed.load(Ordering::Relaxed));
        let completed = completed.fold(0, u64::saturating_add);
        let in_flight = self.in_flight_here.saturating_add(self.in_flight_elsewhere);
        if let Some(window) = self.window.look(now, in_flight, completed) {
            self.boards.window.store(window, Ordering::Relaxed);
        }
    }
}
