//! The rules of a schedule, as an operator writes them.

use std::fmt;
use std::str::FromStr;

use crate::Period;

/// The most snapshots that a rule keeps.
pub const COUNT_MAX: u32 = 1000;

/// The form of a rule, for messages.
const FORM: &str = "write for instance \"24 hourly, 7 daily\", with `hourly`, `daily`, `weekly`, \
                    `monthly`, `yearly` or `every 15min` behind each number";

/// A rule: the number of snapshots, and their distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// From 1 to [`COUNT_MAX`].
    pub count: u32,
    /// The length of the slots, each of which has a snapshot.
    pub period: Period,
}

/// The rules of a schedule: at least one, the finest first, each period once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keep(Vec<Rule>);

impl Keep {
    /// The rules, the finest first.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.0
    }

    /// The beginning of the next slot of any rule, in seconds since 1970.
    #[must_use]
    pub fn next(&self, now_unix_s: u64) -> u64 {
        let next = self.0.iter().map(|rule| rule.period.next(now_unix_s)).min();
        next.unwrap_or(crate::LATEST_UNIX_S)
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Rule { count, period }) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{count} {period}")?;
        }
        Ok(())
    }
}

impl FromStr for Keep {
    type Err = String;

    /// Reads rules, separated by commas.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut rules: Vec<Rule> = Vec::new();
        for part in text.split(',') {
            let rule = rule(part.trim())?;
            if rules.iter().any(|other| other.period == rule.period) {
                return Err(format!("`{}` is there twice; leave one of them out", rule.period));
            }
            rules.push(rule);
        }
        rules.sort_by_key(|rule| rule.period);
        Ok(Self(rules))
    }
}

fn rule(text: &str) -> Result<Rule, String> {
    if text.is_empty() {
        return Err(format!("a rule is empty; {FORM}"));
    }
    let (count, period) = text
        .split_once(char::is_whitespace)
        .ok_or_else(|| format!("\"{text}\" is no rule; {FORM}"))?;
    if count.is_empty() || !count.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("\"{count}\" in \"{text}\" is no number; {FORM}"));
    }
    let count = count
        .parse()
        .ok()
        .filter(|count| (1..=COUNT_MAX).contains(count))
        .ok_or_else(|| format!("\"{text}\" keeps {count}; a rule keeps 1 to {COUNT_MAX}"))?;
    Ok(Rule { count, period: period_of(period.trim())? })
}

fn period_of(text: &str) -> Result<Period, String> {
    Ok(match text {
        "hourly" => Period::Hourly,
        "daily" => Period::Daily,
        "weekly" => Period::Weekly,
        "monthly" => Period::Monthly,
        "yearly" => Period::Yearly,
        _ => {
            let Some(every) = text.strip_prefix("every").map(str::trim_start) else {
                return Err(format!("\"{text}\" is no period; {FORM}"));
            };
            let minutes = every.strip_suffix("min").map(str::trim_end);
            let minutes = minutes.and_then(|minutes| minutes.parse().ok());
            let divides = minutes.filter(|minutes| Period::MINUTES.contains(minutes));
            Period::Minutes(divides.ok_or_else(|| {
                let list = Period::MINUTES.map(|minutes| minutes.to_string()).join(", ");
                format!("\"{text}\" is not `every` and minutes that divide an hour: {list}min")
            })?)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_sorted_and_shown_as_they_are_written() {
        for (text, shown) in [
            ("24 hourly, 7 daily", "24 hourly, 7 daily"),
            ("7 daily,24  hourly", "24 hourly, 7 daily"),
            ("4 every 15min", "4 every 15min"),
            ("2 every 1 min, 1000 yearly", "2 every 1min, 1000 yearly"),
            (" 12 monthly , 4 weekly ", "4 weekly, 12 monthly"),
        ] {
            let keep: Keep = text.parse().unwrap();
            assert_eq!(keep.to_string(), shown);
            assert_eq!(shown.parse(), Ok(keep));
        }
    }

    #[test]
    fn each_fault_is_named() {
        for (text, part) in [
            ("", "a rule is empty; write for instance \"24 hourly, 7 daily\""),
            ("24 hourly,", "a rule is empty"),
            ("hourly", "\"hourly\" is no rule"),
            ("0 hourly", "\"0 hourly\" keeps 0; a rule keeps 1 to 1000"),
            ("1001 daily", "keeps 1001; a rule keeps 1 to 1000"),
            ("99999999999999999999 daily", "a rule keeps 1 to 1000"),
            ("-1 daily", "\"-1\" in \"-1 daily\" is no number"),
            ("+1 daily", "\"+1\" in \"+1 daily\" is no number"),
            ("many daily", "\"many\" in \"many daily\" is no number"),
            ("7 dayly", "\"dayly\" is no period"),
            ("7 daily 24 hourly", "\"daily 24 hourly\" is no period"),
            ("4 every 7min", "minutes that divide an hour: 1, 2, 3"),
            ("4 every 60min", "minutes that divide an hour"),
            ("4 every 15", "minutes that divide an hour"),
            ("4 every min", "minutes that divide an hour"),
            ("7 daily, 8 daily", "`daily` is there twice"),
            ("ü ü", "\"ü\" in \"ü ü\" is no number"),
        ] {
            let said = text.parse::<Keep>().unwrap_err();
            assert!(said.contains(part), "{text}: {said}");
        }
    }
}
