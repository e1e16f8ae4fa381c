//! Guest memory that the kernel has pinned once, instead of once a request.

use sidecore_memory::GuestMemory;

use super::ring::Ring;

/// The largest buffer that io_uring registers, in bytes
/// (io_uring_register(2)).
const MAX_BUFFER_BYTES: u64 = 1 << 30;

/// The most buffers: what the kernel has taken since registering exists
/// (UIO_MAXIOV).
const MAX_BUFFERS: usize = 1024;

/// A registered buffer; its index is its place in the table.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    start: usize,
    end: usize,
}

/// The registered buffers of one ring.
#[derive(Debug)]
pub(super) struct Buffers {
    /// Sorted by address, disjoint.
    chunks: Vec<Chunk>,
    last_hit: usize,
    /// Keeps the addresses from being mapped to something else while the
    /// kernel knows them.
    memory: GuestMemory,
}

impl Buffers {
    pub fn none() -> Self {
        Self { chunks: Vec::new(), last_hit: 0, memory: GuestMemory::empty() }
    }

    /// Registers all of `memory` in place of what was registered. What the
    /// kernel refuses (`RLIMIT_MEMLOCK`, memory that cannot be pinned) is used
    /// unregistered.
    pub fn register(&mut self, ring: &mut Ring, memory: &GuestMemory) {
        if self.memory.is_same(memory) {
            return;
        }
        self.unregister(ring);
        let mut chunks: Vec<Chunk> = memory.host_ranges().flat_map(|(base, len)| split(base.addr(), len)).collect();
        chunks.sort_by_key(|chunk| chunk.start);
        if chunks.is_empty() || chunks.len() > MAX_BUFFERS {
            return;
        }
        let table: Vec<libc::iovec> = chunks
            .iter()
            .map(|chunk| libc::iovec {
                iov_base: std::ptr::with_exposed_provenance_mut(chunk.start),
                iov_len: chunk.end - chunk.start,
            })
            .collect();
        // SAFETY: `memory` is kept until the buffers are unregistered or the
        // ring is gone.
        match unsafe { ring.register_buffers(&table) } {
            Ok(()) => {
                self.memory = memory.clone();
                self.chunks = chunks;
            }
            Err(error) => {
                tracing::info!(
                    %error,
                    bytes = memory.len_bytes(),
                    "guest memory is not registered with io_uring, which costs some speed (RLIMIT_MEMLOCK?)"
                );
            }
        }
    }

    fn unregister(&mut self, ring: &mut Ring) {
        if self.chunks.is_empty() {
            return;
        }
        if let Err(error) = ring.unregister_buffers() {
            tracing::warn!(%error, "cannot unregister guest memory from io_uring");
        }
        *self = Self::none();
    }

    /// The index of the buffer that holds all of the range.
    #[inline]
    pub fn index_of(&mut self, start: *const u8, len_bytes: usize) -> Option<u16> {
        let start = start.addr();
        let end = start.checked_add(len_bytes)?;
        let holds = |chunk: &Chunk| chunk.start <= start && end <= chunk.end;
        if !self.chunks.get(self.last_hit).is_some_and(holds) {
            let index = self.chunks.partition_point(|chunk| chunk.start <= start).checked_sub(1)?;
            if !holds(&self.chunks[index]) {
                return None;
            }
            self.last_hit = index;
        }
        u16::try_from(self.last_hit).ok()
    }
}

fn split(base: usize, len_bytes: u64) -> impl Iterator<Item = Chunk> {
    let end = base + len_bytes as usize;
    (base..end)
        .step_by(MAX_BUFFER_BYTES as usize)
        .map(move |start| Chunk { start, end: end.min(start.saturating_add(MAX_BUFFER_BYTES as usize)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffers(chunks: Vec<Chunk>) -> Buffers {
        Buffers { chunks, ..Buffers::none() }
    }

    fn index(buffers: &mut Buffers, start: usize, len_bytes: usize) -> Option<u16> {
        buffers.index_of(std::ptr::without_provenance(start), len_bytes)
    }

    #[test]
    fn a_region_is_split_at_a_gibibyte() {
        let chunks: Vec<_> = split(0x1000, (2 << 30) + 5).map(|chunk| (chunk.start, chunk.end)).collect();
        let gib = 1 << 30;
        assert_eq!(
            chunks,
            [(0x1000, 0x1000 + gib), (0x1000 + gib, 0x1000 + 2 * gib), (0x1000 + 2 * gib, 0x1005 + 2 * gib)]
        );
    }

    #[test]
    fn a_range_is_found_only_where_one_buffer_holds_it_whole() {
        let mut buffers = buffers(vec![
            Chunk { start: 0x1000, end: 0x2000 },
            Chunk { start: 0x2000, end: 0x3000 },
            Chunk { start: 0x8000, end: 0x9000 },
        ]);
        assert_eq!(index(&mut buffers, 0x1000, 0x1000), Some(0));
        assert_eq!(index(&mut buffers, 0x8fff, 1), Some(2));
        assert_eq!(index(&mut buffers, 0x1fff, 2), None, "across two");
        assert_eq!(index(&mut buffers, 0x2fff, 2), None, "past the end");
        assert_eq!(index(&mut buffers, 0x3000, 1), None, "between two");
        assert_eq!(index(&mut buffers, 0xfff, 1), None, "before the first");
        assert_eq!(index(&mut buffers, usize::MAX, 2), None, "wraps");
        assert_eq!(index(&mut Buffers::none(), 0x1000, 1), None);
    }
}
