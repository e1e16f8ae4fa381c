//! The controller: enabling, resetting and shutting it down (NVMe base 2.0, 3.5 to 3.7), and
//! running its admin queue.
//!
//! Nothing here waits. What takes long leaves a [`Waiting`] behind, and comes back as [`News`].

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
use crate::inbox::{Inbox, News, QueueEvent, Token};
use crate::manager::{Manager, Reply};
use crate::pci::TRAPPED_STRIDE;
use crate::pointer::MAX_PIECES;
use crate::registers::Registers;
use crate::{Activity, Command, Done, Identity, Namespace, QueueHost, Statistics, Status};

use handover::Leaving;
use state::{Rest, State};

/// The firmware's revision, 8 characters at most.
pub(crate) const FIRMWARE: &str = env!("CARGO_PKG_VERSION");

/// Most admin commands carried out in one go: the thread has other controllers to run.
const BUDGET: usize = 64;

/// How often the admin queue's doorbells are looked at while they are mapped and the controller is
/// ready: a driver that stores there tells nobody.
const LOOK_INTERVAL: Nanos = Nanos::from_millis(1);

/// How a command goes on that has not failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It completes with this in dword 0.
    Now(u32),
    /// It completes later.
    Later,
}

/// What a command waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Waiting {
    /// The queue's commands.
    DeleteSubmissionQueue { command_id: u16, queue: u16 },
    /// The queue's sidecore.
    DeleteCompletionQueue { command_id: u16, queue: u16 },
    /// The queue of a command that is to be aborted.
    Abort { command_id: u16 },
    /// The manager, which makes something that has a number.
    Created { command_id: u16 },
    /// The manager.
    Managed { command_id: u16 },
}

/// How many there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// I/O queue pairs.
    pub queue_pairs: u16,
    /// Interrupt vectors.
    pub vectors: u16,
}

/// What a controller is made of.
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
    /// What was counted by processes before this one.
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
    /// The host began with a process that told it no UUID: Linux takes a namespace away whose
    /// identifiers change.
    hides_uuid: bool,

    pub(crate) memory: GuestMemory,
    pub(crate) hint: RegionHint,
    /// For the data of one command at a time; holds no memory in between.
    pub(crate) segments: Segments,

    waiting: BTreeMap<Token, Waiting>,
    last_token: u64,
    /// Which answer says that everything has stopped.
    stopping: Option<Token>,
    /// Which answer says that a flush is over: one is under way at a time, whatever the driver does
    /// meanwhile.
    flushing: Option<Token>,
    /// Who waits for a reset to be over.
    resets: Vec<Done>,
    /// Who is to be told, once the controller's lock is free.
    answers: Vec<Done>,
    leaving: Leaving,
    /// When the admin queue's doorbells were looked at last.
    looked_at: Nanos,
}

