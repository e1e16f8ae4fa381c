//! The text of a limit.

use sidecore_block::Limit;
use sidecore_keys::size;

/// The most limits of a port: of frames and of bytes, in each direction.
pub const LIMITS_MAX: usize = 4;

/// The limits of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortLimits {
    /// Of frames from the station, and to it.
    pub(crate) frames: [Option<Limit>; 2],
    /// Of bytes from the station, and to it.
    pub(crate) bytes: [Option<Limit>; 2],
    texts: Vec<String>,
}

impl PortLimits {
    /// Reads limits, one in each text: `from` or `to`, a rate like `5000 frames/s` or `10MiB/s`,
    /// and maybe `burst` with a number of frames or a size. Without it, the burst is that of a
    /// tenth of a second.
    ///
    /// # Errors
    /// The text that is not understood, with the remedy.
    pub fn parse<T: AsRef<str>>(texts: &[T]) -> Result<Self, String> {
        let mut limits = Self::default();
        for text in texts {
            let text = text.as_ref();
            limits.add(text).map_err(|why| {
                let shown: String = text.chars().take(80).filter(|c| !c.is_control()).collect();
                format!("\"{shown}\": {why}")
            })?;
        }
        Ok(limits)
    }

    /// The limits as texts.
    #[must_use]
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    fn add(&mut self, text: &str) -> Result<(), String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let usage = || {
            "it is no limit; write for instance `from 5000 frames/s` or `to 10MiB/s burst 1MiB`"
                .to_owned()
        };
        let (way, words) = match words.split_first() {
            Some((&"from", words)) => (0, words),
            Some((&"to", words)) => (1, words),
            _ => return Err(usage()),
        };
        let (limits, limit) = match words {
            [count, "frames/s", rest @ ..] => {
                (&mut self.frames, limit(number(count)?, rest, number)?)
            }
            [rate, rest @ ..] => {
                let rate = rate.strip_suffix("/s").ok_or_else(usage)?;
                (&mut self.bytes, limit(size::parse(rate)?, rest, size::parse)?)
            }
            [] => return Err(usage()),
        };
        let place = limits.get_mut(way).ok_or_else(usage)?;
        if place.replace(limit).is_some() {
            return Err("there is such a limit already: write one of each kind".to_owned());
        }
        let way = if way == 0 { "from" } else { "to" };
        self.texts.push(format!("{way} {}", words.join(" ")));
        Ok(())
    }
}

fn number(text: &str) -> Result<u64, String> {
    let shown: String = text.chars().take(40).filter(|c| !c.is_control()).collect();
    text.parse().map_err(|_| format!("`{shown}` is no number of frames"))
}

fn limit(
    per_s: u64,
    rest: &[&str],
    read: fn(&str) -> Result<u64, String>,
) -> Result<Limit, String> {
    let burst = match rest {
        [] => per_s / 10,
        ["burst", burst] => read(burst)?,
        _ => return Err("`burst` and one number or size may be behind a rate".to_owned()),
    };
    if per_s == 0 {
        return Err("a rate is at least one a second; a rule drops all frames".to_owned());
    }
    Ok(Limit { per_s, burst: burst.max(1) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_direction_has_a_rate_of_frames_and_one_of_bytes() {
        let texts = ["from 5000  frames/s", "to 10MiB/s burst 64KiB", "from 1000/s"];
        let limits = PortLimits::parse(&texts).unwrap();
        let limit = |per_s, burst| Some(Limit { per_s, burst });
        assert_eq!(limits.frames, [limit(5_000, 500), None]);
        assert_eq!(limits.bytes, [limit(1_000, 100), limit(10 << 20, 64 << 10)]);
        assert_eq!(limits.texts()[0], "from 5000 frames/s");
        assert_eq!(PortLimits::parse(limits.texts()).unwrap(), limits);
        assert_eq!(PortLimits::parse::<&str>(&[]).unwrap(), PortLimits::default());
    }

    #[test]
    fn nonsense_is_refused_with_the_remedy() {
        for (texts, why) in [
            (&["5 frames/s"][..], "write for instance"),
            (&["from"], "write for instance"),
            (&["to 10MiB"], "write for instance"),
            (&["to x frames/s"], "no number of frames"),
            (&["to 10MB/s"], "power of ten"),
            (&["to 0 frames/s"], "at least one"),
            (&["to 1/s burst"], "behind a rate"),
            (&["to 1/s burst 1GB"], "power of ten"),
            (&["to 1/s", "to 2/s"], "already"),
        ] {
            let error = PortLimits::parse(texts).unwrap_err();
            assert!(error.contains(why), "{texts:?}: {error}");
        }
    }
}
