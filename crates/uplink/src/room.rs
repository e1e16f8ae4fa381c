//! Places for frames of unknown size that are given back in the order in which they came.

use std::collections::VecDeque;

use sidecore_linux::Place;

/// Frames begin on cache lines.
const ALIGNMENT: u32 = 64;

/// A range of memory in which each frame takes as much as it needs, once its size is known. With
/// few frames in it, the same memory is used again and again, and stays in the cache.
#[derive(Debug)]
pub(crate) struct Room {
    len_bytes: u32,
    /// The largest frame.
    frame_bytes: u32,
    next: u32,
    /// The frames in the room, oldest first.
    taken: VecDeque<Place>,
}

impl Room {
    /// Room for at most `frames` frames of up to `frame_bytes` in the first `len_bytes` of memory.
    pub fn new(len_bytes: u32, frame_bytes: u32, frames: usize) -> Self {
        Self { len_bytes, frame_bytes, next: 0, taken: VecDeque::with_capacity(frames) }
    }

    /// A place for a frame of any size.
    #[inline]
    pub fn place(&mut self) -> Option<Place> {
        let frame_bytes = self.frame_bytes;
        let is_there = |start: u32, end: u32| {
            start.checked_add(frame_bytes).is_some_and(|behind| behind <= end)
        };
        let start = match self.taken.front() {
            None => 0,
            Some(oldest) if self.next > oldest.start => {
                // From behind the youngest frame to the end, or else in front of the oldest.
                if is_there(self.next, self.len_bytes) {
                    self.next
                } else if is_there(0, oldest.start) {
                    0
                } else {
                    return None;
                }
            }
            Some(oldest) if is_there(self.next, oldest.start) => self.next,
            Some(_) => return None,
        };
        self.next = start;
        Some(Place { start, len_bytes: frame_bytes })
    }

    /// Takes the first bytes of the last [`place`](Self::place) for a frame of this size.
    #[inline]
    pub fn take(&mut self, len_bytes: u32) -> Place {
        let place = Place { start: self.next, len_bytes: len_bytes.min(self.frame_bytes) };
        // At least a byte, so that no two frames begin at one place.
        let end = place.start.saturating_add(place.len_bytes.max(1));
        self.next = end.checked_next_multiple_of(ALIGNMENT).unwrap_or(end);
        self.taken.push_back(place);
        place
    }

    /// Gives the oldest `count` frames back.
    pub fn give_back(&mut self, count: usize) {
        self.taken.drain(..count.min(self.taken.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overlap(one: Place, other: Place) -> bool {
        one.start < other.start + other.len_bytes && other.start < one.start + one.len_bytes
    }

    #[test]
    fn frames_of_any_sizes_never_overlap_and_use_all_of_the_room() {
        let mut room = Room::new(10_000, 1_000, 64);
        let (mut seed, mut refused, mut most) = (7_u32, 0, 0);
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            if seed >> 31 == 0 {
                let Some(free) = room.place() else {
                    refused += 1;
                    room.give_back(1 + (seed >> 8) as usize % 5);
                    continue;
                };
                assert!(free.start + free.len_bytes <= 10_000);
                assert!(room.taken.iter().all(|taken| !overlap(*taken, free)), "{room:?}");
                room.take((seed >> 8) % 1_001);
                most = most.max(room.taken.len());
            } else if seed >> 29 & 3 == 0 {
                room.give_back(1 + (seed >> 8) as usize % 5);
            }
        }
        assert!(refused > 100 && most >= 12, "{refused} refused, at most {most} frames");
        room.give_back(1_000);
        assert_eq!(room.place(), Some(Place { start: 0, len_bytes: 1_000 }));
    }

    #[test]
    fn a_place_that_is_not_taken_stays_free() {
        let mut room = Room::new(4_096, 1_000, 8);
        let first = room.place().unwrap();
        assert_eq!(room.place(), Some(first));
        room.take(10);
        assert_eq!(room.place().unwrap().start, 64);
    }
}
