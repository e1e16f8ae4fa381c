//! The switch: a bridge that learns, with VLANs.

mod announce;
mod decide;
mod drops;
mod probes;
mod release;
mod run;
mod teams;
mod turn;

use std::any::Any;
use std::sync::Arc;

use sidecore_units::Nanos;

use crate::config::{PORT_QUEUES_MAX, PORTS_MAX, QUEUES_MAX};
use crate::deliver::Copy;
use crate::floods::Floods;
use crate::ports::{Lane, Port};
use crate::stages::Stages;
use crate::table::{Key, Table};
use crate::trace::Running;
use crate::{
    FrameStage, MacAddress, PortConfig, PortId, PortQueue, PortStats, Properties, QueueId,
    QueueState, StageFailure, StagePlace, SwitchError, SwitchOptions,
};

pub(crate) use announce::Announcements;
pub(crate) use probes::Probes;
use teams::TakingOver;
pub use turn::WAIT_TURNS;

/// The most events that are kept for the owner of the switch.
const EVENTS_MAX: usize = 64;

/// Something that an operator should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwitchEvent {
    /// A station moved to and fro between two ports: there is a loop, and the younger port is
    /// blocked.
    Loop {
        /// The station.
        mac: MacAddress,
        /// Its VLAN.
        vlan: u16,
        /// The port that is blocked.
        blocked: String,
        /// The other port.
        other: String,
    },
    /// A stage of a port has panicked.
    StageFailed {
        /// The port.
        port: String,
        /// The stage and its panic.
        failure: StageFailure,
    },
    /// A port of a team carries its frames from now on.
    TakenOver {
        /// The team.
        team: String,
        /// The port.
        port: String,
    },
    /// A blocked port is open again.
    Opened {
        /// The port.
        port: String,
    },
}

/// A station that the switch knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StationEntry {
    /// Its address.
    pub mac: MacAddress,
    /// Its VLAN.
    pub vlan: u16,
    /// The port that it is on.
    pub port: PortId,
    /// Whether the port's configuration says so.
    pub is_fixed: bool,
    /// When it last sent a frame. The switch notes that about once a second.
    pub seen_at: Nanos,
}

/// A switch with its ports, all of which one sidecore polls.
///
/// # A turn
///
/// Frames that waited for buffers come first, one of each sender in turn. Then each queue lends a
/// batch. The head of a frame, up to [`HEAD_BYTES`](crate::HEAD_BYTES), is copied once to private
/// memory; every decision is made on that copy, and the copy is written to the receiver. The rest
/// is copied from the one station's memory to the other's, and nothing is decided on it, because a
/// station can change its memory at any time.
///
/// Time is an argument. Nothing in a turn allocates.
pub struct Switch {
    options: SwitchOptions,
    ports: Vec<Option<Port>>,
    lanes: Vec<Option<Box<Lane>>>,
    /// The indices of all lanes there are.
    order: Vec<u16>,
    /// The indices of the ports with stages that hold frames.
    holders: Vec<u16>,
    /// Lanes with frames that their stations were not shown yet.
    touched: Vec<u16>,
    table: Table,
    copy: Copy,
    generations: u64,
    /// Counts the turns.
    turn: u64,
    /// The time of the turn.
    now: Nanos,
    /// When the switch last looked at what need not be looked at in every turn.
    looked_at: Nanos,
    /// When the next station is announced.
    next_announcement: Option<Nanos>,
    /// When the next probe of a team is sent, or an answer is late.
    next_probe: Option<Nanos>,
    /// Ports on which the stations of others are announced.
    taking_over: Vec<TakingOver>,
    events: Vec<SwitchEvent>,
    traces: Vec<Running>,
}

