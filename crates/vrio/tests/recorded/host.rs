//! Plays the IOhost of a recorded conversation to a client of this version.

use std::collections::BTreeSet;

use sidecore_units::Nanos;
use sidecore_vrio::{ClientOptions, Event as Change};

use super::format::{Conversation, Event, Line, outcome};
use super::frame::*;
use super::recorder::{rig, submit};
use super::requests::{Identity, Recorded, requests};
use crate::common::{HOP, Rig};

/// The client has so long for its requests.
const PATIENCE: Nanos = Nanos::from_millis(10_000);

/// A recorded frame that is no answer to a request: the IOhost's events before it, and the frame.
type Said = (usize, Vec<u8>);

/// A request of the client.
struct Active {
    recorded: usize,
    /// Slot and sequence as the client has chosen them.
    name: (u64, u64),
    attempt: u64,
    /// Offsets of the payloads that have arrived.
    arrived: BTreeSet<u64>,
    /// Its answers were sent once.
    is_answered: bool,
    is_complete: bool,
}

/// The recorded IOhost.
struct Player<'a> {
    conversation: &'a Conversation,
    requests: Vec<Recorded>,
    said: Vec<Said>,
    /// The IOhost's events that have happened.
    events: usize,
    /// The session's name, if there is one, and its number from 0.
    session: Option<u64>,
    sessions: usize,
    has_bundles: bool,
    /// The slots that may be used, and the version of the list of devices.
    terms: (u64, u64),
    sent: u64,
    received: u64,
    active: Vec<Active>,
    /// When a request, by its recorded one, is due a BUSY or its answers.
    queued: Vec<(Nanos, usize, u8)>,
    to_client: Vec<Vec<u8>>,
}

/// Whether something happens at the IOhost.
fn is_of_host(event: &Event) -> bool {
    matches!(event, Event::Limit(_) | Event::Grow(_) | Event::Restart)
}

/// Whether a request ends.
fn is_done(line: &Line) -> bool {
    matches!(line, Line::Event(Event::Done { .. }))
}

/// A client of this version that has talked to the recorded IOhost: its rig, and how its requests
/// ended.
pub struct Served {
    pub rig: Rig,
    pub done: Vec<Event>,
    /// Requests that the recorded IOhost has answered, and that this client has not made.
    pub missing: Vec<Identity>,
}

/// Has a client of this version do what the recorded one did, and answers it with the frames of the
/// recorded IOhost.
pub fn play(conversation: &Conversation) -> Served {
    let rig = rig(ClientOptions { life: 0x9999_8888_7777_6666, ..ClientOptions::default() });
    let mut served = Served { rig, done: Vec::new(), missing: Vec::new() };
    let mut player = Player::new(conversation);
    let end = conversation.last().expect("a conversation has lines").0;
    let mut lines = conversation.iter().peekable();
    // Ends of requests that the lines so far tell of.
    let mut passed = 0;
    while served.rig.now < end.after(PATIENCE) {
        served.rig.poll_client();
        served.rig.now = served.rig.now.after(HOP);
        let now = served.rig.now;
        let arriving = std::mem::take(&mut player.to_client);
        for frame in std::mem::take(&mut served.rig.to_host.frames) {
            player.receive(now, &frame);
        }
        player.poll(now);
        for frame in arriving {
            served.rig.client_receives(&frame);
        }
        served.note_events(conversation);
        // Requests follow the ends of others as they did then.
        while let Some((_, line)) = lines
            .next_if(|(time, line)| *time <= now && (!is_done(line) || served.done.len() > passed))
        {
            passed += usize::from(is_done(line));
            match line {
                Line::Event(Event::Submit { tag, device, request }) => {
                    submit(&mut served.rig, *tag, *device, *request);
                }
                Line::Event(event) if is_of_host(event) => player.happen(event),
                _ => {}
            }
        }
        if lines.peek().is_none() {
            let requests = player.requests.into_iter();
            let missing = requests.filter(|it| !it.is_used && !it.answers.is_empty());
            served.missing = missing.map(|it| it.identity).collect();
            return served;
        }
    }
    panic!("the client does not end its requests; next is {:?}", lines.peek());
}

