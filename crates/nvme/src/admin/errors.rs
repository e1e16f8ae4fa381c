//! The Error Information log page (NVMe base 2.0, 5.16.1.2).

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;
use crate::{Command, Status};

/// How many entries there are, 0's based (figure 275, ELPE).
pub(crate) const ERROR_LOG_ENTRIES: u8 = 63;

const ENTRY_BYTES: usize = 64;

/// Log Page Version: an entry has the command's opcode, and its command set, which is NVM.
const VERSION: u8 = 1;

/// The last errors of a controller, the newest first. They outlive controller resets.
///
/// The controller and its I/O queues write the log. I/O queues never wait for its lock: an error
/// that finds the log locked is not logged, and its completion does not set More.
#[derive(Debug)]
pub struct ErrorLog(Mutex<Log>);

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Log {
    /// Allocated once for the most entries, so that an error allocates nothing.
    entries: VecDeque<Entry>,
    count: u64,
}

/// A command that failed, or the fields of an entry that belongs to no command.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Failed {
    pub submission_queue: u16,
    pub command_id: u16,
    pub opcode: u8,
    pub nsid: u32,
    /// The first block that failed.
    pub lba: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    count: u64,
    failed: Failed,
    status: u16,
}

/// The value of fields whose error belongs to no command, or to no known byte of a command.
const NONE: u16 = 0xFFFF;

impl ErrorLog {
    pub(crate) fn new() -> Arc<Self> {
        let room = usize::from(ERROR_LOG_ENTRIES).saturating_add(1);
        Arc::new(Self(Mutex::new(Log { entries: VecDeque::with_capacity(room), count: 0 })))
    }

    /// A command of the admin queue failed.
    pub(crate) fn command(&self, command: &Command, status: Status) {
        let (command_id, opcode, nsid) = (command.id(), command.opcode(), command.nsid());
        let failed = Failed { submission_queue: 0, command_id, opcode, nsid, lba: 0 };
        self.with(|log| log.put(failed, status.more()));
    }

    /// Logs an error that belongs to no command.
    pub(crate) fn controller(&self, status: Status) {
        let failed =
            Failed { submission_queue: NONE, command_id: NONE, opcode: 0, nsid: 0, lba: 0 };
        self.with(|log| log.put(failed, status));
    }

    /// Logs a failed command of an I/O queue without waiting. Returns the status to complete with,
    /// whose More bit says whether there is an entry.
    pub(crate) fn io_command(&self, failed: Failed, status: Status) -> Status {
        let mut log = match self.0.try_lock() {
            Ok(log) => log,
            Err(TryLockError::Poisoned(log)) => log.into_inner(),
            Err(TryLockError::WouldBlock) => return status,
        };
        let status = status.more();
        log.put(failed, status);
        status
    }

    /// A copy of the whole log.
    pub(crate) fn contents(&self) -> Log {
        self.with(|log| log.clone())
    }

    /// Replaces the log by the one of the process before.
    pub(crate) fn take_over(&self, contents: Log) {
        self.with(|log| {
            log.count = contents.count;
            log.entries.clear();
            log.entries.extend(
                contents.entries.into_iter().take(usize::from(ERROR_LOG_ENTRIES).saturating_add(1)),
            );
        });
    }

    /// How many errors there have been.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.with(|log| log.count)
    }

    /// The log page (figure 205). Unused entries are zeros.
    #[must_use]
    pub fn page(&self) -> Vec<u8> {
        let mut page = Bytes::new(
            ENTRY_BYTES.saturating_mul(usize::from(ERROR_LOG_ENTRIES).saturating_add(1)),
        );
        self.with(|log| {
            for (index, entry) in log.entries.iter().enumerate() {
                let at = |offset: usize| index.saturating_mul(ENTRY_BYTES).saturating_add(offset);
                page.put(at(0), &entry.count.to_le_bytes());
                page.put(at(8), &entry.failed.submission_queue.to_le_bytes());
                page.put(at(10), &entry.failed.command_id.to_le_bytes());
                page.put(at(12), &entry.status.to_le_bytes());
                page.put(at(14), &NONE.to_le_bytes());
                page.put(at(16), &entry.failed.lba.to_le_bytes());
                page.put(at(24), &entry.failed.nsid.to_le_bytes());
                // TRTYPE is zero: the memory-based transport has none.
                page.put(at(31), &[entry.failed.opcode]);
                page.put(at(63), &[VERSION]);
            }
        });
        page.into()
    }

    /// Recovers from poisoning: nothing panics between two changes that belong together.
    fn with<T>(&self, act: impl FnOnce(&mut Log) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Log {
    fn put(&mut self, failed: Failed, status: Status) {
        self.count = self.count.wrapping_add(1).max(1);
        self.entries.truncate(ERROR_LOG_ENTRIES.into());
        self.entries.push_front(Entry { count: self.count, failed, status: status.field() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_comes_first_and_the_oldest_is_forgotten() {
        let log = ErrorLog::new();
        assert!(log.page().iter().all(|byte| *byte == 0));
        for id in 0..100 {
            log.command(&Command::build(0x06, id, 7), Status::INVALID_FIELD);
        }
        log.controller(Status::INVALID_FIELD);
        let page = log.page();
        assert_eq!(page.len(), 4096);
        assert_eq!(log.count(), 101);
        assert_eq!((&page[..8], &page[8..12]), (&101_u64.to_le_bytes()[..], &[0xFF; 4][..]));
        assert_eq!(&page[64..72], &100_u64.to_le_bytes());
        assert_eq!(&page[64 + 10..64 + 14], &[99, 0, 0x04, 0xC0]);
        assert_eq!(page[64 + 24], 7);
        assert_eq!((page[64 + 31], page[64 + 63]), (0x06, 1));
        assert_eq!(&page[63 * 64..63 * 64 + 8], &38_u64.to_le_bytes());
    }

    #[test]
    fn a_queue_does_not_wait_for_the_log_and_says_whether_there_is_more() {
        let log = ErrorLog::new();
        let failed =
            Failed { submission_queue: 3, command_id: 7, opcode: 2, nsid: 1, lba: 1 << 40 };
        assert_eq!(log.io_command(failed, Status::WRITE_FAULT), Status::WRITE_FAULT.more());
        let held = log.0.lock().unwrap();
        assert_eq!(
            log.io_command(failed, Status::WRITE_FAULT),
            Status::WRITE_FAULT,
            "the lock is taken"
        );
        drop(held);
        let page = log.page();
        assert_eq!(
            (&page[8..14], &page[16..24]),
            (&[3, 0, 7, 0, 0, 0x45][..], &(1_u64 << 40).to_le_bytes()[..])
        );
        assert_eq!((log.count(), &page[64..]), (1, &[0; 4096 - 64][..]));
    }
}
