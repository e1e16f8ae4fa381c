//! The unit that serves a session.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use sidecore_block::BlockError;
use sidecore_link::{Link, LinkAddress, LinkState};
use sidecore_reactor::{
    Arm, CoreContext, IdleMode, Listener, Pollable, Polled, Port, Unit, WakeSet,
};
use sidecore_units::Nanos;
use sidecore_vrio::handshake::ClientHandshake;
use sidecore_vrio::wire::DeviceEntry;
use sidecore_vrio::{Client, ClientOptions, OnDisconnect};

use super::desk::{SessionDesk, Spare};
use super::iohost::{Iohost, Shared};
use super::local::Desks;
use super::table::Table;
use crate::LinkPort;

/// The options of a session.
#[derive(Clone, Copy, Debug)]
pub struct SessionOptions {
    /// The options of the engine. The link's frames and receive ring limit what they ask for.
    pub client: ClientOptions,
    /// The IOhost's address on the link.
    pub address: LinkAddress,
    /// The way to spend idle time.
    pub idle: IdleMode,
}

/// A session at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionReport {
    /// Whether the link carries frames.
    pub link: LinkState,
    /// The same of the second link.
    pub second_link: Option<LinkState>,
    /// Whether the second link is used, or tried.
    pub is_on_second: bool,
    /// Whether there is a session.
    pub is_connected: bool,
    /// The reason that the IOhost gave last for having none, of
    /// [`ending`](sidecore_vrio::wire::ending); nothing proves it.
    pub refusal: Option<u16>,
    /// The incarnation of the IOhost.
    pub incarnation: u64,
    /// When a frame of the IOhost arrived last, by the clock of the sidecores.
    pub heard_at: Option<Nanos>,
    /// The smoothed round trip; zero before it was measured.
    pub round_trip: Nanos,
    /// The size of frames that the path was proved for.
    pub frame_bytes: u32,
    /// The client's credit: requests that may be with the IOhost.
    pub slot_limit: u16,
    /// Requests of queues that are not answered.
    pub in_flight: usize,
    /// The [drain](Iohost::drain) of the IOhost, while there is one.
    pub drain: Option<DrainReport>,
    /// The devices that the IOhost has for this client; `None` before all of them are known.
    pub devices: Option<Vec<DeviceEntry>>,
    /// The devices that stores use.
    pub opened: Vec<OpenedReport>,
}

/// A drain of an IOhost, at one moment. It is complete when nothing is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainReport {
    /// Requests from before the drain that are not answered.
    pub unanswered: usize,
    /// Answered writes that no answered flush covers.
    pub kept_writes: u64,
    /// The error of a flush, for which the drain does not end.
    pub error: Option<BlockError>,
}

impl DrainReport {
    /// Whether nothing is left.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.unanswered == 0 && self.kept_writes == 0 && self.error.is_none()
    }
}

/// A device that a store uses, at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenedReport {
    /// The device's name at the IOhost.
    pub device: String,
    /// Requests of queues that are not answered.
    pub in_flight: usize,
    /// Answered writes that no answered flush covers.
    pub kept_writes: u64,
}

/// A session with an IOhost: owns a queue of a link and one engine.
///
/// It may be stopped when no store of its devices has a queue left, and then finishes when all
/// requests are answered.
pub struct Session<H: ClientHandshake> {
    desk: Rc<RefCell<SessionDesk<H>>>,
    desks: Rc<Desks>,
    shared: Arc<Shared>,
    idle: IdleMode,
    /// Other threads wake the unit by it.
    listener: Listener,
    /// The link's descriptor is borrowed from here, because the desk cannot lend it.
    wake: OwnedFd,
    /// That of the second link.
    second_wake: Option<OwnedFd>,
    /// The wake descriptors of remote NICs.
    nic_wakes: Rc<WakeSet>,
    /// Queues of this sidecore wake the unit by it.
    doorbell: Port<()>,
    now: Nanos,
    stopped: Option<Box<dyn FnOnce(()) + Send>>,
}

