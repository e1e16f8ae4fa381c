//! A socket of AF_XDP and the program that gives it its frames
//! (Documentation/networking/af_xdp.rst in the kernel's source).
//!
//! Our own code, because the crates for it need C libraries, are copyleft, or know no frames of
//! several buffers. The rings are [`GuestMemory`], whose accesses are checked; here are the system
//! calls.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use sidecore_memory::{GuestMemory, SharedPages};

use crate::Interface;

/// The unit of the frames' memory: no chunk is larger than a page.
pub const CHUNK_BYTES: u32 = 4096;
/// Bytes that the kernel leaves in front of a received frame (`XDP_PACKET_HEADROOM`).
pub const KERNEL_HEADROOM_BYTES: u32 = 256;

/// How long the queue of a socket that was closed may be in use.
const FREED_WITHIN: Duration = Duration::from_secs(1);

const SOL_XDP: libc::c_int = 283;
/// Options (linux/if_xdp.h).
mod option {
    pub const MMAP_OFFSETS: libc::c_int = 1;
    pub const RX_RING: libc::c_int = 2;
    pub const TX_RING: libc::c_int = 3;
    pub const UMEM_REG: libc::c_int = 4;
    pub const UMEM_FILL_RING: libc::c_int = 5;
    pub const UMEM_COMPLETION_RING: libc::c_int = 6;
    pub const STATISTICS: libc::c_int = 7;
    pub const OPTIONS: libc::c_int = 8;
}
/// Where the rings are mapped from.
mod place {
    pub const RX: u64 = 0;
    pub const TX: u64 = 0x8000_0000;
    pub const FILL: u64 = 0x1_0000_0000;
    pub const COMPLETION: u64 = 0x1_8000_0000;
}
/// How a socket is bound.
mod bind_flag {
    pub const COPY: u16 = 1 << 1;
    pub const ZEROCOPY: u16 = 1 << 2;
    pub const NEED_WAKEUP: u16 = 1 << 3;
    pub const SG: u16 = 1 << 4;
}
const OPTIONS_ZEROCOPY: u32 = 1;

/// Commands and constants of bpf(2) (linux/bpf.h).
mod bpf {
    pub const MAP_CREATE: libc::c_int = 0;
    pub const MAP_UPDATE_ELEM: libc::c_int = 2;
    pub const PROG_LOAD: libc::c_int = 5;
    pub const LINK_CREATE: libc::c_int = 28;
    pub const MAP_TYPE_XSKMAP: u32 = 17;
    pub const PROG_TYPE_XDP: u32 = 6;
    pub const ATTACH_XDP: u32 = 37;
    pub const F_XDP_HAS_FRAGS: u32 = 1 << 5;
    pub const FLAGS_SKB_MODE: u32 = 1 << 1;
    pub const FLAGS_DRV_MODE: u32 = 1 << 2;
    pub const XDP_PASS: i32 = 2;
    pub const HELPER_REDIRECT_MAP: i32 = 51;
    pub const PSEUDO_MAP_FD: u8 = 1;
}

/// A flag of the fill and the transmit ring: the kernel looks at it only when it is asked to.
pub const NEEDS_WAKE_UP: u32 = 1;

/// How an interface gives its frames to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpMode {
    /// The network card writes frames into the socket's memory.
    ZeroCopy,
    /// The driver runs the program, and the kernel copies the frame.
    Driver,
    /// The network stack runs the program, and the kernel copies the frame.
    Generic,
}

/// Numbers of entries of the four rings, powers of two.
#[derive(Clone, Copy, Debug)]
pub struct XdpRings {
    /// Frames received.
    pub receive: u32,
    /// Frames to be sent.
    pub transmit: u32,
    /// Chunks for frames to be received.
    pub fill: u32,
    /// Chunks of frames that were sent.
    pub completion: u32,
}

