//! 2 MiB pages for the length of an experiment.

use std::fs;

const RESERVED: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";

/// Bytes in a huge page.
pub const BYTES: u64 = 2 << 20;

/// Reserves huge pages, and gives them back when dropped.
#[derive(Debug)]
pub struct HugePages {
    before: Option<u64>,
}

impl HugePages {
    /// Makes `pages` huge pages free, if the process has the privilege; [`free`] tells the result.
    #[must_use]
    pub fn reserve(pages: u64) -> Self {
        let (Some(reserved), Some(missing)) = (read(RESERVED), pages.checked_sub(free())) else {
            return Self { before: None };
        };
        if missing == 0 || fs::write(RESERVED, (reserved + missing).to_string()).is_err() {
            return Self { before: None };
        }
        Self { before: Some(reserved) }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            let _ = fs::write(RESERVED, before.to_string());
        }
    }
}

/// The number of free huge pages.
#[must_use]
pub fn free() -> u64 {
    read(FREE).unwrap_or(0)
}

fn read(file: &str) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}
