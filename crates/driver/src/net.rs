//! A virtio-net device over a vhost-user socket: frames in and out of pairs of queues.

mod in_place;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use sidecore_ring::RingState;
use sidecore_ring::driver::{Buffer, DriverRing, RawRing};
use sidecore_spec_virtio::net::{PacketHeader, feature};
use sidecore_spec_virtio::vhost_user::{Request, protocol};

use crate::arena::Arena;
use crate::buffers::Buffers;
use crate::config::features;
use crate::error::ClientError;
use crate::event;
use crate::front_end::{self, Asked, FrontEnd, Hooks, RingPlan, RingShape, twice, whole_pages};
use crate::request::Slot;
use crate::socket;
use crate::wire::Wire;

pub use in_place::FrameBuffer;

/// Size of the header in front of each frame: the driver insists on virtio 1.0.
const HEADER_BYTES: u32 = PacketHeader::BYTES as u32;

/// The options of a NIC's client. Features that the device has not got are left out.
#[derive(Clone, Debug)]
pub struct NetClientOptions {
    /// Pairs of queues; the device must have as many.
    pub pairs: u16,
    /// Frames, or receive buffers, that one queue holds at once.
    pub slots: u16,
    /// Size of each buffer in bytes, with room for the header.
    pub buffer_bytes: u32,
    /// Size of the buffers of frames to send, if they are not like those to receive.
    pub sending_bytes: Option<u32>,
    /// The most buffers of a frame to send.
    pub frame_buffers: u16,
    /// Shared memory in huge pages, if there are enough of them.
    pub huge_pages: bool,
    /// Packed rings.
    pub packed: bool,
    /// Notifications by index (VIRTIO_F_EVENT_IDX).
    pub event_idx: bool,
    /// Indirect descriptors.
    pub indirect: bool,
    /// Virtio features to refuse.
    pub refuse_features: u64,
    /// How long to wait for an answer on the socket.
    pub timeout: Duration,
}

impl Default for NetClientOptions {
    fn default() -> Self {
        Self {
            pairs: 1,
            slots: 64,
            buffer_bytes: 2048,
            sending_bytes: None,
            frame_buffers: 2,
            huge_pages: false,
            packed: false,
            event_idx: true,
            indirect: false,
            refuse_features: 0,
            timeout: Duration::from_secs(10),
        }
    }
}

impl NetClientOptions {
    fn features(&self) -> u64 {
        let mut wanted = features::PROTOCOL_FEATURES
            | features::VERSION_1
            | feature::CSUM
            | feature::GUEST_CSUM
            | feature::GUEST_TSO4
            | feature::GUEST_TSO6
            | feature::GUEST_ECN
            | feature::HOST_TSO4
            | feature::HOST_TSO6
            | feature::HOST_ECN
            | feature::MRG_RXBUF
            | feature::MTU;
        let optional = [
            (self.pairs > 1, feature::MQ),
            (self.packed, features::RING_PACKED),
            (self.event_idx, features::EVENT_IDX),
            (self.indirect, features::INDIRECT_DESC),
        ];
        optional.iter().filter(|(asked, _)| *asked).for_each(|(_, bit)| wanted |= bit);
        wanted & !self.refuse_features
    }
}

/// A NIC behind a vhost-user socket. Dropping it hangs up.
#[derive(Debug)]
pub struct NetClient {
    front_end: FrontEnd,
    pairs: Vec<NetQueues>,
}

impl NetClient {
    /// Connects, negotiates, shares memory, offers receive buffers and starts the queues.
    ///
    /// # Errors
    /// The device hangs up, refuses or makes no sense; it has fewer queues than asked for; there is
    /// not enough memory; the options contradict themselves.
    pub fn connect(
        socket: impl AsRef<Path>,
        options: &NetClientOptions,
    ) -> Result<Self, ClientError> {
        Self::set_up(Wire::connect(socket.as_ref(), options.timeout)?, options)
    }

