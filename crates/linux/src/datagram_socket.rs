//! A UDP socket that moves datagrams in batches between the network and one piece of memory
//! (udp(7), recvmmsg(2), sendmmsg(2)).

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use sidecore_memory::GuestMemory;

use crate::gather::{Gather, Place};

/// Messages that one system call moves at most.
const BATCH: usize = 64;
/// Pieces of memory that the messages of one call consist of at most.
const VECTORS: usize = 512;
/// `SK_MEMINFO_DROPS` (linux/sock_diag.h): its place in the answer to `SO_MEMINFO`.
const MEMINFO_DROPS: usize = 8;
const MEMINFO_VARS: usize = 9;
const SO_MEMINFO: libc::c_int = 55;

/// A datagram that has arrived, or several of one sender and one size behind each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// The sender.
    pub from: SocketAddr,
    /// Bytes in all.
    pub len_bytes: u32,
    /// The size of each datagram but the last one, which may be shorter.
    pub segment_bytes: u32,
    /// Whether there was more than fitted.
    pub truncated: bool,
}

/// A message to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The receiver.
    pub to: SocketAddr,
    /// Its bytes: these of the places given with it.
    pub places: Range<usize>,
    /// The kernel cuts the bytes into datagrams of this size (`UDP_SEGMENT`); zero if they are one.
    pub segment_bytes: u16,
}

/// Room for control messages.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; 64]);

/// A UDP socket, and the memory that its datagrams are in.
pub struct DatagramSocket {
    socket: OwnedFd,
    gather: Gather,
    headers: Box<[libc::mmsghdr]>,
    vectors: Box<[libc::iovec]>,
    names: Box<[libc::sockaddr_storage]>,
    controls: Box<[Control]>,
}

// SAFETY: the headers point into the boxes beside them, and the vectors into the memory of
// `gather`, only while a call runs. None of it belongs to a thread.
unsafe impl Send for DatagramSocket {}

impl fmt::Debug for DatagramSocket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("DatagramSocket")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

