//! The controller: enabling, resetting and shutting it down (NVMe base 2.0, 3.5 to 3.7), and
//! running its admin queue.
//!
//! Nothing here waits. A request that takes long registers a [`Waiting`], and ends with a
//! [`Message`].

mod handover;
mod state;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use sidecore_memory::{GuestMemory, RegionHint, Segments};
use sidecore_ring::nvme::Doorbells;
use sidecore_units::Nanos;

use crate::admin::changed::ChangedNamespaces;
use crate::admin::errors::ErrorLog;
use crate::admin::events::{Event, Events};
use crate::admin::features::Features;
use crate::admin::queue::AdminQueue;
use crate::admin::queues::Queues;
use crate::inbox::{Inbox, Message, QueueEvent, Token};
use crate::manager::{Manager, Reply};
use crate::pci::TRAPPED_STRIDE;
use crate::pointer::MAX_PIECES;
use crate::registers::Registers;
use crate::{Activity, Command, Done, Identity, Namespace, QueueHost, Statistics, Status};

use handover::HandOverPhase;
use state::{Rest, State};

/// The firmware's revision, 8 characters at most.
pub(crate) const FIRMWARE: &str = env!("CARGO_PKG_VERSION");

/// Most admin commands carried out in one go: the thread has other controllers to run.
const BUDGET: usize = 64;

/// How often the admin queue's doorbells are read while they are mapped and the controller is
/// ready: a store to a mapped doorbell causes no event.
const LOOK_INTERVAL: Nanos = Nanos::from_millis(1);

/// The result of a command that has not failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It completes with this in dword 0.
    Now(u32),
    /// It completes later.
    Later,
}

/// The event that a command waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Waiting {
    /// The queue's commands.
    DeleteSubmissionQueue { command_id: u16, queue: u16 },
    /// The queue's sidecore.
    DeleteCompletionQueue { command_id: u16, queue: u16 },
    /// The queue of a command that is to be aborted.
    Abort { command_id: u16 },
    /// The manager, whose reply is the number of the object it created.
    Created { command_id: u16 },
    /// The manager.
    Managed { command_id: u16 },
}

/// The sizes that the driver is offered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// I/O queue pairs.
    pub queue_pairs: u16,
    /// Interrupt vectors.
    pub vectors: u16,
}

/// The arguments of [`Controller::new`].
pub(crate) struct Parts {
    pub identity: Identity,
    pub limits: Limits,
    pub doorbells: Arc<Doorbells>,
    pub doorbells_are_mapped: bool,
    pub host: Arc<dyn QueueHost>,
    pub manager: Option<Arc<dyn Manager>>,
    pub statistics: Arc<dyn Statistics>,
    pub inbox: Arc<Inbox>,
}

pub(crate) struct Controller {
    pub(crate) identity: Identity,
    pub(crate) limits: Limits,
    pub(crate) doorbells: Arc<Doorbells>,
    pub(crate) doorbells_are_mapped: bool,
    pub(crate) host: Arc<dyn QueueHost>,
    pub(crate) manager: Option<Arc<dyn Manager>>,
    statistics: Arc<dyn Statistics>,
    /// The activity that the processes before this one have counted.
    counted_before: Activity,
    pub(crate) inbox: Arc<Inbox>,

    pub(crate) registers: Registers,
    state: State,
    /// There while the controller is ready.
    pub(crate) admin: Option<AdminQueue>,
    pub(crate) queues: Queues,
    pub(crate) features: Features,
    pub(crate) events: Events,
    pub(crate) errors: Arc<ErrorLog>,
    pub(crate) changed: ChangedNamespaces,
    pub(crate) namespace: Option<Arc<Namespace>>,
    /// The process before reported no UUID to this host: Linux removes a namespace whose
    /// identifiers change.
    hides_uuid: bool,

    pub(crate) memory: GuestMemory,
    pub(crate) hint: RegionHint,
    /// For the data of one command at a time; holds no memory in between.
    pub(crate) segments: Segments,

