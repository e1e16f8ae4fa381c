//! The unit that polls a queue of a link and serves the clients behind it.

mod execution;

use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use sidecore_block::{BlockError, Budget, Next, QueueStats};
use sidecore_link::Link;
use sidecore_reactor::{Arm, CoreContext, IdleMode, Pollable, Polled, Unit, WakeSet};
use sidecore_units::Nanos;
use sidecore_vrio::handshake::HostHandshake;
use sidecore_vrio::wire::DeviceEntry;
use sidecore_vrio::{Execute, Host, HostOptions, Member, VrioStats};

use super::entry::entry;
use super::executor::Done;
use super::executors::Executors;
use super::helper::HelperEnd;
use super::nics::ClientNic;
use super::sharing::Sharing;
use super::slots::SlotBuffers;
use super::steering::{Assigned, Load};
use super::tenure::{Holder, Tenure};
use super::turns::Turns;
use super::{ClientId, ClientLimits, ClientShare, ClientSpec, ExportError, ExportedDevice};
use crate::{LinkPort, Peers};

/// Frames that are taken from the link in one poll.
const POLL_FRAMES: usize = 64;

/// Called when a device is gone: no store has a request of it, and its channels are closed.
pub type Removed = Box<dyn FnOnce() + Send>;

/// A client.
pub(super) struct Client {
    pub(super) name: Arc<str>,
    /// Its places in the host: one for each of its link queues.
    pub(super) places: Vec<(u8, u16, Arc<VrioStats>)>,
    /// See [`ClientShare::slots`].
    slots: u16,
    /// No new request of it is taken.
    is_drained: bool,
}

/// A device of a client.
pub(super) struct Device {
    pub(super) client: ClientId,
    pub(super) name: Arc<str>,
    pub(super) entry: DeviceEntry,
    /// Writes are durable before they are answered.
    writes_through: bool,
    pub(super) assigned: Assigned,
    /// Held while requests are in flight.
    tenure: Arc<Tenure>,
    /// The place of the session that the requests in flight are of.
    place: u16,
    /// Requests that wait until those of another session, or at another unit, have ended.
    held: Vec<Execute>,
    /// Its counters, for each executor.
    pub(super) stats: Vec<Arc<QueueStats>>,
    /// It is gone as soon as nothing of it is in flight.
    removed: Option<Removed>,
    /// Executors that have not closed its store yet.
    closing: Option<usize>,
}

/// A queue of a link of an IOhost, with the sessions of all clients behind it. `H` is the handshake
/// by which they prove themselves.
///
/// Its sidecore does all the work for a request, unless [helpers](super::helper) on other sidecores
/// are less loaded.
pub struct Export<H: HostHandshake> {
    pub(super) port: LinkPort<SlotBuffers>,
    pub(super) host: Host<H>,
    pub(super) stats: Arc<VrioStats>,
    pub(super) options: HostOptions,
    /// By their names, of which none is used again: devices of a removed client are no other's.
    pub(super) clients: Vec<Option<Client>>,
    /// By their numbers, of which none is used again: a client may still have requests that name
    /// it.
    pub(super) devices: Vec<Option<Device>>,
    pub(super) nics: Vec<ClientNic>,
    /// The wake descriptors of the NICs.
    pub(super) nic_wakes: WakeSet,
    pub(super) executors: Executors,
    turns: Turns<Execute>,
    sharing: Sharing,
    /// The limits of clients, by places.
    limits: Vec<Option<Arc<ClientLimits>>>,
    done: Vec<Done>,
    closed: Vec<u16>,
    holder: Holder,
    /// Devices that another unit holds, and of which requests wait.
    waiting: Vec<u16>,
    /// Places of removed clients whose sessions the store still has requests of.
    leaving: Vec<u16>,
    now: Nanos,
    mode: IdleMode,
    stopped: Option<Box<dyn FnOnce(()) + Send>>,
}

