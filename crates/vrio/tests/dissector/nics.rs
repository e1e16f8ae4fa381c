//! Frames of packets, and entries of NICs.

use sidecore_spec_virtio::net::{PacketHeader, gso};
use sidecore_vrio::wire::{DeviceEntry, Kind, NicEntry, PacketBody};

use super::capture::Random;
use super::{LONGEST_NAME, Sample, bit, hex, padded};

/// A segment of a packet: the first one has the virtio header.
pub fn packet(random: &mut Random, tag: &[u8]) -> Sample {
    let body = PacketBody {
        device: random.next() as u16,
        epoch: random.next(),
        sequence: random.next(),
        offset_bytes: random.one_of(&[0, 1344, 64_000]),
        len_bytes: random.next() as u32,
    };
    let header = PacketHeader {
        flags: random.next() as u8,
        gso_type: random.one_of(&[gso::NONE, gso::TCPV4, gso::TCPV6, gso::UDP_L4]),
        hdr_len: random.next() as u16,
        gso_size: random.next() as u16,
        csum_start: random.next() as u16,
        csum_offset: random.next() as u16,
        num_buffers: random.next() as u16,
    };
    let is_first = body.offset_bytes == 0;
    let data = random.bytes(700);
    let head = if is_first { header.encode().to_vec() } else { Vec::new() };
    let payload = [head, data.clone()].concat();
    let mut sample = Sample::new(random, Kind::Packet, &body.encode(), &payload, tag);
    sample.shows_all([
        ("vrio.device", body.device.to_string()),
        ("vrio.epoch", body.epoch.to_string()),
        ("vrio.packet.sequence", body.sequence.to_string()),
        ("vrio.offset_bytes", body.offset_bytes.to_string()),
        ("vrio.packet.len_bytes", body.len_bytes.to_string()),
    ]);
    if !tag.is_empty() {
        sample.shows("vrio.sealed", hex(&payload));
        return sample;
    }
    sample.shows("vrio.data", hex(&data));
    if is_first {
        sample.shows_all([
            ("vrio.packet.flags", format!("{:#04x}", header.flags)),
            ("vrio.packet.flags.partial", bit(header.flags, 1)),
            ("vrio.packet.flags.valid", bit(header.flags, 2)),
            ("vrio.packet.gso_type", header.gso_type.to_string()),
            ("vrio.packet.hdr_len", header.hdr_len.to_string()),
            ("vrio.packet.gso_size", header.gso_size.to_string()),
            ("vrio.packet.csum_start", header.csum_start.to_string()),
            ("vrio.packet.csum_offset", header.csum_offset.to_string()),
            ("vrio.packet.num_buffers", header.num_buffers.to_string()),
        ]);
    }
    sample
}

/// The entry of a NIC.
pub fn nic(random: &mut Random, kind: Kind) -> Sample {
    let text = random.one_of(&["", "nic1", LONGEST_NAME]);
    let entry = NicEntry {
        device: random.next() as u16,
        index: random.next() as u16,
        count: random.next() as u16,
        version: random.next() as u32,
        flags: random.next() as u32,
        epoch: random.next(),
        mac: random.bytes(6).try_into().unwrap(),
        mtu: random.next() as u16,
        name: padded(text.as_bytes(), 64).try_into().unwrap(),
        ..NicEntry::default()
    };
    let DeviceEntry { flags, .. } = entry.to_device();
    let mut sample = Sample::new(random, kind, &[], &entry.to_device().encode(), &[]);
    sample.shows_all([
        ("vrio.device", entry.device.to_string()),
        ("vrio.index", entry.index.to_string()),
        ("vrio.count", entry.count.to_string()),
        ("vrio.list_version", entry.version.to_string()),
        ("vrio.epoch", entry.epoch.to_string()),
        ("vrio.mac", hex(&entry.mac)),
        ("vrio.mtu", entry.mtu.to_string()),
        ("vrio.name", text.to_owned()),
    ]);
    flags_of(&mut sample, flags);
    sample
}

/// The flags of an entry.
pub fn flags_of(sample: &mut Sample, flags: u32) {
    sample.shows_all([
        ("vrio.device_flags", format!("{flags:#010x}")),
        ("vrio.device_flags.present", bit(flags, 1)),
        ("vrio.device_flags.read_only", bit(flags, 2)),
        ("vrio.device_flags.cache", bit(flags, 4)),
        ("vrio.device_flags.discard", bit(flags, 8)),
        ("vrio.device_flags.zeros", bit(flags, 16)),
        ("vrio.device_flags.write_zeros", bit(flags, 32)),
        ("vrio.device_flags.nic", bit(flags, 64)),
        ("vrio.device_flags.link_up", bit(flags, 128)),
    ]);
}
