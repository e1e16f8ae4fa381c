//! A ring of records for one producer and one consumer, of a fixed size, without a lock: the way of
//! facts about requests and frames from a sidecore to a thread that writes them to a file.
//!
//! A record that finds no room is not taken, so that a slow reader holds no sidecore back. The
//! words are atomics, so that the crate needs no unsafe code.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The shared part. A record is the number of its bytes, its header, and its bytes in words. The
/// words of the header belong to the producer.
struct Ring {
    words: Box<[AtomicU64]>,
    /// The words that are in use at most.
    room_words: u64,
    /// Words written since the beginning, by the producer.
    written: AtomicU64,
    /// Words read since the beginning, by the consumer.
    read: AtomicU64,
    is_closed: AtomicBool,
}

impl Ring {
    /// The word at a position, which is counted from the beginning.
    #[inline]
    fn word(&self, at: u64) -> Option<&AtomicU64> {
        // Their number is a power of two.
        let at = at & (self.words.len() as u64).wrapping_sub(1);
        self.words.get(usize::try_from(at).ok()?)
    }
}

/// The side that writes. Its drop closes the ring.
pub struct Producer<const HEADER: usize> {
    ring: Arc<Ring>,
    written: u64,
    /// `Ring::read` when the producer last looked.
    read: u64,
}

/// The side that reads.
pub struct Consumer<const HEADER: usize> {
    ring: Arc<Ring>,
    read: u64,
}

/// Makes a ring of this many words of 8 bytes, for records with headers of `HEADER` words.
#[must_use]
pub fn ring<const HEADER: usize>(len_words: usize) -> (Producer<HEADER>, Consumer<HEADER>) {
    let places = len_words.checked_next_power_of_two().unwrap_or(1);
    let ring = Arc::new(Ring {
        words: std::iter::repeat_with(AtomicU64::default).take(places).collect(),
        room_words: places.min(len_words) as u64,
        written: AtomicU64::new(0),
        read: AtomicU64::new(0),
        is_closed: AtomicBool::new(false),
    });
    (Producer { ring: Arc::clone(&ring), written: 0, read: 0 }, Consumer { ring, read: 0 })
}

/// The words of a record with so many words of header and this many bytes.
const fn record_words(header_words: usize, len_bytes: usize) -> u64 {
    (len_bytes.div_ceil(8) as u64).saturating_add(1).saturating_add(header_words as u64)
}

impl<const HEADER: usize> Producer<HEADER> {
    /// Writes a record. False if there is no room for it.
    pub fn push(&mut self, header: [u64; HEADER], bytes: &[u8]) -> bool {
        let Some(mut record) = self.begin(bytes.len()) else { return false };
        record.write(bytes);
        record.commit(header);
        true
    }

    /// Begins a record with so many bytes, which may come in parts. `None` if there is no room for
    /// it.
    #[inline]
    pub fn begin(&mut self, len_bytes: usize) -> Option<Pending<'_, HEADER>> {
        let end = self.written.saturating_add(record_words(HEADER, len_bytes));
        if end.saturating_sub(self.read) > self.ring.room_words {
            // Acquire: the consumer has read the words that are overwritten.
            self.read = self.ring.read.load(Ordering::Acquire);
            if end.saturating_sub(self.read) > self.ring.room_words {
                return None;
            }
        }
        let at = self.written.saturating_add(record_words(HEADER, 0));
        Some(Pending { producer: self, len_bytes, at, end })
    }
}

/// A record that has been begun. Without [`commit`](Self::commit) there is none.
pub struct Pending<'a, const HEADER: usize> {
    producer: &'a mut Producer<HEADER>,
    len_bytes: usize,
    /// The place of the next word.
    at: u64,
    end: u64,
}

impl<const HEADER: usize> Pending<'_, HEADER> {
    /// Writes the next bytes. Each part but the last has a multiple of eight; bytes beyond the
    /// length of the record are left out.
    pub fn write(&mut self, bytes: &[u8]) {
        let (whole, rest) = bytes.as_chunks::<8>();
        let mut last = [0; 8];
        last.get_mut(..rest.len()).unwrap_or_default().copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(last);
        let words = whole.iter().copied().chain(last).map(u64::from_le_bytes);
        for (at, word) in (self.at..self.end).zip(words) {
            self.put(at, word);
            self.at = at.saturating_add(1);
        }
    }

    /// Shows the record to the consumer. Bytes that were not written are of no meaning.
    #[inline]
    pub fn commit(self, header: [u64; HEADER]) {
        let words = [self.len_bytes as u64].into_iter().chain(header);
        for (at, word) in (self.producer.written..).zip(words) {
            self.put(at, word);
        }
        self.producer.written = self.end;
        // Release: the consumer sees the words.
        self.producer.ring.written.store(self.end, Ordering::Release);
    }

    #[inline]
    fn put(&self, at: u64, word: u64) {
        if let Some(place) = self.producer.ring.word(at) {
            place.store(word, Ordering::Relaxed);
        }
    }
}

