//! A discrete-event simulation of clients and the sidecores that serve them.
//!
//! # Model
//!
//! Clients and sidecores are servers that poll: a server that has work takes a batch of it, is busy
//! for the time that the batch costs, and sends all that the batch yields at its end. A batch costs
//! an amount once for each client in it, an amount for each request and an amount for each byte.
//! Messages between servers take a constant time.
//!
//! A client has threads with a request in flight each; in front of each operation, its core works
//! for the guest. A request goes to the sidecore that polls the client's link, which executes it or
//! hands it to the sidecore that the product's own rule names
//! ([`Assigned`]). A store with a delay is not served by
//! a sidecore meanwhile.
//!
//! Time is an integer and all random numbers are of one seed, so a run has one result everywhere.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use sidecore_remote::export::{Assigned, Load, OwnLoad};

use crate::random::Random;
use crate::work::{Thread, Work};

/// The most messages that a sidecore takes in a poll, as on a sidecore.
pub const BATCH: usize = 32;
/// The parts of the measured time in which the load of sidecores is recorded.
pub const PARTS: usize = 100;

/// Picoseconds: the simulation's time is an integer.
type Time = u64;

fn time(ns: f64) -> Time {
    (ns.max(0.0) * 1e3).round() as Time
}

/// The time of one kind of work, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stage {
    /// Once for each client in a batch.
    pub poll_ns: f64,
    /// For each request.
    pub request_ns: f64,
    /// For each byte.
    pub byte_ns: f64,
}

impl Stage {
    /// The stage of requests of one size that takes `one` nanosecond for a request alone, and
    /// `many` for each of a batch of `count`.
    #[must_use]
    pub fn of_batches([one, many]: [f64; 2], count: f64) -> Self {
        let poll_ns = ((one - many) * count / (count - 1.0)).max(0.0);
        Self { poll_ns, request_ns: (one - poll_ns).max(0.0), byte_ns: 0.0 }
    }

    /// A request of so many bytes, without the poll.
    fn of(&self, bytes: u32) -> f64 {
        self.request_ns + self.byte_ns * f64::from(bytes)
    }

    /// A request of so many bytes in a batch of `count` such requests.
    #[must_use]
    pub fn in_batch(&self, bytes: u32, count: f64) -> f64 {
        self.poll_ns / count + self.of(bytes)
    }
}

/// The times of a request at all servers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Path {
    /// The client sends it, and takes the answer.
    pub client: Stage,
    /// The sidecore that polls the link executes it, and answers.
    pub here: Stage,
    /// The sidecore that polls the link hands it to another one,
    pub forward: Stage,
    /// which executes it;
    pub helper: Stage,
    /// the first one answers.
    pub answer: Stage,
}

/// The times of all requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Costs {
    /// Of reads.
    pub read: Path,
    /// Of writes.
    pub write: Path,
}

impl Costs {
    fn of(&self, request: &Request) -> &Path {
        if request.is_write { &self.write } else { &self.read }
    }
}

/// A client with a disk.
#[derive(Clone, Debug)]
pub struct Client {
    /// The sidecore that polls its link.
    pub home: usize,
    /// The work of each of its threads.
    pub threads: Vec<Work>,
    /// Mean of the guest's own work in front of an operation, exponential; 0 for none.
    pub guest_ns: f64,
    /// Mean time between two requests of a thread that does not wait for answers, exponential; 0
    /// for threads that have one request in flight.
    pub every_ns: f64,
}

/// Clients and sidecores.
#[derive(Clone, Debug)]
pub struct System {
    /// The times of requests.
    pub costs: Costs,
    /// The number of sidecores.
    pub sidecores: usize,
    /// The clients, each with a disk.
    pub clients: Vec<Client>,
    /// From a client to a sidecore, or back.
    pub wire_ns: f64,
    /// From a sidecore to another one.
    pub crossing_ns: f64,
    /// The delay of the store.
    pub store_ns: f64,
    /// The most messages in a poll of a sidecore.
    pub batch: usize,
    /// Changes the time of a sidecore's batch.
    pub spread: fn(&mut Random, f64) -> f64,
}

