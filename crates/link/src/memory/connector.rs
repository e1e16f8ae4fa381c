//! A client's end: connects to the IOhost, again and again.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use sidecore_reactor::{EventFd, MakeSignal};
use sidecore_socket::{Blocking, close_aside, receive, send};

use super::channel::Channel;
use super::layout::{Answer, Ask};
use super::post::{Post, ToLink, ToService};
use super::service::{MemoryOptions, Places, ServiceEnd, wait};
use super::{BROKEN, GONE};
use crate::{LinkError, LinkOptions};

/// The time between two attempts: an IOhost that comes back is found within it.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// The same after a link was lost, when the IOhost or its successor is expected soon.
const SEEK_INTERVAL: Duration = Duration::from_millis(5);
/// The time of the latter.
const SEEK_TIME: Duration = Duration::from_secs(2);
/// The same after a refusal, which only an operator changes.
const REFUSED_INTERVAL: Duration = Duration::from_millis(500);
/// An IOhost that has not answered within this time is asked again.
const PATIENCE: Duration = Duration::from_secs(1);

const SILENT: &str = "the IOhost does not answer";

pub(super) struct Connector {
    event: Arc<EventFd>,
    queues: Vec<Queue>,
    path: PathBuf,
    options: LinkOptions,
    make_signal: MakeSignal,
}

struct Queue {
    post: Arc<Post>,
    places: Places,
    state: State,
    /// The last reason told.
    down: &'static str,
    /// The link was lost not long before this time.
    seeks_until: Option<Instant>,
}

enum State {
    /// The next attempt.
    Idle(Instant),
    /// The IOhost has been asked, and is given up then.
    Asked(OwnedFd, Instant),
    Joined(OwnedFd, u16),
    Ended,
}

impl State {
    fn socket(&self) -> Option<&OwnedFd> {
        match self {
            Self::Asked(socket, _) | Self::Joined(socket, _) => Some(socket),
            Self::Idle(_) | Self::Ended => None,
        }
    }
}

/// Why an attempt failed, and when to make the next one.
struct Failure(&'static str, Duration);

impl From<&'static str> for Failure {
    fn from(reason: &'static str) -> Self {
        Self(reason, RETRY_INTERVAL)
    }
}

impl Connector {
    pub fn new(event: Arc<EventFd>, queues: Vec<ServiceEnd>, options: &MemoryOptions) -> Self {
        let now = Instant::now();
        let queue = |(post, places)| {
            let (state, down, seeks_until) = (State::Idle(now), "", None);
            Queue { post, places, state, down, seeks_until }
        };
        Self {
            event,
            queues: queues.into_iter().map(queue).collect(),
            path: options.path.clone(),
            options: options.link,
            make_signal: options.make_signal,
        }
    }

    /// Serves until all queues have ended.
    pub fn run(mut self) {
        while self.queues.iter().any(|queue| !queue.post.has_ended()) {
            let (Self { queues, path, options, make_signal, .. }, now) =
                (&mut self, Instant::now());
            for queue in queues.iter_mut() {
                queue.read_replies();
                queue.turn(now, path, options, *make_signal);
            }
            self.wait();
        }
        self.queues.iter_mut().for_each(Queue::end);
    }

    fn wait(&self) {
        let times = self.queues.iter().filter_map(|queue| match queue.state {
            State::Idle(at) | State::Asked(_, at) => Some(at),
            State::Joined(..) | State::Ended => None,
        });
        let sockets = self.queues.iter().filter_map(|queue| queue.state.socket());
        let sockets = sockets.map(|socket| socket as &dyn AsFd);
        wait([&*self.event as &dyn AsFd].into_iter().chain(sockets), times.min());
        self.event.drain();
    }
}

impl Queue {
    fn end(&mut self) {
        if let State::Asked(socket, _) | State::Joined(socket, _) =
            std::mem::replace(&mut self.state, State::Ended)
        {
            close_aside(socket);
        }
    }

    fn read_replies(&mut self) {
        for reply in self.post.replies() {
            match reply {
                ToService::Broken(place) => {
                    if matches!(self.state, State::Joined(_, joined) if joined == place) {
                        self.fail(BROKEN.into());
                    }
                }
                ToService::Closed(channel) => {
                    self.post.unwatch(channel.event());
                    let memory = self.places.leave(&channel);
                    self.post.send(ToLink::Memory(memory));
                }
            }
        }
    }

    fn fail(&mut self, Failure(reason, pause): Failure) {
        let now = Instant::now();
        if matches!(self.state, State::Joined(..)) {
            self.seeks_until = now.checked_add(SEEK_TIME);
        }
        let seeks = pause == RETRY_INTERVAL && self.seeks_until.is_some_and(|until| now < until);
        let pause = if seeks { SEEK_INTERVAL } else { pause };
        let next = now.checked_add(pause).map_or(State::Ended, State::Idle);
        if let State::Asked(socket, _) | State::Joined(socket, _) =
            std::mem::replace(&mut self.state, next)
        {
            close_aside(socket);
        }
        if self.down != reason {
            self.down = reason;
            self.post.send(ToLink::Down(reason));
        }
    }

