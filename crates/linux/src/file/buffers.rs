//! Guest memory that the kernel pins once, instead of once a request.
//!
//! Registering all of a guest's memory at once would stall the sidecore (one second for a gibibyte
//! that was never touched) and allocate memory that the guest may never use. So memory is
//! registered in chunks, each when a request first uses it, and at most one chunk for each
//! submission of requests.

use sidecore_memory::GuestMemory;

use super::ring::Ring;

/// The largest number of buffers that a ring registers (IORING_MAX_REG_BUFFERS).
const MAX_CHUNKS: usize = 1 << 14;

/// The smallest chunk: 1 MiB, which takes 30 us to register.
const MIN_CHUNK_SHIFT: u32 = 20;

/// The largest chunk: 1 GiB, the limit of one buffer.
const MAX_CHUNK_SHIFT: u32 = 30;

/// A region of guest memory, cut into chunks.
#[derive(Clone, Copy, Debug)]
struct Region {
    start: usize,
    end: usize,
    first_chunk: usize,
}

/// The registration state of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chunk {
    Unused,
    Registered,
    Refused,
}

/// The registered buffers of one ring. A chunk and its buffer have the same index.
#[derive(Debug)]
pub(super) struct Buffers {
    /// Sorted by address, disjoint.
    regions: Vec<Region>,
    chunks: Vec<Chunk>,
    chunk_shift: u32,
    last_hit: usize,
    /// The number of chunks that may still be registered in this round.
    budget: usize,
    has_logged: bool,
    /// Prevents the addresses from being reused by another mapping while the kernel has them
    /// registered.
    memory: GuestMemory,
}

impl Buffers {
    pub fn none() -> Self {
        Self {
            regions: Vec::new(),
            chunks: Vec::new(),
            chunk_shift: MIN_CHUNK_SHIFT,
            last_hit: 0,
            budget: 0,
            has_logged: false,
            memory: GuestMemory::empty(),
        }
    }

    /// Registers the used parts of `memory`, in place of the memory before. Chunks that the kernel
    /// refuses (`RLIMIT_MEMLOCK`, memory that cannot be pinned, kernels before 5.19) are used
    /// unregistered.
    pub fn attach(&mut self, ring: &mut Ring, memory: &GuestMemory) {
        if self.memory.is_same(memory) {
            return;
        }
        if !self.regions.is_empty() {
            if let Err(error) = ring.unregister_buffers() {
                tracing::warn!(%error, "cannot unregister guest memory from io_uring");
            }
            *self = Self::none();
        }
        let ranges: Vec<_> =
            memory.host_ranges().map(|(base, len)| (base.addr(), len as usize)).collect();
        let Some((regions, chunk_shift, count)) = cut(&ranges) else { return };
        match ring.register_sparse_buffers(count as u32) {
            Ok(()) => {
                self.memory = memory.clone();
                self.regions = regions;
                self.chunk_shift = chunk_shift;
                self.chunks = vec![Chunk::Unused; count];
            }
            Err(error) => self.log_once(&error),
        }
    }

    /// Starts a round: one more chunk may be registered.
    #[inline]
    pub fn begin_round(&mut self) {
        self.budget = 1;
    }

    /// Returns the index of the buffer that holds the whole range.
    #[inline]
    pub fn index_of(&mut self, ring: &mut Ring, start: *const u8, len_bytes: usize) -> Option<u16> {
        let (region, index) = self.locate(start.addr(), len_bytes)?;
        if self.chunks[index] == Chunk::Unused && self.budget > 0 {
            self.register(ring, region, index);
        }
        // At most MAX_CHUNKS indices, which fit into 16 bits.
        (self.chunks[index] == Chunk::Registered).then_some(index as u16)
    }

    /// Returns the chunk that holds the whole range.
    #[inline]
    fn locate(&mut self, start: usize, len_bytes: usize) -> Option<(Region, usize)> {
        let end = start.checked_add(len_bytes.max(1))?;
        let holds = |region: &Region| region.start <= start && end <= region.end;
        if !self.regions.get(self.last_hit).is_some_and(holds) {
            let index =
                self.regions.partition_point(|region| region.start <= start).checked_sub(1)?;
            if !holds(&self.regions[index]) {
                return None;
            }
            self.last_hit = index;
        }
        let region = self.regions[self.last_hit];
        let first = (start - region.start) >> self.chunk_shift;
        let last = (end - 1 - region.start) >> self.chunk_shift;
        (first == last).then_some((region, region.first_chunk + first))
    }

