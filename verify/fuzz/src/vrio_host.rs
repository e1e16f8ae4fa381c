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
use sidecore_fuzz::vrio::{
    Buffers, CLIENT, INCARNATION, Wire, device, hello, host, next_frame, part, write_frame,
};
use sidecore_units::Nanos;
use sidecore_vrio::slices::{Arrived, SlicePort};
use sidecore_vrio::wire::{Attach, Greeting, Kind, MIN_FRAME_BYTES, Welcome};
use sidecore_vrio::{Execute, HostOptions, Member, Peer, Plain, ServerOptions, VrioStats};

const SLOTS: u16 = 8;

fuzz_target!(|input: &[u8]| {
    let server = ServerOptions { slots: SLOTS, ..ServerOptions::default() };
    let options = HostOptions { incarnation: INCARNATION, server, ..HostOptions::default() };
    let mut host = host(options, Plain, Nanos(1), &[device(0), device(3)]);
    let (mut wire, mut buffers) = (Wire::default(), Buffers::default());
    let mut port = SlicePort { wire: &mut wire, data: &mut buffers };
    let mut now = Nanos(1);
    let from = Peer(1);
    port.to_host(&mut host, (now, from), &mut hello(Greeting::default(), SLOTS));
    host.poll(now, &mut port);
    let challenge = Greeting::decode(part(&port.wire.take()[0], 0));
    port.to_host(&mut host, (now, from), &mut hello(challenge, SLOTS));
    host.poll(now, &mut port);
    let session = Welcome::decode(part(&port.wire.take()[0], Greeting::BYTES)).session;
    let mut counter = 1;
    let attach = Attach { name: device(0).name }.encode();
    let attach = write_frame(Kind::Attach, (session, 1, INCARNATION), 0, &attach);
    port.to_host(&mut host, (now, from), &mut Arrived::new(attach));

    let mut executing: Vec<Execute> = Vec::new();
    let mut rest = input;
    while let Some((kind, flags, content, next)) = next_frame(rest) {
        rest = next;
        counter += 1;
        now = now.after(Nanos::from_micros(u64::from(flags)));
        let frame = write_frame(kind, (session, counter, INCARNATION), flags, content);
        port.to_host(&mut host, (now, Peer(flags.into())), &mut Arrived::new(frame));
        while let Some(execute) = host.next_execute() {
            let (entry, request) = (device(execute.device), execute.request);
            assert!(
                request.offset_bytes + request.len_bytes <= entry.capacity_bytes,
                "{execute:?}"
            );
            assert!(
                (request.offset_bytes | request.len_bytes).is_multiple_of(entry.block_bytes.into()),
                "{execute:?}"
            );
            executing.push(execute);
        }
        let places: HashSet<u64> = executing.iter().map(|execute| execute.place).collect();
        assert_eq!(places.len(), executing.len(), "a slot has one request");
        assert!(executing.len() <= SLOTS.into());
        if flags & 1 == 0 && !executing.is_empty() {
            let execute = executing.remove(usize::from(flags) % executing.len());
            host.complete(
                execute.ticket,
                if flags & 2 == 0 { Ok(()) } else { Err(BlockError::EIO) },
            );
        }
        if flags == 255 {
            // The client is revoked, and invited again.
            host.remove(0);
            host.add(Member { client: CLIENT, queue: 0 }, Arc::new(VrioStats::default()));
        }
        port.wire.room = usize::from(flags % 16);
        host.poll(now, &mut port);
        for frame in port.wire.take() {
            assert!(frame.len() <= MIN_FRAME_BYTES as usize, "more than the path carries");
        }
        assert!(host.deadline().is_none_or(|at| at < Nanos::MAX));
    }
});