impl Switch {
    /// A switch without ports.
    #[must_use]
    pub fn new(options: SwitchOptions) -> Self {
        Self {
            options,
            ports: Vec::new(),
            lanes: Vec::new(),
            order: Vec::with_capacity(QUEUES_MAX),
            holders: Vec::with_capacity(PORTS_MAX),
            touched: Vec::with_capacity(QUEUES_MAX),
            table: Table::new(options.stations, options.seed),
            copy: Copy::new(),
            generations: 0,
            turn: 0,
            now: Nanos::ZERO,
            looked_at: Nanos::ZERO,
            next_announcement: None,
            next_probe: None,
            taking_over: Vec::new(),
            events: Vec::with_capacity(EVENTS_MAX),
            traces: Vec::new(),
        }
    }

    fn next_generation(&mut self) -> u64 {
        self.generations = self.generations.wrapping_add(1);
        self.generations
    }

    /// Adds a port, which has no queue yet. `stats` are its counters.
    ///
    /// # Errors
    /// The configuration is impossible, or contradicts that of another port.
    pub fn add_port(
        &mut self,
        now: Nanos,
        name: &str,
        config: PortConfig,
        stats: Arc<PortStats>,
    ) -> Result<PortId, SwitchError> {
        config.check()?;
        let index = free_place(&mut self.ports, PORTS_MAX).ok_or(SwitchError::TooManyPorts)?;
        self.fix_station(now, index, &config)?;
        let generation = self.next_generation();
        let floods = Floods::new(config.floods, now);
        let port = Port {
            generation,
            name: name.to_owned(),
            probes: Probes::new(&config),
            config,
            stats,
            up: Vec::with_capacity(PORT_QUEUES_MAX),
            queues: Vec::with_capacity(PORT_QUEUES_MAX),
            blocked_until: None,
            is_standby: false,
            announcements: Announcements::default(),
            floods,
            stages: Stages::new(),
            holds: false,
            is_plain: true,
            runs: true,
        };
        if let Some(place) = self.ports.get_mut(usize::from(index)) {
            *place = Some(port);
        }
        self.join(index);
        Ok(PortId { index, generation })
    }

    /// Notes where the station of a guarded port is.
    fn fix_station(
        &mut self,
        now: Nanos,
        index: u16,
        config: &PortConfig,
    ) -> Result<(), SwitchError> {
        if let (Some(guard), Some(vlan)) = (&config.guard, config.vlans.untagged())
            && !self.table.fix(Key::new(guard.mac, vlan), index, now)
        {
            return Err(SwitchError::DoubleMac { mac: guard.mac, vlan });
        }
        Ok(())
    }

    /// Changes the configuration of a port. Frames that wait for its station, or were sent by it,
    /// are dropped and counted; its queues stay.
    ///
    /// # Errors
    /// As [`add_port`](Self::add_port); nothing has changed then.
    pub fn change_port(
        &mut self,
        now: Nanos,
        port: PortId,
        config: PortConfig,
    ) -> Result<(), SwitchError> {
        config.check()?;
        let old = self.port(port).ok_or(SwitchError::NoSuchPort)?.config.clone();
        self.table.forget(port.index, true);
        if let Err(error) = self.fix_station(now, port.index, &config) {
            // It was there a moment ago, and nothing took its place.
            let _ = self.fix_station(now, port.index, &old);
            return Err(error);
        }
        self.drop_waiting(port.index);
        // They were for the VLANs of before.
        self.drop_held(port.index);
        // Queues have noted where frames may go.
        self.table.touch();
        if let Some(port) = self.ports.get_mut(usize::from(port.index)).and_then(Option::as_mut) {
            port.floods = Floods::new(config.floods, now);
            port.block(None);
            port.probes = Probes::new(&config);
            port.config = config;
        }
        self.begin_probes(port.index);
        if old.team != self.port_at(port.index).and_then(|port| port.config.team.clone()) {
            self.join(port.index);
            self.leave(old.team.as_deref());
        } else {
            self.elect_for(port.index);
        }
        Ok(())
    }

