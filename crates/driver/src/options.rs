//! The options of a client.

use std::time::Duration;

/// How the client learns of completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// It polls the ring and asks for no calls.
    Polled,
    /// It sleeps on the call eventfd.
    Interrupt,
}

/// The options of a client. Features that the device has not got are left out, see
/// [`BlkClient::features`](crate::BlkClient::features) for the granted ones.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Queues; the device must have as many.
    pub queues: u16,
    /// Requests that one queue holds at once.
    pub slots: u16,
    /// Entries of each ring, a power of two; zero for just as many as the slots need.
    pub queue_size: u16,
    /// Size of each slot's data buffer in bytes, a multiple of 512.
    pub slot_bytes: u32,
    /// Most pieces that one request's data is scattered over.
    pub max_pieces: u16,
    /// Packed rings.
    pub packed: bool,
    /// Notifications by index (VIRTIO_F_EVENT_IDX).
    pub event_idx: bool,
    /// Indirect descriptors: one ring entry for each request.
    pub indirect: bool,
    /// Write the descriptors of every request, ask after every publish with a full fence whether
    /// the device wants a kick, and fetch nothing ahead: what a kernel's driver does, and a polling
    /// client with slots can spare.
    pub like_kernel: bool,
    /// How the client learns of completions.
    pub notify: Notify,
    /// The shared memory on 2 MiB pages, if enough are free.
    pub huge_pages: bool,
    /// Tell the device of the memory in this many regions.
    pub regions: u8,
    /// Tell it by one ADD_MEM_REG for each region rather than one SET_MEM_TABLE.
    pub add_regions: bool,
    /// Negotiate VHOST_USER_PROTOCOL_F_STATUS.
    pub status: bool,
    /// Virtio features to refuse, whatever else is asked for here.
    pub refuse_features: u64,
    /// How long to wait for an answer on the socket.
    pub timeout: Duration,
}

impl Default for ClientOptions {
    /// One polled split queue of 32 requests of 4 KiB with EVENT_IDX.
    fn default() -> Self {
        Self {
            queues: 1,
            slots: 32,
            queue_size: 0,
            slot_bytes: 4096,
            max_pieces: 1,
            packed: false,
            event_idx: true,
            indirect: false,
            like_kernel: false,
            notify: Notify::Polled,
            huge_pages: true,
            regions: 1,
            add_regions: false,
            status: true,
            refuse_features: 0,
            timeout: Duration::from_secs(10),
        }
    }
}
