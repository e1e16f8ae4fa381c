//! A client that sends any packets to an IOhost with its NIC: nothing panics, packets come in the
//! order of their numbers and lie in buffers that were lent, and each buffer has one owner.
//!
//! The input is a sequence of frames, of 5 bytes each: flags (what to leave wrong, see `frame`), by
//! how much the number of the packet rises, the number of the segment, and the size of the packet.
#![no_main]

use std::collections::HashSet;

use libfuzzer_sys::fuzz_target;
use sidecore_fuzz::vrio::{Buffers, INCARNATION, Wire, hello, host, part, write_frame};
use sidecore_units::Nanos;
use sidecore_vrio::slices::{Arrived, SlicePort};
use sidecore_vrio::wire::{
    Attach, Greeting, Kind, MAX_PACKET_BYTES, MIN_FRAME_BYTES, NicEntry, PacketBody, Welcome,
};
use sidecore_vrio::{
    Host, HostOptions, Nic, Packet, Peer, Plain, ServerOptions, packet_segment_bytes,
};

const DEVICE: u16 = 4;
const EPOCH: u64 = 6;
const BUFFERS: u16 = 6;
const FROM: Peer = Peer(1);

fn entry() -> NicEntry {
    let mut name = [0; 64];
    name[0] = b'n';
    NicEntry {
        device: DEVICE,
        epoch: EPOCH,
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        name,
        ..NicEntry::default()
    }
}

/// The frame of an input. Flags: 1 the payload is a byte too short, 2 the offset is one too large,
/// 4 the packet has eight times the size, 8 another NIC, 16 another epoch, 32 time passes.
fn frame(input: &[u8; 5], sequence: &mut u64, named: (u64, u64, u64)) -> Vec<u8> {
    let [flags, rises, segment, low, high] = *input;
    // 128 is back by as much.
    *sequence = match flags & 128 {
        0 => sequence.wrapping_add(rises.into()),
        _ => sequence.wrapping_sub(rises.into()),
    };
    let scale = if flags & 4 == 0 { 1 } else { 8 };
    let len_bytes = u32::from(u16::from_le_bytes([low, high])) * scale;
    let segment_bytes = packet_segment_bytes(MIN_FRAME_BYTES, 0);
    let offset_bytes = u32::from(segment) * segment_bytes + u32::from(flags >> 1 & 1);
    let rest = len_bytes.saturating_sub(offset_bytes).min(segment_bytes);
    let body = PacketBody {
        device: DEVICE + u16::from(flags >> 3 & 1),
        epoch: EPOCH - u64::from(flags >> 4 & 1),
        sequence: *sequence,
        offset_bytes,
        len_bytes,
    };
    let payload = vec![flags; (rest as usize).saturating_sub(usize::from(flags & 1))];
    write_frame(Kind::Packet, named, 0, &[body.encode().as_slice(), &payload].concat())
}

/// Takes what has arrived, and lends the buffers again.
fn take(host: &mut Host<Plain>, lent: &mut HashSet<u16>) {
    let Some((nic, _)) = host.nic_mut(DEVICE) else { return };
    let mut empty = Vec::new();
    while let Some(Packet { buffer, len_bytes }) = nic.next_arrived() {
        assert!((1..=MAX_PACKET_BYTES).contains(&len_bytes));
        assert!(lent.remove(&buffer), "buffer {buffer} was lent");
        empty.push(buffer);
    }
    assert!(nic.next_sent().is_none(), "nothing was sent");
    for buffer in empty {
        nic.lend(buffer);
        lent.insert(buffer);
    }
}

fuzz_target!(|input: &[u8]| {
    let options = HostOptions {
        incarnation: INCARNATION,
        server: ServerOptions { slots: 1, ..ServerOptions::default() },
        ..HostOptions::default()
    };
    let mut now = Nanos(1);
    let mut host = host(options, Plain, now, &[entry().to_device()]);
    let mut nic = Nic::new(1 << 63, BUFFERS);
    let mut lent: HashSet<u16> = (0..BUFFERS).collect();
    lent.iter().for_each(|buffer| nic.lend(*buffer));
    host.add_nic(DEVICE, nic);
    let (mut wire, mut buffers) = (Wire::default(), Buffers::default());
    let mut port = SlicePort { wire: &mut wire, data: &mut buffers };
    port.to_host(&mut host, (now, FROM), &mut hello(Greeting::default(), 1));
    host.poll(now, &mut port);
    let challenge = Greeting::decode(part(&port.wire.take()[0], 0));
    port.to_host(&mut host, (now, FROM), &mut hello(challenge, 1));
    host.poll(now, &mut port);
    let session = Welcome::decode(part(&port.wire.take()[0], Greeting::BYTES)).session;
    let attach = Attach { name: entry().name }.encode();
    let attach = write_frame(Kind::Attach, (session, 1, INCARNATION), 0, &attach);
    port.to_host(&mut host, (now, FROM), &mut Arrived::new(attach));
    assert!(host.nic_mut(DEVICE).is_some_and(|(nic, _)| nic.is_attached()));

    let (mut counter, mut sequence) = (1, 0);
    for bytes in input.as_chunks::<5>().0 {
        counter += 1;
        if bytes[0] & 32 != 0 {
            now = now.after(Nanos::from_micros(400));
            host.poll(now, &mut port);
            assert!(host.deadline().is_none_or(|due| due > now || due == Nanos::ZERO));
        }
        let frame = frame(bytes, &mut sequence, (session, counter, INCARNATION));
        port.to_host(&mut host, (now, FROM), &mut Arrived::new(frame));
        if bytes[0] & 64 == 0 {
            take(&mut host, &mut lent);
        }
    }
    take(&mut host, &mut lent);
    assert_eq!(lent.len(), usize::from(BUFFERS), "each came back");
    now = now.after(Nanos::from_millis(1));
    host.poll(now, &mut port);
    assert!(host.is_idle(now), "no incomplete packet is left");
});
