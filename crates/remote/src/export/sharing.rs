//! The part of a poll that each session has while several of them send requests.

use sidecore_units::Nanos;

/// Requests of a session say for so long how it sends.
const MEMORY: Nanos = Nanos::from_millis(10);
/// A client that has so many requests in flight does not wait for each of them.
const BUSY_REQUESTS: usize = 3;
/// Bytes for each frame that the link sends at the cost of one: its system calls, if it needs some,
/// are for as many.
const FRAME_BYTES: u64 = 1024;
/// The fewest frames that a session may send.
const FRAMES_MIN: usize = 8;
/// The least bytes that a request counts as.
const REQUEST_BYTES: u64 = 1024;

/// Bounds the work of a poll while one of several sessions has few requests in flight.
///
/// The answers of a poll leave at its end, and a request that arrives meanwhile waits for the next
/// one: a long poll for a session that floods is the latency of all others. Without a session that
/// waits for each of its requests polls are long: that costs less for each request.
#[derive(Debug)]
pub(crate) struct Sharing {
    share_bytes: u64,
    /// The session of the newest request.
    newest: Option<u16>,
    /// Until then several sessions count as sending.
    shared_until: Nanos,
    /// Until then one of them counts as having few requests in flight.
    little_until: Nanos,
    /// Until then a session, by its place, counts as having many.
    busy_until: Vec<Nanos>,
}

impl Sharing {
    /// For a link that sends so many frames together.
    pub fn new(batch_frames: usize) -> Self {
        let frames = u64::try_from(batch_frames.max(FRAMES_MIN)).unwrap_or(u64::MAX);
        let share_bytes = frames.saturating_mul(FRAME_BYTES);
        Self {
            share_bytes,
            newest: None,
            shared_until: Nanos::ZERO,
            little_until: Nanos::ZERO,
            busy_until: Vec::new(),
        }
    }

    /// Makes room for the session at a place.
    pub fn add(&mut self, place: u16) {
        let count = usize::from(place).saturating_add(1).max(self.busy_until.len());
        self.busy_until.resize(count, Nanos::ZERO);
    }

    /// A session, which has so many requests in flight, has sent one of them.
    #[inline]
    pub fn request_of(&mut self, now: Nanos, session: u16, in_flight: usize) {
        if let Some(busy_until) = self.busy_until.get_mut(usize::from(session)) {
            if in_flight >= BUSY_REQUESTS {
                *busy_until = now.after(MEMORY);
            } else if now >= *busy_until {
                self.little_until = now.after(MEMORY);
            }
        }
        if self.newest.replace(session) != Some(session) {
            self.shared_until = now.after(MEMORY);
        }
    }

    /// Whether one of several sessions has few requests in flight.
    #[inline]
    pub fn is_shared(&self, now: Nanos) -> bool {
        now < self.shared_until && now < self.little_until
    }

    /// Bytes that a session may send in this poll, but for its last frame's.
    #[inline]
    pub fn share_bytes(&self, now: Nanos) -> usize {
        let share_bytes = usize::try_from(self.share_bytes).unwrap_or(usize::MAX);
        if self.is_shared(now) { share_bytes } else { usize::MAX }
    }

    /// Bytes of requests that are executed in this poll, if so many sessions wait; `None` if there
    /// is no such limit.
    #[inline]
    pub fn poll_bytes(&self, now: Nanos, sessions: usize) -> Option<u64> {
        let sessions = u64::try_from(sessions).unwrap_or(u64::MAX);
        self.is_shared(now).then(|| self.share_bytes.saturating_mul(sessions))
    }

    /// Bytes that a request counts as: a small one takes time, too.
    #[inline]
    pub const fn cost(len_bytes: u64) -> u64 {
        if len_bytes < REQUEST_BYTES { REQUEST_BYTES } else { len_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(micros: u64) -> Nanos {
        Nanos::from_millis(1).after(Nanos::from_micros(micros))
    }

    #[test]
    fn polls_are_short_while_one_of_several_sessions_has_few_requests() {
        let mut sharing = Sharing::new(4);
        (0..8).for_each(|place| sharing.add(place));
        sharing.request_of(after(0), 0, 1);
        sharing.request_of(after(1), 1, 100);
        assert!(sharing.is_shared(after(2)));
        assert_eq!(
            (sharing.share_bytes(after(2)), sharing.poll_bytes(after(2), 2)),
            (8192, Some(16_384))
        );
        // The quiet one is gone.
        sharing.request_of(after(20_000), 1, 100);
        assert!(!sharing.is_shared(after(20_000)));
        assert_eq!(sharing.poll_bytes(after(20_000), 2), None);
        // Both have many.
        sharing.request_of(after(20_001), 0, 3);
        sharing.request_of(after(20_002), 0, 1);
        sharing.request_of(after(20_003), 1, 1);
        assert!(!sharing.is_shared(after(20_004)));
    }

    #[test]
    fn many_sessions_have_long_polls_unless_one_of_them_has_few_requests() {
        let mut sharing = Sharing::new(4);
        (0..16).for_each(|place| sharing.add(place));
        for round in 0..200_u64 {
            // Each sends eight requests, of which the first ones are seen alone.
            for place in 0..16 {
                (1..=8).for_each(|count| sharing.request_of(after(round * 100), place, count));
            }
            assert_eq!(sharing.is_shared(after(round * 100 + 99)), round < 100, "{round}");
        }
        // One has become quiet.
        sharing.request_of(after(40_000), 1, 8);
        sharing.request_of(after(40_001), 9, 1);
        assert!(sharing.is_shared(after(40_002)));
    }
}
