//! One thread: an epoll loop over listeners, connections, and the bell of its mailbox.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use sidecore_nvme::PciFunction;

use crate::handover::LeftSocket;
use crate::slot::{Begin, Key, Known, Slot};
use crate::ticket::Wake;

/// Descriptors reported by one wait; more are reported by the next.
const MAX_EVENTS: usize = 64;
/// How long to leave a failing accept alone (no file descriptors, no memory).
const RETRY: Duration = Duration::from_secs(1);

/// What a thread is told.
pub(crate) enum Order {
    /// There is another socket.
    Serve { number: u64, listener: OwnedFd, function: Arc<dyn PciFunction>, known: Arc<Known>, begin: Begin },
    /// Leave a socket's client to `heir`, and take no other.
    HandOver { number: u64, heir: Sender<LeftSocket> },
    /// What a session waited for is done.
    Resume { number: u64 },
    /// End a socket; `over` is dropped when its function is free.
    End { number: u64, over: Sender<Infallible> },
    /// End all of them, and then yourself.
    Stop,
}

/// Where a thread takes orders.
pub(crate) struct Mailbox {
    orders: Sender<Order>,
    bell: OwnedFd,
}

impl Mailbox {
    /// False if the thread has ended: the order is lost.
    pub(crate) fn send(&self, order: Order) -> bool {
        let sent = self.orders.send(order).is_ok();
        // It can only fail by the counter being full, which rings as well.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        sent
    }

    /// What wakes a socket's session.
    pub(crate) fn wake(self: &Arc<Self>, number: u64) -> Wake {
        let mailbox = Arc::clone(self);
        Arc::new(move || {
            // A thread that has ended has dropped its sessions.
            mailbox.send(Order::Resume { number });
        })
    }
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Mailbox").field("bell", &self.bell).finish_non_exhaustive()
    }
}

/// The thread's state.
pub(crate) struct Worker {
    epoll: OwnedFd,
    orders: Receiver<Order>,
    mailbox: Arc<Mailbox>,
    slots: BTreeMap<u64, Slot>,
    stopping: bool,
    /// When to look again at listeners that could not be served.
    retry: Option<Instant>,
}

impl Worker {
    /// A worker without a thread, and where it takes orders.
    pub(crate) fn new() -> io::Result<(Arc<Mailbox>, Self)> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &bell, epoll::EventData::new_u64(Key::Bell.into()), epoll::EventFlags::IN)?;
        let (sender, orders) = mpsc::channel();
        let mailbox = Arc::new(Mailbox { orders: sender, bell });
        let slots = BTreeMap::new();
        let worker = Self { epoll, orders, mailbox: Arc::clone(&mailbox), slots, stopping: false, retry: None };
        Ok((mailbox, worker))
    }

    /// Serves until it is told to stop and all sockets have ended.
    pub(crate) fn run(mut self) {
        let mut events = Vec::with_capacity(MAX_EVENTS);
        while !(self.stopping && self.slots.is_empty()) {
            events.clear();
            if let Err(error) = self.wait(&mut events) {
                // What fails besides a signal is a lack of memory.
                tracing::error!(%error, "cannot wait for messages");
                std::thread::sleep(RETRY);
            }
            for event in &events {
                // A copy: the structure is packed.
                let data = event.data;
                self.serve(Key::from(data.u64()));
            }
            while let Ok(order) = self.orders.try_recv() {
                self.obey(order);
            }
            self.listen_again();
        }
    }

    fn wait(&self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let timeout = self.retry.map(|retry| retry.saturating_duration_since(Instant::now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match epoll::wait(&self.epoll, spare_capacity(events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// One message, or one connection, or the bell. A socket that has ended meanwhile has no slot any longer.
    fn serve(&mut self, key: Key) {
        match key {
            Key::Bell => {
                // The orders are looked at in any case.
                let _ = rustix::io::read(&self.mailbox.bell, &mut [0; 8]);
            }
            Key::Listener(number) => self.with(number, |slot, epoll| slot.accept(epoll)),
            Key::Connection(number) => self.with(number, |slot, epoll| slot.turn(epoll)),
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Serve { number, listener, function, known, begin } => {
                let wake = self.mailbox.wake(number);
                self.slots.insert(number, Slot::new(number, listener, function, known, wake));
                let stopping = self.stopping;
                self.with(number, |slot, epoll| {
                    slot.begin(begin, epoll);
                    if stopping {
                        slot.close(None, epoll);
                    }
                });
            }
            Order::HandOver { number, heir } => self.with(number, |slot, epoll| slot.hand_over(heir, epoll)),
            Order::Resume { number } => self.with(number, |slot, epoll| slot.resume(epoll)),
            Order::End { number, over } => self.with(number, |slot, epoll| slot.close(Some(over), epoll)),
            Order::Stop => {
                self.stopping = true;
                let numbers: Vec<u64> = self.slots.keys().copied().collect();
                for number in numbers {
                    self.with(number, |slot, epoll| slot.close(None, epoll));
                }
            }
        }
    }

    /// Does something with a slot, and looks at what has become of it.
    fn with(&mut self, number: u64, act: impl FnOnce(&mut Slot, &OwnedFd)) {
        let Some(slot) = self.slots.get_mut(&number) else { return };
        let span = slot.span().clone();
        span.in_scope(|| act(slot, &self.epoll));
        if slot.is_over() {
            if let Some(slot) = self.slots.remove(&number) {
                slot.retire();
            }
        } else if slot.is_deaf() && self.retry.is_none() {
            self.retry = Instant::now().checked_add(RETRY);
        }
    }

    fn listen_again(&mut self) {
        if self.retry.is_none_or(|retry| retry > Instant::now()) {
            return;
        }
        self.retry = None;
        let deaf: Vec<u64> = self.slots.iter().filter(|(_, slot)| slot.is_deaf()).map(|(number, _)| *number).collect();
        for number in deaf {
            self.with(number, |slot, epoll| slot.listen(epoll));
        }
    }
}
