//! Faults in percent, and the orders that change them while the wire runs.

use std::str::FromStr;

use anyhow::{Context as _, Error, Result, bail, ensure};
use clap::Args;
use sidecore_link::Faults;
use sidecore_units::Nanos;

/// How long a frame that is overtaken waits, at most: eight times this.
const DELAY: Nanos = Nanos::from_micros(20);

/// The chances of faults, in percent of the frames.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq)]
pub struct Chances {
    /// Frames that vanish.
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT", value_parser = percent)]
    pub loss: f64,
    /// Frames that come out twice.
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT", value_parser = percent)]
    pub doubling: f64,
    /// Frames that come out later than some behind them.
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT", value_parser = percent)]
    pub reordering: f64,
    /// Frames with a wrong bit, which no checksum has found.
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT", value_parser = percent)]
    pub damage: f64,
}

impl Chances {
    pub(crate) fn faults(&self) -> Faults {
        let [lost, doubled, overtaken, damaged] =
            [self.loss, self.doubling, self.reordering, self.damage]
                .map(|percent| (percent * 10_000.0).round() as u32);
        // A frame is as long as it came in: it was padded on its way here if it had to be.
        Faults {
            lost,
            doubled,
            overtaken,
            damaged,
            delay: DELAY,
            padded_to_bytes: 0,
            ..Faults::default()
        }
    }
}

fn percent(text: &str) -> Result<f64> {
    let percent: f64 = text.parse().with_context(|| format!("`{text}` is no number"))?;
    ensure!((0.0..=100.0).contains(&percent), "{text} percent: use 0 to 100");
    Ok(percent)
}

/// An order to running wires: a line of text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// `chances LOSS DOUBLING REORDERING DAMAGE`, in percent.
    Chances(Chances),
    /// `counts`: print the counts of each wire, a line of JSON each.
    Counts,
    /// `cut`: cut all wires.
    Cut,
    /// `mend`: mend all wires.
    Mend,
}

impl FromStr for Order {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        Ok(match words.as_slice() {
            ["chances", loss, doubling, reordering, damage] => Self::Chances(Chances {
                loss: percent(loss)?,
                doubling: percent(doubling)?,
                reordering: percent(reordering)?,
                damage: percent(damage)?,
            }),
            ["counts"] => Self::Counts,
            ["cut"] => Self::Cut,
            ["mend"] => Self::Mend,
            _ => bail!(
                "`{line}` is no order: use `chances LOSS DOUBLING REORDERING DAMAGE`, `counts`, \
                 `cut` or `mend`"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_and_others_refused() {
        let chances = Chances { loss: 10.0, doubling: 0.5, reordering: 100.0, damage: 0.0 };
        assert_eq!("chances 10 0.5 100 0".parse::<Order>().unwrap(), Order::Chances(chances));
        assert_eq!(" mend ".parse::<Order>().unwrap(), Order::Mend);
        for wrong in ["", "chances 10", "chances -1 0 0 0", "chances 0 0 101 0", "chances x 0 0 0"]
        {
            assert!(wrong.parse::<Order>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn percents_become_chances_in_a_million() {
        let faults = Chances { loss: 10.0, doubling: 0.5, reordering: 100.0, damage: 0.0 }.faults();
        assert_eq!(
            (faults.lost, faults.doubled, faults.overtaken, faults.damaged),
            (100_000, 5_000, 1_000_000, 0)
        );
    }
}
