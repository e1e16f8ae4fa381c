//! Wireshark's dissector of packaging/wireshark, which is written from docs/vrio.md alone, shows
//! each field of frames that this crate encodes: so the document and the code agree.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;
use sidecore_spec_virtio::blk::{Range, RequestHeader, request_type};
use sidecore_vrio::handshake::code;
use sidecore_vrio::wire::{
    AnswerBody, Attach, DeviceEntry, ETHERTYPE, Ending, FrameHeader, Greeting, Hello, Kind, List,
    PartHeader, Ping, Pong, RequestBody, UDP_PORT, VERSION, Welcome, device_flag,
};

mod capture;
use capture::{Capture, Random, ethernet, packet, udp};
#[path = "dissector/nics.rs"]
mod nics;

/// Frames of each kind.
const ROUNDS: u64 = 40;
const LONGEST_NAME: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const TAG: [u8; 16] = [0x77; 16];

/// The fields of a frame, by their names in Wireshark.
type Fields = BTreeMap<&'static str, String>;

/// A frame, with the fields that the dissector has to show: these and no others.
struct Sample {
    bytes: Vec<u8>,
    fields: Fields,
}

impl Sample {
    fn new(random: &mut Random, kind: Kind, head: &[u8], payload: &[u8], tag: &[u8]) -> Self {
        let is_handshake = kind.is_handshake();
        let header = FrameHeader {
            version: VERSION,
            kind: kind.code(),
            session: if is_handshake { 0 } else { random.next() },
            counter: if is_handshake { 0 } else { random.next() | 1 },
            incarnation: random.next(),
            phase: random.next() as u8,
            queue: random.next() as u8,
            payload_bytes: u16::try_from(payload.len()).unwrap(),
        };
        let mut sample = Self { bytes: header.encode().to_vec(), fields: Fields::new() };
        for part in [head, payload, tag] {
            sample.bytes.extend(part);
        }
        sample.shows("vrio.version", header.version);
        sample.shows("vrio.kind", header.kind);
        sample.shows("vrio.session", format!("{:#018x}", header.session));
        sample.shows("vrio.counter", header.counter);
        sample.shows("vrio.incarnation", format!("{:#018x}", header.incarnation));
        sample.shows("vrio.phase", format!("{:#04x}", header.phase));
        sample.shows("vrio.phase.key", header.phase & 1);
        sample.shows("vrio.queue", header.queue);
        sample.shows("vrio.payload_bytes", header.payload_bytes);
        if !tag.is_empty() {
            sample.shows("vrio.tag", hex(tag));
        }
        sample
    }

    fn shows(&mut self, field: &'static str, value: impl ToString) {
        self.fields.insert(field, value.to_string());
    }

