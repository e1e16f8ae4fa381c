//! vhost-user, the protocol that hands a guest's virtqueues to another process: QEMU's
//! docs/interop/vhost-user.rst, whose sections are cited here by their titles.
//!
//! The protocol uses the machine's own byte order ("Message Specification"). The layouts are
//! little-endian, so this module is only there on little-endian machines.

use serde::{Deserialize, Serialize};
use sidecore_units::{codes, layout};

/// Most file descriptors with one message: the regions of a SET_MEM_TABLE ("Communication").
pub const MAX_FDS: usize = 8;
/// Largest access to the configuration space in bytes ("Virtio device config space").
pub const MAX_CONFIG_BYTES: usize = 256;

/// In the payload of SET_VRING_KICK, SET_VRING_CALL and SET_VRING_ERR: no descriptor comes with the
/// message. The bits below it are the ring's index.
pub const NO_FD: u64 = 1 << 8;

/// Header flags: the bits of the version ("Header").
pub const FLAGS_VERSION_MASK: u32 = 0x3;
/// Header flags: the one version that there is.
pub const FLAGS_VERSION: u32 = 0x1;
/// Header flags: the message answers a request.
pub const FLAGS_REPLY: u32 = 1 << 2;
/// Header flags: the sender waits for an acknowledgement (REPLY_ACK).
pub const FLAGS_NEED_REPLY: u32 = 1 << 3;

/// VHOST_USER_F_PROTOCOL_FEATURES, vhost-user's bit among the virtio features: protocol features
/// exist, and once the bit is accepted rings start disabled.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;

/// VHOST_F_LOG_ALL, vhost-user's bit among the virtio features: the back end logs its writes to
/// guest memory ("Migration").
pub const LOG_ALL: u64 = 1 << 26;

/// Flag of [`VringAddress`], VHOST_VRING_F_LOG: writes to the used ring are logged.
pub const RING_LOG: u32 = 1 << 0;

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, a back end's request to its front end: the configuration
/// space has changed ("Back-end message types").
pub const BACKEND_CONFIG_CHANGE: u32 = 2;

/// Protocol feature bits ("Protocol features").
pub mod protocol {
    /// VHOST_USER_PROTOCOL_F_MQ: the front end may ask how many queues there are.
    pub const MQ: u64 = 1 << 0;
    /// VHOST_USER_PROTOCOL_F_LOG_SHMFD: the log of written pages is in a file.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// VHOST_USER_PROTOCOL_F_RARP: the back end announces a guest on its network.
    pub const RARP: u64 = 1 << 2;
    /// VHOST_USER_PROTOCOL_F_REPLY_ACK: any request may ask for an acknowledgement.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// VHOST_USER_PROTOCOL_F_MTU: the front end sets the MTU of a network device.
    pub const NET_MTU: u64 = 1 << 4;
    /// VHOST_USER_PROTOCOL_F_BACKEND_REQ: the back end may send requests of its own, on a socket
    /// that the front end hands over.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// VHOST_USER_PROTOCOL_F_CONFIG: the back end serves the configuration space.
    pub const CONFIG: u64 = 1 << 9;
    /// VHOST_USER_PROTOCOL_F_RESET_DEVICE: the back end can be reset.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS: memory regions come and go one by one.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// VHOST_USER_PROTOCOL_F_STATUS: the front end passes the device status on.
    pub const STATUS: u64 = 1 << 16;
}

codes! {
    /// The requests of a front end to its back end ("Front-end message types").
    pub enum Request: u32, "VHOST_USER_", "request" {
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
}

impl Request {
    /// Whether a body of its own answers the request, so that an acknowledgement in its place would
    /// be misread ("Communication").
    #[must_use]
    pub const fn has_reply(self) -> bool {
        matches!(
            self,
            Self::GetFeatures
                | Self::GetProtocolFeatures
                | Self::SetLogBase
                | Self::GetVringBase
                | Self::GetQueueNum
                | Self::GetConfig
                | Self::GetMaxMemSlots
                | Self::GetStatus
        )
    }
}

layout! {
    /// The header of a message ("Header").
    pub struct MessageHeader: 12 {
        /// See [`Request`].
        pub request: u32 = 0,
        /// [`FLAGS_VERSION`] and the other flags.
        pub flags: u32 = 4,
        /// Size of the payload that follows.
        pub payload_bytes: u32 = 8,
    }
}

layout! {
    /// "A vring state description": a ring's index and a number.
    pub struct VringState: 8 {
        /// The ring.
        pub index: u32 = 0,
        /// Size, base or enabling, as the request has it.
        pub num: u32 = 4,
    }
}

layout! {
    /// "A vring address description", in the front end's own addresses.
    pub struct VringAddress: 40 {
        /// The ring.
        pub index: u32 = 0,
        /// 0 or [`RING_LOG`].
        pub flags: u32 = 4,
        /// Descriptor table, or the packed ring.
        pub descriptor: u64 = 8,
        /// Used ring, or the device event suppression structure.
        pub used: u64 = 16,
        /// Available ring, or the driver event suppression structure.
        pub available: u64 = 24,
        /// Where to log writes, a guest address.
        pub log: u64 = 32,
    }
}

layout! {
    /// "A log description": the bytes of the file beside the message that are the log of written
    /// pages.
    #[derive(Serialize, Deserialize)]
    pub struct Log: 16 {
        /// Size of the log.
        pub len_bytes: u64 = 0,
        /// Where in the file it starts.
        pub file_offset_bytes: u64 = 8,
    }
}

layout! {
    /// The start of a "memory regions description"; as many [`MemoryRegion`]s follow.
    pub struct MemoryTableHeader: 8 {
        /// How many regions follow.
        pub regions: u32 = 0,
    }
}

layout! {
    /// A region of guest memory; its file comes beside the message.
    #[derive(Serialize, Deserialize)]
    pub struct MemoryRegion: 32 {
        /// Where the guest sees it.
        pub guest_address: u64 = 0,
        /// Its size in bytes.
        pub len_bytes: u64 = 8,
        /// Where the front end has it mapped.
        pub user_address: u64 = 16,
        /// Where in the file it starts, in bytes.
        pub file_offset_bytes: u64 = 24,
    }
}

layout! {
    /// "A single memory region description": padding, and the region.
    pub struct SingleMemoryRegion: 40 {
        /// The region.
        pub region: MemoryRegion = 8,
    }
}

layout! {
    /// The start of a "virtio device config space"; the bytes follow.
    pub struct ConfigHeader: 12 {
        /// First byte.
        pub offset_bytes: u32 = 0,
        /// How many bytes.
        pub size_bytes: u32 = 4,
        /// 0 for a driver's write, 1 in a live migration.
        pub flags: u32 = 8,
    }
}
