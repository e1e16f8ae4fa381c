//! The desk of a session: takes requests from all lines, gives their parts to the engine, and
//! hands them back.

mod drain;
mod moving;
mod nics;
mod report;
mod spare;
mod users;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use sidecore_block::{Batch, BlockError, BlockRequest, Operation};
use sidecore_link::LinkState;
use sidecore_reactor::{Polled, PortSender, WakeSet};
use sidecore_units::Nanos;
use sidecore_vrio::handshake::ClientHandshake;
use sidecore_vrio::wire::{DeviceEntry, ending};
use sidecore_vrio::{Client, Event, SubmitError};

use super::handover::HandoverEnd;
use super::iohost::{Command, Shared};
use super::local::Desk;
use super::status::{DeviceShared, DeviceStatus, Waiting, WaitsFor};
use super::store::{Opened, padded_name};
use super::table::{LineNumber, Table};
use crate::LinkPort;
use moving::Moving;
pub use moving::{MoveError, Moved};
use nics::DeskNic;
pub(super) use spare::Spare;

/// The error of requests that a stopped session is given.
const STOPPED: BlockError = BlockError::EIO;

/// A queue of a store.
struct Line {
    opened: Opened,
    /// The device's number in the engine.
    device: Option<u16>,
    depth: usize,
    /// Requests that were taken and not handed back.
    in_flight: usize,
    /// The queue is gone.
    is_closed: bool,
    way: Way,
}

/// The way back to a queue.
enum Way {
    /// The queue is on this sidecore.
    Local {
        /// Requests that have ended.
        ended: Batch,
        sleeps: bool,
        wake: PortSender<()>,
    },
    /// It is on another one.
    Handover(HandoverEnd),
}

/// A device of the session.
struct Device {
    shared: Arc<DeviceShared>,
    /// Its number in the engine.
    number: u16,
    status: DeviceStatus,
    /// Answered writes of a user that is gone which may be missing; `None` if there is a user.
    left_writes: Option<u64>,
}

/// See the module.
pub(super) struct SessionDesk<H: ClientHandshake> {
    client: Client<H>,
    pub(super) port: LinkPort<Table>,
    /// The link that is not used.
    spare: Option<Spare>,
    /// The session changes links.
    moving: Option<Moving>,
    shared: Arc<Shared>,
    lines: Vec<Option<Line>>,
    /// Those of queues on other sidecores.
    remote_lines: usize,
    devices: Vec<Device>,
    nics: Vec<DeskNic>,
    /// The wake descriptors of the NICs.
    nic_wakes: Rc<WakeSet>,
    /// The devices that the IOhost has for this client, once all of them are known.
    pub(super) listed: Option<Vec<DeviceEntry>>,
    /// Requests of the lines at most.
    depth: usize,
    /// Something has changed that a device may wait for.
    looks_again: bool,
    /// Devices that wait.
    waiting: usize,
    /// The writes of a user that is gone which may be missing may become more or fewer.
    has_left: bool,
    /// The IOhost lets the client use no slot.
    is_drained: bool,
    /// New requests wait here, because the IOhost is to be taken away.
    pub(super) drains: bool,
    /// The error of a flush, for which the drain does not end.
    pub(super) drain_error: Option<BlockError>,
    /// Held requests fail when the IOhost has not been heard of for this time.
    fail_after: Option<Nanos>,
    is_stopping: bool,
    /// The session's unit sleeps, and `doorbell` wakes it.
    pub(super) is_asleep: bool,
    doorbell: PortSender<()>,
    /// Kept for its capacity.
    over: Vec<(LineNumber, Box<BlockRequest>)>,
}

