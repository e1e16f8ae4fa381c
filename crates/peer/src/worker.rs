//! A worker thread: an epoll loop over listeners, connections, and the doorbell of its mailbox.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;

use crate::pool::{PATIENCE, Pool};
use crate::slot::{AnySlot, Context, Event, SendEvent, connection_key, listener_key};

/// The largest number of descriptors that one wait reports; the next wait reports more.
const MAX_EVENTS: usize = 64;
/// The pause after a failed wait.
const PAUSE: Duration = Duration::from_secs(1);
/// The doorbell's key, larger than every socket's number.
const DOORBELL: u64 = u64::MAX;

/// An order to a worker.
pub(crate) enum Order {
    /// Serve another socket.
    Add(u64, Box<dyn AnySlot>),
    /// Handle an event of a socket.
    Event(u64, Event),
    /// End all sockets, and then the thread.
    Stop,
}

/// The sending end of a worker's orders.
pub(crate) struct Mailbox {
    orders: Sender<Order>,
    doorbell: OwnedFd,
}

impl Mailbox {
    /// Sends an order. False if the thread has ended: the order is lost.
    pub(crate) fn send(&self, order: Order) -> bool {
        let is_sent = self.orders.send(order).is_ok();
        // The only error is a full counter, which wakes the thread as well.
        let _ = rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes());
        is_sent
    }

    /// Returns a function that sends events to the socket `number`.
    pub(crate) fn event_sender(self: &Arc<Self>, number: u64) -> SendEvent {
        let mailbox = Arc::clone(self);
        Arc::new(move |event| {
            // A thread that has ended has dropped its sockets.
            mailbox.send(Order::Event(number, event));
        })
    }
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Mailbox").field("doorbell", &self.doorbell).finish_non_exhaustive()
    }
}

/// The state of the thread.
pub(crate) struct Worker {
    epoll: OwnedFd,
    orders: Receiver<Order>,
    mailbox: Arc<Mailbox>,
    pool: Arc<Pool>,
    slots: BTreeMap<u64, (Box<dyn AnySlot>, Option<Instant>)>,
    timers: BTreeSet<(Instant, u64)>,
    is_stopping: bool,
}

impl Worker {
    /// Makes a worker without a thread, and its mailbox.
    pub(crate) fn new(pool: Arc<Pool>) -> io::Result<(Arc<Mailbox>, Self)> {
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &doorbell, epoll::EventData::new_u64(DOORBELL), epoll::EventFlags::IN)?;
        let (sender, orders) = mpsc::channel();
        let mailbox = Arc::new(Mailbox { orders: sender, doorbell });
        let (slots, timers) = (BTreeMap::new(), BTreeSet::new());
        let worker = Self {
            epoll,
            orders,
            mailbox: Arc::clone(&mailbox),
            pool,
            slots,
            timers,
            is_stopping: false,
        };
        Ok((mailbox, worker))
    }

    /// Serves until a stop is ordered and all sockets have ended.
    pub(crate) fn run(mut self) {
        let mut events = Vec::with_capacity(MAX_EVENTS);
        while !(self.is_stopping && self.slots.is_empty()) {
            events.clear();
            if let Err(error) = self.wait(&mut events) {
                // The only causes are a signal, which is no error here, and a lack of memory.
                tracing::error!(%error, "cannot wait for messages");
                std::thread::sleep(PAUSE);
            }
            let now = Instant::now();
            for event in &events {
                // Copied, because the structure is packed.
                let data = event.data;
                self.serve(data.u64(), now);
            }
            while let Ok(order) = self.orders.try_recv() {
                self.carry_out(order, now);
            }
            while let Some((_, number)) =
                self.timers.first().copied().filter(|(due, _)| *due <= now)
            {
                self.handle(number, Event::Timeout, now);
            }
        }
    }

    fn wait(&self, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let now = Instant::now();
        let timer = self.timers.first().map(|(due, _)| due.saturating_duration_since(now));
        let pool = self.pool.start_threads(now).then_some(PATIENCE);
        let timeout = timer
            .into_iter()
            .chain(pool)
            .min()
            .and_then(|timeout| Timespec::try_from(timeout).ok());
        match epoll::wait(&self.epoll, spare_capacity(events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Handles a readiness event: of a connection, of a listener, or of the doorbell.
    fn serve(&mut self, key: u64, now: Instant) {
        let number = key >> 1;
        match key {
            DOORBELL => {
                // The orders are read in any case.
                let _ = rustix::io::read(&self.mailbox.doorbell, &mut [0; 8]);
            }
            _ if key == listener_key(number) => self.handle(number, Event::Acceptable, now),
            _ => {
                debug_assert_eq!(key, connection_key(number));
                self.handle(number, Event::Ready, now);
            }
        }
    }

    fn carry_out(&mut self, order: Order, now: Instant) {
        match order {
            Order::Add(number, slot) => {
                self.slots.insert(number, (slot, None));
                self.handle(number, Event::Added, now);
                if self.is_stopping {
                    self.handle(number, Event::End(None), now);
                }
            }
            Order::Event(number, event) => self.handle(number, event, now),
            Order::Stop => {
                self.is_stopping = true;
                let numbers: Vec<u64> = self.slots.keys().copied().collect();
                numbers.into_iter().for_each(|number| self.handle(number, Event::End(None), now));
            }
        }
    }

    /// Passes an event to a slot, unless the slot has ended.
    fn handle(&mut self, number: u64, event: Event, now: Instant) {
        let Some((slot, timer)) = self.slots.get_mut(&number) else { return };
        let context = Context { epoll: &self.epoll, pool: &self.pool, now };
        slot.handle(event, &context);
        let (next, is_over) = (slot.timer(), slot.is_over());
        if *timer != next {
            timer.take().map(|due| self.timers.remove(&(due, number)));
            self.timers.extend(next.map(|due| (due, number)));
            *timer = next;
        }
        if is_over && let Some((slot, timer)) = self.slots.remove(&number) {
            timer.map(|due| self.timers.remove(&(due, number)));
            slot.retire(&context);
        }
    }
}
