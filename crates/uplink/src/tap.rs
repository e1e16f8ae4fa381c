//! A TAP interface as a port of a switch.
//!
//! TAP has no calls for several frames: each frame is a system call. The kernel handles a frame
//! before the call returns, its own answer included, so it is written at once and not in batches.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use sidecore_linux::{Place, Tap, TapMonitor, TapOffloads};
use sidecore_memory::{GuestAddress, RegionHint, SharedPages};
use sidecore_net::{
    DropReason, FRAMES_MAX, Frames, Loan, NoBuffers, Offloads, PortQueue, PortStats, Properties,
    QueueState,
};
use sidecore_reactor::{Arm, WakeSet};
use sidecore_spec_virtio::net::{ETHERNET_HEADER_BYTES, PacketHeader};
use sidecore_units::Nanos;

use crate::looks::Looks;
use crate::room::Room;

/// The largest frame with its headers: 64 KiB, a tag, and a byte by which longer ones are noticed.
const FRAME_BYTES: u32 = 65_536 + 64;
/// Memory for frames from the kernel.
const ROOM_BYTES: u32 = 1 << 20;
/// Memory of all frames: behind those from the kernel, the one that it is given.
const MEMORY_BYTES: u32 = ROOM_BYTES + (128 << 10);
/// Frames that a turn takes: each is a system call, during which no other unit of the sidecore is
/// served.
const BATCH: usize = 8;
/// Size of a VLAN tag (IEEE 802.1Q, 9.4).
const VLAN_TAG_BYTES: usize = 4;

/// The options of a TAP interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapOptions {
    /// The name of the interface.
    pub interface: String,
    /// Its MTU in bytes; `None` for the one that it has.
    pub mtu: Option<u16>,
    /// Whether frames may leave checksums and cuts to their receivers, in both directions.
    pub offloads: bool,
}

/// A TAP interface of this host's kernel as a queue of a port.
#[derive(Debug)]
pub struct TapQueue {
    tap: Tap,
    /// Counts the frames that the kernel refuses.
    stats: Arc<PortStats>,
    properties: Properties,
    /// Has the interface as its only member, until the interface is gone: its descriptor would wake
    /// a sidecore for ever then.
    wakes: WakeSet,
    room: Room,
    hint: RegionHint,
    looks: Looks,
    /// The bytes of the loan that is out.
    loan_bytes: u32,
    is_gone: bool,
}

impl TapQueue {
    /// Opens the interface, or makes it, in this thread's network namespace. `stats` are the
    /// counters of its port.
    ///
    /// # Errors
    /// As [`Tap::open`].
    pub fn open(options: &TapOptions, stats: Arc<PortStats>) -> io::Result<Self> {
        let len_bytes = usize::try_from(MEMORY_BYTES).map_err(io::Error::other)?;
        let memory = SharedPages::new("tap", len_bytes)?.memory().clone();
        let tap = Tap::open(&options.interface, memory, options.offloads, options.mtu)?;
        let wakes = WakeSet::new()?;
        wakes.add(tap.as_fd())?;
        Ok(Self {
            properties: properties(&tap),
            tap,
            stats,
            wakes,
            room: Room::new(ROOM_BYTES, FRAME_BYTES, FRAMES_MAX),
            hint: RegionHint::default(),
            looks: Looks::new(),
            loan_bytes: 0,
            is_gone: false,
        })
    }

    /// The MTU of the interface, as it was when it was opened.
    #[must_use]
    pub const fn mtu(&self) -> u16 {
        self.tap.mtu()
    }

    /// As [`Tap::monitor`].
    ///
    /// # Errors
    /// As there.
    pub fn monitor(&self) -> io::Result<TapMonitor> {
        self.tap.monitor()
    }

    fn lose(&mut self) {
        self.is_gone = true;
        self.wakes.remove(self.tap.as_fd());
    }
}

