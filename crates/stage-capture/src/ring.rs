//! A ring of records for one producer and one consumer, of a fixed size, without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The shared part. A record is the number of its bytes, its header, and its bytes in words. The
/// words of the header belong to the producer.
struct Ring {
    words: Box<[AtomicU64]>,
    /// Words written since the beginning, by the producer.
    written: AtomicU64,
    /// Words read since the beginning, by the consumer.
    read: AtomicU64,
    is_closed: AtomicBool,
}

impl Ring {
    fn len_words(&self) -> u64 {
        self.words.len() as u64
    }

    /// The word at a position, which is counted from the beginning.
    fn word(&self, at: u64) -> Option<&AtomicU64> {
        let at = at.checked_rem(self.len_words())?;
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
    let ring = Arc::new(Ring {
        words: std::iter::repeat_with(AtomicU64::default).take(len_words).collect(),
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
        let end = self.written.saturating_add(record_words(HEADER, bytes.len()));
        if end.saturating_sub(self.read) > self.ring.len_words() {
            // Acquire: the consumer has read the words that are overwritten.
            self.read = self.ring.read.load(Ordering::Acquire);
            if end.saturating_sub(self.read) > self.ring.len_words() {
                return false;
            }
        }
        let (whole, rest) = bytes.as_chunks::<8>();
        let mut last = [0; 8];
        last.get_mut(..rest.len()).unwrap_or_default().copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(last);
        let words = whole.iter().copied().chain(last).map(u64::from_le_bytes);
        let words = [bytes.len() as u64].into_iter().chain(header).chain(words);
        for (at, word) in (self.written..).zip(words) {
            if let Some(place) = self.ring.word(at) {
                place.store(word, Ordering::Relaxed);
            }
        }
        self.written = end;
        // Release: the consumer sees the words.
        self.ring.written.store(end, Ordering::Release);
        true
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
