//! Ports: bounded queues of messages between the units of one core.
//!
//! A unit opens a [`Port`] with its [`CoreContext`](crate::CoreContext) and receives from it when
//! it is polled. The port's name, a [`PortId`], is plain data: another thread may carry it to the
//! unit that sends, which connects once and keeps the [`PortSender`]. Messages take no lock and,
//! once both ends are set up, no allocation.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_units::Nanos;

use crate::Arm;

/// The number of the next port. All ports of a process have different numbers, so that the name of
/// a closed port, or of a port on another core, reaches no port.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(0);

/// Names a port for messages of type `M`, for the units on its core.
pub struct PortId<M> {
    number: u64,
    of: PhantomData<fn(M)>,
}

// A derive would require the same traits of `M`.
impl<M> Clone for PortId<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for PortId<M> {}

impl<M> fmt::Debug for PortId<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port {}", self.number)
    }
}

/// The receiving end of a port. Its drop closes the port.
///
/// The unit that owns it forwards [`Port::arm`], [`Port::disarm`] and [`Port::deadline`], so that a
/// message to a sleeping unit wakes the unit before the next turn.
pub struct Port<M> {
    id: PortId<M>,
    queue: Rc<Queue<M>>,
}

/// A sending end of a port.
pub struct PortSender<M>(Rc<Queue<M>>);

/// A message that was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotSent<M> {
    /// The port has reached its capacity: the receiver has to be polled first.
    Full(M),
    /// The port is closed: the unit that owned it is gone.
    Closed(M),
}

struct Queue<M> {
    messages: RefCell<VecDeque<M>>,
    capacity: usize,
    is_open: Cell<bool>,
    /// Whether the receiver sleeps until a message comes.
    is_armed: Cell<bool>,
    /// See [`Ports::has_wake`].
    has_wake: Rc<Cell<bool>>,
}

/// The ports of one core.
#[derive(Default)]
pub(crate) struct Ports {
    open: RefCell<Vec<(u64, Weak<dyn Any>)>>,
    /// Whether a message has come to a receiver that sleeps.
    has_wake: Rc<Cell<bool>>,
}

impl Ports {
    pub(crate) fn open<M: 'static>(&self, capacity: usize) -> Port<M> {
        let queue = Rc::new(Queue {
            messages: RefCell::new(VecDeque::with_capacity(capacity)),
            capacity,
            is_open: Cell::new(true),
            is_armed: Cell::new(false),
            has_wake: Rc::clone(&self.has_wake),
        });
        let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut open = self.open.borrow_mut();
        open.retain(|(_, queue)| queue.strong_count() > 0);
        let weak = Rc::downgrade(&queue);
        open.push((number, weak));
        Port { id: PortId { number, of: PhantomData }, queue }
    }

    pub(crate) fn connect<M: 'static>(&self, id: PortId<M>) -> Option<PortSender<M>> {
        let open = self.open.borrow();
        let (_, queue) = open.iter().find(|(number, _)| *number == id.number)?;
        let queue: Rc<Queue<M>> = queue.upgrade()?.downcast().ok()?;
        queue.is_open.get().then_some(PortSender(queue))
    }

    /// Whether a message has come to a sleeping receiver since the last call.
    #[inline]
    pub(crate) fn take_wake(&self) -> bool {
        self.has_wake.get() && self.has_wake.replace(false)
    }
}

impl<M> Port<M> {
    /// The port's name, for the units that send to it.
    #[must_use]
    pub fn id(&self) -> PortId<M> {
        self.id
    }

    /// Takes the oldest message.
    #[inline]
    pub fn receive(&self) -> Option<M> {
        self.queue.messages.borrow_mut().pop_front()
    }

    /// Makes the next message wake the receiver, unless the port has messages already. Part of the
    /// receiver's [`Pollable::arm`](crate::Pollable::arm).
    pub fn arm(&self) -> Arm {
        let is_empty = self.queue.messages.borrow().is_empty();
        self.queue.is_armed.set(is_empty);
        if is_empty { Arm::Armed } else { Arm::WorkPending }
    }

