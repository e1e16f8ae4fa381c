//! The IOhost's end: accepts clients, and gives each its channel.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use sidecore_reactor::{EventFd, MakeSignal};
use sidecore_socket::{Blocking, SocketFile, close_aside, receive, send};

use super::channel::NewChannel;
use super::complaints::Complaints;
use super::layout::{Answer, Ask, Refusal};
use super::post::{Post, ToLink, ToService};
use super::service::{MemoryOptions, Places, ServiceEnd, wait};
use crate::{LinkError, LinkOptions};

/// A client that has not asked within this time is disconnected.
const PATIENCE: Duration = Duration::from_secs(1);
/// A pause after an accept that failed: the process is out of descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// Connections that have asked for nothing yet.
const ASKING_MAX: usize = 16;

pub(super) struct Listener {
    file: SocketFile,
    socket: OwnedFd,
    event: Arc<EventFd>,
    queues: Vec<Queue>,
    connections: Vec<Connection>,
    options: LinkOptions,
    make_signal: MakeSignal,
    users: Vec<u32>,
    clients_max: usize,
    complaints: Complaints,
    /// No accept before.
    accept_at: Option<Instant>,
}

struct Queue {
    post: Arc<Post>,
    places: Places,
}

struct Connection {
    socket: OwnedFd,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Until then.
    Asking(Instant),
    Joined {
        queue: usize,
        place: u16,
    },
    /// It has broken the rules, and is removed in this turn.
    Broken,
}

impl Listener {
    pub fn new(
        file: SocketFile,
        socket: OwnedFd,
        event: Arc<EventFd>,
        queues: Vec<ServiceEnd>,
        options: &MemoryOptions,
        (users, clients_max): (Vec<u32>, usize),
        complaints: Complaints,
    ) -> Self {
        let queues = queues.into_iter().map(|(post, places)| Queue { post, places }).collect();
        Self {
            file,
            socket,
            event,
            queues,
            connections: Vec::new(),
            options: options.link,
            make_signal: options.make_signal,
            users,
            clients_max,
            complaints,
            accept_at: None,
        }
    }

    /// Serves until all queues have ended.
    pub fn run(mut self) {
        while self.queues.iter().any(|queue| !queue.post.has_ended()) {
            self.turn();
        }
        self.file.remove();
        for connection in self.connections.drain(..) {
            close_aside(connection.socket);
        }
    }

    /// Waits, and handles what has come.
    fn turn(&mut self) {
        let ready = self.wait();
        self.event.drain();
        self.read_replies();
        self.serve(ready.get(2..).unwrap_or_default());
        if ready.get(1) == Some(&true) {
            self.accept();
        }
    }

    /// Waits for an event, a client, and a message of each connection.
    fn wait(&self) -> Vec<bool> {
        let asking = self.connections.iter().filter_map(|connection| match connection.state {
            State::Asking(until) => Some(until),
            State::Joined { .. } | State::Broken => None,
        });
        let until = asking.chain(self.accept_at).min();
        // A second look at the event instead of the listener, if that has to wait.
        let pauses = self.accept_at.is_some_and(|at| at > Instant::now());
        let full = self.asking() >= ASKING_MAX;
        let listener: &dyn AsFd = if pauses || full { &*self.event } else { &self.socket };
        let first = [&*self.event as &dyn AsFd, listener];
        let connections = self.connections.iter().map(|connection| &connection.socket as &dyn AsFd);
        let mut ready = wait(first.into_iter().chain(connections), until);
        if let Some(accept) = ready.get_mut(1) {
            *accept &= !pauses && !full;
        }
        ready
    }

    fn asking(&self) -> usize {
        let asking = |connection: &&Connection| matches!(connection.state, State::Asking(_));
        self.connections.iter().filter(asking).count()
    }

    /// Frees the channels that came back, and notes those that are broken.
    fn read_replies(&mut self) {
        for (index, queue) in self.queues.iter_mut().enumerate() {
            for reply in queue.post.replies() {
                match reply {
                    ToService::Broken(place) => {
                        let state = State::Joined { queue: index, place };
                        let broken = self.connections.iter_mut().find(|one| one.state == state);
                        if let Some(broken) = broken {
                            if let Some(withheld) = self.complaints.count(Instant::now()) {
                                let path = self.file.path().display();
                                let text = "a client broke the rules of the shared memory";
                                tracing::warn!(%path, withheld, "{text}");
                            }
                            // It keeps its index until all that are ready were served.
                            broken.state = State::Broken;
                        }
                    }
                    ToService::Closed(channel) => {
                        queue.post.unwatch(channel.event());
                        let memory = queue.places.leave(&channel);
                        queue.post.send(ToLink::Memory(memory));
                    }
                }
            }
        }
    }

