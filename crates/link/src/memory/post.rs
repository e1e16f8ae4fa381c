//! Messages between a link on its sidecore and the thread that connects it.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use sidecore_memory::GuestMemory;
use sidecore_reactor::EventFd;

use super::channel::Channel;
use crate::LinkError;

/// To the link.
#[derive(Debug)]
pub(super) enum ToLink {
    /// A peer has come; the memory is that of all channels.
    Joined(Box<Channel>, GuestMemory),
    /// The peer of the channel at this place is gone.
    Left(u16),
    /// Why there is no IOhost.
    Down(&'static str),
    /// A channel was given back: the memory of all others.
    Memory(GuestMemory),
}

/// To the thread that connects the link.
#[derive(Debug)]
pub(super) enum ToService {
    /// The peer of the channel at this place has broken a rule.
    Broken(u16),
    /// A closed channel, of which nothing is lent.
    Closed(Box<Channel>),
}

/// The messages, and the descriptors that wake both sides.
#[derive(Debug)]
pub(super) struct Post {
    to_link: Mutex<VecDeque<ToLink>>,
    has_mail: AtomicBool,
    to_service: Mutex<Vec<ToService>>,
    /// Whether the link was dropped.
    has_ended: AtomicBool,
    /// Readable when a message has come, or a peer has woken the link. Edge-triggered, so that a
    /// look clears it, and no event has to be read.
    wake: OwnedFd,
    link_event: EventFd,
    service_event: Arc<EventFd>,
}

impl Post {
    pub fn new(service_event: Arc<EventFd>) -> Result<Self, LinkError> {
        let wake = epoll::create(CreateFlags::CLOEXEC)
            .map_err(LinkError::kernel("make an epoll descriptor"))?;
        let link_event = EventFd::new().map_err(LinkError::kernel("make an eventfd"))?;
        let post = Self {
            to_link: Mutex::default(),
            has_mail: AtomicBool::new(false),
            to_service: Mutex::default(),
            has_ended: AtomicBool::new(false),
            wake,
            link_event,
            service_event,
        };
        post.watch(post.link_event.as_fd())?;
        Ok(post)
    }

    /// Has an event wake the link.
    pub fn watch(&self, event: BorrowedFd<'_>) -> Result<(), LinkError> {
        epoll::add(&self.wake, event, EventData::new_u64(0), EventFlags::IN | EventFlags::ET)
            .map_err(LinkError::kernel("watch an eventfd"))
    }

    /// Lets an event wake the link no longer.
    pub fn unwatch(&self, event: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.wake, event);
    }

    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// The link: forgets the wake-ups so far.
    pub fn clear_wake(&self) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events = [MaybeUninit::<Event>::uninit(); 64];
        // Bounded, since a peer can cause one event after the other.
        for _ in 0..8 {
            match epoll::wait(&self.wake, &mut events[..], Some(&zero)) {
                Ok((events, _)) if events.len() >= 64 => {}
                _ => return,
            }
        }
    }

    /// The service: sends a message.
    pub fn send(&self, message: ToLink) {
        lock(&self.to_link).push_back(message);
        self.has_mail.store(true, Ordering::Release);
        self.link_event.signal();
    }

    /// The link: whether there are messages.
    #[inline]
    pub fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Acquire)
    }

    /// The link: the next message. Never waits: if the service is at the messages just now, there
    /// is none for now.
    pub fn receive(&self) -> Option<ToLink> {
        let mut messages = try_lock(&self.to_link)?;
        let message = messages.pop_front();
        if messages.is_empty() {
            self.has_mail.store(false, Ordering::Relaxed);
        }
        message
    }

    /// The link: sends all of these messages, or none for now. Never waits.
    pub fn reply(&self, messages: &mut Vec<ToService>) {
        if let Some(mut queue) = try_lock(&self.to_service) {
            queue.append(messages);
            drop(queue);
            self.service_event.signal();
        }
    }

    /// The service: the messages so far.
    pub fn replies(&self) -> Vec<ToService> {
        std::mem::take(&mut *lock(&self.to_service))
    }

    /// The link has ended.
    pub fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
        self.service_event.signal();
    }

    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