impl<H: ClientHandshake> SessionDesk<H> {
    pub(super) fn new(
        client: Client<H>,
        port: LinkPort<Table>,
        shared: Arc<Shared>,
        (doorbell, nic_wakes): (PortSender<()>, Rc<WakeSet>),
        fail_after: Option<Nanos>,
    ) -> Self {
        Self {
            client,
            port,
            spare: None,
            moving: None,
            shared,
            lines: Vec::new(),
            remote_lines: 0,
            devices: Vec::new(),
            nics: Vec::new(),
            nic_wakes,
            listed: None,
            depth: 0,
            looks_again: true,
            waiting: 0,
            has_left: false,
            is_drained: false,
            drains: false,
            drain_error: None,
            fail_after,
            is_stopping: false,
            is_asleep: false,
            doorbell,
            over: Vec::new(),
        }
    }

    /// The engine, for reports.
    pub(super) const fn client(&self) -> &Client<H> {
        &self.client
    }

    /// One round: frames in, requests in, frames out, requests out. Returns the amount of work.
    pub(super) fn turn(&mut self, now: Nanos, budget: usize) -> Polled {
        let frames = self.port.receive(now, budget);
        let packets = if self.nics.is_empty() { 0 } else { self.take_packets() };
        if frames == 0 && packets == 0 && self.has_nothing_to_do(now) {
            return if self.port.data.unanswered() == 0 { Polled::Quiet } else { Polled::Idle };
        }
        self.seek_elsewhere(now);
        while let Some(mut arrived) = self.port.next_frame() {
            let (from, frame_bytes) = (arrived.from, arrived.frame_bytes);
            let (head, received) = arrived.parts();
            self.client.receive(now, (from, head, frame_bytes), received, &mut self.port);
        }
        let mut work = if self.client.has_events() { self.take_events() } else { 0 };
        if self.shared.has_commands.load(Ordering::Acquire) {
            work = work.saturating_add(self.obey());
        }
        work = work.saturating_add(self.take_handed_over(now));
        if self.drains {
            self.drain(now);
        }
        if self.port.data.has_queued() {
            self.push(now);
        }
        work = work.saturating_add(self.care(now)).saturating_add(packets);
        if !self.nics.is_empty() {
            work = work.saturating_add(self.give_packets());
        }
        self.ring();
        self.look(now);
        self.carry_move_on(now);
        self.look_at_left();
        if work > 0 {
            self.shared.stats.in_flight.set(self.port.data.len() as u64);
        } else if self.port.data.unanswered() == 0 {
            return Polled::Quiet;
        }
        match work.saturating_add(frames) {
            0 => Polled::Idle,
            work => Polled::Busy(work),
        }
    }

    /// Whether the rest of a turn without frames has nothing to do. Such turns are the most
    /// frequent ones, and a frame that arrives meanwhile waits for their end.
    #[inline]
    fn has_nothing_to_do(&self, now: Nanos) -> bool {
        let is_at_rest =
            !(self.drains || self.looks_again || self.is_drained || self.moving.is_some());
        is_at_rest
            && self.waiting == 0
            && self.remote_lines == 0
            && !self.port.data.has_queued()
            && !self.client.has_events()
            && !self.client.is_due(now)
            && !self.shared.has_commands.load(Ordering::Acquire)
    }

    /// Gives queued parts to the engine and has it send.
    fn push(&mut self, now: Nanos) {
        while let Some(part) = self.port.data.next_part() {
            let request = (part.tag, part.device, part.request);
            match self.client.start(request, &mut self.port) {
                Ok(()) => {
                    if self.port.data.sent(&part) {
                        self.shared.stats.splits.add(1);
                    }
                }
                Err(SubmitError::Full) => break,
                Err(SubmitError::UnknownDevice { .. }) => {
                    self.port.data.sent(&part);
                    self.part_ended(part.tag, Err(BlockError::EIO));
                }
            }
        }
        self.client.transmit(now, &mut self.port);
        self.port.flush(now);
    }

    /// Has the engine do what is due. Returns the number of requests that ended.
    fn care(&mut self, now: Nanos) -> usize {
        if self.client.is_due(now) {
            self.client.poll(now, &mut self.port);
            self.port.flush(now);
        }
        if self.client.has_events() { self.take_events() } else { 0 }
    }