impl Served {
    fn note_events(&mut self, conversation: &Conversation) {
        while let Some(change) = self.rig.client.next_event() {
            let Change::Completed { tag, result } = change else { continue };
            let len = conversation.iter().find_map(|(_, line)| match line {
                Line::Event(Event::Done { tag: it, data, .. }) if *it == tag => Some(data.len()),
                _ => None,
            });
            let data = self.rig.guest.bytes(tag)[..len.expect("a request is known")].to_vec();
            self.done.push(Event::Done { tag, outcome: outcome(result).to_owned(), data });
        }
    }
}

impl<'a> Player<'a> {
    fn new(conversation: &'a Conversation) -> Self {
        let (mut events, mut said) = (0, Vec::new());
        for (_, line) in conversation {
            match line {
                Line::Event(event) if is_of_host(event) => events += 1,
                Line::Frame { of_client: false, frame, .. } => said.push((events, frame.clone())),
                _ => {}
            }
        }
        Self {
            conversation,
            requests: requests(conversation),
            said,
            events: 0,
            session: None,
            sessions: 0,
            has_bundles: false,
            terms: (0, 0),
            sent: 0,
            received: 0,
            active: Vec::new(),
            queued: Vec::new(),
            to_client: Vec::new(),
        }
    }

    /// The recorded frame of this kind for which `is_it` holds, from as many events ago as can be.
    fn recorded(&self, wanted: u8, is_it: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        let mut frames =
            self.said.iter().filter(|(_, frame)| kind(frame) == wanted && is_it(frame));
        let newest = frames.clone().rfind(|(events, _)| *events <= self.events);
        let found = newest.or_else(|| frames.next());
        found.unwrap_or_else(|| panic!("no frame of kind {wanted} was recorded")).1.clone()
    }

    /// Sends a frame of the session.
    fn send(&mut self, mut frame: Vec<u8>) {
        self.sent += 1;
        let terms = match kind(&frame) {
            PONG => Some([PONG_LIMIT, PONG_VERSION]),
            ANSWER | BUSY => Some([ANSWER_LIMIT, ANSWER_VERSION]),
            _ => None,
        };
        if let Some([limit, version]) = terms {
            set(&mut frame, limit, self.terms.0);
            set(&mut frame, version, self.terms.1);
        }
        set(&mut frame, SESSION, self.session.expect("a session"));
        set(&mut frame, COUNTER, self.sent);
        self.to_client.push(frame);
    }

    /// Something has happened to the IOhost, as it did then.
    fn happen(&mut self, event: &Event) {
        self.events += 1;
        if *event == Event::Restart {
            self.session = None;
            self.active.clear();
            self.queued.clear();
            return;
        }
        // The client is told by a PONG that answers no PING.
        let events = self.events;
        let pushed: Vec<_> = self
            .said
            .iter()
            .filter(|(at, frame)| *at == events && kind(frame) == PONG && get(frame, SENT_AT) == 0)
            .map(|(_, frame)| frame.clone())
            .collect();
        for frame in pushed {
            self.terms = (get(&frame, PONG_LIMIT), get(&frame, PONG_VERSION));
            self.send(frame);
        }
    }

    fn receive(&mut self, now: Nanos, frame: &[u8]) {
        if kind(frame) == HELLO {
            self.hello(frame);
            return;
        }
        let named = get(frame, SESSION);
        if self.session != Some(named) {
            let mut ending = self.recorded(ENDING, |_| true);
            set(&mut ending, SESSION, named);
            self.to_client.push(ending);
            return;
        }
        let counter = get(frame, COUNTER);
        assert!(counter > self.received, "counters rise: {counter}");
        self.received = counter;
        match kind(frame) {
            REQUEST => self.request(now, frame),
            BUNDLE if self.has_bundles => {
                parts(frame).iter().for_each(|frame| self.request(now, frame));
            }
            LIST => {
                let index = get(frame, INDEX);
                let entry = self.recorded(DEVICE, |entry| get(entry, ENTRY_INDEX) == index);
                self.send(entry);
            }
            ATTACH => {
                let name = &frame[ATTACH_NAME];
                let entry = self.recorded(ATTACHED, |entry| entry[ENTRY_NAME] == *name);
                self.send(entry);
            }
            PING => self.pong(frame),
            ENDING => self.session = None,
            other => panic!("the recorded IOhost knows no frames of kind {other} of clients"),
        }
    }

