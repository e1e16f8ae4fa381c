//! Bulk copies for memory that a peer may write at the same time. Such a race is not undefined
//! behaviour here, because the compiler does not see the accesses: they are inline assembly on
//! x86-64 and volatile elsewhere.
//!
//! The copies out of and into an arena prefetch the *next* request's memory while copying this
//! request's: at random places of a large arena a copy is bound by the latency of DRAM and of the
//! page walk, both of which overlap.

/// Bytes in a cache line.
pub const CACHE_LINE_BYTES: usize = 64;

/// Fetches the line at `address` for reading. A hint; every address is permitted.
#[inline(always)]
pub fn prefetch_for_read(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, at any address.
    unsafe {
        core::arch::asm!(
            "prefetcht0 byte ptr [{0}]",
            in(reg) address,
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Fetches the line at `address` for writing, so that the first store finds the line owned already.
/// A hint; every address is permitted.
#[inline(always)]
pub fn prefetch_for_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, at any address; a CPU without PREFETCHW executes it as a
    // no-op (AMD64 manual, volume 3).
    unsafe {
        core::arch::asm!(
            "prefetchw byte ptr [{0}]",
            in(reg) address,
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Below this size a string instruction spends more time on its start than on the bytes.
#[cfg(target_arch = "x86_64")]
const SHORT_BYTES: usize = 1024;
/// A string instruction is slow if a target follows its source this closely within a page. On an
/// EPYC of AMD, 4 KiB in the nearest cache took 1152 ns at distances of 1 to 15 bytes, 106 ns from
/// 16 to 31, and 42 ns at others; blocks of 64 bytes took 83 ns.
#[cfg(target_arch = "x86_64")]
const NEAR_BYTES: usize = 32;

/// Copies `len_bytes`, each byte once.
///
/// # Safety
/// Both ranges must be valid for `len_bytes` and must not overlap.
#[inline]
pub unsafe fn copy(to: *mut u8, from: *const u8, len_bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if len_bytes < SHORT_BYTES || is_near(to.addr(), from.addr()) {
        // SAFETY: the caller's.
        return unsafe { copy_blocks(to, from, len_bytes) };
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's; the direction flag is clear by the ABI.
    unsafe {
        core::arch::asm!(
            "rep movsb",
            inout("rcx") len_bytes => _,
            inout("rdi") to => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    for index in 0..len_bytes {
        // SAFETY: the caller's.
        unsafe { to.add(index).write_volatile(from.add(index).read_volatile()) };
    }
}

/// Whether a target follows its source within [`NEAR_BYTES`] of a page, which need not be the same.
#[cfg(target_arch = "x86_64")]
#[inline]
const fn is_near(to: usize, from: usize) -> bool {
    const PAGE_BYTES: usize = 4096;
    let behind = to.wrapping_sub(from).wrapping_sub(1) % PAGE_BYTES;
    behind < NEAR_BYTES - 1
}

/// Moves one value of a register's size from one address to the other, and adds the size to both.
#[cfg(target_arch = "x86_64")]
macro_rules! move_one {
    ($to:ident, $from:ident, $size:literal, $class:ident, $register:literal) => {
        // SAFETY: the caller has as many bytes left.
        unsafe {
            core::arch::asm!(
                concat!("mov {value", $register, "}, [{from}]"),
                concat!("mov [{to}], {value", $register, "}"),
                from = in(reg) $from,
                to = in(reg) $to,
                value = out($class) _,
                options(nostack, preserves_flags)
            );
            $to = $to.add($size);
            $from = $from.add($size);
        }
    };
}

/// Moves 16 bytes from one address to the other, and adds the size to both.
#[cfg(target_arch = "x86_64")]
macro_rules! move_sixteen {
    ($to:ident, $from:ident) => {
        // SAFETY: the caller has as many bytes left; SSE2 is part of x86-64.
        unsafe {
            core::arch::asm!(
                "movdqu {value}, xmmword ptr [{from}]",
                "movdqu xmmword ptr [{to}], {value}",
                from = in(reg) $from,
                to = in(reg) $to,
                value = out(xmm_reg) _,
                options(nostack, preserves_flags)
            );
            $to = $to.add(16);
            $from = $from.add(16);
        }
    };
}

/// Copies each byte once, in blocks of 64 bytes.
///
/// # Safety
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_blocks(mut to: *mut u8, mut from: *const u8, len_bytes: usize) {
    let blocks = len_bytes / 64;
    if blocks > 0 {
        // SAFETY: the caller's, for the whole blocks; SSE2 is part of x86-64.
        unsafe {
            core::arch::asm!(
                "2:",
                "movdqu xmm0, xmmword ptr [{from}]",
                "movdqu xmm1, xmmword ptr [{from} + 16]",
                "movdqu xmm2, xmmword ptr [{from} + 32]",
                "movdqu xmm3, xmmword ptr [{from} + 48]",
                "movdqu xmmword ptr [{to}], xmm0",
                "movdqu xmmword ptr [{to} + 16], xmm1",
                "movdqu xmmword ptr [{to} + 32], xmm2",
                "movdqu xmmword ptr [{to} + 48], xmm3",
                "add {from}, 64",
                "add {to}, 64",
                "dec {blocks}",
                "jnz 2b",
                from = inout(reg) from,
                to = inout(reg) to,
                blocks = inout(reg) blocks => _,
                out("xmm0") _,
                out("xmm1") _,
                out("xmm2") _,
                out("xmm3") _,
                options(nostack)
            );
        }
    }
    if len_bytes & 32 != 0 {
        move_sixteen!(to, from);
        move_sixteen!(to, from);
    }
    if len_bytes & 16 != 0 {
        move_sixteen!(to, from);
    }
    if len_bytes & 8 != 0 {
        move_one!(to, from, 8, reg, "");
    }
    if len_bytes & 4 != 0 {
        move_one!(to, from, 4, reg, ":e");
    }
    if len_bytes & 2 != 0 {
        move_one!(to, from, 2, reg, ":x");
    }
    if len_bytes & 1 != 0 {
        move_one!(to, from, 1, reg_byte, "");
    }
    let _ = (to, from);
}

/// Writes `len_bytes` zeros.
///
/// # Safety
/// The range must be valid for `len_bytes`.
#[inline]
pub unsafe fn zero(to: *mut u8, len_bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if len_bytes < SHORT_BYTES && len_bytes.is_multiple_of(64) {
        // SAFETY: the caller's.
        return unsafe { zero_blocks(to, len_bytes / 64) };
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's; the direction flag is clear by the ABI.
    unsafe {
        core::arch::asm!(
            "rep stosb",
            inout("rcx") len_bytes => _,
            inout("rdi") to => _,
            in("al") 0_u8,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    for index in 0..len_bytes {
        // SAFETY: the caller's.
        unsafe { to.add(index).write_volatile(0) };
    }
}

/// Writes zeros to blocks of 64 bytes.
///
/// # Safety
/// The range must be valid.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn zero_blocks(to: *mut u8, blocks: usize) {
    if blocks == 0 {
        return;
    }
    // SAFETY: the caller's; SSE2 is part of x86-64.
    unsafe {
        core::arch::asm!(
            "pxor xmm0, xmm0",
            "2:",
            "movdqu xmmword ptr [{to}], xmm0",
            "movdqu xmmword ptr [{to} + 16], xmm0",
            "movdqu xmmword ptr [{to} + 32], xmm0",
            "movdqu xmmword ptr [{to} + 48], xmm0",
            "add {to}, 64",
            "dec {blocks}",
            "jnz 2b",
            to = inout(reg) to => _,
            blocks = inout(reg) blocks => _,
            out("xmm0") _,
            options(nostack)
        );
    }
}

/// Defines a copy that meanwhile fetches as many bytes at `next` into the second-level cache, one
/// line of each in turn. The copies differ in their store instruction.
///
/// Into the second level, because the first level's miss buffers bound a copy from DRAM: measured,
/// prefetching into the first level gains a sixth, and into the second two fifths.
macro_rules! copy_and_fetch {
    ($(#[$documentation:meta])* $name:ident, $store:literal, $align_bytes:literal) => {
        $(#[$documentation])*
        ///
        /// # Safety
        /// As [`copy`]; `next` may be any address.
        #[inline]
        pub unsafe fn $name(to: *mut u8, from: *const u8, len_bytes: usize, next: *const u8) {
            let mut whole = 0;
            #[cfg(target_arch = "x86_64")]
            if len_bytes >= CACHE_LINE_BYTES
                && to.addr().is_multiple_of($align_bytes)
                && has_avx()
            {
                whole = len_bytes & !CACHE_LINE_BYTES.wrapping_sub(1);
                // SAFETY: the caller's, for the whole lines; AVX is there; the target is aligned as
                // the store demands; a prefetch never faults.
                unsafe {
                    core::arch::asm!(
                        "2:",
                        "prefetcht1 byte ptr [{next}]",
                        "vmovdqu ymm0, ymmword ptr [{from}]",
                        "vmovdqu ymm1, ymmword ptr [{from} + 32]",
                        concat!($store, " ymmword ptr [{to}], ymm0"),
                        concat!($store, " ymmword ptr [{to} + 32], ymm1"),
                        "add {from}, 64",
                        "add {to}, 64",
                        "add {next}, 64",
                        "dec {lines}",
                        "jnz 2b",
                        "vzeroupper",
                        from = inout(reg) from => _,
                        to = inout(reg) to => _,
                        next = inout(reg) next => _,
                        lines = inout(reg) whole / CACHE_LINE_BYTES => _,
                        out("xmm0") _,
                        out("xmm1") _,
                        options(nostack)
                    );
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = next;
            let rest = len_bytes.wrapping_sub(whole);
            if rest > 0 {
                // SAFETY: the caller's, for what is left.
                unsafe { copy(to.add(whole), from.add(whole), rest) };
            }
        }
    };
}

copy_and_fetch! {
    /// Copies `len_bytes` from a random place of an arena to its next reader, and meanwhile fetches
    /// the source of the copy after it.
    copy_out, "vmovdqu", 1
}

copy_and_fetch! {
    /// Copies `len_bytes` to a random place of an arena, past the caches: the lines there are
    /// written whole, so fetching them first would be useless, and no reader is expected soon.
    /// Meanwhile fetches the source of the copy after it.
    ///
    /// Such stores are visible to other cores only after [`settle`].
    copy_in, "vmovntdq", 32
}

/// Orders the stores of [`copy_in`] before all later stores, for other cores: once a batch, because
/// the fence waits for the memory.
#[inline]
pub fn settle() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a fence; SSE is part of x86-64.
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn has_avx() -> bool {
    // The macro caches the answer in an atomic.
    std::arch::is_x86_feature_detected!("avx")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every length around the line size, with its neighbours untouched.
    #[test]
    fn copies_move_exactly_the_bytes_asked_for() {
        type Copy = unsafe fn(*mut u8, *const u8, usize, *const u8);
        let plain: Copy = |to, from, len, _| {
            // SAFETY: the ranges below are valid.
            unsafe { copy(to, from, len) }
        };
        for routine in [plain, copy_out, copy_in] {
            for len in (0..=130).chain([511, 512, 1023, 1024, 1025, 4095, 4096, 4097]) {
                let from: Vec<u8> = (0..len).map(|i| (i % 251) as u8 + 1).collect();
                for lead in [1, 64] {
                    let mut to = vec![0_u8; len + 192];
                    // An aligned and an unaligned target.
                    let start = to.as_ptr().align_offset(64) + lead;
                    // SAFETY: `to` has margins on both sides.
                    unsafe {
                        routine(to.as_mut_ptr().add(start), from.as_ptr(), len, std::ptr::null())
                    };
                    assert!(to[..start].iter().all(|byte| *byte == 0));
                    assert!(to[start + len..].iter().all(|byte| *byte == 0));
                    assert_eq!(&to[start..start + len], &from[..]);
                }
            }
        }
    }

    /// The distances at which a string instruction is slow, and their neighbours.
    #[test]
    fn copies_to_a_place_close_behind_their_source_within_a_page_are_exact() {
        const MARGIN: usize = 64;
        let from: Vec<u8> = (0..20_000_usize).map(|i| (i % 251) as u8 + 1).collect();
        for (distance, near) in [(0, false), (1, true), (15, true), (16, true), (31, true)]
            .into_iter()
            .chain([(32, false), (4095, false)])
        {
            for len in [1024, 1025, 4096, 8191] {
                let mut to = vec![0_u8; len + 4096 + 2 * MARGIN];
                let skip = from.as_ptr().addr() + distance;
                let start = MARGIN + skip.wrapping_sub(to.as_ptr().addr() + MARGIN) % 4096;
                let place = to.as_ptr().addr() + start;
                #[cfg(target_arch = "x86_64")]
                assert_eq!(is_near(place, from.as_ptr().addr()), near, "{distance}");
                let _ = (place, near);
                // SAFETY: `to` has margins on both sides.
                unsafe { copy(to.as_mut_ptr().add(start), from.as_ptr(), len) };
                assert_eq!(&to[start..start + len], &from[..len]);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn zero_writes_exactly_the_bytes_asked_for() {
        for len in [0, 1, 8, 32, 63, 64, 65, 512, 544, 1024, 4096] {
            let mut to = vec![7_u8; len + 2];
            // SAFETY: in range.
            unsafe { zero(to.as_mut_ptr().add(1), len) };
            assert!((to[0], to[len + 1]) == (7, 7) && to[1..=len].iter().all(|byte| *byte == 0));
        }
    }
}
