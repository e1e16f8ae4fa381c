//! Numbers for people.

/// A count with its word, in the plural where that is right.
pub(crate) fn count(count: usize, word: &str) -> String {
    format!("{count} {word}{}", if count == 1 { "" } else { "s" })
}

/// A number of three or four digits, with a letter for the thousands: `1.23M`.
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

/// Nanoseconds as microseconds, which is what a request takes.
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
    fn one_is_singular() {
        assert_eq!((count(1, "device").as_str(), count(0, "device").as_str()), ("1 device", "0 devices"));
    }
}
