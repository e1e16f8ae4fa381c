//! The requests of a recorded conversation, by which a player knows those of another client.

use std::collections::{BTreeMap, BTreeSet};

use sidecore_units::Nanos;

use super::format::{Conversation, Line};
use super::frame::*;
use crate::common::HOP;

/// A request, as far as its client's slots, sequences and attempts do not matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The number of the session, from 0.
    session: usize,
    device: u64,
    /// Virtio's type.
    pub kind: u64,
    sector: u64,
    len: u64,
    /// FUA and REPLAY.
    flags: u64,
}

impl Identity {
    pub fn of(session: usize, frame: &[u8]) -> Self {
        let [device, kind, sector, len] =
            [DEVICE_NUMBER, TYPE, SECTOR, LEN].map(|field| get(frame, field));
        Self { session, device, kind, sector, len, flags: get(frame, FLAGS) & !FLAG_ASK }
    }
}

#[derive(Debug)]
pub struct Recorded {
    pub identity: Identity,
    /// The payloads of the client's frames, by their offset.
    pub sent: BTreeMap<u64, Vec<u8>>,
    /// The frames that were lost on their way to the IOhost: attempt and offset.
    pub lost: BTreeSet<(u64, u64)>,
    /// When the request was complete at the IOhost.
    complete_at: Nanos,
    /// The ANSWERs by their offset, and whether the first one was lost.
    pub answers: BTreeMap<u64, (Vec<u8>, bool)>,
    /// The first BUSY of each state.
    pub busy: BTreeMap<u64, Vec<u8>>,
    /// From the complete request to the BUSY that the store has it, and to the answer, as they were
    /// sent.
    pub busy_after: Nanos,
    pub answered_after: Option<Nanos>,
    pub is_used: bool,
}

impl Recorded {
    fn new(session: usize, frame: &[u8]) -> Self {
        Self {
            identity: Identity::of(session, frame),
            sent: BTreeMap::new(),
            lost: BTreeSet::new(),
            complete_at: Nanos::ZERO,
            answers: BTreeMap::new(),
            busy: BTreeMap::new(),
            busy_after: Nanos::ZERO,
            answered_after: None,
            is_used: false,
        }
    }

    fn request(&mut self, time: Nanos, is_lost: bool, frame: &[u8]) {
        let (offset, payload) = (get(frame, OFFSET), payload(frame));
        if !payload.is_empty() || self.identity.kind == TYPE_READ {
            self.sent.insert(offset, payload.to_vec());
        }
        if is_lost {
            self.lost.insert((get(frame, ATTEMPT), offset));
        } else if !self.busy.contains_key(&EXECUTING) && self.answers.is_empty() {
            self.complete_at = time;
        }
    }

    fn answer(&mut self, time: Nanos, is_lost: bool, frame: &[u8]) {
        // The frame was sent a hop before it arrived.
        let after = time.since(self.complete_at.after(HOP));
        if kind(frame) == BUSY {
            let state = get(frame, STATE);
            if state == EXECUTING && !self.busy.contains_key(&state) {
                self.busy_after = after;
            }
            self.busy.entry(state).or_insert_with(|| frame.to_vec());
            return;
        }
        self.answered_after.get_or_insert(after);
        let answer = self.answers.entry(get(frame, OFFSET));
        answer.or_insert_with(|| (frame.to_vec(), is_lost));
    }
}

/// All requests, in their order.
pub fn requests(conversation: &Conversation) -> Vec<Recorded> {
    let mut sessions = Vec::new();
    let mut names: BTreeMap<(u64, u64, u64), usize> = BTreeMap::new();
    let mut requests: Vec<Recorded> = Vec::new();
    for (time, line) in conversation {
        let Line::Frame { of_client, is_lost, frame } = line else { continue };
        if kind(frame) == WELCOME && !sessions.contains(&get(frame, WELCOME_SESSION)) {
            sessions.push(get(frame, WELCOME_SESSION));
        }
        for frame in &parts(frame) {
            if !matches!(kind(frame), REQUEST | ANSWER | BUSY) {
                continue;
            }
            let name = (get(frame, SESSION), get(frame, SLOT), get(frame, SEQUENCE));
            let session = sessions.iter().position(|session| *session == name.0);
            let index = *names.entry(name).or_insert_with(|| {
                requests.push(Recorded::new(session.expect("a session has begun"), frame));
                requests.len() - 1
            });
            if *of_client {
                requests[index].request(*time, *is_lost, frame);
            } else {
                requests[index].answer(*time, *is_lost, frame);
            }
        }
    }
    requests
}
