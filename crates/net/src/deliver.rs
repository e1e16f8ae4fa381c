//! One copy of a frame into the buffers of one queue.

use sidecore_memory::Segments;
use sidecore_spec_virtio::net::{PacketHeader, flag};

use crate::head::Head;
use crate::offload::{COPY_BYTES, Cut, complete_checksum};
use crate::ports::Lane;
use crate::{DropReason, NoBuffers, Offloads, PortStats};

/// Private memory for frames that need an offload in software.
pub(crate) struct Copy {
    bytes: Box<[u8]>,
}

impl Copy {
    pub fn new() -> Self {
        Self { bytes: vec![0; COPY_BYTES].into() }
    }

    /// The whole frame, copied from its head and from the sender's memory.
    fn fill(&mut self, head: &Head, segments: &Segments) -> Option<&mut [u8]> {
        let known = head.frame();
        let (skip, rest) = head.rest();
        let frame = self.bytes.get_mut(..head.len_bytes())?;
        frame.get_mut(..known.len())?.copy_from_slice(known);
        let to = frame.get_mut(known.len()..)?;
        // A list that ends before the frame does cannot be: sizes come from the list.
        (segments.copy_to_slice(skip as u64, to) == rest).then_some(frame)
    }
}

/// A frame to be delivered.
pub(crate) struct Parcel<'a> {
    pub head: &'a mut Head,
    /// The frame, in the memory of its sender.
    pub segments: &'a Segments,
}