    /// Takes what the engine has to say. Returns the number of parts that ended.
    fn take_events(&mut self) -> usize {
        let mut ended = 0_usize;
        while let Some(event) = self.client.next_event() {
            match event {
                Event::Completed { tag, result } => {
                    self.part_ended(tag, result);
                    ended = ended.saturating_add(1);
                }
                Event::Connected => {
                    tracing::info!(iohost = self.shared.name, "a session has begun");
                    self.listed = None;
                    self.looks_again = true;
                }
                Event::Disconnected => {
                    tracing::warn!(iohost = self.shared.name, "the session is lost");
                    self.looks_again = true;
                }
                Event::Listed => self.listed = Some(self.client.listed().to_vec()),
                Event::Device(number) => {
                    self.looks_again = true;
                    self.note_entry(number);
                    self.note_abandoned(number);
                }
            }
        }
        ended
    }

    #[inline(always)]
    fn part_ended(&mut self, tag: u64, result: Result<(), BlockError>) {
        if let Some((line, request)) = self.port.data.part_ended(tag, result) {
            self.hand_back(line, request);
        }
    }

    /// Hands a request back that has ended.
    fn hand_back(&mut self, number: LineNumber, request: Box<BlockRequest>) {
        let Some(Some(line)) = self.lines.get_mut(number) else { return };
        match &mut line.way {
            Way::Local { ended, sleeps, wake } => {
                ended.push(request);
                if std::mem::take(sleeps) && wake.send(()).is_ok() {
                    self.shared.stats.wakes.add(1);
                }
            }
            Way::Handover(end) => {
                end.give_back(request);
                line.in_flight = line.in_flight.saturating_sub(1);
            }
        }
        if line.is_closed {
            self.free_line(number);
        }
    }

    /// Wakes queues on other sidecores.
    fn ring(&mut self) {
        if self.remote_lines == 0 {
            return;
        }
        for line in self.lines.iter_mut().flatten() {
            if let Way::Handover(end) = &mut line.way
                && end.ring()
            {
                self.shared.stats.wakes.add(1);
            }
        }
    }

    /// Takes the requests of queues on other sidecores. Returns their number.
    fn take_handed_over(&mut self, now: Nanos) -> usize {
        if self.remote_lines == 0 {
            return 0;
        }
        let mut count = 0_usize;
        for number in 0..self.lines.len() {
            while let Some(Some(line)) = self.lines.get_mut(number)
                && let Way::Handover(end) = &mut line.way
                && let Some(request) = end.take()
            {
                line.in_flight = line.in_flight.saturating_add(1);
                count = count.saturating_add(1);
                self.accept(now, number, request);
            }
        }
        self.shared.stats.handed_over.add(count as u64);
        count
    }

    /// Whether a queue on another sidecore has given requests, or a thread a command.
    pub(super) fn has_mail(&self) -> bool {
        let has_requests = |line: &Line| match &line.way {
            Way::Local { .. } => false,
            Way::Handover(end) => end.has_requests(),
        };
        self.shared.has_commands.load(Ordering::Acquire)
            || self.lines.iter().flatten().any(has_requests)
    }

    /// Takes a request of a line into the table, or ends it.
    fn accept(&mut self, now: Nanos, number: LineNumber, request: Box<BlockRequest>) {
        let mut request = request;
        let Some(Some(line)) = self.lines.get(number) else { return };
        let verdict = match line.device {
            _ if self.is_stopping => Err(STOPPED),
            None => Err(BlockError::EIO),
            Some(device) => line.opened.check(&request).map(|()| device),
        };
        match verdict {
            Ok(_) if request.len_bytes == 0 && request.operation != Operation::Flush => {
                request.result = Ok(());
            }
            Ok(device) => match self.port.data.insert(now, (number, device), request) {
                Ok(()) => return,
                Err(given_back) => {
                    request = given_back;
                    request.result = Err(BlockError::EIO);
                }
            },
            Err(error) => request.result = Err(error),
        }
        self.hand_back(number, request);
    }

