//! The wire format: a header of twelve bytes, a payload whose shape the request
//! decides, and file descriptors beside it. Everything is in the machine's own
//! byte order (specification, "Message Specification").

use std::fmt;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

/// Bytes in a message's header.
pub const HEADER_BYTES: usize = 12;
/// Largest payload that is read at all. The largest that we understand has 268.
pub const MAX_PAYLOAD_BYTES: usize = 4096;
/// Most file descriptors with one message: the regions of a SET_MEM_TABLE.
pub const MAX_FDS: usize = 8;
/// Largest access to the configuration space, in bytes.
pub const MAX_CONFIG_BYTES: usize = 256;
/// In a SET_VRING_KICK, CALL or ERR: no descriptor comes with the message. The
/// low eight bits are the ring's index.
pub const NO_FD: u64 = 1 << 8;

const VERSION_MASK: u32 = 0x3;
const VERSION: u32 = 0x1;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

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

macro_rules! requests {
    ($($variant:ident = $code:literal $name:literal,)*) => {
        /// What a front end asks of a back end (specification, "Front-end
        /// message types").
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Request {
            $(#[doc = concat!("VHOST_USER_", $name)] $variant,)*
            /// A code that the specification has no name for.
            Unknown(u32),
        }

        impl Request {
            /// The request of this code.
            #[must_use]
            pub const fn from_code(code: u32) -> Self {
                match code {
                    $($code => Self::$variant,)*
                    other => Self::Unknown(other),
                }
            }

            /// Its code on the wire.
            #[must_use]
            pub const fn code(self) -> u32 {
                match self {
                    $(Self::$variant => $code,)*
                    Self::Unknown(code) => code,
                }
            }
        }

        impl fmt::Display for Request {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant => f.write_str($name),)*
                    Self::Unknown(code) => write!(f, "request {code}"),
                }
            }
        }
    };
}

requests! {
    GetFeatures = 1 "GET_FEATURES",
    SetFeatures = 2 "SET_FEATURES",
    SetOwner = 3 "SET_OWNER",
    ResetOwner = 4 "RESET_OWNER",
    SetMemTable = 5 "SET_MEM_TABLE",
    SetLogBase = 6 "SET_LOG_BASE",
    SetLogFd = 7 "SET_LOG_FD",
    SetVringNum = 8 "SET_VRING_NUM",
    SetVringAddr = 9 "SET_VRING_ADDR",
    SetVringBase = 10 "SET_VRING_BASE",
    GetVringBase = 11 "GET_VRING_BASE",
    SetVringKick = 12 "SET_VRING_KICK",
    SetVringCall = 13 "SET_VRING_CALL",
    SetVringErr = 14 "SET_VRING_ERR",
    GetProtocolFeatures = 15 "GET_PROTOCOL_FEATURES",
    SetProtocolFeatures = 16 "SET_PROTOCOL_FEATURES",
    GetQueueNum = 17 "GET_QUEUE_NUM",
    SetVringEnable = 18 "SET_VRING_ENABLE",
    SendRarp = 19 "SEND_RARP",
    NetSetMtu = 20 "NET_SET_MTU",
    SetBackendReqFd = 21 "SET_BACKEND_REQ_FD",
    IotlbMsg = 22 "IOTLB_MSG",
    SetVringEndian = 23 "SET_VRING_ENDIAN",
    GetConfig = 24 "GET_CONFIG",
    SetConfig = 25 "SET_CONFIG",
    CreateCryptoSession = 26 "CREATE_CRYPTO_SESSION",
    CloseCryptoSession = 27 "CLOSE_CRYPTO_SESSION",
    PostcopyAdvise = 28 "POSTCOPY_ADVISE",
    PostcopyListen = 29 "POSTCOPY_LISTEN",
    PostcopyEnd = 30 "POSTCOPY_END",
    GetInflightFd = 31 "GET_INFLIGHT_FD",
    SetInflightFd = 32 "SET_INFLIGHT_FD",
    GpuSetSocket = 33 "GPU_SET_SOCKET",
    ResetDevice = 34 "RESET_DEVICE",
    VringKick = 35 "VRING_KICK",
    GetMaxMemSlots = 36 "GET_MAX_MEM_SLOTS",
    AddMemReg = 37 "ADD_MEM_REG",
    RemMemReg = 38 "REM_MEM_REG",
    SetStatus = 39 "SET_STATUS",
    GetStatus = 40 "GET_STATUS",
    GetSharedObject = 41 "GET_SHARED_OBJECT",
    SetDeviceStateFd = 42 "SET_DEVICE_STATE_FD",
    CheckDeviceState = 43 "CHECK_DEVICE_STATE",
    GetShmemConfig = 44 "GET_SHMEM_CONFIG",
}