    /// Answers a PING with the PONG of that size.
    fn pong(&mut self, ping: &[u8]) {
        let size = get(ping, PAYLOAD);
        let mut pong =
            self.recorded(PONG, |pong| get(pong, SENT_AT) != 0 && get(pong, PAYLOAD) == size);
        set(&mut pong, SENT_AT, get(ping, SENT_AT));
        self.send(pong);
    }

    fn hello(&mut self, frame: &[u8]) {
        let recorded = self.conversation.iter().find_map(|(_, line)| match line {
            Line::Frame { of_client: true, frame, .. } if kind(frame) == HELLO => Some(frame),
            _ => None,
        });
        let recorded = recorded.expect("a conversation begins with a HELLO");
        for field in [HANDSHAKE, MESSAGE_BYTES, HELLO_FRAME_BYTES] {
            assert_eq!(get(frame, field), get(recorded, field));
        }
        assert_eq!(frame[HELLO_CLIENT], recorded[HELLO_CLIENT]);
        assert_eq!(frame.len(), get(frame, HELLO_FRAME_BYTES) as usize, "it is padded");
        assert!((get(frame, HELLO_VERSION_MIN)..=get(frame, HELLO_VERSION_MAX)).contains(&1));
        let (life, number) = (get(frame, LIFE), get(frame, NUMBER));
        let named = MESSAGE_LIFE[0];
        assert_eq!((life, number), (get(frame, named), get(frame, MESSAGE_NUMBER[0])));
        let is_welcome = get(frame, COOKIE) != 0;
        let mut answer = if is_welcome {
            assert_eq!(get(frame, COOKIE), get(frame, HELLO_COOKIE));
            self.begin(get(frame, HELLO_FEATURES))
        } else {
            self.recorded(CHALLENGE, |_| true)
        };
        set(&mut answer, LIFE, life);
        set(&mut answer, NUMBER, number);
        if is_welcome {
            set(&mut answer, MESSAGE_LIFE[1], life);
            set(&mut answer, MESSAGE_NUMBER[1], number);
        }
        self.to_client.push(answer);
    }

    /// Begins the next session, and returns its WELCOME.
    fn begin(&mut self, features: u64) -> Vec<u8> {
        let welcomes = self.said.iter().filter(|(_, frame)| kind(frame) == WELCOME);
        let welcome = welcomes.map(|(_, frame)| frame.clone()).nth(self.sessions);
        let welcome = welcome.expect("the recorded client had as many sessions");
        // A client keeps the features of its last version.
        assert_eq!(get(&welcome, WELCOME_FEATURES) & !features, 0);
        self.session = Some(get(&welcome, WELCOME_SESSION));
        self.sessions += 1;
        self.has_bundles = get(&welcome, WELCOME_FEATURES) & 1 != 0;
        (self.sent, self.received) = (0, 0);
        self.terms = (get(&welcome, WELCOME_LIMIT), get(&welcome, WELCOME_LIST));
        welcome
    }

    fn request(&mut self, now: Nanos, frame: &[u8]) {
        let name = (get(frame, SLOT), get(frame, SEQUENCE));
        let known = self.active.iter().position(|active| active.name == name);
        let index = known.unwrap_or_else(|| self.activate(name, frame));
        let active = &mut self.active[index];
        let recorded = &mut self.requests[active.recorded];
        let (attempt, offset) = (get(frame, ATTEMPT), get(frame, OFFSET));
        let payload = payload(frame);
        let carries = !payload.is_empty() || recorded.identity.kind == TYPE_READ;
        if carries {
            let sent = recorded.sent.get(&offset);
            assert_eq!(sent.map(Vec::as_slice), Some(payload), "the segment at {offset}");
        }
        if carries && recorded.lost.remove(&(attempt, offset)) {
            return;
        }
        active.attempt = active.attempt.max(attempt);
        if carries {
            active.arrived.insert(offset);
        }
        let is_new = !active.is_complete;
        active.is_complete = active.arrived.len() == recorded.sent.len();
        let asks = get(frame, FLAGS) & FLAG_ASK != 0;
        match (active.is_complete, active.is_answered) {
            (true, true) => self.answer(index, get(frame, SEGMENTS)),
            (true, false) if is_new => self.queue(now, index),
            (true, false) => self.busy(index, EXECUTING),
            (false, _) if asks => self.busy(index, ASSEMBLING),
            (false, _) => {}
        }
    }