    #[cold]
    fn register(&mut self, ring: &mut Ring, region: Region, index: usize) {
        self.budget -= 1;
        let start = region.start + ((index - region.first_chunk) << self.chunk_shift);
        let end = region.end.min(start + (1 << self.chunk_shift));
        let buffer = libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(start),
            iov_len: end - start,
        };
        // SAFETY: the chunk is in `memory`, which is kept until the buffers are unregistered or the
        // ring is gone.
        self.chunks[index] = match unsafe { ring.register_buffer(index as u32, buffer) } {
            Ok(()) => Chunk::Registered,
            Err(error) => {
                self.log_once(&error);
                Chunk::Refused
            }
        };
    }

    fn log_once(&mut self, error: &std::io::Error) {
        if !std::mem::replace(&mut self.has_logged, true) {
            tracing::info!(
                %error,
                "guest memory is not registered with io_uring, which costs some speed \
                 (RLIMIT_MEMLOCK?)"
            );
        }
    }
}

/// Cuts ranges (address and size) into the smallest chunks that are within the limit of their
/// number. Returns the regions, the size as a power of two, and the number of chunks; `None` if the
/// ranges are empty or too large.
fn cut(ranges: &[(usize, usize)]) -> Option<(Vec<Region>, u32, usize)> {
    let count =
        |shift: u32| ranges.iter().map(|&(_, len)| len.div_ceil(1_usize << shift)).sum::<usize>();
    let shift = (MIN_CHUNK_SHIFT..=MAX_CHUNK_SHIFT).find(|&shift| count(shift) <= MAX_CHUNKS)?;
    let mut sorted = ranges.to_vec();
    sorted.sort_unstable();
    let mut first_chunk = 0;
    let regions = sorted.into_iter().map(|(start, len)| {
        let region = Region { start, end: start + len, first_chunk };
        first_chunk += len.div_ceil(1_usize << shift);
        region
    });
    let regions: Vec<_> = regions.collect();
    (!regions.is_empty()).then_some((regions, shift, first_chunk))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn buffers(ranges: &[(usize, usize)]) -> Buffers {
        let (regions, chunk_shift, count) = cut(ranges).unwrap();
        Buffers { regions, chunk_shift, chunks: vec![Chunk::Unused; count], ..Buffers::none() }
    }

    fn chunk(buffers: &mut Buffers, start: usize, len_bytes: usize) -> Option<usize> {
        buffers.locate(start, len_bytes).map(|(_, index)| index)
    }

    #[test]
    fn chunks_grow_with_the_guest() {
        let shift_and_count = |len| cut(&[(MIB, len)]).map(|(_, shift, count)| (shift, count));
        assert_eq!(shift_and_count(1), Some((20, 1)));
        assert_eq!(shift_and_count(4 << 30), Some((20, 4096)));
        assert_eq!(shift_and_count(64 << 30), Some((22, 16384)));
        assert_eq!(shift_and_count(16 << 40), Some((30, 16384)));
        assert_eq!(shift_and_count((16 << 40) + 1), None, "more than a ring takes");
        assert!(cut(&[]).is_none());
    }

    #[test]
    fn a_range_is_found_only_where_one_chunk_holds_it_whole() {
        // The second region is given first, and touches the other.
        let mut buffers = buffers(&[(8 * MIB, 2 * MIB + 5), (4 * MIB, 4 * MIB)]);
        assert_eq!(chunk(&mut buffers, 4 * MIB, MIB), Some(0));
        assert_eq!(chunk(&mut buffers, 7 * MIB + 1, MIB - 1), Some(3));
        assert_eq!(chunk(&mut buffers, 7 * MIB + 1, MIB), None, "across regions");
        assert_eq!(chunk(&mut buffers, 6 * MIB - 1, 2), None, "across chunks");
        assert_eq!(chunk(&mut buffers, 8 * MIB, 1), Some(4));
        assert_eq!(chunk(&mut buffers, 10 * MIB, 5), Some(6));
        assert_eq!(chunk(&mut buffers, 10 * MIB, 6), None, "past the end");
        assert_eq!(chunk(&mut buffers, 4 * MIB - 1, 1), None, "before the first");
        assert_eq!(chunk(&mut buffers, usize::MAX, 2), None, "wraps");
        assert_eq!(chunk(&mut Buffers::none(), MIB, 1), None);
    }
}