fn properties(tap: &Tap) -> Properties {
    let tcp = Offloads::CHECKSUM.and(Offloads::TSO4).and(Offloads::TSO6).and(Offloads::ECN);
    let offloads = match tap.offloads() {
        TapOffloads::None => Offloads::NONE,
        TapOffloads::Tcp => tcp,
        TapOffloads::TcpAndUdp => tcp.and(Offloads::USO),
    };
    let ethernet = usize::try_from(ETHERNET_HEADER_BYTES).unwrap_or(0);
    Properties {
        header_bytes: PacketHeader::BYTES,
        frame_bytes: usize::from(tap.mtu()).saturating_add(ethernet).saturating_add(VLAN_TAG_BYTES),
        sends: offloads,
        takes: offloads,
        frame_segments: 1,
        buffer_segments: 1,
    }
}

impl PortQueue for TapQueue {
    fn properties(&self) -> Properties {
        self.properties
    }

    fn state(&self) -> QueueState {
        let state = self.tap.state();
        if self.is_gone || state.is_gone {
            QueueState::Down("the interface was deleted")
        } else if state.is_up {
            QueueState::Up
        } else {
            QueueState::Down("the host has not set the interface up")
        }
    }

    fn receive(&mut self, now: Nanos, frames: &mut Frames) {
        if self.is_gone || !self.looks.is_due(now) {
            return;
        }
        let mut taken = 0_usize;
        while frames.room() > 0 && taken < BATCH {
            let Some(place) = self.room.place() else {
                return;
            };
            let read = match self.tap.read(place) {
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.looks.emptied(now, taken > 0);
                    return;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => {
                    self.looks.emptied(now, false);
                    if self.tap.state().is_gone {
                        self.lose();
                    }
                    return;
                }
            };
            let place = self.room.take(read);
            taken = taken.saturating_add(1);
            let Self { tap, hint, .. } = self;
            frames.append(|segments| {
                if place.len_bytes >= FRAME_BYTES {
                    return Err(DropReason::TooLong);
                }
                segments.bind(tap.memory());
                segments
                    .push(GuestAddress(place.start.into()), place.len_bytes.into(), hint)
                    .map_err(|_| DropReason::Fragmented)
            });
        }
    }

    fn give_back(&mut self, count: usize) {
        self.room.give_back(count);
    }

    fn lend(&mut self, len_bytes: usize, loan: &mut Loan) -> Result<(), NoBuffers> {
        let asked = u32::try_from(len_bytes).unwrap_or(u32::MAX);
        if self.is_gone {
            return Err(NoBuffers::Never(DropReason::Unusable));
        }
        if asked > MEMORY_BYTES.saturating_sub(ROOM_BYTES) {
            return Err(NoBuffers::Never(DropReason::SmallBuffers));
        }
        loan.segments.bind(self.tap.memory());
        loan.segments
            .push(GuestAddress(ROOM_BYTES.into()), asked.into(), &mut self.hint)
            .map_err(|_| NoBuffers::Never(DropReason::Unusable))?;
        (loan.buffers, self.loan_bytes) = (1, asked);
        Ok(())
    }

    fn commit(&mut self) {
        let place = Place { start: ROOM_BYTES, len_bytes: self.loan_bytes };
        if self.tap.write(place).is_err() {
            self.stats.out_errors.add(1);
        }
        self.looks.soon();
    }

    fn cancel(&mut self) {}

    /// The kernel has each frame already.
    fn publish(&mut self) {}

    fn end_turn(&mut self, _now: Nanos, _busy: bool) {}

    fn arm(&mut self) -> Arm {
        if self.is_gone {
            return Arm::Armed;
        }
        let state = self.tap.state();
        if state.is_gone {
            self.lose();
        } else if state.has_frames {
            self.looks.soon();
            return Arm::WorkPending;
        }
        Arm::Armed
    }

    /// The descriptor is watched in any case; only armed sidecores look at it.
    fn disarm(&mut self) {}

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        watch(self.wakes.as_fd());
    }

    fn on_wake(&mut self) {
        self.looks.soon();
    }

    fn deadline(&self) -> Option<Nanos> {
        None
    }
}