    /// Carries out the commands of other threads. Returns their number.
    fn obey(&mut self) -> usize {
        let commands = self.shared.take_commands();
        let count = commands.len();
        for command in commands {
            match command {
                Command::Drain(drains) => self.set_drain(drains),
                Command::Move { to_second, answer } => self.ask_move(to_second, answer),
                Command::OpenDevice(device) => self.open_device(device),
                Command::OpenNic(name, end) => self.open_nic(name, *end),
                Command::LeaveDevice(device) => self.leave_device(&device),
                Command::CloseDevice(device) => self.close_device(&device),
                Command::Promise(device, entry) => self.promise(&device, &entry),
                Command::OpenLine(end) => {
                    let (opened, depth) = (end.opened.clone(), end.depth);
                    self.add_line(&opened, depth, Way::Handover(end));
                }
                Command::CloseLine(shared) => {
                    let is_it = |line: &Option<Line>| match line {
                        Some(Line { way: Way::Handover(end), .. }) => {
                            Arc::ptr_eq(&end.shared, &shared)
                        }
                        _ => false,
                    };
                    if let Some(number) = self.lines.iter().position(is_it) {
                        self.close_line(number);
                    }
                }
            }
        }
        self.looks_again = true;
        count
    }

    fn open_device(&mut self, shared: Arc<DeviceShared>) {
        // A second device of the name is refused before.
        let number = padded_name(&shared.name).and_then(|name| self.client.open(&name));
        let Some(number) = number else { return };
        self.devices.push(Device {
            shared,
            number,
            status: DeviceStatus::default(),
            left_writes: None,
        });
    }

    /// Has a device be as in this entry, unless the IOhost has attached it meanwhile.
    fn promise(&mut self, shared: &Arc<DeviceShared>, entry: &DeviceEntry) {
        let is_it = |device: &&Device| Arc::ptr_eq(&device.shared, shared);
        if let Some(number) = self.devices.iter().find(is_it).map(|device| device.number) {
            self.client.promise(number, entry);
            self.note_entry(number);
        }
    }

    fn close_device(&mut self, shared: &Arc<DeviceShared>) {
        let is_it = |device: &Device| Arc::ptr_eq(&device.shared, shared);
        let Some(place) = self.devices.iter().position(is_it) else { return };
        let device = self.devices.swap_remove(place);
        // The engine gives the number to the next device: no queue may use it any longer.
        for line in self.lines.iter_mut().flatten() {
            line.device = line.device.filter(|number| *number != device.number);
        }
        self.fail_queued(Some(device.number), BlockError::EIO);
        self.client.close(device.number);
    }

    /// Fails requests that the engine has not been given, of one device or of all.
    fn fail_queued(&mut self, device: Option<u16>, error: BlockError) {
        let mut over = std::mem::take(&mut self.over);
        self.port.data.fail_queued(device, error, &mut over);
        self.hand_back_all(over);
    }

    /// Hands requests back that have ended, and keeps the vector for its capacity.
    fn hand_back_all(&mut self, mut over: Vec<(LineNumber, Box<BlockRequest>)>) {
        for (line, request) in over.drain(..) {
            self.hand_back(line, request);
        }
        self.over = over;
    }

    fn add_line(&mut self, opened: &Opened, depth: usize, way: Way) -> LineNumber {
        let is_it = |device: &&Device| Arc::ptr_eq(&device.shared, &opened.device);
        let device = self.devices.iter().find(is_it).map(|device| device.number);
        if let Some(number) = device {
            self.begin_use(number);
        }
        let line =
            Line { opened: opened.clone(), device, depth, in_flight: 0, is_closed: false, way };
        let is_remote = matches!(line.way, Way::Handover(_));
        self.remote_lines = self.remote_lines.saturating_add(usize::from(is_remote));
        self.depth = self.depth.saturating_add(depth);
        self.port.data.reserve(self.depth);
        self.over.reserve(self.depth);
        let free = self.lines.iter().position(Option::is_none).unwrap_or(self.lines.len());
        match self.lines.get_mut(free) {
            Some(place) => *place = Some(line),
            None => self.lines.push(Some(line)),
        }
        free
    }