impl<H: HostHandshake> Export<H> {
    /// A unit that serves `link`, on the sidecore of `core`, which has this `load` of requests.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new(
        core: &Rc<CoreContext>,
        link: Box<dyn Link>,
        (options, handshake): (HostOptions, H),
        load: &Arc<Load>,
        mode: IdleMode,
    ) -> Result<Self, ExportError> {
        let stats = Arc::new(VrioStats::default());
        let frame_bytes = u32::try_from(link.properties().frame_bytes).unwrap_or(u32::MAX);
        let server = sidecore_vrio::ServerOptions {
            frame_bytes: options.server.frame_bytes.min(frame_bytes),
            ..options.server
        };
        let options = HostOptions { server, station: Peers::station, ..options };
        let sharing = Sharing::new(link.properties().batch_frames);
        Ok(Self {
            port: LinkPort::new(link, SlotBuffers::default()),
            host: Host::new(options, handshake, Arc::clone(&stats)),
            stats,
            options,
            clients: Vec::new(),
            devices: Vec::new(),
            nics: Vec::new(),
            nic_wakes: WakeSet::new()?,
            executors: Executors::new(core, load, options.server.neglected)?,
            turns: Turns::new(),
            sharing,
            limits: Vec::new(),
            done: Vec::new(),
            closed: Vec::new(),
            holder: Holder::new(),
            waiting: Vec::new(),
            leaving: Vec::new(),
            now: Nanos::ZERO,
            mode,
            stopped: None,
        })
    }

    /// Has another sidecore execute requests, of devices that are added from now on.
    ///
    /// # Errors
    /// The kernel has no memory left.
    pub fn add_helper(&mut self, helper: HelperEnd) -> Result<(), ExportError> {
        Ok(self.executors.add_helper(helper)?)
    }

    /// Lets a client have sessions.
    ///
    /// # Errors
    /// It has them already, there are too many clients, or the kernel has no memory left.
    pub fn add_client(&mut self, spec: &ClientSpec) -> Result<ClientId, ExportError> {
        let slots = self.options.server.slots;
        let mut places = Vec::new();
        for queue in 0..spec.queues.max(1) {
            let stats = Arc::new(VrioStats::default());
            let member = Member { client: spec.id, queue };
            let Some(place) = self.host.add(member, Arc::clone(&stats)) else {
                self.remove_places(&places);
                return Err(ExportError::Client { name: Arc::clone(&spec.name) });
            };
            places.push((queue, place, stats));
            // The memory of its former client goes with the new client's.
            self.leaving.retain(|left| *left != place);
            if let Err(error) = self.port.data.add(place, slots) {
                self.remove_places(&places);
                return Err(error.into());
            }
            self.done.reserve(slots.into());
        }
        self.set_shares(&places, &spec.share);
        let (name, slots) = (Arc::clone(&spec.name), spec.share.slots);
        let client = Client { name, places, slots, is_drained: false };
        self.clients.push(Some(client));
        Ok(ClientId(self.clients.len().saturating_sub(1)))
    }

    /// Changes a client's share.
    ///
    /// # Errors
    /// There is no such client.
    pub fn set_share(&mut self, client: ClientId, share: &ClientShare) -> Result<(), ExportError> {
        let found = self.clients.get_mut(client.0).and_then(Option::as_mut);
        let found = found.ok_or(ExportError::NoClient)?;
        found.slots = share.slots;
        let (places, is_drained) = (found.places.clone(), found.is_drained);
        self.set_shares(&places, share);
        self.drain_client(client, is_drained)
    }

    /// Takes no new request of a client, or takes them again. The client waits meanwhile; its
    /// requests that a store has are answered.
    ///
    /// # Errors
    /// There is no such client.
    pub fn drain_client(&mut self, client: ClientId, drains: bool) -> Result<(), ExportError> {
        let most = self.options.server.slots.max(1);
        let found = self.clients.get_mut(client.0).and_then(Option::as_mut);
        let found = found.ok_or(ExportError::NoClient)?;
        found.is_drained = drains;
        let slots = if drains { 0 } else { found.slots.clamp(1, most) };
        for (_, place, _) in &found.places {
            self.host.set_slot_limit(self.now, *place, slots);
        }
        Ok(())
    }

    /// Requests of a client that stores have, or are to be given.
    #[must_use]
    pub fn executing(&self, client: ClientId) -> usize {
        let found = self.clients.get(client.0).and_then(Option::as_ref);
        let places = found.map_or(&[][..], |found| &found.places);
        let sessions = places.iter().filter_map(|(_, place, _)| self.host.session(*place));
        let devices = self.devices.iter().flatten().filter(|device| device.client == client);
        // Requests of a former session are the devices' alone.
        let in_flight: usize = devices.map(|device| device.assigned.in_flight as usize).sum();
        sessions.map(|session| session.executing()).sum::<usize>().max(in_flight)
    }

    fn set_shares(&mut self, places: &[(u8, u16, Arc<VrioStats>)], share: &ClientShare) {
        let slots = self.options.server.slots;
        for (_, place, _) in places {
            self.sharing.add(*place);
            self.turns.set(*place, share.weight, slots.into());
            self.host.set_slot_limit(self.now, *place, share.slots.clamp(1, slots.max(1)));
            let index = usize::from(*place);
            if index >= self.limits.len() {
                self.limits.resize(index.saturating_add(1), None);
            }
            if let Some(place) = self.limits.get_mut(index) {
                *place = share.limits.clone();
            }
        }
    }

    /// Ends the sessions of a client at once, and lets it have none any more. Its devices are to be
    /// removed by [`remove_device`](Self::remove_device).
    ///
    /// # Errors
    /// There is no such client.
    pub fn remove_client(&mut self, client: ClientId) -> Result<(), ExportError> {
        let found = self.clients.get_mut(client.0).and_then(Option::take);
        let found = found.ok_or(ExportError::NoClient)?;
        self.remove_places(&found.places);
        Ok(())
    }

    fn remove_places(&mut self, places: &[(u8, u16, Arc<VrioStats>)]) {
        for (_, place, _) in places {
            self.host.remove(*place);
            self.leaving.push(*place);
        }
    }

    /// Gives a client a device. Returns the device's number.
    ///
    /// # Errors
    /// The client does not exist, or has a device of this name; the name is too long; the kernel
    /// refuses what the store needs.
    pub fn add_device(
        &mut self,
        client: ClientId,
        device: &ExportedDevice,
    ) -> Result<u16, ExportError> {
        let name = &device.name;
        if !self.clients.get(client.0).is_some_and(Option::is_some) {
            return Err(ExportError::NoClient);
        }
        if self.has_name(client, name) {
            return Err(ExportError::Device { name: Arc::clone(name) });
        }
        let number = u16::try_from(self.devices.len()).map_err(|_| ExportError::Full)?;
        let entry = entry(number, device)?;
        let stats: Vec<_> = (0..self.executors.count()).map(|_| Arc::default()).collect();
        let depth = usize::from(self.options.server.slots.max(1));
        self.executors.add(number, (name, &device.store), depth, &stats)?;
        self.devices.push(Some(Device {
            client,
            name: Arc::clone(name),
            entry,
            writes_through: !device.write_cache && device.store.geometry().volatile_cache,
            assigned: Assigned::default(),
            tenure: Arc::clone(&device.tenure),
            place: 0,
            held: Vec::new(),
            stats,
            removed: None,
            closing: None,
        }));
        self.announce(client);
        Ok(number)
    }

    /// The size of a device's store has changed.
    ///
    /// # Errors
    /// There is no such device.
    pub fn resize_device(&mut self, number: u16, capacity_bytes: u64) -> Result<(), ExportError> {
        let device = self.device(number).ok_or(ExportError::NoDevice)?;
        let unit = u64::from(device.entry.block_bytes);
        let rest = capacity_bytes.checked_rem(unit).unwrap_or(0);
        device.entry.capacity_bytes = capacity_bytes.saturating_sub(rest);
        let client = device.client;
        self.announce(client);
        Ok(())
    }

    /// Another owner's epoch has come, or this IOhost's own: sessions that use the device end, and
    /// begin anew.
    ///
    /// # Errors
    /// There is no such device.
    pub fn set_epoch(&mut self, number: u16, epoch: u64) -> Result<(), ExportError> {
        let device = self.device(number).ok_or(ExportError::NoDevice)?;
        device.entry.epoch = epoch;
        let client = device.client;
        self.announce(client);
        Ok(())
    }

    /// Takes a device from its client at once. `removed` is called when its store is closed.
    ///
    /// # Errors
    /// There is no such device; `removed` was dropped.
    pub fn remove_device(&mut self, number: u16, removed: Removed) -> Result<(), ExportError> {
        let device = self.device(number).ok_or(ExportError::NoDevice)?;
        device.removed = Some(removed);
        let client = device.client;
        let held = std::mem::take(&mut device.held);
        for execute in held {
            self.end(execute.ticket, Err(BlockError::EIO));
        }
        self.announce(client);
        self.close_if_idle(number);
        Ok(())
    }

    /// A device that is not being removed.
    fn device(&mut self, number: u16) -> Option<&mut Device> {
        let device = self.devices.get_mut(usize::from(number))?.as_mut()?;
        Some(device).filter(|device| device.removed.is_none())
    }

    pub(super) fn devices_of(&self, client: ClientId) -> impl Iterator<Item = &Device> {
        let devices = self.devices.iter().flatten();
        devices.filter(move |device| device.client == client && device.removed.is_none())
    }

    /// Tells a client's sessions what devices it has.
    pub(super) fn announce(&mut self, client: ClientId) {
        let disks = self.devices_of(client).map(|device| device.entry);
        let entries: Vec<_> = disks.chain(self.nic_entries(client)).collect();
        let Some(Some(found)) = self.clients.get(client.0) else { return };
        for (_, place, _) in &found.places {
            self.host.set_devices(self.now, *place, &entries);
        }
    }

    /// Closes the store of a device that is being removed, once nothing of it is in flight.
    fn close_if_idle(&mut self, number: u16) {
        let Some(Some(device)) = self.devices.get_mut(usize::from(number)) else { return };
        let is_due = device.removed.is_some() && device.assigned.in_flight == 0;
        if !is_due || device.closing.is_some() {
            return;
        }
        device.closing = Some(self.executors.remove(number));
        self.note_closed(number, 0);
    }

    /// So many executors have closed the store of a device.
    fn note_closed(&mut self, number: u16, count: usize) {
        let Some(place) = self.devices.get_mut(usize::from(number)) else { return };
        let Some(left) = place.as_mut().and_then(|device| device.closing.as_mut()) else { return };
        *left = left.saturating_sub(count);
        if *left == 0
            && let Some(removed) = place.take().and_then(|device| device.removed)
        {
            removed();
        }
    }

    /// Takes frames from the link. Returns their number.
    #[inline]
    fn receive(&mut self, now: Nanos) -> usize {
        let count = self.port.receive(now, POLL_FRAMES);
        while let Some(mut frame) = self.port.next_frame() {
            let (from, frame_bytes) = (frame.from, frame.frame_bytes);
            let (head, received) = frame.parts();
            self.host.receive(now, (from, head, frame_bytes), received, &mut self.port);
        }
        count
    }

    /// Whether the rest of a poll without frames has nothing to do. Polls that find nothing are the
    /// most frequent ones, and a frame that arrives meanwhile waits for their end.
    #[inline]
    fn is_quiet(&self, now: Nanos) -> bool {
        self.host.is_idle(now)
            && self.executors.is_alone_and_idle()
            && self.turns.is_unused()
            && self.done.is_empty()
            && self.closed.is_empty()
            && self.waiting.is_empty()
            && self.leaving.is_empty()
    }

    /// Ends a request.
    #[inline]
    fn end(&mut self, ticket: u64, result: Result<(), BlockError>) {
        self.host.complete(ticket, result);
        self.port.data.end(Execute::place_of(ticket));
    }

    /// Takes back what the stores have ended. Returns the number of requests.
    #[inline]
    fn complete(&mut self, now: Nanos) -> usize {
        self.executors.exchange(now, &mut self.done, &mut self.closed);
        self.end_done(now)
    }

    /// Takes back what the helpers have ended. Returns the number of requests.
    #[inline]
    fn take_results(&mut self, now: Nanos) -> usize {
        // Those in the list are of this sidecore, and counted in the next exchange.
        if !self.executors.has_helpers() || !self.done.is_empty() {
            return 0;
        }
        self.executors.receive(&mut self.done, &mut self.closed);
        self.end_done(now)
    }

    /// Ends the requests in the list. Returns their number.
    #[inline]
    fn end_done(&mut self, now: Nanos) -> usize {
        let count = self.done.len();
        if count > 0 {
            self.end_all(now);
        }
        while let Some(number) = self.closed.pop() {
            self.note_closed(number, 1);
        }
        count
    }

    #[inline(always)]
    fn end_all(&mut self, now: Nanos) {
        let mut done = std::mem::take(&mut self.done);
        for Done { device: number, ticket, result } in done.drain(..) {
            self.end(ticket, result);
            let device = self.devices.get_mut(usize::from(number)).and_then(Option::as_mut);
            if let Some(device) = device {
                device.assigned.ended();
                if device.assigned.in_flight == 0 {
                    self.is_idle_now(now, number);
                }
            }
        }
        if !self.done.is_empty() {
            done.append(&mut self.done);
        }
        self.done = done;
    }

    /// Nothing of a device is in flight any more.
    #[inline]
    fn is_idle_now(&mut self, now: Nanos, number: u16) {
        let Some(Some(device)) = self.devices.get_mut(usize::from(number)) else { return };
        device.tenure.release();
        if device.removed.is_some() {
            self.close_if_idle(number);
        } else if !device.held.is_empty() {
            self.try_held(now, number);
        }
    }

    /// Gives the requests to the store that waited for those of another session or unit.
    #[cold]
    fn try_held(&mut self, now: Nanos, number: u16) {
        let Some(Some(device)) = self.devices.get_mut(usize::from(number)) else { return };
        for execute in std::mem::take(&mut device.held) {
            self.execute(now, execute);
        }
    }

    /// Tries again to take hold of the devices that another unit holds.
    #[cold]
    fn try_waiting(&mut self, now: Nanos) {
        for number in std::mem::take(&mut self.waiting) {
            self.try_held(now, number);
        }
    }

    /// Gives the memory of removed clients back, once no store has a request of theirs.
    #[cold]
    fn let_leave(&mut self) {
        let (host, buffers) = (&self.host, &mut self.port.data);
        self.leaving.retain(|place| {
            let is_gone = host
                .session(*place)
                .is_none_or(|session| session.session() == 0 && session.is_drained());
            if is_gone {
                buffers.remove(*place);
            }
            !is_gone
        });
    }
}