impl<H: ClientHandshake + 'static> Session<H> {
    /// A session with `iohost` over `link`, on the sidecore of `core`.
    ///
    /// # Errors
    /// The process has no descriptor left, or the IOhost has a session already.
    pub fn new(
        core: &CoreContext,
        iohost: &Iohost,
        link: Box<dyn Link>,
        handshake: H,
        options: &SessionOptions,
    ) -> io::Result<Self> {
        let shared = Arc::clone(&iohost.0);
        let properties = link.properties();
        let as_u32 = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let engine = ClientOptions {
            receive_frames: options.client.receive_frames.min(as_u32(properties.receive_frames)),
            frame_bytes: options.client.frame_bytes.min(as_u32(properties.frame_bytes)),
            ..options.client
        };
        let wake = link.wake_fd().try_clone_to_owned()?;
        let listener = shared.take_listener().ok_or(io::ErrorKind::AlreadyExists)?;
        let _ = shared.link_stats.set(Arc::clone(link.stats()));
        let mut port = LinkPort::new(link, Table::default());
        // However many others are heard: without its name, the session would be deaf.
        let peer = port.peers().keep(options.address);
        let client = Client::new(engine, peer, handshake, Arc::clone(&shared.vrio_stats));
        let doorbell = core.open_port(1);
        let sender = core.connect(doorbell.id()).ok_or(io::ErrorKind::NotConnected)?;
        let fail_after = match options.client.on_disconnect {
            OnDisconnect::Stall => None,
            OnDisconnect::Fail(after) => Some(after),
        };
        let nic_wakes = Rc::new(WakeSet::new()?);
        let wakes = (sender, Rc::clone(&nic_wakes));
        let desk = SessionDesk::new(client, port, Arc::clone(&shared), wakes, fail_after);
        let desk = Rc::new(RefCell::new(desk));
        let desks = core.shared::<Desks>();
        let weak = Rc::downgrade(&desk);
        desks.add(shared.number, weak);
        let (idle, now) = (options.idle, Nanos::ZERO);
        let second_wake = None;
        Ok(Self {
            desk,
            desks,
            shared,
            idle,
            listener,
            wake,
            second_wake,
            nic_wakes,
            doorbell,
            now,
            stopped: None,
        })
    }

    /// Adds a second link, on which the IOhost may be found, too: while there is no session, it is
    /// looked for on both in turn. Before the session is polled first.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn add_second(
        &mut self,
        link: Box<dyn Link>,
        address: LinkAddress,
        options: &SessionOptions,
    ) -> io::Result<()> {
        self.second_wake = Some(link.wake_fd().try_clone_to_owned()?);
        let most = (options.client.frame_bytes, options.client.receive_frames);
        let spare = Spare::new(link, address, options.address, most);
        let _ = self.shared.second_link_stats.set(Arc::clone(spare.stats()));
        self.desk.borrow_mut().add_spare(spare);
        Ok(())
    }

    /// The session at this moment. Allocates.
    #[must_use]
    pub fn report(&self) -> SessionReport {
        let desk = self.desk.borrow();
        let client = desk.client();
        let opened = desk.opened();
        let (link, second_link, is_on_second) = desk.links();
        let drain = desk.drains.then(|| DrainReport {
            unanswered: desk.unanswered(),
            kept_writes: opened.iter().map(|opened| opened.kept_writes).sum(),
            error: desk.drain_error,
        });
        SessionReport {
            link,
            second_link,
            is_on_second,
            is_connected: client.is_connected(),
            refusal: client.refusal(),
            incarnation: client.incarnation(),
            heard_at: client.heard_at(),
            round_trip: client.round_trip(),
            frame_bytes: client.frame_bytes(),
            slot_limit: client.slot_limit(),
            in_flight: desk.in_flight(),
            devices: desk.listed.clone(),
            opened,
            drain,
        }
    }

    fn ring_off(&self) {
        self.listener.wake();
        self.doorbell.disarm();
        let _ = self.doorbell.receive();
    }
}

impl<H: ClientHandshake + 'static> Pollable for Session<H> {
    fn poll(&mut self, now: Nanos, budget: usize) -> Polled {
        self.now = now;
        let mut desk = self.desk.borrow_mut();
        let polled = desk.turn(now, budget);
        if self.stopped.is_some() && desk.is_over() {
            desk.end(now);
            return Polled::Finished;
        }
        polled
    }

    fn idle_mode(&self) -> IdleMode {
        self.idle
    }

    fn arm(&mut self) -> Arm {
        let mut desk = self.desk.borrow_mut();
        self.listener.sleep();
        let _ = self.doorbell.arm();
        if desk.has_mail() || desk.deadline() <= self.now {
            self.ring_off();
            return Arm::WorkPending;
        }
        let armed = match desk.arm_nics() {
            Arm::Armed => desk.port.arm(),
            other => other,
        };
        desk.is_asleep = armed == Arm::Armed;
        if armed != Arm::Armed {
            desk.disarm_nics();
            self.ring_off();
        }
        armed
    }

    fn disarm(&mut self) {
        let mut desk = self.desk.borrow_mut();
        desk.is_asleep = false;
        desk.port.disarm();
        desk.disarm_nics();
        self.ring_off();
    }

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        watch(self.wake.as_fd());
        if let Some(second) = &self.second_wake {
            watch(second.as_fd());
        }
        watch(self.listener.as_fd());
        watch(self.nic_wakes.as_fd());
    }

    fn on_wake(&mut self) {
        let mut desk = self.desk.borrow_mut();
        desk.port.on_wake();
        desk.wake_nics();
        if let Some(spare) = desk.spare_mut() {
            spare.on_wake(self.now);
        }
        self.listener.wake();
    }

    fn deadline(&self) -> Option<Nanos> {
        let deadline = self.desk.borrow().deadline();
        self.doorbell.deadline().or_else(|| (deadline < Nanos::MAX).then_some(deadline))
    }

    fn waits_since(&self) -> Option<Nanos> {
        // An IOhost on this machine needs a CPU, and so does the kernel for its frames.
        self.desk.borrow().oldest()
    }

    fn finish(mut self: Box<Self>) {
        self.desks.remove(self.shared.number);
        if let Some(stopped) = self.stopped.take() {
            // The link is closed before the acknowledgement.
            drop(self);
            stopped(());
        }
    }
}

impl<H: ClientHandshake + 'static> Unit for Session<H> {
    type State = ();

    fn stop(&mut self, stopped: Box<dyn FnOnce(()) + Send>) {
        self.desk.borrow_mut().stop();
        self.stopped = Some(stopped);
    }
}