    /// Handles what has come at the connections.
    fn serve(&mut self, ready: &[bool]) {
        let now = Instant::now();
        // In the reverse order, so that a connection that is removed moves no other.
        for index in (0..self.connections.len()).rev() {
            let is_ready = ready.get(index).copied().unwrap_or(false);
            let Some(state) = self.connections.get(index).map(|connection| connection.state) else {
                continue;
            };
            let keep = match state {
                State::Joined { queue, place } if is_ready => {
                    // The end of the client, or a byte that it has no reason to send.
                    if let Some(queue) = self.queues.get(queue) {
                        queue.post.send(ToLink::Left(place));
                    }
                    false
                }
                State::Joined { .. } => true,
                State::Broken => false,
                State::Asking(_) if is_ready => self.answer(index),
                State::Asking(until) => now < until,
            };
            if !keep {
                close_aside(self.connections.remove(index).socket);
            }
        }
    }

    fn accept(&mut self) {
        self.accept_at = None;
        while self.asking() < ASKING_MAX {
            match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => self.admit(socket),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot accept the client of a link");
                    self.accept_at = Instant::now().checked_add(PAUSE);
                    return;
                }
            }
        }
    }

    /// Keeps a connection if its user may have a link.
    fn admit(&mut self, socket: OwnedFd) {
        let user = sockopt::socket_peercred(&socket).map(|credentials| credentials.uid.as_raw());
        if !user.is_ok_and(|user| self.users.contains(&user)) {
            if let Some(withheld) = self.complaints.count(Instant::now()) {
                let (path, user) = (self.file.path().display(), user.unwrap_or(u32::MAX));
                tracing::warn!(%path, user, withheld, "a user that may not have a link");
            }
            refuse(&socket, Refusal::User);
            close_aside(socket);
            return;
        }
        if let Some(until) = Instant::now().checked_add(PATIENCE) {
            self.connections.push(Connection { socket, state: State::Asking(until) });
        }
    }

    /// Answers the request of a connection. False if it gets no link.
    fn answer(&mut self, index: usize) -> bool {
        let Some(socket) = self.connections.get(index).map(|connection| &connection.socket) else {
            return false;
        };
        let (mut bytes, mut fds) = ([0; Ask::BYTES], Vec::new());
        let received = receive(socket, &mut bytes, &mut fds, 0, Blocking::Never);
        if !fds.is_empty() {
            close_aside(fds);
        }
        match received {
            Ok(Ask::BYTES) => {}
            // The first message of a connection comes whole.
            Ok(_) => return false,
            Err(error) => return error.would_block(),
        }
        let joined = Ask::decode(&bytes)
            .options(&self.options)
            .and_then(|options| self.join(index, &options));
        match joined {
            Ok(state) => {
                if let Some(connection) = self.connections.get_mut(index) {
                    connection.state = state;
                }
                true
            }
            Err(refusal) => {
                if let Some(connection) = self.connections.get(index) {
                    refuse(&connection.socket, refusal);
                }
                if let Some(withheld) = self.complaints.count(Instant::now()) {
                    let (path, reason) = (self.file.path().display(), refusal.text());
                    tracing::warn!(%path, reason, withheld, "a client gets no link");
                }
                false
            }
        }
    }

    /// Gives a client a channel, of the queue that has the fewest.
    fn join(&mut self, index: usize, options: &LinkOptions) -> Result<State, Refusal> {
        let Self { connections, queues, clients_max, make_signal, .. } = self;
        let places = connections.iter().filter_map(|connection| match connection.state {
            State::Joined { queue, .. } => Some(queue),
            State::Asking(_) | State::Broken => None,
        });
        let mut clients = vec![0_usize; queues.len()];
        for queue in places {
            if let Some(count) = clients.get_mut(queue) {
                *count = count.saturating_add(1);
            }
        }
        if clients.iter().sum::<usize>() >= *clients_max {
            return Err(Refusal::Clients);
        }
        let open = queues.iter_mut().enumerate().filter(|(_, queue)| !queue.post.has_ended());
        let least = open.min_by_key(|(number, _)| clients.get(*number).copied());
        let (number, queue) = least.ok_or(Refusal::Clients)?;
        let socket = &connections.get(index).ok_or(Refusal::Clients)?.socket;
        let place = queue.give(socket, options, *make_signal)?;
        Ok(State::Joined { queue: number, place })
    }
}

