//! An IOhost that sends anything to a client: nothing panics, data stay within their request, and
//! each request ends once at most.
//!
//! The input is as that of `vrio_host`.
#![no_main]

use std::collections::HashSet;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use sidecore_block::Operation;
use sidecore_fuzz::vrio::{Buffers, Wire, device, greeting, next_frame, write_frame};
use sidecore_units::Nanos;
use sidecore_vrio::slices::{Arrived, SlicePort};
use sidecore_vrio::wire::{
    DeviceEntry, FrameHeader, Greeting, Hello, Kind, MIN_FRAME_BYTES, VERSION, Welcome,
};
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

const HOST: Peer = Peer(1);

/// The fields of this HELLO.
fn fields(hello: &[u8]) -> Hello {
    Hello::decode(
        hello[FrameHeader::BYTES + Greeting::BYTES..].first_chunk().expect("a whole HELLO"),
    )
}

/// The WELCOME to this HELLO.
fn welcome(hello: &Hello) -> Vec<u8> {
    let Hello { life, number, frame_bytes, slots, .. } = *hello;
    let welcome = Welcome {
        life,
        number,
        session: SESSION + number,
        incarnation: INCARNATION,
        frame_bytes,
        devices_version: 1,
        slots,
        slot_limit: slots,
        version: VERSION,
        ..Welcome::default()
    };
    let payload = greeting(Greeting { life, number, ..Greeting::default() }, &welcome.encode());
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
    let mut client = Client::new(options, HOST, Plain, Arc::new(VrioStats::default()));
    client.open(&device(0).name);
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
        let mut port = SlicePort { wire: &mut wire, data: &mut buffers };
        port.wire.room = 16;
        client.poll(now, &mut port);
        for frame in port.wire.take() {
            assert!(frame.len() <= MIN_FRAME_BYTES as usize);
            if frame[1] == Kind::Hello.code() && flags & 1 == 0 {
                let hello = fields(&frame);
                port.to_client(&mut client, (now, HOST), &mut Arrived::new(welcome(&hello)));
                (session, counter) = (SESSION + hello.number, 1);
                let entry = DeviceEntry { version: 1, count: 1, ..device(0) }.encode();
                let attached =
                    write_frame(Kind::Attached, (session, counter, INCARNATION), 0, &entry);
                port.to_client(&mut client, (now, HOST), &mut Arrived::new(attached));
            }
        }
        counter += 1;
        let frame = write_frame(kind, (session, counter, INCARNATION), flags, content);
        port.to_client(&mut client, (now, HOST), &mut Arrived::new(frame));
        while let Some(event) = client.next_event() {
            if let Event::Completed { tag, .. } = event {
                assert!(unanswered.remove(&tag), "request {tag} ends twice");
            }
        }
        let _ = (client.deadline(), client.listed().len(), client.device(0));
    }
});
