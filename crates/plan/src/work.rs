//! The requests of a guest's threads.

use std::collections::VecDeque;

use crate::random::Random;

/// The longest request of a guest.
const MAX_BYTES: u32 = 64 << 10;
/// Requests have whole pages.
const PAGE_BYTES: u32 = 4096;

/// Filebench's webserver: files of this mean size, with Filebench's own distribution. The mean is
/// the paper's (section 5).
const FILE_BYTES: f64 = 28.0 * 1024.0;
const FILE_SHAPE: f64 = 1.5;
/// Files that are read between two updates of the log.
const READS: u32 = 10;
/// An update of the log.
const LOG_BYTES: u32 = 16 << 10;

/// A thread's requests, one at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Reads of this size.
    Read(u32),
    /// Writes of this size.
    Write(u32),
    /// Requests of this size, with this share of reads.
    Mixed(u32, f64),
    /// Ten files are read as a whole, then the log is written.
    Webserver,
}

/// A thread, and the rest of its operation.
#[derive(Clone, Debug)]
pub struct Thread {
    work: Work,
    operations: u32,
    rest: VecDeque<(bool, u32)>,
}

impl Thread {
    /// A thread at the beginning of its first operation.
    #[must_use]
    pub fn new(work: Work) -> Self {
        Self { work, operations: 0, rest: VecDeque::new() }
    }

    /// Whether the next request is the first one of an operation.
    #[must_use]
    pub fn is_between_operations(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next request: whether it is a write, and its size.
    pub fn next(&mut self, random: &mut Random) -> (bool, u32) {
        if let Some(request) = self.rest.pop_front() {
            return request;
        }
        let (is_write, bytes) = match self.work {
            Work::Read(bytes) => (false, bytes),
            Work::Write(bytes) => (true, bytes),
            Work::Mixed(bytes, reads) => (random.uniform() > reads, bytes),
            Work::Webserver => {
                self.operations += 1;
                if self.operations.is_multiple_of(READS + 1) {
                    (true, LOG_BYTES)
                } else {
                    let bytes = random.gamma(FILE_SHAPE, FILE_BYTES).max(1.0) as u32;
                    (false, bytes.next_multiple_of(PAGE_BYTES))
                }
            }
        };
        let mut left = bytes;
        while left > MAX_BYTES {
            self.rest.push_back((is_write, MAX_BYTES));
            left -= MAX_BYTES;
        }
        self.rest.push_back((is_write, left));
        self.rest.pop_front().unwrap_or((is_write, left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_webserver_reads_ten_files_and_writes_its_log() {
        let (mut thread, mut random) = (Thread::new(Work::Webserver), Random::new(1));
        let (mut operations, mut read, mut written, mut longest) = (0_u32, 0_u64, 0_u64, 0);
        while operations < 110_000 || !thread.is_between_operations() {
            operations += u32::from(thread.is_between_operations());
            let (is_write, bytes) = thread.next(&mut random);
            assert!(bytes > 0 && bytes.is_multiple_of(PAGE_BYTES));
            longest = longest.max(bytes);
            *(if is_write { &mut written } else { &mut read }) += u64::from(bytes);
        }
        assert_eq!((written, longest), (10_000 * u64::from(LOG_BYTES), MAX_BYTES));
        let mean = read as f64 / 100_000.0;
        // Rounded up to pages: half a page more.
        assert!((FILE_BYTES * 0.98..FILE_BYTES * 1.12).contains(&mean), "{mean}");
    }
}