    /// The recorded request that this one of the client is.
    fn activate(&mut self, name: (u64, u64), frame: &[u8]) -> usize {
        let identity = Identity::of(self.sessions - 1, frame);
        let recorded = self.requests.iter().position(|it| !it.is_used && it.identity == identity);
        let recorded = recorded.unwrap_or_else(|| panic!("no such request: {identity:?}"));
        self.requests[recorded].is_used = true;
        // The slot's last request was answered.
        self.active.retain(|active| active.name.0 != name.0);
        let (attempt, arrived) = (0, BTreeSet::new());
        let (is_answered, is_complete) = (false, false);
        self.active.push(Active { recorded, name, attempt, arrived, is_answered, is_complete });
        self.active.len() - 1
    }

    /// Plans the frames that follow a complete request.
    fn queue(&mut self, now: Nanos, index: usize) {
        let recorded = self.active[index].recorded;
        let it = &self.requests[recorded];
        if it.busy.contains_key(&EXECUTING) {
            self.queued.push((now.after(it.busy_after), recorded, BUSY));
        }
        let answered_after = it.answered_after.expect("each request was answered");
        self.queued.push((now.after(answered_after), recorded, ANSWER));
    }

    /// Sends what is due.
    fn poll(&mut self, now: Nanos) {
        let due: Vec<_> = self.queued.extract_if(.., |(at, ..)| *at <= now).collect();
        for (_, recorded, what) in due {
            let Some(index) = self.active.iter().position(|it| it.recorded == recorded) else {
                continue;
            };
            if what == BUSY {
                self.busy(index, EXECUTING);
            } else {
                self.answer(index, u64::MAX);
                self.active[index].is_answered = true;
            }
        }
    }

    /// A recorded frame, for a request as the client has named it.
    fn named(&self, index: usize, frame: &[u8]) -> Vec<u8> {
        let active = &self.active[index];
        let mut frame = frame.to_vec();
        set(&mut frame, SLOT, active.name.0);
        set(&mut frame, SEQUENCE, active.name.1);
        set(&mut frame, ATTEMPT, active.attempt);
        frame
    }

    fn busy(&mut self, index: usize, state: u64) {
        let active = &self.active[index];
        let recorded = &self.requests[active.recorded];
        let busy = recorded.busy.get(&state);
        let Some(frame) = busy else {
            panic!("the recorded client did not ask for this: {:?}", recorded.identity)
        };
        let mut frame = self.named(index, frame);
        if state == ASSEMBLING {
            let offsets = recorded.sent.keys().enumerate();
            let missing = offsets.filter(|(_, offset)| !active.arrived.contains(offset));
            set(&mut frame, SEGMENTS, missing.map(|(bit, _)| 1 << bit).sum());
        }
        self.send(frame);
    }

    /// Sends the answers of a request, of a read those for the segments that are wanted.
    fn answer(&mut self, index: usize, wanted: u64) {
        let recorded = &mut self.requests[self.active[index].recorded];
        let is_read = recorded.identity.kind == TYPE_READ;
        let mut frames = Vec::new();
        for (bit, (frame, is_lost)) in recorded.answers.values_mut().enumerate() {
            let is_wanted = !is_read || wanted & 1 << bit != 0;
            if is_wanted && !std::mem::take(is_lost) {
                frames.push(frame.clone());
            }
        }
        for frame in frames {
            let frame = self.named(index, &frame);
            self.send(frame);
        }
    }
}
