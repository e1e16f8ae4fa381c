//! An interface of this host's kernel whose wire is this process (TAP;
//! Documentation/networking/tuntap.rst in the kernel's source).

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use sidecore_memory::GuestMemory;

use crate::gather::{Gather, Place};
use crate::packet_socket::named;

/// The device that makes interfaces.
const CLONE_DEVICE: &str = "/dev/net/tun";
/// Bytes of `struct virtio_net_hdr_v1` in front of each frame.
const HEADER_BYTES: libc::c_int = 12;

/// Segmentation and checksum offloads of frames from the kernel (linux/if_tun.h).
mod offload {
    pub const CHECKSUM: libc::c_ulong = 1;
    pub const TSO4: libc::c_ulong = 2;
    pub const TSO6: libc::c_ulong = 4;
    pub const TSO_ECN: libc::c_ulong = 8;
    pub const USO4: libc::c_ulong = 0x20;
    pub const USO6: libc::c_ulong = 0x40;
}

/// The request of this number with an argument of four bytes that the kernel reads.
const fn set(number: libc::c_ulong) -> libc::c_ulong {
    0x4004_5400 | number
}

const SET_INTERFACE: libc::c_ulong = set(202);
const SET_PERSISTENT: libc::c_ulong = set(203);
const SET_OFFLOAD: libc::c_ulong = set(208);
const SET_HEADER_BYTES: libc::c_ulong = set(216);
const SET_LITTLE_ENDIAN: libc::c_ulong = set(220);

/// linux/sockios.h.
const SIOCSIFMTU: libc::c_ulong = 0x8922;

/// The offloads of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TapOffloads {
    /// None: all frames are whole and have their checksums.
    None,
    /// Checksums, and large TCP segments.
    Tcp,
    /// The same, and large UDP payloads that are to be cut into datagrams (Linux 6.2).
    TcpAndUdp,
}

/// A TAP interface. Each frame, in both directions, has a virtio header of 12 bytes in front, in
/// little-endian byte order (virtio 1.2, 5.1.6).
///
/// The interface is persistent: it stays when the descriptor closes, without a carrier, and has one
/// again once a process opens it.
pub struct Tap {
    file: OwnedFd,
    gather: Gather,
    offloads: TapOffloads,
    mtu: u16,
}

impl Tap {
    /// Opens the TAP interface of this name in this thread's network namespace, or makes it.
    /// Frames are in `memory`, of one region. With `has_offloads`, the kernel is offered as many as
    /// it knows. The interface gets this MTU, or keeps its own.
    ///
    /// # Errors
    /// The process may neither open the interface nor make one (CAP_NET_ADMIN), the name is that of
    /// another kind of interface or too long, another process has the interface, or the kernel has
    /// no TAP.
    pub fn open(
        name: &str,
        memory: GuestMemory,
        has_offloads: bool,
        mtu: Option<u16>,
    ) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open(CLONE_DEVICE, flags, Mode::empty())
            .map_err(|error| io::Error::new(error.kind(), format!("{CLONE_DEVICE}: {error}")))?;
        let mut request = named(name)?;
        request.ifr_ifru.ifru_flags =
            (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
        // SAFETY: the kernel reads the name and the flags, and writes the name.
        check(unsafe { libc::ioctl(file.as_raw_fd(), SET_INTERFACE as _, &raw mut request) })?;
        let (gather, offloads) = (Gather::new(memory)?, TapOffloads::None);
        let mut tap = Self { file, gather, offloads, mtu: negotiate_mtu(name, mtu)? };
        tap.set_by_pointer(SET_HEADER_BYTES, HEADER_BYTES)?;
        tap.set_by_pointer(SET_LITTLE_ENDIAN, 1)?;
        tap.set_by_value(SET_PERSISTENT, 1)?;
        tap.offloads = tap.set_offloads(has_offloads)?;
        Ok(tap)
    }

    fn set_offloads(&self, has_offloads: bool) -> io::Result<TapOffloads> {
        let tcp = offload::CHECKSUM | offload::TSO4 | offload::TSO6 | offload::TSO_ECN;
        let uso = offload::USO4 | offload::USO6;
        if !has_offloads {
            self.set_by_value(SET_OFFLOAD, 0)?;
            return Ok(TapOffloads::None);
        }
        if self.set_by_value(SET_OFFLOAD, tcp | uso).is_ok() {
            return Ok(TapOffloads::TcpAndUdp);
        }
        self.set_by_value(SET_OFFLOAD, tcp)?;
        Ok(TapOffloads::Tcp)
    }

