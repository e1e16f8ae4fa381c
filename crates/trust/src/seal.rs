//! The seal of a session.

use std::fmt;

use sidecore_vrio::port::Seal;
use sidecore_vrio::wire::PHASE_AT;

use crate::crypto::TAG_BYTES;
use crate::schedule::{FrameKey, Sender};

/// Frames that one key seals, at most. AES-GCM stays far from its limits with as many frames of the
/// largest size (RFC 8446, 5.5, for TLS: 2^24.5 records of 16 KiB).
pub const FRAMES_PER_KEY: u64 = 1 << 22;

/// The counter of a frame that is this far behind the first one of the newest key is older than any
/// that a session still takes, so the key before that is dropped.
const LATE_FRAMES: u64 = 1024;

/// Bit 0 of a head's phase: it changes with each key.
const PHASE_BIT: u8 = 1;

/// Seals the frames of one session and opens those of its peer.
#[derive(Debug)]
pub enum SessionSeal {
    /// Encryption is off for this client.
    Plain,
    /// AES-256-GCM.
    Aead(Box<Aead>),
}

impl Seal for SessionSeal {
    #[inline]
    fn tag_bytes(&self) -> usize {
        match self {
            Self::Plain => 0,
            Self::Aead(_) => TAG_BYTES,
        }
    }

    #[inline]
    fn phase(&mut self, counter: u64) -> u8 {
        match self {
            Self::Plain => 0,
            Self::Aead(aead) => aead.sealing.phase(counter),
        }
    }

    #[inline]
    fn seal(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]) {
        if let Self::Aead(aead) = self {
            aead.sealing.seal(counter, head, sealed);
        }
    }

    #[inline]
    fn open(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]) -> bool {
        match self {
            Self::Plain => true,
            Self::Aead(aead) => aead.opening.open(counter, head, sealed),
        }
    }
}

/// The keys of both directions.
pub struct Aead {
    sealing: Sealing,
    opening: Opening,
}

impl Aead {
    /// The seal of `own`'s end, from the first secrets of both directions.
    pub(crate) fn new(
        own: Sender,
        (client, host): (&[u8; 32], &[u8; 32]),
        frames_per_key: u64,
    ) -> Option<Self> {
        let (sealing, opening) = match own {
            Sender::Client => (client, host),
            Sender::Host => (host, client),
        };
        Some(Self {
            sealing: Sealing {
                key: Some(FrameKey::new(sealing)?),
                phase: 0,
                first: 1,
                last: 0,
                frames_per_key: frames_per_key.clamp(1, FRAMES_PER_KEY),
            },
            opening: Opening::new(FrameKey::new(opening)?),
        })
    }
}

impl fmt::Debug for Aead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Aead")
            .field("sealed_up_to", &self.sealing.last)
            .field("sealing_phase", &self.sealing.phase)
            .field("opening_phase", &self.opening.phase)
            .finish_non_exhaustive()
    }
}

/// The keys of the own frames.
struct Sealing {
    /// `None` seals nothing more.
    key: Option<FrameKey>,
    phase: u8,
    /// The first counter of the key.
    first: u64,
    /// The last counter that was sealed: none is used twice, whatever the caller does.
    last: u64,
    frames_per_key: u64,
}

impl Sealing {
    #[inline]
    fn phase(&mut self, counter: u64) -> u8 {
        if counter.saturating_sub(self.first) >= self.frames_per_key {
            self.ratchet(counter);
        }
        self.phase
    }

    #[cold]
    fn ratchet(&mut self, counter: u64) {
        self.key = self.key.as_ref().and_then(FrameKey::next);
        self.phase ^= PHASE_BIT;
        self.first = counter;
    }

    /// A frame that must not be sealed becomes zeros, which no peer opens.
    #[inline]
    fn seal(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]) {
        match &self.key {
            Some(key) if counter > self.last => {
                self.last = counter;
                key.seal(counter, head, sealed);
            }
            _ => sealed.fill(0),
        }
    }
}

/// The keys of the peer's frames. Frames arrive in any order, so the key before the newest one and
/// the one behind it are at hand, too: a forged frame costs as much as any other.
struct Opening {
    before: Option<FrameKey>,
    key: FrameKey,
    next: Option<FrameKey>,
    phase: u8,
    /// The lowest counter that the newest key has opened; 0 for the session's first key.
    first: u64,
}

impl Opening {
    fn new(key: FrameKey) -> Self {
        let next = key.next();
        Self { before: None, key, next, phase: 0, first: 0 }
    }

    #[inline]
    fn open(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]) -> bool {
        let Some(phase) = head.get(PHASE_AT) else { return false };
        if (phase & PHASE_BIT) != self.phase {
            return self.open_around(counter, head, sealed);
        }
        let is_sound = self.key.open(counter, head, sealed);
        if is_sound {
            self.first = self.first.min(counter);
            if self.before.is_some() && counter.saturating_sub(self.first) > LATE_FRAMES {
                self.before = None;
            }
        }
        is_sound
    }

    /// Opens a frame of another key: of the one before if it is older than all frames of the newest
    /// key, else of the next one, which it then makes the newest.
    #[cold]
    fn open_around(&mut self, counter: u64, head: &[u8], sealed: &mut [u8]) -> bool {
        if counter < self.first {
            return self.before.as_ref().is_some_and(|key| key.open(counter, head, sealed));
        }
        match self.next.take() {
            Some(next) if next.open(counter, head, sealed) => {
                let following = next.next();
                self.before = Some(std::mem::replace(&mut self.key, next));
                self.next = following;
                self.phase ^= PHASE_BIT;
                self.first = counter;
                true
            }
            next => {
                self.next = next;
                false
            }
        }
    }
}

#[cfg(test)]
#[path = "seal/tests.rs"]
mod tests;
