//! A session in use that moves to its other link (vRIO, section 4.6).
//!
//! It ends on the one link and begins on the other one. Requests without an answer are sent again
//! there, and the IOhost executes them once those of the former session have ended, by
//! [`Tenure`](crate::export::Tenure). An IOhost that does not answer there keeps the session on the
//! link on which it was.

use std::sync::mpsc::SyncSender;
use std::time::Duration;

use sidecore_link::LinkState;
use sidecore_units::Nanos;
use sidecore_vrio::handshake::ClientHandshake;

use super::{SessionDesk, Spare};

/// The time that the IOhost has for an answer on the other link.
const PATIENCE: Nanos = Nanos::from_millis(2_000);
/// The time after which a session that is found on neither link is reported.
const GIVE_UP: Nanos = Nanos::from_millis(6_000);

/// The outcome of a move: the time in which requests were not served.
pub type Moved = Result<Duration, MoveError>;

/// Why a session was not moved to another link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveError {
    /// It has one link.
    #[error("it has no second link")]
    OneLink,
    /// There is none: it is looked for on both links.
    #[error("there is no session with it: it is looked for on both links already")]
    NoSession,
    /// It is being moved.
    #[error("it is being moved already")]
    Moves,
    /// The link carries no frames.
    #[error("the link is down: {0}")]
    Down(&'static str),
    /// The session went back.
    #[error("the IOhost does not answer on that link; its session is on the other one again")]
    NoAnswer,
    /// The IOhost does not answer any more.
    #[error("the IOhost answers on neither link; it is looked for on both")]
    Away,
}

/// A move that was asked for.
pub(super) struct Moving {
    to_second: bool,
    /// When the session ended on its link; `None` if that is for the next turn.
    begun: Option<Nanos>,
    /// Devices that waited before.
    waited: usize,
    answer: SyncSender<Moved>,
}

impl<H: ClientHandshake> SessionDesk<H> {
    /// Has the next turn move the session to its first or its second link.
    pub(super) fn ask_move(&mut self, to_second: bool, answer: SyncSender<Moved>) {
        let waited = self.waiting;
        match self.may_move(to_second) {
            Ok(true) => self.moving = Some(Moving { to_second, begun: None, waited, answer }),
            Ok(false) => reply(&answer, Ok(Duration::ZERO)),
            Err(error) => reply(&answer, Err(error)),
        }
    }

    /// Whether there is anything to move.
    fn may_move(&self, to_second: bool) -> Result<bool, MoveError> {
        let Some(spare) = &self.spare else { return Err(MoveError::OneLink) };
        if self.moving.is_some() {
            return Err(MoveError::Moves);
        }
        if !self.client.is_connected() {
            return Err(MoveError::NoSession);
        }
        if spare.is_second_used() == to_second {
            return Ok(false);
        }
        match spare.state() {
            LinkState::Up => Ok(true),
            LinkState::Down(reason) | LinkState::Closed(reason) => Err(MoveError::Down(reason)),
        }
    }

    /// Begins a move, or answers once it has ended.
    pub(super) fn carry_move_on(&mut self, now: Nanos) {
        let Some(moving) = &mut self.moving else { return };
        let Some(begun) = moving.begun else {
            moving.begun = Some(now);
            let (iohost, to_second) = (&self.shared.name, moving.to_second);
            tracing::info!(iohost, to_second, "the session moves to its other link");
            self.client.end(now, &mut self.port);
            self.port.flush(now);
            return self.change_links(now, PATIENCE);
        };
        let is_there = self.spare.as_ref().map(Spare::is_second_used) == Some(moving.to_second);
        let elapsed = now.since(begun);
        let outcome = match self.client.is_connected() {
            true if !is_there => Err(MoveError::NoAnswer),
            true if self.waiting <= moving.waited => Ok(Duration::from_nanos(elapsed.0)),
            _ if elapsed >= GIVE_UP => Err(MoveError::Away),
            _ => return,
        };
        let (iohost, pause_us) = (&self.shared.name, elapsed.0 / 1_000);
        match outcome {
            Ok(_) => tracing::info!(iohost, pause_us, "the session has moved"),
            Err(error) => tracing::warn!(iohost, pause_us, "the session was not moved: {error}"),
        }
        reply(&moving.answer, outcome);
        self.moving = None;
    }
}

fn reply(answer: &SyncSender<Moved>, outcome: Moved) {
    // The thread that has asked may wait no longer.
    let _ = answer.try_send(outcome);
}
