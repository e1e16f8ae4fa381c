//! Captures of frames, as Wireshark reads them.

use std::io::Write as _;

use tempfile::NamedTempFile;

/// A file in the format of libpcap: Ethernet frames, one each millisecond.
pub struct Capture {
    bytes: Vec<u8>,
    frames: u32,
}

impl Capture {
    pub fn new() -> Self {
        let mut bytes = Vec::new();
        for word in [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 0x1_0000, 1] {
            bytes.extend(word.to_le_bytes());
        }
        Self { bytes, frames: 0 }
    }

    pub fn add(&mut self, frame: &[u8]) {
        let len = u32::try_from(frame.len()).unwrap();
        let (seconds, micros) = (self.frames / 1000, self.frames % 1000 * 1000);
        for word in [seconds, micros, len, len] {
            self.bytes.extend(word.to_le_bytes());
        }
        self.bytes.extend(frame);
        self.frames += 1;
    }

    pub fn write(&self) -> NamedTempFile {
        let mut file = NamedTempFile::with_suffix(".pcap").unwrap();
        file.write_all(&self.bytes).unwrap();
        file
    }
}

/// A frame on Ethernet, padded as on a wire.
pub fn ethernet(ethertype: u16, frame: &[u8]) -> Vec<u8> {
    let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    bytes.extend(ethertype.to_be_bytes());
    bytes.extend(frame);
    bytes.resize(bytes.len().max(60), 0);
    bytes
}

/// A frame in UDP over IPv4.
pub fn udp(port: u16, frame: &[u8]) -> Vec<u8> {
    let len = u16::try_from(8 + frame.len()).unwrap();
    let mut packet = vec![0x45, 0];
    packet.extend((20 + len).to_be_bytes());
    packet.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    packet.extend(40_000_u16.to_be_bytes());
    packet.extend(port.to_be_bytes());
    packet.extend(len.to_be_bytes());
    // No checksum.
    packet.extend([0, 0]);
    packet.extend(frame);
    ethernet(0x0800, &packet)
}

/// Segments of one size behind a fake TCP header.
#[allow(dead_code)]
pub fn packet(source_port: u16, segment_bytes: u16, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(40 + payload.len()).unwrap();
    let mut packet = vec![0x45, 0];
    packet.extend(len.to_be_bytes());
    packet.extend([0, 0, 0x40, 0, 1, 6, 0, 0, 0, 0, 0x88, 0xb5, 0, 0, 0x88, 0xb6]);
    packet.extend(source_port.to_be_bytes());
    packet.extend(34_997_u16.to_be_bytes());
    packet.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x18]);
    packet.extend(segment_bytes.to_be_bytes());
    packet.extend([0; 4]);
    packet.extend(payload);
    ethernet(0x0800, &packet)
}

/// Values that a seed determines (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }

    pub fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.next() as usize % values.len()]
    }
}
