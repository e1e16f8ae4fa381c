//! An IOhost that sends anything to a client: nothing panics, data stay within their request, and
//! each request ends once at most.
//!
//! The input is as that of `vrio_host`.
#![no_main]

use std::collections::HashSet;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use sidecore_block::Operation;
use sidecore_fuzz::vrio::{Buffers, Wire, device, next_frame, write_frame};
use sidecore_units::Nanos;
use sidecore_vrio::wire::{DeviceEntry, FrameHeader, Hello, Kind, MIN_FRAME_BYTES, VERSION, Welcome};
use sidecore_vrio::{Client, ClientOptions, Event, Peer, Plain, Request, VrioStats};

const INCARNATION: u64 = 77;
const SESSION: u64 = 0x1234_5678_0000;
/// Requests that are submitted, one after the other.
const REQUESTS: [(Operation, u64, u64); 8] = [
    (Operation::Write, 0, 512),
    (Operation::Read, 4096, 512),
    (Operation::Write, 0, 4096),
    (Operation::Read, 0, 8192),
    (Operation::Flush, 0, 0),
    (Operation::WriteZeroes { may_unmap: true }, 8192, 512),
    (Operation::Discard, 8192, 4096),
    (Operation::Write, 4096, 65_536),
];

/// The WELCOME to this HELLO.
fn welcome(hello: &[u8]) -> Vec<u8> {
    let Hello { life, number, frame_bytes, slots, .. } =
        Hello::decode(hello[FrameHeader::BYTES..].first_chunk().expect("a whole HELLO"));
    let welcome = Welcome {
        life,
        number,
        session: SESSION + number,
        frame_bytes,
        devices_version: 1,
        slots,
        slot_limit: slots,
        version: VERSION,
        ..Welcome::default()
    };
    let mut payload = welcome.encode().to_vec();
    payload.resize(frame_bytes as usize - FrameHeader::BYTES, 0);
    write_frame(Kind::Welcome, (0, 0, INCARNATION), 0, &payload)
}

fuzz_target!(|input: &[u8]| {
    let options = ClientOptions {
        slots: 4,
        depth: 8,
        receive_frames: 64,
        frame_bytes: MIN_FRAME_BYTES,
        replay_bytes: 128 << 10,
        ..ClientOptions::default()
    };
    let mut client = Client::new(options, Peer(1), Plain, Arc::new(VrioStats::default()));
    client.open(0);
    let (mut wire, mut buffers) = (Wire::default(), Buffers::default());
    let (mut now, mut counter, mut session) = (Nanos(1), 1, 0);
    let (mut submitted, mut unanswered) = (0, HashSet::new());
    let mut rest = input;
    while let Some((kind, flags, content, next)) = next_frame(rest) {
        rest = next;
        let (operation, offset_bytes, len_bytes) = REQUESTS[submitted as usize % REQUESTS.len()];
        let request = Request { operation, offset_bytes, len_bytes, fua: flags & 4 != 0 };
        if client.submit(submitted, 0, request).is_ok() {
            unanswered.insert(submitted);
            submitted += 1;
        }
        now = now.after(Nanos::from_micros(u64::from(flags) * u64::from(flags)));
        wire.room = 16;
        client.poll(now, &mut wire, &mut buffers);
        for frame in wire.take() {
            assert!(frame.len() <= MIN_FRAME_BYTES as usize);
            if frame[1] == Kind::Hello.code() && flags & 1 == 0 {
                let number = Hello::decode(frame[FrameHeader::BYTES..].first_chunk().expect("a HELLO")).number;
                client.receive(now, &welcome(&frame), &mut buffers);
                (session, counter) = (SESSION + number, 1);
                let entry = DeviceEntry { version: 1, count: 1, ..device(0) }.encode();
                let attached = write_frame(Kind::Attached, (session, counter, INCARNATION), 0, &entry);
                client.receive(now, &attached, &mut buffers);
            }
        }
        counter += 1;
        let frame = write_frame(kind, (session, counter, INCARNATION), flags, content);
        client.receive(now, &frame, &mut buffers);
        while let Some(event) = client.next_event() {
            if let Event::Completed { tag, .. } = event {
                assert!(unanswered.remove(&tag), "request {tag} ends twice");
            }
        }
        let _ = (client.deadline(), client.listed().len(), client.device(0));
    }
});
