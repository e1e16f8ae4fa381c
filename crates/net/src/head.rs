//! The head of a frame: the bytes that decisions are made on, in private memory.

use sidecore_memory::{Part, Segments};
use sidecore_spec_virtio::net::{PacketHeader, flag, gso};

use crate::bytes::{array, be16, put};
use crate::{DropReason, MacAddress, Offloads, Properties};

/// The bytes of a frame that are copied to private memory, virtio header included.
pub const HEAD_BYTES: usize = 256;
/// Size of an Ethernet header without a tag.
pub(crate) const ETHERNET_BYTES: usize = 14;
/// Size of a VLAN tag.
pub(crate) const TAG_BYTES: usize = 4;
/// The addresses of an Ethernet header.
const ADDRESSES_BYTES: usize = 12;
/// The longest frame that an offload cuts, without virtio and Ethernet headers.
pub(crate) const PACKET_BYTES_MAX: usize = 65_535;

/// Types of payloads.
pub(crate) const TYPE_IPV4: u16 = 0x0800;
pub(crate) const TYPE_ARP: u16 = 0x0806;
pub(crate) const TYPE_RARP: u16 = 0x8035;
pub(crate) const TYPE_IPV6: u16 = 0x86dd;
/// The type of a VLAN tag (IEEE 802.1Q).
pub(crate) const TYPE_TAG: u16 = 0x8100;
/// The type of a service tag.
const TYPE_SERVICE_TAG: u16 = 0x88a8;

/// Room in front of the frame, for the virtio header and a tag that the frame comes without.
const ROOM_BYTES: usize = 16;

/// The head of a frame, copied once, and its meaning.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    bytes: [u8; ROOM_BYTES + HEAD_BYTES],
    /// Bytes of the frame that are in `bytes`.
    read: usize,
    /// Size of the frame in bytes, without the virtio header.
    len_bytes: usize,
    /// The size of the virtio header that the frame came with.
    header_bytes: usize,
    /// The virtio header; zeros if the frame came without one.
    pub packet: PacketHeader,
    pub to: MacAddress,
    pub from: MacAddress,
    /// The tag's control information, if the frame has a tag.
    pub tag: Option<u16>,
    /// The type of the frame's payload.
    pub ether_type: u16,
    /// Where the payload begins in the frame.
    pub payload_at: usize,
}

/// The addresses of two stations, as a frame begins with them.
pub(crate) struct Between {
    start: u64,
    end: u32,
}

impl Between {
    pub const fn new(to: MacAddress, from: MacAddress) -> Self {
        let ([a, b, c, d, e, f], [g, h, i, j, k, l]) = (to.0, from.0);
        Self {
            start: u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
            end: u32::from_ne_bytes([i, j, k, l]),
        }
    }

    /// Whether these are the addresses: two comparisons instead of twelve.
    #[inline]
    const fn are(&self, addresses: &[u8; ADDRESSES_BYTES]) -> bool {
        let [a, b, c, d, e, f, g, h, i, j, k, l] = *addresses;
        u64::from_ne_bytes([a, b, c, d, e, f, g, h]) == self.start
            && u32::from_ne_bytes([i, j, k, l]) == self.end
    }
}

impl Head {
    pub const fn new() -> Self {
        Self {
            bytes: [0; ROOM_BYTES + HEAD_BYTES],
            read: 0,
            len_bytes: 0,
            header_bytes: 0,
            packet: PacketHeader {
                flags: 0,
                gso_type: 0,
                hdr_len: 0,
                gso_size: 0,
                csum_start: 0,
                csum_offset: 0,
                num_buffers: 0,
            },
            to: MacAddress([0; 6]),
            from: MacAddress([0; 6]),
            tag: None,
            ether_type: 0,
            payload_at: 0,
        }
    }

    /// A whole frame of the switch's own, padded to the least size of Ethernet.
    pub fn own(to: MacAddress, from: MacAddress, ether_type: u16, payload: &[u8]) -> Self {
        const LEAST_BYTES: usize = 60;
        let mut head = Self::new();
        let type_at = ROOM_BYTES.saturating_add(ADDRESSES_BYTES);
        put(&mut head.bytes, type_at, &ether_type.to_be_bytes());
        put(&mut head.bytes, ROOM_BYTES.saturating_add(ETHERNET_BYTES), payload);
        head.read = ETHERNET_BYTES.saturating_add(payload.len()).max(LEAST_BYTES);
        head.len_bytes = head.read;
        (head.to, head.from, head.ether_type) = (to, from, ether_type);
        head.payload_at = ETHERNET_BYTES;
        head
    }

