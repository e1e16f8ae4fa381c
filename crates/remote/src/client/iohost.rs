//! An IOhost as the threads of this process see it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use sidecore_link::LinkStats;
use sidecore_reactor::{Bell, Listener};
use sidecore_vrio::VrioStats;
use sidecore_vrio::wire::DeviceEntry;

use super::desk::Moved;
use super::handover::{HandoverEnd, HandoverShared};
use super::stats::SessionStats;
use super::status::DeviceShared;
use super::store::{OpenError, padded_name};
use crate::nic::NicEnd;

/// The number of the next session of this process: units of a sidecore find each other by it.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);

/// A task for a session, from another thread.
pub(super) enum Command {
    /// A store uses this device.
    OpenDevice(Arc<DeviceShared>),
    /// A store serves this device as in this entry, which an earlier process has known.
    Promise(Arc<DeviceShared>, DeviceEntry),
    /// Its user is gone.
    LeaveDevice(Arc<DeviceShared>),
    /// A store does not use it any more.
    CloseDevice(Arc<DeviceShared>),
    /// A port of a switch is this NIC of the IOhost.
    OpenNic(String, Box<NicEnd>),
    /// A queue on another sidecore gives requests.
    OpenLine(HandoverEnd),
    /// Such a queue is gone.
    CloseLine(Arc<HandoverShared>),
    /// New requests wait, before the IOhost is taken away; or they go on.
    Drain(bool),
    /// The session goes on on its first or its second link.
    Move { to_second: bool, answer: SyncSender<Moved> },
}

/// The session with an IOhost, as all threads see it. Clones are the same session.
///
/// It is made first; the [`Session`](super::Session) is the unit that serves it, on one sidecore.
/// Stores of its devices may be opened before that.
#[derive(Clone)]
pub struct Iohost(pub(super) Arc<Shared>);

pub(super) struct Shared {
    pub(super) name: String,
    pub(super) number: u64,
    /// Wakes the session.
    pub(super) bell: Arc<Bell>,
    /// Until the session takes it.
    listener: Mutex<Option<Listener>>,
    /// There are commands.
    pub(super) has_commands: AtomicBool,
    commands: Mutex<Vec<Command>>,
    /// The devices that stores have opened, or want to.
    pub(super) devices: Mutex<Vec<Weak<DeviceShared>>>,
    /// The session has ended, and no other one comes.
    has_ended: AtomicBool,
    pub(super) vrio_stats: Arc<VrioStats>,
    pub(super) stats: Arc<SessionStats>,
    pub(super) link_stats: OnceLock<Arc<LinkStats>>,
    pub(super) second_link_stats: OnceLock<Arc<LinkStats>>,
}

impl Iohost {
    /// The IOhost `name`, as reports and logs call it, before its session is started.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new(name: &str) -> io::Result<Self> {
        let listener = Listener::new()?;
        Ok(Self(Arc::new(Shared {
            name: name.to_owned(),
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            bell: listener.bell(),
            listener: Mutex::new(Some(listener)),
            has_commands: AtomicBool::new(false),
            commands: Mutex::default(),
            devices: Mutex::default(),
            has_ended: AtomicBool::new(false),
            vrio_stats: Arc::default(),
            stats: Arc::default(),
            link_stats: OnceLock::new(),
            second_link_stats: OnceLock::new(),
        })))
    }

    /// The name of reports and logs.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Begins to use a NIC of the IOhost, with this end of it: the port of a switch has the other
    /// one, and ends the use when it is dropped. The IOhost may be away, or have no such NIC yet.
    ///
    /// # Errors
    /// The name is no name of a device, or the session has ended.
    pub fn open_nic(&self, name: &str, end: NicEnd) -> Result<(), OpenError> {
        padded_name(name).ok_or(OpenError::Name)?;
        if self.0.has_ended() {
            return Err(OpenError::Ended);
        }
        self.0.tell(Command::OpenNic(name.to_owned(), Box::new(end)));
        Ok(())
    }

    /// Has new requests wait, and answered writes flushed once no request is unanswered; or has
    /// requests go on. [`SessionReport`](super::SessionReport) shows how far it is.
    pub fn drain(&self, drains: bool) {
        self.0.tell(Command::Drain(drains));
    }

    /// Has the session go on on its second link, or on its first one. The answer comes within seven
    /// seconds: the time in which requests were not served, zero if it was there; or why it is
    /// where it was, or is looked for on both links. Without a session's unit none comes.
    #[must_use]
    pub fn begin_move(&self, to_second: bool) -> Receiver<Moved> {
        let (answer, moved) = sync_channel(1);
        self.0.tell(Command::Move { to_second, answer });
        moved
    }

    /// The counters of the session's engine.
    #[must_use]
    pub fn vrio_stats(&self) -> &Arc<VrioStats> {
        &self.0.vrio_stats
    }

    /// The other counters of the session.
    #[must_use]
    pub fn stats(&self) -> &Arc<SessionStats> {
        &self.0.stats
    }

    /// The counters of the session's link; `None` before the session is started.
    #[must_use]
    pub fn link_stats(&self) -> Option<&Arc<LinkStats>> {
        self.0.link_stats.get()
    }

    /// The counters of the session's second link, if it has one.
    #[must_use]
    pub fn second_link_stats(&self) -> Option<&Arc<LinkStats>> {
        self.0.second_link_stats.get()
    }
}

impl Shared {
    /// The receiver of the session's signals, for the first session that asks.
    pub(super) fn take_listener(&self) -> Option<Listener> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Gives the session a task. Without a session the task waits for one, or for ever.
    pub(super) fn tell(&self, command: Command) {
        {
            let mut commands = self.commands();
            if self.has_ended() {
                // Dropped, so that a queue learns that nothing serves its line.
                return;
            }
            commands.push(command);
        }
        self.has_commands.store(true, Ordering::Release);
        self.bell.ring();
    }

    pub(super) fn take_commands(&self) -> Vec<Command> {
        let mut commands = self.commands();
        self.has_commands.store(false, Ordering::Release);
        std::mem::take(&mut *commands)
    }

    /// The session has ended: nothing is done any more.
    pub(super) fn end(&self) {
        let commands = {
            let mut commands = self.commands();
            self.has_ended.store(true, Ordering::Release);
            std::mem::take(&mut *commands)
        };
        drop(commands);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    pub(super) fn commands(&self) -> MutexGuard<'_, Vec<Command>> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
