//! The wire format: a header of twelve bytes, a payload whose shape the request
//! decides, and file descriptors beside it. Everything is in the machine's own
//! byte order (specification, "Message Specification").

use std::os::fd::OwnedFd;

use sidecore_spec_virtio::vhost_user::{
    ConfigHeader, FLAGS_NEED_REPLY, FLAGS_REPLY, FLAGS_VERSION, FLAGS_VERSION_MASK, MemoryTableHeader, MessageHeader,
    SingleMemoryRegion,
};
pub use sidecore_spec_virtio::vhost_user::{
    MAX_CONFIG_BYTES, MAX_FDS, MemoryRegion, NO_FD, Request, VringAddress, VringState,
};

/// Bytes in a message's header.
pub const HEADER_BYTES: usize = MessageHeader::BYTES;
/// Largest payload that is read at all. The largest that we understand has 268.
pub const MAX_PAYLOAD_BYTES: usize = 4096;
/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// A version of the protocol other than 1.
    #[error("{request} of protocol version {version}")]
    Version {
        /// What was asked.
        request: Request,
        /// The version in its header.
        version: u32,
    },
    /// A payload of more than [`MAX_PAYLOAD_BYTES`].
    #[error("{request} with a payload of {size_bytes} bytes")]
    Oversized {
        /// What was asked.
        request: Request,
        /// The size in its header.
        size_bytes: u32,
    },
    /// A payload that is not of the request's shape.
    #[error("{request} with a malformed payload of {size_bytes} bytes")]
    Malformed {
        /// What was asked.
        request: Request,
        /// The payload's size.
        size_bytes: usize,
    },
    /// More or fewer file descriptors than belong to the message.
    #[error("{request} with {count} file descriptors")]
    FdCount {
        /// What was asked.
        request: Request,
        /// Descriptors there were.
        count: usize,
    },
}

/// The header's flags, beside the version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// The message answers a request.
    pub reply: bool,
    /// The sender waits for an acknowledgement (REPLY_ACK).
    pub need_reply: bool,
}

/// A message's first twelve bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What is asked, or answered.
    pub request: Request,
    /// Its flags.
    pub flags: Flags,
    /// Size of the payload that follows, at most [`MAX_PAYLOAD_BYTES`].
    pub payload_bytes: usize,
}

impl Header {
    /// Reads a header. Flags without a meaning are ignored.
    ///
    /// # Errors
    /// [`MessageError::Version`], [`MessageError::Oversized`].
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, MessageError> {
        let MessageHeader { request, flags, payload_bytes: size_bytes } = MessageHeader::decode(bytes);
        let request = Request::from_code(request);
        let version = flags & FLAGS_VERSION_MASK;
        if version != FLAGS_VERSION {
            return Err(MessageError::Version { request, version });
        }
        match usize::try_from(size_bytes) {
            Ok(payload_bytes) if payload_bytes <= MAX_PAYLOAD_BYTES => Ok(Self {
                request,
                flags: Flags { reply: flags & FLAGS_REPLY != 0, need_reply: flags & FLAGS_NEED_REPLY != 0 },
                payload_bytes,
            }),
            _ => Err(MessageError::Oversized { request, size_bytes }),
        }
    }

    fn write(self, to: &mut Vec<u8>) {
        let mut flags = FLAGS_VERSION;
        if self.flags.reply {
            flags |= FLAGS_REPLY;
        }
        if self.flags.need_reply {
            flags |= FLAGS_NEED_REPLY;
        }
        let payload_bytes = count_u32(self.payload_bytes);
        let header = MessageHeader { request: self.request.code(), flags, payload_bytes };
        to.extend_from_slice(&header.encode());
    }
}

/// An access to the device configuration space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigSpace {
    /// First byte.
    pub offset_bytes: u32,
    /// 0 for a driver's write, 1 in a live migration.
    pub flags: u32,
    /// The bytes, as many as are read or written.
    pub data: Vec<u8>,
}

