//! Private memory for payloads that are sealed or opened.

/// Bytes of a cache line: the cipher's loads of 32 or 64 bytes do not cross one.
const LINE_BYTES: usize = 64;

/// A buffer that begins at a cache line.
pub(super) struct Scratch {
    /// With room for the bytes before the first cache line.
    memory: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Scratch {
    /// A buffer of `len_bytes` zeros.
    pub fn new(len_bytes: usize) -> Self {
        let memory: Box<[u8]> = vec![0; len_bytes.saturating_add(LINE_BYTES)].into();
        // The memory of a box does not move.
        let start = memory.as_ptr().align_offset(LINE_BYTES).min(LINE_BYTES);
        Self { memory, start, end: start.saturating_add(len_bytes) }
    }

    #[inline]
    pub fn bytes(&self) -> &[u8] {
        self.memory.get(self.start..self.end).unwrap_or_default()
    }

    #[inline]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory.get_mut(self.start..self.end).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_begins_at_a_cache_line_and_has_its_size() {
        for len_bytes in [0, 1, 1500, 8100, 131_072] {
            let mut scratch = Scratch::new(len_bytes);
            assert_eq!((scratch.bytes().len(), scratch.bytes_mut().len()), (len_bytes, len_bytes));
            assert!(scratch.bytes().as_ptr().addr().is_multiple_of(LINE_BYTES));
        }
    }
}