impl Request {
    /// Whether a body of its own answers it, so that an acknowledgement in its
    /// place would be misread.
    #[must_use]
    pub const fn has_reply(self) -> bool {
        matches!(
            self,
            Self::GetFeatures
                | Self::GetProtocolFeatures
                | Self::GetVringBase
                | Self::GetQueueNum
                | Self::GetConfig
                | Self::GetMaxMemSlots
                | Self::GetStatus
        )
    }
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
        let [r0, r1, r2, r3, f0, f1, f2, f3, s0, s1, s2, s3] = *bytes;
        let request = Request::from_code(u32::from_ne_bytes([r0, r1, r2, r3]));
        let flags = u32::from_ne_bytes([f0, f1, f2, f3]);
        let size_bytes = u32::from_ne_bytes([s0, s1, s2, s3]);
        if flags & VERSION_MASK != VERSION {
            return Err(MessageError::Version { request, version: flags & VERSION_MASK });
        }
        match usize::try_from(size_bytes) {
            Ok(payload_bytes) if payload_bytes <= MAX_PAYLOAD_BYTES => Ok(Self {
                request,
                flags: Flags { reply: flags & FLAG_REPLY != 0, need_reply: flags & FLAG_NEED_REPLY != 0 },
                payload_bytes,
            }),
            _ => Err(MessageError::Oversized { request, size_bytes }),
        }
    }

    fn write(self, to: &mut Vec<u8>) {
        let mut flags = VERSION;
        if self.flags.reply {
            flags |= FLAG_REPLY;
        }
        if self.flags.need_reply {
            flags |= FLAG_NEED_REPLY;
        }
        put_u32(to, self.request.code());
        put_u32(to, flags);
        put_u32(to, count_u32(self.payload_bytes));
    }
}

/// "A vring state description": a ring's index and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringState {
    /// The ring.
    pub index: u32,
    /// Size, base or enabling, as the request has it.
    pub num: u32,
}

/// "A vring address description", in the front end's own addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringAddress {
    /// The ring.
    pub index: u32,
    /// Bit 0 asks for logging of writes.
    pub flags: u32,
    /// Descriptor table, or the packed ring.
    pub descriptor: u64,
    /// Used ring, or the device event suppression structure.
    pub used: u64,
    /// Available ring, or the driver event suppression structure.
    pub available: u64,
    /// Where to log writes, a guest address.
    pub log: u64,
}

/// A region of guest memory; its file comes beside the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRegion {
    /// Where the guest sees it.
    pub guest_address: u64,
    /// Its size in bytes.
    pub len_bytes: u64,
    /// Where the front end has it mapped.
    pub user_address: u64,
    /// Where in the file it starts, in bytes.
    pub file_offset_bytes: u64,
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
            Self::U64(value) => put_u64(to, *value),
            Self::VringState(state) => {
                put_u32(to, state.index);
                put_u32(to, state.num);
            }
            Self::VringAddress(address) => {
                put_u32(to, address.index);
                put_u32(to, address.flags);
                put_u64(to, address.descriptor);
                put_u64(to, address.used);
                put_u64(to, address.available);
                put_u64(to, address.log);
            }
            Self::MemoryTable(regions) => {
                put_u32(to, count_u32(regions.len()));
                put_u32(to, 0);
                regions.iter().for_each(|region| put_region(to, region));
            }
            Self::MemoryRegion(region) => {
                put_u64(to, 0);
                put_region(to, region);
            }
            Self::Config(config) => {
                put_u32(to, config.offset_bytes);
                put_u32(to, count_u32(config.data.len()));
                put_u32(to, config.flags);
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
            R::SetVringAddr => self.vring_address(),
            R::SetMemTable => self.memory_table(),
            R::AddMemReg | R::RemMemReg => {
                let _padding = self.u64()?;
                self.region().map(Body::MemoryRegion)
            }
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

    fn u32(&mut self) -> Option<u32> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_ne_bytes(*bytes))
    }

    fn u64(&mut self) -> Option<u64> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*bytes))
    }

    fn rest(&mut self) -> Body {
        Body::Other(std::mem::take(&mut self.0).to_vec())
    }

    fn vring_state(&mut self) -> Option<Body> {
        Some(Body::VringState(VringState { index: self.u32()?, num: self.u32()? }))
    }

    fn vring_address(&mut self) -> Option<Body> {
        Some(Body::VringAddress(VringAddress {
            index: self.u32()?,
            flags: self.u32()?,
            descriptor: self.u64()?,
            used: self.u64()?,
            available: self.u64()?,
            log: self.u64()?,
        }))
    }

    fn region(&mut self) -> Option<MemoryRegion> {
        Some(MemoryRegion {
            guest_address: self.u64()?,
            len_bytes: self.u64()?,
            user_address: self.u64()?,
            file_offset_bytes: self.u64()?,
        })
    }

    fn memory_table(&mut self) -> Option<Body> {
        let count = self.u32()?;
        let _padding = self.u32()?;
        let count = usize::try_from(count).ok().filter(|count| *count <= MAX_FDS)?;
        (0..count).map(|_| self.region()).collect::<Option<Vec<_>>>().map(Body::MemoryTable)
    }

    /// The payload may be longer than the size in it: SPDK always sends room
    /// for [`MAX_CONFIG_BYTES`].
    fn config(&mut self) -> Option<Body> {
        let offset_bytes = self.u32()?;
        let size_bytes = usize::try_from(self.u32()?).ok().filter(|size| *size <= MAX_CONFIG_BYTES)?;
        let flags = self.u32()?;
        let room = std::mem::take(&mut self.0);
        let data = room.get(..size_bytes)?.to_vec();
        Some(Body::Config(ConfigSpace { offset_bytes, flags, data }))
    }
}

fn put_u32(to: &mut Vec<u8>, value: u32) {
    to.extend_from_slice(&value.to_ne_bytes());
}

fn put_u64(to: &mut Vec<u8>, value: u64) {
    to.extend_from_slice(&value.to_ne_bytes());
}

fn put_region(to: &mut Vec<u8>, region: &MemoryRegion) {
    put_u64(to, region.guest_address);
    put_u64(to, region.len_bytes);
    put_u64(to, region.user_address);
    put_u64(to, region.file_offset_bytes);
}

/// A count that does not fit is none that a peer accepts.
fn count_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
