//! A data structure on its way to the host.

/// So many bytes, zero but for what is put in. What lies past the end is left out.
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

    /// An ASCII string of `len_bytes`, filled up with spaces (NVMe base 2.0, 1.4.2).
    pub(crate) fn put_text(&mut self, offset: usize, text: &str, len_bytes: usize) {
        let printable = |byte: u8| if (0x20..=0x7E).contains(&byte) { byte } else { b'?' };
        let text: Vec<u8> = text.bytes().map(printable).chain(std::iter::repeat(b' ')).take(len_bytes).collect();
        self.put(offset, &text);
    }
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
        bytes.put_text(1, "a\nbcdef", 4);
        bytes.put(8, &[1, 2, 3]);
        assert_eq!(Vec::from(bytes), b"\0a?bc\0\0\0\0\0");
        let mut bytes = Bytes::new(3);
        bytes.put_text(0, "x", 3);
        assert_eq!(Vec::from(bytes), b"x  ");
    }
}
