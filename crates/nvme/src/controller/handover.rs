//! Leaving a controller to another process, and going on with what another one has left.

use std::collections::BTreeSet;
use std::sync::Arc;

use sidecore_memory::GuestMemory;
use sidecore_ring::nvme::{DoorbellStride, Doorbells};
use sidecore_units::Nanos;

use crate::QueuesState;
use crate::admin::events::Events;
use crate::admin::queue::AdminQueue;
use crate::controller::Controller;
use crate::controller::state::{Rest, State};
use crate::handover::{ControllerState, NamespaceState, RestState, TakeOverError};
use crate::inbox::News;
use crate::pci::TRAPPED_STRIDE;

/// How far a controller is in being handed over. Until it is, nothing is taken from the admin
/// queue.
#[derive(Debug, Default)]
pub(super) enum Leaving {
    #[default]
    No,
    /// Commands, a reset or a flush are waited for.
    Settling,
    /// The I/O queues are.
    Queues,
    /// It is another process's: nothing here touches its host's memory any more. What it has left,
    /// until it is taken.
    Left(Option<Box<ControllerState>>),
}

impl Controller {
    /// Takes no more commands, and leaves what there is once nothing is in flight
    /// ([`Controller::take_left`]).
    pub(crate) fn hand_over(&mut self) {
        if matches!(self.leaving, Leaving::No) {
            self.leaving = Leaving::Settling;
        }
    }

    pub(super) const fn is_leaving(&self) -> bool {
        !matches!(self.leaving, Leaving::No)
    }

    /// Goes on leaving, when nothing of the controller's own is waited for any more.
    pub(super) fn leave(&mut self) {
        let is_settled = self.waiting.is_empty()
            && self.stopping.is_none()
            && self.flushing.is_none()
            && self.resets.is_empty()
            && matches!(self.state, State::Ready | State::Rest(_));
        if !matches!(self.leaving, Leaving::Settling) || !is_settled {
            return;
        }
        self.leaving = Leaving::Queues;
        let inbox = self.inbox.clone();
        self.host.hand_over(Box::new(move |queues| inbox.put(News::HandedOver(queues))));
    }

    /// The I/O queues are left, or it is not known how they are.
    pub(super) fn queues_left(&mut self, queues: Option<QueuesState>) {
        if !matches!(self.leaving, Leaving::Queues) {
            return;
        }
        let left = queues.and_then(|queues| self.leave_state(queues)).map(Box::new);
        self.leaving = Leaving::Left(left);
        self.admin = None;
        self.queues.clear();
        self.events = Events::default();
        self.state = State::Rest(Rest::Disabled);
        self.memory = GuestMemory::empty();
        self.segments.release();
    }

    /// What it leaves; `None` if it has been told to stop meanwhile, or cannot go on.
    fn leave_state(&mut self, queues: QueuesState) -> Option<ControllerState> {
        let mut registers = self.registers.clone();
        let rest = match self.state {
            State::Ready => RestState::Ready,
            State::Stopping(_) | State::Flushing(_) => return None,
            State::Rest(Rest::ShutDown { durable }) => RestState::ShutDown { durable },
            State::Rest(Rest::Failed) => RestState::Failed,
            State::Rest(Rest::Disabled) => RestState::Disabled,
            // That it is offline is not its own affair.
            State::Rest(Rest::Offline) => {
                registers.reset();
                RestState::Disabled
            }
        };
        // Those of a controller that rests are over, whatever they were doing when it was left.
        let queues = if self.state == State::Ready { queues } else { QueuesState::default() };
        Some(ControllerState {
            registers,
            rest,
            admin: self.admin.as_ref().map(AdminQueue::state),
            queues,
            features: std::mem::take(&mut self.features),
            events: std::mem::take(&mut self.events),
            errors: self.errors.contents(),
            changed: std::mem::take(&mut self.changed),
            activity: self.activity(),
            namespace: self.namespace_state(),
        })
    }

    /// Takes what the controller leaves, once, when it has left: `None` if that is not known.
    pub(crate) fn take_left(&mut self) -> Option<Option<Box<ControllerState>>> {
        match &mut self.leaving {
            Leaving::Left(left) => Some(left.take()),
            _ => None,
        }
    }