    waiting: BTreeMap<Token, Waiting>,
    last_token: u64,
    /// The token of the event "all queues have stopped".
    stopping: Option<Token>,
    /// The token of the flush in flight: at most one, whatever the driver does meanwhile.
    flushing: Option<Token>,
    /// Called when the reset is complete.
    resets: Vec<Done>,
    /// Called as soon as the controller's lock is free.
    answers: Vec<Done>,
    hand_over_phase: HandOverPhase,
    /// The time of the last read of the admin queue's doorbells.
    looked_at: Nanos,
}

impl Controller {
    pub(crate) fn new(parts: Parts) -> Self {
        let doorbell_stride = if parts.doorbells_are_mapped {
            parts.doorbells.stride().dstrd()
        } else {
            TRAPPED_STRIDE
        };
        Self {
            identity: parts.identity,
            limits: parts.limits,
            doorbells: parts.doorbells,
            doorbells_are_mapped: parts.doorbells_are_mapped,
            errors: parts.host.error_log(),
            host: parts.host,
            manager: parts.manager,
            statistics: parts.statistics,
            counted_before: Activity::default(),
            inbox: parts.inbox,
            registers: Registers::new(doorbell_stride),
            state: State::Rest(Rest::Disabled),
            admin: None,
            queues: Queues::default(),
            features: Features::default(),
            events: Events::default(),
            changed: ChangedNamespaces::default(),
            namespace: None,
            hides_uuid: false,
            memory: GuestMemory::empty(),
            hint: RegionHint::default(),
            segments: Segments::with_capacity(MAX_PIECES),
            waiting: BTreeMap::new(),
            last_token: 0,
            stopping: None,
            flushing: None,
            resets: Vec::new(),
            answers: Vec::new(),
            hand_over_phase: HandOverPhase::default(),
            looked_at: Nanos::ZERO,
        }
    }

    /// A dword of a property is written.
    pub(crate) fn write_register(&mut self, offset: u64, value: u32) {
        let before = self.registers.configuration();
        if self.registers.write(offset, value) {
            self.configure(before);
        }
    }

    /// Replaces the doorbell memory, after the client that had the old memory mapped is gone, while
    /// nothing runs.
    pub(crate) fn set_doorbells(&mut self, doorbells: Arc<Doorbells>) {
        if self.doorbells_are_mapped {
            self.registers.set_doorbell_stride(doorbells.stride().dstrd());
        }
        self.host.set_doorbells(doorbells.clone());
        self.doorbells = doorbells;
    }

    /// The admin submission queue's tail doorbell is written, in a message.
    pub(crate) fn write_admin_tail(&mut self, tail: u32) {
        self.doorbells.set_submission_tail(0, tail);
        if self.admin.as_mut().is_some_and(|admin| admin.set_tail(tail).is_err()) {
            self.invalid_doorbell(Event::InvalidDoorbellValue);
        }
    }

    /// The admin completion queue's head doorbell is written, in a message.
    pub(crate) fn write_admin_head(&mut self, head: u32) {
        self.doorbells.set_completion_head(0, head);
        if self.admin.as_mut().is_some_and(|admin| admin.set_head(head).is_err()) {
            self.invalid_doorbell(Event::InvalidDoorbellValue);
        }
    }

    /// Reads the admin queue's doorbells that the driver has mapped.
    fn look_at_admin_doorbells(&mut self, now: Nanos) {
        self.looked_at = now;
        if self.admin.as_mut().is_some_and(|admin| admin.look(&self.doorbells).is_err()) {
            self.invalid_doorbell(Event::InvalidDoorbellValue);
        }
    }

    /// An I/O submission queue's tail doorbell is written, in a message. That of a queue that is
    /// being deleted has no effect.
    pub(crate) fn write_tail(&mut self, queue: u16, tail: u32) {
        if self.queues.runs_submission_queue(queue) {
            self.doorbells.set_submission_tail(queue, tail);
            self.host.kick(queue);
        } else if !self.queues.has_submission_queue(queue) {
            self.invalid_doorbell(Event::InvalidDoorbellRegister);
        }
    }

    /// An I/O completion queue's head doorbell is written, in a message.
    pub(crate) fn write_head(&mut self, queue: u16, head: u32) {
        if self.queues.runs_completion_queue(queue) {
            self.doorbells.set_completion_head(queue, head);
            self.host.kick(queue);
        } else if !self.queues.has_completion_queue(queue) {
            self.invalid_doorbell(Event::InvalidDoorbellRegister);
        }
    }

