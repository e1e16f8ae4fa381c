//! A data structure on its way to the host.

/// A zeroed buffer of a fixed size. Bytes put past its end are dropped.
pub(crate) struct Bytes(Vec<u8>);

impl Bytes {
    pub(crate) fn new(len_bytes: usize) -> Self {
        Self(vec![0; len_bytes])
    }

    /// `bytes` at `offset`.
    pub(crate) fn put(&mut self, offset: usize, bytes: &[u8]) {
        if let Some(place) = self.0.get_mut(offset..offset.saturating_add(bytes.len())) {
            place.copy_from_slice(bytes);
        }
    }
}

/// An ASCII string, filled up with spaces (NVMe base 2.0, 1.4.2).
pub(crate) fn text<const LEN_BYTES: usize>(text: &str) -> [u8; LEN_BYTES] {
    let printable = |byte: u8| if (0x20..=0x7E).contains(&byte) { byte } else { b'?' };
    let mut bytes = [b' '; LEN_BYTES];
    for (to, from) in bytes.iter_mut().zip(text.bytes()) {
        *to = printable(from);
    }
    bytes
}

impl From<Bytes> for Vec<u8> {
    fn from(bytes: Bytes) -> Self {
        bytes.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_padded_cut_and_printable() {
        let mut bytes = Bytes::new(10);
        bytes.put(1, &text::<4>("a\nbcdef"));
        bytes.put(8, &[1, 2, 3]);
        assert_eq!(Vec::from(bytes), b"\0a?bc\0\0\0\0\0");
        assert_eq!(&text::<3>("x"), b"x  ");
    }
}
