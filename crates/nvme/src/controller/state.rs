//! The states of a controller, and the ways between them.
//!
//! ```text
//!              CC.EN = 1                CC.EN = 0, or the function is reset
//!   Disabled ────────────► Ready ───────────────────────► Stopping ──► Disabled
//!       │                    │  CC.SHN                         │
//!       │ cannot run so      ├───────────────────────────► Stopping ──► Flushing ──► ShutDown
//!       ▼                    │  fatal                          │
//!     Failed                 └───────────────────────────► Stopping ──► Failed
//! ```

use sidecore_memory::MemoryError;

use crate::Done;
use crate::admin::events::Events;
use crate::admin::queue::AdminQueue;
use crate::controller::Controller;
use crate::inbox::Token;
use crate::registers::{Configuration, ControllerStatus, Shutdown};

/// The state of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It takes commands.
    Ready,
    /// Takes no commands and waits for those in flight, to enter this state.
    Stopping(Rest),
    /// Nothing runs; waits for this flush, to be shut down. `None` if an earlier flush is still in
    /// flight, which may have missed writes: then another flush follows. A reset ends this state at
    /// once, so that no other event waits for the flush.
    Flushing(Option<Token>),
    /// Nothing runs.
    Rest(Rest),
}

/// The states in which nothing runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// CC.EN is clear: at first, and after every reset.
    Disabled,
    /// After CC.SHN was set; what was written has been made durable, but for an abrupt shutdown.
    ShutDown { durable: bool },
    /// After a fatal error (CSTS.CFS).
    Failed,
    /// A secondary controller that is offline (8.26.3), which cannot be enabled.
    Offline,
}