    /// Replaces the stage at a place of a port, between two frames, or takes it away. A new stage
    /// takes over the state of an old one of its type. Returns the old stage: its memory is for
    /// another thread to free.
    ///
    /// # Errors
    /// There is no such port.
    pub fn set_stage(
        &mut self,
        port: PortId,
        place: StagePlace,
        stage: Option<Box<dyn FrameStage>>,
    ) -> Result<Option<Box<dyn FrameStage>>, SwitchError> {
        self.port(port).ok_or(SwitchError::NoSuchPort)?;
        // The frames of a stage that has failed are dropped with it.
        self.note_failure(port.index);
        let found = self.ports.get_mut(usize::from(port.index)).and_then(Option::as_mut);
        let old = found.ok_or(SwitchError::NoSuchPort)?.set_stage(place, stage);
        let old = old.map(|(mut old, has_failed)| {
            if !has_failed {
                self.release_all(port.index, place, old.as_mut());
            }
            old
        });
        self.note_failure(port.index);
        self.note_holders();
        Ok(old)
    }

    /// Runs `task` with the stage at a place of a port; `None` if there is none of this type, or it
    /// has failed.
    pub fn with_stage<S: FrameStage, T>(
        &mut self,
        port: PortId,
        place: StagePlace,
        task: impl FnOnce(&mut S) -> T,
    ) -> Option<T> {
        self.port(port)?;
        let port = self.ports.get_mut(usize::from(port.index))?.as_mut()?;
        port.stages.with(place, task)
    }

    /// The failure of a port's stage: until the stage is replaced or taken away, the port drops all
    /// frames, or goes on without a capture.
    #[must_use]
    pub fn failure(&self, port: PortId) -> Option<&StageFailure> {
        self.port(port)?.stages.failure()
    }

    /// Removes a port. Returns its queues, to which all frames were given back.
    ///
    /// # Errors
    /// There is no such port.
    pub fn remove_port(&mut self, port: PortId) -> Result<Vec<Box<dyn PortQueue>>, SwitchError> {
        let found = self.port(port).ok_or(SwitchError::NoSuchPort)?;
        let (queues, team) = (found.queues.clone(), found.config.team.clone());
        let detached = queues.into_iter().filter_map(|index| {
            let generation = self.lane(index)?.generation;
            self.detach(QueueId { index, generation })
        });
        let detached = detached.collect();
        self.drop_waiting(port.index);
        self.note_failure(port.index);
        self.drop_held(port.index);
        self.traces.retain(|trace| trace.port != Some(port));
        self.table.forget(port.index, true);
        self.table.touch();
        if let Some(place) = self.ports.get_mut(usize::from(port.index)) {
            *place = None;
        }
        self.taking_over.retain(|taking| !taking.is_on(port.index));
        self.leave(team.as_deref());
        self.note_holders();
        Ok(detached)
    }

    /// Adds a queue to a port.
    ///
    /// # Errors
    /// There is no such port, or no room; the queue is dropped then.
    pub fn attach(
        &mut self,
        port: PortId,
        queue: Box<dyn PortQueue>,
    ) -> Result<QueueId, SwitchError> {
        check_properties(&queue.properties())?;
        let queues = self.port(port).ok_or(SwitchError::NoSuchPort)?.queues.len();
        let index = free_place(&mut self.lanes, QUEUES_MAX)
            .filter(|_| queues < PORT_QUEUES_MAX)
            .ok_or(SwitchError::TooManyQueues)?;
        let generation = self.next_generation();
        if let Some(place) = self.lanes.get_mut(usize::from(index)) {
            *place = Some(Box::new(Lane::new(generation, port.index, queue)));
        }
        self.order.push(index);
        if let Some(port) = self.ports.get_mut(usize::from(port.index)).and_then(Option::as_mut) {
            port.queues.push(index);
        }
        self.refresh_state(index);
        Ok(QueueId { index, generation })
    }