    fn shows_all<const COUNT: usize>(&mut self, fields: [(&'static str, String); COUNT]) {
        self.fields.extend(fields);
    }

    /// A payload of this field, unless it is empty.
    fn shows_payload(&mut self, field: &'static str, payload: &[u8]) {
        if !payload.is_empty() {
            self.shows(field, hex(payload));
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")
}

/// Whether a bit is set, as Wireshark shows it.
fn bit(value: impl Into<u64>, bit: u64) -> String {
    u8::from(value.into() & bit != 0).to_string()
}

fn request(random: &mut Random, tag: &[u8]) -> Sample {
    let kinds = [
        request_type::IN,
        request_type::OUT,
        request_type::FLUSH,
        request_type::DISCARD,
        request_type::WRITE_ZEROES,
        99,
    ];
    let body = RequestBody {
        device: random.next() as u16,
        slot: random.next() as u16,
        epoch: random.next(),
        sequence: random.next() as u32,
        attempt: random.next() as u16,
        flags: random.next() as u16,
        offset_bytes: random.next() as u32,
        len_bytes: random.next() as u32,
        wanted: random.next(),
        header: RequestHeader { kind: random.one_of(&kinds), sector: random.next() },
    };
    let range =
        Range { sector: random.next(), sectors: random.next() as u32, flags: random.next() as u32 };
    let is_range = matches!(body.header.kind, request_type::DISCARD | request_type::WRITE_ZEROES);
    let payload = match body.header.kind {
        request_type::OUT => random.bytes(600),
        _ if is_range => range.encode().to_vec(),
        _ => Vec::new(),
    };
    let mut sample = Sample::new(random, Kind::Request, &body.encode(), &payload, tag);
    sample.shows_all([
        ("vrio.device", body.device.to_string()),
        ("vrio.slot", body.slot.to_string()),
        ("vrio.epoch", body.epoch.to_string()),
        ("vrio.sequence", body.sequence.to_string()),
        ("vrio.attempt", body.attempt.to_string()),
        ("vrio.flags", format!("{:#06x}", body.flags)),
        ("vrio.flags.fua", bit(body.flags, 1)),
        ("vrio.flags.ask", bit(body.flags, 2)),
        ("vrio.flags.replay", bit(body.flags, 4)),
        ("vrio.offset_bytes", body.offset_bytes.to_string()),
        ("vrio.len_bytes", body.len_bytes.to_string()),
        ("vrio.wanted", format!("{:#018x}", body.wanted)),
        ("vrio.type", body.header.kind.to_string()),
        ("vrio.header_reserved", "0x00000000".to_owned()),
        ("vrio.sector", body.header.sector.to_string()),
    ]);
    if !tag.is_empty() {
        sample.shows_payload("vrio.sealed", &payload);
    } else if is_range {
        sample.shows("vrio.range.sector", range.sector);
        sample.shows("vrio.range.sectors", range.sectors);
        sample.shows("vrio.range.flags", format!("{:#010x}", range.flags));
    } else {
        sample.shows_payload("vrio.data", &payload);
    }
    sample
}

fn answer(random: &mut Random, kind: Kind, tag: &[u8]) -> Sample {
    let body = AnswerBody {
        device: random.next() as u16,
        slot: random.next() as u16,
        epoch: random.next(),
        sequence: random.next() as u32,
        attempt: random.next() as u16,
        offset_bytes: random.next() as u32,
        len_bytes: random.next() as u32,
        segments: random.next(),
        status: random.one_of(&[0, 1, 2, 0x80, 0x81, 0x82, 0x99]),
        state: random.one_of(&[0, 1, 2, 9]),
        slot_limit: random.next() as u16,
        held_ns: random.next() as u32,
        devices_version: random.next() as u32,
    };
    let data = random.one_of(&[0, 512, 4096]);
    let payload = if kind == Kind::Answer { random.bytes(data) } else { Vec::new() };
    let mut sample = Sample::new(random, kind, &body.encode(), &payload, tag);
    sample.shows_all([
        ("vrio.device", body.device.to_string()),
        ("vrio.slot", body.slot.to_string()),
        ("vrio.epoch", body.epoch.to_string()),
        ("vrio.sequence", body.sequence.to_string()),
        ("vrio.attempt", body.attempt.to_string()),
        ("vrio.offset_bytes", body.offset_bytes.to_string()),
        ("vrio.len_bytes", body.len_bytes.to_string()),
        ("vrio.segments", format!("{:#018x}", body.segments)),
        ("vrio.status", format!("{:#04x}", body.status)),
        ("vrio.state", body.state.to_string()),
        ("vrio.slot_limit", body.slot_limit.to_string()),
        ("vrio.held_ns", body.held_ns.to_string()),
        ("vrio.devices_version", body.devices_version.to_string()),
    ]);
    sample.shows_payload(if tag.is_empty() { "vrio.data" } else { "vrio.sealed" }, &payload);
    sample
}

/// A BUNDLE with one part, which has the body, the payload and the fields of this frame, and
/// perhaps others behind it.
fn bundle(random: &mut Random, part: &Sample, others: &[&Sample], tag: &[u8]) -> Sample {
    let mut payload = Vec::new();
    for part in [part].into_iter().chain(others.iter().copied()) {
        let header = FrameHeader::decode(part.bytes.first_chunk().unwrap());
        let head = PartHeader { kind: header.kind, payload_bytes: header.payload_bytes };
        payload.extend(head.encode());
        payload.extend(&part.bytes[FrameHeader::BYTES..]);
    }
    let mut sample = Sample::new(random, Kind::Bundle, &[], &payload, tag);
    if !tag.is_empty() {
        sample.shows_payload("vrio.sealed", &payload);
        return sample;
    }
    sample.shows("vrio.part.kind", part.bytes[1]);
    sample.shows("vrio.part.payload_bytes", &part.fields["vrio.payload_bytes"]);
    for (name, value) in &part.fields {
        // The header is the bundle's.
        sample.fields.entry(name).or_insert_with(|| value.clone());
    }
    sample
}

/// A frame with a clear part and this message: of no handshake, or of one that seals it.
fn greeting(random: &mut Random, kind: Kind, handshake: u8, message: &[u8]) -> Sample {
    let greeting = Greeting {
        life: random.next(),
        number: random.next(),
        challenged_ns: random.next(),
        cookie: random.next(),
        handshake,
        queue: random.next() as u8,
        message_bytes: message.len() as u16,
    };
    let mut payload = [greeting.encode().as_slice(), message].concat();
    if kind != Kind::Challenge {
        payload.resize(random.one_of(&[500, 1422]), 0);
    }
    let mut sample = Sample::new(random, kind, &[], &payload, &[]);
    sample.shows_all([
        ("vrio.life", format!("{:#018x}", greeting.life)),
        ("vrio.number", greeting.number.to_string()),
        ("vrio.challenged_ns", greeting.challenged_ns.to_string()),
        ("vrio.cookie", format!("{:#018x}", greeting.cookie)),
        ("vrio.handshake", handshake.to_string()),
        ("vrio.client_queue", greeting.queue.to_string()),
        ("vrio.message_bytes", greeting.message_bytes.to_string()),
    ]);
    sample
}

/// A HELLO or WELCOME whose message is sealed.
fn secret(random: &mut Random, kind: Kind) -> Sample {
    let message = random.bytes(200);
    let mut sample = greeting(random, kind, code::NOISE, &message);
    sample.shows("vrio.message", hex(&message));
    sample
}

fn hello(random: &mut Random) -> Sample {
    let hello = Hello {
        client: random.bytes(16).try_into().unwrap(),
        life: random.next(),
        number: random.next(),
        features: random.next(),
        frame_bytes: random.next() as u32,
        receive_frames: random.next() as u32,
        slots: random.next() as u16,
        queue: random.next() as u8,
        version_min: random.next() as u8,
        version_max: random.next() as u8,
        cookie: random.next(),
    };
    let mut sample = greeting(random, Kind::Hello, code::PLAIN, &hello.encode());
    sample.shows_all([
        ("vrio.client", hex(&hello.client)),
        ("vrio.message.life", format!("{:#018x}", hello.life)),
        ("vrio.message.number", hello.number.to_string()),
        ("vrio.message.cookie", format!("{:#018x}", hello.cookie)),
        ("vrio.features", format!("{:#018x}", hello.features)),
        ("vrio.features.bundles", bit(hello.features, 1)),
        ("vrio.features.packets", bit(hello.features, 2)),
        ("vrio.session_queue", hello.queue.to_string()),
        ("vrio.version_min", hello.version_min.to_string()),
        ("vrio.version_max", hello.version_max.to_string()),
        ("vrio.frame_bytes", hello.frame_bytes.to_string()),
        ("vrio.receive_frames", hello.receive_frames.to_string()),
        ("vrio.slots", hello.slots.to_string()),
    ]);
    sample
}

fn challenge(random: &mut Random) -> Sample {
    greeting(random, Kind::Challenge, code::PLAIN, &[])
}

fn welcome(random: &mut Random) -> Sample {
    let welcome = Welcome {
        life: random.next(),
        number: random.next(),
        session: random.next(),
        incarnation: random.next(),
        features: random.next(),
        frame_bytes: random.next() as u32,
        devices_version: random.next() as u32,
        slots: random.next() as u16,
        slot_limit: random.next() as u16,
        version: random.next() as u8,
        queue: random.next() as u8,
    };
    let mut sample = greeting(random, Kind::Welcome, code::PLAIN, &welcome.encode());
    sample.shows_all([
        ("vrio.message.life", format!("{:#018x}", welcome.life)),
        ("vrio.message.number", welcome.number.to_string()),
        ("vrio.message.incarnation", format!("{:#018x}", welcome.incarnation)),
        ("vrio.new_session", format!("{:#018x}", welcome.session)),
        ("vrio.features", format!("{:#018x}", welcome.features)),
        ("vrio.features.bundles", bit(welcome.features, 1)),
        ("vrio.features.packets", bit(welcome.features, 2)),
        ("vrio.frame_bytes", welcome.frame_bytes.to_string()),
        ("vrio.devices_version", welcome.devices_version.to_string()),
        ("vrio.slots", welcome.slots.to_string()),
        ("vrio.slot_limit", welcome.slot_limit.to_string()),
        ("vrio.session_version", welcome.version.to_string()),
        ("vrio.session_queue", welcome.queue.to_string()),
    ]);
    sample
}

fn list(random: &mut Random) -> Sample {
    let list = List { index: random.next() as u16 };
    let mut sample = Sample::new(random, Kind::List, &[], &list.encode(), &[]);
    sample.shows("vrio.index", list.index);
    sample
}

fn attach(random: &mut Random) -> Sample {
    let text = random.one_of(&["disk1", "größe", LONGEST_NAME]);
    let attach = Attach { name: padded(text.as_bytes(), 64).try_into().unwrap() };
    let mut sample = Sample::new(random, Kind::Attach, &[], &attach.encode(), &[]);
    sample.shows("vrio.name", text);
    sample
}

fn device(random: &mut Random, kind: Kind) -> Sample {
    let text = random.one_of(&["", "disk1", "größe", LONGEST_NAME]);
    let entry = DeviceEntry {
        device: random.next() as u16,
        index: random.next() as u16,
        count: random.next() as u16,
        version: random.next() as u32,
        flags: random.next() as u32 & !device_flag::NIC,
        epoch: random.next(),
        capacity_bytes: random.next(),
        block_bytes: random.next() as u32,
        physical_block_bytes: random.next() as u32,
        name: padded(text.as_bytes(), 64).try_into().unwrap(),
        serial: *b"twenty bytes of text",
    };
    let mut sample = Sample::new(random, kind, &[], &entry.encode(), &[]);
    sample.shows_all([
        ("vrio.device", entry.device.to_string()),
        ("vrio.index", entry.index.to_string()),
        ("vrio.count", entry.count.to_string()),
        ("vrio.list_version", entry.version.to_string()),
        ("vrio.epoch", entry.epoch.to_string()),
        ("vrio.capacity_bytes", entry.capacity_bytes.to_string()),
        ("vrio.block_bytes", entry.block_bytes.to_string()),
        ("vrio.physical_block_bytes", entry.physical_block_bytes.to_string()),
        ("vrio.name", text.to_owned()),
        ("vrio.serial", "twenty bytes of text".to_owned()),
    ]);
    nics::flags_of(&mut sample, entry.flags);
    sample
}

fn ping(random: &mut Random) -> Sample {
    let ping = Ping { sent_at: random.next(), round_trip_ns: random.next() as u32 };
    let size = random.one_of(&[24, 2000]);
    let mut sample = Sample::new(random, Kind::Ping, &[], &padded(&ping.encode(), size), &[]);
    sample.shows("vrio.sent_at", format!("{:#018x}", ping.sent_at));
    sample.shows("vrio.round_trip_ns", ping.round_trip_ns);
    sample
}

fn pong(random: &mut Random) -> Sample {
    let pong = Pong {
        sent_at: random.next(),
        held_ns: random.next() as u32,
        devices_version: random.next() as u32,
        slot_limit: random.next() as u16,
        acknowledge_ns: random.next() as u32,
    };
    let size = random.one_of(&[24, 2000]);
    let mut sample = Sample::new(random, Kind::Pong, &[], &padded(&pong.encode(), size), &[]);
    sample.shows_all([
        ("vrio.sent_at", format!("{:#018x}", pong.sent_at)),
        ("vrio.held_ns", pong.held_ns.to_string()),
        ("vrio.devices_version", pong.devices_version.to_string()),
        ("vrio.slot_limit", pong.slot_limit.to_string()),
        ("vrio.acknowledge_ns", pong.acknowledge_ns.to_string()),
    ]);
    sample
}

fn ending(random: &mut Random) -> Sample {
    let ending =
        Ending { life: random.next(), number: random.next(), code: random.one_of(&[1, 2, 5, 77]) };
    let mut sample = Sample::new(random, Kind::Ending, &[], &ending.encode(), &[]);
    sample.shows_all([
        ("vrio.life", format!("{:#018x}", ending.life)),
        ("vrio.number", ending.number.to_string()),
        ("vrio.code", ending.code.to_string()),
    ]);
    sample
}

/// A control message inside a session with a seal: closed, and with a tag.
fn sealed(random: &mut Random, kind: Kind, payload_bytes: usize) -> Sample {
    let payload = random.bytes(payload_bytes);
    let mut sample = Sample::new(random, kind, &[], &payload, &TAG);
    sample.shows("vrio.sealed", hex(&payload));
    sample
}

fn padded(bytes: &[u8], len: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(len, 0);
    bytes
}

/// Frames of each kind, with the values of one random seed.
fn samples(random: &mut Random) -> Vec<Sample> {
    let mut samples = Vec::new();
    for _ in 0..ROUNDS {
        for tag in [[].as_slice(), &TAG] {
            samples.push(request(random, tag));
            samples.push(answer(random, Kind::Answer, tag));
            samples.push(answer(random, Kind::Busy, tag));
            samples.push(nics::packet(random, tag));
        }
        for (kind, tag) in [(Kind::Answer, [].as_slice()), (Kind::Busy, &[]), (Kind::Busy, &TAG)] {
            let parts = [request(random, &[]), answer(random, kind, &[])];
            let bundles = parts.map(|part| bundle(random, &part, &[], tag));
            samples.extend(bundles);
        }
        samples.extend([hello(random), challenge(random), welcome(random), list(random)]);
        samples.extend([Kind::Hello, Kind::Welcome].map(|kind| secret(random, kind)));
        samples.extend([Kind::Device, Kind::Attached].map(|kind| device(random, kind)));
        samples.extend([Kind::Device, Kind::Attached].map(|kind| nics::nic(random, kind)));
        samples.extend([attach(random), ping(random), pong(random), ending(random)]);
        let closed = [(Kind::Attach, 64), (Kind::Attached, 136), (Kind::Ping, 24)];
        samples.extend(closed.map(|(kind, bytes)| sealed(random, kind, bytes)));
    }
    samples
}

fn dissector() -> String {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/wireshark/sidecore-vrio.lua");
    assert!(path.is_file(), "{} is missing", path.display());
    path.to_str().unwrap().to_owned()
}

/// The fields of the dissector in a frame, and its complaints, without the tree around them.
fn shown(value: &Value, fields: &mut BTreeMap<String, Vec<String>>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                let leaves: Vec<&str> = match member {
                    Value::String(text) => vec![text],
                    Value::Array(items) => items.iter().filter_map(Value::as_str).collect(),
                    _ => Vec::new(),
                };
                if (name.starts_with("vrio.") || name == "_ws.expert.message") && !leaves.is_empty()
                {
                    let leaves = leaves.into_iter().map(str::to_owned);
                    fields.entry(name.clone()).or_default().extend(leaves);
                } else {
                    shown(member, fields);
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| shown(item, fields)),
        _ => {}
    }
}

/// The frames of a capture as tshark shows them.
fn dissect(capture: &Capture) -> Vec<BTreeMap<String, Vec<String>>> {
    let file = capture.write();
    let arguments = [
        "-X",
        &format!("lua_script:{}", dissector()),
        "-r",
        file.path().to_str().unwrap(),
        "-T",
        "json",
        "--no-duplicate-keys",
    ];
    let json = sidecore_skip::run("tshark", &arguments).unwrap();
    let frames: Vec<Value> = serde_json::from_str(&json).unwrap();
    frames
        .iter()
        .map(|frame| {
            let mut fields = BTreeMap::new();
            shown(&frame["_source"]["layers"], &mut fields);
            fields
        })
        .collect()
}

/// Checks that the dissector shows these fields of each frame, and nothing else.
fn check(samples: &[Sample], encapsulate: impl Fn(&[u8]) -> Vec<u8>) {
    let mut capture = Capture::new();
    samples.iter().for_each(|sample| capture.add(&encapsulate(&sample.bytes)));
    let dissected = dissect(&capture);
    assert_eq!(dissected.len(), samples.len());
    for (index, (sample, mut seen)) in samples.iter().zip(dissected).enumerate() {
        // Ethernet's padding, which is no part of the frame.
        seen.remove("vrio.padding");
        let wanted: BTreeMap<String, Vec<String>> = sample
            .fields
            .iter()
            .map(|(name, value)| ((*name).to_owned(), vec![value.clone()]))
            .collect();
        assert_eq!(seen, wanted, "frame {}", index + 1);
    }
}

#[test]
fn the_dissector_shows_each_field_of_each_frame_on_ethernet() {
    let samples = samples(&mut Random::new(0x5eed));
    check(&samples, |frame| ethernet(ETHERTYPE, frame));
}

#[test]
fn the_dissector_shows_each_field_of_each_frame_in_udp() {
    let samples = samples(&mut Random::new(0xdead));
    check(&samples, |frame| udp(UDP_PORT, frame));
}

#[test]
fn the_dissector_shows_each_frame_of_a_packet() {
    let random = &mut Random::new(0x7c9);
    let [first, second] = [ping(random), ping(random)];
    let size = first.bytes.len().max(second.bytes.len());
    let padded = [&first, &second].map(|sample| padded(&sample.bytes, size));
    let mut message = [0; 64];
    message[..3].copy_from_slice(&[1, 1, 7]);
    message[8..16].copy_from_slice(&0x0123_4567_89ab_cdef_u64.to_le_bytes());
    let mut capture = Capture::new();
    let size = u16::try_from(size).unwrap();
    capture.add(&packet(0x8800, size, &padded.concat()));
    capture.add(&packet(0x8907, 32, &message));
    let dissected = dissect(&capture);
    let counters = [&first, &second].map(|sample| sample.fields["vrio.counter"].clone());
    assert_eq!(dissected[0]["vrio.counter"], counters);
    assert_eq!(dissected[1]["vrio.link.kind"], ["1", "0"]);
    assert_eq!(dissected[1]["vrio.link.queue"], ["7", "0"]);
    assert_eq!(dissected[1]["vrio.link.nonce"][0], "0x0123456789abcdef");
}

#[test]
fn an_answer_names_its_request() {
    let random = &mut Random::new(7);
    let body = RequestBody {
        slot: 3,
        sequence: 4,
        header: RequestHeader { kind: request_type::FLUSH, sector: 0 },
        ..RequestBody::default()
    };
    let header = FrameHeader { version: VERSION, session: 9, counter: 1, ..FrameHeader::default() };
    let frame = |kind: Kind, body: &[u8]| {
        [FrameHeader { kind: kind.code(), ..header }.encode().as_slice(), body].concat()
    };
    let answer = AnswerBody { slot: 3, sequence: 4, ..AnswerBody::default() };
    let mut capture = Capture::new();
    for bytes in [
        frame(Kind::Request, &body.encode()),
        request(random, &[]).bytes,
        frame(Kind::Request, &RequestBody { attempt: 1, ..body }.encode()),
        frame(Kind::Answer, &answer.encode()),
        frame(Kind::Answer, &AnswerBody { sequence: 5, ..answer }.encode()),
    ] {
        capture.add(&ethernet(ETHERTYPE, &bytes));
    }
    let dissected = dissect(&capture);
    assert_eq!(dissected[3]["vrio.request_in"], ["1"]);
    // A capture has a frame each millisecond.
    assert_eq!(dissected[3]["vrio.time"], ["0.003000000"]);
    assert!(!dissected[4].contains_key("vrio.request_in"), "no request has this sequence");
}

#[test]
fn each_part_of_a_bundle_is_shown() {
    let random = &mut Random::new(11);
    let parts = [request(random, &[]), answer(random, Kind::Answer, &[]), request(random, &[])];
    let whole = bundle(random, &parts[0], &[&parts[1], &parts[2]], &[]);
    let mut short = whole.bytes.clone();
    short.pop();
    let payload_bytes = FrameHeader::decode(short.first_chunk().unwrap()).payload_bytes - 1;
    short[28..30].copy_from_slice(&payload_bytes.to_le_bytes());
    let foreign = ping(random);
    let foreign = Sample { bytes: [&foreign.bytes[..], &[0; 28]].concat(), fields: foreign.fields };
    let foreign = bundle(random, &parts[0], &[&foreign], &[]);
    let mut capture = Capture::new();
    for bytes in [&whole.bytes, &short, &foreign.bytes] {
        capture.add(&ethernet(ETHERTYPE, bytes));
    }
    let dissected = dissect(&capture);
    assert_eq!(dissected[0]["vrio.part.kind"], ["1", "2", "1"]);
    let slots = [&parts[0], &parts[1], &parts[2]].map(|part| part.fields["vrio.slot"].clone());
    assert_eq!(dissected[0]["vrio.slot"], slots);
    assert!(!dissected[0].contains_key("_ws.expert.message"));
    for (seen, parts) in [(&dissected[1], 2), (&dissected[2], 1)] {
        assert_eq!(seen["vrio.part.kind"].len(), parts);
        assert!(seen["_ws.expert.message"][0].starts_with("No part at"), "{seen:?}");
    }
}

#[test]
fn frames_that_make_no_sense_are_named_and_break_nothing() {
    let random = &mut Random::new(0xbad);
    let good = request(random, &[]).bytes;
    let edit = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes
    };
    let long = [request(random, &TAG).bytes, vec![1; 100]].concat();
    let short_device = Sample::new(random, Kind::Device, &[], &[0; 135], &[]).bytes;
    let busy = answer(random, Kind::Busy, &[]);
    let mut reserved = busy.bytes.clone();
    reserved[30 + 18] = 1;
    let cases = [
        (edit(0, 2), "Version 2"),
        (edit(1, 0), "Kind 0"),
        (edit(1, 200), "Kind 200"),
        (edit(29, 0xff), "REQUEST, truncated"),
        (good[..29].to_vec(), "Truncated in the header"),
        (Vec::new(), ""),
        (short_device, "DEVICE has a payload of 136 bytes, not 135"),
        (reserved, "2 reserved bytes at"),
        (long, "no padding of Ethernet"),
        (Sample::new(random, Kind::Ending, &[], &[], &[]).bytes, "ENDING has a payload"),
    ];
    let mut capture = Capture::new();
    cases.iter().for_each(|(bytes, _)| capture.add(&udp(UDP_PORT, bytes)));
    let dissected = dissect(&capture);
    for ((_, complaint), seen) in cases.iter().zip(&dissected) {
        let complaints = seen.get("_ws.expert.message").cloned().unwrap_or_default();
        assert!(
            complaints.iter().any(|said| said.contains(complaint)) || complaint.is_empty(),
            "no complaint with {complaint:?}: {seen:?}"
        );
    }
}

#[test]
fn garbage_never_stops_the_dissector() {
    let random = &mut Random::new(0x9a7ba9e);
    let mut capture = Capture::new();
    let good = samples(random);
    for _ in 0..600 {
        let len = random.next() as usize % 300;
        capture.add(&ethernet(ETHERTYPE, &random.bytes(len)));
        // The beginning of a frame, with a few bytes changed.
        let mut bytes = random.one_of(&good.iter().collect::<Vec<_>>()).bytes.clone();
        bytes.truncate(random.next() as usize % (bytes.len() + 1));
        for _ in 0..random.next() % 4 {
            let at = random.next() as usize % bytes.len().max(1);
            if let Some(byte) = bytes.get_mut(at) {
                *byte = random.next() as u8;
            }
        }
        capture.add(&udp(UDP_PORT, &bytes));
    }
    let file = capture.write();
    let script = format!("lua_script:{}", dissector());
    let path = file.path().to_str().unwrap();
    let said = sidecore_skip::run("tshark", &["-X", &script, "-r", path, "-V"]).unwrap();
    let failures: Vec<&str> = said.lines().filter(|line| line.contains("Lua Error")).collect();
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(said.matches("Sidecore Remote Channel").count() > 600);
}
