//! Descriptors, as far as both ring formats agree (2.7.5 and 2.8.13).

/// Size of a descriptor.
pub const BYTES: usize = 16;
/// Alignment of the descriptor area (2.7 and 2.8.10.1).
pub const ALIGN_BYTES: usize = 16;
/// Offset of the 64-bit address of the buffer.
pub const ADDRESS_OFFSET: usize = 0;
/// Offset of the descriptor's second word, which begins with the 32-bit length of the buffer.
pub const LEN_OFFSET: usize = 8;

/// VIRTQ_DESC_F_NEXT: the chain continues.
pub const NEXT: u16 = 1;
/// VIRTQ_DESC_F_WRITE: the device writes the buffer; else it reads it.
pub const WRITE: u16 = 2;
/// VIRTQ_DESC_F_INDIRECT: the buffer is a table of descriptors.
pub const INDIRECT: u16 = 4;

/// The number of bits by which the field at `offset` is shifted in the descriptor's second word.
pub(crate) const fn shift(offset: usize) -> usize {
    offset.wrapping_sub(LEN_OFFSET).wrapping_mul(8)
}
