//! Frames as docs/vrio.md has them, by literal offsets: the engine's own codec would follow a
//! change of the format, and hide it.

pub const REQUEST: u8 = 1;
pub const ANSWER: u8 = 2;
pub const BUSY: u8 = 3;
pub const HELLO: u8 = 4;
pub const CHALLENGE: u8 = 5;
pub const WELCOME: u8 = 6;
pub const LIST: u8 = 7;
pub const DEVICE: u8 = 8;
pub const ATTACH: u8 = 9;
pub const ATTACHED: u8 = 10;
pub const PING: u8 = 11;
pub const PONG: u8 = 12;
pub const ENDING: u8 = 13;
pub const BUNDLE: u8 = 14;

/// A little-endian number: its offset in the frame, and its size.
#[derive(Clone, Copy)]
pub struct Field(usize, usize);

pub const SESSION: Field = Field(2, 8);
pub const COUNTER: Field = Field(10, 8);
pub const INCARNATION: Field = Field(18, 8);
pub const PAYLOAD: Field = Field(28, 2);

// Of requests, answers and BUSYs. Payloads begin at 82.
pub const DATA: usize = 82;
pub const DEVICE_NUMBER: Field = Field(30, 2);
pub const SLOT: Field = Field(32, 2);
pub const SEQUENCE: Field = Field(42, 4);
pub const ATTEMPT: Field = Field(46, 2);
pub const FLAGS: Field = Field(48, 2);
pub const OFFSET: Field = Field(50, 4);
pub const LEN: Field = Field(54, 4);
/// The segments that are wanted, or missing.
pub const SEGMENTS: Field = Field(58, 8);
pub const TYPE: Field = Field(66, 4);
pub const SECTOR: Field = Field(74, 8);
pub const STATUS: Field = Field(66, 1);
pub const STATE: Field = Field(67, 1);
pub const ANSWER_LIMIT: Field = Field(68, 2);
pub const ANSWER_VERSION: Field = Field(74, 4);

pub const FLAG_ASK: u64 = 2;
pub const ASSEMBLING: u64 = 1;
pub const EXECUTING: u64 = 2;
pub const TYPE_READ: u64 = 0;

// The clear part of HELLO, CHALLENGE and WELCOME, and their messages from 70 on.
pub const LIFE: Field = Field(30, 8);
pub const NUMBER: Field = Field(38, 8);
pub const CHALLENGED: Field = Field(46, 8);
pub const COOKIE: Field = Field(54, 8);
pub const HANDSHAKE: Field = Field(62, 1);
pub const MESSAGE_BYTES: Field = Field(64, 2);
pub const HELLO_CLIENT: std::ops::Range<usize> = 70..86;
pub const HELLO_FEATURES: Field = Field(102, 8);
pub const HELLO_FRAME_BYTES: Field = Field(110, 4);
pub const HELLO_VERSION_MIN: Field = Field(121, 1);
pub const HELLO_VERSION_MAX: Field = Field(122, 1);
pub const HELLO_COOKIE: Field = Field(126, 8);
/// As in the clear part, in the messages of both.
pub const MESSAGE_LIFE: [Field; 2] = [Field(86, 8), Field(70, 8)];
pub const MESSAGE_NUMBER: [Field; 2] = [Field(94, 8), Field(78, 8)];
pub const WELCOME_SESSION: Field = Field(86, 8);
pub const WELCOME_INCARNATION: Field = Field(94, 8);
pub const WELCOME_FEATURES: Field = Field(102, 8);
pub const WELCOME_FRAME_BYTES: Field = Field(110, 4);
pub const WELCOME_LIST: Field = Field(114, 4);
pub const WELCOME_SLOTS: Field = Field(118, 2);
pub const WELCOME_LIMIT: Field = Field(120, 2);
pub const WELCOME_VERSION: Field = Field(122, 1);

// Of control frames of a session, whose payload begins at 30.
pub const INDEX: Field = Field(30, 2);
pub const ENTRY_INDEX: Field = Field(32, 2);
pub const ENTRY_VERSION: Field = Field(38, 4);
pub const ATTACH_NAME: std::ops::Range<usize> = 30..94;
pub const ENTRY_NAME: std::ops::Range<usize> = 70..134;
pub const ENTRY: std::ops::Range<usize> = 30..166;
pub const SENT_AT: Field = Field(30, 8);
pub const PONG_VERSION: Field = Field(42, 4);
pub const PONG_LIMIT: Field = Field(46, 2);
pub const CODE: Field = Field(46, 2);

pub fn kind(frame: &[u8]) -> u8 {
    assert_eq!(frame[0], 1, "the version");
    frame[1]
}

pub fn get(frame: &[u8], Field(at, bytes): Field) -> u64 {
    let mut number = [0; 8];
    number[..bytes].copy_from_slice(&frame[at..at + bytes]);
    u64::from_le_bytes(number)
}

pub fn set(frame: &mut [u8], Field(at, bytes): Field, number: u64) {
    frame[at..at + bytes].copy_from_slice(&number.to_le_bytes()[..bytes]);
}

/// The payload of a frame that carries data.
pub fn payload(frame: &[u8]) -> &[u8] {
    &frame[DATA..DATA + get(frame, PAYLOAD) as usize]
}

/// The parts of a BUNDLE, each as a frame of its own; another frame alone.
pub fn parts(frame: &[u8]) -> Vec<Vec<u8>> {
    if kind(frame) != BUNDLE {
        return vec![frame.to_vec()];
    }
    let mut rest = &frame[30..30 + get(frame, PAYLOAD) as usize];
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let bytes = usize::from(u16::from_le_bytes([rest[2], rest[3]]));
        let (part, behind) = rest.split_at(56 + bytes);
        let mut alone = frame[..30].to_vec();
        alone[1] = part[0];
        set(&mut alone, PAYLOAD, bytes as u64);
        alone.extend(&part[4..]);
        parts.push(alone);
        rest = behind;
    }
    parts
}