    /// As [`connect`](Self::connect), with a device that has connected to its VMM.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn over(socket: UnixStream, options: &NetClientOptions) -> Result<Self, ClientError> {
        socket::limit(&socket, options.timeout)?;
        Self::set_up(Wire::over(socket), options)
    }

    fn set_up(wire: Wire, options: &NetClientOptions) -> Result<Self, ClientError> {
        let asked = Asked {
            features: options.features(),
            protocol: protocol::NET_MTU | protocol::RARP,
            queues: options.pairs,
            status: true,
            timeout: options.timeout,
        };
        let (wire, agreed) = front_end::agree(wire, &asked, |_, _| Ok(()))?;
        if agreed.features & features::VERSION_1 == 0 {
            return Err(ClientError::Missing { what: "virtio 1.0" });
        }
        if options.buffer_bytes.min(options.sending_bytes.unwrap_or(u32::MAX)) <= HEADER_BYTES {
            return Err(ClientError::Options("a buffer is smaller than a header".to_owned()));
        }
        let shape = RingShape {
            slots: options.slots,
            buffers_per_slot: options.frame_buffers,
            queue_size: 0,
            indirect: options.indirect,
        };
        let plan = RingPlan::new(shape, agreed.features)?;
        let buffer_bytes =
            [options.buffer_bytes, options.sending_bytes.unwrap_or(options.buffer_bytes)];
        let data_bytes = |bytes: u32| usize::from(options.slots) * bytes as usize;
        let pair_bytes: u64 = buffer_bytes
            .iter()
            .map(|bytes| plan.arena_bytes() + whole_pages(data_bytes(*bytes)))
            .sum();
        let arena = Arena::new(pair_bytes * u64::from(options.pairs), options.huge_pages)?;
        let mut front_end = FrontEnd { wire, agreed, arena, hooks: Vec::new() };
        front_end.share_memory(1, false)?;
        let mut pairs = Vec::new();
        for _ in 0..options.pairs {
            let mut queue = |bytes: u32| -> Result<(NetRing, Hooks), ClientError> {
                let (ring, raw, hooks) = plan.build(&mut front_end.arena)?;
                let data = front_end.arena.give(data_bytes(bytes))?;
                let data = Buffers::new(data, options.slots, bytes, bytes as usize);
                let (kick, call) = (twice(&hooks.kick)?, twice(&hooks.call)?);
                let error = twice(&hooks.error)?;
                let free = (0..options.slots).rev().collect();
                let described = vec![0; usize::from(options.slots)];
                let has_pushed = false;
                let ring =
                    NetRing { ring, raw, data, free, described, has_pushed, kick, call, error };
                Ok((ring, hooks))
            };
            let [(receiving, first), (sending, second)] =
                [queue(buffer_bytes[0])?, queue(buffer_bytes[1])?];
            let is_merged = agreed.features & feature::MRG_RXBUF != 0;
            pairs.push(NetQueues { receiving, sending, is_merged, kicks: 0 });
            front_end.hooks.extend([first, second]);
        }
        let mut client = Self { front_end, pairs };
        let base = RingState::fresh(plan.format()).to_vring_base(plan.format());
        for pair in &mut client.pairs {
            pair.offer_buffers()?;
        }
        for index in 0..options.pairs * 2 {
            client.front_end.start_queue(index, base)?;
        }
        client.front_end.say_ready()?;
        Ok(client)
    }

    /// The virtio features that both sides have agreed on.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.front_end.agreed.features
    }

    /// Whether the device takes TCP segments over IPv4 that are larger than the MTU.
    #[must_use]
    pub fn takes_large_frames(&self) -> bool {
        self.features() & feature::HOST_TSO4 != 0
    }

    /// Pair `index` of the queues, if there is one.
    pub fn pair(&mut self, index: u16) -> Option<&mut NetQueues> {
        self.pairs.get_mut(usize::from(index))
    }

    /// Enables or disables a ring: 0 receives and 1 sends, of the first pair.
    ///
    /// # Errors
    /// The socket.
    pub fn enable_ring(&mut self, index: u16, enable: bool) -> Result<(), ClientError> {
        self.front_end.enable_queue(index, enable)
    }

    /// Stops a ring and returns where the device stood in it.
    ///
    /// # Errors
    /// The socket.
    pub fn stop_ring(&mut self, index: u16) -> Result<u32, ClientError> {
        self.front_end.stop_queue(index)
    }

    /// Starts a ring where the device is to stand in it.
    ///
    /// # Errors
    /// The socket; no such ring.
    pub fn start_ring(&mut self, index: u16, base: u32) -> Result<(), ClientError> {
        self.front_end.start_queue(index, base)
    }

    /// Sets the MTU (NET_SET_MTU).
    ///
    /// # Errors
    /// The device refuses it or cannot do that; the socket.
    pub fn set_mtu(&mut self, mtu: u16) -> Result<(), ClientError> {
        self.front_end.need(protocol::NET_MTU, "NET_SET_MTU")?;
        self.front_end.wire.tell_u64(Request::NetSetMtu, mtu.into())
    }

    /// Has the device announce the guest (SEND_RARP).
    ///
    /// # Errors
    /// The device cannot do that; the socket.
    pub fn announce(&mut self, mac: [u8; 6]) -> Result<(), ClientError> {
        self.front_end.need(protocol::RARP, "SEND_RARP")?;
        let [a, b, c, d, e, f] = mac;
        let number = u64::from_le_bytes([a, b, c, d, e, f, 0, 0]);
        self.front_end.wire.tell_u64(Request::SendRarp, number)
    }
}

