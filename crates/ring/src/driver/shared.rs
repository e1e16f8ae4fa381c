//! Shared memory, read and written a word at a time without `unsafe` at the caller's.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use sidecore_memory::{Window, copy};

/// The instructions that a copy is made of, for measuring which are the best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyHow {
    /// One string instruction.
    RepMovsb,
    /// The copy of the C library's `memcpy`.
    CLibrary,
}

/// A [`Window`] with safe accessors.
///
/// The peer writes here too, so words are relaxed atomics (where not named otherwise) and bulk data
/// goes through the opaque copies of [`sidecore_memory::copy`]. Words are little-endian (virtio
/// 1.2, 1.4), at any offset that their size divides. An offset outside of the window, or not so
/// aligned, reads as zero and writes nothing: the accessors are for hot loops, whose offsets were
/// checked when the loop was set up.
#[derive(Clone, Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    len_bytes: usize,
    // Keeps `base` mapped.
    window: Window,
}

// SAFETY: `base` points into `window`, which is Send, and every access is an atomic or an opaque
// copy.
unsafe impl Send for SharedMemory {}

macro_rules! words {
    ($($load:ident, $store:ident, $word:ty, $atomic:ty, $bits:literal;)*) => {$(
        #[doc = concat!("Reads the ", $bits, " bits at `offset_bytes`.")]
        #[must_use]
        #[inline(always)]
        pub fn $load(&self, offset_bytes: usize) -> $word {
            self.word::<$word>(offset_bytes).map_or(0, |word| {
                // SAFETY: `word` checked bounds and alignment; the memory is only accessed
                // atomically.
                <$word>::from_le(unsafe { <$atomic>::from_ptr(word) }.load(Ordering::Relaxed))
            })
        }

        #[doc = concat!("Writes the ", $bits, " bits at `offset_bytes`.")]
        #[inline(always)]
        pub fn $store(&self, offset_bytes: usize, value: $word) {
            if let Some(word) = self.word::<$word>(offset_bytes) {
                // SAFETY: as above.
                unsafe { <$atomic>::from_ptr(word) }.store(value.to_le(), Ordering::Relaxed);
            }
        }
    )*};
}

impl SharedMemory {
    /// The accessors of `window`.
    #[must_use]
    pub fn new(window: Window) -> Self {
        let len_bytes = window.len_bytes();
        // A window is never null; an empty one stands for the impossible.
        let (base, len_bytes) = NonNull::new(window.as_ptr())
            .map_or((NonNull::dangling(), 0), |base| (base, len_bytes));
        Self { base, len_bytes, window }
    }

    /// Size in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// The window behind it.
    #[must_use]
    pub fn window(&self) -> &Window {
        &self.window
    }

    words! {
        load_u8, store_u8, u8, AtomicU8, "8";
        load_u16, store_u16, u16, AtomicU16, "16";
        load_u32, store_u32, u32, AtomicU32, "32";
        load_u64, store_u64, u64, AtomicU64, "64";
    }

    /// Reads 16 bits; what the peer wrote before it stored them is visible afterwards.
    #[must_use]
    #[inline(always)]
    pub fn load_u16_acquire(&self, offset_bytes: usize) -> u16 {
        self.word::<u16>(offset_bytes).map_or(0, |word| {
            // SAFETY: `word` checked bounds and alignment; the memory is only accessed atomically.
            u16::from_le(unsafe { AtomicU16::from_ptr(word) }.load(Ordering::Acquire))
        })
    }

    /// Reads 64 bits; what the peer wrote before it stored them is visible afterwards.
    #[must_use]
    #[inline(always)]
    pub fn load_u64_acquire(&self, offset_bytes: usize) -> u64 {
        self.word::<u64>(offset_bytes).map_or(0, |word| {
            // SAFETY: as above.
            u64::from_le(unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Acquire))
        })
    }

    /// Writes 16 bits, after everything written before.
    #[inline(always)]
    pub fn store_u16_release(&self, offset_bytes: usize, value: u16) {
        if let Some(word) = self.word::<u16>(offset_bytes) {
            // SAFETY: as above.
            unsafe { AtomicU16::from_ptr(word) }.store(value.to_le(), Ordering::Release);
        }
    }

    /// Copies out from `offset_bytes`; returns how many bytes there were.
    pub fn read_bytes(&self, offset_bytes: usize, to: &mut [u8]) -> usize {
        let count = self.run(offset_bytes, to.len());
        // SAFETY: `run` checked the range, and `to` is a distinct local buffer of at least that
        // size.
        unsafe {
            copy::copy(to.as_mut_ptr(), self.base.as_ptr().wrapping_add(offset_bytes), count)
        };
        count
    }

    /// Copies `from` in at `offset_bytes`; returns how many bytes fitted.
    pub fn write_bytes(&self, offset_bytes: usize, from: &[u8]) -> usize {
        let count = self.run(offset_bytes, from.len());
        // SAFETY: as in `read_bytes`.
        unsafe { copy::copy(self.base.as_ptr().wrapping_add(offset_bytes), from.as_ptr(), count) };
        count
    }

    /// Copies `count_bytes` from one place of `from` to a place here. False, and nothing done, if
    /// either range is outside of its window or both are windows of the same memory.
    #[must_use]
    #[inline]
    pub fn copy_from(
        &self,
        at_bytes: usize,
        from: &Self,
        from_bytes: usize,
        count_bytes: usize,
        how: CopyHow,
    ) -> bool {
        let inside = self.run(at_bytes, count_bytes) == count_bytes
            && from.run(from_bytes, count_bytes) == count_bytes;
        if !inside || self.window.memory().is_same(from.window.memory()) {
            return false;
        }
        let (to, from) = (
            self.base.as_ptr().wrapping_add(at_bytes),
            from.base.as_ptr().wrapping_add(from_bytes),
        );
        match how {
            // SAFETY: `run` checked both ranges; two memories are distinct mappings.
            CopyHow::RepMovsb => unsafe { copy::copy(to, from, count_bytes) },
            // SAFETY: as above; the C library's code is opaque to the compiler, which is told
            // nothing about the length.
            CopyHow::CLibrary => unsafe {
                std::ptr::copy_nonoverlapping(from, to, std::hint::black_box(count_bytes))
            },
        }
        true
    }

    /// Writes zeros over the whole window.
    pub fn fill_zero(&self) {
        // SAFETY: exactly the window.
        unsafe { copy::zero(self.base.as_ptr(), self.len_bytes) };
    }

    /// Fetches the cache line at `offset_bytes` for writing. A hint.
    #[inline(always)]
    pub fn prefetch_for_write(&self, offset_bytes: usize) {
        copy::prefetch_for_write(self.base.as_ptr().wrapping_add(offset_bytes));
    }

    /// How many of `len_bytes` bytes from `offset_bytes` are inside.
    #[inline]
    fn run(&self, offset_bytes: usize, len_bytes: usize) -> usize {
        self.len_bytes.saturating_sub(offset_bytes).min(len_bytes)
    }

    /// The word at `offset_bytes`, if all of it is inside and it is aligned.
    #[inline(always)]
    fn word<T>(&self, offset_bytes: usize) -> Option<*mut T> {
        let word = self.base.as_ptr().wrapping_add(offset_bytes).cast::<T>();
        let inside = offset_bytes < self.len_bytes
            && self.len_bytes.wrapping_sub(offset_bytes) >= size_of::<T>();
        (inside && word.is_aligned()).then_some(word)
    }
}