/// A message's payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// None.
    Empty,
    /// A number.
    U64(u64),
    /// A ring and a number.
    VringState(VringState),
    /// A ring's addresses.
    VringAddress(VringAddress),
    /// All of memory; one descriptor for each region.
    MemoryTable(Vec<MemoryRegion>),
    /// One region.
    MemoryRegion(MemoryRegion),
    /// Configuration space.
    Config(ConfigSpace),
    /// The uninterpreted payload of a request that we do not serve.
    Other(Vec<u8>),
}

impl Body {
    fn parse(request: Request, flags: Flags, payload: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader(payload);
        let body = if flags.reply { reader.reply(request) } else { reader.request(request) };
        body.filter(|_| reader.0.is_empty()).ok_or(MessageError::Malformed { request, size_bytes: payload.len() })
    }

    fn write(&self, to: &mut Vec<u8>) {
        match self {
            Self::Empty => {}
            Self::U64(value) => to.extend_from_slice(&value.to_ne_bytes()),
            Self::VringState(state) => to.extend_from_slice(&state.encode()),
            Self::VringAddress(address) => to.extend_from_slice(&address.encode()),
            Self::MemoryTable(regions) => {
                to.extend_from_slice(&MemoryTableHeader { regions: count_u32(regions.len()) }.encode());
                regions.iter().for_each(|region| to.extend_from_slice(&region.encode()));
            }
            Self::MemoryRegion(region) => to.extend_from_slice(&SingleMemoryRegion { region: *region }.encode()),
            Self::Config(config) => {
                let size_bytes = count_u32(config.data.len());
                let ConfigSpace { offset_bytes, flags, .. } = *config;
                to.extend_from_slice(&ConfigHeader { offset_bytes, size_bytes, flags }.encode());
                to.extend_from_slice(&config.data);
            }
            Self::Other(payload) => to.extend_from_slice(payload),
        }
    }
}

/// A request or a reply.
#[derive(Debug)]
pub struct Message {
    /// What is asked, or answered.
    pub request: Request,
    /// The header's flags.
    pub flags: Flags,
    /// The payload.
    pub body: Body,
    /// The file descriptors beside it.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// A request that asks for no acknowledgement.
    #[must_use]
    pub const fn request(request: Request, body: Body, fds: Vec<OwnedFd>) -> Self {
        Self { request, flags: Flags { reply: false, need_reply: false }, body, fds }
    }

    /// The same, asking for an acknowledgement.
    #[must_use]
    pub fn needing_reply(mut self) -> Self {
        self.flags.need_reply = true;
        self
    }

    /// A reply. QEMU wants no flag in it besides the one.
    #[must_use]
    pub const fn reply(request: Request, body: Body) -> Self {
        Self { request, flags: Flags { reply: true, need_reply: false }, body, fds: Vec::new() }
    }

    /// Puts a message together from what was read. The descriptors are closed
    /// if it fails.
    ///
    /// # Errors
    /// [`MessageError::Malformed`], [`MessageError::FdCount`].
    pub fn parse(header: Header, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError> {
        let Header { request, flags, .. } = header;
        let body = Body::parse(request, flags, payload)?;
        let message = Self { request, flags, body, fds };
        message.check_fds()?;
        Ok(message)
    }

    /// Whether the descriptors are as many as belong to the message.
    ///
    /// # Errors
    /// [`MessageError::FdCount`].
    pub fn check_fds(&self) -> Result<(), MessageError> {
        let count = self.fds.len();
        let fits = match (self.request, &self.body) {
            _ if self.flags.reply => count == 0,
            (Request::SetVringKick | Request::SetVringCall | Request::SetVringErr, Body::U64(value)) => {
                count == usize::from(value & NO_FD == 0)
            }
            (Request::SetMemTable, Body::MemoryTable(regions)) => count == regions.len(),
            (Request::AddMemReg | Request::SetBackendReqFd, _) => count == 1,
            // "No file descriptors SHOULD be passed [...] the back-end MAY
            // accept messages with one": older QEMUs send it.
            (Request::RemMemReg, _) => count <= 1,
            // Of a request that is going to be refused nothing is known.
            (_, Body::Other(_)) => true,
            _ => count == 0,
        };
        if fits { Ok(()) } else { Err(MessageError::FdCount { request: self.request, count }) }
    }

    /// The header and the payload.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut payload = Vec::new();
        self.body.write(&mut payload);
        let mut bytes = Vec::with_capacity(HEADER_BYTES.saturating_add(payload.len()));
        Header { request: self.request, flags: self.flags, payload_bytes: payload.len() }.write(&mut bytes);
        bytes.extend_from_slice(&payload);
        bytes
    }
}