/// One ring as it is mapped: offsets of its words and entries, in bytes.
#[derive(Clone, Debug)]
pub struct XdpRing {
    /// Of this ring alone.
    pub memory: GuestMemory,
    /// The producer's index, 32 bits.
    pub producer_at: u64,
    /// The consumer's index, 32 bits.
    pub consumer_at: u64,
    /// Flags of the kernel's, 32 bits: [`NEEDS_WAKE_UP`].
    pub flags_at: u64,
    /// The first entry.
    pub entries_at: u64,
    /// Number of entries.
    pub entries: u32,
}

/// The rings of a socket. An entry of the first two has 16 bytes (address, size, flags), one of the
/// others 8 (address).
#[derive(Clone, Debug)]
pub struct XdpMapped {
    /// Frames received.
    pub receive: XdpRing,
    /// Frames to be sent.
    pub transmit: XdpRing,
    /// Chunks for frames to be received.
    pub fill: XdpRing,
    /// Chunks of frames that were sent.
    pub completion: XdpRing,
}

/// `struct xdp_statistics`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpStatistics {
    /// Frames dropped for want of a chunk, or because they are too long.
    pub rx_dropped: u64,
    /// Chunks in the fill ring that the kernel refused.
    pub rx_invalid: u64,
    /// Frames to be sent that the kernel refused.
    pub tx_invalid: u64,
    /// Frames dropped because the receive ring was full.
    pub rx_ring_full: u64,
    /// Times that the fill ring was empty.
    pub fill_ring_empty: u64,
    /// Times that the transmit ring was empty.
    pub tx_ring_empty: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RingOffset {
    producer: u64,
    consumer: u64,
    entries: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MmapOffsets {
    receive: RingOffset,
    transmit: RingOffset,
    fill: RingOffset,
    completion: RingOffset,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct UmemReg {
    address: u64,
    len_bytes: u64,
    chunk_bytes: u32,
    headroom_bytes: u32,
    flags: u32,
    tx_metadata_bytes: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Address {
    family: u16,
    flags: u16,
    interface: u32,
    queue: u32,
    shared: u32,
}

/// One instruction.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction {
    code: u8,
    /// Destination in the low half, source in the high one.
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// A socket on one queue of an interface, which gets its frames from an [`XdpProgram`].
#[derive(Debug)]
pub struct XdpSocket {
    socket: OwnedFd,
    /// The memory of frames, which the kernel has pinned.
    _pages: SharedPages,
    mode: XdpMode,
}

impl XdpSocket {
    /// Makes a socket whose frames lie in `pages`, a whole number of chunks. May wait a second for
    /// the queue of a socket that was closed just now. In each chunk `headroom_bytes` more than the
    /// kernel's are left in front of a received frame. The mode is `mode`, or no socket.
    ///
    /// `is_split` says whether a frame may need several chunks. Some drivers have zero copy for
    /// frames of one chunk alone, and refuse a socket that asks for more.
    ///
    /// # Errors
    /// The process lacks CAP_NET_RAW, or the permission to lock so much memory; the kernel or the
    /// interface's driver does not know the mode, or frames of several buffers; another socket has
    /// the queue.
    pub fn open(
        interface: u32,
        queue: u32,
        pages: SharedPages,
        headroom_bytes: u32,
        rings: XdpRings,
        mode: XdpMode,
        is_split: bool,
    ) -> io::Result<(Self, XdpMapped)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(
            AddressFamily::from_raw(libc::AF_XDP as u16),
            SocketType::RAW,
            flags,
            None,
        )?;
        let (base, len_bytes) =
            pages.memory().host_ranges().next().ok_or(io::ErrorKind::InvalidInput)?;
        let umem = UmemReg {
            address: base.expose_provenance() as u64,
            len_bytes,
            chunk_bytes: CHUNK_BYTES,
            headroom_bytes,
            flags: 0,
            tx_metadata_bytes: 0,
        };
        let fd = socket.as_fd();
        // SAFETY: the range is a mapping of `pages`, which the value keeps, and which the kernel
        // pins besides; it is only accessed as memory that others write to.
        unsafe { set(fd, option::UMEM_REG, &umem)? };
        for (option, entries) in [
            (option::UMEM_FILL_RING, rings.fill),
            (option::UMEM_COMPLETION_RING, rings.completion),
            (option::RX_RING, rings.receive),
            (option::TX_RING, rings.transmit),
        ] {
            // SAFETY: the value is a number.
            unsafe { set(fd, option, &entries)? };
        }
        let offsets: MmapOffsets = get(fd, option::MMAP_OFFSETS)?;
        let map = |offset, at, entries, bytes| map(fd, offset, at, entries, bytes);
        let mapped = XdpMapped {
            receive: map(&offsets.receive, place::RX, rings.receive, 16)?,
            transmit: map(&offsets.transmit, place::TX, rings.transmit, 16)?,
            fill: map(&offsets.fill, place::FILL, rings.fill, 8)?,
            completion: map(&offsets.completion, place::COMPLETION, rings.completion, 8)?,
        };
        let copies = if mode == XdpMode::ZeroCopy { bind_flag::ZEROCOPY } else { bind_flag::COPY };
        let split = if is_split || mode != XdpMode::ZeroCopy { bind_flag::SG } else { 0 };
        let address = Address {
            family: libc::AF_XDP as u16,
            flags: copies | bind_flag::NEED_WAKEUP | split,
            interface,
            queue,
            shared: 0,
        };
        when_free(|| bind(socket.as_fd(), &address))?;
        let granted: u32 = get(socket.as_fd(), option::OPTIONS)?;
        let mode = if granted & OPTIONS_ZEROCOPY != 0 { XdpMode::ZeroCopy } else { mode };
        Ok((Self { socket, _pages: pages, mode }, mapped))
    }

    /// The mode that the kernel has granted.
    #[must_use]
    pub fn mode(&self) -> XdpMode {
        self.mode
    }

    /// Has the kernel look at the transmit ring. It takes some dozen entries at a time.
    ///
    /// # Errors
    /// There is more to take ([`io::ErrorKind::WouldBlock`]), the device is busy, or the interface
    /// is down.
    pub fn transmit(&self) -> io::Result<()> {
        rustix::net::send(&self.socket, &[], SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Has the kernel look at the fill ring.
    pub fn wake_receive(&self) {
        // It returns no byte, ever.
        let _ = rustix::net::recv(&self.socket, &mut [0_u8; 0][..], RecvFlags::DONTWAIT);
    }

    /// The error that has happened to the socket since the last call, such as `ENETDOWN`.
    pub fn take_error(&self) -> Option<io::Error> {
        rustix::net::sockopt::socket_error(&self.socket)
            .ok()
            .and_then(Result::err)
            .map(io::Error::from)
    }

    /// The counters since the socket was made.
    ///
    /// # Errors
    /// None that is known.
    pub fn statistics(&self) -> io::Result<XdpStatistics> {
        get(self.socket.as_fd(), option::STATISTICS)
    }
}

impl AsFd for XdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Maps a ring whose entries have so many bytes.
fn map(
    socket: BorrowedFd<'_>,
    offset: &RingOffset,
    at: u64,
    entries: u32,
    entry_bytes: u64,
) -> io::Result<XdpRing> {
    let RingOffset {
        producer: producer_at,
        consumer: consumer_at,
        entries: entries_at,
        flags: flags_at,
    } = *offset;
    let len_bytes =
        usize::try_from(entries_at + u64::from(entries) * entry_bytes).unwrap_or(usize::MAX);
    let memory = GuestMemory::map_kernel_rings(socket, at, len_bytes).map_err(io::Error::other)?;
    Ok(XdpRing { memory, producer_at, consumer_at, flags_at, entries_at, entries })
}

/// Binds a socket.
fn bind(socket: BorrowedFd<'_>, address: &Address) -> io::Result<()> {
    let len = size_of::<Address>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of the address.
    let code = unsafe { libc::bind(socket.as_raw_fd(), std::ptr::from_ref(address).cast(), len) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Tries again for a while what is in use. The kernel frees the queue of a socket some time after
/// its close (`xp_put_pool`), and a child of this process has its descriptors until it executes
/// another program.
fn when_free<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let end = Instant::now() + FREED_WITHIN;
    loop {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return other,
        }
    }
}

/// # Safety
/// Memory that `value` names is what the option uses there.
unsafe fn set<T: Copy>(socket: BorrowedFd<'_>, option: libc::c_int, value: &T) -> io::Result<()> {
    let (at, len) = (std::ptr::from_ref(value).cast(), size_of::<T>() as libc::socklen_t);
    // SAFETY: the kernel reads `len` bytes at `at`; the rest is the caller's.
    let code = unsafe { libc::setsockopt(socket.as_raw_fd(), SOL_XDP, option, at, len) };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// An option whose value is numbers.
fn get<T: Copy + Default>(socket: BorrowedFd<'_>, option: libc::c_int) -> io::Result<T> {
    let mut value = T::default();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `value`, and the size to `len`; all types
    // that are asked for consist of numbers.
    let code = unsafe {
        libc::getsockopt(socket.as_raw_fd(), SOL_XDP, option, (&raw mut value).cast(), &raw mut len)
    };
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// A program on an interface. It gives frames of one protocol that are for this station, or for
/// several, to the socket of the queue that they arrive at, and all others to the network stack.
#[derive(Debug)]
pub struct XdpProgram {
    /// The socket of each queue.
    map: OwnedFd,
    /// Detaches the program when it is closed.
    _link: OwnedFd,
}

impl XdpProgram {
    /// Attaches a program to an interface whose address is `address`, for its first `queues`
    /// queues. It ends with the value, and with the process however that ends. May wait a second
    /// for a program that was detached just now.
    ///
    /// # Errors
    /// The process lacks CAP_NET_ADMIN and CAP_BPF; the driver does not know the mode, or frames of
    /// several buffers; there is another program.
    pub fn attach(
        interface: &Interface,
        ethertype: u16,
        queues: u32,
        mode: XdpMode,
    ) -> io::Result<Self> {
        // In each structure: the fields of `union bpf_attr` for that command, as far as they are
        // used.
        let map = [bpf::MAP_TYPE_XSKMAP, 4, 4, queues.max(1), 0];
        // SAFETY: numbers only.
        let map = unsafe { call(bpf::MAP_CREATE, &map)? };
        let program = program(map.as_raw_fd(), ethertype, interface.address);
        let loaded = load(&program)?;
        let flags =
            if mode == XdpMode::Generic { bpf::FLAGS_SKB_MODE } else { bpf::FLAGS_DRV_MODE };
        let create = [loaded.as_raw_fd() as u32, interface.index, bpf::ATTACH_XDP, flags];
        // SAFETY: numbers only.
        let link = when_free(|| unsafe { call(bpf::LINK_CREATE, &create) })?;
        Ok(Self { map, _link: link })
    }

    /// Gives the frames of a queue to its socket.
    ///
    /// # Errors
    /// The program has no such queue.
    pub fn serve(&self, queue: u32, socket: &XdpSocket) -> io::Result<()> {
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct Update {
            map: u32,
            padding: u32,
            key: u64,
            value: u64,
            flags: u64,
        }
        let value = socket.as_fd().as_raw_fd() as u32;
        let update = Update {
            map: self.map.as_raw_fd() as u32,
            padding: 0,
            key: (&raw const queue).expose_provenance() as u64,
            value: (&raw const value).expose_provenance() as u64,
            flags: 0,
        };
        // SAFETY: the kernel reads key and value, 4 bytes each.
        unsafe { command(bpf::MAP_UPDATE_ELEM, &update) }.map(drop)
    }
}

fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Load {
        kind: u32,
        count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_bytes: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
        name: [u8; 16],
        interface: u32,
        attach_type: u32,
    }
    let load = Load {
        kind: bpf::PROG_TYPE_XDP,
        count: program.len() as u32,
        instructions: program.as_ptr().expose_provenance() as u64,
        license: c"Apache-2.0".as_ptr().expose_provenance() as u64,
        log_level: 0,
        log_bytes: 0,
        log: 0,
        kernel_version: 0,
        flags: bpf::F_XDP_HAS_FRAGS,
        name: *b"sidecore_link\0\0\0",
        interface: 0,
        attach_type: bpf::ATTACH_XDP,
    };
    // SAFETY: the kernel reads the instructions and the license, which live until the call returns.
    unsafe { call(bpf::PROG_LOAD, &load) }
}

/// A command that returns a descriptor.
///
/// # Safety
/// As [`command`].
unsafe fn call<T: Copy>(number: libc::c_int, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the caller's; a descriptor that the kernel has made is ours.
    unsafe { command(number, attributes).map(|fd| OwnedFd::from_raw_fd(fd)) }
}

/// # Safety
/// `attributes` are those of the command, and memory that they name lives until it returns.
unsafe fn command<T: Copy>(number: libc::c_int, attributes: &T) -> io::Result<libc::c_int> {
    let attributes = std::ptr::from_ref(attributes);
    // SAFETY: the kernel reads as many bytes as the structure has; the rest is the caller's.
    let answer = unsafe { libc::syscall(libc::SYS_bpf, number, attributes, size_of::<T>()) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer as libc::c_int) }
}

/// Gives frames of `ethertype` for `own`, or for several stations, to the socket that the map has
/// for their queue, and all others to the network stack.
fn program(map: libc::c_int, ethertype: u16, own: [u8; 6]) -> [Instruction; 21] {
    let instruction = |code: u8, to: u8, from: u8, offset: i16, immediate: i32| Instruction {
        code,
        registers: to | (from << 4),
        offset,
        immediate,
    };
    // Codes of linux/bpf_common.h: class, size or operation, and mode or source.
    let load_word = |to, from, offset| instruction(0x61, to, from, offset, 0);
    let exit = instruction(0x95, 0, 0, 0, 0);
    let [a, b, c, d, e, f] = own;
    [
        // r2 = context.data, r3 = context.data_end
        load_word(2, 1, 0),
        load_word(3, 1, 4),
        // r4 = r2 + 14; if r4 > r3, pass
        instruction(0xbf, 4, 2, 0, 0),
        instruction(0x07, 4, 0, 0, 14),
        instruction(0x2d, 4, 3, 14, 0),
        // r5 = the ethertype; if it is another, pass
        instruction(0x69, 5, 2, 12, 0),
        instruction(0x55, 5, 0, 12, i32::from(ethertype.to_be())),
        // r5 = the destination's first byte; if it is a group, take the frame
        instruction(0x71, 5, 2, 0, 0),
        instruction(0x45, 5, 0, 4, 1),
        // Its first four bytes, and the other two; if they are another's, pass
        load_word(5, 2, 0),
        instruction(0x56, 5, 0, 8, i32::from_ne_bytes([a, b, c, d])),
        instruction(0x69, 5, 2, 4, 0),
        instruction(0x55, 5, 0, 6, i32::from(u16::from_ne_bytes([e, f]))),
        // take: r2 = context.rx_queue_index
        load_word(2, 1, 16),
        // r1 = map, in two halves
        instruction(0x18, 1, bpf::PSEUDO_MAP_FD, 0, map),
        instruction(0, 0, 0, 0, 0),
        // r3 = the verdict if the map has no socket; r0 = redirect(r1, r2, r3)
        instruction(0xb7, 3, 0, 0, bpf::XDP_PASS),
        instruction(0x85, 0, 0, 0, bpf::HELPER_REDIRECT_MAP),
        exit,
        // pass:
        instruction(0xb7, 0, 0, 0, bpf::XDP_PASS),
        exit,
    ]
}
