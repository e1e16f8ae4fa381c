//! An Ethernet interface of this host as a port of a switch, through the rings of a packet socket
//! (TPACKET_V2): received frames cost no system call, and a batch of sent ones costs one.

mod receiving;
mod sending;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use rustix::io::Errno;
use sidecore_linux::{Interface, PacketRing, PacketSetup, PacketSocket, VIRTIO_HEADER_BYTES};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint};
use sidecore_net::{
    BATCH, DropReason, Frames, Loan, NoBuffers, Offloads, PortQueue, PortStats, Properties,
    QueueState,
};
use sidecore_reactor::{Arm, WakeSet};
use sidecore_spec_virtio::net::ETHERNET_HEADER_BYTES;
use sidecore_units::Nanos;

use crate::monitor::{EthernetMonitor, InterfaceState};
use receiving::Receiving;
use sending::Sending;

/// Size of a slot: the largest frame that the kernel puts together, 64 KiB, with its headers.
const SLOT_BYTES: u32 = 65_536 + 512;
const RECEIVE_SLOTS: u32 = 192;
const TRANSMIT_SLOTS: u32 = 96;
/// Space in front of a received frame, for a tag to be put back in.
const RESERVE_BYTES: u32 = 16;
/// Size of a VLAN tag (IEEE 802.1Q, 9.4).
const VLAN_TAG_BYTES: usize = 4;
/// How soon frames are offered again that the interface did not take.
const RETRY_INTERVAL: Nanos = Nanos::from_micros(50);

/// An Ethernet interface of this host as a queue of a port. All frames that arrive at the interface
/// go to the switch, and the host's own network stack sees them too: an interface of a switch
/// should have no addresses.
#[derive(Debug)]
pub struct PacketQueue {
    name: String,
    mtu_bytes: u32,
    monitor: EthernetMonitor,
    socket: PacketSocket,
    memory: GuestMemory,
    receiving: Receiving,
    sending: Sending,
    stats: Arc<PortStats>,
    properties: Properties,
    hint: RegionHint,
    /// Has the socket as its only member while the queue is armed: a socket is readable also while
    /// frames are lent.
    wakes: WakeSet,
    is_watched: bool,
    /// The bytes of the loan that is out.
    loan_bytes: u32,
    /// When frames are offered again that the kernel did not take.
    retry_at: Option<Nanos>,
}

impl PacketQueue {
    /// Opens an interface of this thread's network namespace. `stats` are the counters of its port.
    ///
    /// # Errors
    /// No such interface, or it is no Ethernet; no CAP_NET_RAW; no memory for the rings.
    pub fn open(name: &str, stats: Arc<PortStats>) -> io::Result<Self> {
        let socket = PacketSocket::new()?;
        let interface = socket.interface(name)?;
        let receive = PacketRing::new(SLOT_BYTES, RECEIVE_SLOTS);
        let transmit = PacketRing::new(SLOT_BYTES, TRANSMIT_SLOTS);
        let memory = socket.set_up(&PacketSetup {
            receive,
            transmit,
            reserve_bytes: RESERVE_BYTES,
            bypass_qdisc: false,
            has_virtio_headers: true,
        })?;
        let receiving = Receiving::new(&memory, &receive, SLOT_BYTES)?;
        let sending = Sending::new(&memory, receive.len_bytes(), &transmit, SLOT_BYTES)?;
        let wakes = WakeSet::new()?;
        let monitor = EthernetMonitor::new(name, &interface)?;
        socket.bind_to_all(&interface)?;
        Ok(Self {
            name: name.to_owned(),
            properties: properties(&interface),
            mtu_bytes: interface.mtu_bytes,
            monitor,
            socket,
            memory,
            receiving,
            sending,
            stats,
            hint: RegionHint::default(),
            wakes,
            is_watched: false,
            loan_bytes: 0,
            retry_at: None,
        })
    }

    /// The MTU of the interface, as it was when it was opened.
    #[must_use]
    pub const fn mtu_bytes(&self) -> u32 {
        self.mtu_bytes
    }

    /// Sees the state of the interface, on any thread.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn monitor(&self) -> io::Result<EthernetMonitor> {
        self.monitor.again()
    }

    /// Has the kernel send the frames that were committed.
    fn flush(&mut self) {
        let mut sent = self.socket.transmit();
        if sent.as_ref().is_err_and(is_down) {
            // Perhaps it only was down: then the socket has kept the error until now.
            sent = self.socket.transmit();
        }
        let taken = self.sending.reap();
        match sent {
            // A frame that the kernel takes and does not send is not among these bytes.
            Ok(bytes) if (bytes as u64) < taken.bytes => self.stats.out_errors.add(1),
            Err(error) if is_down(&error) => {
                let refused = taken.frames.saturating_add(self.sending.abandon());
                self.stats.out_errors.add(refused);
            }
            _ => {}
        }
        self.retry_at = None;
    }

    /// Counts the frames that found no free slot.
    fn count_losses(&self) {
        if let Ok(losses) = self.socket.take_drops() {
            self.stats.in_losses.add(losses.into());
        }
    }
}