    /// Takes the next step, if it is time for one.
    fn turn(&mut self, now: Instant, path: &PathBuf, options: &LinkOptions, signal: MakeSignal) {
        if self.post.has_ended() {
            return self.end();
        }
        let outcome = match &self.state {
            State::Idle(at) if now >= *at => self.attempt(now, path, options),
            State::Asked(socket, until) => match take_answer(socket) {
                None if now >= *until => Err(SILENT.into()),
                None => Ok(()),
                Some(answer) => self.join(answer, options, signal),
            },
            State::Joined(socket, place) => match look(socket) {
                None => Ok(()),
                Some(reason) => {
                    self.post.send(ToLink::Left(*place));
                    Err(reason.into())
                }
            },
            State::Idle(_) | State::Ended => Ok(()),
        };
        if let Err(failure) = outcome {
            self.fail(failure);
        }
    }

    /// Connects, and asks for a link.
    fn attempt(
        &mut self,
        now: Instant,
        path: &PathBuf,
        options: &LinkOptions,
    ) -> Result<(), Failure> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|_| "this process has no descriptor left")?;
        let address =
            SocketAddrUnix::new(path).map_err(|_| "the path of the socket is too long")?;
        connect(&socket, &address).map_err(|error| match error {
            Errno::NOENT => "there is no socket at the path: start the IOhost, or correct the path",
            Errno::CONNREFUSED => "no IOhost listens at the socket: start it",
            Errno::ACCESS => "this user may not write to the IOhost's socket",
            Errno::AGAIN => "the IOhost's socket has no room for another connection",
            _ => "the path cannot be connected to: it is no IOhost's socket",
        })?;
        match send(&socket, &Ask::of(options).encode(), &[], 0, Blocking::Never) {
            Ok(Ask::BYTES) => {}
            _ => return Err(GONE.into()),
        }
        self.state = now.checked_add(PATIENCE).map_or(State::Ended, |at| State::Asked(socket, at));
        Ok(())
    }

    /// Joins the channel that an IOhost has given.
    fn join(
        &mut self,
        answer: Result<Vec<OwnedFd>, Failure>,
        options: &LinkOptions,
        make_signal: MakeSignal,
    ) -> Result<(), Failure> {
        let fds = answer?;
        let joined = self.channel(&fds, options, make_signal);
        // Descriptors of a peer that need not be what they should be.
        close_aside(fds);
        let index = joined.map_err(|error| {
            tracing::warn!(%error, "cannot join a link");
            match error {
                LinkError::Offer(reason) => Failure(reason, REFUSED_INTERVAL),
                _ => Failure("this process has no memory or no descriptors", REFUSED_INTERVAL),
            }
        })?;
        if let State::Asked(socket, _) = std::mem::replace(&mut self.state, State::Ended) {
            self.state = State::Joined(socket, index);
        }
        self.down = "";
        Ok(())
    }

    fn channel(
        &mut self,
        fds: &[OwnedFd],
        options: &LinkOptions,
        make_signal: MakeSignal,
    ) -> Result<u16, LinkError> {
        let place = self.places.free();
        let place = place.ok_or(LinkError::Offer("frames of former IOhosts are still in use"))?;
        let (channel, memory) = Channel::client(options, fds, place, make_signal)?;
        self.post.watch(channel.event())?;
        let memory = match self.places.join(place, &memory) {
            Ok(memory) => memory,
            Err(error) => {
                self.post.unwatch(channel.event());
                return Err(error);
            }
        };
        self.post.send(ToLink::Joined(Box::new(channel), memory));
        Ok(place.index)
    }
}

/// The IOhost's answer: its descriptors, or why there is no link; `None` if it has not come.
fn take_answer(socket: &OwnedFd) -> Option<Result<Vec<OwnedFd>, Failure>> {
    let (mut bytes, mut fds) = ([0; Answer::BYTES], Vec::new());
    let reason = match receive(socket, &mut bytes, &mut fds, 3, Blocking::Never) {
        Ok(Answer::BYTES) => match Answer::decode(&bytes).check() {
            Ok(()) => return Some(Ok(fds)),
            Err(reason) => Failure(reason, REFUSED_INTERVAL),
        },
        Ok(0) => GONE.into(),
        Ok(_) => Failure("another program answers at the socket", REFUSED_INTERVAL),
        Err(error) if error.would_block() => return None,
        Err(_) => GONE.into(),
    };
    if !fds.is_empty() {
        close_aside(fds);
    }
    Some(Err(reason))
}

/// Why the connection of a joined channel is of no use any more, if it is not.
fn look(socket: &OwnedFd) -> Option<&'static str> {
    use rustix::net::{RecvFlags, recv};
    // Only a look: descriptors that come with a byte are not accepted by it.
    match recv(socket, &mut [0_u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Err(Errno::AGAIN | Errno::INTR) => None,
        Ok((0, _)) | Err(_) => Some(GONE),
        Ok(_) => Some(BROKEN),
    }
}