impl System {
    /// Makes a system without clients and delays, whose batches take the times that they cost.
    #[must_use]
    pub fn new(costs: Costs, sidecores: usize) -> Self {
        Self {
            costs,
            sidecores,
            clients: Vec::new(),
            wire_ns: 0.0,
            crossing_ns: 0.0,
            store_ns: 0.0,
            batch: BATCH,
            spread: |_, ns| ns,
        }
    }
}

/// The results of the measured time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Answered requests.
    pub requests_per_s: f64,
    /// Their data.
    pub bytes_per_s: f64,
    /// Operations of threads, for instance whole files.
    pub operations_per_s: f64,
    /// Mean, from the start of sending to the end of taking the answer.
    pub latency_ns: f64,
    /// The latency that 99 of 100 requests do not exceed.
    pub latency_p99_ns: f64,
    /// The guest's own work, for each request.
    pub guest_ns: f64,
    /// The share of requests that found their sidecore busy.
    pub waited: f64,
    /// The share of requests that another sidecore executed.
    pub handed_over: f64,
    /// The useful share of each sidecore's time.
    pub useful: Vec<f64>,
    /// The same for each part of the time, of all sidecores together.
    pub parts: Vec<f64>,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    client: usize,
    thread: usize,
    is_write: bool,
    bytes: u32,
    sent_at: Time,
    waited: bool,
}

#[derive(Clone, Copy, Debug)]
enum Message {
    /// To a client: a thread begins.
    Begin(usize),
    /// To a client.
    Answer(Request),
    /// To the sidecore that polls the link.
    Ask(Request),
    /// To the sidecore that executes a request, from the one that polls the link.
    Job(Request, usize),
    /// The delay of the store is over; the sidecore that polls the link.
    Due(Request, usize),
    /// To the sidecore that polls the link: another one has executed a request.
    Done(Request, usize),
}

impl Message {
    fn client(&self) -> Option<usize> {
        match self {
            Self::Begin(_) => None,
            Self::Answer(request)
            | Self::Ask(request)
            | Self::Job(request, _)
            | Self::Due(request, _)
            | Self::Done(request, _) => Some(request.client),
        }
    }
}

/// Something that happens to a server.
#[derive(Debug)]
enum Event {
    Arrives(Message),
    BatchEnds,
}

/// An event of a server: clients come first, then sidecores. Events of one time happen in the order
/// of their numbers.
#[derive(Debug)]
struct Scheduled {
    at: Time,
    number: u64,
    server: usize,
    event: Event,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

#[derive(Debug, Default)]
struct Server {
    inbox: VecDeque<Message>,
    is_busy: bool,
    /// Sent when the batch ends: the receiver, the way and the message.
    yields: Vec<(usize, Time, Message)>,
}

struct State {
    threads: Vec<Thread>,
    assigned: Assigned,
}

struct Sidecore {
    here: OwnLoad,
    /// Those of the others.
    loads: Vec<Arc<Load>>,
    /// The numbers of the others.
    order: Vec<usize>,
}

struct Run<'a> {
    system: &'a System,
    random: Random,
    now: Time,
    events: BinaryHeap<Reverse<Scheduled>>,
    numbers: u64,
    servers: Vec<Server>,
    states: Vec<State>,
    sidecores: Vec<Sidecore>,
    tally: Tally,
}

/// Counts of the measured time.
#[derive(Debug, Default)]
struct Tally {
    begin: Time,
    end: Time,
    requests: u64,
    bytes: u64,
    operations: u64,
    latency: u128,
    latencies: Vec<Time>,
    guest: f64,
    waited: u64,
    steered: u64,
    handed_over: u64,
    useful: Vec<Time>,
    parts: Vec<Time>,
}

impl Tally {
    fn measures(&self, now: Time) -> bool {
        (self.begin..self.end).contains(&now)
    }

    /// Adds the time of a sidecore's batch.
    fn add_useful(&mut self, sidecore: usize, from: Time, to: Time) {
        let (mut from, to) = (from.max(self.begin), to.min(self.end));
        let part = ((self.end - self.begin) / PARTS as Time).max(1);
        while from < to {
            let index = ((from - self.begin) / part) as usize;
            let until = (self.begin + (index as Time + 1) * part).min(to);
            self.useful[sidecore] += until - from;
            if let Some(sum) = self.parts.get_mut(index) {
                *sum += until - from;
            }
            from = until;
        }
    }

