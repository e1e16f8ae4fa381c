//! Reads an input as a sequence of bytes and numbers.

/// The rest of an input. All reads return `None` at its end.
#[derive(Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// An input from its beginning.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next byte.
    pub fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    /// A number of any size. Small numbers take a byte, and so do the numbers in `known` and their
    /// neighbours. These have a meaning where the number is used, and a fuzzer would not guess
    /// them.
    pub fn number(&mut self, known: &[u64]) -> Option<u64> {
        let byte = self.byte()?;
        let among = |index: u8| {
            known.get(usize::from(index) % known.len().max(1)).copied().unwrap_or(u64::MAX)
        };
        Some(match byte {
            0..128 => byte.into(),
            128..160 => u64::from(byte - 128) << 8 | u64::from(self.byte()?),
            160..192 => among(byte - 160),
            192..208 => among(byte - 192).wrapping_add(1),
            208..224 => among(byte - 208).wrapping_sub(1),
            224..240 => {
                let shift = self.byte()?;
                (1_u64 << (shift % 64)).wrapping_sub(u64::from(shift / 64 % 2))
            }
            240..248 => u64::MAX - u64::from(byte - 240),
            248..=255 => {
                let (bytes, rest) = self.0.split_first_chunk()?;
                self.0 = rest;
                u64::from_le_bytes(*bytes)
            }
        })
    }
}