impl Queue {
    /// Makes a channel, and gives it to the client and to the link. Returns its place.
    fn give(
        &mut self,
        socket: &OwnedFd,
        options: &LinkOptions,
        make_signal: MakeSignal,
    ) -> Result<u16, Refusal> {
        let place = self.places.free().ok_or(Refusal::Clients)?;
        let failed = |error: LinkError| {
            tracing::error!(%error, "cannot make a channel for a client");
            Refusal::Memory
        };
        let new = NewChannel::new(options).map_err(failed)?;
        let fds = new.descriptors().map_err(failed)?;
        let (channel, memory) = new.host(place, make_signal).map_err(failed)?;
        self.post.watch(channel.event()).map_err(failed)?;
        let memory = self.places.join(place, &memory).map_err(failed)?;
        let answer = Answer::of(None).encode();
        // The first message of a connection fits into any socket's buffer.
        let sent = send(socket, &answer, &fds, fds.len(), Blocking::Never);
        if !matches!(sent, Ok(Answer::BYTES)) {
            self.post.unwatch(channel.event());
            self.places.leave(&channel);
            return Err(Refusal::Memory);
        }
        self.post.send(ToLink::Joined(Box::new(channel), memory));
        Ok(place.index)
    }
}

/// Tells a client why it gets no link, if its socket takes the message.
fn refuse(socket: &OwnedFd, refusal: Refusal) {
    let answer = Answer::of(Some(refusal)).encode();
    let _ = send(socket, &answer, &[], 0, Blocking::Never);
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use sidecore_socket::Access;

    use super::super::MemoryEnd;
    use super::*;

    /// A listener with joined clients at the places 0, 1 and 2, and their ends.
    fn listener(directory: &std::path::Path) -> (Listener, Arc<Post>, [UnixStream; 3]) {
        let path = directory.join("link.sock");
        let (file, socket) =
            SocketFile::listen(&path, Access { mode: Access::OWNER_ONLY, ..Access::default() }, 1)
                .unwrap();
        let event = Arc::new(EventFd::new().unwrap());
        let link = LinkOptions { receive_frames: 4, transmit_frames: 4, ..LinkOptions::new(82) };
        let post = Arc::new(Post::new(Arc::clone(&event)).unwrap());
        let queues = vec![(Arc::clone(&post), Places::new(&link, 3).unwrap())];
        let end = MemoryEnd::Listen { users: Vec::new(), clients: 3 };
        let options = MemoryOptions { path, end, link, make_signal: EventFd::peer_signal };
        let complaints = Complaints::new(Arc::default());
        let mut listener =
            Listener::new(file, socket, event, queues, &options, (Vec::new(), 3), complaints);
        let clients = [0, 1, 2].map(|place| {
            let (client, own) = UnixStream::pair().unwrap();
            let state = State::Joined { queue: 0, place };
            listener.connections.push(Connection { socket: own.into(), state });
            client
        });
        (listener, post, clients)
    }

    #[test]
    fn a_client_that_breaks_the_rules_and_leaves_takes_no_other_with_it() {
        let directory = tempfile::tempdir().unwrap();
        for broken in 0..3_u16 {
            let (mut listener, post, clients) = listener(directory.path());
            let [first, second, third] = clients;
            let mut others = vec![first, second, third];
            drop(others.remove(usize::from(broken)));
            post.reply(&mut vec![ToService::Broken(broken)]);
            listener.turn();
            let joined = |connection: &Connection| match connection.state {
                State::Joined { place, .. } => Some(place),
                State::Asking(_) | State::Broken => None,
            };
            let left: Vec<_> = listener.connections.iter().filter_map(joined).collect();
            let expected: Vec<_> = (0..3).filter(|place| *place != broken).collect();
            assert_eq!(left, expected, "{broken} has broken the rules");
            listener.file.remove();
        }
    }
}