    /// Frees the place of a closed line once the engine has no request of it.
    fn free_line(&mut self, number: LineNumber) {
        if self.port.data.has_requests_of(number) {
            return;
        }
        if let Some(line) = self.lines.get_mut(number).and_then(Option::take) {
            self.depth = self.depth.saturating_sub(line.depth);
            let was_remote = matches!(line.way, Way::Handover(_));
            self.remote_lines = self.remote_lines.saturating_sub(usize::from(was_remote));
        }
    }

    /// Accepts no more requests, and fails those that the engine has not been given.
    pub(super) fn stop(&mut self) {
        self.is_stopping = true;
        self.fail_queued(None, STOPPED);
        self.ring();
    }

    /// Whether a stopped desk is done: it has no requests, and no queue can give any.
    pub(super) fn is_over(&self) -> bool {
        self.port.data.len() == 0 && self.lines.iter().all(Option::is_none)
    }

    /// Ends the session, at the end of the unit.
    pub(super) fn end(&mut self, now: Nanos) {
        self.client.end(now, &mut self.port);
        self.port.flush(now);
        for device in &mut self.devices {
            let since = device.status.waiting.map_or(now, |waiting| waiting.since);
            device.status.waiting = Some(Waiting { waits_for: WaitsFor::Session, since });
            device.shared.set(device.status);
        }
    }

    /// Looks at what the devices wait for.
    #[inline]
    fn look(&mut self, now: Nanos) {
        let is_drained = self.client.slot_limit() == 0;
        self.looks_again |= std::mem::replace(&mut self.is_drained, is_drained) != is_drained;
        if !std::mem::take(&mut self.looks_again) && self.waiting == 0 {
            return;
        }
        self.look_at_devices(now);
        self.shared.stats.waiting_devices.set(self.waiting as u64);
    }

    fn look_at_devices(&mut self, now: Nanos) {
        let link = self.link_state();
        let away = self.away();
        self.waiting = 0;
        for device in &mut self.devices {
            let waits_for = match link {
                LinkState::Down(reason) | LinkState::Closed(reason) => Some(WaitsFor::Link(reason)),
                LinkState::Up if !self.client.is_connected() => Some(away),
                LinkState::Up if self.client.is_ready(device.number) => {
                    let own = self.drains.then_some(WaitsFor::OwnDrain);
                    own.or(self.is_drained.then_some(WaitsFor::Undrained))
                }
                LinkState::Up if self.client.is_attached(device.number) => Some(WaitsFor::Replay),
                LinkState::Up => Some(
                    self.client
                        .change(device.number)
                        .map_or(WaitsFor::Device, WaitsFor::SameDevice),
                ),
            };
            self.waiting = self.waiting.saturating_add(usize::from(waits_for.is_some()));
            let before = device.status.waiting;
            if waits_for == before.map(|waiting| waiting.waits_for) {
                continue;
            }
            let since = before.map_or(now, |waiting| waiting.since);
            device.status.waiting = waits_for.map(|waits_for| Waiting { waits_for, since });
            let (iohost, name) = (&self.shared.name, &device.shared.name);
            match (before, waits_for) {
                (None, Some(_)) => {
                    device.status.waits = device.status.waits.wrapping_add(1);
                    self.shared.stats.device_waits.add(1);
                }
                (Some(Waiting { since, .. }), None) => {
                    let waited_ms = now.since(since).0 / 1_000_000;
                    tracing::info!(iohost, device = name, waited_ms, "the device is served");
                }
                _ => {}
            }
            if let Some(waits_for) = waits_for {
                let (reason, waited_ms) = (waits_for.word(), now.since(since).0 / 1_000_000);
                tracing::warn!(
                    iohost,
                    device = name,
                    reason,
                    waited_ms,
                    "the device waits for {waits_for}"
                );
            }
            device.shared.set(device.status);
        }
    }