/// One ring with the buffers of its slots.
#[derive(Debug)]
struct NetRing {
    ring: DriverRing,
    raw: RawRing,
    data: Buffers,
    /// The slots that are not with the device, the last one returned at the end.
    free: VecDeque<u16>,
    /// The length in bytes of the frame that a slot's chain describes in one buffer, or zero.
    described: Vec<u32>,
    /// Whether slots were pushed that the device cannot see yet.
    has_pushed: bool,
    kick: OwnedFd,
    call: OwnedFd,
    error: OwnedFd,
}

impl NetRing {
    #[inline]
    fn push(&mut self, slot: u16) -> Result<(), ClientError> {
        self.ring.push(slot)?;
        self.has_pushed = true;
        Ok(())
    }
}

/// A pair of queues.
#[derive(Debug)]
pub struct NetQueues {
    receiving: NetRing,
    sending: NetRing,
    is_merged: bool,
    kicks: u64,
}

impl NetQueues {
    /// Queues a frame with its header. False if all slots are with the device.
    ///
    /// # Errors
    /// The frame is larger than a buffer; the device completed what it was not given.
    pub fn send(&mut self, header: &PacketHeader, frame: &[u8]) -> Result<bool, ClientError> {
        self.send_bytes(&[&header.encode(), frame].concat())
    }

