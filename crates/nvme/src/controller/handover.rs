//! Handing a controller over to another process: exporting its state, and resuming from one.

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
use crate::inbox::Message;
use crate::pci::TRAPPED_STRIDE;

/// The phase of a hand-over. From `Draining` on no command is taken from the admin queue.
#[derive(Debug, Default)]
pub(super) enum HandOverPhase {
    #[default]
    No,
    /// Waits for commands, a reset or a flush to end.
    Draining,
    /// Waits for the export of the I/O queues.
    Queues,
    /// Exported: the controller belongs to another process, and this process accesses its host's
    /// memory no more. Holds the exported state until [`Controller::take_exported`] takes it.
    Exported(Option<Box<ControllerState>>),
}

impl Controller {
    /// Takes no more commands, and exports its state once nothing is in flight
    /// ([`Controller::take_exported`]).
    pub(crate) fn hand_over(&mut self) {
        if matches!(self.hand_over_phase, HandOverPhase::No) {
            self.hand_over_phase = HandOverPhase::Draining;
        }
    }

    pub(super) const fn is_leaving(&self) -> bool {
        !matches!(self.hand_over_phase, HandOverPhase::No)
    }

    /// Exports the I/O queues as soon as the controller itself waits for nothing.
    pub(super) fn advance_hand_over(&mut self) {
        let is_settled = self.waiting.is_empty()
            && self.stopping.is_none()
            && self.flushing.is_none()
            && self.resets.is_empty()
            && matches!(self.state, State::Ready | State::Rest(_));
        if !matches!(self.hand_over_phase, HandOverPhase::Draining) || !is_settled {
            return;
        }
        self.hand_over_phase = HandOverPhase::Queues;
        let inbox = self.inbox.clone();
        self.host.hand_over(Box::new(move |queues| inbox.put(Message::HandedOver(queues))));
    }

    /// The I/O queues are exported; `None` if their state is unknown.
    pub(super) fn queues_exported(&mut self, queues: Option<QueuesState>) {
        if !matches!(self.hand_over_phase, HandOverPhase::Queues) {
            return;
        }
        let left = queues.and_then(|queues| self.export_state(queues)).map(Box::new);
        self.hand_over_phase = HandOverPhase::Exported(left);
        self.admin = None;
        self.queues.clear();
        self.events = Events::default();
        self.state = State::Rest(Rest::Disabled);
        self.memory = GuestMemory::empty();
        self.segments.release();
    }

    /// Exports the state; `None` if the controller was stopped meanwhile, or is in a state that
    /// cannot be resumed.
    fn export_state(&mut self, queues: QueuesState) -> Option<ControllerState> {
        let mut registers = self.registers.clone();
        let rest = match self.state {
            State::Ready => RestState::Ready,
            State::Stopping(_) | State::Flushing(_) => return None,
            State::Rest(Rest::ShutDown { durable }) => RestState::ShutDown { durable },
            State::Rest(Rest::Failed) => RestState::Failed,
            State::Rest(Rest::Disabled) => RestState::Disabled,
            // Its manager, not the controller, keeps the offline state.
            State::Rest(Rest::Offline) => {
                registers.reset();
                RestState::Disabled
            }
        };
        // A controller at rest has no queues, whatever their state was when they were exported.
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

    /// Takes the exported state once; `None` before the export is complete. The inner `None` is a
    /// failed export.
    pub(crate) fn take_exported(&mut self) -> Option<Option<Box<ControllerState>>> {
        match &mut self.hand_over_phase {
            HandOverPhase::Exported(left) => Some(left.take()),
            _ => None,
        }
    }

    /// Resumes from the state that another process has exported, with this memory of its host. The
    /// controller is in its state after power on, but for its namespace and its vectors.
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
        let ControllerState {
            registers,
            rest,
            admin,
            queues,
            features,
            events,
            errors,
            changed,
            activity,
            namespace,
        } = from;
        self.take_over_doorbells(doorbells, registers.doorbell_stride())?;
        // An offline controller was exported in its state after a reset, and stays offline.
        let is_offline = self.state == State::Rest(Rest::Offline);
        if is_offline && !matches!(rest, RestState::Disabled) {
            return Err(TakeOverError::Changed { what: "being online" });
        }
        self.check_queues(&queues)?;
        // A controller at rest has no queues.
        let queues = if let RestState::Ready = rest { queues } else { QueuesState::default() };
        self.hides_uuid = namespace.as_ref().is_some_and(|namespace| namespace.uuid.is_none());
        let served = self.namespace_state();
        if let (Some(before), Some(after)) = (&namespace, &served)
            && !before.is_same(after)
        {
            return Err(TakeOverError::OtherNamespace);
        }
        let requests =
            events.request_count().ok_or(TakeOverError::Damaged { what: "asynchronous events" })?;
        self.memory = memory;
        if let RestState::Ready = rest {
            let admin = admin.ok_or(TakeOverError::Damaged { what: "admin queue" })?;
            let admin =
                AdminQueue::take_over(&self.memory, registers.admin_queues(), &admin, requests)?;
            if self.doorbells.stride() == DoorbellStride::HalfPage {
                // The exporting process did not keep these doorbells in the doorbell memory.
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
        self.state = if is_offline { State::Rest(Rest::Offline) } else { resumed(rest) };
        // From here on a reset stops the queues that have been started.
        self.queues.take_over(&queues);
        self.host.take_over(&self.memory, &queues)?;
        if namespace != served && self.admin.is_some() {
            let ids = [namespace, served].into_iter().flatten().map(|namespace| namespace.id);
            self.raise_namespace_changes(ids.collect());
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

    /// Uses the exported doorbell memory, which the client may have mapped, with the stride that
    /// CAP has reported.
    fn take_over_doorbells(
        &mut self,
        doorbells: Arc<Doorbells>,
        told: u8,
    ) -> Result<(), TakeOverError> {
        let expected =
            if self.doorbells_are_mapped { doorbells.stride().dstrd() } else { TRAPPED_STRIDE };
        if told != expected {
            return Err(TakeOverError::Changed { what: "way of ringing doorbells" });
        }
        self.set_doorbells(doorbells);
        Ok(())
    }

    /// Checks that the exported queues can exist.
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
    queues
        .completion_queues
        .iter()
        .flat_map(|queue| &queue.submission_queues)
        .map(|submission| submission.id)
}

fn resumed(rest: RestState) -> State {
    match rest {
        RestState::Ready => State::Ready,
        RestState::Disabled => State::Rest(Rest::Disabled),
        RestState::ShutDown { durable } => State::Rest(Rest::ShutDown { durable }),
        RestState::Failed => State::Rest(Rest::Failed),
    }
}
