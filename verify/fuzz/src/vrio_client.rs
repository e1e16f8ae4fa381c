//! An IOhost that sends anything to a client: nothing panics, data stay within their request, and
//! each request ends once at most.
//!
//! The input is as that of `vrio_host`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidecore_block::Operation;
use sidecore_fuzz::vrio::{
    Buffers, HOST, INCARNATION, Requests, SESSION, Wire, client, device, greeting, next_frame,
    part, write_frame,
};
use sidecore_units::Nanos;
use sidecore_vrio::Request;
use sidecore_vrio::slices::{Arrived, SlicePort};
use sidecore_vrio::wire::{DeviceEntry, Greeting, Hello, Kind, MIN_FRAME_BYTES, VERSION, Welcome};

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
fn welcome(hello: &Hello) -> Vec<u8> {
    let Hello { life, number, features, frame_bytes, slots, .. } = *hello;
    let welcome = Welcome {
        life,
        number,
        session: SESSION + number,
        incarnation: INCARNATION,
        features,
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
    let mut client = client(1);
    let (mut wire, mut buffers) = (Wire::default(), Buffers::default());
    let (mut now, mut counter, mut session) = (Nanos(1), 1, 0);
    let mut requests = Requests::default();
    let mut rest = input;
    while let Some((kind, flags, content, next)) = next_frame(rest) {
        rest = next;
        let (operation, offset_bytes, len_bytes) =
            REQUESTS[requests.submitted() as usize % REQUESTS.len()];
        let request = Request { operation, offset_bytes, len_bytes, fua: flags & 4 != 0 };
        requests.submit(&mut client, request);
        match flags & 24 {
            8 => client.leave(0),
            16 => client.claim(0),
            _ => {}
        }
        now = now.after(Nanos::from_micros(u64::from(flags) * u64::from(flags)));
        let mut port = SlicePort { wire: &mut wire, data: &mut buffers };
        port.wire.room = 16;
        client.poll(now, &mut port);
        for frame in port.wire.take() {
            assert!(frame.len() <= MIN_FRAME_BYTES as usize);
            if frame[1] == Kind::Hello.code() && flags & 1 == 0 {
                let hello = Hello::decode(part(&frame, Greeting::BYTES));
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
        requests.complete(&mut client);
        let _ = (client.deadline(), client.listed().len(), client.device(0));
    }
});