/// Takes a payload apart from its front; `None` when it ends too soon.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn request(&mut self, request: Request) -> Option<Body> {
        use Request as R;
        match request {
            R::GetFeatures
            | R::SetOwner
            | R::ResetOwner
            | R::GetProtocolFeatures
            | R::GetQueueNum
            | R::ResetDevice
            | R::GetMaxMemSlots
            | R::SetBackendReqFd
            | R::GetStatus => Some(Body::Empty),
            R::SetFeatures
            | R::SetProtocolFeatures
            | R::SetVringKick
            | R::SetVringCall
            | R::SetVringErr
            | R::SetStatus => self.u64().map(Body::U64),
            R::SetVringNum | R::SetVringBase | R::GetVringBase | R::SetVringEnable => self.vring_state(),
            R::SetVringAddr => Some(Body::VringAddress(VringAddress::decode(self.take()?))),
            R::SetMemTable => self.memory_table(),
            R::AddMemReg | R::RemMemReg => Some(Body::MemoryRegion(SingleMemoryRegion::decode(self.take()?).region)),
            R::GetConfig | R::SetConfig => self.config(),
            _ => Some(self.rest()),
        }
    }

    fn reply(&mut self, request: Request) -> Option<Body> {
        match request {
            Request::GetVringBase => self.vring_state(),
            // No payload at all says that the access failed.
            Request::GetConfig if self.0.is_empty() => Some(Body::Empty),
            Request::GetConfig => self.config(),
            // A value, or an acknowledgement.
            _ if self.0.len() == size_of::<u64>() => self.u64().map(Body::U64),
            _ => Some(self.rest()),
        }
    }

    fn take<const BYTES: usize>(&mut self) -> Option<&[u8; BYTES]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().copied().map(u64::from_ne_bytes)
    }

    fn rest(&mut self) -> Body {
        Body::Other(std::mem::take(&mut self.0).to_vec())
    }

    fn vring_state(&mut self) -> Option<Body> {
        Some(Body::VringState(VringState::decode(self.take()?)))
    }

    fn memory_table(&mut self) -> Option<Body> {
        let count = MemoryTableHeader::decode(self.take()?).regions;
        let count = usize::try_from(count).ok().filter(|count| *count <= MAX_FDS)?;
        let regions = (0..count).map(|_| Some(MemoryRegion::decode(self.take()?)));
        regions.collect::<Option<Vec<_>>>().map(Body::MemoryTable)
    }

    /// The payload may be longer than the size in it: SPDK always sends room
    /// for [`MAX_CONFIG_BYTES`].
    fn config(&mut self) -> Option<Body> {
        let ConfigHeader { offset_bytes, size_bytes, flags } = ConfigHeader::decode(self.take()?);
        let size_bytes = usize::try_from(size_bytes).ok().filter(|size| *size <= MAX_CONFIG_BYTES)?;
        let room = std::mem::take(&mut self.0);
        let data = room.get(..size_bytes)?.to_vec();
        Some(Body::Config(ConfigSpace { offset_bytes, flags, data }))
    }
}

/// A count that does not fit is none that a peer accepts.
fn count_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
