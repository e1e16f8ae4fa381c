//! The disk below the metadata.

use std::io;

/// A disk, for metadata: slow and synchronous, used by the hypervisor side alone. Accesses are
/// multiples of 4 KiB at multiples of 4 KiB.
///
/// A write is durable only after [`flush`](Self::flush), and until then ordered with no other; it
/// may tear at 512 bytes.
pub trait Disk {
    /// The disk's size in bytes.
    fn size_bytes(&self) -> u64;

    /// Fills `buffer` from `offset_bytes` on.
    ///
    /// # Errors
    /// The disk cannot read that, or it lies outside.
    fn read(&mut self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Writes `data` at `offset_bytes`.
    ///
    /// # Errors
    /// The disk cannot write that, or it lies outside.
    fn write(&mut self, offset_bytes: u64, data: &[u8]) -> io::Result<()>;

    /// Makes every write completed so far, by any user of the disk, survive a power cut.
    ///
    /// # Errors
    /// The disk cannot say that it did.
    fn flush(&mut self) -> io::Result<()>;

    /// Makes sure that writes to a range find space, without changing its contents: for the reserve
    /// of the metadata. The default does nothing.
    ///
    /// # Errors
    /// There is no space, or the disk fails.
    fn allocate(&mut self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let _ = (offset_bytes, len_bytes);
        Ok(())
    }

    /// Declares the contents of a range unneeded: called for freed blocks before they are used
    /// again. The default keeps the contents.
    ///
    /// # Errors
    /// The disk's; nothing depends on it.
    fn discard(&mut self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let _ = (offset_bytes, len_bytes);
        Ok(())
    }
}
