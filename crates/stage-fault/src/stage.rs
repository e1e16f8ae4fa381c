//! The keys of the stage, and the plan that they make.

use std::ops::Range;
use std::sync::Arc;

use sidecore_block::{BlockDevice, OpenedStage, Stage};
use sidecore_keys::{FromValue, Key, Kind, Value, Values, keys};
use sidecore_units::Sector;

use crate::{Affected, Fault, FaultPlan, FaultRule, FaultStore, When};

/// The rarest failure.
const MILLION: u64 = 1_000_000;

keys! {
    /// A plan as an operator writes it.
    pub struct FaultKeys {
        plain {}
        keys {
            "seed" => seed: Option<u64> = None, Kind::Number(0, u64::MAX), "none",
                "with a seed, the failures below come at random with the same mean rate, and \
                 repeat for the same seed; without one, every Nth request of a queue fails";
            "eio_every" => eio_every: Option<u32> = None, Kind::Number(1, MILLION), "never",
                "N: one request in N fails with an I/O error; 1 to 1000000";
            "enospc_every" => enospc_every: Option<u32> = None, Kind::Number(1, MILLION), "never",
                "N: one write in N finds no space left; 1 to 1000000";
            "short_every" => short_every: Option<u32> = None, Kind::Number(1, MILLION), "never",
                "N: one read in N, and one write in N, moves no byte; 1 to 1000000";
            "panic_every" => panic_every: Option<u32> = None, Kind::Number(1, MILLION), "never",
                "N: the stage panics at one request in N, as a stage with a bug does: its device \
                 [fails](stages.md#a-stage-that-fails), and no other; 1 to 1000000";
            "stall_every" => stall_every: Option<u32> = None, Kind::Number(1, MILLION), "never",
                "N: the stage takes two milliseconds of its sidecore at one request in N, as a \
                 stage does that computes for too long ([shown](stages.md#the-time-of-a-stage)); 1 \
                 to 1000000";
            "ranges" => ranges: Vec<(u64, u64)> = Vec::new(), Kind::Ranges, "none",
                "bad sectors: pairs of first and last sector of 512 bytes, as in `[[0, 7], [64, \
                 64]]`; a request that touches one fails with an I/O error", are_in_a_store;
        }
    }
}

impl Stage for FaultPlan {
    const WORD: &'static str = "fault";
    const MEANING: &'static str = "Plants failures, to see how guests bear them. A request that is \
                                   made to fail goes no further.";
    const KEYS: &'static [Key] = FaultKeys::KEYS;

    fn from_values(values: &Values) -> Self {
        FaultKeys::from_values(values).plan()
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn open(&self, _: &str, below: Arc<dyn BlockDevice>) -> OpenedStage {
        Ok(Arc::new(FaultStore::new(below, self.clone())))
    }
}

impl FaultKeys {
    fn plan(self) -> FaultPlan {
        let bad = self.ranges.into_iter().filter_map(bytes);
        let bad = bad.map(|bytes| rule(Affected::All, When::Touching(bytes), Fault::Eio));
        let mut rules: Vec<FaultRule> = bad.collect();
        for (every, fault, affected) in [
            (self.eio_every, Fault::Eio, [Affected::All].as_slice()),
            (self.enospc_every, Fault::NoSpace, &[Affected::Writes]),
            (self.short_every, Fault::Short, &[Affected::Reads, Affected::Writes]),
            (self.panic_every, Fault::Panic, &[Affected::All]),
            (self.stall_every, Fault::Stall, &[Affected::All]),
        ] {
            let Some(every) = every else { continue };
            let when = match self.seed {
                Some(_) => When::PerMillion(1_000_000_u32.checked_div(every).unwrap_or(0)),
                None => When::EveryNth(every.into()),
            };
            rules.extend(affected.iter().map(|affected| rule(*affected, when.clone(), fault)));
        }
        FaultPlan { seed: self.seed.unwrap_or(0), rules }
    }
}

fn rule(affected: Affected, when: When, fault: Fault) -> FaultRule {
    FaultRule { affected, when, fault }
}

/// The bytes of sectors, from the first to the last. Sectors are what a guest's log names.
fn bytes((first, last): (u64, u64)) -> Option<Range<u64>> {
    Some(Sector(first).offset_bytes()?..Sector(last.checked_add(1)?).offset_bytes()?)
}

fn are_in_a_store(key: &str, value: &Value) -> Result<(), String> {
    let ranges = Vec::<(u64, u64)>::from_value(value).unwrap_or_default();
    if ranges.into_iter().all(|range| bytes(range).is_some()) {
        return Ok(());
    }
    Err(format!("`{key}` are in sectors of 512 bytes, and no store has that many"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(keys: &[(&'static str, Value)]) -> FaultPlan {
        FaultPlan::from_values(&Values(keys.iter().cloned().collect()))
    }

    #[test]
    fn failures_are_exact_without_a_seed_and_at_random_with_one() {
        let every = [("short_every", Value::Number(4))];
        let at = |when: When| {
            vec![
                rule(Affected::Reads, when.clone(), Fault::Short),
                rule(Affected::Writes, when, Fault::Short),
            ]
        };
        assert_eq!(plan(&every), FaultPlan { seed: 0, rules: at(When::EveryNth(4)) });
        let seeded = [every.as_slice(), &[("seed", Value::Number(7))]].concat();
        assert_eq!(plan(&seeded), FaultPlan { seed: 7, rules: at(When::PerMillion(250_000)) });
        assert_eq!(plan(&[]), FaultPlan::default());
    }

    #[test]
    fn bad_spots_come_first_and_are_whole_sectors() {
        let keys =
            [("eio_every", Value::Number(3)), ("ranges", Value::Ranges(vec![(8, 8), (64, 65)]))];
        let rules = vec![
            rule(Affected::All, When::Touching(4096..4608), Fault::Eio),
            rule(Affected::All, When::Touching(32_768..33_792), Fault::Eio),
            rule(Affected::All, When::EveryNth(3), Fault::Eio),
        ];
        assert_eq!(plan(&keys), FaultPlan { seed: 0, rules });
    }

    #[test]
    fn spots_behind_the_end_of_any_store_are_refused() {
        for (range, is_fine) in
            [((0, u64::MAX), false), ((0, u64::MAX >> 9), false), ((0, (u64::MAX >> 9) - 1), true)]
        {
            assert_eq!(
                are_in_a_store("ranges", &Value::Ranges(vec![range])).is_ok(),
                is_fine,
                "{range:?}"
            );
        }
    }
}