    /// Copies the head of the frame in `segments`, once.
    ///
    /// # Errors
    /// The frame has not even a virtio header.
    #[inline]
    pub fn copy(&mut self, segments: &Segments, header_bytes: usize) -> Result<(), DropReason> {
        let start = ROOM_BYTES.saturating_sub(header_bytes);
        let end = start.saturating_add(HEAD_BYTES);
        let to = self.bytes.get_mut(start..end).ok_or(DropReason::Fragmented)?;
        let read = segments.copy_to_slice(0, to);
        let total = usize::try_from(segments.len_bytes()).unwrap_or(usize::MAX);
        self.header_bytes = header_bytes;
        self.read = read.checked_sub(header_bytes).ok_or(DropReason::Runt)?;
        self.len_bytes = total.checked_sub(header_bytes).ok_or(DropReason::Runt)?;
        Ok(())
    }

    /// Size of the frame in bytes, without the virtio header.
    #[inline]
    pub const fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The frame's first bytes, as far as they were copied.
    #[inline]
    pub fn frame(&self) -> &[u8] {
        self.bytes.get(ROOM_BYTES..ROOM_BYTES.saturating_add(self.read)).unwrap_or(&[])
    }

    /// The frame's payload, as far as it was copied.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        self.frame().get(self.payload_at..).unwrap_or(&[])
    }

    /// Changes bits of a byte of the frame. False if that byte was not copied.
    pub fn flip(&mut self, at: usize, bits: u8) -> bool {
        let is_known = at < self.read;
        match self.bytes.get_mut(ROOM_BYTES.saturating_add(at)).filter(|_| is_known) {
            Some(byte) => *byte ^= bits,
            None => return false,
        }
        true
    }

    /// Cuts the end off, so that `len_bytes` are left.
    pub fn shorten(&mut self, len_bytes: usize) {
        self.len_bytes = self.len_bytes.min(len_bytes);
        self.read = self.read.min(self.len_bytes);
    }

    /// Where the bytes that were not copied begin, in the memory of the sender, and their number.
    #[inline]
    pub const fn rest(&self) -> (usize, usize) {
        let skip = self.header_bytes.saturating_add(self.read);
        (skip, self.len_bytes.saturating_sub(self.read))
    }

    /// Copies the bytes that are not in the head from the memory of the sender to that of the
    /// receiver, which has `written` bytes of the frame already.
    #[inline]
    pub fn copy_rest(&self, from: &Segments, to: &Segments, written: usize) {
        let (skip, rest) = self.rest();
        if rest > 0 {
            let part = Part { skip_bytes: skip as u64, len_bytes: rest };
            from.copy_to(part, to, written as u64);
        }
    }

    /// Finds out what the frame is.
    ///
    /// # Errors
    /// The frame is no Ethernet frame, has several tags, or its offload header is wrong.
    #[inline]
    pub fn parse(&mut self, properties: &Properties) -> Result<(), DropReason> {
        self.packet = self.virtio_header(properties.header_bytes);
        let frame = self.frame();
        let to: [u8; 6] = array(frame, 0).ok_or(DropReason::Runt)?;
        let from: [u8; 6] = array(frame, 6).ok_or(DropReason::Runt)?;
        let mut ether_type = be16(frame, ADDRESSES_BYTES).ok_or(DropReason::Runt)?;
        let mut payload_at = ETHERNET_BYTES;
        let mut tag = None;
        if ether_type == TYPE_TAG {
            tag = Some(be16(frame, ETHERNET_BYTES).ok_or(DropReason::Runt)?);
            ether_type = be16(frame, 16).ok_or(DropReason::Runt)?;
            payload_at = ETHERNET_BYTES.saturating_add(TAG_BYTES);
        }
        if ether_type == TYPE_SERVICE_TAG || ether_type == TYPE_TAG {
            return Err(DropReason::VlanStack);
        }
        (self.to, self.from) = (MacAddress(to), MacAddress(from));
        (self.tag, self.ether_type, self.payload_at) = (tag, ether_type, payload_at);
        self.check_size(properties)?;
        self.check_offload(properties)
    }

    #[inline]
    fn virtio_header(&self, header_bytes: usize) -> PacketHeader {
        let header = self.bytes.get(ROOM_BYTES.saturating_sub(header_bytes)..ROOM_BYTES);
        let mut bytes = [0; PacketHeader::BYTES];
        if let Some(header) = header {
            put(&mut bytes, 0, header);
        }
        PacketHeader::decode(&bytes)
    }

    /// The type of the frame's payload and the payload, as far as it was copied, if the frame is
    /// of the simplest kind: between these two stations, without a tag and without an offload.
    #[inline]
    pub fn simple(&self, between: &Between) -> Option<(u16, &[u8])> {
        let (addresses, rest) = self.frame().split_first_chunk::<ADDRESSES_BYTES>()?;
        let (ether_type, payload) = rest.split_first_chunk()?;
        let ether_type = u16::from_be_bytes(*ether_type);
        // The flags and the type of the offload.
        let header = self.bytes.get(ROOM_BYTES.saturating_sub(self.header_bytes)..)?;
        let has_offload = self.header_bytes > 0 && !matches!(header, [0, 0, ..]);
        let is_tagged = ether_type == TYPE_TAG || ether_type == TYPE_SERVICE_TAG;
        let is_simple = between.are(addresses) && !is_tagged && !has_offload;
        is_simple.then_some((ether_type, payload))
    }

    /// Notes the meaning of a frame of the simplest kind, for those that look at it further.
    #[inline]
    pub fn set_simple(&mut self, to: MacAddress, from: MacAddress, ether_type: u16) {
        self.packet = PacketHeader::default();
        (self.to, self.from, self.tag) = (to, from, None);
        (self.ether_type, self.payload_at) = (ether_type, ETHERNET_BYTES);
    }

    /// Writes the virtio header of a frame of the simplest kind, for a receiver that gets it in one
    /// buffer.
    ///
    /// Some time before [`simple_with_header`](Self::simple_with_header): a long load of bytes that
    /// short stores have just written waits for those.
    #[inline]
    pub fn write_simple_header(&mut self, header_bytes: usize) {
        let start = ROOM_BYTES.saturating_sub(header_bytes);
        let header = PacketHeader { num_buffers: 1, ..PacketHeader::default() }.encode();
        put(&mut self.bytes, start, header.get(..header_bytes).unwrap_or(&[]));
    }

    /// The head with the virtio header that was written.
    #[inline]
    pub fn simple_with_header(&self, header_bytes: usize) -> &[u8] {
        let start = ROOM_BYTES.saturating_sub(header_bytes);
        self.bytes.get(start..ROOM_BYTES.saturating_add(self.read)).unwrap_or(&[])
    }

    /// The offloads that the frame needs of its receiver.
    #[inline]
    pub fn needs(&self) -> Offloads {
        let gso = Offloads::of_gso(self.packet.gso_type).unwrap_or(Offloads::NONE);
        gso.and(Offloads::CHECKSUM.when(self.packet.flags & flag::NEEDS_CSUM != 0))
    }

    /// Whether the frame is to be cut.
    #[inline]
    pub const fn is_large(&self) -> bool {
        self.packet.gso_type != gso::NONE
    }

    #[inline]
    fn check_size(&self, properties: &Properties) -> Result<(), DropReason> {
        // As long as with a tag: the limit is the same with and without.
        let (len_bytes, most) = if self.is_large() {
            (self.len_bytes, PACKET_BYTES_MAX.saturating_add(self.payload_at))
        } else {
            (self.len_with(Some(0)), properties.frame_bytes)
        };
        if len_bytes > most { Err(DropReason::TooLong) } else { Ok(()) }
    }

    /// Checks the virtio header of a frame (5.1.6.2), and clears the fields that its flags leave
    /// without a meaning.
    #[inline]
    fn check_offload(&mut self, properties: &Properties) -> Result<(), DropReason> {
        let packet = &mut self.packet;
        packet.flags &= flag::NEEDS_CSUM;
        packet.num_buffers = 0;
        if packet.flags == 0 && packet.gso_type == gso::NONE {
            *packet = PacketHeader::default();
            return Ok(());
        }
        let bad = DropReason::BadOffload;
        let needs = Offloads::of_gso(packet.gso_type).ok_or(bad)?;
        if packet.flags == 0 || !properties.sends.have(needs.and(Offloads::CHECKSUM)) {
            return Err(bad);
        }
        // The checksum lies behind where it starts, in the payload, and in the frame.
        let start = usize::from(packet.csum_start);
        let end = start.saturating_add(packet.csum_offset.into()).saturating_add(2);
        if start < self.payload_at || end > self.len_bytes {
            return Err(bad);
        }
        if packet.gso_type == gso::NONE {
            (packet.gso_size, packet.hdr_len) = (0, 0);
            return Ok(());
        }
        if packet.gso_size == 0 {
            return Err(bad);
        }
        let headers = crate::offload::headers(self).ok_or(bad)?;
        self.packet.hdr_len = u16::try_from(headers).map_err(|_| bad)?;
        Ok(())
    }

    /// Writes the head as the receiver gets it: its virtio header, the addresses, `tag`, and the
    /// rest. Returns all of it.
    #[inline]
    pub fn compose(&mut self, header_bytes: usize, tag: Option<u16>, buffers: u16) -> &[u8] {
        let start = self.write_headers(header_bytes, tag, buffers, self.packet);
        let end = ROOM_BYTES.saturating_add(self.read);
        self.bytes.get(start..end).unwrap_or(&[])
    }

    /// As [`compose`](Self::compose), with this virtio header, and only up to the payload.
    pub fn compose_prefix(
        &mut self,
        header_bytes: usize,
        tag: Option<u16>,
        buffers: u16,
        packet: PacketHeader,
    ) -> &[u8] {
        let start = self.write_headers(header_bytes, tag, buffers, packet);
        let end = ROOM_BYTES.saturating_add(self.payload_at);
        self.bytes.get(start..end).unwrap_or(&[])
    }

    /// Writes everything in front of the payload. Returns where it begins.
    #[inline]
    fn write_headers(
        &mut self,
        header_bytes: usize,
        tag: Option<u16>,
        buffers: u16,
        packet: PacketHeader,
    ) -> usize {
        let (to, from) = (self.to, self.from);
        let type_at = ROOM_BYTES.saturating_add(self.payload_at).saturating_sub(2);
        let tag_bytes = if tag.is_some() { TAG_BYTES } else { 0 };
        let frame_at = type_at.saturating_sub(ADDRESSES_BYTES).saturating_sub(tag_bytes);
        put(&mut self.bytes, frame_at, &to.0);
        put(&mut self.bytes, frame_at.saturating_add(6), &from.0);
        if let Some(tag) = tag {
            let at = frame_at.saturating_add(ADDRESSES_BYTES);
            put(&mut self.bytes, at, &TYPE_TAG.to_be_bytes());
            put(&mut self.bytes, at.saturating_add(2), &tag.to_be_bytes());
        }
        let start = frame_at.saturating_sub(header_bytes);
        if header_bytes > 0 {
            let header = PacketHeader { num_buffers: buffers, ..self.moved(packet, tag) };
            let header = header.encode();
            put(&mut self.bytes, start, header.get(..header_bytes).unwrap_or(&header));
        }
        start
    }

    /// The virtio header for a frame with this tag, which moves what its fields point to.
    #[inline]
    fn moved(&self, mut packet: PacketHeader, tag: Option<u16>) -> PacketHeader {
        if packet.flags != 0 && tag.is_some() != self.tag.is_some() {
            let moved = |at: u16| match tag {
                Some(_) => at.saturating_add(TAG_BYTES as u16),
                None => at.saturating_sub(TAG_BYTES as u16),
            };
            packet.csum_start = moved(packet.csum_start);
            if packet.hdr_len > 0 {
                packet.hdr_len = moved(packet.hdr_len);
            }
        }
        packet
    }

    /// Size of the frame with this tag, in bytes, without the virtio header.
    #[inline]
    pub const fn len_with(&self, tag: Option<u16>) -> usize {
        match (self.tag, tag) {
            (None, Some(_)) => self.len_bytes.saturating_add(TAG_BYTES),
            (Some(_), None) => self.len_bytes.saturating_sub(TAG_BYTES),
            _ => self.len_bytes,
        }
    }
}
