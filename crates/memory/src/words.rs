//! Words that a peer writes too, as atomics.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

use crate::table::{GuestAddress, GuestMemory, MemoryError, UserAddress};
use crate::window::Window;

/// An integer type that a ring is made of.
///
/// # Safety
/// The type is an atomic integer: any bytes are a valid value of it, and it
/// may be shared with writers in other processes.
pub unsafe trait Word: Sync + 'static {}
// SAFETY: an atomic integer.
unsafe impl Word for AtomicU8 {}
// SAFETY: an atomic integer.
unsafe impl Word for AtomicU16 {}
// SAFETY: an atomic integer.
unsafe impl Word for AtomicU32 {}
// SAFETY: an atomic integer.
unsafe impl Word for AtomicU64 {}

/// An array of words at a fixed place in shared memory: part of a ring.
///
/// The peer writes there at any time, which is what atomics are for: every
/// load reads the word once, and relaxed ones cost nothing.
#[derive(Debug)]
pub struct Words<T> {
    window: Window,
    count: usize,
    kind: PhantomData<T>,
}

impl<T: Word> Words<T> {
    /// `count` words at `address`, which must be aligned to `align_bytes` and to the word.
    ///
    /// # Errors
    /// The words are outside of memory, or not aligned.
    pub fn new(
        memory: &GuestMemory,
        address: UserAddress,
        count: usize,
        align_bytes: usize,
    ) -> Result<Self, MemoryError> {
        let len_bytes = count.saturating_mul(size_of::<T>());
        let window = memory.window(address, len_bytes, align_bytes.max(align_of::<T>()))?;
        Ok(Self { window, count, kind: PhantomData })
    }

    /// As many words as `len_bytes` hold; else as [`Words::new`].
    ///
    /// # Errors
    /// As [`Words::new`].
    pub fn in_bytes(
        memory: &GuestMemory,
        address: UserAddress,
        len_bytes: usize,
        align_bytes: usize,
    ) -> Result<Self, MemoryError> {
        Self::new(memory, address, len_bytes.checked_div(size_of::<T>()).unwrap_or(0), align_bytes)
    }

    /// As many words as `window` holds, which must be aligned to the word.
    ///
    /// # Errors
    /// The window is not aligned.
    pub fn of(window: Window) -> Result<Self, MemoryError> {
        let align_bytes = align_of::<T>();
        let start = window.as_ptr().addr();
        if !start.is_multiple_of(align_bytes) {
            return Err(MemoryError::Misaligned { start: start as u64, align_bytes });
        }
        let count = window.len_bytes().checked_div(size_of::<T>()).unwrap_or(0);
        Ok(Self { window, count, kind: PhantomData })
    }

    /// All words.
    #[must_use]
    #[inline(always)]
    pub fn words(&self) -> &[T] {
        // SAFETY: the window is `count` words long, aligned for them (both checked in `new` and
        // `of`), mapped as long as it lives, and only ever accessed through atomics or by the peer.
        unsafe { std::slice::from_raw_parts(self.window.as_ptr().cast::<T>(), self.count) }
    }

    /// The word of this index.
    #[must_use]
    #[inline(always)]
    pub fn get(&self, index: usize) -> Option<&T> {
        self.words().get(index)
    }

    /// The word at `offset_bytes`.
    #[must_use]
    #[inline(always)]
    pub fn at(&self, offset_bytes: usize) -> Option<&T> {
        self.get(offset_bytes.checked_div(size_of::<T>())?)
    }

    /// The guest's address of the first word.
    #[must_use]
    pub fn guest_address(&self) -> Option<GuestAddress> {
        self.window.guest_address()
    }

    /// The memory that contains the words.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        self.window.memory()
    }

    /// The address of a word, for fetching it ahead.
    #[must_use]
    #[inline(always)]
    pub fn address_of(&self, index: usize) -> *const u8 {
        self.address_at(index.wrapping_mul(size_of::<T>()))
    }

    /// The address `offset_bytes` into the array, for fetching it ahead.
    #[must_use]
    #[inline(always)]
    pub fn address_at(&self, offset_bytes: usize) -> *const u8 {
        self.window.as_ptr().cast_const().wrapping_add(offset_bytes)
    }
}
