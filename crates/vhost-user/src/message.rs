//! The wire format: a header of twelve bytes, a payload with the request's structure, and file
//! descriptors beside the message. All numbers are in the machine's byte order (specification,
//! "Message Specification").

use std::os::fd::OwnedFd;

use sidecore_spec_virtio::vhost_user::{
    ConfigHeader, FLAGS_NEED_REPLY, FLAGS_REPLY, FLAGS_VERSION, FLAGS_VERSION_MASK,
    MemoryTableHeader, MessageHeader, SingleMemoryRegion,
};
pub use sidecore_spec_virtio::vhost_user::{
    Log, MAX_CONFIG_BYTES, MAX_FDS, MemoryRegion, NO_FD, Request, VringAddress, VringState,
};

/// The size of a message's header.
pub const HEADER_BYTES: usize = MessageHeader::BYTES;
/// The largest payload that is read. The largest payload of a known request has 268 bytes.
pub const MAX_PAYLOAD_BYTES: usize = 4096;
/// The reason why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The version of the protocol is not 1.
    #[error("{request} of protocol version {version}, only version 1 is supported")]
    Version {
        /// The request in the message's header.
        request: Request,
        /// The version in the header.
        version: u32,
    },
    /// The payload has more than [`MAX_PAYLOAD_BYTES`].
    #[error("{request} with a payload of {size_bytes} bytes")]
    Oversized {
        /// The request in the message's header.
        request: Request,
        /// The payload's size in the header.
        size_bytes: u32,
    },
    /// The payload does not have the request's structure.
    #[error("{request} with a malformed payload of {size_bytes} bytes")]
    Malformed {
        /// The request in the message's header.
        request: Request,
        /// The size of the payload.
        size_bytes: usize,
    },
    /// The message has more or fewer file descriptors than its request takes.
    #[error("{request} with {count} file descriptors")]
    FdCount {
        /// The request in the message's header.
        request: Request,
        /// The number of descriptors.
        count: usize,
    },
}

/// The header's flags, without the version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// The message is the reply to a request.
    pub reply: bool,
    /// The sender waits for an acknowledgement (REPLY_ACK).
    pub need_reply: bool,
}

/// A message's first twelve bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The request, also in its reply.
    pub request: Request,
    /// The message's type and options.
    pub flags: Flags,
    /// The size of the payload that follows, at most [`MAX_PAYLOAD_BYTES`].
    pub payload_bytes: usize,
}