/// Whether the session at a place has ended: the store is given nothing of it any more.
fn is_over<H: HostHandshake>(host: &Host<H>, place: u16) -> bool {
    host.session(place).is_none_or(|session| session.session() == 0)
}

impl<H: HostHandshake + 'static> Unit for Export<H> {
    /// All that a client needs to continue is at the client.
    type State = ();

    fn stop(&mut self, stopped: Box<dyn FnOnce(()) + Send>) {
        self.stopped = Some(stopped);
    }
}

impl<H: HostHandshake + 'static> Pollable for Export<H> {
    fn poll(&mut self, now: Nanos, budget: usize) -> Polled {
        self.now = now;
        let (mut frames, mut work) = (0_usize, self.take_results(now));
        if !self.nics.is_empty() {
            work = work.saturating_add(self.take_packets());
        }
        if self.stopped.is_none() {
            frames = self.receive(now);
            if frames == 0 && work == 0 && self.is_quiet(now) {
                return Polled::Quiet;
            }
            work = work.saturating_add(self.execute_all(now, Budget::new(budget)));
        }
        if !self.waiting.is_empty() {
            self.try_waiting(now);
        }
        work = work.saturating_add(self.complete(now));
        self.port.share(self.sharing.share_bytes(now));
        self.host.poll(now, &mut self.port);
        self.port.flush(now);
        if !self.nics.is_empty() {
            work = work.saturating_add(self.give_packets());
        }
        // A session that has more to send is no reason to sleep.
        work = work.saturating_add(usize::from(self.port.is_paused()));
        // After the answers, which clients wait for.
        self.port.give_back();
        if !self.leaving.is_empty() {
            self.let_leave();
        }
        if self.stopped.is_some() && self.executors.is_idle() {
            return Polled::Finished;
        }
        if work == 0 && self.turns.is_empty() && self.executors.is_idle() {
            return Polled::Quiet;
        }
        match work.saturating_add(frames) {
            0 => Polled::Idle,
            work => Polled::Busy(work),
        }
    }

    fn idle_mode(&self) -> IdleMode {
        self.mode
    }

    fn arm(&mut self) -> Arm {
        let is_waited_for = self.port.is_paused() || !self.waiting.is_empty();
        if is_waited_for || !(self.turns.is_empty() && self.done.is_empty()) {
            return Arm::CannotSleep;
        }
        match self.executors.arm() {
            Arm::Armed => {}
            other => return other,
        }
        let armed = match self.arm_nics() {
            Arm::Armed => self.port.arm(),
            other => other,
        };
        if armed != Arm::Armed {
            self.disarm_nics();
            self.executors.disarm();
        }
        armed
    }

    fn disarm(&mut self) {
        self.port.disarm();
        self.disarm_nics();
        self.executors.disarm();
    }

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        watch(self.port.wake_fd());
        watch(self.nic_wake_fd());
        self.executors.wake_fds(watch);
    }

    fn on_wake(&mut self) {
        self.port.on_wake();
        self.wake_nics();
        self.executors.on_wake();
    }

    fn deadline(&self) -> Option<Nanos> {
        let executors = match self.executors.next() {
            Next::OnWake => None,
            next => next.deadline(),
        };
        let deadlines =
            [self.host.deadline(), self.port.deadline(), self.turns.deadline(), executors];
        deadlines.into_iter().flatten().min()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.executors.waits_since()
    }

    fn finish(mut self: Box<Self>) {
        let stopped = self.stopped.take();
        // The link and the stores are closed before the answer.
        drop(self);
        if let Some(stopped) = stopped {
            stopped(());
        }
    }
}
