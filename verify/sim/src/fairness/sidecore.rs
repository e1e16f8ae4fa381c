//! A sidecore on a thread of its own, which takes its turns on command.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

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

enum Command {
    Serve(usize, Arc<dyn BlockDevice>, u16),
    Turn(Nanos),
    Report,
}

enum Answer {
    Serving,
    /// Requests completed in the turn.
    Turned(u64),
    /// Each queue's function, and its number of requests.
    Served(Vec<(usize, u64)>),
}

pub(super) struct Sidecore {
    pub(super) now: Nanos,
    store: Store,
    commands: Option<Sender<Command>>,
    answers: Receiver<Answer>,
    thread: Option<JoinHandle<()>>,
}

impl Sidecore {
    pub(super) fn start(store: Store) -> Self {
        let (commands, inbox) = mpsc::channel();
        let (outbox, answers) = mpsc::channel();
        let thread = std::thread::spawn(move || execute(&inbox, &outbox));
        Self { now: Nanos(1), store, commands: Some(commands), answers, thread: Some(thread) }
    }

    /// Adds a queue of function number `function`, with a guest.
    pub(super) fn serve(&self, function: usize, device: Arc<dyn BlockDevice>, depth: u16) {
        self.command(Command::Serve(function, device, depth));
        assert!(matches!(self.answers.recv(), Ok(Answer::Serving)), "the sidecore died");
    }

    /// Takes a turn, and advances the clock by its cost.
    pub(super) fn turn(&mut self, random: &mut Random) {
        self.command(Command::Turn(self.now));
        let Ok(Answer::Turned(requests)) = self.answers.recv() else { panic!("the sidecore died") };
        let (request, turn) = costs(self.store);
        let cost = requests * request + turn;
        self.now = self.now.after(Nanos(cost - cost / 10 + random.below(cost / 5)));
    }

    pub(super) fn served(&mut self) -> Vec<(usize, u64)> {
        self.command(Command::Report);
        let Ok(Answer::Served(served)) = self.answers.recv() else { panic!("the sidecore died") };
        served
    }

    fn command(&self, command: Command) {
        self.commands.as_ref().expect("it runs").send(command).expect("the sidecore died");
    }
}

impl Drop for Sidecore {
    fn drop(&mut self) {
        drop(self.commands.take());
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_some_and(|ended| ended.is_ok()));
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

fn execute(commands: &Receiver<Command>, answers: &Sender<Answer>) {
    let (_post, mail) = mailbox().expect("a mailbox");
    let mut reactor: Reactor<Sleepless> =
        Reactor::new(CoreContext::default(), Sleepless, mail).expect("a reactor");
    let mut guests: Vec<(usize, SaturatingGuest)> = Vec::new();
    for command in commands {
        let answer = match command {
            Command::Serve(function, device, depth) => {
                let mut guest = SaturatingGuest::new(&*device, depth);
                let channel = device
                    .open_channel(reactor.context(), usize::from(depth) * 4)
                    .expect("a channel");
                let (resources, fresh) = (guest.resources(), RingState::fresh(RingFormat::Split));
                let (mode, signal) = (IdleMode::Poll, EventFd::peer_signal);
                let queue =
                    BlkQueue::new(&guest.device, 0, resources, fresh, channel, mode, signal);
                reactor.add(queue.expect("a queue")).expect("room");
                guest.step();
                guests.push((function, guest));
                Answer::Serving
            }
            Command::Turn(now) => {
                reactor.turn(&mut || now).expect("it does not sleep");
                Answer::Turned(guests.iter_mut().map(|(_, guest)| guest.step()).sum())
            }
            Command::Report => Answer::Served(
                guests.iter().map(|(function, guest)| (*function, guest.served)).collect(),
            ),
        };
        if answers.send(answer).is_err() {
            break;
        }
    }
    // The requests in flight have no owner left.
    std::mem::forget(reactor);
}