    fn set_by_pointer(&self, request: libc::c_ulong, mut value: libc::c_int) -> io::Result<()> {
        // SAFETY: the requests that come here read a number of this size.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), request as _, &raw mut value) })
    }

    fn set_by_value(&self, request: libc::c_ulong, value: libc::c_ulong) -> io::Result<()> {
        // SAFETY: the argument of the requests that come here is a number, not an address.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), request as _, value) })
    }

    /// The offloads in force, in both directions.
    #[must_use]
    pub const fn offloads(&self) -> TapOffloads {
        self.offloads
    }

    /// The interface's MTU, as it was when it was opened.
    #[must_use]
    pub const fn mtu(&self) -> u16 {
        self.mtu
    }

    /// Reads the next frame that the kernel sends, with its virtio header, into a place of the
    /// memory. Returns its size with the header: a frame as large as the place may have been cut.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] without a frame; others if the interface is gone, or the place
    /// is outside of the memory.
    #[inline]
    pub fn read(&self, place: Place) -> io::Result<u32> {
        let to = self.gather.vector(place)?;
        // SAFETY: the kernel writes into the range, which is shared with it as with a peer.
        let read = unsafe { libc::read(self.file.as_raw_fd(), to.iov_base, to.iov_len) };
        u32::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    /// Gives the kernel a frame, with its virtio header, which it has copied when this returns.
    ///
    /// # Errors
    /// The kernel did not take the frame: the interface is down or gone, the virtio header is
    /// wrong, or the place is outside of the memory.
    #[inline]
    pub fn write(&self, place: Place) -> io::Result<()> {
        let from = self.gather.vector(place)?;
        // SAFETY: the kernel reads the range, which is shared with it as with a peer.
        let written = unsafe { libc::write(self.file.as_raw_fd(), from.iov_base, from.iov_len) };
        if written < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// The state of the interface.
    #[must_use]
    pub fn state(&self) -> TapState {
        TapState::of(&self.file)
    }

    /// A monitor of the interface's state, for another thread. The interface has this process until
    /// the monitor is dropped, too.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn monitor(&self) -> io::Result<TapMonitor> {
        Ok(TapMonitor(self.file.try_clone()?))
    }

    /// The memory of the frames.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        self.gather.memory()
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl fmt::Debug for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tap").field("file", &self.file).finish_non_exhaustive()
    }
}

/// The state of a TAP interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TapState {
    /// The interface was deleted.
    pub is_gone: bool,
    /// The host has set the interface up.
    pub is_up: bool,
    /// The kernel has sent frames that were not read yet.
    pub has_frames: bool,
}

/// Sets the interface's MTU unless it has that already, and returns the one in force.
fn negotiate_mtu(name: &str, wanted: Option<u16>) -> io::Result<u16> {
    // Any socket leads to the interfaces of its namespace.
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    let mut request = named(name)?;
    // SAFETY: SIOCGIFMTU reads the name and writes the MTU.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU as _, &raw mut request) })?;
    // SAFETY: SIOCGIFMTU has set this field.
    let has = unsafe { request.ifr_ifru.ifru_mtu };
    let wanted = match wanted {
        Some(wanted) if libc::c_int::from(wanted) != has => wanted,
        _ => return Ok(u16::try_from(has).unwrap_or(u16::MAX)),
    };
    request.ifr_ifru.ifru_mtu = wanted.into();
    // SAFETY: SIOCSIFMTU reads the name and the MTU.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCSIFMTU as _, &raw mut request) })
        .map_err(|error| io::Error::new(error.kind(), format!("mtu {wanted}: {error}")))?;
    Ok(wanted)
}

impl TapState {
    fn of(file: &OwnedFd) -> Self {
        let mut fds = [PollFd::new(file, PollFlags::IN | PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let events = match rustix::event::poll(&mut fds, Some(&now)) {
            Ok(_) => fds[0].revents(),
            Err(_) => PollFlags::empty(),
        };
        Self {
            is_gone: events.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL),
            // The kernel shows room for frames on an interface that is up (tun_chr_poll).
            is_up: events.contains(PollFlags::OUT),
            has_frames: events.contains(PollFlags::IN),
        }
    }
}

/// Shows the state of a TAP interface.
#[derive(Debug)]
pub struct TapMonitor(OwnedFd);

impl TapMonitor {
    /// The state of the interface.
    #[must_use]
    pub fn state(&self) -> TapState {
        TapState::of(&self.0)
    }
}

fn check(code: libc::c_int) -> io::Result<()> {
    if code < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
