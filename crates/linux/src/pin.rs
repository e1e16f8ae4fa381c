//! Memory that is read on every request, kept fast to access.

use std::sync::Once;

use rustix::io::Errno;
use rustix::mm::Advice;
use sidecore_units::PAGE_BYTES;

/// MADV_COLLAPSE is not yet in every libc's headers (include/uapi/asm-generic/mman-common.h).
const MADV_COLLAPSE: libc::c_int = 25;

/// Asks for huge pages under `memory` and locks it, as far as the kernel allows either: a
/// translation that waits for a swapped page is worse than a tree walk. A refusal is logged once.
///
/// The kernel locks whole pages, until they are unmapped; so this is for memory that lives as long
/// as the process, in pieces of many pages.
pub fn pin_memory<T>(memory: &[T]) {
    let len_bytes = size_of_val(memory);
    if len_bytes == 0 {
        return;
    }
    let start = memory.as_ptr().cast::<u8>().cast_mut();
    // Advice is for whole pages only; the partial pages at the edges are left out.
    let page = PAGE_BYTES as usize;
    let skip = start.addr().next_multiple_of(page) - start.addr();
    let whole = len_bytes.saturating_sub(skip) / page * page;
    if whole > 0 {
        // Best effort: without transparent huge pages the memory has small pages.
        // SAFETY: the range lies in `memory`, and the advice changes no byte.
        let _ = unsafe {
            rustix::mm::madvise(start.wrapping_add(skip).cast(), whole, Advice::LinuxHugepage)
        };
        // A range that has small pages already, because it has been written, keeps them until its
        // content is copied (Linux 6.1).
        // SAFETY: as above; the bytes keep their values.
        let _ = unsafe { libc::madvise(start.wrapping_add(skip).cast(), whole, MADV_COLLAPSE) };
    }
    // SAFETY: the range is `memory`, and locking changes no byte.
    if let Err(error) = unsafe { rustix::mm::mlock(start.cast(), len_bytes) } {
        warn_once(error);
    }
}

#[cold]
fn warn_once(error: Errno) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let hint = match error {
            Errno::NOMEM | Errno::PERM | Errno::AGAIN => {
                " (RLIMIT_MEMLOCK: raise LimitMEMLOCK= or ulimit -l)"
            }
            _ => "",
        };
        tracing::warn!(
            %error,
            "translation tables are not locked into memory and may be swapped out{hint}"
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's entry for the mapping that holds `address`.
    fn smaps(address: usize) -> String {
        let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut found = String::new();
        let mut inside = false;
        for line in all.lines() {
            if let Some((range, _)) = line.split_once(' ')
                && let Some((start, end)) = range.split_once('-')
                && let (Ok(start), Ok(end)) =
                    (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16))
            {
                inside = (start..end).contains(&address);
            }
            if inside {
                found.push_str(line);
                found.push('\n');
            }
        }
        found
    }

    #[test]
    fn pinned_memory_is_locked_and_unchanged() {
        let memory: Vec<u64> = (0..1 << 19).collect();
        pin_memory(&memory);
        let middle = memory[1 << 18..].as_ptr().addr();
        let flags = smaps(middle)
            .lines()
            .find(|line| line.starts_with("VmFlags"))
            .map(str::to_owned)
            .unwrap();
        // Without the right to lock 4 MiB the test has no effect to check.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        if rustix::process::geteuid().is_root() || limit.is_none_or(|limit| limit >= 8 << 20) {
            assert!(flags.contains(" lo"), "{flags}");
        }
        assert!(memory.iter().zip(0..).all(|(word, expected)| *word == expected));
    }

    #[test]
    fn slices_of_every_size_are_accepted() {
        pin_memory::<u8>(&[]);
        pin_memory(&[0_u8]);
        pin_memory(&[()]);
        let bytes = vec![1_u8; 10_000];
        pin_memory(&bytes[1..9_999]);
        assert!(bytes.iter().all(|byte| *byte == 1));
    }
}