impl<const HEADER: usize> Drop for Producer<HEADER> {
    fn drop(&mut self) {
        self.ring.is_closed.store(true, Ordering::Release);
    }
}

impl<const HEADER: usize> Consumer<HEADER> {
    /// Reads a record: returns its header, and replaces `bytes` by its bytes.
    pub fn pop(&mut self, bytes: &mut Vec<u8>) -> Option<[u64; HEADER]> {
        if self.read == self.ring.written.load(Ordering::Acquire) {
            return None;
        }
        let word = |at: u64| {
            let at = self.read.saturating_add(at);
            self.ring.word(at).map_or(0, |word| word.load(Ordering::Relaxed))
        };
        let len_bytes = usize::try_from(word(0)).unwrap_or(0);
        let header = std::array::from_fn(|at| word((at as u64).saturating_add(1)));
        let end = record_words(HEADER, len_bytes);
        bytes.clear();
        for at in record_words(HEADER, 0)..end {
            bytes.extend_from_slice(&word(at).to_le_bytes());
        }
        bytes.truncate(len_bytes);
        self.read = self.read.saturating_add(end);
        self.ring.read.store(self.read, Ordering::Release);
        Some(header)
    }

    /// Whether all records that were there have been read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.read == self.ring.written.load(Ordering::Acquire)
    }

    /// Whether the producer is gone: no record comes after those that are there by now.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.ring.is_closed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_out_as_they_went_in_around_the_end_of_the_ring() {
        let (mut producer, mut consumer) = ring(64);
        let mut bytes = vec![7; 9];
        assert_eq!(consumer.pop(&mut bytes), None);
        for number in 0..200_u64 {
            let sent = vec![number as u8; number as usize % 41];
            assert!(producer.push([number, !number, 3], &sent));
            assert_eq!(consumer.pop(&mut bytes), Some([number, !number, 3]));
            assert_eq!(bytes, sent);
        }
        assert_eq!(consumer.pop(&mut bytes), None);
    }

    #[test]
    fn a_full_ring_takes_nothing_until_the_consumer_has_read() {
        let (mut producer, mut consumer) = ring(32);
        // 6 words each: five fit, and 2 words are left.
        for number in 0..5 {
            assert!(producer.push([number, 0, 0], &[1; 16]));
        }
        for _ in 0..3 {
            assert!(!producer.push([9, 0, 0], &[1; 16]));
            assert!(!producer.push([9, 0, 0], &[]), "4 words");
        }
        let mut bytes = Vec::new();
        assert_eq!(consumer.pop(&mut bytes), Some([0, 0, 0]));
        assert!(!producer.push([9, 0, 0], &[1; 40]), "9 words for 8");
        assert!(producer.push([5, 0, 0], &[2; 32]), "8 words for 8");
        for number in 1..6 {
            assert_eq!(consumer.pop(&mut bytes), Some([number, 0, 0]));
        }
        assert_eq!((bytes.as_slice(), consumer.pop(&mut Vec::new())), (&[2; 32][..], None));
        assert!(!producer.push([9, 0, 0], &[0; 240]), "larger than the ring");
        assert!(!consumer.is_closed());
        drop(producer);
        assert!(consumer.is_closed());
    }

    #[test]
    fn a_record_comes_in_parts_and_counts_when_it_is_committed() {
        let (mut producer, mut consumer) = ring(20);
        let mut bytes = Vec::new();
        for number in 0..50_u8 {
            let mut dropped = producer.begin(64).unwrap();
            dropped.write(&[0xee; 64]);
            assert_eq!(consumer.pop(&mut bytes), None);
            let mut record = producer.begin(19).unwrap();
            record.write(&[number; 8]);
            record.write(&[1; 8]);
            record.write(&[2; 3]);
            record.write(&[3; 80]);
            record.commit([number.into(), 7]);
            assert_eq!(consumer.pop(&mut bytes), Some([number.into(), 7]));
            assert_eq!(
                (&bytes[..8], &bytes[8..16], &bytes[16..]),
                (&[number; 8][..], &[1; 8][..], &[2; 3][..])
            );
        }
        assert!(producer.begin(8 * 17).is_some(), "20 words, of which 3 are no bytes");
        assert!(producer.begin(8 * 17 + 1).is_none());
    }

    #[test]
    fn another_thread_reads_all_that_had_room_in_order() {
        let (mut producer, mut consumer) = ring(256);
        let writer = std::thread::spawn(move || {
            let mut written = Vec::new();
            for number in 0..200_000_u64 {
                let bytes = number.to_le_bytes().repeat(number as usize % 5);
                if producer.push([number, 0, 0], &bytes) {
                    written.push(number);
                }
            }
            written
        });
        let (mut bytes, mut read) = (Vec::new(), Vec::new());
        loop {
            let is_closed = consumer.is_closed();
            while let Some([number, ..]) = consumer.pop(&mut bytes) {
                assert_eq!(bytes, number.to_le_bytes().repeat(number as usize % 5));
                read.push(number);
            }
            if is_closed {
                break;
            }
        }
        assert_eq!(writer.join().unwrap(), read);
        assert!(read.len() > 10);
    }
}
