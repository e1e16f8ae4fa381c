//! A packet socket for packets that the kernel, or a network card, cuts into segments
//! (packet(7): `PACKET_VNET_HDR`; virtio 1.2, 5.1.6: `struct virtio_net_hdr`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use sidecore_memory::GuestMemory;

use crate::PacketSocket;
use crate::gather::{Gather, Place};
use crate::packet_socket::{Interface, OffloadFilter, PacketRing};

/// Bytes of `struct virtio_net_hdr`.
const VNET_HEADER_BYTES: usize = 10;
/// Pieces of memory that a packet consists of at most, behind its header.
pub const OFFLOAD_PLACES_MAX: usize = 64;
/// Ethernet, IPv4 and TCP without options.
const HEADER_BYTES: usize = 14 + 20 + 20;
const TRANSPORT_AT: u16 = 14 + 20;
/// Offset of TCP's checksum in its header.
const CHECKSUM_AT: u16 = 16;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`.
const NEEDS_CHECKSUM: u8 = 1;
/// `VIRTIO_NET_HDR_GSO_TCPV4`.
const TCPV4: u8 = 1;

/// A packet socket whose packets have IPv4 and TCP headers, and are cut into segments as late on
/// their way as possible, or never. It sends from one piece of memory, without a ring, and receives
/// through a ring of its own.
#[derive(Debug)]
pub struct OffloadSocket {
    socket: PacketSocket,
    gather: Gather,
    received: GuestMemory,
    header: Box<[u8; VNET_HEADER_BYTES + HEADER_BYTES]>,
    vectors: Box<[libc::iovec]>,
    address: Box<libc::sockaddr_ll>,
}

// SAFETY: the vectors point into the memory of `gather`, into `header` or into a caller's slice,
// and are read only while a call runs. None of it belongs to a thread.
unsafe impl Send for OffloadSocket {}

impl OffloadSocket {
    /// A socket on an interface, which sends from `memory` of one region, and receives what passes
    /// `filter` into a ring of this shape.
    ///
    /// # Errors
    /// The process lacks CAP_NET_RAW, the kernel lacks an option or memory, the interface is gone.
    pub fn new(
        interface: &Interface,
        filter: &OffloadFilter,
        memory: GuestMemory,
        receive: &PacketRing,
        bypass_qdisc: bool,
    ) -> io::Result<Self> {
        let socket = PacketSocket::new()?;
        let received = socket.set_up_offload(receive, bypass_qdisc)?;
        socket.bind_offload(interface, filter)?;
        // SAFETY: zeroed, both are valid and name no memory.
        let (vector, mut address): (libc::iovec, libc::sockaddr_ll) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        address.sll_family = libc::AF_PACKET as u16;
        // Without a protocol: the kernel takes it from the Ethernet header.
        address.sll_ifindex =
            i32::try_from(interface.index).map_err(|_| io::ErrorKind::InvalidInput)?;
        Ok(Self {
            socket,
            gather: Gather::new(memory)?,
            received,
            header: Box::new([0; VNET_HEADER_BYTES + HEADER_BYTES]),
            vectors: vec![vector; OFFLOAD_PLACES_MAX + 1].into(),
            address: Box::new(address),
        })
    }

    /// The receive ring.
    #[must_use]
    pub fn received(&self) -> &GuestMemory {
        &self.received
    }

    /// Sends a packet: Ethernet, IPv4 and TCP headers, then `places` of the memory. If
    /// `segment_bytes` is not zero, each segment has so many bytes of them, but for the last one.
    /// The kernel has copied the packet when this returns.
    ///
    /// # Errors
    /// Too many places, or one outside of memory; the interface is down or gone, cannot take more
    /// for now, or cannot cut packets.
    pub fn send(
        &mut self,
        header: &[u8; HEADER_BYTES],
        segment_bytes: u16,
        places: &[Place],
    ) -> io::Result<()> {
        if places.len() > OFFLOAD_PLACES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (vector, place) in self.vectors[1..].iter_mut().zip(places) {
            *vector = self.gather.vector(*place)?;
        }
        self.transmit(header, segment_bytes, places.len())
    }

    /// The same with a payload of the caller's.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_bytes(
        &mut self,
        header: &[u8; HEADER_BYTES],
        segment_bytes: u16,
        payload: &[u8],
    ) -> io::Result<()> {
        let iov_base = payload.as_ptr().cast_mut().cast();
        self.vectors[1] = libc::iovec { iov_base, iov_len: payload.len() };
        self.transmit(header, segment_bytes, 1)
    }

    /// Sends the header and the vectors behind the first one.
    fn transmit(
        &mut self,
        header: &[u8; HEADER_BYTES],
        segment_bytes: u16,
        pieces: usize,
    ) -> io::Result<()> {
        let is_cut = segment_bytes != 0;
        // `struct virtio_net_hdr`, in the byte order of this machine.
        let [length, size, start, offset] =
            [HEADER_BYTES as u16, segment_bytes, TRANSPORT_AT, CHECKSUM_AT].map(u16::to_ne_bytes);
        let flags = [NEEDS_CHECKSUM, if is_cut { TCPV4 } else { 0 }];
        let bytes = [flags, length, size, start, offset].into_iter().flatten().chain(*header);
        self.header.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
        self.vectors[0] =
            libc::iovec { iov_base: self.header.as_mut_ptr().cast(), iov_len: self.header.len() };
        // SAFETY: a zeroed message is a valid one.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_name = (&raw mut *self.address).cast();
        message.msg_namelen = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        message.msg_iov = self.vectors.as_mut_ptr();
        message.msg_iovlen = (pieces + 1) as _;
        let (fd, flags) =
            (self.socket.as_fd().as_raw_fd(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        // SAFETY: the kernel reads the address, and what the first `pieces + 1` vectors name: the
        // header, and ranges of `gather` or of the slice that the caller of `send_bytes` lends.
        let sent = unsafe { libc::sendmsg(fd, &raw const message, flags) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// See [`PacketSocket::take_drops`].
    ///
    /// # Errors
    /// None that is known.
    pub fn take_drops(&self) -> io::Result<u32> {
        self.socket.take_drops()
    }

    /// See [`PacketSocket::take_error`].
    pub fn take_error(&self) -> Option<io::Error> {
        self.socket.take_error()
    }

    /// See [`PacketSocket::receive_nothing`].
    ///
    /// # Errors
    /// The kernel is out of memory.
    pub fn receive_nothing(&self) -> io::Result<()> {
        self.socket.receive_nothing()
    }
}

impl AsFd for OffloadSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
