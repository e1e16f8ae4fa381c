//! Which stations take several frames as one packet, of which size.
//!
//! A link asks before it sends such packets: a station that does not know them, or a path that does
//! not carry them, does not answer, and gets plain frames. Question and answer are packets of two
//! segments as long as the frames to come, so an answer proves both ways, and the size. Nothing is
//! asked while nothing is to be sent.

use std::hash::{BuildHasher as _, RandomState};

use sidecore_units::Nanos;

use crate::EthernetAddress;

/// Stations that are remembered. The one that was not used for the longest time makes room.
const STATIONS_MAX: usize = 256;
/// An answer is good for so long,
const VALID: Nanos = Nanos::from_millis(900);
/// and another one is asked for after so long.
const RENEWED: Nanos = Nanos::from_millis(300);
/// The time to the second question; doubles up to [`ASKED_MAX`].
const ASKED_MIN: Nanos = Nanos::from_millis(50);
const ASKED_MAX: Nanos = Nanos::from_millis(1600);

/// Bytes of a message between links; zeros follow.
pub(super) const MESSAGE_BYTES: usize = 16;

/// A message between links: the second of two segments, which are alike but for their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub kind: MessageKind,
    /// The asking link's queue, to which the answer goes.
    pub queue: u8,
    /// Chosen by the asking link, and repeated in the answer.
    pub nonce: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageKind {
    Ask,
    Answer,
}

impl Message {
    /// Segment 0 or 1 of the message.
    pub fn encode(&self, segment: u8) -> [u8; MESSAGE_BYTES] {
        let kind = match self.kind {
            MessageKind::Ask => 1,
            MessageKind::Answer => 2,
        };
        let mut bytes = [0; MESSAGE_BYTES];
        let fields = [kind, segment, self.queue, 0, 0, 0, 0, 0].into_iter();
        let fields = fields.chain(self.nonce.to_le_bytes());
        bytes.iter_mut().zip(fields).for_each(|(place, byte)| *place = byte);
        bytes
    }

    /// The message whose second segment begins with these bytes.
    pub fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Option<Self> {
        let [kind, segment, queue, _, _, _, _, _, nonce @ ..] = *bytes;
        let kind = match kind {
            1 => MessageKind::Ask,
            2 => MessageKind::Answer,
            _ => return None,
        };
        (segment == 1).then_some(Self { kind, queue, nonce: u64::from_le_bytes(nonce) })
    }
}

#[derive(Clone, Copy, Debug)]
struct Station {
    address: EthernetAddress,
    used_at: Nanos,
    /// Size of the segments that were asked for last, and when the question may be repeated.
    asked_bytes: u16,
    nonce: u64,
    ask_at: Nanos,
    wait: Nanos,
    /// Size of the segments that were answered last, and when they were asked for.
    proven_bytes: u16,
    proven_at: Nanos,
    asked_at: Nanos,
}

/// The stations that were asked.
#[derive(Debug)]
pub(super) struct Stations {
    stations: Vec<Station>,
    /// The place of the last one.
    last: usize,
    key: RandomState,
    asked: u64,
    queue: u8,
}

/// The answer to whether a packet may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    /// The station takes packets with segments of this size.
    pub is_proven: bool,
    /// The question to be sent now.
    pub question: Option<Message>,
}

impl Stations {
    /// For the queue of this number.
    pub fn new(queue: u8) -> Self {
        let stations = Vec::with_capacity(STATIONS_MAX);
        Self { stations, last: 0, key: RandomState::new(), asked: 0, queue }
    }

    /// Whether packets with segments of this size may be sent to a station.
    pub fn check(&mut self, now: Nanos, to: EthernetAddress, segment_bytes: u16) -> Verdict {
        let place = self.place(now, to);
        self.last = place;
        let (key, asked, queue) = (&self.key, &mut self.asked, self.queue);
        let Some(station) = self.stations.get_mut(place) else {
            return Verdict { is_proven: false, question: None };
        };
        station.used_at = now;
        let is_long_enough = segment_bytes <= station.proven_bytes;
        let age = now.since(station.proven_at);
        let is_proven = is_long_enough && age < VALID;
        // Once the last question is answered, a longer one need not wait.
        let is_longer = segment_bytes > station.asked_bytes && station.wait == Nanos::ZERO;
        let is_wanted = !is_long_enough || age >= RENEWED;
        let may_ask = is_longer || (is_wanted && now >= station.ask_at);
        if !may_ask {
            return Verdict { is_proven, question: None };
        }
        station.wait = if is_longer || is_proven {
            ASKED_MIN
        } else {
            ASKED_MIN.max(station.wait).after(station.wait).min(ASKED_MAX)
        };
        station.ask_at = now.after(station.wait);
        station.asked_bytes = segment_bytes.max(if is_proven { station.proven_bytes } else { 0 });
        station.asked_at = now;
        *asked = asked.wrapping_add(1);
        station.nonce = key.hash_one((*asked, to.0));
        let question = Message { kind: MessageKind::Ask, queue, nonce: station.nonce };
        Verdict { is_proven, question: Some(question) }
    }

    /// Size of the segments of a station's last question.
    pub fn asked_bytes(&self, of: EthernetAddress) -> u16 {
        let station = self.stations.iter().find(|station| station.address == of);
        station.map_or(0, |station| station.asked_bytes)
    }