    /// The driver wrote BAR0 behind the properties, where no doorbell is.
    pub(crate) fn write_nowhere(&mut self) {
        self.invalid_doorbell(Event::InvalidDoorbellRegister);
    }

    /// Reports the error to the host (figure 147) if possible; the write has no effect.
    fn invalid_doorbell(&mut self, event: Event) {
        if self.admin.is_some() {
            self.errors.controller(Status::INVALID_FIELD);
            self.events.raise(event);
        }
    }

    /// Sets the guest memory table.
    pub(crate) fn set_memory(&mut self, memory: GuestMemory, done: Done) {
        if let Some(error) = self.admin.as_mut().and_then(|admin| admin.rebind(&memory).err()) {
            tracing::debug!(%error, "the admin queue is not in the guest's memory for now");
        }
        self.hint = RegionHint::default();
        self.host.set_memory(&memory, done);
        self.memory = memory;
    }

    /// Sets the served namespace, and reports the change to the host.
    pub(crate) fn set_namespace(&mut self, namespace: Option<Arc<Namespace>>, done: Done) {
        let ids = [&self.namespace, &namespace]
            .map(|namespace| namespace.as_ref().map(|namespace| namespace.id));
        self.namespace.clone_from(&namespace);
        self.host.set_namespace(namespace, done);
        if self.admin.is_some() {
            self.raise_namespace_changes(ids.into_iter().flatten().collect());
        }
    }

    /// Serves a namespace that differs from the present one in its store alone. The host is not
    /// told, and the queues are changed apart.
    pub(crate) fn adopt_namespace(&mut self, namespace: Arc<Namespace>) {
        self.namespace = Some(namespace);
    }

    /// Reports namespaces that were attached, detached or changed to the host.
    fn raise_namespace_changes(&mut self, ids: Vec<u32>) {
        ids.into_iter().for_each(|id| self.changed.insert(id));
        if self.features.wants_namespace_notices() {
            self.events.raise(Event::NamespaceAttributeChanged);
        }
    }

    /// A new host begins, to which nothing has been reported yet.
    pub(crate) fn begin_client(&mut self) {
        self.hides_uuid = false;
    }

    /// The served namespace with the identifiers that the host was shown.
    pub(crate) fn reported_namespace(&self) -> Option<Namespace> {
        let mut told = Namespace::clone(self.namespace.as_deref()?);
        if self.hides_uuid {
            told.uuid = [0; 16];
        }
        Some(told)
    }

    /// The activity since the function was made.
    pub(crate) fn activity(&self) -> Activity {
        self.counted_before.with(self.statistics.activity())
    }

    pub(crate) fn has_volatile_cache(&self) -> bool {
        self.namespace.as_ref().is_some_and(|namespace| namespace.store.geometry().volatile_cache)
    }

    /// Registers a waiting command. The returned handle ends the wait.
    pub(crate) fn wait(&mut self, waiting: Waiting) -> Done {
        let token = self.token();
        self.waiting.insert(token, waiting);
        self.inbox.done(token)
    }

    /// Counts the waiting commands that match.
    pub(crate) fn count_waiting(&self, is_like_this: impl Fn(&Waiting) -> bool) -> usize {
        self.waiting.values().filter(|waiting| is_like_this(waiting)).count()
    }

    /// As [`Controller::wait`], for requests that return a result.
    pub(crate) fn wait_for_result(&mut self, waiting: Waiting) -> Reply {
        let token = self.token();
        self.waiting.insert(token, waiting);
        self.inbox.reply(token)
    }

    fn token(&mut self) -> Token {
        self.last_token = self.last_token.wrapping_add(1);
        Token(self.last_token)
    }

