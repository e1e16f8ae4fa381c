//! The HELLOs of a client, and how late their answers come.

use sidecore_units::Nanos;

use super::session::Phase;
use super::{Client, Timing};
use crate::handshake::{ClientHandshake, MESSAGE_MAX};
use crate::port::Peer;

/// The last numbers of sessions whose HELLOs have their times kept: a power of two.
const KEPT: usize = 16;
/// The longest wait for the answers to one HELLO.
const PATIENCE_MAX: Nanos = Nanos::from_millis(4_000);

/// The message of the HELLO for the wanted session, and the time that answers take.
///
/// An answer is for one number of a session, and a handshake takes the answer to its newest message
/// alone. On a host whose sidecores wait for a core, answers come later than HELLOs are repeated:
/// a client that took another number or another cookie meanwhile would take none of them. So an
/// answer that comes too late makes the client wait longer with the next attempt.
#[derive(Debug)]
pub(super) struct Hellos {
    /// Empty before it was made.
    pub(super) message: Vec<u8>,
    /// When the last HELLO for each of the last numbers was sent.
    sent: [(u64, Nanos); KEPT],
    /// When the last HELLO was sent whose message another one of the same number has replaced.
    replaced_at: Option<Nanos>,
    /// The time for which neither the number nor the message changes.
    pub(super) patience: Nanos,
    /// A session has ended, and its IOhost or a successor is expected soon: see
    /// [`longest`](Self::longest).
    seeks_until: Nanos,
}

impl Default for Hellos {
    fn default() -> Self {
        Self {
            message: Vec::with_capacity(MESSAGE_MAX),
            sent: [(0, Nanos::ZERO); KEPT],
            replaced_at: None,
            patience: Nanos::ZERO,
            seeks_until: Nanos::ZERO,
        }
    }
}

impl Hellos {
    /// A session has ended.
    pub(super) fn seek(&mut self, now: Nanos, timing: &Timing) {
        self.seeks_until = now.after(twice(timing.dead_after));
    }

    /// The longest interval of HELLOs. While an IOhost hands over, each of them comes too early but
    /// the last one, and a guest waits for that: they are sent at short intervals for a while.
    pub(super) fn longest(&self, now: Nanos, timing: &Timing) -> Nanos {
        let short = if now < self.seeks_until { twice(timing.first_timeout) } else { Nanos::MAX };
        timing.hello.min(short)
    }

    /// A HELLO for this number was sent.
    pub(super) fn sent(&mut self, now: Nanos, number: u64) {
        if let Some(place) = self.sent.get_mut(Self::place(number)) {
            *place = (number, now);
        }
    }

    /// The next HELLO has another message, for this number.
    pub(super) fn replace(&mut self, number: u64) {
        if !self.message.is_empty() {
            self.message.clear();
            self.replaced_at = self.sent_at(number);
        }
    }

    /// The next HELLO is for another number.
    pub(super) fn renew(&mut self) {
        self.message.clear();
        self.replaced_at = None;
    }

    /// An answer to an earlier number has come. Anyone could have sent it: its effect is bounded.
    pub(super) fn is_late_for(&mut self, now: Nanos, number: u64) {
        if let Some(at) = self.sent_at(number) {
            self.learn(now.since(at));
        }
    }

    /// A WELCOME has come that the handshake does not take: it may be for an earlier message.
    pub(super) fn is_not_taken(&mut self, now: Nanos) {
        if let Some(at) = self.replaced_at {
            self.learn(now.since(at));
        }
    }

    /// A session begins so long after the first HELLO that could have been answered so: an answer
    /// takes no longer.
    pub(super) fn begun_after(&mut self, time: Nanos) {
        self.patience = self.patience.min(twice(time));
    }

    /// An answer takes longer than `time`.
    fn learn(&mut self, time: Nanos) {
        self.patience = self.patience.max(twice(time)).min(PATIENCE_MAX);
    }

    fn sent_at(&self, number: u64) -> Option<Nanos> {
        let (of, at) = self.sent.get(Self::place(number))?;
        (*of == number && number != 0).then_some(*at)
    }

    const fn place(number: u64) -> usize {
        number as usize & (KEPT - 1)
    }
}

impl<H: ClientHandshake> Client<H> {
    /// Looks for the IOhost at another place from now on, on a link with frames of this size and so
    /// many of them in its receive ring. Changes nothing within a session.
    pub fn look_at(&mut self, now: Nanos, host: Peer, (frame_bytes, receive_frames): (u32, u32)) {
        let core = &mut self.core;
        if core.phase.is_connected() {
            return;
        }
        self.channel.peer = host;
        (core.options.frame_bytes, core.options.receive_frames) = (frame_bytes, receive_frames);
        // An answer to a HELLO at the former place is for another number.
        core.phase = Phase::looking(now, 0);
        core.number = core.number.wrapping_add(1);
        core.hellos.renew();
    }

    /// The time that answers to HELLOs take, as far as late ones have shown.
    #[must_use]
    pub const fn patience(&self) -> Nanos {
        self.core.hellos.patience
    }
}

/// Times vary.
const fn twice(time: Nanos) -> Nanos {
    Nanos(time.0.saturating_mul(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Nanos {
        Nanos::from_millis(ms)
    }

    #[test]
    fn answers_that_come_late_make_patient_within_bounds() {
        let mut hellos = Hellos::default();
        // Nothing was sent for these numbers.
        hellos.is_late_for(ms(500), 0);
        hellos.is_late_for(ms(500), 3);
        hellos.is_not_taken(ms(500));
        assert_eq!(hellos.patience, Nanos::ZERO);
        hellos.sent(ms(10), 1);
        hellos.sent(ms(20), 1);
        hellos.sent(ms(30), 2);
        hellos.is_late_for(ms(120), 1);
        assert_eq!(hellos.patience, ms(200));
        // A shorter delay proves nothing, and the longest is bounded.
        hellos.is_late_for(ms(121), 2);
        assert_eq!(hellos.patience, ms(200));
        hellos.is_late_for(ms(60_000), 2);
        assert_eq!(hellos.patience, PATIENCE_MAX);
        hellos.begun_after(ms(40));
        assert_eq!(hellos.patience, ms(80));
        // Its place has another number by now.
        hellos.sent(ms(100), 1 + KEPT as u64);
        hellos.is_late_for(ms(500), 1);
        assert_eq!(hellos.patience, ms(80));
    }

    #[test]
    fn after_a_session_the_next_one_is_sought_at_short_intervals_for_a_while() {
        let (mut hellos, timing) = (Hellos::default(), Timing::default());
        assert_eq!(hellos.longest(ms(0), &timing), timing.hello);
        hellos.seek(ms(100), &timing);
        assert_eq!(hellos.longest(ms(100), &timing), ms(20));
        assert_eq!(hellos.longest(ms(1899), &timing), ms(20));
        assert_eq!(hellos.longest(ms(1900), &timing), timing.hello);
    }

    #[test]
    fn a_welcome_for_an_earlier_message_is_a_late_answer_too() {
        let mut hellos = Hellos::default();
        hellos.sent(ms(10), 1);
        // The first message replaces none.
        hellos.replace(1);
        hellos.is_not_taken(ms(90));
        assert_eq!(hellos.patience, Nanos::ZERO);
        hellos.message.push(1);
        hellos.replace(1);
        hellos.is_not_taken(ms(60));
        assert_eq!((hellos.patience, hellos.message.len()), (ms(100), 0));
        // Of another number, none was replaced.
        hellos.renew();
        hellos.is_not_taken(ms(900));
        assert_eq!(hellos.patience, ms(100));
    }
}