impl Parcel<'_> {
    /// Copies the frame to buffers of `lane`, with this tag.
    ///
    /// # Errors
    /// Nothing was delivered: there are no buffers, or the frame cannot go there.
    #[inline]
    pub fn deliver(
        &mut self,
        lane: &mut Lane,
        tag: Option<u16>,
        copy: &mut Copy,
        stats: &PortStats,
    ) -> Result<(), NoBuffers> {
        let needs = self.head.needs();
        let takes = lane.properties.takes;
        if self.head.is_large() {
            let cut = Cut::new(self.head, takes.have(Offloads::CHECKSUM));
            let cut = cut.ok_or(NoBuffers::Never(DropReason::Mtu))?;
            if !lane.fits(cut.longest(), self.head.tag) {
                return Err(NoBuffers::Never(DropReason::Mtu));
            }
            if !takes.have(needs) {
                return self.deliver_parts(&cut, lane, tag, copy, stats);
            }
        } else {
            if !lane.fits(self.head.len_bytes(), self.head.tag) {
                return Err(NoBuffers::Never(DropReason::Mtu));
            }
            if !takes.have(needs) {
                return self.deliver_summed(lane, tag, copy, stats);
            }
        }
        self.deliver_whole(lane, tag, stats)
    }

    /// Copies the frame as it is.
    #[inline]
    fn deliver_whole(
        &mut self,
        lane: &mut Lane,
        tag: Option<u16>,
        stats: &PortStats,
    ) -> Result<(), NoBuffers> {
        let header_bytes = lane.properties.header_bytes;
        let len_bytes = self.head.len_with(tag);
        lend(lane, header_bytes.saturating_add(len_bytes))?;
        let head = self.head.compose(header_bytes, tag, lane.loan.buffers);
        let written = lane.loan.segments.copy_from_slice(0, head);
        self.head.copy_rest(self.segments, &lane.loan.segments, written);
        commit(lane, len_bytes, self.head.to.is_group(), stats);
        stats.out_copies.add(1);
        Ok(())
    }

    /// Completes the checksum of a private copy, and delivers that.
    fn deliver_summed(
        &mut self,
        lane: &mut Lane,
        tag: Option<u16>,
        copy: &mut Copy,
        stats: &PortStats,
    ) -> Result<(), NoBuffers> {
        let header_bytes = lane.properties.header_bytes;
        let len_bytes = self.head.len_with(tag);
        lend(lane, header_bytes.saturating_add(len_bytes))?;
        let packet = self.head.packet;
        let Some(frame) = copy.fill(self.head, self.segments) else {
            lane.queue.cancel();
            return Err(NoBuffers::Never(DropReason::Mtu));
        };
        complete_checksum(frame, packet.csum_start.into(), packet.csum_offset.into());
        let frame: &[u8] = frame;
        let payload_at = self.head.payload_at;
        let buffers = lane.loan.buffers;
        let prefix = self.head.compose_prefix(header_bytes, tag, buffers, PacketHeader::default());
        let written = lane.loan.segments.copy_from_slice(0, prefix);
        let payload = frame.get(payload_at..).unwrap_or(&[]);
        lane.loan.segments.copy_from_slice(written as u64, payload);
        commit(lane, len_bytes, self.head.to.is_group(), stats);
        stats.out_checksums.add(1);
        stats.out_copies.add(1);
        Ok(())
    }

    /// Cuts a private copy, and delivers the parts. Once the first one is delivered, parts for
    /// which there are no buffers are lost, as they would be on a wire.
    fn deliver_parts(
        &mut self,
        cut: &Cut,
        lane: &mut Lane,
        tag: Option<u16>,
        copy: &mut Copy,
        stats: &PortStats,
    ) -> Result<(), NoBuffers> {
        let unusable = NoBuffers::Never(DropReason::Mtu);
        let frame: &[u8] = copy.fill(self.head, self.segments).ok_or(unusable)?;
        for number in 0..cut.parts() {
            let sent = self.deliver_part(cut, number, frame, lane, tag, stats);
            match sent {
                Ok(()) => {}
                Err(error) if number == 0 => return Err(error),
                Err(_) => {
                    stats.out_cut_losses.add(cut.parts().saturating_sub(number) as u64);
                    break;
                }
            }
        }
        stats.out_cuts.add(1);
        stats.out_copies.add(1);
        Ok(())
    }

    fn deliver_part(
        &mut self,
        cut: &Cut,
        number: usize,
        frame: &[u8],
        lane: &mut Lane,
        tag: Option<u16>,
        stats: &PortStats,
    ) -> Result<(), NoBuffers> {
        let header_bytes = lane.properties.header_bytes;
        let unusable = NoBuffers::Never(DropReason::Mtu);
        let part = cut.part(frame, number).ok_or(unusable)?;
        let data = frame.get(part.data).ok_or(unusable)?;
        let headers = part.headers.get(self.head.payload_at..part.headers_bytes).ok_or(unusable)?;
        let grown = self.head.len_with(tag).saturating_add(part.headers_bytes);
        let len_bytes = grown.saturating_add(data.len()).saturating_sub(self.head.len_bytes());
        lend(lane, header_bytes.saturating_add(len_bytes))?;
        // The receiver completes the checksum if it can.
        let leaves_checksum = lane.properties.takes.have(Offloads::CHECKSUM);
        let packet = PacketHeader {
            flags: if leaves_checksum { flag::NEEDS_CSUM } else { 0 },
            csum_start: if leaves_checksum { self.head.packet.csum_start } else { 0 },
            csum_offset: if leaves_checksum { self.head.packet.csum_offset } else { 0 },
            ..PacketHeader::default()
        };
        let prefix = self.head.compose_prefix(header_bytes, tag, lane.loan.buffers, packet);
        let written = lane.loan.segments.copy_from_slice(0, prefix);
        let written =
            written.saturating_add(lane.loan.segments.copy_from_slice(written as u64, headers));
        lane.loan.segments.copy_from_slice(written as u64, data);
        commit(lane, len_bytes, false, stats);
        if !leaves_checksum {
            stats.out_checksums.add(1);
        }
        Ok(())
    }
}

/// Borrows buffers for `len_bytes`.
#[inline]
fn lend(lane: &mut Lane, len_bytes: usize) -> Result<(), NoBuffers> {
    if !lane.is_up {
        return Err(NoBuffers::Never(DropReason::PortDown));
    }
    lane.queue.lend(len_bytes, &mut lane.loan)?;
    if lane.loan.segments.len_bytes() == len_bytes as u64 {
        return Ok(());
    }
    debug_assert!(false, "a queue lends as many bytes as it was asked for");
    lane.queue.cancel();
    Err(NoBuffers::Never(DropReason::Unusable))
}

/// Gives the buffers to the station, with a frame of `len_bytes` in them.
#[inline]
fn commit(lane: &mut Lane, len_bytes: usize, is_group: bool, stats: &PortStats) {
    lane.queue.commit();
    lane.is_touched = true;
    stats.out_frames.add(1);
    stats.out_octets.add(len_bytes as u64);
    stats.out_group.add(is_group.into());
}
