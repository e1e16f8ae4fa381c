//! The options of a client.

use std::time::Duration;

use crate::options::Notify;

/// How commands name their data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPointers {
    /// By physical region pages, which every controller knows.
    Prp,
    /// By scatter-gather lists, which some know (SGLS).
    Sgl,
}

/// The options of a client.
#[derive(Clone, Debug)]
pub struct NvmeOptions {
    /// I/O queue pairs; the controller must have as many.
    pub queues: u16,
    /// Requests that one queue holds at once.
    pub slots: u16,
    /// Entries of each submission queue, more than slots; zero for 64, or as many as the slots need
    /// if those are more.
    pub queue_entries: u32,
    /// Size of each slot's data buffer in bytes, a multiple of 512 and at most 2 MiB; the
    /// controller may move less at once (MDTS).
    pub slot_bytes: u32,
    /// Most pieces that one request's data is scattered over; more than one needs SGLs.
    pub max_pieces: u16,
    /// How commands name their data.
    pub pointers: DataPointers,
    /// How the client learns of completions.
    pub notify: Notify,
    /// The namespace to use; zero for the first that is active.
    pub namespace: u32,
    /// Store doorbells in mapped memory where the controller allows that; otherwise each is a
    /// message.
    pub map_doorbells: bool,
    /// Where doorbells are messages, use shadow doorbells if the controller has them (Doorbell
    /// Buffer Config), so that there are few of those.
    pub shadow_doorbells: bool,
    /// Do not wait for replies to doorbell messages. A failure is then not told.
    pub posted_doorbells: bool,
    /// The shared memory on 2 MiB pages, if enough are free.
    pub huge_pages: bool,
    /// Map the memory for DMA in this many pieces.
    pub regions: u8,
    /// How long to wait for a reply on the socket, and for an admin command.
    pub timeout: Duration,
}

impl Default for NvmeOptions {
    /// One polled queue pair of 32 requests of 4 KiB.
    fn default() -> Self {
        Self {
            queues: 1,
            slots: 32,
            queue_entries: 0,
            slot_bytes: 4096,
            max_pieces: 1,
            pointers: DataPointers::Prp,
            notify: Notify::Polled,
            namespace: 0,
            map_doorbells: true,
            shadow_doorbells: true,
            posted_doorbells: true,
            huge_pages: true,
            regions: 1,
            timeout: Duration::from_secs(10),
        }
    }
}
