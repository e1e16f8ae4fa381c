//! Slots on the calendar of UTC.

use std::fmt;

use jiff::Timestamp;
use jiff::civil::{Date, DateTime};
use jiff::tz::Offset;

/// 9999-12-30T21:59:59Z in seconds since 1970, just before the last time of jiff. Later times are
/// taken for this one.
pub const LATEST_UNIX_S: u64 = 253_402_207_200 - 1;

const MINUTE_S: u64 = 60;
const HOUR_S: u64 = 3600;
const DAY_S: u64 = 86_400;

/// The days from a Monday to 1970-01-01, which was a Thursday.
const DAYS_SINCE_MONDAY: u64 = 3;

/// The distance of a rule's snapshots. Finer ones are less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Period {
    /// A part of an hour, in minutes that divide 60.
    Minutes(u8),
    /// From each full hour.
    Hourly,
    /// From midnight.
    Daily,
    /// From Monday.
    Weekly,
    /// From the first of a month.
    Monthly,
    /// From the first of January.
    Yearly,
}

impl Period {
    /// The parts of an hour that there may be.
    pub const MINUTES: [u8; 10] = [1, 2, 3, 5, 6, 10, 12, 15, 20, 30];

    /// The number of the slot that a time, in seconds since 1970, is in. Later slots have larger
    /// numbers.
    pub(crate) fn slot(self, unix_s: u64) -> u64 {
        let unix_s = unix_s.min(LATEST_UNIX_S);
        let days = unix_s / DAY_S;
        match self {
            Self::Minutes(minutes) => {
                unix_s.checked_div(MINUTE_S.saturating_mul(minutes.into())).unwrap_or(0)
            }
            Self::Hourly => unix_s / HOUR_S,
            Self::Daily => days,
            Self::Weekly => days.saturating_add(DAYS_SINCE_MONDAY) / 7,
            Self::Monthly => {
                let date = date_time(unix_s).date();
                number(date.year()).saturating_mul(12).saturating_add(number(date.month().into()))
            }
            Self::Yearly => number(date_time(unix_s).year()),
        }
    }

    /// The beginning of the slot after the one that a time is in, in seconds since 1970.
    pub(crate) fn next(self, unix_s: u64) -> u64 {
        let unix_s = unix_s.min(LATEST_UNIX_S);
        let after = self.slot(unix_s).saturating_add(1);
        match self {
            Self::Minutes(minutes) => after.saturating_mul(MINUTE_S.saturating_mul(minutes.into())),
            Self::Hourly => after.saturating_mul(HOUR_S),
            Self::Daily => after.saturating_mul(DAY_S),
            Self::Weekly => {
                after.saturating_mul(7).saturating_sub(DAYS_SINCE_MONDAY).saturating_mul(DAY_S)
            }
            Self::Monthly => {
                let date = date_time(unix_s).date();
                first_day(date.last_of_month().tomorrow().ok())
            }
            Self::Yearly => {
                let date = date_time(unix_s).date();
                first_day(date.last_of_year().tomorrow().ok())
            }
        }
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Minutes(minutes) => return write!(f, "every {minutes}min"),
            Self::Hourly => "hourly",
            Self::Daily => "daily",
            Self::Weekly => "weekly",
            Self::Monthly => "monthly",
            Self::Yearly => "yearly",
        })
    }
}

/// Date and time in UTC.
pub(crate) fn date_time(unix_s: u64) -> DateTime {
    let seconds = i64::try_from(unix_s.min(LATEST_UNIX_S)).unwrap_or(0);
    Offset::UTC.to_datetime(Timestamp::from_second(seconds).unwrap_or(Timestamp::UNIX_EPOCH))
}

/// The time of a date in UTC, in seconds since 1970; `None` before 1970.
pub(crate) fn unix_s(at: DateTime) -> Option<u64> {
    u64::try_from(Offset::UTC.to_timestamp(at).ok()?.as_second()).ok()
}

/// The beginning of a day; the end of time for none.
fn first_day(day: Option<Date>) -> u64 {
    day.and_then(|day| unix_s(day.at(0, 0, 0, 0))).unwrap_or(LATEST_UNIX_S)
}

/// A year or a month, which is not negative since 1970.
fn number(part: i16) -> u64 {
    u64::try_from(part).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> u64 {
        text.parse::<Timestamp>().unwrap().as_second().try_into().unwrap()
    }

    #[test]
    fn slots_begin_on_the_calendar() {
        let from = at("2027-12-30T23:44:59Z");
        for (period, next) in [
            (Period::Minutes(1), "2027-12-30T23:45:00Z"),
            (Period::Minutes(15), "2027-12-30T23:45:00Z"),
            (Period::Minutes(30), "2027-12-31T00:00:00Z"),
            (Period::Hourly, "2027-12-31T00:00:00Z"),
            (Period::Daily, "2027-12-31T00:00:00Z"),
            (Period::Weekly, "2028-01-03T00:00:00Z"),
            (Period::Monthly, "2028-01-01T00:00:00Z"),
            (Period::Yearly, "2028-01-01T00:00:00Z"),
        ] {
            let next = at(next);
            assert_eq!(period.next(from), next, "{period}");
            assert_eq!(period.slot(next - 1), period.slot(from), "{period}");
            assert_ne!(period.slot(next), period.slot(from), "{period}");
        }
        // Months of a leap year.
        assert_eq!(Period::Monthly.next(at("2028-02-28T12:00:00Z")), at("2028-03-01T00:00:00Z"));
        assert_eq!(Period::Daily.next(at("2028-02-28T12:00:00Z")), at("2028-02-29T00:00:00Z"));
    }

    #[test]
    fn each_slot_ends_where_the_next_one_begins() {
        let minutes = Period::MINUTES.map(Period::Minutes);
        let others =
            [Period::Hourly, Period::Daily, Period::Weekly, Period::Monthly, Period::Yearly];
        for period in minutes.into_iter().chain(others) {
            let mut time = 0;
            for _ in 0..1000 {
                let next = period.next(time);
                assert!(next > time && period.slot(next) > period.slot(next - 1), "{period}");
                assert_eq!(period.slot(time), period.slot(next - 1), "{period}");
                time = next;
                if time >= LATEST_UNIX_S {
                    break;
                }
            }
        }
    }

    #[test]
    fn no_time_is_too_late() {
        for period in [Period::Minutes(1), Period::Weekly, Period::Monthly, Period::Yearly] {
            for time in [LATEST_UNIX_S - 1, LATEST_UNIX_S, u64::MAX] {
                assert!(period.next(time) >= LATEST_UNIX_S);
                assert_eq!(period.slot(time), period.slot(LATEST_UNIX_S), "{period} {time}");
            }
        }
        assert_eq!(LATEST_UNIX_S, at("9999-12-30T21:59:59Z"));
        assert_eq!(date_time(u64::MAX).year(), 9999);
    }
}