    /// A station has answered. Answers to other questions than the last one are too late.
    pub fn answered(&mut self, from: EthernetAddress, nonce: u64, segment_bytes: u16) {
        let mut all = self.stations.iter_mut();
        let Some(station) = all.find(|station| station.address == from) else { return };
        if station.nonce == nonce && station.asked_bytes == segment_bytes {
            station.proven_bytes = segment_bytes;
            station.proven_at = station.asked_at;
            station.wait = Nanos::ZERO;
        }
    }

    /// Packets are not sent any more, before the station has answered another question.
    pub fn forget(&mut self, now: Nanos, of: EthernetAddress) {
        if let Some(station) = self.stations.iter_mut().find(|station| station.address == of) {
            station.proven_bytes = 0;
            station.wait = ASKED_MAX;
            station.ask_at = now.after(ASKED_MAX);
        }
    }

    /// The place of a station, which is made if there is none.
    fn place(&mut self, now: Nanos, of: EthernetAddress) -> usize {
        if self.stations.get(self.last).is_some_and(|station| station.address == of) {
            return self.last;
        }
        if let Some(place) = self.stations.iter().position(|station| station.address == of) {
            return place;
        }
        let station = Station {
            address: of,
            used_at: now,
            asked_bytes: 0,
            nonce: 0,
            ask_at: now,
            wait: Nanos::ZERO,
            proven_bytes: 0,
            proven_at: now,
            asked_at: now,
        };
        if self.stations.len() < STATIONS_MAX {
            self.stations.push(station);
            return self.stations.len().saturating_sub(1);
        }
        let all = self.stations.iter_mut().enumerate();
        let oldest = all.min_by_key(|(_, station)| station.used_at);
        oldest.map_or(0, |(place, oldest)| {
            *oldest = station;
            place
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 7]);

    fn at(ms: u64) -> Nanos {
        Nanos::from_millis(ms)
    }

    #[test]
    fn messages_are_read_as_they_were_written_and_only_their_second_segment_counts() {
        for kind in [MessageKind::Ask, MessageKind::Answer] {
            let message = Message { kind, queue: 9, nonce: 0x0123_4567_89ab_cdef };
            assert_eq!(Message::decode(&message.encode(1)), Some(message));
            assert_eq!(Message::decode(&message.encode(0)), None);
        }
        assert_eq!(Message::decode(&[3, 1, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]), None);
    }

    #[test]
    fn a_station_is_proven_by_its_answer_for_a_while_and_up_to_a_size() {
        let mut stations = Stations::new(0);
        let first = stations.check(at(10), PEER, 4178);
        let nonce = first.question.unwrap().nonce;
        assert!(!first.is_proven);
        assert_eq!(stations.check(at(11), PEER, 4178).question, None, "the answer may come");
        stations.answered(PEER, nonce ^ 1, 4178);
        stations.answered(PEER, nonce, 1000);
        stations.answered(EthernetAddress([2, 0, 0, 0, 0, 8]), nonce, 4178);
        assert!(!stations.check(at(12), PEER, 4178).is_proven, "no answer to the question");
        stations.answered(PEER, nonce, 4178);
        assert_eq!(stations.check(at(13), PEER, 4178), Verdict { is_proven: true, question: None });
        assert!(stations.check(at(14), PEER, 2000).is_proven);
        let longer = stations.check(at(15), PEER, 7762);
        assert!(!longer.is_proven && longer.question.is_some());
        assert!(stations.check(at(16), PEER, 4178).is_proven, "shorter ones go on");
        stations.answered(PEER, longer.question.unwrap().nonce, 7762);
        assert!(stations.check(at(17), PEER, 7762).is_proven);
        let later = stations.check(at(400), PEER, 7762);
        assert!(later.is_proven && later.question.is_some(), "it is asked again in time");
        // It has gone.
        assert!(stations.check(at(914), PEER, 7762).is_proven);
        assert!(!stations.check(at(916), PEER, 7762).is_proven);
    }

    #[test]
    fn a_station_that_never_answers_is_asked_rarely() {
        let mut stations = Stations::new(0);
        let questions =
            (0..10_000).filter(|ms| stations.check(at(*ms), PEER, 4178).question.is_some()).count();
        assert!((8..=14).contains(&questions), "{questions} questions in 10 s");
    }

    #[test]
    fn a_station_whose_packets_are_refused_is_forgotten_for_a_while() {
        let mut stations = Stations::new(0);
        let nonce = stations.check(at(0), PEER, 4178).question.unwrap().nonce;
        stations.answered(PEER, nonce, 4178);
        stations.forget(at(1), PEER);
        assert_eq!(stations.check(at(2), PEER, 4178), Verdict { is_proven: false, question: None });
        assert!(stations.check(at(1700), PEER, 4178).question.is_some());
    }

    #[test]
    fn the_table_of_stations_has_an_end() {
        let mut stations = Stations::new(0);
        for number in 0..2000_u16 {
            let [high, low] = number.to_be_bytes();
            let station = EthernetAddress([2, 0, 0, 0, high, low]);
            assert!(stations.check(at(number.into()), station, 4178).question.is_some());
        }
        assert_eq!((stations.stations.len(), stations.stations.capacity()), (256, 256));
    }
}