impl DatagramSocket {
    /// Binds a socket, whose kernel buffers hold about `buffer_bytes`. Its datagrams are never
    /// fragmented. If `coalesce`, the kernel delivers datagrams of one sender together (`UDP_GRO`).
    /// If `shared`, several sockets of this user have the address, see
    /// [`share_by`](Self::share_by). `memory` has one region.
    ///
    /// # Errors
    /// The address is not to be had, or the kernel lacks an option.
    pub fn bind(
        address: SocketAddr,
        memory: GuestMemory,
        buffer_bytes: usize,
        coalesce: bool,
        shared: bool,
    ) -> io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::DGRAM, flags, None)?;
        if sockopt::set_socket_recv_buffer_size_force(&socket, buffer_bytes).is_err() {
            sockopt::set_socket_recv_buffer_size(&socket, buffer_bytes)?;
        }
        if sockopt::set_socket_send_buffer_size_force(&socket, buffer_bytes).is_err() {
            sockopt::set_socket_send_buffer_size(&socket, buffer_bytes)?;
        }
        // The don't-fragment bit, and no regard to what the kernel believes of the path: the
        // protocol above finds out by itself what fits.
        let probe = match address {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE),
            SocketAddr::V6(_) => {
                (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)
            }
        };
        set(socket.as_fd(), probe.0, probe.1, probe.2)?;
        if coalesce {
            set(socket.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1)?;
        }
        if shared {
            sockopt::set_socket_reuseport(&socket, true)?;
        }
        rustix::net::bind(&socket, &address)?;
        let gather = Gather::new(memory)?;
        // SAFETY: zeroed, all of them are valid and name no memory.
        let (header, vector, name): (libc::mmsghdr, libc::iovec, libc::sockaddr_storage) =
            unsafe { (std::mem::zeroed(), std::mem::zeroed(), std::mem::zeroed()) };
        Ok(Self {
            socket,
            gather,
            headers: vec![header; BATCH].into(),
            vectors: vec![vector; VECTORS].into(),
            names: vec![name; BATCH].into(),
            controls: vec![Control([0; 64]); BATCH].into(),
        })
    }

    /// The memory that datagrams are in.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        self.gather.memory()
    }

    /// The address that it is bound to.
    ///
    /// # Errors
    /// The kernel's.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        let address = rustix::net::getsockname(&self.socket)?;
        SocketAddr::try_from(address).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// Divides the datagrams for the address of this socket among the `count` sockets that share
    /// it: each goes to the one whose number, in the order of their binding, is the byte at
    /// `byte_at`, modulo their number. A datagram that is shorter goes to the first one.
    ///
    /// # Errors
    /// The socket does not share its address.
    pub fn share_by(&self, byte_at: u32, count: u8) -> io::Result<()> {
        let statement = |code: u32, k| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
        // Offsets count from the payload on. A load behind the end ends the program with zero.
        let filter = [
            statement(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, byte_at),
            statement(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, u32::from(count.max(1))),
            statement(libc::BPF_RET | libc::BPF_A, 0),
        ];
        let program =
            libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        let len = size_of::<libc::sock_fprog>() as libc::socklen_t;
        // SAFETY: the kernel reads the program and its instructions, and writes nothing.
        let code = unsafe {
            let (fd, at) = (self.socket.as_raw_fd(), (&raw const program).cast());
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF, at, len)
        };
        if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Datagrams dropped by the kernel since the socket was made, for want of room or a wrong
    /// checksum.
    ///
    /// # Errors
    /// The kernel has no such count (before 4.12).
    pub fn drops(&self) -> io::Result<u32> {
        let mut numbers = [0_u32; MEMINFO_VARS];
        let mut len = size_of_val(&numbers) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `numbers`, and the size to `len`.
        let code = unsafe {
            let at = numbers.as_mut_ptr().cast();
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_MEMINFO,
                at,
                &raw mut len,
            )
        };
        if code < 0 { Err(io::Error::last_os_error()) } else { Ok(numbers[MEMINFO_DROPS]) }
    }

    /// Receives what has arrived into `places`, in their order, and calls `visit` for each place
    /// that was used.
    ///
    /// # Errors
    /// Nothing has arrived ([`io::ErrorKind::WouldBlock`]), an error that was pending, or a place
    /// outside of memory.
    pub fn receive(&mut self, places: &[Place], mut visit: impl FnMut(Arrived)) -> io::Result<()> {
        let count = places.len().min(BATCH);
        for (index, place) in places.iter().take(count).enumerate() {
            self.vectors[index] = self.gather.vector(*place)?;
            self.describe(index, index..index + 1, true);
        }
        // SAFETY: `describe` has set the first `count` headers: each names a vector, a name and a
        // control buffer of this value, and the vector a range of `memory`, which is shared with
        // the kernel as with a peer.
        let received = unsafe {
            let (headers, no_timeout) = (self.headers.as_mut_ptr(), std::ptr::null_mut());
            libc::recvmmsg(
                self.socket.as_raw_fd(),
                headers,
                count as u32,
                libc::MSG_DONTWAIT as _,
                no_timeout,
            )
        };
        let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
        for (header, name) in self.headers.iter().zip(&self.names).take(received) {
            let from = decode(name);
            let truncated = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
            // SAFETY: the kernel has set the header of this message.
            let segment_bytes = unsafe { segment_bytes(&header.msg_hdr) };
            visit(Arrived {
                from,
                len_bytes: header.msg_len,
                segment_bytes: segment_bytes
                    .filter(|bytes| *bytes > 0)
                    .unwrap_or(header.msg_len.max(1)),
                truncated,
            });
        }
        Ok(())
    }

    /// Sends messages, in their order. Returns how many the kernel took, which is at least one, and
    /// has copied.
    ///
    /// # Errors
    /// The first message was not sent: there is no room for now, or it cannot be sent.
    pub fn send(&mut self, departures: &[Departure], places: &[Place]) -> io::Result<usize> {
        let (mut count, mut vectors) = (0, 0);
        for departure in departures.iter().take(BATCH) {
            let pieces = places.get(departure.places.clone()).ok_or(io::ErrorKind::InvalidInput)?;
            if vectors + pieces.len() > VECTORS {
                break;
            }
            for (offset, place) in pieces.iter().enumerate() {
                self.vectors[vectors + offset] = self.gather.vector(*place)?;
            }
            let name_bytes = encode(departure.to, &mut self.names[count]);
            self.describe(count, vectors..vectors + pieces.len(), false);
            self.headers[count].msg_hdr.msg_namelen = name_bytes;
            self.set_segment(count, departure.segment_bytes);
            count += 1;
            vectors += pieces.len();
        }
        // SAFETY: as in `receive`; the kernel reads what the headers name.
        let sent = unsafe {
            let (headers, flags) =
                (self.headers.as_mut_ptr(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
            libc::sendmmsg(self.socket.as_raw_fd(), headers, count as u32, flags as _)
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Makes header `index` describe these vectors, and the name and the control buffer of its own.
    fn describe(&mut self, index: usize, vectors: Range<usize>, receive: bool) {
        let header = &mut self.headers[index].msg_hdr;
        header.msg_name = (&raw mut self.names[index]).cast();
        header.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        header.msg_iovlen = vectors.len() as _;
        header.msg_iov = self.vectors[vectors].as_mut_ptr();
        header.msg_control = (&raw mut self.controls[index]).cast();
        header.msg_controllen = if receive { size_of::<Control>() } else { 0 } as _;
        header.msg_flags = 0;
        self.headers[index].msg_len = 0;
    }

    /// Has the kernel cut message `index` into datagrams of this size.
    fn set_segment(&mut self, index: usize, segment_bytes: u16) {
        if segment_bytes == 0 {
            return;
        }
        let header = &mut self.headers[index].msg_hdr;
        // SAFETY: the control buffer has room for one message of two bytes, and is aligned for its
        // header.
        unsafe {
            header.msg_controllen = libc::CMSG_SPACE(size_of::<u16>() as u32) as _;
            let message = libc::CMSG_FIRSTHDR(header);
            (*message).cmsg_level = libc::SOL_UDP;
            (*message).cmsg_type = libc::UDP_SEGMENT;
            (*message).cmsg_len = libc::CMSG_LEN(size_of::<u16>() as u32) as _;
            libc::CMSG_DATA(message).cast::<u16>().write_unaligned(segment_bytes);
        }
    }
}

impl AsFd for DatagramSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The size of the datagrams that the kernel has coalesced.
///
/// # Safety
/// The header's control buffer is as the kernel has left it.
unsafe fn segment_bytes(header: &libc::msghdr) -> Option<u32> {
    // SAFETY: the macros walk over the messages in the control buffer, whose size is in the header.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(header);
        while let Some(found) = message.as_ref() {
            if found.cmsg_level == libc::SOL_UDP && found.cmsg_type == libc::UDP_GRO {
                let bytes = libc::CMSG_DATA(message).cast::<libc::c_int>().read_unaligned();
                return u32::try_from(bytes).ok();
            }
            message = libc::CMSG_NXTHDR(header, message);
        }
    }
    None
}

fn set(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of the value.
    let code = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), len)
    };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Writes an address as the kernel reads it; returns its size.
