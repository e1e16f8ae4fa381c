//! The names of scheduled snapshots. They are reserved: a snapshot of such a name was made by a
//! schedule, and one that was renamed is its operator's.

use jiff::civil::DateTime;

use crate::calendar::{date_time, unix_s};

/// Between the name of the volume and the time.
const MARK: &str = ".auto-";

/// The bytes of a time, as in `20261126T1000Z`.
const TIME_BYTES: usize = 14;

/// The longest name of a volume that leaves room for those of its snapshots, of 64 bytes.
pub const NAME_MAX_BYTES: usize = 64 - MARK.len() - TIME_BYTES;

/// The name of a volume's snapshot of this minute, in UTC, as in `vm1.auto-20261126T1000Z`. The
/// names of a volume's snapshots sort by their times.
#[must_use]
pub fn name(volume: &str, at_unix_s: u64) -> String {
    let at = date_time(at_unix_s);
    let (year, month, day, hour, minute) =
        (at.year(), at.month(), at.day(), at.hour(), at.minute());
    format!("{volume}{MARK}{year:04}{month:02}{day:02}T{hour:02}{minute:02}Z")
}

/// The time of a scheduled snapshot in seconds since 1970, by its name; `None` for all other names.
#[must_use]
pub fn time_of(name: &str) -> Option<u64> {
    let (volume, time) = name.rsplit_once(MARK)?;
    if volume.is_empty() || time.len() != TIME_BYTES {
        return None;
    }
    let part = |from: usize, to: usize| {
        let digits = time.get(from..to)?;
        digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse::<i16>().ok())?
    };
    let small = |from, to| part(from, to).and_then(|part| i8::try_from(part).ok());
    if time.get(8..9) != Some("T") || time.get(13..) != Some("Z") {
        return None;
    }
    let (year, month, day) = (part(0, 4)?, small(4, 6)?, small(6, 8)?);
    let (hour, minute) = (small(9, 11)?, small(11, 13)?);
    unix_s(DateTime::new(year, month, day, hour, minute, 0, 0).ok()?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::LATEST_UNIX_S;

    /// The name of the volume in that of a scheduled snapshot.
    fn stem(name: &str) -> Option<&str> {
        time_of(name).and_then(|_| name.rsplit_once(MARK)).map(|(stem, _)| stem)
    }

    #[test]
    fn names_tell_the_minute() {
        let (at, snapshot) = (1_795_687_259, "vm1.auto-20261126T1000Z");
        assert_eq!(name("vm1", at), snapshot);
        assert_eq!(time_of(snapshot), Some(at - at % 60));
        assert_eq!(stem(snapshot), Some("vm1"));
        assert_eq!(name(&"v".repeat(NAME_MAX_BYTES), at).len(), 64);
    }

    #[test]
    fn other_names_are_not_those_of_schedules() {
        for other in [
            "",
            "vm1",
            "vm1.auto-",
            ".auto-20261126T1000Z",
            "vm1-20261126T1000Z",
            "vm1.auto-20261126T1000",
            "vm1.auto-20261126T1000Zx",
            "vm1.auto-20261326T1000Z",
            "vm1.auto-20260230T1000Z",
            "vm1.auto-20261126T2400Z",
            "vm1.auto-20261126T1060Z",
            "vm1.auto-2026112 T1000Z",
            "vm1.auto-+0261126T1000Z",
            "vm1.auto-19691231T2359Z",
            "vm1.auto-20261126t1000z",
            "vm1.auto-20261126Tü00Z",
            "vm1.auto-20261126T1000Z.old",
        ] {
            assert_eq!(time_of(other), None, "{other}");
            assert_eq!(stem(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn names_sort_by_time(a in 0..LATEST_UNIX_S, b in 0..LATEST_UNIX_S) {
            let [earlier, later] = [a.min(b), a.max(b)].map(|at| name("vm.auto-1", at));
            prop_assert!(earlier <= later);
            prop_assert_eq!(time_of(&earlier), Some(a.min(b) / 60 * 60));
            prop_assert_eq!(stem(&later), Some("vm.auto-1"));
        }

        #[test]
        fn any_text_may_be_a_name(text in ".*") {
            if let Some(at) = time_of(&text) {
                prop_assert_eq!(name(stem(&text).unwrap(), at), text);
            }
        }
    }
}
