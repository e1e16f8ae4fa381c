//! When a device of an IOhost that has failed as a leg is attached again.

use std::time::{Duration, Instant};

use sidecore_mirror::LegState;

/// The time after which a device of an IOhost that has failed is tried again, though its IOhost was
/// not away: the reason may have gone. Each further time is twice as long, as each copies all that
/// was missed: a disk that fails now and then is not copied to time and again.
const UNSEEN: Duration = Duration::from_secs(30);
/// The longest of these times.
const LONGEST: Duration = Duration::from_secs(3600);

/// A leg's failures since it was in sync.
#[derive(Debug)]
pub(super) struct Comeback {
    /// The number of its IOhost's absences, at the last look.
    absences: u64,
    /// The same when the leg was tried last, or was in sync. A larger number now says that its
    /// IOhost was away: then nothing is wrong with the disk.
    known: Option<u64>,
    /// `None` while it is used.
    failed_at: Option<Instant>,
    /// The time until it is tried again.
    pause: Duration,
}

impl Comeback {
    /// A leg whose failures were not seen: its IOhost may have been away.
    pub(super) const fn of_unseen() -> Self {
        Self { absences: 0, known: None, failed_at: None, pause: UNSEEN }
    }

    fn was_away(&self) -> bool {
        self.known != Some(self.absences)
    }

    /// Notes the state of the leg, and its IOhost: whether that is there, and the number of its
    /// absences until then. True if the leg is to be attached.
    pub(super) fn look(
        &mut self,
        state: Option<&LegState>,
        (is_there, absences): (bool, u64),
        now: Instant,
    ) -> bool {
        self.absences = absences;
        if state != Some(&LegState::Failed) {
            self.failed_at = None;
        }
        // A leg in sync may be about to fail for an absence that goes on.
        if !is_there {
            return false;
        }
        match state {
            Some(LegState::InSync) => (self.known, self.pause) = (Some(absences), UNSEEN),
            Some(LegState::Failed) => {
                let failed_at = *self.failed_at.get_or_insert(now);
                return self.was_away() || now.duration_since(failed_at) > self.pause;
            }
            _ => {}
        }
        false
    }

    /// Notes that the leg was attached, or refused for good. If it fails again before it is in
    /// sync, its disk is the reason, unless its IOhost has been away since the last look.
    pub(super) fn was_tried(&mut self) {
        if self.failed_at.is_some() && !self.was_away() {
            self.pause = self.pause.saturating_mul(2).min(LONGEST);
        }
        (self.known, self.failed_at) = (Some(self.absences), None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A leg that is copied to and fails again, `times` times. Returns the seconds until each try.
    fn pauses(leg: &mut Comeback, absences: u64, now: &mut Instant, times: usize) -> Vec<u64> {
        let there = (true, absences);
        let mut pauses = Vec::new();
        while pauses.len() < times {
            assert!(!leg.look(Some(&LegState::Copying), there, *now));
            let begin = *now;
            while !leg.look(Some(&LegState::Failed), there, *now) {
                *now += SECOND;
            }
            // A leg that is not tried at once stays due, and has not used a try up.
            assert!(leg.look(Some(&LegState::Failed), there, *now));
            pauses.push((*now - begin).as_secs());
            leg.was_tried();
        }
        pauses
    }

    #[test]
    fn a_device_that_fails_when_it_is_copied_to_is_tried_less_and_less_often() {
        let (mut leg, mut now) = (Comeback::of_unseen(), Instant::now());
        assert!(!leg.look(Some(&LegState::InSync), (true, 1), now));
        let found = pauses(&mut leg, 1, &mut now, 9);
        assert_eq!(found, [31, 61, 121, 241, 481, 961, 1921, 3601, 3601]);
        assert!(!leg.look(Some(&LegState::InSync), (true, 1), now));
        assert_eq!(pauses(&mut leg, 1, &mut now, 2), [31, 61], "it was in sync");
    }

    #[test]
    fn a_device_whose_iohost_was_away_is_tried_at_once_and_only_once() {
        let (mut leg, mut now) = (Comeback::of_unseen(), Instant::now());
        assert_eq!(pauses(&mut leg, 1, &mut now, 3), [0, 31, 61]);
        assert!(!leg.look(Some(&LegState::Failed), (false, 2), now), "it is away");
        assert_eq!(pauses(&mut leg, 2, &mut now, 2), [0, 121], "the disk is no better for that");
        // Its IOhost was away while the leg was copied to.
        assert!(!leg.look(Some(&LegState::Copying), (false, 3), now));
        assert_eq!(pauses(&mut leg, 3, &mut now, 2), [0, 241]);
    }

    #[test]
    fn an_absence_between_two_looks_is_none_less() {
        let (mut leg, mut now) = (Comeback::of_unseen(), Instant::now());
        assert!(!leg.look(Some(&LegState::InSync), (true, 1), now));
        assert_eq!(pauses(&mut leg, 2, &mut now, 2), [0, 31]);
        // A leg in sync whose IOhost is away fails for that.
        assert!(!leg.look(Some(&LegState::InSync), (true, 2), now));
        assert!(!leg.look(Some(&LegState::InSync), (false, 3), now));
        assert!(leg.look(Some(&LegState::Failed), (true, 3), now));
        // It goes away while it is tried.
        leg.was_tried();
        assert!(leg.look(Some(&LegState::Failed), (true, 4), now));
    }
}
