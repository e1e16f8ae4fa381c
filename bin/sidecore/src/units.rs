//! Numbers in forms that are easy to read.

use jiff::Timestamp;

/// Formats a count with its word, in the singular or plural.
pub(crate) fn count(count: usize, word: &str) -> String {
    format!("{count} {word}{}", if count == 1 { "" } else { "s" })
}

/// Formats a number with three or four digits and a letter for the thousands: `1.23M`.
pub(crate) fn short(number: f64) -> String {
    let (scaled, letter) = match number.abs() {
        n if n >= 999.5e9 => (number / 1e12, "T"),
        n if n >= 999.5e6 => (number / 1e9, "G"),
        n if n >= 999.5e3 => (number / 1e6, "M"),
        n if n >= 999.5 => (number / 1e3, "k"),
        _ => (number, ""),
    };
    match scaled.abs() {
        n if letter.is_empty() && (n.fract() == 0.0 || n >= 100.0) => format!("{scaled:.0}"),
        n if n < 10.0 => format!("{scaled:.2}{letter}"),
        n if n < 100.0 => format!("{scaled:.1}{letter}"),
        _ => format!("{scaled:.0}{letter}"),
    }
}

/// Formats a size with three digits and a unit of a power of two: `1.23GiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let Some((unit, power)) = units.into_iter().find(|(_, power)| bytes >> power > 0) else {
        return format!("{bytes}B");
    };
    let scaled = bytes as f64 / (1_u64 << power) as f64;
    match scaled {
        n if n.fract() == 0.0 || n >= 100.0 => format!("{n:.0}{unit}"),
        n if n < 10.0 => format!("{n:.2}{unit}"),
        n => format!("{n:.1}{unit}"),
    }
}

/// Formats the share of `part` in `whole`.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_owned(),
        whole => format!("{:.1}%", part as f64 / whole as f64 * 100.0),
    }
}

/// Formats a time, in seconds since 1970, as a date and time in UTC. Beyond the year 9999, which
/// only a broken clock shows, the seconds themselves are printed.
pub(crate) fn time(unix_s: u64) -> String {
    let time = i64::try_from(unix_s).ok().and_then(|unix_s| Timestamp::from_second(unix_s).ok());
    time.map_or_else(|| format!("@{unix_s}"), |time| time.strftime("%Y-%m-%d %H:%M:%S").to_string())
}

/// Formats nanoseconds as microseconds, the scale of a request.
pub(crate) fn micros(ns: f64) -> String {
    let us = ns / 1e3;
    match us {
        0.0 => "-".to_owned(),
        us if us < 10.0 => format!("{us:.2}"),
        us if us < 100.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_keep_three_digits() {
        for (number, text) in [
            (0.0, "0"),
            (7.0, "7"),
            (0.5, "0.50"),
            (12.25, "12.2"),
            (999.0, "999"),
            (1000.0, "1.00k"),
            (12_345.0, "12.3k"),
            (999_600.0, "1.00M"),
            (3_010_000.0, "3.01M"),
            (2.5e12, "2.50T"),
        ] {
            assert_eq!(short(number), text);
        }
    }

    #[test]
    fn times_are_microseconds() {
        for (ns, text) in [(0.0, "-"), (310.0, "0.31"), (15_900.0, "15.9"), (1_500_000.0, "1500")] {
            assert_eq!(micros(ns), text);
        }
    }

    #[test]
    fn sizes_are_short() {
        for (size, text) in [
            (0, "0B"),
            (1023, "1023B"),
            (1024, "1KiB"),
            (1536, "1.50KiB"),
            (10 << 20, "10MiB"),
            (12_900_000, "12.3MiB"),
            (200_000_000_000, "186GiB"),
            (1 << 48, "256TiB"),
        ] {
            assert_eq!(bytes(size), text);
        }
        assert_eq!((percent(1, 8).as_str(), percent(1, 0).as_str()), ("12.5%", "-"));
    }

    #[test]
    fn times_are_dates() {
        for (unix_s, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (951_868_800, "2000-03-01 00:00:00"),
            (1_767_225_599, "2025-12-31 23:59:59"),
            (4_107_542_400, "2100-03-01 00:00:00"),
        ] {
            assert_eq!(time(unix_s), text);
        }
        assert_eq!(time(u64::MAX), "@18446744073709551615");
    }

    #[test]
    fn one_is_singular() {
        assert_eq!(
            (count(1, "device").as_str(), count(0, "device").as_str()),
            ("1 device", "0 devices")
        );
    }
}