    /// The latency that 99 of 100 requests do not exceed.
    fn p99(&mut self) -> Time {
        let rank = (self.latencies.len() * 99).div_ceil(100).saturating_sub(1);
        if self.latencies.is_empty() { 0 } else { *self.latencies.select_nth_unstable(rank).1 }
    }

    fn outcome(mut self) -> Outcome {
        let latency_p99_ns = self.p99() as f64 / 1e3;
        let length = (self.end - self.begin) as f64;
        let seconds = length / 1e12;
        let (requests, steered) = (self.requests.max(1) as f64, self.steered.max(1) as f64);
        let part = length / PARTS as f64 * self.useful.len() as f64;
        Outcome {
            requests_per_s: self.requests as f64 / seconds,
            bytes_per_s: self.bytes as f64 / seconds,
            operations_per_s: self.operations as f64 / seconds,
            latency_ns: self.latency as f64 / 1e3 / requests,
            latency_p99_ns,
            guest_ns: self.guest / requests,
            waited: self.waited as f64 / requests,
            handed_over: self.handed_over as f64 / steered,
            useful: self.useful.iter().map(|time| *time as f64 / length).collect(),
            parts: self.parts.iter().map(|time| *time as f64 / part).collect(),
        }
    }
}

/// Runs a system for a time that is not measured and for one that is.
#[must_use]
pub fn run(system: &System, warm_up_ns: f64, measured_ns: f64, seed: u64) -> Outcome {
    let mut run = Run::new(system, seed);
    run.tally.begin = time(warm_up_ns);
    run.tally.end = time(warm_up_ns + measured_ns);
    while run.now < run.tally.end && run.step() {}
    run.tally.outcome()
}

impl<'a> Run<'a> {
    fn new(system: &'a System, seed: u64) -> Self {
        let loads: Vec<Arc<Load>> = (0..system.sidecores).map(|_| Arc::default()).collect();
        let sidecore = |own: usize| {
            let others = (0..system.sidecores).filter(|other| *other != own);
            let order: Vec<usize> = others.collect();
            let others = order.iter().map(|index| Arc::clone(&loads[*index])).collect();
            Sidecore { here: OwnLoad::new(&loads[own]), loads: others, order }
        };
        let states = system.clients.iter().map(|client| State {
            threads: client.threads.iter().map(|work| Thread::new(*work)).collect(),
            assigned: Assigned::default(),
        });
        let servers = system.clients.len() + system.sidecores;
        let tally =
            Tally { useful: vec![0; system.sidecores], parts: vec![0; PARTS], ..Tally::default() };
        let mut run = Self {
            system,
            random: Random::new(seed),
            now: 0,
            events: BinaryHeap::new(),
            numbers: 0,
            servers: (0..servers).map(|_| Server::default()).collect(),
            states: states.collect(),
            sidecores: (0..system.sidecores).map(sidecore).collect(),
            tally,
        };
        for (index, client) in system.clients.iter().enumerate() {
            for thread in 0..client.threads.len() {
                // Clients do not begin all at once.
                let at = match client.every_ns {
                    every_ns if every_ns > 0.0 => run.random.exponential(every_ns),
                    _ => run.random.uniform() * (client.guest_ns + 1e3),
                };
                let at = time(at);
                run.schedule(at, index, Event::Arrives(Message::Begin(thread)));
            }
        }
        run
    }

    fn schedule(&mut self, at: Time, server: usize, event: Event) {
        self.numbers += 1;
        self.events.push(Reverse(Scheduled { at, number: self.numbers, server, event }));
    }

    /// Carries out the next event; false without one.
    fn step(&mut self) -> bool {
        let Some(Reverse(scheduled)) = self.events.pop() else { return false };
        let Scheduled { at, server: index, event, .. } = scheduled;
        self.now = at;
        match event {
            Event::Arrives(mut message) => {
                let server = &mut self.servers[index];
                let is_behind = server.is_busy || !server.inbox.is_empty();
                if let Message::Ask(request) | Message::Job(request, _) = &mut message {
                    request.waited |= is_behind;
                }
                server.inbox.push_back(message);
                if let Message::Begin(_) = message {
                    self.begin_again(index, message);
                }
            }
            Event::BatchEnds => {
                let server = &mut self.servers[index];
                server.is_busy = false;
                for (to, way, message) in std::mem::take(&mut server.yields) {
                    self.schedule(at + way, to, Event::Arrives(message));
                }
            }
        }
        if !self.servers[index].is_busy && !self.servers[index].inbox.is_empty() {
            self.begin(index);
        } else if let Event::BatchEnds = event
            && let Some(sidecore) = index.checked_sub(self.system.clients.len())
        {
            // The next poll finds nothing.
            self.sidecores[sidecore].here.publish();
        }
        true
    }

