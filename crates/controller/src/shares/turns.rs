//! The division of a sidecore's time among the functions that it serves, of all controllers.
//!
//! In one turn of the reactor a function may start only a number of units in proportion to its
//! weight; the rest is queued for the next turn, which comes at once, so that no time is lost. The
//! limit applies while another function uses up its own part, or has requests queued too: as long
//! as no other function does, time is not scarce.

use std::cell::{Cell, RefCell};

use sidecore_units::Nanos;

use super::{FRACTION, QueuedBy, share, whole_units};

/// The units that the heaviest function may start in a turn.
const TURN_UNITS: i64 = 32;

/// A function's index among those of a sidecore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TurnPlace(usize);

/// The functions on one sidecore. Only that thread uses it.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// The number of functions; a function alone is not counted.
    functions: Cell<usize>,
    inner: RefCell<Inner>,
}

/// The numbers of a controller, and of a function in it.
type Name = (u64, u32);

#[derive(Debug)]
struct Member {
    name: Name,
    queues: usize,
    weight: u32,
    credit: i64,
    /// The last turn in which the function had requests.
    turn: u64,
    /// No other function had requests: units started are not counted.
    alone: bool,
    /// No other function used up its part: units started are no debt.
    free: bool,
    /// The last two turns in which the function used up its part.
    pressed: [u64; 2],
}

#[derive(Debug, Default)]
struct Inner {
    members: Vec<Option<Member>>,
    now: Nanos,
    turn: u64,
    /// The functions with requests in this turn, and in the one before.
    present: Demand,
    before: Demand,
}

#[derive(Clone, Copy, Debug, Default)]
struct Demand {
    functions: usize,
    /// Those that have used up their part.
    pressed: usize,
    heaviest: u32,
}

impl Turns {
    /// Adds a queue of a function.
    pub(crate) fn join(&self, name: Name, weight: u32) -> TurnPlace {
        let members = &mut self.inner.borrow_mut().members;
        let found = members
            .iter_mut()
            .position(|member| member.as_ref().is_some_and(|member| member.name == name));
        if let Some(index) = found {
            if let Some(Some(member)) = members.get_mut(index) {
                member.queues = member.queues.saturating_add(1);
            }
            return TurnPlace(index);
        }
        let member = Some(Member {
            name,
            queues: 1,
            weight: weight.max(1),
            credit: 0,
            turn: 0,
            alone: false,
            free: false,
            pressed: [0; 2],
        });
        let index = members.iter().position(Option::is_none).unwrap_or(members.len());
        match members.get_mut(index) {
            Some(slot) => *slot = member,
            None => members.push(member),
        }
        self.functions.set(self.functions.get().saturating_add(1));
        TurnPlace(index)
    }

    /// Removes a queue.
    pub(crate) fn leave(&self, place: TurnPlace) {
        let members = &mut self.inner.borrow_mut().members;
        let Some(slot) = members.get_mut(place.0) else { return };
        let Some(member) = slot else { return };
        member.queues = member.queues.saturating_sub(1);
        if member.queues == 0 {
            *slot = None;
            self.functions.set(self.functions.get().saturating_sub(1));
        }
    }

    /// Whether several functions have queues here.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        self.functions.get() > 1
    }

    /// The units that `place` may start in this turn, more than zero.
    ///
    /// # Errors
    /// The function has used up its part of the turn.
    pub(crate) fn allowance(&self, place: TurnPlace, now: Nanos) -> Result<i64, QueuedBy> {
        if !self.is_shared() {
            return Ok(i64::MAX);
        }
        self.inner.borrow_mut().allowance(place, now)
    }

    /// Charges units that `place` has started.
    pub(crate) fn charge(&self, place: TurnPlace, units: i64) {
        if self.is_shared() {
            self.inner.borrow_mut().charge(place, units);
        }
    }
}

impl Inner {
    fn allowance(&mut self, place: TurnPlace, now: Nanos) -> Result<i64, QueuedBy> {
        if self.now != now {
            self.now = now;
            self.turn = self.turn.wrapping_add(1);
            self.before = std::mem::take(&mut self.present);
        }
        let Some(Some(member)) = self.members.get_mut(place.0) else { return Ok(i64::MAX) };
        let was_there = member.turn.wrapping_add(1) == self.turn;
        let is_new = member.turn != self.turn;
        if is_new {
            member.turn = self.turn;
            self.present.functions = self.present.functions.saturating_add(1);
            self.present.heaviest = self.present.heaviest.max(member.weight);
        }
        let others_before = self.before.functions.saturating_sub(usize::from(was_there || !is_new));
        member.alone = self.present.functions <= 1 && others_before == 0;
        if member.alone {
            member.credit = 0;
            return Ok(i64::MAX);
        }
        let present =
            self.present.pressed.saturating_sub(usize::from(member.was_pressed(self.turn)));
        let before = self
            .before
            .pressed
            .saturating_sub(usize::from(member.was_pressed(self.turn.wrapping_sub(1))));
        let time_is_short = present > 0 || before > 0;
        if is_new {
            let share =
                share(TURN_UNITS, member.weight, self.before.heaviest.max(self.present.heaviest));
            member.credit = member.credit.saturating_add(share).min(share);
        }
        member.free = !time_is_short;
        if member.free {
            return Ok(i64::MAX);
        }
        if member.credit > 0 {
            return Ok(whole_units(member.credit));
        }
        self.press(place);
        Err(QueuedBy::Turn)
    }

    fn charge(&mut self, place: TurnPlace, units: i64) {
        let Some(Some(member)) = self.members.get_mut(place.0) else { return };
        if member.alone {
            return;
        }
        member.credit = member.credit.saturating_sub(units.saturating_mul(FRACTION));
        let is_used_up = member.credit <= 0;
        if member.free {
            member.credit = member.credit.max(0);
        }
        if is_used_up {
            self.press(place);
        }
    }

    /// Marks that `place` has used up its part of the turn.
    fn press(&mut self, place: TurnPlace) {
        let Some(Some(member)) = self.members.get_mut(place.0) else { return };
        if !member.was_pressed(self.turn) {
            member.pressed = [self.turn, member.pressed[0]];
            self.present.pressed = self.present.pressed.saturating_add(1);
        }
    }
}

impl Member {
    fn was_pressed(&self, turn: u64) -> bool {
        self.pressed.contains(&turn)
    }
}
