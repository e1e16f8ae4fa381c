//! The seams to a link and to the data of requests.

use crate::Peer;

/// Sends frames.
pub trait Transmit {
    /// A buffer for a frame of `len_bytes`, or `None` while there is no room: the engine asks again
    /// in its next poll. Its contents are overwritten. A buffer that is not committed is not sent.
    fn buffer(&mut self, len_bytes: usize) -> Option<&mut [u8]>;

    /// Sends the buffer that was handed out last.
    fn commit(&mut self, to: Peer);
}

/// The data of requests, which the caller owns. `request` is the caller's name for it: a client's
/// tag, an IOhost's [`Execute::place`](crate::Execute::place).
pub trait Data {
    /// Copies the data from `offset_bytes` on into `payload`.
    fn fill(&mut self, request: u64, offset_bytes: u32, payload: &mut [u8]);

    /// Copies `payload` to the data from `offset_bytes` on. In a client it is called for segments
    /// of reads; a segment may come in any order, and once more after the answer was given up.
    fn store(&mut self, request: u64, offset_bytes: u32, payload: &[u8]);

    /// Makes the first `len_bytes` of the data zeros. An IOhost's engine asks for it before a read
    /// is executed, so that an answer never has the bytes of a former frame in it.
    fn clear(&mut self, request: u64, len_bytes: u32);
}