    /// Removes a queue from its port, and returns it. All its frames were given back to it, those
    /// that waited are counted as dropped, and the switch holds none of its memory.
    pub fn detach(&mut self, queue: QueueId) -> Option<Box<dyn PortQueue>> {
        self.lane(queue.index).filter(|lane| lane.generation == queue.generation)?;
        let mut lane = self.lanes.get_mut(usize::from(queue.index))?.take()?;
        self.order.retain(|index| *index != queue.index);
        let port = self.ports.get_mut(usize::from(lane.port)).and_then(Option::as_mut);
        if let Some(port) = port {
            port.queues.retain(|index| *index != queue.index);
            port.up.retain(|index| *index != queue.index);
            if port.up.is_empty() {
                port.announcements = Announcements::default();
                self.elect_for(lane.port);
            }
        }
        self.drop_undecided(&lane);
        for index in 0..lane.frames.len() {
            self.drop_pending(&mut lane, index, |_| true);
            if let Some(slot) = lane.frames.get_mut(index) {
                slot.is_done = true;
            }
        }
        let count = lane.frames.take_done();
        if count > 0 {
            lane.queue.give_back(count);
            lane.queue.publish();
        }
        Some(lane.queue)
    }

    /// Runs `task` on a queue of type `Q`, which may change its properties and its state in it;
    /// `None` if there is no such queue.
    pub fn with_queue<Q: PortQueue, T>(
        &mut self,
        queue: QueueId,
        task: impl FnOnce(&mut Q) -> T,
    ) -> Option<T> {
        let lane = self.lanes.get_mut(usize::from(queue.index))?.as_mut()?;
        if lane.generation != queue.generation {
            return None;
        }
        let inner: &mut dyn Any = lane.queue.as_mut();
        let answer = task(inner.downcast_mut()?);
        let properties = lane.queue.properties();
        if check_properties(&properties).is_ok() {
            let old = std::mem::replace(&mut lane.properties, properties);
            if old.buffer_segments != properties.buffer_segments {
                lane.loan = crate::Loan::with_capacity(properties.buffer_segments);
            }
        }
        self.refresh_state(queue.index);
        Some(answer)
    }

    /// Notes a station that another switch has learnt on a port in its place, and that was silent
    /// for so long. Returns whether it is noted: not if the port could not learn it now, if it is
    /// known by now, or too old.
    pub fn restore_station(
        &mut self,
        now: Nanos,
        port: PortId,
        (mac, vlan): (MacAddress, u16),
        silent: Nanos,
    ) -> bool {
        let Some(found) = self.port(port) else { return false };
        let config = &found.config;
        let is_own = config.guard.as_ref().is_none_or(|guard| guard.mac == mac);
        let may_be = is_own && config.vlans.have(vlan) && found.is_open();
        if !may_be || !mac.is_station() || silent > self.options.age {
            return false;
        }
        let (seen_at, limit) = (Nanos(now.0.saturating_sub(silent.0)), config.stations);
        self.table.restore(Key::new(mac, vlan), port.index, seen_at, limit)
    }

