//! Sizes in bytes, for people.

/// The units, with the power of two of each.
const UNITS: [(&str, u32); 5] = [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];

/// Reads `512MiB`, `1 GiB` or `4096`, the last in bytes.
///
/// # Errors
/// The fault of the text, for people.
pub fn parse(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at_checked(digits).unwrap_or((text, ""));
    let unit = unit.trim();
    let refuse = |why: &str| {
        Err(format!("`{text}` {why}; write for instance \"512MiB\", \"1GiB\", or bytes"))
    };
    if number.is_empty() {
        return refuse("does not start with a whole number");
    }
    if matches!(unit, "k" | "K" | "KB" | "kB" | "M" | "MB" | "G" | "GB" | "T" | "TB") {
        return refuse("has a unit that some read as a power of ten and some as a power of two");
    }
    let power = match UNITS.iter().find(|(name, _)| *name == unit) {
        Some((_, power)) => *power,
        None if unit.is_empty() => 0,
        None => return refuse("has an unknown unit"),
    };
    let bytes =
        number.parse::<u64>().ok().and_then(|number| number.checked_mul(1_u64.checked_shl(power)?));
    bytes.map_or_else(|| refuse("is more than 64 bits of bytes"), Ok)
}

/// Writes a size with the largest unit that leaves it whole.
#[must_use]
pub fn show(bytes: u64) -> String {
    let fits = |power: u32| bytes != 0 && bytes.trailing_zeros() >= power;
    match UNITS.iter().rev().find(|(_, power)| fits(*power)) {
        Some((unit, power)) => format!("{}{unit}", bytes.checked_shr(*power).unwrap_or(0)),
        None => format!("{bytes}B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_every_unit() {
        for (text, bytes) in [
            ("4096", 4096),
            ("4096B", 4096),
            ("3KiB", 3 << 10),
            ("512MiB", 512 << 20),
            (" 1 GiB ", 1 << 30),
            ("2TiB", 2 << 40),
            ("0", 0),
            ("18446744073709551615", u64::MAX),
            ("16777215TiB", 16_777_215 << 40),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn an_invalid_size_is_refused_with_an_example() {
        for text in [
            "",
            "MiB",
            "-1",
            "1.5GiB",
            "1GB",
            "1g",
            "1 GiB 2",
            "18446744073709551616",
            "16777216TiB",
            "１MiB",
        ] {
            let message = parse(text).expect_err(text);
            assert!(message.contains("\"512MiB\""), "{message}");
        }
    }

    #[test]
    fn a_size_is_shown_with_the_largest_unit_that_is_exact() {
        for (bytes, text) in [
            (0, "0B"),
            (513, "513B"),
            (1 << 30, "1GiB"),
            (1536 << 20, "1536MiB"),
            (1 << 50, "1024TiB"),
        ] {
            assert_eq!(show(bytes), text);
        }
        assert_eq!(parse(&show(u64::MAX)), Ok(u64::MAX));
    }
}
