//! The ownership that `sidecore own` has started this daemon for.

use std::env::{VarError, var};

use anyhow::{Context as _, Result, bail};
use sidecore_assembly::spec::Owner;

const EPOCH: &str = "SIDECORE_EPOCH";
const SERIES: &str = "SIDECORE_EPOCH_SERIES";
const FENCE: &str = "SIDECORE_FENCE";
const RESERVATION: &str = "reservation";

/// The owner of all stores of controllers; `None` if nothing has said that there are others.
///
/// # Errors
/// The environment is not one of `sidecore own`.
pub fn from_environment() -> Result<Option<Owner>> {
    owner(text(EPOCH)?.as_deref(), text(SERIES)?.as_deref())
}

/// Whether other hosts fence this daemon by reservations of its disks. With another fence, a disk
/// that refuses a request by a reservation has failed, and no owner was fenced.
///
/// # Errors
/// The environment is not one of `sidecore own`.
pub fn is_fenced_by_reservations() -> Result<bool> {
    Ok(text(FENCE)?.as_deref() == Some(RESERVATION))
}

fn text(name: &str) -> Result<Option<String>> {
    match var(name) {
        Ok(text) => Ok(Some(text)),
        Err(VarError::NotPresent) => Ok(None),
        Err(error) => Err(error).with_context(|| format!("the environment's {name}")),
    }
}

fn owner(epoch: Option<&str>, series: Option<&str>) -> Result<Option<Owner>> {
    let (epoch, series) = match (epoch, series) {
        (None, None) => return Ok(None),
        (Some(epoch), Some(series)) => (epoch, series),
        _ => bail!("the environment has one of {EPOCH} and {SERIES}: set both, as `sidecore own`"),
    };
    let parsed = epoch.parse().ok().filter(|epoch| *epoch != 0);
    let epoch = parsed.with_context(|| format!("{EPOCH} is {epoch:?}: set a number from 1 on"))?;
    let parsed = u64::from_str_radix(series, 16).ok();
    let series = parsed
        .with_context(|| format!("{SERIES} is {series:?}: set a hexadecimal number of 64 bits"))?;
    Ok(Some(Owner { series, epoch }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_has_an_epoch_and_a_series() {
        assert_eq!(owner(None, None).unwrap(), None);
        let found = owner(Some("7"), Some("00000000000000ff")).unwrap();
        assert_eq!(found, Some(Owner { series: 255, epoch: 7 }));
        for (epoch, series) in [
            (Some("7"), None),
            (None, Some("ff")),
            (Some("0"), Some("ff")),
            (Some("x"), Some("ff")),
            (Some("7"), Some("10000000000000000")),
        ] {
            assert!(owner(epoch, series).is_err(), "{epoch:?} {series:?}");
        }
    }
}
