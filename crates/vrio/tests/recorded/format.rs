//! A conversation as text: a line for each frame and for each thing that happened on either side.
//!
//! ```text
//! 1020 > 0104 00*28 721f ...     microseconds; a frame of the client, in hexadecimal, with runs
//! 1040 < 0105 ...                a frame of the IOhost
//! 5300 >x 0101 ...               one that the link lost
//! 5320 done 3 ok                 an event: see `Event`
//! ```

use std::fmt::Write as _;

use sidecore_block::{BlockError, Operation};
use sidecore_units::Nanos;
use sidecore_vrio::Request;

/// Runs of equal bytes are written as such from this length on.
const RUN_MIN: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// A frame of the client, or of the IOhost.
    Frame {
        of_client: bool,
        is_lost: bool,
        frame: Vec<u8>,
    },
    Event(Event),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A client's user submits a request with this tag. The data of writes follow from the tag.
    Submit { tag: u64, device: u16, request: Request },
    /// A client's request has ended. A read has data.
    Done { tag: u64, outcome: String, data: Vec<u8> },
    /// The client ends its session.
    End,
    /// The IOhost's store keeps requests from now on, or lets them go.
    Holds(bool),
    /// The IOhost's store was given a request.
    Store(Request),
    /// The IOhost lets the client use so many slots.
    Limit(u16),
    /// The first device has so many bytes from now on.
    Grow(u64),
    /// The IOhost is killed, and the next one starts.
    Restart,
}

/// Lines with the times at which they happened.
pub type Conversation = Vec<(Nanos, Line)>;

/// The data that the writer of a request with this tag writes: they differ in each 256 bytes.
pub fn data(tag: u64, len_bytes: u64) -> Vec<u8> {
    (0..len_bytes).map(|at| (tag * 37 + at / 256 + 1) as u8).collect()
}

pub fn outcome(result: Result<(), BlockError>) -> &'static str {
    match result {
        Ok(()) => "ok",
        Err(BlockError::OutOfBounds) => "out-of-bounds",
        Err(BlockError::ReadOnly) => "read-only",
        Err(_) => "error",
    }
}

pub fn to_text(conversation: &Conversation) -> String {
    let mut text = String::new();
    for (time, line) in conversation {
        let _ = writeln!(text, "{} {}", time.0 / 1000, words(line));
    }
    text
}

pub fn from_text(text: &str) -> Conversation {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(parse).collect()
}

fn words(line: &Line) -> String {
    match line {
        Line::Frame { of_client, is_lost, frame } => {
            let way = if *of_client { '>' } else { '<' };
            let lost = if *is_lost { "x" } else { "" };
            format!("{way}{lost}{}", hex(frame))
        }
        Line::Event(Event::Submit { tag, device, request }) => {
            format!("submit {tag} {device} {}", request_words(request))
        }
        Line::Event(Event::Done { tag, outcome, data }) => {
            format!("done {tag} {outcome}{}", hex(data))
        }
        Line::Event(Event::End) => "end".to_owned(),
        Line::Event(Event::Holds(holds)) => format!("holds {holds}"),
        Line::Event(Event::Store(request)) => format!("store {}", request_words(request)),
        Line::Event(Event::Limit(slots)) => format!("limit {slots}"),
        Line::Event(Event::Grow(bytes)) => format!("grow {bytes}"),
        Line::Event(Event::Restart) => "restart".to_owned(),
    }
}

fn parse(line: &str) -> (Nanos, Line) {
    let mut words = line.split_ascii_whitespace();
    let mut next = || words.next().unwrap_or_else(|| panic!("words are missing: {line}"));
    let time = Nanos::from_micros(number(next()));
    let event = match next() {
        way @ (">" | ">x" | "<" | "<x") => {
            let (of_client, is_lost) = (way.starts_with('>'), way.ends_with('x'));
            return (time, Line::Frame { of_client, is_lost, frame: bytes(words) });
        }
        "submit" => Event::Submit {
            tag: number(next()),
            device: number(next()) as u16,
            request: request(words),
        },
        "done" => {
            Event::Done { tag: number(next()), outcome: next().to_owned(), data: bytes(words) }
        }
        "end" => Event::End,
        "holds" => Event::Holds(next() == "true"),
        "store" => Event::Store(request(words)),
        "limit" => Event::Limit(number(next()) as u16),
        "grow" => Event::Grow(number(next())),
        "restart" => Event::Restart,
        _ => panic!("not a line of a conversation: {line}"),
    };
    (time, Line::Event(event))
}

fn number(word: &str) -> u64 {
    word.parse().unwrap_or_else(|error| panic!("{word}: {error}"))
}

fn request_words(request: &Request) -> String {
    let Request { operation, offset_bytes, len_bytes, fua } = request;
    let operation = match operation {
        Operation::Read => "read",
        Operation::Write if *fua => "write-fua",
        Operation::Write => "write",
        Operation::Flush => "flush",
        Operation::Discard => "discard",
        Operation::WriteZeroes { may_unmap: true } => "zeroes-unmap",
        Operation::WriteZeroes { may_unmap: false } => "zeroes",
    };
    format!("{operation} {offset_bytes} {len_bytes}")
}

fn request<'a>(mut words: impl Iterator<Item = &'a str>) -> Request {
    let mut next = || words.next().expect("a request has three words");
    let (operation, fua) = match next() {
        "read" => (Operation::Read, false),
        "write" => (Operation::Write, false),
        "write-fua" => (Operation::Write, true),
        "flush" => (Operation::Flush, false),
        "discard" => (Operation::Discard, false),
        "zeroes-unmap" => (Operation::WriteZeroes { may_unmap: true }, false),
        "zeroes" => (Operation::WriteZeroes { may_unmap: false }, false),
        other => panic!("unknown operation {other}"),
    };
    Request { operation, offset_bytes: number(next()), len_bytes: number(next()), fua }
}

/// Bytes in hexadecimal, with a space in front of each word: `0a0b`, or `00*40` for a run.
fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    let mut in_word = false;
    for run in bytes.chunk_by(|one, next| one == next) {
        let is_long = run.len() >= RUN_MIN;
        if is_long || !in_word {
            text.push(' ');
        }
        in_word = !is_long;
        if is_long {
            let _ = write!(text, "{:02x}*{}", run[0], run.len());
        } else {
            run.iter().for_each(|byte| text += &format!("{byte:02x}"));
        }
    }
    text
}

fn bytes<'a>(words: impl Iterator<Item = &'a str>) -> Vec<u8> {
    let byte = |at: &[u8]| u8::from_str_radix(std::str::from_utf8(at).unwrap(), 16).unwrap();
    let mut bytes = Vec::new();
    for word in words {
        match word.split_once('*') {
            Some((one, count)) => {
                let len = bytes.len() + number(count) as usize;
                bytes.resize(len, byte(one.as_bytes()));
            }
            None => bytes.extend(word.as_bytes().chunks(2).map(byte)),
        }
    }
    bytes
}
