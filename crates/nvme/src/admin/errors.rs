//! The Error Information log page (NVMe base 2.0, 5.16.1.2).

use std::collections::VecDeque;

use crate::bytes::Bytes;
use crate::{Command, Status};

/// How many entries there are, 0's based (figure 275, ELPE).
pub(crate) const ERROR_LOG_ENTRIES: u8 = 63;

const ENTRY_BYTES: usize = 64;

/// The last errors, the newest first. They outlive controller resets.
#[derive(Debug, Default)]
pub(crate) struct ErrorLog {
    entries: VecDeque<Entry>,
    count: u64,
}

#[derive(Debug)]
struct Entry {
    count: u64,
    submission_queue: u16,
    command_id: u16,
    status: u16,
    nsid: u32,
    opcode: u8,
}

/// What is written where an error belongs to no command, and where it lies in no certain byte of one.
const NONE: u16 = 0xFFFF;

impl ErrorLog {
    /// A command of the admin queue failed.
    pub(crate) fn command(&mut self, command: &Command, status: Status) {
        self.put(0, command.id(), status.field(), command.nsid(), command.opcode());
    }

    /// Something that is no command's went wrong.
    pub(crate) fn controller(&mut self, status: Status) {
        self.put(NONE, NONE, status.field(), 0, 0);
    }

    fn put(&mut self, submission_queue: u16, command_id: u16, status: u16, nsid: u32, opcode: u8) {
        self.count = self.count.wrapping_add(1).max(1);
        self.entries.truncate(ERROR_LOG_ENTRIES.into());
        self.entries.push_front(Entry { count: self.count, submission_queue, command_id, status, nsid, opcode });
    }

    /// How many errors there have been.
    pub(crate) const fn count(&self) -> u64 {
        self.count
    }

    /// The log page (figure 205), entries that there are not being zeros.
    pub(crate) fn page(&self) -> Vec<u8> {
        let mut page = Bytes::new(ENTRY_BYTES.saturating_mul(usize::from(ERROR_LOG_ENTRIES).saturating_add(1)));
        for (index, entry) in self.entries.iter().enumerate() {
            let at = |offset: usize| index.saturating_mul(ENTRY_BYTES).saturating_add(offset);
            page.put(at(0), &entry.count.to_le_bytes());
            page.put(at(8), &entry.submission_queue.to_le_bytes());
            page.put(at(10), &entry.command_id.to_le_bytes());
            page.put(at(12), &entry.status.to_le_bytes());
            page.put(at(14), &NONE.to_le_bytes());
            page.put(at(24), &entry.nsid.to_le_bytes());
            // TRTYPE is zero: the memory-based transport has none.
            page.put(at(31), &[entry.opcode]);
        }
        page.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_comes_first_and_the_oldest_is_forgotten() {
        let mut log = ErrorLog::default();
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
        assert_eq!(&page[64 + 10..64 + 14], &[99, 0, 0x04, 0x80]);
        assert_eq!(page[64 + 24], 7);
        assert_eq!(&page[63 * 64..63 * 64 + 8], &38_u64.to_le_bytes());
    }
}