    /// The condition that devices wait for without a session.
    fn away(&self) -> WaitsFor {
        match (self.client.refusal(), self.client.incarnation()) {
            (Some(ending::UNKNOWN_CLIENT), _) => {
                WaitsFor::Admission("it knows no such client, or no more")
            }
            (Some(ending::VERSION), _) => WaitsFor::Admission("it has no version in common"),
            (_, 0) => WaitsFor::Handshake,
            _ => WaitsFor::Iohost,
        }
    }

    /// The IOhost has another entry of a device.
    fn note_entry(&mut self, number: u16) {
        let Some(entry) = self.client.device(number) else { return };
        let Some(device) = self.devices.iter_mut().find(|device| device.number == number) else {
            return;
        };
        let before = device.status.entry.replace(*entry);
        if let Some(before) = before
            && before.capacity_bytes != entry.capacity_bytes
        {
            tracing::info!(
                iohost = self.shared.name,
                device = device.shared.name,
                from_bytes = before.capacity_bytes,
                to_bytes = entry.capacity_bytes,
                "the device has grown"
            );
        }
        device.shared.set(device.status);
    }
}

impl<H: ClientHandshake> Desk for SessionDesk<H> {
    fn open_line(&mut self, opened: &Opened, depth: usize, wake: PortSender<()>) -> LineNumber {
        // The device may have been opened since the last turn.
        if self.shared.has_commands.load(Ordering::Acquire) {
            self.obey();
        }
        let way = Way::Local { ended: Batch::with_capacity(depth), sleeps: false, wake };
        self.add_line(opened, depth, way)
    }

    fn close_line(&mut self, number: LineNumber) {
        if let Some(Some(line)) = self.lines.get_mut(number) {
            line.is_closed = true;
            self.free_line(number);
        }
    }

    fn submit(&mut self, now: Nanos, number: LineNumber, batch: &mut Batch) {
        let Some(Some(line)) = self.lines.get_mut(number) else { return };
        let room = line.depth.saturating_sub(line.in_flight).min(batch.len());
        if room == 0 {
            return;
        }
        line.in_flight = line.in_flight.saturating_add(room);
        self.shared.stats.local_requests.add(room as u64);
        for request in batch.drain(..room) {
            self.accept(now, number, request);
        }
        // The IOhost waits for these. The next turn does the rest.
        self.push(now);
        self.shared.stats.in_flight.set(self.port.data.len() as u64);
        if self.is_asleep {
            // It has to poll for the answers. A full port has woken it already.
            let _ = self.doorbell.send(());
        }
    }

    fn take(&mut self, number: LineNumber, completed: &mut Batch) {
        if let Some(Some(line)) = self.lines.get_mut(number)
            && let Way::Local { ended, sleeps, .. } = &mut line.way
        {
            *sleeps = false;
            line.in_flight = line.in_flight.saturating_sub(ended.len());
            completed.append(ended);
        }
    }

    fn readiness(&mut self, number: LineNumber) -> (usize, bool) {
        let Some(Some(line)) = self.lines.get_mut(number) else { return (0, false) };
        let Way::Local { ended, sleeps, .. } = &mut line.way else { return (0, false) };
        *sleeps = line.in_flight > 0 && ended.is_empty();
        (line.in_flight, !ended.is_empty())
    }

    fn waits_since(&self, line: LineNumber) -> Option<Nanos> {
        self.port.data.oldest(Some(line))
    }
}

impl<H: ClientHandshake> Drop for SessionDesk<H> {
    fn drop(&mut self) {
        self.shared.end();
        for device in &self.devices {
            device.shared.notify();
        }
    }
}
