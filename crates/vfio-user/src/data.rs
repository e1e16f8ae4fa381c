//! The bytes of an access.

use std::fmt;

/// The largest register and doorbell.
const SHORT_BYTES: usize = 8;

/// The bytes that an access reads from a region or writes to one. A register's bytes are stored
/// inline: a doorbell that is not mapped costs no allocation.
#[derive(Clone)]
pub struct Data(Storage);

#[derive(Clone)]
enum Storage {
    Short([u8; SHORT_BYTES], usize),
    Long(Vec<u8>),
}

impl Data {
    /// Makes data of zero bytes.
    #[must_use]
    pub const fn empty() -> Self {
        Self(Storage::Short([0; SHORT_BYTES], 0))
    }

    /// Makes data of `len_bytes` zeros. The caller has bounded `len_bytes`.
    #[must_use]
    pub fn zeros(len_bytes: usize) -> Self {
        if len_bytes <= SHORT_BYTES {
            Self(Storage::Short([0; SHORT_BYTES], len_bytes))
        } else {
            Self(Storage::Long(vec![0; len_bytes]))
        }
    }

    /// The bytes of the access.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Storage::Short(bytes, len) => bytes.get(..*len).unwrap_or_default(),
            Storage::Long(bytes) => bytes,
        }
    }

    /// All bytes, to be filled.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Storage::Short(bytes, len) => bytes.get_mut(..*len).unwrap_or_default(),
            Storage::Long(bytes) => bytes,
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
            Storage::Short(..) => write!(formatter, "{:02x?}", self.as_slice()),
            Storage::Long(bytes) => write!(formatter, "{} bytes", bytes.len()),
        }
    }
}