    /// Goes on with what another process has left, in this memory of its host's. The controller is
    /// as after power on, but for its namespace and its vectors.
    ///
    /// # Errors
    /// See [`TakeOverError`]. The function has to be reset then.
    pub(crate) fn take_over(
        &mut self,
        from: ControllerState,
        memory: GuestMemory,
        doorbells: Arc<Doorbells>,
        now: Nanos,
    ) -> Result<(), TakeOverError> {
        let ControllerState { registers, rest, admin, queues, features, events, errors, changed, activity, namespace } =
            from;
        self.take_over_doorbells(doorbells, registers.doorbell_stride())?;
        // Offline it was left as after a reset, and it is still offline.
        let is_offline = self.state == State::Rest(Rest::Offline);
        if is_offline && !matches!(rest, RestState::Disabled) {
            return Err(TakeOverError::Changed { what: "being online" });
        }
        self.check_queues(&queues)?;
        // One that rests has none.
        let queues = if let RestState::Ready = rest { queues } else { QueuesState::default() };
        self.hides_uuid = namespace.as_ref().is_some_and(|namespace| namespace.uuid.is_none());
        let served = self.namespace_state();
        if let (Some(before), Some(after)) = (&namespace, &served)
            && !before.is_same(after)
        {
            return Err(TakeOverError::OtherNamespace);
        }
        let requests = events.request_count().ok_or(TakeOverError::Damaged { what: "asynchronous events" })?;
        self.memory = memory;
        if let RestState::Ready = rest {
            let admin = admin.ok_or(TakeOverError::Damaged { what: "admin queue" })?;
            let admin = AdminQueue::take_over(&self.memory, registers.admin_queues(), &admin, requests)?;
            if self.doorbells.stride() == DoorbellStride::HalfPage {
                // The process before did not keep these doorbells in memory.
                let (tail, head) = admin.seen();
                self.doorbells.set_submission_tail(0, tail);
                self.doorbells.set_completion_head(0, head);
            }
            self.admin = Some(admin);
        }
        self.registers = registers;
        self.registers.status.fatal |= is_offline;
        self.errors.take_over(errors);
        (self.events, self.changed, self.counted_before) = (events, changed, activity);
        self.take_over_features(features, now);
        self.state = match rest {
            _ if is_offline => State::Rest(Rest::Offline),
            RestState::Ready => State::Ready,
            RestState::Disabled => State::Rest(Rest::Disabled),
            RestState::ShutDown { durable } => State::Rest(Rest::ShutDown { durable }),
            RestState::Failed => State::Rest(Rest::Failed),
        };
        // A reset stops whatever has been started by then.
        self.queues.take_over(&queues);
        self.host.take_over(&self.memory, &queues)?;
        if namespace != served && self.admin.is_some() {
            let ids = [namespace, served].into_iter().flatten().map(|namespace| namespace.id);
            self.tell_of_namespaces(ids.collect());
        }
        Ok(())
    }

    fn namespace_state(&self) -> Option<NamespaceState> {
        let mut state = NamespaceState::of(self.namespace.as_deref()?);
        if self.hides_uuid {
            state.uuid = None;
        }
        Some(state)
    }

    /// Uses the doorbell memory that the client may have mapped, and that CAP has told it of.
    fn take_over_doorbells(&mut self, doorbells: Arc<Doorbells>, told: u8) -> Result<(), TakeOverError> {
        let expected = if self.doorbells_are_mapped { doorbells.stride().dstrd() } else { TRAPPED_STRIDE };
        if told != expected {
            return Err(TakeOverError::Changed { what: "way of ringing doorbells" });
        }
        self.set_doorbells(doorbells);
        Ok(())
    }

    /// Whether there can be such queues.
    fn check_queues(&self, queues: &QueuesState) -> Result<(), TakeOverError> {
        let ids = queues.completion_queues.iter().map(|queue| queue.id);
        let mut numbers = ids.chain(submissions_of(queues));
        if numbers.any(|id| !(1..=self.limits.queue_pairs).contains(&id)) {
            return Err(TakeOverError::Changed { what: "number of queues" });
        }
        let mut seen = BTreeSet::new();
        if !submissions_of(queues).all(|id| seen.insert(id)) {
            return Err(TakeOverError::Damaged { what: "submission queues" });
        }
        Ok(())
    }
}

/// The numbers of all submission queues.
fn submissions_of(queues: &QueuesState) -> impl Iterator<Item = u16> {
    queues.completion_queues.iter().flat_map(|queue| &queue.submission_queues).map(|submission| submission.id)
}