    /// Ends the wake-ups by messages: the receiver is polled from now on.
    pub fn disarm(&self) {
        self.queue.is_armed.set(false);
    }

    /// Now, while the port has messages. Part of the receiver's
    /// [`Pollable::deadline`](crate::Pollable::deadline).
    #[must_use]
    pub fn deadline(&self) -> Option<Nanos> {
        (!self.queue.messages.borrow().is_empty()).then_some(Nanos::ZERO)
    }
}

impl<M> Drop for Port<M> {
    fn drop(&mut self) {
        self.queue.is_open.set(false);
        // Dropped after the borrow: a message may hold a sender to this very port.
        let messages = std::mem::take(&mut *self.queue.messages.borrow_mut());
        drop(messages);
    }
}

impl<M> PortSender<M> {
    /// Sends a message. The receiver gets it at its next poll.
    ///
    /// # Errors
    /// See [`NotSent`].
    #[inline]
    pub fn send(&self, message: M) -> Result<(), NotSent<M>> {
        let queue = &*self.0;
        if !queue.is_open.get() {
            return Err(NotSent::Closed(message));
        }
        let mut messages = queue.messages.borrow_mut();
        if messages.len() >= queue.capacity {
            return Err(NotSent::Full(message));
        }
        messages.push_back(message);
        if queue.is_armed.get() {
            queue.has_wake.set(true);
        }
        Ok(())
    }
}

impl<M> Clone for PortSender<M> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use crate::{CoreContext, NotSent, PortSender};

    #[test]
    fn messages_come_in_order_and_a_full_port_gives_them_back() {
        let core = CoreContext::default();
        let port = core.open_port(2);
        let sender = core.connect(port.id()).unwrap();
        assert_eq!(sender.send("a"), Ok(()));
        assert_eq!(sender.clone().send("b"), Ok(()));
        assert_eq!(sender.send("c"), Err(NotSent::Full("c")));
        assert_eq!(port.receive(), Some("a"));
        assert_eq!(sender.send("c"), Ok(()));
        assert_eq!([port.receive(), port.receive(), port.receive()], [Some("b"), Some("c"), None]);
    }

    #[test]
    fn a_closed_port_is_closed_to_its_senders_and_to_its_name() {
        let core = CoreContext::default();
        let port = core.open_port(1);
        let (id, sender) = (port.id(), core.connect(port.id()).unwrap());
        sender.send(7).unwrap();
        drop(port);
        assert_eq!(sender.send(8), Err(NotSent::Closed(8)));
        assert!(core.connect(id).is_none(), "the port has a sender, but no receiver");
        drop(sender);
        let next = core.open_port::<i32>(1);
        assert!(core.connect(id).is_none(), "the next port is another one");
        assert!(core.connect(next.id()).is_some());
    }

    #[test]
    fn a_name_reaches_no_port_of_another_core() {
        let (one, other) = (CoreContext::default(), CoreContext::default());
        let (port, neighbour) = (one.open_port::<u8>(1), other.open_port::<u8>(1));
        assert!(other.connect(port.id()).is_none());
        assert!(other.connect(neighbour.id()).is_some());
    }

    #[test]
    fn a_message_that_is_dropped_with_its_port_finds_it_closed() {
        struct Echo(PortSender<Option<Echo>>, Rc<Cell<bool>>);
        impl Drop for Echo {
            fn drop(&mut self) {
                self.1.set(matches!(self.0.send(None), Err(NotSent::Closed(None))));
            }
        }
        let core = CoreContext::default();
        let port = core.open_port(2);
        let sender = core.connect(port.id()).unwrap();
        let is_refused = Rc::new(Cell::new(false));
        assert!(sender.send(Some(Echo(sender.clone(), Rc::clone(&is_refused)))).is_ok());
        drop(port);
        assert!(is_refused.get());
    }
}