fn encode(address: SocketAddr, to: &mut libc::sockaddr_storage) -> libc::socklen_t {
    let at = std::ptr::from_mut(to);
    match address {
        SocketAddr::V4(address) => {
            // SAFETY: zeroed, it is valid.
            let mut name: libc::sockaddr_in = unsafe { std::mem::zeroed() };
            name.sin_family = libc::AF_INET as libc::sa_family_t;
            name.sin_port = address.port().to_be();
            name.sin_addr.s_addr = u32::from_ne_bytes(address.ip().octets());
            // SAFETY: the storage is as large and as aligned as any address.
            unsafe { at.cast::<libc::sockaddr_in>().write(name) };
            size_of::<libc::sockaddr_in>() as libc::socklen_t
        }
        SocketAddr::V6(address) => {
            // SAFETY: zeroed, it is valid.
            let mut name: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
            name.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            name.sin6_port = address.port().to_be();
            name.sin6_addr.s6_addr = address.ip().octets();
            name.sin6_flowinfo = address.flowinfo();
            name.sin6_scope_id = address.scope_id();
            // SAFETY: the storage is as large and as aligned as any address.
            unsafe { at.cast::<libc::sockaddr_in6>().write(name) };
            size_of::<libc::sockaddr_in6>() as libc::socklen_t
        }
    }
}

