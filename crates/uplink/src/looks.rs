//! When to look for frames whose arrival only a system call shows.

use sidecore_reactor::GLANCE_INTERVAL;
use sidecore_units::Nanos;

/// The time between the first two looks that find nothing.
const SHORTEST: Nanos = Nanos(1_000);

/// The times of looks at a descriptor. A look that finds nothing costs as much as four frames from
/// guest to guest: after each such look, the time to the next one doubles, up to the interval at
/// which a sidecore looks at the descriptors of sleeping neighbours.
#[derive(Debug)]
pub(crate) struct Looks {
    next: Nanos,
    pause: Nanos,
}

impl Looks {
    pub const fn new() -> Self {
        Self { next: Nanos::ZERO, pause: SHORTEST }
    }

    /// Whether it is time to look.
    #[inline]
    pub fn is_due(&self, now: Nanos) -> bool {
        now >= self.next
    }

    /// The next look comes at once: the kernel answers most frames before it returns from taking
    /// them.
    #[inline]
    pub fn soon(&mut self) {
        (self.next, self.pause) = (Nanos::ZERO, SHORTEST);
    }

    /// A look found nothing, or everything there was.
    #[inline]
    pub fn emptied(&mut self, now: Nanos, had_frames: bool) {
        self.pause = if had_frames {
            SHORTEST
        } else {
            Nanos(self.pause.0.saturating_mul(2).min(GLANCE_INTERVAL.0))
        };
        self.next = now.after(self.pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_become_rare_without_frames_and_frequent_with_them() {
        let mut looks = Looks::new();
        let mut now = Nanos(1_000_000);
        let mut pauses = Vec::new();
        for _ in 0..7 {
            assert!(looks.is_due(now));
            looks.emptied(now, false);
            let start = now;
            while !looks.is_due(now) {
                now = now.after(Nanos(1_000));
            }
            pauses.push(now.since(start).0 / 1_000);
        }
        assert_eq!(pauses, [2, 4, 8, 16, 20, 20, 20]);
        looks.emptied(now, true);
        assert!(!looks.is_due(now) && looks.is_due(now.after(SHORTEST)));
        looks.emptied(now, false);
        looks.soon();
        assert!(looks.is_due(now));
    }
}