fn properties(interface: &Interface) -> Properties {
    let mtu = usize::try_from(interface.mtu_bytes).unwrap_or(usize::MAX);
    let ethernet = usize::try_from(ETHERNET_HEADER_BYTES).unwrap_or(0);
    Properties {
        header_bytes: VIRTIO_HEADER_BYTES,
        frame_bytes: mtu.saturating_add(ethernet).saturating_add(VLAN_TAG_BYTES),
        sends: Offloads::ALL,
        // The kernel cuts datagrams of packet sockets only from Linux 6.2 on.
        takes: Offloads::CHECKSUM.and(Offloads::TSO4).and(Offloads::TSO6).and(Offloads::ECN),
        frame_segments: 1,
        buffer_segments: 1,
    }
}

fn is_down(error: &io::Error) -> bool {
    [Errno::NETDOWN, Errno::NXIO, Errno::NODEV]
        .iter()
        .any(|down| error.raw_os_error() == Some(down.raw_os_error()))
}

impl PortQueue for PacketQueue {
    fn properties(&self) -> Properties {
        self.properties
    }

    fn state(&self) -> QueueState {
        self.count_losses();
        match self.monitor.state() {
            InterfaceState::Up => QueueState::Up,
            InterfaceState::NoCarrier => QueueState::Down("the interface has no carrier"),
            InterfaceState::Down => QueueState::Down("the host has not set the interface up"),
            InterfaceState::Gone => QueueState::Down("the interface was deleted"),
        }
    }

    fn receive(&mut self, _now: Nanos, frames: &mut Frames) {
        let mut taken = 0_usize;
        while frames.room() > 0
            && taken < BATCH
            && let Some(frame) = self.receiving.take(&self.memory)
        {
            taken = taken.wrapping_add(1);
            let Self { memory, hint, .. } = self;
            frames.append(|segments| {
                let frame = frame?;
                segments.bind(memory);
                segments
                    .push(GuestAddress(frame.start), frame.len_bytes, hint)
                    .map_err(|_| DropReason::Fragmented)
            });
        }
    }

    fn give_back(&mut self, count: usize) {
        self.receiving.give_back(count);
    }

    fn lend(&mut self, len_bytes: usize, loan: &mut Loan) -> Result<(), NoBuffers> {
        let asked = u32::try_from(len_bytes).unwrap_or(u32::MAX);
        if self.sending.is_too_large(asked) {
            return Err(NoBuffers::Never(DropReason::SmallBuffers));
        }
        let start = self.sending.place().ok_or(NoBuffers::Later)?;
        loan.segments.bind(&self.memory);
        loan.segments
            .push(GuestAddress(start), asked.into(), &mut self.hint)
            .map_err(|_| NoBuffers::Never(DropReason::Unusable))?;
        (loan.buffers, self.loan_bytes) = (1, asked);
        Ok(())
    }

    fn commit(&mut self) {
        self.sending.commit(self.loan_bytes);
    }

    fn cancel(&mut self) {}

    fn publish(&mut self) {
        if self.sending.unsent() > 0 && self.retry_at.is_none() {
            self.flush();
        }
    }

    fn end_turn(&mut self, now: Nanos, _busy: bool) {
        if self.sending.unsent() == 0 {
            return;
        }
        if self.retry_at.is_some_and(|at| now >= at) {
            self.flush();
        }
        if self.sending.unsent() > 0 && self.retry_at.is_none() {
            self.retry_at = Some(now.after(RETRY_INTERVAL));
        }
    }

    fn arm(&mut self) -> Arm {
        // An error that stays would keep the socket readable.
        drop(self.socket.take_error());
        self.is_watched = self.is_watched || self.wakes.add(self.socket.as_fd()).is_ok();
        if !self.is_watched || self.sending.wants_slot() {
            return Arm::CannotSleep;
        }
        if self.receiving.has_next() {
            self.disarm();
            return Arm::WorkPending;
        }
        Arm::Armed
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.is_watched) {
            self.wakes.remove(self.socket.as_fd());
        }
    }

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        watch(self.wakes.as_fd());
    }

    fn on_wake(&mut self) {}

    fn deadline(&self) -> Option<Nanos> {
        self.retry_at
    }
}

impl Drop for PacketQueue {
    fn drop(&mut self) {
        // The socket lives as long as frames in its memory are lent.
        if let Err(error) = self.socket.receive_nothing() {
            tracing::warn!(interface = self.name, %error, "a packet socket goes on receiving");
        }
    }
}