/// The address that the kernel wrote. The flow label of a packet is no part of its sender.
fn decode(name: &libc::sockaddr_storage) -> SocketAddr {
    let at = std::ptr::from_ref(name);
    if name.ss_family == libc::AF_INET6 as libc::sa_family_t {
        // SAFETY: the storage is as large and as aligned as any address, and any bytes are one.
        let name = unsafe { at.cast::<libc::sockaddr_in6>().read() };
        let ip = Ipv6Addr::from(name.sin6_addr.s6_addr);
        return SocketAddrV6::new(ip, u16::from_be(name.sin6_port), 0, name.sin6_scope_id).into();
    }
    // SAFETY: as above.
    let name = unsafe { at.cast::<libc::sockaddr_in>().read() };
    let ip = Ipv4Addr::from(name.sin_addr.s_addr.to_ne_bytes());
    SocketAddr::new(IpAddr::V4(ip), u16::from_be(name.sin_port))
}

#[cfg(test)]
mod tests {
    use sidecore_memory::{GuestAddress, RegionHint, SharedPages};

    use super::*;

    fn socket(address: &str) -> DatagramSocket {
        let pages = SharedPages::new("datagrams", 1 << 20).unwrap();
        DatagramSocket::bind(address.parse().unwrap(), pages.memory().clone(), 1 << 20, true, false)
            .unwrap()
    }

    fn receive(socket: &mut DatagramSocket, places: &[Place]) -> Vec<Arrived> {
        let mut arrived = Vec::new();
        match socket.receive(places, |one| arrived.push(one)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => other.unwrap(),
        }
        arrived
    }

    #[test]
    fn addresses_are_read_as_they_were_written() {
        // SAFETY: zeroed, it is valid.
        let mut name: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        for text in ["127.0.0.1:9", "255.1.2.3:65535", "[::1]:9", "[fe80::1%7]:1"] {
            let address: SocketAddr = text.parse().unwrap();
            encode(address, &mut name);
            assert_eq!(decode(&name), address);
        }
    }

    #[test]
    fn datagrams_arrive_with_their_bytes_their_sender_and_in_order() {
        for local in ["127.0.0.1:0", "[::1]:0"] {
            let (mut one, mut other) = (socket(local), socket(local));
            let to = other.local_address().unwrap();
            let mut hint = RegionHint::default();
            one.memory().write_slice(GuestAddress(100), b"first, second", &mut hint).unwrap();
            let places = [Place { start: 100, len_bytes: 5 }, Place { start: 105, len_bytes: 8 }];
            let departures = [
                Departure { to, places: 0..1, segment_bytes: 0 },
                Departure { to, places: 0..2, segment_bytes: 0 },
            ];
            assert_eq!(one.send(&departures, &places).unwrap(), 2);
            let rooms = [0, 4096].map(|start| Place { start, len_bytes: 10 });
            let arrived = receive(&mut other, &rooms);
            let from = one.local_address().unwrap();
            assert_eq!(
                arrived,
                [
                    Arrived { from, len_bytes: 5, segment_bytes: 5, truncated: false },
                    Arrived { from, len_bytes: 10, segment_bytes: 10, truncated: true },
                ]
            );
            let bytes: [u8; 10] = other.memory().read_array(GuestAddress(4096), &mut hint).unwrap();
            assert_eq!(&bytes, b"first, sec");
            assert!(receive(&mut other, &rooms).is_empty());
        }
    }