    /// Schedules the next request of a thread that does not wait for answers.
    fn begin_again(&mut self, index: usize, begin: Message) {
        let every_ns = self.system.clients[index].every_ns;
        if every_ns > 0.0 {
            let at = self.now + time(self.random.exponential(every_ns)).max(1);
            self.schedule(at, index, Event::Arrives(begin));
        }
    }

    /// Has a server take a batch.
    fn begin(&mut self, index: usize) {
        let clients = self.system.clients.len();
        let most = match self.system.clients.get(index) {
            // A guest's threads take turns.
            Some(client) if client.guest_ns > 0.0 => 1,
            _ => self.system.batch,
        };
        let server = &mut self.servers[index];
        server.is_busy = true;
        let count = server.inbox.len().min(most);
        let batch: Vec<Message> = server.inbox.drain(..count).collect();
        let ns = if index < clients {
            self.serve_client(index, &batch)
        } else {
            let ns = self.serve(index - clients, &batch);
            let ns = (self.system.spread)(&mut self.random, ns);
            self.tally.add_useful(index - clients, self.now, self.now + time(ns));
            ns
        };
        self.schedule(self.now + time(ns), index, Event::BatchEnds);
    }

    /// A client takes answers, works for its guest, and sends requests. Returns the time.
    fn serve_client(&mut self, index: usize, batch: &[Message]) -> f64 {
        let (system, client) = (self.system, &self.system.clients[index]);
        let (mut engine_ns, mut guest_ns) = (0.0, 0.0);
        let (mut poll_ns, mut answers, mut begun) = (0.0_f64, Vec::new(), Vec::new());
        for message in batch {
            let thread = match message {
                Message::Begin(thread) => *thread,
                Message::Answer(request) => {
                    let stage = system.costs.of(request).client;
                    engine_ns += stage.of(request.bytes);
                    poll_ns = poll_ns.max(stage.poll_ns);
                    answers.push(*request);
                    request.thread
                }
                _ => continue,
            };
            let is_measured = self.tally.measures(self.now);
            if client.every_ns > 0.0 && matches!(message, Message::Answer(_)) {
                self.tally.operations += u64::from(is_measured);
                continue;
            }
            let thread_state = &mut self.states[index].threads[thread];
            if thread_state.is_between_operations() {
                let worked = self.random.exponential(client.guest_ns);
                guest_ns += worked;
                if is_measured {
                    self.tally.guest += worked;
                    self.tally.operations += u64::from(matches!(message, Message::Answer(_)));
                }
            }
            let (is_write, bytes) = thread_state.next(&mut self.random);
            begun.push(Request {
                client: index,
                thread,
                is_write,
                bytes,
                sent_at: 0,
                waited: false,
            });
        }
        engine_ns += poll_ns;
        let (engine, busy) = (time(engine_ns), time(engine_ns + guest_ns));
        for request in answers {
            if self.tally.measures(self.now) {
                self.tally.requests += 1;
                self.tally.bytes += u64::from(request.bytes);
                self.tally.waited += u64::from(request.waited);
                // The engine's time of this batch stands for sending and for taking.
                let latency = self.now + engine - request.sent_at;
                self.tally.latency += u128::from(latency);
                self.tally.latencies.push(latency);
            }
        }
        let home = system.clients.len() + client.home;
        for mut request in begun {
            request.sent_at = self.now + busy;
            self.yields(index, home, system.wire_ns, Message::Ask(request));
        }
        engine_ns + guest_ns
    }

    fn yields(&mut self, from: usize, to: usize, way_ns: f64, message: Message) {
        self.servers[from].yields.push((to, time(way_ns), message));
    }

