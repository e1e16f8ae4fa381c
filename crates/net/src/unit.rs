//! The switch as a unit of a sidecore.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};

use sidecore_reactor::{Arm, IdleMode, Pollable, Polled, Unit, WakeSet};
use sidecore_units::Nanos;

use crate::{PortId, PortQueue, QueueId, Switch, SwitchError, SwitchEvent};

/// A switch with all of its ports as one pollable.
pub struct SwitchUnit {
    name: String,
    switch: Switch,
    /// The wake descriptors of all queues.
    wakes: WakeSet,
    mode: IdleMode,
    events: Vec<SwitchEvent>,
    stopped: Option<Box<dyn FnOnce(()) + Send>>,
}

impl SwitchUnit {
    /// The unit of a switch that has no queues yet.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new(name: &str, switch: Switch, mode: IdleMode) -> io::Result<Self> {
        let (wakes, events) = (WakeSet::new()?, Vec::new());
        Ok(Self { name: name.to_owned(), switch, wakes, mode, events, stopped: None })
    }

    /// The switch. Queues are attached and detached by the unit, which watches their descriptors.
    pub fn switch_mut(&mut self) -> &mut Switch {
        &mut self.switch
    }

    /// As [`Switch::attach`].
    ///
    /// # Errors
    /// As there. A descriptor that cannot be watched is an error too.
    pub fn attach(
        &mut self,
        port: PortId,
        queue: Box<dyn PortQueue>,
    ) -> Result<QueueId, SwitchError> {
        let id = self.switch.attach(port, queue)?;
        let mut watched = Ok(());
        if let Some(queue) = self.switch.queue(id) {
            queue.wake_fds(&mut |fd| {
                if let Err(error) = self.wakes.add(fd) {
                    watched = Err(error);
                }
            });
        }
        match watched {
            Ok(()) => Ok(id),
            Err(error) => {
                tracing::warn!(switch = self.name, "cannot watch a queue of a port: {error}");
                drop(self.detach(id));
                Err(SwitchError::TooManyQueues)
            }
        }
    }

    /// As [`Switch::detach`].
    pub fn detach(&mut self, queue: QueueId) -> Option<Box<dyn PortQueue>> {
        let queue = self.switch.detach(queue)?;
        self.unwatch(queue.as_ref());
        Some(queue)
    }

    fn unwatch(&self, queue: &dyn PortQueue) {
        queue.wake_fds(&mut |fd| self.wakes.remove(fd));
    }

    /// As [`Switch::remove_port`].
    ///
    /// # Errors
    /// As there.
    pub fn remove_port(&mut self, port: PortId) -> Result<Vec<Box<dyn PortQueue>>, SwitchError> {
        let queues = self.switch.remove_port(port)?;
        queues.iter().for_each(|queue| self.unwatch(queue.as_ref()));
        Ok(queues)
    }

    /// As [`Switch::with_queue`]; the descriptors that wake the queue may change, too.
    pub fn with_queue<Q: PortQueue, T>(
        &mut self,
        queue: QueueId,
        task: impl FnOnce(&mut Q) -> T,
    ) -> Option<T> {
        if let Some(queue) = self.switch.queue(queue) {
            self.unwatch(queue);
        }
        let answer = self.switch.with_queue(queue, task);
        if let Some(queue) = self.switch.queue(queue) {
            queue.wake_fds(&mut |fd| {
                if let Err(error) = self.wakes.add(fd) {
                    tracing::warn!(switch = self.name, "cannot watch a queue of a port: {error}");
                }
            });
        }
        answer
    }

    fn report(&mut self) {
        self.switch.take_events(&mut self.events);
        for event in self.events.drain(..) {
            match event {
                SwitchEvent::Loop { mac, vlan, blocked, other } => tracing::warn!(
                    switch = self.name,
                    "station {mac} of VLAN {vlan} moves to and fro between the ports {blocked} and \
                     {other}: {blocked} is blocked, remove the loop"
                ),
                SwitchEvent::StageFailed { port, failure } => tracing::error!(
                    switch = self.name,
                    port,
                    stage = failure.place.word(),
                    "a stage of a port has panicked{}: {}",
                    failure.consequence(),
                    failure.message
                ),
                SwitchEvent::TakenOver { team, port } => tracing::warn!(
                    switch = self.name,
                    team,
                    "{port} carries the frames of the team from now on"
                ),
                SwitchEvent::Opened { port } => {
                    tracing::info!(switch = self.name, port, "the port is open again");
                }
            }
        }
    }
}

impl Unit for SwitchUnit {
    type State = ();

    fn stop(&mut self, stopped: Box<dyn FnOnce(()) + Send>) {
        self.stopped = Some(stopped);
    }
}

impl Pollable for SwitchUnit {
    fn poll(&mut self, now: Nanos, budget: usize) -> Polled {
        if self.stopped.is_some() {
            return Polled::Finished;
        }
        let work = self.switch.turn(now, budget);
        if self.switch.has_events() {
            self.report();
        }
        if work > 0 { Polled::Busy(work) } else { Polled::Idle }
    }

    fn idle_mode(&self) -> IdleMode {
        self.mode
    }

    fn arm(&mut self) -> Arm {
        if self.stopped.is_some() || self.switch.has_frames() {
            return Arm::WorkPending;
        }
        let mut armed = 0_usize;
        let mut result = Arm::Armed;
        for lane in self.switch.queues_mut() {
            result = lane.queue.arm();
            if result != Arm::Armed {
                break;
            }
            armed = armed.saturating_add(1);
        }
        if result != Arm::Armed {
            self.switch.queues_mut().take(armed).for_each(|lane| lane.queue.disarm());
        }
        result
    }

    fn disarm(&mut self) {
        self.switch.queues_mut().for_each(|lane| lane.queue.disarm());
    }

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        watch(self.wakes.as_fd());
    }

    fn on_wake(&mut self) {
        self.switch.queues_mut().for_each(|lane| lane.queue.on_wake());
    }

    fn deadline(&self) -> Option<Nanos> {
        self.switch.deadline()
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn finish(self: Box<Self>) {
        let Self { switch, stopped, .. } = *self;
        // All guest memory goes before the acknowledgement does.
        switch.close();
        if let Some(stopped) = stopped {
            stopped(());
        }
    }
}
