//! A sidecore, which takes its turns on command.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;

use sidecore_block::BlockDevice;
use sidecore_reactor::{CoreContext, EventFd, IdleMode, Reactor, Sleeper, WakeKey, mailbox};
use sidecore_ring::{RingFormat, RingState};
use sidecore_units::Nanos;
use sidecore_virtio::blk::BlkQueue;

use super::Store;
use super::guest::SaturatingGuest;
use crate::Random;

/// The cost of a request, and of a turn, in nanoseconds. With a device that takes a millisecond,
/// turns need not be short.
const fn costs(store: Store) -> (u64, u64) {
    match store {
        Store::Ram => (250, 300),
        Store::Slots(_) => (250, 25_000),
    }
}

pub(super) struct Sidecore {
    pub(super) now: Nanos,
    store: Store,
    /// Never dropped: the requests in flight have no owner left.
    reactor: ManuallyDrop<Reactor<Sleepless>>,
    /// Each queue's function, and its guest.
    guests: Vec<(usize, SaturatingGuest)>,
}

impl Sidecore {
    pub(super) fn start(store: Store) -> Self {
        let (_post, mail) = mailbox().expect("a mailbox");
        let reactor = Reactor::new(CoreContext::default(), Sleepless, mail).expect("a reactor");
        let reactor = ManuallyDrop::new(reactor);
        Self { now: Nanos(1), store, reactor, guests: Vec::new() }
    }

    /// Adds a queue of function number `function`, with a guest.
    pub(super) fn serve(&mut self, function: usize, device: &dyn BlockDevice, depth: u16) {
        let mut guest = SaturatingGuest::new(device, depth);
        let channel =
            device.open_channel(self.reactor.context(), usize::from(depth) * 4).expect("a channel");
        let (resources, fresh) = (guest.resources(), RingState::fresh(RingFormat::Split));
        let (mode, signal) = (IdleMode::Poll, EventFd::peer_signal);
        let queue = BlkQueue::new(&guest.device, 0, resources, fresh, channel, mode, signal);
        self.reactor.add(queue.expect("a queue")).expect("room");
        guest.step();
        self.guests.push((function, guest));
    }

    /// Takes a turn, and advances the clock by its cost.
    pub(super) fn turn(&mut self, random: &mut Random) {
        let now = self.now;
        self.reactor.turn(&mut || now).expect("it does not sleep");
        let requests: u64 = self.guests.iter_mut().map(|(_, guest)| guest.step()).sum();
        let (request, turn) = costs(self.store);
        let cost = requests * request + turn;
        self.now = now.after(Nanos(cost - cost / 10 + random.below(cost / 5)));
    }

    /// Each queue's function, and its number of requests.
    pub(super) fn served(&self) -> Vec<(usize, u64)> {
        self.guests.iter().map(|(function, guest)| (*function, guest.served)).collect()
    }
}

/// A sleeper for a reactor that always polls.
struct Sleepless;

impl Sleeper for Sleepless {
    fn watch(&mut self, _fd: BorrowedFd<'_>, _key: WakeKey) -> io::Result<()> {
        Ok(())
    }

    fn unwatch(&mut self, _fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn wait(&mut self, _timeout: Option<Nanos>, _woken: &mut Vec<WakeKey>) -> io::Result<()> {
        Ok(())
    }
}