    /// Handles a message of another thread. A message from before a reset has an unknown token, and
    /// is dropped.
    pub(crate) fn handle(&mut self, messages: Message) {
        match messages {
            Message::Done(token) if self.stopping == Some(token) => {
                self.stopping = None;
                self.stopped();
            }
            Message::Done(token) if self.flushing == Some(token) => {
                self.flushing = None;
                self.flushed(token);
            }
            Message::Done(token) => match self.waiting.remove(&token) {
                Some(Waiting::DeleteSubmissionQueue { command_id, queue }) => {
                    self.submission_queue_deleted(command_id, queue);
                }
                Some(Waiting::DeleteCompletionQueue { command_id, queue }) => {
                    self.completion_queue_deleted(command_id, queue);
                }
                // These requests return a result.
                Some(
                    Waiting::Abort { command_id }
                    | Waiting::Created { command_id }
                    | Waiting::Managed { command_id },
                ) => self.complete(command_id, Err(Status::INTERNAL_ERROR)),
                None => {}
            },
            Message::Managed(token, result) => match self.waiting.remove(&token) {
                Some(Waiting::Abort { command_id } | Waiting::Created { command_id }) => {
                    self.complete(command_id, result.map_err(Status::from));
                }
                Some(Waiting::Managed { command_id }) => {
                    self.complete(command_id, result.map(|_| 0).map_err(Status::from));
                }
                _ => {}
            },
            Message::Queue(QueueEvent::InvalidDoorbellValue { queue }) => {
                tracing::debug!(
                    queue,
                    "the driver wrote a doorbell value that the queue cannot have"
                );
                self.invalid_doorbell(Event::InvalidDoorbellValue);
            }
            Message::Queue(QueueEvent::Fatal { queue }) => {
                tracing::warn!(queue, "a queue cannot go on");
                self.fail();
            }
            Message::Queue(QueueEvent::FlushFailed) => self.errors.controller(Status::WRITE_FAULT),
            Message::HandedOver(queues) => self.queues_exported(queues),
        }
    }

    /// Completes a command whose outcome was [`Outcome::Later`].
    pub(crate) fn complete(&mut self, command_id: u16, result: Result<u32, Status>) {
        if let Err(status) = result {
            self.errors.command(&Command::build(0, command_id, 0), status);
        }
        self.post(command_id, result);
    }

    fn post(&mut self, command_id: u16, result: Result<u32, Status>) {
        if let Some(admin) = &mut self.admin {
            match result {
                Ok(value) => admin.complete(command_id, value, Status::SUCCESS),
                // There is an entry in the error log.
                Err(status) => admin.complete(command_id, 0, status.more()),
            }
        }
    }

    /// Executes commands of the admin queue, reports events, and checks the timers. Returns whether
    /// an interrupt is due.
    pub(crate) fn run(&mut self, now: Nanos) -> bool {
        if self.admin.is_some() && self.memory.is_lost() {
            tracing::warn!("the client has truncated the guest's memory");
            self.fail();
        }
        let is_leaving = self.is_leaving();
        if self.doorbells_are_mapped {
            self.look_at_admin_doorbells(now);
        }
        if self.features.keep_alive_at().is_some_and(|at| at <= now)
            && self.admin.is_some()
            && !is_leaving
        {
            tracing::debug!("the keep alive timer has expired");
            self.errors.controller(Status::KEEP_ALIVE_EXPIRED);
            self.fail();
        }
        for _ in 0..BUDGET {
            self.complete_events();
            let admin = self.admin.as_mut().filter(|_| !is_leaving);
            let Some(command) = admin.and_then(AdminQueue::take) else { break };
            match self.execute(&command, now) {
                Ok(Outcome::Now(value)) => self.post(command.id(), Ok(value)),
                Ok(Outcome::Later) => {}
                Err(status) => {
                    self.errors.command(&command, status);
                    self.post(command.id(), Err(status));
                }
            }
        }
        self.complete_events();
        if is_leaving {
            self.advance_hand_over();
        } else if self.admin.as_ref().is_some_and(AdminQueue::has_work) {
            self.inbox.wake();
        }
        self.admin.as_mut().is_some_and(AdminQueue::take_unsignalled)
    }

    /// The time of the next run if no event comes before.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.admin.as_ref().filter(|_| !self.is_leaving())?;
        let look = self.doorbells_are_mapped.then(|| self.looked_at.after(LOOK_INTERVAL));
        look.into_iter().chain(self.features.keep_alive_at()).min()
    }

    /// Takes the completion callbacks that are ready to be called.
    pub(crate) fn take_answers(&mut self) -> Vec<Done> {
        std::mem::take(&mut self.answers)
    }
}
