//! The back end's side of one connection, as a state machine.

mod error;
mod log;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use sidecore_memory::{
    GuestAddress, GuestMemory, MAX_REGIONS, MemoryError, MemoryFile, RegionSpec, UserAddress,
};
use sidecore_socket::cause;
use sidecore_spec_virtio::status::DEVICE_NEEDS_RESET;
use sidecore_spec_virtio::vhost_user::{LOG_ALL, PROTOCOL_FEATURES, RING_LOG, protocol};
use sidecore_spec_virtio::{MAX_QUEUE_SIZE, MMIO_CONFIG_OFFSET};
use sidecore_virtio::{StartError, VirtioDevice};

use crate::backend_channel::BackendChannel;
use crate::message::{
    Body, ConfigSpace, MemoryRegion, Message, NO_FD, Request, VringAddress, VringState,
};
use crate::ring::Ring;
use crate::write_log::WriteLog;

pub use error::ProtocolError;
use log::check_log;

/// The protocol features that a [`Session`] offers of a device with a configuration space.
pub(crate) const OFFERED_PROTOCOL: u64 = protocol::MQ
    | protocol::LOG_SHMFD
    | protocol::REPLY_ACK
    | protocol::BACKEND_REQ
    | protocol::CONFIG
    | protocol::RESET_DEVICE
    | protocol::CONFIGURE_MEM_SLOTS
    | protocol::STATUS;

/// The protocol features that a [`Session`] offers of this device.
fn offered_protocol(device: &dyn VirtioDevice) -> u64 {
    // QEMU has a network device's configuration itself, and warns of another one. What the switch
    // writes to its guest is not logged, so that its VMM refuses a live migration.
    let config = protocol::CONFIG | protocol::BACKEND_REQ | protocol::LOG_SHMFD;
    let network = protocol::NET_MTU | protocol::RARP;
    if device.is_network() { OFFERED_PROTOCOL & !config | network } else { OFFERED_PROTOCOL }
}

/// The state of one connection to a VMM: the negotiated features, the guest's memory, and the
/// rings.
///
/// # A ring's life
///
/// A ring runs while it has a size, addresses and a kick (or is polled), is enabled, and the
/// features are negotiated. These settings may come in any order; a ring that lacks one of them is
/// stopped. If the device refuses to start a ring, the next request that changes the ring, the
/// memory or the features starts another attempt; until then the device status has
/// DEVICE_NEEDS_RESET.
///
/// A change of memory stops all rings before the old memory is released, and restarts them from
/// their positions. When the change is acknowledged, no thread can reach the old memory; the kernel
/// may free it later (the reaper of `sidecore_memory`).
///
/// # The log of written pages
///
/// While a guest migrates, the rings log the pages that the device writes. SET_LOG_BASE and
/// SET_FEATURES are answered when each running ring uses the new log, or none: so the front end
/// finds each page in the log that it has then, or had before. The log has a bit for each page of
/// the guest's memory, or is refused.
///
/// # Errors
///
/// A failed request is acknowledged as failed if the front end asked for acknowledgements.
/// Otherwise it closes the connection, since the front end would continue as if the request had
/// been served; except for errors that a guest can cause by itself, which are logged. A ring that
/// was in use before this connection, on a device that [misses](VirtioDevice::loss) answered
/// writes, closes the connection in any case.
pub struct Session {
    pub(crate) device: Arc<dyn VirtioDevice>,
    pub(crate) protocol_features: u64,
    /// The features of SET_FEATURES, bit 30 included; `None` before it.
    pub(crate) features: Option<u64>,
    pub(crate) status: u8,
    memory: GuestMemory,
    /// The memory's regions with their files, for the next process.
    pub(crate) regions: Vec<(MemoryRegion, MemoryFile)>,
    pub(crate) rings: Vec<Ring>,
    pub(crate) backend_channel: Option<BackendChannel>,
    pub(crate) log: WriteLog,
    /// The generation of the configuration space that the front end has read or was notified of;
    /// `None` before its first read.
    known_config: Option<u32>,
    /// Whether the session has released the device, which may serve another session now.
    is_ended: bool,
}

impl Session {
    /// Makes a session that has negotiated nothing yet.
    #[must_use]
    pub fn new(device: Arc<dyn VirtioDevice>) -> Self {
        let rings =
            (0..device.queue_count()).map(|index| Ring::new(Arc::clone(&device), index)).collect();
        Self {
            device,
            protocol_features: 0,
            features: None,
            status: 0,
            memory: GuestMemory::empty(),
            regions: Vec::new(),
            rings,
            backend_channel: None,
            log: WriteLog::default(),
            known_config: None,
            is_ended: false,
        }
    }

