//! The text of a wire's faults, in the words of tc-netem.

use std::str::SplitWhitespace;

use sidecore_net::Way;
use sidecore_units::Nanos;
use sidecore_wire_faults::Faults;

/// The longest text, in bytes.
pub const WIRE_BYTES_MAX: usize = 256;

/// Longer delays are a slip of the unit.
const DELAY_MAX: Nanos = Nanos::from_millis(60_000);

/// The faults of a wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wire {
    pub(crate) faults: Faults,
    pub(crate) seed: u64,
    /// The direction that has them; `None` for both.
    pub(crate) way: Option<Way>,
    text: String,
}

impl Wire {
    /// Reads faults: `from` or `to` for one direction, then any of `loss`, `duplicate`, `corrupt`,
    /// `truncate` and `reorder` with a share like `0.1%`, `delay` with a time like `10ms` and maybe
    /// a second one, up to which it varies, and `seed` with a number.
    ///
    /// # Errors
    /// The word that is not understood, with the remedy.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > WIRE_BYTES_MAX {
            return Err(format!("faults of a wire have {WIRE_BYTES_MAX} bytes at most"));
        }
        let faults = Faults { delay: Nanos::ZERO, ..Faults::default() };
        let mut wire = Self { faults, seed: 0, way: None, text: String::new() };
        let mut words = text.split_whitespace();
        while let Some(word) = words.next() {
            let faults = &mut wire.faults;
            match word {
                "from" => wire.way = Some(Way::FromStation),
                "to" => wire.way = Some(Way::ToStation),
                "loss" => faults.lost = share(word, &mut words)?,
                "duplicate" => faults.doubled = share(word, &mut words)?,
                "corrupt" => faults.damaged = share(word, &mut words)?,
                "truncate" => faults.cut_short = share(word, &mut words)?,
                "reorder" => faults.overtaken = share(word, &mut words)?,
                "delay" => (faults.delay, faults.jitter) = delay(&mut words)?,
                "seed" => wire.seed = seed(&mut words)?,
                _ => {
                    let word = printable(word);
                    return Err(format!(
                        "`{word}` is no fault of a wire; write for instance `loss 0.1% delay 5ms`"
                    ));
                }
            }
        }
        wire.text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        Ok(wire)
    }

    /// The text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether it has no faults.
    #[must_use]
    pub fn is_perfect(&self) -> bool {
        let faults = &self.faults;
        let chances =
            [faults.lost, faults.doubled, faults.damaged, faults.cut_short, faults.overtaken];
        chances == [0; 5] && faults.delay == Nanos::ZERO && faults.jitter == Nanos::ZERO
    }
}

/// A text that may be anything, for a terminal.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(40).collect()
}

/// A share, per million.
fn share(of: &str, words: &mut SplitWhitespace<'_>) -> Result<u32, String> {
    let word = words.next().unwrap_or_default();
    let per_million = word.strip_suffix('%').and_then(|number| decimal(number, 4));
    per_million
        .filter(|share| *share <= 1_000_000)
        .and_then(|share| u32::try_from(share).ok())
        .ok_or_else(|| {
            let word = printable(word);
            format!("`{word}` is no share behind `{of}`; write `0.0001%` to `100%`")
        })
}

/// A number with up to `places` decimal places, times ten to the power of `places`.
fn decimal(text: &str, places: usize) -> Option<u64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let is_plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !is_plain(whole) || !is_plain(part) || part.len() > places {
        return None;
    }
    format!("{whole}{part:0<places$}").parse().ok()
}

/// A delay, and how much it varies.
fn delay(words: &mut SplitWhitespace<'_>) -> Result<(Nanos, Nanos), String> {
    let wrong = |word: &str| {
        let word = printable(word);
        format!("`{word}` is no delay; write `1us` to `60s`, for instance `10ms`")
    };
    let word = words.next().unwrap_or_default();
    let delay = time(word).ok_or_else(|| wrong(word))?;
    let jitter = words.clone().next().and_then(time);
    if jitter.is_some() {
        words.next();
    }
    Ok((delay, jitter.unwrap_or(Nanos::ZERO)))
}

fn time(word: &str) -> Option<Nanos> {
    let units = [("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];
    let (number, unit_ns) = units.iter().find_map(|(unit, unit_ns)| {
        let number = word.strip_suffix(unit)?;
        number.bytes().all(|byte| byte.is_ascii_digit()).then_some((number, unit_ns))
    })?;
    let time = Nanos(number.parse::<u64>().ok()?.checked_mul(*unit_ns)?);
    (time <= DELAY_MAX).then_some(time)
}

fn seed(words: &mut SplitWhitespace<'_>) -> Result<u64, String> {
    let word = words.next().unwrap_or_default();
    word.parse().map_err(|_| format!("`{}` is no seed: write a whole number", printable(word)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_word_by_word() {
        let wire = Wire::parse(
            " to loss 0.1%  delay 10ms 500us duplicate 2% corrupt 0.0001% truncate 100% \
             reorder 12.5% seed 7",
        )
        .unwrap();
        let faults = Faults {
            lost: 1_000,
            doubled: 20_000,
            damaged: 1,
            cut_short: 1_000_000,
            overtaken: 125_000,
            delay: Nanos::from_millis(10),
            jitter: Nanos::from_micros(500),
            ..Faults::default()
        };
        assert_eq!((wire.faults, wire.seed, wire.way), (faults, 7, Some(Way::ToStation)));
        assert!(!wire.is_perfect());
        assert_eq!(Wire::parse(wire.text()).unwrap(), wire);
        assert_eq!(Wire::parse("delay 1s loss 1%").unwrap().faults.jitter, Nanos::ZERO);
        assert!(Wire::parse(" seed 3 from").unwrap().is_perfect());
    }

    #[test]
    fn nonsense_is_refused_with_the_remedy() {
        for (text, why) in [
            ("lose 1%", "no fault of a wire"),
            ("loss", "no share behind `loss`"),
            ("loss 1", "0.0001%"),
            ("loss 101%", "100%"),
            ("loss 0.00001%", "no share"),
            ("loss -1%", "no share"),
            ("loss .5%", "no share"),
            ("delay", "no delay"),
            ("delay 10", "`10ms`"),
            ("delay 61s", "no delay"),
            ("delay 99999999999999999999s", "no delay"),
            ("seed x", "whole number"),
        ] {
            let error = Wire::parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(Wire::parse(&"a".repeat(300)).unwrap_err().contains("256 bytes"));
    }
}