impl Header {
    /// Reads a header. Flags without a meaning are ignored.
    ///
    /// # Errors
    /// [`MessageError::Version`], [`MessageError::Oversized`].
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, MessageError> {
        let MessageHeader { request, flags, payload_bytes: size_bytes } =
            MessageHeader::decode(bytes);
        let request = Request::from_code(request);
        let version = flags & FLAGS_VERSION_MASK;
        if version != FLAGS_VERSION {
            return Err(MessageError::Version { request, version });
        }
        match usize::try_from(size_bytes) {
            Ok(payload_bytes) if payload_bytes <= MAX_PAYLOAD_BYTES => Ok(Self {
                request,
                flags: Flags {
                    reply: flags & FLAGS_REPLY != 0,
                    need_reply: flags & FLAGS_NEED_REPLY != 0,
                },
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
    /// The first byte, from the start of the space.
    pub offset_bytes: u32,
    /// 0 for a driver's write, 1 in a live migration.
    pub flags: u32,
    /// The bytes to write, or the bytes read.
    pub data: Vec<u8>,
}

/// A message's payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// A payload of no bytes.
    Empty,
    /// A number, for instance feature bits.
    U64(u64),
    /// A ring and a number.
    VringState(VringState),
    /// The addresses of one ring.
    VringAddress(VringAddress),
    /// All regions of the guest's memory; one descriptor for each.
    MemoryTable(Vec<MemoryRegion>),
    /// One region of the guest's memory.
    MemoryRegion(MemoryRegion),
    /// The log of written pages; one descriptor.
    Log(Log),
    /// A part of the configuration space.
    Config(ConfigSpace),
    /// The uninterpreted payload of a request that is not served.
    Other(Vec<u8>),
}

impl Body {
    fn parse(request: Request, flags: Flags, payload: &[u8]) -> Result<Self, MessageError> {
        let mut reader = Reader(payload);
        let body = if flags.reply { reader.reply(request) } else { reader.request(request) };
        body.filter(|_| reader.0.is_empty())
            .ok_or(MessageError::Malformed { request, size_bytes: payload.len() })
    }

    fn write(&self, to: &mut Vec<u8>) {
        match self {
            Self::Empty => {}
            Self::U64(value) => to.extend_from_slice(&value.to_ne_bytes()),
            Self::VringState(state) => to.extend_from_slice(&state.encode()),
            Self::VringAddress(address) => to.extend_from_slice(&address.encode()),
            Self::MemoryTable(regions) => {
                to.extend_from_slice(
                    &MemoryTableHeader { regions: count_u32(regions.len()) }.encode(),
                );
                regions.iter().for_each(|region| to.extend_from_slice(&region.encode()));
            }
            Self::MemoryRegion(region) => {
                to.extend_from_slice(&SingleMemoryRegion { region: *region }.encode())
            }
            Self::Log(log) => to.extend_from_slice(&log.encode()),
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
    /// The request, also in its reply.
    pub request: Request,
    /// The message's type and options.
    pub flags: Flags,
    /// The structure and the data behind the header.
    pub body: Body,
    /// The file descriptors beside the message.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// Makes a request that wants no acknowledgement.
    #[must_use]
    pub const fn request(request: Request, body: Body, fds: Vec<OwnedFd>) -> Self {
        Self { request, flags: Flags { reply: false, need_reply: false }, body, fds }
    }

    /// Makes the request one that wants an acknowledgement.
    #[must_use]
    pub fn needing_reply(mut self) -> Self {
        self.flags.need_reply = true;
        self
    }

    /// Makes a reply. QEMU accepts no flag in a reply except the reply flag.
    #[must_use]
    pub const fn reply(request: Request, body: Body) -> Self {
        Self { request, flags: Flags { reply: true, need_reply: false }, body, fds: Vec::new() }
    }

    /// Makes a message from a received header, payload and descriptors. Closes the descriptors on
    /// error.
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

    /// Checks that the message has the number of descriptors that its request takes.
    ///
    /// # Errors
    /// [`MessageError::FdCount`].
    pub fn check_fds(&self) -> Result<(), MessageError> {
        let count = self.fds.len();
        let fits = match (self.request, &self.body) {
            _ if self.flags.reply => count == 0,
            (
                Request::SetVringKick | Request::SetVringCall | Request::SetVringErr,
                Body::U64(value),
            ) => count == usize::from(value & NO_FD == 0),
            (Request::SetMemTable, Body::MemoryTable(regions)) => count == regions.len(),
            (
                Request::AddMemReg
                | Request::SetBackendReqFd
                | Request::SetLogBase
                | Request::SetLogFd,
                _,
            ) => count == 1,
            // "No file descriptors SHOULD be passed [...] the back-end MAY accept messages with
            // one": old versions of QEMU send it.
            (Request::RemMemReg, _) => count <= 1,
            // The number is unknown for a request that is going to be refused.
            (_, Body::Other(_)) => true,
            _ => count == 0,
        };
        if fits { Ok(()) } else { Err(MessageError::FdCount { request: self.request, count }) }
    }

    /// Returns the header and the payload.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut payload = Vec::new();
        self.body.write(&mut payload);
        let mut bytes = Vec::with_capacity(HEADER_BYTES.saturating_add(payload.len()));
        Header { request: self.request, flags: self.flags, payload_bytes: payload.len() }
            .write(&mut bytes);
        bytes.extend_from_slice(&payload);
        bytes
    }
}

/// Takes structures from the front of a payload; `None` at a premature end.
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
            | R::SetLogFd
            | R::GetStatus => Some(Body::Empty),
            R::SetFeatures
            | R::SetProtocolFeatures
            | R::SetVringKick
            | R::SetVringCall
            | R::SetVringErr
            | R::SetStatus
            | R::SendRarp
            | R::NetSetMtu => self.u64().map(Body::U64),
            R::SetVringNum | R::SetVringBase | R::GetVringBase | R::SetVringEnable => {
                self.vring_state()
            }
            R::SetVringAddr => Some(Body::VringAddress(VringAddress::decode(self.take()?))),
            R::SetMemTable => self.memory_table(),
            R::AddMemReg | R::RemMemReg => {
                Some(Body::MemoryRegion(SingleMemoryRegion::decode(self.take()?).region))
            }
            R::SetLogBase => Some(Body::Log(Log::decode(self.take()?))),
            R::GetConfig | R::SetConfig => self.config(),
            _ => Some(self.rest()),
        }
    }

    fn reply(&mut self, request: Request) -> Option<Body> {
        match request {
            Request::GetVringBase => self.vring_state(),
            // An empty payload says that the access failed.
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

    /// Reads an access to the configuration space. The payload may be longer than its size says:
    /// SPDK always sends [`MAX_CONFIG_BYTES`] of data.
    fn config(&mut self) -> Option<Body> {
        let ConfigHeader { offset_bytes, size_bytes, flags } = ConfigHeader::decode(self.take()?);
        let size_bytes =
            usize::try_from(size_bytes).ok().filter(|size| *size <= MAX_CONFIG_BYTES)?;
        let room = std::mem::take(&mut self.0);
        let data = room.get(..size_bytes)?.to_vec();
        Some(Body::Config(ConfigSpace { offset_bytes, flags, data }))
    }
}

/// A count above `u32::MAX` becomes a value that every peer refuses.
fn count_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
