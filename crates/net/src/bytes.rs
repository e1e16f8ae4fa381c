//! Numbers in network byte order, in bytes that may be too short for them.

#[inline]
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

#[inline]
pub(crate) fn byte(bytes: &[u8], at: usize) -> Option<u8> {
    bytes.get(at).copied()
}

#[inline]
pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_be_bytes)
}

#[inline]
pub(crate) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_be_bytes)
}

/// Writes `from` at `at`; false, and nothing written, if it does not fit.
#[inline]
pub(crate) fn put(bytes: &mut [u8], at: usize, from: &[u8]) -> bool {
    let end = at.saturating_add(from.len());
    bytes.get_mut(at..end).map(|to| to.copy_from_slice(from)).is_some()
}
