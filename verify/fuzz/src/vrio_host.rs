//! A client that sends anything to an IOhost: nothing panics, the store gets only requests that fit
//! the device, and a slot has one request at a time.
//!
//! The input is a sequence of frames, each of them: kind (1 byte), what to leave wrong (1 byte, see
//! `write_frame`), size of the rest (1 byte), the rest: the body, if the kind has one, and payload.
#![no_main]

use std::collections::HashSet;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use sidecore_block::BlockError;
use sidecore_fuzz::vrio::{Buffers, Wire, device, next_frame, write_frame};
use sidecore_units::Nanos;
use sidecore_vrio::wire::{Attach, Challenge, FrameHeader, Hello, Kind, MIN_FRAME_BYTES, VERSION, Welcome};
use sidecore_vrio::{Execute, Host, HostOptions, Member, Peer, Plain, ServerOptions, VrioStats};

const CLIENT: [u8; 16] = *b"the fuzzed one..";
const INCARNATION: u64 = 77;
const SLOTS: u16 = 8;

fn hello(cookie: u64) -> Vec<u8> {
    let hello = Hello {
        client: CLIENT,
        life: 1,
        number: 1,
        cookie,
        version_min: VERSION,
        version_max: VERSION,
        frame_bytes: MIN_FRAME_BYTES,
        slots: SLOTS,
        ..Hello::default()
    };
    let mut payload = hello.encode().to_vec();
    payload.resize(MIN_FRAME_BYTES as usize - FrameHeader::BYTES, 0);
    write_frame(Kind::Hello, (0, 0, 0), 0, &payload)
}

fn payload<const BYTES: usize>(frame: &[u8]) -> &[u8; BYTES] {
    frame[FrameHeader::BYTES..].first_chunk().expect("as long as it is")
}

fuzz_target!(|input: &[u8]| {
    let server = ServerOptions { slots: SLOTS, ..ServerOptions::default() };
    let options = HostOptions { incarnation: INCARNATION, seed: 1, server };
    let member = Member { client: CLIENT, queue: 0 };
    let mut host = Host::new(options, &[member], Plain, Arc::new(VrioStats::default()));
    host.set_devices(0, &[device(0), device(3)]);
    let (mut wire, mut buffers) = (Wire::default(), Buffers::default());
    let mut now = Nanos(1);
    host.receive(now, Peer(1), &hello(0), &mut buffers);
    host.poll(now, &mut wire, &mut buffers);
    let cookie = Challenge::decode(payload(&wire.take()[0])).cookie;
    host.receive(now, Peer(1), &hello(cookie), &mut buffers);
    host.poll(now, &mut wire, &mut buffers);
    let session = Welcome::decode(payload(&wire.take()[0])).session;
    let mut counter = 1;
    let attach = write_frame(Kind::Attach, (session, 1, INCARNATION), 0, &Attach { device: 0 }.encode());
    host.receive(now, Peer(1), &attach, &mut buffers);

    let mut executing: Vec<Execute> = Vec::new();
    let mut rest = input;
    while let Some((kind, flags, content, next)) = next_frame(rest) {
        rest = next;
        counter += 1;
        now = now.after(Nanos::from_micros(u64::from(flags)));
        let frame = write_frame(kind, (session, counter, INCARNATION), flags, content);
        host.receive(now, Peer(flags.into()), &frame, &mut buffers);
        while let Some(execute) = host.next_execute() {
            let (entry, request) = (device(execute.device), execute.request);
            assert!(request.offset_bytes + request.len_bytes <= entry.capacity_bytes, "{execute:?}");
            assert!((request.offset_bytes | request.len_bytes).is_multiple_of(entry.block_bytes.into()), "{execute:?}");
            executing.push(execute);
        }
        let places: HashSet<u64> = executing.iter().map(|execute| execute.place).collect();
        assert_eq!(places.len(), executing.len(), "a slot has one request");
        assert!(executing.len() <= SLOTS.into());
        if flags & 1 == 0 && !executing.is_empty() {
            let execute = executing.remove(usize::from(flags) % executing.len());
            host.complete(execute.ticket, if flags & 2 == 0 { Ok(()) } else { Err(BlockError::EIO) });
        }
        wire.room = usize::from(flags % 16);
        host.poll(now, &mut wire, &mut buffers);
        for frame in wire.take() {
            assert!(frame.len() <= MIN_FRAME_BYTES as usize, "more than the path carries");
        }
        assert!(host.deadline().is_none_or(|at| at < Nanos::MAX));
    }
});
