//! The bytes of an access.

use std::fmt;

/// A register's size, and a doorbell's.
const SHORT_BYTES: usize = 8;

/// Bytes that are read from or written to a region. A register's are kept in place: a doorbell that is not mapped costs
/// no allocation.
#[derive(Clone)]
pub struct Data(Kept);

#[derive(Clone)]
enum Kept {
    Short([u8; SHORT_BYTES], usize),
    Long(Vec<u8>),
}

impl Data {
    /// None.
    #[must_use]
    pub const fn empty() -> Self {
        Self(Kept::Short([0; SHORT_BYTES], 0))
    }

    /// As many zeros. The caller has bounded `len_bytes`.
    #[must_use]
    pub fn zeros(len_bytes: usize) -> Self {
        if len_bytes <= SHORT_BYTES {
            Self(Kept::Short([0; SHORT_BYTES], len_bytes))
        } else {
            Self(Kept::Long(vec![0; len_bytes]))
        }
    }

    /// All of them.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Kept::Short(bytes, len) => bytes.get(..*len).unwrap_or_default(),
            Kept::Long(bytes) => bytes,
        }
    }

    /// All of them, to be filled.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Kept::Short(bytes, len) => bytes.get_mut(..*len).unwrap_or_default(),
            Kept::Long(bytes) => bytes,
        }
    }
}

impl From<&[u8]> for Data {
    fn from(bytes: &[u8]) -> Self {
        let mut data = Self::zeros(bytes.len());
        data.as_mut_slice().copy_from_slice(bytes);
        data
    }
}

impl PartialEq for Data {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for Data {}

impl fmt::Debug for Data {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kept::Short(..) => write!(formatter, "{:02x?}", self.as_slice()),
            Kept::Long(bytes) => write!(formatter, "{} bytes", bytes.len()),
        }
    }
}