    /// Queues these bytes, whatever they mean. False if all slots are with the device.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_bytes(&mut self, bytes: &[u8]) -> Result<bool, ClientError> {
        self.reclaim()?;
        let sending = &mut self.sending;
        let len_bytes = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        sending.data.check_len(len_bytes)?;
        let Some(slot) = sending.free.pop_back() else { return Ok(false) };
        sending.described[usize::from(slot)] = 0;
        sending.data.write(Slot(slot), 0, bytes);
        let at = sending.data.address(Slot(slot));
        // The header in a buffer of its own, as drivers send it that do not rely on any layout.
        let cut = HEADER_BYTES.min(len_bytes.saturating_sub(1));
        let parts =
            [Buffer::to_device(at, cut), Buffer::to_device(at + u64::from(cut), len_bytes - cut)];
        let chain = if cut == 0 { &parts[1..] } else { &parts[..] };
        sending.ring.describe(slot, chain)?;
        sending.push(slot)?;
        Ok(true)
    }

    /// Takes back the slots of frames that the device has sent. Returns their number.
    ///
    /// # Errors
    /// The device completed what it was not given.
    pub fn reclaim(&mut self) -> Result<usize, ClientError> {
        let before = self.sending.free.len();
        while let Some(used) = self.sending.ring.pop()? {
            self.sending.free.push_back(used.slot);
        }
        Ok(self.sending.free.len() - before)
    }

    /// Frames that are with the device.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        self.sending.ring.in_flight()
    }

    /// Shows the device what was queued, frames and buffers, and kicks it if it wants that.
    ///
    /// # Errors
    /// The kick cannot be written.
    pub fn publish(&mut self) -> Result<(), ClientError> {
        for ring in [&mut self.receiving, &mut self.sending] {
            if !std::mem::take(&mut ring.has_pushed) {
                continue;
            }
            ring.ring.publish();
            if ring.ring.kick_wanted() {
                self.kicks += 1;
                match rustix::io::write(&ring.kick, &1_u64.to_ne_bytes()) {
                    Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
                    Err(errno) => return Err(ClientError::io("kicking the device")(errno)),
                }
            }
        }
        Ok(())
    }

    /// Takes the next frame into `frame`, and offers its buffers again at the next
    /// [`publish`](Self::publish). Returns its header.
    ///
    /// # Errors
    /// The device completed what it was not given, or a frame whose parts are missing.
    pub fn receive(&mut self, frame: &mut Vec<u8>) -> Result<Option<PacketHeader>, ClientError> {
        frame.clear();
        let Some(mut used) = self.receiving.ring.pop()? else { return Ok(None) };
        let mut header = None;
        let mut left = 1;
        loop {
            let start = frame.len();
            let written = used.written_bytes.min(self.receiving.data.slot_bytes()) as usize;
            frame.resize(start + written, 0);
            self.receiving.data.read(Slot(used.slot), 0, &mut frame[start..]);
            self.receiving.push(used.slot)?;
            if header.is_none() {
                let bytes =
                    frame.get(..PacketHeader::BYTES).and_then(|bytes| bytes.try_into().ok());
                let decoded = PacketHeader::decode(bytes.ok_or_else(|| wrong("no header"))?);
                left = if self.is_merged { decoded.num_buffers } else { 1 };
                header = Some(decoded);
                frame.drain(..PacketHeader::BYTES);
            }
            left = left.checked_sub(1).ok_or_else(|| wrong("a frame in no buffers"))?;
            if left == 0 {
                return Ok(header);
            }
            let next = self.receiving.ring.pop()?;
            used = next.ok_or_else(|| wrong("a frame that lacks a buffer"))?;
        }
    }

    /// Sleeps until a frame is there; false when `timeout` is over.
    ///
    /// # Errors
    /// The eventfd.
    pub fn wait(&mut self, timeout: Duration) -> Result<bool, ClientError> {
        let end = Instant::now() + timeout;
        loop {
            let has_frame = self.receiving.ring.arm_calls();
            if has_frame || !event::wait(&self.receiving.call, end, "waiting for a frame")? {
                self.receiving.ring.suppress_calls();
                return Ok(has_frame || self.receiving.ring.has_used());
            }
            event::drain(&self.receiving.call);
        }
    }

    /// Kicks written.
    #[must_use]
    pub fn kicks(&self) -> u64 {
        self.kicks
    }

    /// Whether the device has said that a queue is broken.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        event::is_set(&self.receiving.error) || event::is_set(&self.sending.error)
    }

    /// The words of the ring that sends, for tests.
    #[must_use]
    pub fn raw_sending(&self) -> &RawRing {
        &self.sending.raw
    }

    fn offer_buffers(&mut self) -> Result<(), ClientError> {
        let receiving = &mut self.receiving;
        while let Some(slot) = receiving.free.pop_back() {
            let at = receiving.data.address(Slot(slot));
            let buffer = Buffer::from_device(at, receiving.data.slot_bytes());
            receiving.ring.describe(slot, &[buffer])?;
            receiving.ring.push(slot)?;
        }
        receiving.ring.publish();
        Ok(())
    }
}

fn wrong(why: &str) -> ClientError {
    ClientError::Request(why.to_owned())
}
