//! The meaning of an IOhost's frames, without their order, their counters, and the names that an
//! IOhost chooses.

use std::collections::{BTreeMap, BTreeSet};

use super::frame::*;

/// The name of a request: the session's number, the device, the slot and the sequence.
type Name = (u64, u64, u64, u64);
/// Features, frame size, slots, slots that may be used, version.
type Terms = (u64, u64, u64, u64, u64);

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// By the session's number.
    pub welcomes: BTreeMap<u64, Terms>,
    /// Each entry of a list and each attached device, without the list's version.
    pub entries: BTreeSet<(u64, u8, Vec<u8>)>,
    /// The status of each request, and its data by their offset.
    pub answers: BTreeMap<Name, (u64, BTreeMap<u64, Vec<u8>>)>,
    /// The state that each BUSY names.
    pub busy: BTreeSet<(Name, u64)>,
    /// PONGs: `sent_at` and size.
    pub pongs: BTreeSet<(u64, u64, u64)>,
    pub slot_limits: BTreeSet<u64>,
    pub endings: BTreeSet<u64>,
}

impl Said {
    pub fn by<'a>(frames: impl IntoIterator<Item = &'a Vec<u8>>) -> Self {
        let mut said = Self::default();
        let mut numbers = BTreeMap::new();
        for frame in frames {
            if kind(frame) == WELCOME {
                numbers.insert(get(frame, WELCOME_SESSION), get(frame, NUMBER));
            }
            let number = numbers.get(&get(frame, SESSION)).copied().unwrap_or(0);
            parts(frame).iter().for_each(|frame| said.add(number, frame));
        }
        said
    }

    fn add(&mut self, number: u64, frame: &[u8]) {
        let name = || {
            let [device, slot, sequence] =
                [DEVICE_NUMBER, SLOT, SEQUENCE].map(|field| get(frame, field));
            (number, device, slot, sequence)
        };
        match kind(frame) {
            CHALLENGE => {}
            WELCOME => {
                let [features, bytes, slots, limit, version] = [
                    WELCOME_FEATURES,
                    WELCOME_FRAME_BYTES,
                    WELCOME_SLOTS,
                    WELCOME_LIMIT,
                    WELCOME_VERSION,
                ]
                .map(|field| get(frame, field));
                let terms = (features, bytes, slots, limit, version);
                self.welcomes.insert(get(frame, NUMBER), terms);
            }
            kind @ (DEVICE | ATTACHED) => {
                let mut entry = frame.to_vec();
                set(&mut entry, ENTRY_VERSION, 0);
                self.entries.insert((number, kind, entry[ENTRY].to_vec()));
            }
            ANSWER => {
                self.slot_limits.insert(get(frame, ANSWER_LIMIT));
                let status = get(frame, STATUS);
                let answer = self.answers.entry(name()).or_insert((status, BTreeMap::new()));
                assert_eq!(answer.0, status, "answers of one request differ");
                answer.1.insert(get(frame, OFFSET), payload(frame).to_vec());
            }
            BUSY => {
                self.slot_limits.insert(get(frame, ANSWER_LIMIT));
                self.busy.insert((name(), get(frame, STATE)));
            }
            PONG => {
                self.slot_limits.insert(get(frame, PONG_LIMIT));
                self.pongs.insert((number, get(frame, SENT_AT), get(frame, PAYLOAD)));
            }
            ENDING => {
                self.endings.insert(get(frame, CODE));
            }
            other => panic!("an IOhost sends no frames of kind {other}"),
        }
    }
}
