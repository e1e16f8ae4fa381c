//! A packet socket with rings (packet(7), Documentation/networking/packet_mmap.rst in the kernel's
//! source), TPACKET_V2.
//!
//! The unsafe part of it is here: options, addresses and requests that have no safe wrapper. The
//! rings themselves are [`GuestMemory`], whose accesses are checked.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, netdevice, sockopt};
use sidecore_memory::GuestMemory;
use sidecore_units::PAGE_BYTES;

/// Memory that the kernel allocates at once for a ring, if a slot is not larger.
const BLOCK_BYTES: u32 = 256 << 10;
/// Offset of the ethertype in a frame.
const ETHERTYPE_AT: u32 = 12;
const ETHERNET_BYTES: u32 = 14;
/// Bytes of packets that an interface may have taken and not sent.
const OFFLOAD_SEND_BYTES: usize = 16 << 20;
/// linux/sockios.h.
const SIOCETHTOOL: libc::c_ulong = 0x8946;

/// An Ethernet interface, as it was when it was looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The kernel's number for it.
    pub index: u32,
    /// The longest payload of a frame.
    pub mtu_bytes: u32,
    /// Its own address.
    pub address: [u8; 6],
}

/// The shape of one of a socket's rings: slots of one size in blocks that the kernel allocates. A
/// slot does not cross the end of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketRing {
    slot_bytes: u32,
    block_bytes: u32,
    blocks: u32,
}

impl PacketRing {
    /// A ring of at least `slots` slots of `slot_bytes`, which is a multiple of 16.
    #[must_use]
    pub fn new(slot_bytes: u32, slots: u32) -> Self {
        let page = PAGE_BYTES as u32;
        let block_bytes = BLOCK_BYTES.max(slot_bytes.next_multiple_of(page));
        let per_block = block_bytes / slot_bytes.max(1);
        Self { slot_bytes, block_bytes, blocks: slots.div_ceil(per_block.max(1)) }
    }

    /// Number of slots.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.per_block() * self.blocks
    }

    /// Size in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        u64::from(self.block_bytes) * u64::from(self.blocks)
    }

    /// Where a slot begins in the ring.
    #[must_use]
    pub fn slot_at(&self, slot: u32) -> u64 {
        let (block, index) = (slot / self.per_block(), slot % self.per_block());
        u64::from(block) * u64::from(self.block_bytes)
            + u64::from(index) * u64::from(self.slot_bytes)
    }

    fn per_block(&self) -> u32 {
        (self.block_bytes / self.slot_bytes.max(1)).max(1)
    }

    fn request(&self) -> libc::tpacket_req {
        libc::tpacket_req {
            tp_block_size: self.block_bytes,
            tp_block_nr: self.blocks,
            tp_frame_size: self.slot_bytes,
            tp_frame_nr: self.slots(),
        }
    }
}

/// The shape of a socket.
#[derive(Clone, Copy, Debug)]
pub struct PacketSetup {
    /// The ring for received frames.
    pub receive: PacketRing,
    /// The ring for frames to send, which lies behind it in memory.
    pub transmit: PacketRing,
    /// Bytes between a slot's header and a received frame, more than the least (`PACKET_RESERVE`).
    pub reserve_bytes: u32,
    /// Frames go to the driver's queue at once, and not through the interface's queueing discipline
    /// (`PACKET_QDISC_BYPASS`).
    pub bypass_qdisc: bool,
    /// Each frame has a `struct virtio_net_hdr` of [`VIRTIO_HEADER_BYTES`] in front, in both
    /// directions (`PACKET_VNET_HDR`).
    pub has_virtio_headers: bool,
}

/// Size of the virtio header of a packet socket's frames.
pub const VIRTIO_HEADER_BYTES: usize = 10;

/// The frames that a socket receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameFilter {
    /// Their protocol.
    pub ethertype: u16,
    /// Several sockets share the frames: each has those whose byte at this offset of the payload,
    /// modulo the number of sockets, is its own number.
    pub share: Option<FrameShare>,
}

/// A socket's share of the frames that arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameShare {
    /// Offset of the byte that decides, behind the Ethernet header.
    pub byte_at: u32,
    /// The number of this socket, below `count`.
    pub index: u8,
    /// The number of sockets.
    pub count: u8,
}