    /// Whether the front end has to be notified that the configuration space has changed since it
    /// read the space.
    ///
    /// QEMU ignores the message unless the device runs. QEMU does not read the space again after a
    /// reconnect either, so a front end that has not read the space on this connection is notified
    /// once.
    #[must_use]
    pub fn owes_config_change(&self) -> bool {
        self.backend_channel.is_some()
            && self.known_config != Some(self.device.config_generation())
            && self.rings.iter().any(Ring::is_running)
    }

    /// Notifies the front end, if its socket has space; otherwise the notification [stays
    /// due](Self::owes_config_change).
    pub fn send_config_change(&mut self) {
        let generation = self.device.config_generation();
        match self.backend_channel.as_ref().map(BackendChannel::config_changed) {
            Some(Ok(true)) => self.known_config = Some(generation),
            Some(Ok(false)) | None => {}
            Some(Err(error)) => {
                tracing::warn!(
                    %error,
                    "the front end cannot be notified of a change of the configuration space"
                );
                self.backend_channel = None;
            }
        }
    }

    /// Serves one request. Returns the reply, if there is one.
    ///
    /// # Errors
    /// The caller has to close the connection.
    pub fn handle(&mut self, message: Message) -> Result<Option<Message>, ProtocolError> {
        let (request, flags) = (message.request, message.flags);
        tracing::debug!(%request, body = ?message.body, "request");
        let answer = self.answer(message);
        let acknowledged = flags.need_reply
            && self.protocol_features & protocol::REPLY_ACK != 0
            && !request.has_reply();
        match answer {
            Ok(Some(body)) => Ok(Some(Message::reply(request, body))),
            Ok(None) => Ok(acknowledged.then(|| Message::reply(request, Body::U64(0)))),
            Err(error) if acknowledged && !error.is_final() => {
                tracing::warn!(%request, cause = cause(&error), %error, "request refused");
                Ok(Some(Message::reply(request, Body::U64(1))))
            }
            Err(error) if error.is_the_guests() => {
                tracing::warn!(%request, cause = cause(&error), %error, "request failed");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Ends the session, as its drop does: stops all rings, releases the guest's memory and resets
    /// the device.
    pub fn end(self) {}

    /// Ends the session, but keeps the descriptors that the front end has sent.
    pub(crate) fn stop(&mut self) {
        if !std::mem::replace(&mut self.is_ended, true) {
            self.reset();
            self.release_memory();
        }
    }

    fn release_memory(&mut self) {
        self.memory = GuestMemory::empty();
        self.regions.clear();
    }

    /// Stops all rings and keeps their positions, for another process. False if the guest has to
    /// reset the device in any case.
    pub(crate) fn pause(&mut self) -> bool {
        self.rings.iter_mut().for_each(|ring| {
            ring.stop();
        });
        self.device.broken().is_none()
    }

    /// Ends the session without a reset of the device: the session was exported.
    pub(crate) fn forget(&mut self) {
        self.is_ended = true;
        self.release_memory();
    }

    /// Maps the regions and starts the rings of another process.
    pub(crate) fn restart(
        &mut self,
        regions: Vec<(MemoryRegion, OwnedFd)>,
    ) -> Result<(), ProtocolError> {
        let (regions, fds): (Vec<_>, Vec<_>) = regions.into_iter().unzip();
        self.set_memory_table(&regions, fds)?;
        if self.features.is_some() { self.start_all() } else { Ok(()) }
    }

    fn answer(&mut self, message: Message) -> Result<Option<Body>, ProtocolError> {
        let request = message.request;
        if message.flags.reply {
            return Err(ProtocolError::UnexpectedReply { request });
        }
        message.check_fds()?;
        self.check_negotiated(request)?;
        let Message { body, fds, .. } = message;
        let reply = match (request, body) {
            (Request::GetFeatures, Body::Empty) => Some(Body::U64(self.offered())),
            (Request::GetProtocolFeatures, Body::Empty) => {
                Some(Body::U64(offered_protocol(&*self.device)))
            }
            (Request::GetQueueNum, Body::Empty) => Some(Body::U64(self.announced_queues().into())),
            (Request::GetMaxMemSlots, Body::Empty) => Some(Body::U64(MAX_REGIONS as u64)),
            (Request::GetStatus, Body::Empty) => Some(Body::U64(self.status().into())),
            (Request::GetConfig, Body::Config(config)) => Some(self.read_config(config)),
            (Request::GetVringBase, Body::VringState(state)) => Some(self.stop_ring(state)?),
            // Always answered, by a number that means nothing ("Migration").
            (Request::SetLogBase, Body::Log(log)) => {
                self.set_log(log, fds)?;
                Some(Body::U64(0))
            }
            (request, body) => {
                self.serve(request, body, fds)?;
                None
            }
        };
        Ok(reply)
    }

    /// The answer to GET_QUEUE_NUM. QEMU compares its pairs of a network device with it
    /// (`net/vhost-user.c`).
    fn announced_queues(&self) -> u16 {
        let count = self.device.queue_count();
        if self.device.is_network() { count / 2 } else { count }
    }

    /// Serves the requests whose only reply is an acknowledgement.
    fn serve(
        &mut self,
        request: Request,
        body: Body,
        fds: Vec<OwnedFd>,
    ) -> Result<(), ProtocolError> {
        match (request, body) {
            (Request::SetFeatures, Body::U64(bits)) => self.set_features(bits),
            (Request::SetProtocolFeatures, Body::U64(bits)) => self.set_protocol_features(bits),
            // Each connection has only one front end.
            (Request::SetOwner, Body::Empty) => Ok(()),
            // "It is recommended that back-ends either ignore this message, or use it to disable
            // all rings."
            (Request::ResetOwner, Body::Empty) => {
                self.rings.iter_mut().for_each(Ring::disarm);
                Ok(())
            }
            (Request::ResetDevice, Body::Empty) => {
                self.reset();
                Ok(())
            }
            (Request::SetStatus, Body::U64(status)) => self.set_status(status),
            (Request::SetConfig, Body::Config(config)) => self.write_config(&config),
            (Request::SetBackendReqFd, Body::Empty) => self.set_backend_channel(fds),
            (Request::SetLogFd, Body::Empty) => self.set_log_event(fds),
            (Request::SetMemTable, Body::MemoryTable(regions)) => {
                self.set_memory_table(&regions, fds)
            }
            (Request::AddMemReg, Body::MemoryRegion(region)) => self.add_region(&region, fds),
            (Request::RemMemReg, Body::MemoryRegion(region)) => self.remove_region(&region),
            (Request::SetVringNum, Body::VringState(state)) => self.set_size(state),
            (Request::SetVringAddr, Body::VringAddress(address)) => self.set_areas(address),
            (Request::SetVringBase, Body::VringState(state)) => self.set_base(state),
            (Request::SetVringEnable, Body::VringState(state)) => self.enable(state),
            (Request::SetVringKick, Body::U64(value)) => self.set_kick(value, fds),
            (Request::SetVringCall, Body::U64(value)) => self.set_call(value, fds),
            (Request::SetVringErr, Body::U64(value)) => self.set_err(value, fds),
            (Request::NetSetMtu, Body::U64(mtu)) => self.set_mtu(mtu),
            // The address in the message is the guest's word: the switch announces the one that the
            // port is configured with.
            (Request::SendRarp, Body::U64(_)) => {
                self.device.announce();
                Ok(())
            }
            (request, Body::Other(_)) => Err(ProtocolError::NotOffered { request }),
            (request, _) => Err(ProtocolError::UnexpectedBody { request }),
        }
    }

    /// GET_QUEUE_NUM and RESET_DEVICE need only that the feature is offered.
    fn check_negotiated(&self, request: Request) -> Result<(), ProtocolError> {
        let feature = match request {
            Request::GetConfig | Request::SetConfig => protocol::CONFIG,
            Request::GetStatus | Request::SetStatus => protocol::STATUS,
            Request::SetBackendReqFd => protocol::BACKEND_REQ,
            Request::SetLogBase | Request::SetLogFd => protocol::LOG_SHMFD,
            Request::NetSetMtu => protocol::NET_MTU,
            Request::SendRarp => protocol::RARP,
            Request::GetMaxMemSlots | Request::AddMemReg | Request::RemMemReg => {
                protocol::CONFIGURE_MEM_SLOTS
            }
            _ => return Ok(()),
        };
        if self.protocol_features & feature == 0 {
            Err(ProtocolError::NotNegotiated { request })
        } else {
            Ok(())
        }
    }

    // Features and status.

    fn offered(&self) -> u64 {
        let log = if self.device.is_network() { 0 } else { LOG_ALL };
        self.device.features() | PROTOCOL_FEATURES | log
    }

    fn set_features(&mut self, bits: u64) -> Result<(), ProtocolError> {
        let unoffered = bits & !self.offered();
        if unoffered != 0 {
            return Err(ProtocolError::FeaturesNotOffered {
                request: Request::SetFeatures,
                bits: unoffered,
            });
        }
        // QEMU repeats the features at each start of the device.
        if self.features != Some(bits) && self.rings.iter().any(Ring::is_running) {
            return self.switch_log(bits);
        }
        let before = self.features.replace(bits);
        for index in 0..self.rings.len() {
            // A base for rings of the other format is invalid for this one.
            self.check_base(index as u64).or_else(|error| before.map(drop).ok_or(error))?;
        }
        self.start_all()
    }

    fn set_protocol_features(&mut self, bits: u64) -> Result<(), ProtocolError> {
        let unoffered = bits & !offered_protocol(&*self.device);
        if unoffered != 0 {
            return Err(ProtocolError::FeaturesNotOffered {
                request: Request::SetProtocolFeatures,
                bits: unoffered,
            });
        }
        self.protocol_features = bits;
        Ok(())
    }

    fn status(&self) -> u8 {
        let needs_reset = self.device.broken().is_some() || self.rings.iter().any(Ring::is_refused);
        if needs_reset { self.status | DEVICE_NEEDS_RESET } else { self.status }
    }

    fn set_status(&mut self, value: u64) -> Result<(), ProtocolError> {
        match u8::try_from(value) {
            Ok(0) => self.reset(),
            // The front end writes back the status that it read; DEVICE_NEEDS_RESET is set by this
            // server only.
            Ok(status) => self.status = status & !DEVICE_NEEDS_RESET,
            Err(_) => return Err(ProtocolError::BadValue { request: Request::SetStatus, value }),
        }
        Ok(())
    }

    /// Carries out a driver's reset. The guest's memory stays: it belongs to the connection, and
    /// QEMU sends only later changes of the memory after a reset.
    fn reset(&mut self) {
        self.rings.iter_mut().for_each(Ring::reset);
        self.features = None;
        self.status = 0;
        self.log.clear();
        self.device.reset();
    }

    // The configuration space.

    /// Reads as many bytes as the front end asked for, with zeros after the end of the space: a VMM
    /// may know a newer, larger layout than this device. An empty reply if the offset is outside of
    /// the space.
    fn read_config(&mut self, mut config: ConfigSpace) -> Body {
        // The generation is taken before the read: a change in between causes one more
        // notification.
        self.known_config = Some(self.device.config_generation());
        let offset_bytes = config_offset(config.offset_bytes);
        config.data.fill(0);
        for len in (1..=config.data.len()).rev() {
            let Some(data) = config.data.get_mut(..len) else { break };
            match self.device.read_config(offset_bytes, data) {
                Ok(()) => return Body::Config(config),
                // A failed attempt may have written a part.
                Err(_) => data.fill(0),
            }
        }
        tracing::warn!(
            offset_bytes,
            len_bytes = config.data.len(),
            "GET_CONFIG outside the configuration space"
        );
        Body::Empty
    }

    fn write_config(&self, config: &ConfigSpace) -> Result<(), ProtocolError> {
        if config.flags > 1 {
            let value = config.flags.into();
            return Err(ProtocolError::BadValue { request: Request::SetConfig, value });
        }
        Ok(self.device.write_config(config_offset(config.offset_bytes), &config.data)?)
    }

    fn set_mtu(&self, mtu: u64) -> Result<(), ProtocolError> {
        let request = Request::NetSetMtu;
        let is_set = self.device.set_mtu(mtu);
        is_set.then_some(()).ok_or(ProtocolError::BadValue { request, value: mtu })
    }

    fn set_backend_channel(&mut self, fds: Vec<OwnedFd>) -> Result<(), ProtocolError> {
        // `check_fds` has found exactly one.
        let channel = fds.into_iter().next().and_then(BackendChannel::new);
        self.backend_channel = Some(channel.ok_or(ProtocolError::NoBackendChannel)?);
        Ok(())
    }

    // Memory.

    fn set_memory_table(
        &mut self,
        regions: &[MemoryRegion],
        fds: Vec<OwnedFd>,
    ) -> Result<(), ProtocolError> {
        let kept = regions
            .iter()
            .zip(&fds)
            .map(|(region, file)| keep(region, file))
            .collect::<Result<Vec<_>, _>>()?;
        let specs =
            regions.iter().zip(fds).map(|(region, file)| region_spec(region, file)).collect();
        let memory = GuestMemory::map(specs).map_err(memory_error(Request::SetMemTable))?;
        check_log(Request::SetMemTable, self.log.base(), &memory)?;
        self.regions = kept;
        self.replace_memory(memory)
    }

    fn add_region(
        &mut self,
        region: &MemoryRegion,
        fds: Vec<OwnedFd>,
    ) -> Result<(), ProtocolError> {
        // `check_fds` has found exactly one.
        for file in fds {
            let kept = keep(region, &file)?;
            let memory = self
                .memory
                .with_region(region_spec(region, file))
                .map_err(memory_error(Request::AddMemReg))?;
            check_log(Request::AddMemReg, self.log.base(), &memory)?;
            self.regions.push(kept);
            self.replace_memory(memory)?;
        }
        Ok(())
    }

    /// QEMU changes a region's size by removing and adding it, while rings run, and exits if the
    /// removal fails: so a ring that loses its memory here stays stopped until the memory is added
    /// again.
    fn remove_region(&mut self, region: &MemoryRegion) -> Result<(), ProtocolError> {
        let (guest_address, user_address) =
            (GuestAddress(region.guest_address), UserAddress(region.user_address));
        let memory = self
            .memory
            .without_region(guest_address, user_address, region.len_bytes)
            .map_err(memory_error(Request::RemMemReg))?;
        self.regions.retain(|(kept, _)| kept.guest_address != region.guest_address);
        match self.replace_memory(memory) {
            Err(ProtocolError::Start(error @ StartError::Memory { .. })) => {
                tracing::warn!(
                    %error,
                    "a ring lost its memory, and stays stopped until the memory is added again"
                );
                Ok(())
            }
            done => done,
        }
    }

    /// Stops the running rings, releases the old memory, and starts the rings from the state that
    /// the device returned. Errors of the new memory itself were found before, with the rings
    /// undisturbed.
    fn replace_memory(&mut self, memory: GuestMemory) -> Result<(), ProtocolError> {
        let ran: Vec<bool> = self.rings.iter_mut().map(Ring::stop).collect();
        self.memory = memory;
        let Some(features) = self.features else { return Ok(()) };
        let mut result = Ok(());
        for (ring, ran) in self.rings.iter_mut().zip(ran) {
            if let Err(error) = ring.start(&self.memory, features, &self.log) {
                // A ring that was stopped before may stay stopped.
                if ran && result.is_ok() {
                    result = Err(error.into());
                } else {
                    tracing::warn!(%error, "a ring stays stopped");
                }
            }
        }
        result
    }

    // Rings.

    fn ring(&mut self, index: u64) -> Result<&mut Ring, ProtocolError> {
        let queue_count = self.rings.len();
        usize::try_from(index)
            .ok()
            .and_then(|index| self.rings.get_mut(index))
            .ok_or(ProtocolError::NoSuchRing { index, queue_count })
    }

    /// Starts a ring if it has all its settings.
    fn start(&mut self, index: u64) -> Result<(), ProtocolError> {
        let ring = usize::try_from(index).ok().and_then(|index| self.rings.get_mut(index));
        if let (Some(ring), Some(features)) = (ring, self.features) {
            ring.start(&self.memory, features, &self.log)?;
        }
        Ok(())
    }

    /// Starts every ring that has all its settings. A ring that fails does not prevent the start of
    /// others.
    fn start_all(&mut self) -> Result<(), ProtocolError> {
        (0..self.rings.len()).map(|index| self.start(index as u64)).fold(Ok(()), Result::and)
    }

    fn set_size(&mut self, state: VringState) -> Result<(), ProtocolError> {
        let request = Request::SetVringNum;
        let size = u16::try_from(state.num).ok().filter(|size| (1..=MAX_QUEUE_SIZE).contains(size));
        let size = size.ok_or(ProtocolError::BadValue { request, value: state.num.into() })?;
        if !self.ring(state.index.into())?.set_size(size) {
            return Err(ProtocolError::RingRuns { request, index: state.index });
        }
        self.start(state.index.into())
    }

    fn set_areas(&mut self, address: VringAddress) -> Result<(), ProtocolError> {
        let request = Request::SetVringAddr;
        // A ring knows from the memory table which pages it has to log: `address.log`, which some
        // front ends leave zero, is not needed.
        if address.flags & !RING_LOG != 0 {
            return Err(ProtocolError::BadValue { request, value: address.flags.into() });
        }
        if !self.ring(address.index.into())?.set_areas(address.into()) {
            return Err(ProtocolError::RingRuns { request, index: address.index });
        }
        self.start(address.index.into())
    }

    fn set_base(&mut self, state: VringState) -> Result<(), ProtocolError> {
        if !self.ring(state.index.into())?.set_base(state.num) {
            return Err(ProtocolError::RingRuns {
                request: Request::SetVringBase,
                index: state.index,
            });
        }
        self.check_base(state.index.into())?;
        self.start(state.index.into())
    }

    /// Refuses a base that no ring of this format has. While the format is unknown, every base may
    /// be valid.
    fn check_base(&mut self, index: u64) -> Result<(), ProtocolError> {
        let Some(features) = self.features else { return Ok(()) };
        let ring = self.ring(index)?;
        match ring.bad_base(features) {
            None => Ok(()),
            Some(base) => {
                ring.forget_position();
                Err(ProtocolError::BadValue { request: Request::SetVringBase, value: base.into() })
            }
        }
    }

    fn enable(&mut self, state: VringState) -> Result<(), ProtocolError> {
        let ring = self.ring(state.index.into())?;
        match state.num {
            0 => {
                ring.set_enabled(false);
                Ok(())
            }
            1 => {
                ring.set_enabled(true);
                self.start(state.index.into())
            }
            num => {
                Err(ProtocolError::BadValue { request: Request::SetVringEnable, value: num.into() })
            }
        }
    }

    fn set_kick(&mut self, value: u64, fds: Vec<OwnedFd>) -> Result<(), ProtocolError> {
        let ring = self.ring(vring_index(value))?;
        ring.stop();
        ring.set_kick(fds.into_iter().next());
        self.start(vring_index(value))
    }

    fn set_call(&mut self, value: u64, fds: Vec<OwnedFd>) -> Result<(), ProtocolError> {
        self.ring(vring_index(value))?
            .set_call(fds.into_iter().next())
            .map_err(ProtocolError::Descriptor)
    }

    fn set_err(&mut self, value: u64, fds: Vec<OwnedFd>) -> Result<(), ProtocolError> {
        let ring = self.ring(vring_index(value))?;
        ring.stop();
        ring.set_err(fds.into_iter().next());
        self.start(vring_index(value))
    }

    /// Serves GET_VRING_BASE: the ring needs another SET_VRING_KICK to run again.
    fn stop_ring(&mut self, state: VringState) -> Result<Body, ProtocolError> {
        let features = self.features.unwrap_or(0);
        let ring = self.ring(state.index.into())?;
        ring.disarm();
        Ok(Body::VringState(VringState { index: state.index, num: ring.base(features) }))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Bits 0 to 7 of the value of SET_VRING_KICK, CALL and ERR.
const fn vring_index(value: u64) -> u64 {
    value & (NO_FD - 1)
}

/// The start of an access to the configuration space. Front ends built on rust-vmm's `vhost` count
/// from the start of virtio-mmio's register map. No device's own space is so large.
const fn config_offset(offset_bytes: u32) -> u32 {
    match offset_bytes.checked_sub(MMIO_CONFIG_OFFSET) {
        Some(offset_bytes) => offset_bytes,
        None => offset_bytes,
    }
}

/// Returns the region and a duplicate of its file's descriptor.
fn keep(
    region: &MemoryRegion,
    file: &OwnedFd,
) -> Result<(MemoryRegion, MemoryFile), ProtocolError> {
    let file = file.try_clone().map_err(ProtocolError::Descriptor)?;
    Ok((*region, MemoryFile::new(file)))
}

fn region_spec(region: &MemoryRegion, file: OwnedFd) -> RegionSpec {
    RegionSpec {
        guest_address: GuestAddress(region.guest_address),
        user_address: UserAddress(region.user_address),
        len_bytes: region.len_bytes,
        file,
        file_offset_bytes: region.file_offset_bytes,
    }
}

fn memory_error(request: Request) -> impl Fn(MemoryError) -> ProtocolError {
    move |error| ProtocolError::Memory { request, error }
}

#[cfg(test)]
mod tests;