    #[test]
    fn a_message_is_cut_into_datagrams() {
        let (mut one, mut other) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let to = other.local_address().unwrap();
        let places = [Place { start: 0, len_bytes: 1000 }, Place { start: 5000, len_bytes: 700 }];
        one.send(&[Departure { to, places: 0..2, segment_bytes: 1000 }], &places).unwrap();
        let rooms = [0, 100_000, 200_000].map(|start| Place { start, len_bytes: 65_536 });
        let arrived = receive(&mut other, &rooms);
        // Coalesced again, or not: that is the kernel's choice.
        let datagrams: Vec<u32> = arrived
            .iter()
            .flat_map(|one| {
                (0..one.len_bytes).step_by(one.segment_bytes as usize).map(move |at| (one, at))
            })
            .map(|(one, at)| one.segment_bytes.min(one.len_bytes - at))
            .collect();
        assert_eq!(datagrams, [1000, 700]);
    }

    #[test]
    fn sockets_of_one_address_share_its_datagrams_by_a_byte() {
        let bind = |address: SocketAddr, shared| {
            let pages = SharedPages::new("datagrams", 1 << 20).unwrap();
            DatagramSocket::bind(address, pages.memory().clone(), 1 << 20, false, shared)
        };
        let mut sender = socket("127.0.0.1:0");
        let first = bind("127.0.0.1:0".parse().unwrap(), true).unwrap();
        let to = first.local_address().unwrap();
        assert!(bind(to, false).is_err(), "the address is in use");
        let mut sockets = vec![first];
        sockets.extend((1..3).map(|_| bind(to, true).unwrap()));
        sockets[0].share_by(27, 3).unwrap();
        for byte in [0, 1, 2, 3, 250, 251, 255] {
            let mut hint = RegionHint::default();
            sender.memory().write_slice(GuestAddress(27), &[byte], &mut hint).unwrap();
            let departure = Departure { to, places: 0..1, segment_bytes: 0 };
            sender.send(&[departure], &[Place { start: 0, len_bytes: 100 }]).unwrap();
            let rooms = [Place { start: 0, len_bytes: 100 }];
            for (index, socket) in sockets.iter_mut().enumerate() {
                let expected = usize::from(usize::from(byte % 3) == index);
                assert_eq!(receive(socket, &rooms).len(), expected, "{byte} at socket {index}");
            }
        }
        // Too short for the byte.
        let departure = Departure { to, places: 0..1, segment_bytes: 0 };
        sender.send(&[departure], &[Place { start: 0, len_bytes: 27 }]).unwrap();
        assert_eq!(receive(&mut sockets[0], &[Place { start: 0, len_bytes: 100 }]).len(), 1);
        let alone = socket("127.0.0.1:0");
        assert!(alone.share_by(27, 3).is_err(), "it has its address for itself");
    }

    #[test]
    fn a_place_outside_of_memory_is_refused() {
        let mut one = socket("127.0.0.1:0");
        let place = Place { start: (1 << 20) - 10, len_bytes: 11 };
        assert!(
            one.receive(&[place], |_| ())
                .is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput)
        );
        let to = one.local_address().unwrap();
        let departure = Departure { to, places: 0..1, segment_bytes: 0 };
        assert!(one.send(std::slice::from_ref(&departure), &[place]).is_err());
        assert!(one.send(&[departure], &[]).is_err());
    }
}