/// The IPv4 packets with a fake TCP header that a socket receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadFilter {
    /// Source and destination address.
    pub addresses: [u32; 2],
    /// The destination port.
    pub port: u16,
    /// As in [`FrameFilter`], of the low byte of the source port.
    pub share: Option<FrameShare>,
}

/// A raw packet socket on one interface, for the frames of one protocol.
#[derive(Debug)]
pub struct PacketSocket(OwnedFd);

impl PacketSocket {
    /// A socket that receives nothing yet.
    ///
    /// # Errors
    /// The process lacks CAP_NET_RAW, or the kernel packet sockets.
    pub fn new() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // Without a protocol: no frame can come in before the filter is there.
        Ok(Self(rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?))
    }

    /// Looks an interface up, in this thread's network namespace.
    ///
    /// # Errors
    /// There is no interface of this name, or it is no Ethernet.
    pub fn interface(&self, name: &str) -> io::Result<Interface> {
        let index = netdevice::name_to_index(&self.0, name)?;
        let mtu = self.ask(name, libc::SIOCGIFMTU)?;
        // SAFETY: SIOCGIFMTU has set this field.
        let mtu = unsafe { mtu.ifr_ifru.ifru_mtu };
        let hardware = self.ask(name, libc::SIOCGIFHWADDR)?;
        // SAFETY: SIOCGIFHWADDR has set this field.
        let hardware = unsafe { hardware.ifr_ifru.ifru_hwaddr };
        if hardware.sa_family != libc::ARPHRD_ETHER {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("{name} is no Ethernet interface"),
            ));
        }
        let mut address = [0; 6];
        for (byte, from) in address.iter_mut().zip(hardware.sa_data) {
            *byte = from as u8;
        }
        Ok(Interface { index, mtu_bytes: u32::try_from(mtu).unwrap_or(0), address })
    }

    /// Whether an interface is up, and whether it has a carrier.
    ///
    /// # Errors
    /// There is no interface of this name.
    pub fn is_running(&self, name: &str) -> io::Result<(bool, bool)> {
        let answer = self.ask(name, libc::SIOCGIFFLAGS)?;
        // SAFETY: SIOCGIFFLAGS has set this field.
        let flags = libc::c_int::from(unsafe { answer.ifr_ifru.ifru_flags });
        Ok((flags & libc::IFF_UP != 0, flags & libc::IFF_RUNNING != 0))
    }

    /// The number of an interface's receive queues (ethtool(8), `--show-channels`); 1 if its driver
    /// does not tell.
    ///
    /// # Errors
    /// There is no interface of this name.
    pub fn receive_queues(&self, name: &str) -> io::Result<u32> {
        /// `ETHTOOL_GCHANNELS` (linux/ethtool.h).
        const GET_CHANNELS: u32 = 0x3c;
        // `struct ethtool_channels`: the command, four largest numbers, and those in use for
        // receiving, sending, other interrupts, and both receiving and sending.
        let mut channels = [0_u32; 9];
        channels[0] = GET_CHANNELS;
        let mut request = named(name)?;
        request.ifr_ifru.ifru_data = channels.as_mut_ptr().cast();
        // SAFETY: the kernel reads the name, and writes nine numbers to where the request points.
        let code = unsafe { libc::ioctl(self.0.as_raw_fd(), SIOCETHTOOL as _, &raw mut request) };
        if code >= 0 {
            return Ok(channels[5].saturating_add(channels[8]).max(1));
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() == Some(libc::EOPNOTSUPP) { Ok(1) } else { Err(error) }
    }

    fn ask(&self, name: &str, request: libc::c_ulong) -> io::Result<libc::ifreq> {
        let mut answer = named(name)?;
        // SAFETY: all requests that are used here read the name and write the union behind it.
        let code = unsafe { libc::ioctl(self.0.as_raw_fd(), request as _, &raw mut answer) };
        if code < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
    }

    /// Makes the rings and maps them: first the receive ring, then the transmit ring.
    ///
    /// # Errors
    /// The kernel has no memory for them, or lacks an option.
    pub fn set_up(&self, setup: &PacketSetup) -> io::Result<GuestMemory> {
        let yes: libc::c_int = 1;
        self.set(libc::PACKET_VERSION, &(libc::tpacket_versions::TPACKET_V2 as libc::c_int))?;
        self.set(libc::PACKET_RESERVE, &setup.reserve_bytes)?;
        // The frame's place in a transmit slot is ours to choose.
        self.set(libc::PACKET_TX_HAS_OFF, &yes)?;
        // A slot that the kernel cannot send is skipped, and does not stop the ring.
        self.set(libc::PACKET_LOSS, &yes)?;
        if setup.bypass_qdisc {
            self.set(libc::PACKET_QDISC_BYPASS, &yes)?;
        }
        if setup.has_virtio_headers {
            self.set(libc::PACKET_VNET_HDR, &yes)?;
        }
        self.set(libc::PACKET_RX_RING, &setup.receive.request())?;
        self.set(libc::PACKET_TX_RING, &setup.transmit.request())?;
        // All frames of the ring are accounted to the socket; four times that, so that it is
        // writable again, and wakes, whenever a slot is.
        let send_bytes =
            usize::try_from(setup.transmit.len_bytes()).unwrap_or(usize::MAX).saturating_mul(4);
        let send_bytes = send_bytes.min(1 << 30);
        if sockopt::set_socket_send_buffer_size_force(&self.0, send_bytes).is_err() {
            sockopt::set_socket_send_buffer_size(&self.0, send_bytes)?;
        }
        let len_bytes = setup.receive.len_bytes() + setup.transmit.len_bytes();
        let len_bytes = usize::try_from(len_bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        GuestMemory::map_kernel_rings(self.0.as_fd(), 0, len_bytes).map_err(io::Error::other)
    }

    /// Makes a receive ring for packets with a `struct virtio_net_hdr` in front, and maps it.
    pub(crate) fn set_up_offload(
        &self,
        receive: &PacketRing,
        bypass_qdisc: bool,
    ) -> io::Result<GuestMemory> {
        let yes: libc::c_int = 1;
        self.set(libc::PACKET_VERSION, &(libc::tpacket_versions::TPACKET_V2 as libc::c_int))?;
        self.set(libc::PACKET_VNET_HDR, &yes)?;
        if bypass_qdisc {
            self.set(libc::PACKET_QDISC_BYPASS, &yes)?;
        }
        self.set(libc::PACKET_RX_RING, &receive.request())?;
        if sockopt::set_socket_send_buffer_size_force(&self.0, OFFLOAD_SEND_BYTES).is_err() {
            sockopt::set_socket_send_buffer_size(&self.0, OFFLOAD_SEND_BYTES)?;
        }
        let len_bytes =
            usize::try_from(receive.len_bytes()).map_err(|_| io::ErrorKind::OutOfMemory)?;
        GuestMemory::map_kernel_rings(self.0.as_fd(), 0, len_bytes).map_err(io::Error::other)
    }

    /// Receives, from now on, packets that pass `filter` and arrive at the interface for this host.
    pub(crate) fn bind_offload(
        &self,
        interface: &Interface,
        filter: &OffloadFilter,
    ) -> io::Result<()> {
        self.attach(&own_packets(filter))?;
        self.bind_to(interface, libc::ETH_P_IP as u16)
    }

    /// Receives, from now on, frames that pass `filter` and arrive at the interface for this host.
    ///
    /// # Errors
    /// The interface is gone.
    pub fn bind(&self, interface: &Interface, filter: &FrameFilter) -> io::Result<()> {
        self.attach(&own_frames(filter))?;
        self.bind_to(interface, filter.ethertype)
    }

    /// Receives, from now on, all frames that arrive at the interface, for any station
    /// (`PACKET_MR_PROMISC`), and none that this host sends.
    ///
    /// # Errors
    /// The interface is gone.
    pub fn bind_to_all(&self, interface: &Interface) -> io::Result<()> {
        let yes: libc::c_int = 1;
        self.set(libc::PACKET_IGNORE_OUTGOING, &yes)?;
        let index = i32::try_from(interface.index).map_err(|_| io::ErrorKind::InvalidInput)?;
        let membership = libc::packet_mreq {
            mr_ifindex: index,
            mr_type: libc::PACKET_MR_PROMISC as u16,
            mr_alen: 0,
            mr_address: [0; 8],
        };
        self.set(libc::PACKET_ADD_MEMBERSHIP, &membership)?;
        self.bind_to(interface, libc::ETH_P_ALL as u16)
    }

    fn bind_to(&self, interface: &Interface, ethertype: u16) -> io::Result<()> {
        // SAFETY: a zeroed address is a valid one.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = ethertype.to_be();
        address.sll_ifindex =
            i32::try_from(interface.index).map_err(|_| io::ErrorKind::InvalidInput)?;
        let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the kernel reads `len` bytes of the address.
        let code = unsafe { libc::bind(self.0.as_raw_fd(), (&raw const address).cast(), len) };
        if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Receives nothing any more. The socket lives on as long as its rings are mapped.
    ///
    /// # Errors
    /// The kernel is out of memory.
    pub fn receive_nothing(&self) -> io::Result<()> {
        self.attach(&[statement(libc::BPF_RET | libc::BPF_K, 0)])
    }

    /// Has the kernel send the slots that are ready. Returns the bytes of the frames that it took.
    ///
    /// # Errors
    /// The interface is down or gone, or cannot take more for now: the slots stay ready.
    pub fn transmit(&self) -> io::Result<usize> {
        Ok(rustix::net::send(&self.0, &[], SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    /// Frames that found no free slot since the last call.
    ///
    /// # Errors
    /// None that is known.
    pub fn take_drops(&self) -> io::Result<u32> {
        let mut stats = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
        let mut len = size_of::<libc::tpacket_stats>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `stats`, and the size to `len`.
        let code = unsafe {
            let (option, stats) = (libc::PACKET_STATISTICS, (&raw mut stats).cast());
            libc::getsockopt(self.0.as_raw_fd(), libc::SOL_PACKET, option, stats, &raw mut len)
        };
        if code < 0 { Err(io::Error::last_os_error()) } else { Ok(stats.tp_drops) }
    }

    /// The error that has happened to the socket since the last call, such as `ENETDOWN`.
    pub fn take_error(&self) -> Option<io::Error> {
        sockopt::socket_error(&self.0).ok().and_then(Result::err).map(io::Error::from)
    }

    fn attach(&self, filter: &[libc::sock_filter]) -> io::Result<()> {
        let program = libc::sock_fprog {
            len: u16::try_from(filter.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
            filter: filter.as_ptr().cast_mut(),
        };
        // SAFETY: the kernel reads the program and its `len` instructions, and writes nothing.
        unsafe { self.set_raw(libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program) }
    }

    /// Sets an option of packet sockets whose value is one of the C types without pointers.
    fn set<T: Copy>(&self, option: libc::c_int, value: &T) -> io::Result<()> {
        // SAFETY: the kernel reads `value`, which names no other memory.
        unsafe { self.set_raw(libc::SOL_PACKET, option, value) }
    }

    /// # Safety
    /// Memory that `value` points to is what the option reads or writes there.
    unsafe fn set_raw<T: Copy>(
        &self,
        level: libc::c_int,
        option: libc::c_int,
        value: &T,
    ) -> io::Result<()> {
        let (at, len) = (std::ptr::from_ref(value).cast(), size_of::<T>() as libc::socklen_t);
        // SAFETY: the kernel reads `len` bytes at `at`; the rest is the caller's.
        let code = unsafe { libc::setsockopt(self.0.as_raw_fd(), level, option, at, len) };
        if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A request about the interface of this name.
pub(crate) fn named(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: a zeroed request is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero.
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{name} is no name of an interface"),
        ));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

/// Accepts frames that arrive, are for this host or for several, and pass the filter.
fn own_frames(filter: &FrameFilter) -> Vec<libc::sock_filter> {
    let is_equal =
        [Comparison { load: libc::BPF_H, at: ETHERTYPE_AT, value: filter.ethertype.into() }];
    let share =
        filter.share.map(|share| FrameShare { byte_at: ETHERNET_BYTES + share.byte_at, ..share });
    accept(&is_equal, share)
}

/// Accepts packets that arrive, are for this host or for several, and pass the filter.
fn own_packets(filter: &OffloadFilter) -> Vec<libc::sock_filter> {
    const TRANSPORT_AT: u32 = ETHERNET_BYTES + 20;
    let [source, destination] = filter.addresses;
    let compare = |load, at, value| Comparison { load, at, value };
    let are_equal = [
        compare(libc::BPF_H, ETHERTYPE_AT, libc::ETH_P_IP as u32),
        // Version 4, a header without options.
        compare(libc::BPF_B, ETHERNET_BYTES, 0x45),
        compare(libc::BPF_B, ETHERNET_BYTES + 9, libc::IPPROTO_TCP as u32),
        compare(libc::BPF_W, ETHERNET_BYTES + 12, source),
        compare(libc::BPF_W, ETHERNET_BYTES + 16, destination),
        compare(libc::BPF_H, TRANSPORT_AT + 2, filter.port.into()),
    ];
    let share = filter.share.map(|share| FrameShare { byte_at: TRANSPORT_AT + 1, ..share });
    accept(&are_equal, share)
}

/// A part of a frame that has this value.
struct Comparison {
    /// Its size, as the instruction has it.
    load: u32,
    at: u32,
    value: u32,
}

/// Accepts frames that arrive, are for this host or for several, of which all comparisons hold and
/// whose byte, counted from the frame's start, makes them the socket's.
fn accept(are_equal: &[Comparison], share: Option<FrameShare>) -> Vec<libc::sock_filter> {
    let packet_type = (libc::SKF_AD_OFF + libc::SKF_AD_PKTTYPE) as u32;
    let equals = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let load = libc::BPF_LD | libc::BPF_ABS;
    // Instructions from behind a jump to the rejection, which is the last one.
    let length = 3 + 2 * are_equal.len() + if share.is_some() { 3 } else { 0 } + 2;
    let to_end = |at: usize| u8::try_from(length - 2 - at).unwrap_or(u8::MAX);
    let mut program = vec![
        statement(load | libc::BPF_B, packet_type),
        jump(equals, u32::from(libc::PACKET_OTHERHOST), to_end(1), 0),
        jump(equals, u32::from(libc::PACKET_OUTGOING), to_end(2), 0),
    ];
    for Comparison { load: size, at, value } in are_equal {
        program.push(statement(load | size, *at));
        program.push(jump(equals, *value, 0, to_end(program.len())));
    }
    if let Some(share) = share {
        let modulo = libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K;
        // A frame that is too short for the byte is rejected.
        program.push(statement(load | libc::BPF_B, share.byte_at));
        program.push(statement(modulo, u32::from(share.count.max(1))));
        program.push(jump(equals, u32::from(share.index), 0, to_end(program.len())));
    }
    program.extend([
        statement(libc::BPF_RET | libc::BPF_K, u32::MAX),
        statement(libc::BPF_RET | libc::BPF_K, 0),
    ]);
    program
}

fn statement(code: u32, k: u32) -> libc::sock_filter {
    jump(code, k, 0, 0)
}

/// An instruction that goes on `jt` places further if it is true, else `jf`.
fn jump(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_lie_in_blocks_and_do_not_overlap() {
        for slot_bytes in [2048, 8192, 12_288, 20_480, 135_168, 262_144, 266_240] {
            let ring = PacketRing::new(slot_bytes, 100);
            assert!((100..230).contains(&ring.slots()), "{slot_bytes}: {}", ring.slots());
            let starts: Vec<_> = (0..ring.slots()).map(|slot| ring.slot_at(slot)).collect();
            assert!(starts.windows(2).all(|pair| pair[0] + u64::from(slot_bytes) <= pair[1]));
            assert!(starts[starts.len() - 1] + u64::from(slot_bytes) <= ring.len_bytes());
            assert!(starts.iter().all(|start| {
                start / u64::from(ring.block_bytes)
                    == (start + u64::from(slot_bytes) - 1) / u64::from(ring.block_bytes)
            }));
            assert_eq!(ring.block_bytes % 4096, 0);
        }
    }

    #[test]
    fn interfaces_are_found_by_name_and_others_refused() {
        let socket = match PacketSocket::new() {
            Ok(socket) => socket,
            Err(error) => return sidecore_skip::skip(format_args!("no packet socket: {error}")),
        };
        let error = socket.interface("lo").unwrap_err();
        assert!(error.to_string().contains("no Ethernet"), "{error}");
        assert!(socket.interface("no-such-one").is_err());
        assert!(socket.interface("a-name-that-is-far-too-long").is_err());
        assert!(socket.interface("").is_err());
    }
}