impl Controller {
    pub(crate) fn new(parts: Parts) -> Self {
        let doorbell_stride =
            if parts.doorbells_are_mapped { parts.doorbells.stride().dstrd() } else { TRAPPED_STRIDE };
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
            leaving: Leaving::default(),
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

    /// The doorbells are in this memory from now on: a client has gone that had the other one
    /// mapped, and nothing runs.
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

    /// Takes what the driver has stored to the admin queue's doorbells.
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

    /// What lies behind the properties and is no doorbell is written.
    pub(crate) fn write_nowhere(&mut self) {
        self.invalid_doorbell(Event::InvalidDoorbellRegister);
    }

    /// The host is told (figure 147), if it can be: the doorbell has no effect.
    fn invalid_doorbell(&mut self, event: Event) {
        if self.admin.is_some() {
            self.errors.controller(Status::INVALID_FIELD);
            self.events.raise(event);
        }
    }

    /// The guest's memory from now on.
    pub(crate) fn set_memory(&mut self, memory: GuestMemory, done: Done) {
        if let Some(error) = self.admin.as_mut().and_then(|admin| admin.rebind(&memory).err()) {
            tracing::debug!(%error, "the admin queue is not in the guest's memory for now");
        }
        self.hint = RegionHint::default();
        self.host.set_memory(&memory, done);
        self.memory = memory;
    }

    /// What is served from now on; the host is told of the change.
    pub(crate) fn set_namespace(&mut self, namespace: Option<Arc<Namespace>>, done: Done) {
        let ids = [&self.namespace, &namespace].map(|namespace| namespace.as_ref().map(|namespace| namespace.id));
        self.namespace.clone_from(&namespace);
        self.host.set_namespace(namespace, done);
        if self.admin.is_some() {
            self.tell_of_namespaces(ids.into_iter().flatten().collect());
        }
    }

    /// These came, went or changed: the host is told.
    fn tell_of_namespaces(&mut self, ids: Vec<u32>) {
        ids.into_iter().for_each(|id| self.changed.insert(id));
        if self.features.wants_namespace_notices() {
            self.events.raise(Event::NamespaceAttributeChanged);
        }
    }

    /// A host begins that knows nothing yet.
    pub(crate) fn begin_client(&mut self) {
        self.hides_uuid = false;
    }

    /// The served namespace as the host knows it.
    pub(crate) fn told_namespace(&self) -> Option<Namespace> {
        let mut told = Namespace::clone(self.namespace.as_deref()?);
        if self.hides_uuid {
            told.uuid = [0; 16];
        }
        Some(told)
    }

    /// What the controller has done so far.
    pub(crate) fn activity(&self) -> Activity {
        self.counted_before.with(self.statistics.activity())
    }

    pub(crate) fn has_volatile_cache(&self) -> bool {
        self.namespace.as_ref().is_some_and(|namespace| namespace.store.geometry().volatile_cache)
    }

    /// Leaves behind what a command waits for.
    pub(crate) fn wait(&mut self, waiting: Waiting) -> Done {
        let token = self.token();
        self.waiting.insert(token, waiting);
        self.inbox.done(token)
    }

    /// How many commands wait for something like this.
    pub(crate) fn count_waiting(&self, is_like_this: impl Fn(&Waiting) -> bool) -> usize {
        self.waiting.values().filter(|waiting| is_like_this(waiting)).count()
    }

    /// As [`Controller::wait`], for what has a result.
    pub(crate) fn wait_for_result(&mut self, waiting: Waiting) -> Reply {
        let token = self.token();
        self.waiting.insert(token, waiting);
        self.inbox.reply(token)
    }

    fn token(&mut self) -> Token {
        self.last_token = self.last_token.wrapping_add(1);
        Token(self.last_token)
    }

    /// Something happened elsewhere. What a reset has made obsolete is known by its token being
    /// unknown.
    pub(crate) fn hear(&mut self, news: News) {
        match news {
            News::Done(token) if self.stopping == Some(token) => {
                self.stopping = None;
                self.stopped();
            }
            News::Done(token) if self.flushing == Some(token) => {
                self.flushing = None;
                self.flushed(token);
            }
            News::Done(token) => match self.waiting.remove(&token) {
                Some(Waiting::DeleteSubmissionQueue { command_id, queue }) => {
                    self.submission_queue_deleted(command_id, queue);
                }
                Some(Waiting::DeleteCompletionQueue { command_id, queue }) => {
                    self.completion_queue_deleted(command_id, queue);
                }
                // These have a result.
                Some(
                    Waiting::Abort { command_id } | Waiting::Created { command_id } | Waiting::Managed { command_id },
                ) => self.complete(command_id, Err(Status::INTERNAL_ERROR)),
                None => {}
            },
            News::Managed(token, result) => match self.waiting.remove(&token) {
                Some(Waiting::Abort { command_id } | Waiting::Created { command_id }) => {
                    self.complete(command_id, result.map_err(Status::from));
                }
                Some(Waiting::Managed { command_id }) => {
                    self.complete(command_id, result.map(|_| 0).map_err(Status::from));
                }
                _ => {}
            },
            News::Queue(QueueEvent::InvalidDoorbellValue { queue }) => {
                tracing::debug!(queue, "the driver wrote a doorbell value that the queue cannot have");
                self.invalid_doorbell(Event::InvalidDoorbellValue);
            }
            News::Queue(QueueEvent::Fatal { queue }) => {
                tracing::warn!(queue, "a queue cannot go on");
                self.fail();
            }
            News::Queue(QueueEvent::FlushFailed) => self.errors.controller(Status::WRITE_FAULT),
            News::HandedOver(queues) => self.queues_left(queues),
        }
    }

    /// Completes a command that was to be completed later.
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

    /// Carries out what the admin queue has, tells events, and looks at the clock. Whether an
    /// interrupt is due.
    pub(crate) fn run(&mut self, now: Nanos) -> bool {
        if self.admin.is_some() && self.memory.is_lost() {
            tracing::warn!("the client has truncated the guest's memory");
            self.fail();
        }
        let is_leaving = self.is_leaving();
        if self.doorbells_are_mapped {
            self.look_at_admin_doorbells(now);
        }
        if self.features.keep_alive_at().is_some_and(|at| at <= now) && self.admin.is_some() && !is_leaving {
            tracing::debug!("the keep alive timer has expired");
            self.errors.controller(Status::KEEP_ALIVE_EXPIRED);
            self.fail();
        }
        for _ in 0..BUDGET {
            self.tell_events();
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
        self.tell_events();
        if is_leaving {
            self.leave();
        } else if self.admin.as_ref().is_some_and(AdminQueue::has_work) {
            self.inbox.wake();
        }
        self.admin.as_mut().is_some_and(AdminQueue::take_untold)
    }

    /// When to run it though nothing happens.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.admin.as_ref().filter(|_| !self.is_leaving())?;
        let look = self.doorbells_are_mapped.then(|| self.looked_at.after(LOOK_INTERVAL));
        look.into_iter().chain(self.features.keep_alive_at()).min()
    }

    /// Who is to be told now.
    pub(crate) fn take_answers(&mut self) -> Vec<Done> {
        std::mem::take(&mut self.answers)
    }
}