    /// A sidecore carries out a batch. Returns the time.
    fn serve(&mut self, own: usize, batch: &[Message]) -> f64 {
        let (mut ns, mut ended) = (0.0, Vec::new());
        let mut polls: Vec<(usize, f64)> = Vec::new();
        // The results of other sidecores are taken before requests are steered.
        let is_done = |message: &&Message| matches!(message, Message::Done(..));
        let (done, asked) = (batch.iter().filter(is_done), batch.iter());
        for message in done.chain(asked.filter(|message| !is_done(message))) {
            let (stage, bytes) = match *message {
                Message::Ask(request) => (self.take(own, request, &mut ended), request.bytes),
                Message::Job(request, home) => (self.execute(own, request, home), request.bytes),
                Message::Due(request, home) => {
                    self.finish(own, request, home);
                    let poll_ns = self.system.costs.of(&request).here.poll_ns;
                    (Stage { poll_ns, ..Stage::default() }, 0)
                }
                Message::Done(request, executor) => {
                    let home = &self.sidecores[own];
                    let place = home.order.iter().position(|index| *index == executor);
                    home.loads[place.unwrap_or_default()].sub(1);
                    self.states[request.client].assigned.ended();
                    self.answer(own, request);
                    (self.system.costs.of(&request).answer, request.bytes)
                }
                Message::Begin(_) | Message::Answer(_) => continue,
            };
            ns += stage.of(bytes);
            let Some(client) = message.client() else { continue };
            match polls.iter_mut().find(|(of, _)| *of == client) {
                Some((_, poll_ns)) => *poll_ns = poll_ns.max(stage.poll_ns),
                None => polls.push((client, stage.poll_ns)),
            }
        }
        let here = &mut self.sidecores[own].here;
        here.publish();
        for client in ended {
            self.states[client].assigned.ended();
            here.sub(1);
        }
        ns + polls.iter().map(|(_, poll_ns)| poll_ns).sum::<f64>()
    }

    /// A sidecore takes a request from its link.
    fn take(&mut self, own: usize, request: Request, ended: &mut Vec<usize>) -> Stage {
        let path = *self.system.costs.of(&request);
        let sidecore = &mut self.sidecores[own];
        let place = self.states[request.client].assigned.next(&sidecore.here, &sidecore.loads);
        self.tally.steered += 1;
        let clients = self.system.clients.len();
        if let Some(other) = place.checked_sub(1) {
            self.tally.handed_over += 1;
            sidecore.loads[other].add(1);
            let to = clients + sidecore.order[other];
            let way_ns = self.system.crossing_ns;
            self.yields(clients + own, to, way_ns, Message::Job(request, own));
            return path.forward;
        }
        if self.system.store_ns > 0.0 {
            sidecore.here.add();
            let due = Message::Due(request, own);
            self.yields(clients + own, clients + own, self.system.store_ns, due);
        } else {
            // In flight until the end of the poll: later requests of it see the load.
            sidecore.here.add();
            ended.push(request.client);
            self.answer(own, request);
        }
        path.here
    }

    /// A sidecore executes a request that another one has taken.
    fn execute(&mut self, own: usize, request: Request, home: usize) -> Stage {
        let clients = self.system.clients.len();
        if self.system.store_ns > 0.0 {
            let due = Message::Due(request, home);
            self.yields(clients + own, clients + own, self.system.store_ns, due);
        } else {
            let done = Message::Done(request, own);
            self.yields(clients + own, clients + home, self.system.crossing_ns, done);
        }
        self.system.costs.of(&request).helper
    }

    /// The store's delay of a request is over.
    fn finish(&mut self, own: usize, request: Request, home: usize) {
        let clients = self.system.clients.len();
        if home == own {
            let sidecore = &mut self.sidecores[own];
            sidecore.here.sub(1);
            self.states[request.client].assigned.ended();
            self.answer(own, request);
        } else {
            let done = Message::Done(request, own);
            self.yields(clients + own, clients + home, self.system.crossing_ns, done);
        }
    }

    fn answer(&mut self, own: usize, request: Request) {
        let from = self.system.clients.len() + own;
        self.yields(from, request.client, self.system.wire_ns, Message::Answer(request));
    }
}

#[cfg(test)]
mod tests;