/// Why a controller cannot be enabled.
#[derive(Debug, thiserror::Error)]
enum EnableError {
    #[error("CC asks for what CAP does not offer")]
    Unsupported,
    #[error("an admin queue has less than two entries")]
    TooSmall,
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl Controller {
    /// Acts upon a write of CC, which was `before`.
    pub(super) fn configure(&mut self, before: Configuration) {
        let now = self.registers.configuration();
        match (self.state, now.is_enabled()) {
            (State::Stopping(Rest::Offline) | State::Rest(Rest::Offline), _) => {}
            (State::Rest(Rest::Disabled), true) => self.enable(),
            (State::Rest(Rest::Disabled), false) => {
                self.registers.status.shutdown = shutdown_at_rest(now)
            }
            (State::Ready, false) => self.stop(Rest::Disabled),
            (State::Ready, true) => {
                if now.is_shutdown() && !before.is_shutdown() {
                    self.registers.status.shutdown = Shutdown::Occurring;
                    self.stop(Rest::ShutDown { durable: !now.is_abrupt_shutdown() });
                }
            }
            // Enabled again too early: CC is evaluated when everything has stopped.
            (State::Stopping(_), false) => self.state = State::Stopping(Rest::Disabled),
            (State::Stopping(_) | State::Flushing(_), true) => {}
            (State::Flushing(_) | State::Rest(_), false) => self.become_disabled(),
            (State::Rest(_), true) => {
                if now.is_shutdown() {
                    self.registers.status.shutdown = Shutdown::Complete;
                }
            }
        }
    }

    fn enable(&mut self) {
        self.registers.status = ControllerStatus::default();
        match self.make_admin_queue() {
            Ok(admin) => {
                self.admin = Some(admin);
                // Clear stale doorbell values before the driver may use the doorbells.
                self.doorbells.set_submission_tail(0, 0);
                self.doorbells.set_completion_head(0, 0);
                if self.doorbells_are_mapped {
                    // Stores to doorbells cause no event: the controller's thread polls them from
                    // now on.
                    self.inbox.wake();
                }
                self.state = State::Ready;
                self.registers.status.ready = true;
            }
            Err(error) => {
                // Logged at a level that is off by default: a guest can cause this as often as it
                // likes.
                tracing::debug!(%error, "the controller cannot be enabled");
                self.registers.status.fatal = true;
                self.state = State::Rest(Rest::Failed);
            }
        }
    }

    fn make_admin_queue(&self) -> Result<AdminQueue, EnableError> {
        let at = self.registers.admin_queues();
        if !self.registers.configuration().is_supported() {
            return Err(EnableError::Unsupported);
        }
        if at.submission_entries < 2 || at.completion_entries < 2 {
            return Err(EnableError::TooSmall);
        }
        Ok(AdminQueue::new(&self.memory, at)?)
    }

    /// Takes no more commands, and enters `rest` when nothing is in flight. Waiting commands are
    /// not completed, because their queue is gone.
    fn stop(&mut self, rest: Rest) {
        self.admin = None;
        self.waiting.clear();
        self.queues.clear();
        self.events = Events::default();
        self.state = State::Stopping(rest);
        let token = self.token();
        self.stopping = Some(token);
        let done = self.inbox.done(token);
        self.host.stop_all(done);
    }

    /// Nothing is in flight any more.
    pub(super) fn stopped(&mut self) {
        let State::Stopping(rest) = self.state else { return };
        match rest {
            Rest::Disabled => self.become_disabled(),
            Rest::ShutDown { durable: true } => self.flush(),
            Rest::ShutDown { durable: false } => self.become_shut_down(rest),
            Rest::Failed => self.state = State::Rest(rest),
            Rest::Offline => self.become_offline(),
        }
    }

    /// Flushes the store, after an earlier flush has ended.
    fn flush(&mut self) {
        if self.flushing.is_some() {
            self.state = State::Flushing(None);
            return;
        }
        let token = self.token();
        self.flushing = Some(token);
        self.state = State::Flushing(Some(token));
        let done = self.inbox.done(token);
        self.host.flush(done);
    }

    /// A flush has ended. CSTS has no field for its failure, so that its result does not matter
    /// here.
    pub(super) fn flushed(&mut self, token: Token) {
        match self.state {
            State::Flushing(awaited) if awaited == Some(token) => {
                self.become_shut_down(Rest::ShutDown { durable: true });
            }
            State::Flushing(_) => self.flush(),
            State::Ready | State::Stopping(_) | State::Rest(_) => {}
        }
    }

    fn become_shut_down(&mut self, rest: Rest) {
        self.registers.status.shutdown = Shutdown::Complete;
        self.state = State::Rest(rest);
    }

    /// Everything is as after a reset but AQA, ASQ and ACQ (3.7.2), and CC, which the host may have
    /// written meanwhile.
    fn become_disabled(&mut self) {
        self.forget();
        self.state = State::Rest(Rest::Disabled);
        self.registers.unmask_interrupts();
        let configuration = self.registers.configuration();
        self.registers.status = ControllerStatus {
            shutdown: shutdown_at_rest(configuration),
            ..ControllerStatus::default()
        };
        if configuration.is_enabled() {
            self.enable();
        }
    }

    fn become_offline(&mut self) {
        self.forget();
        self.registers.reset();
        self.registers.status.fatal = true;
        self.state = State::Rest(Rest::Offline);
    }

    /// Discards the state that a controller level reset clears, and completes the waiting resets.
    fn forget(&mut self) {
        self.reset_features();
        self.changed.clear();
        self.host.set_shadow_doorbells(None);
        self.answers.append(&mut self.resets);
    }

    /// Enters the fatal state, which only a reset ends.
    pub(super) fn fail(&mut self) {
        if self.state == State::Ready {
            self.registers.status.fatal = true;
            self.stop(Rest::Failed);
        }
    }

    /// The function is reset: everything is as after power on, when `done` is called.
    pub(crate) fn reset(&mut self, done: Done) {
        let is_offline =
            matches!(self.state, State::Stopping(Rest::Offline) | State::Rest(Rest::Offline));
        self.registers.reset();
        self.registers.status.fatal = is_offline;
        self.resets.push(done);
        self.rest(if is_offline { Rest::Offline } else { Rest::Disabled });
    }

    /// Takes a secondary controller online or offline, which resets it.
    pub(crate) fn set_online(&mut self, online: bool, done: Done) {
        self.registers.reset();
        self.registers.status.fatal = !online;
        self.resets.push(done);
        self.rest(if online { Rest::Disabled } else { Rest::Offline });
    }

    /// Stops, and enters `rest`.
    fn rest(&mut self, rest: Rest) {
        match (self.state, rest) {
            (State::Ready, _) => self.stop(rest),
            (State::Stopping(_), _) => self.state = State::Stopping(rest),
            (State::Flushing(_) | State::Rest(_), Rest::Offline) => self.become_offline(),
            (State::Flushing(_) | State::Rest(_), _) => self.become_disabled(),
        }
    }
}

/// The shutdown status of a controller at rest, which shuts down as soon as CC.SHN asks.
fn shutdown_at_rest(configuration: Configuration) -> Shutdown {
    if configuration.is_shutdown() { Shutdown::Complete } else { Shutdown::None }
}