    /// The stations that the switch knows.
    pub fn stations(&self) -> impl Iterator<Item = StationEntry> + '_ {
        self.table.iter().filter_map(|(key, index, is_fixed, seen_at)| {
            let generation = self.ports.get(usize::from(index))?.as_ref()?.generation;
            let port = PortId { index, generation };
            Some(StationEntry { mac: key.mac(), vlan: key.vlan(), port, is_fixed, seen_at })
        })
    }

    /// The number of stations that the switch knows.
    #[must_use]
    pub const fn station_count(&self) -> usize {
        self.table.len()
    }

    /// Whether a port is blocked because of a loop.
    #[must_use]
    pub fn is_blocked(&self, port: PortId) -> bool {
        self.port(port).is_some_and(|port| port.blocked_until.is_some())
    }

    /// Whether another port of its team carries the frames.
    #[must_use]
    pub fn is_standby(&self, port: PortId) -> bool {
        self.port(port).is_some_and(|port| port.is_standby)
    }

    /// Whether a queue of the port carries frames.
    #[must_use]
    pub fn is_up(&self, port: PortId) -> bool {
        self.port(port).is_some_and(|port| !port.up.is_empty())
    }

    /// Moves the events since the last call to `events`.
    pub fn take_events(&mut self, events: &mut Vec<SwitchEvent>) {
        events.append(&mut self.events);
    }

    /// Whether there are events.
    #[must_use]
    pub const fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Whether frames wait in the switch: the next turn has work.
    #[must_use]
    pub fn has_frames(&self) -> bool {
        self.lanes.iter().flatten().any(|lane| lane.frames.len() > 0)
    }

    /// The earliest time at which a queue must be polled, or a held frame goes on, although nothing
    /// wakes the switch.
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        let queues = self.lanes.iter().flatten().filter_map(|lane| lane.queue.deadline());
        let own =
            [self.next_release(), self.next_announcement, self.next_probe, self.next_taken_over()];
        queues.chain(own.into_iter().flatten()).min()
    }

    /// Removes all ports and their queues, to which all frames are given back.
    pub fn close(mut self) {
        for index in 0..self.ports.len() {
            let index = u16::try_from(index).unwrap_or(u16::MAX);
            if let Some(generation) = self.port_at(index).map(|port| port.generation) {
                // The queues end here.
                let _ = self.remove_port(PortId { index, generation });
            }
        }
    }

    fn event(&mut self, event: SwitchEvent) {
        if self.events.len() < EVENTS_MAX {
            self.events.push(event);
        }
    }

    fn port(&self, port: PortId) -> Option<&Port> {
        let found = self.ports.get(usize::from(port.index))?.as_ref()?;
        (found.generation == port.generation).then_some(found)
    }

    #[inline]
    fn port_at(&self, index: u16) -> Option<&Port> {
        self.ports.get(usize::from(index))?.as_ref()
    }

    #[inline]
    fn lane(&self, index: u16) -> Option<&Lane> {
        self.lanes.get(usize::from(index))?.as_deref()
    }

    /// All queues, for arming and waking them.
    pub(crate) fn queues_mut(&mut self) -> impl Iterator<Item = &mut Lane> {
        self.lanes.iter_mut().flatten().map(Box::as_mut)
    }

    /// A queue.
    pub(crate) fn queue(&self, queue: QueueId) -> Option<&dyn PortQueue> {
        let lane = self.lane(queue.index)?;
        (lane.generation == queue.generation).then(|| lane.queue.as_ref())
    }

    /// Asks all queues whether they carry frames, as turns do now and then.
    pub fn refresh(&mut self) {
        for at in 0..self.order.len() {
            if let Some(index) = self.order.get(at).copied() {
                self.refresh_state(index);
            }
        }
    }

    /// Notes whether a queue carries frames.
    fn refresh_state(&mut self, index: u16) {
        let Some(lane) = self.lanes.get_mut(usize::from(index)).and_then(Option::as_mut) else {
            return;
        };
        let is_up = lane.queue.state() == QueueState::Up;
        if lane.is_up == is_up {
            return;
        }
        lane.is_up = is_up;
        let owner = lane.port;
        let Some(port) = self.ports.get_mut(usize::from(owner)).and_then(Option::as_mut) else {
            return;
        };
        port.up.retain(|other| *other != index);
        let was_down = port.up.is_empty();
        if is_up {
            port.up.push(index);
            port.up.sort_unstable();
        } else if was_down {
            // Its stations may be reached by another way now.
            self.table.forget(owner, false);
        }
        if was_down {
            self.note_station(owner, is_up);
            self.begin_probes(owner);
            self.elect_for(owner);
        }
    }
}

impl std::fmt::Debug for Switch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ports = self.ports.iter().flatten().map(|port| &port.name);
        f.debug_set().entries(ports).finish()
    }
}

fn check_properties(properties: &Properties) -> Result<(), SwitchError> {
    let header_bytes = properties.header_bytes;
    match header_bytes {
        0 | 10 | 12 => Ok(()),
        _ => Err(SwitchError::Properties { header_bytes }),
    }
}

/// The first free place, if there is one or one may be added.
fn free_place<T>(places: &mut Vec<Option<T>>, most: usize) -> Option<u16> {
    let index = places.iter().position(Option::is_none).unwrap_or(places.len());
    if index >= most {
        return None;
    }
    if index == places.len() {
        places.push(None);
    }
    u16::try_from(index).ok()
}
