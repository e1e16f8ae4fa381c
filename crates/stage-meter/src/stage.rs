//! The keys of the stage.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sidecore_block::{BlockDevice, Meter, OpenedObserver, OpenedStage, Stage, StageError, observe};
use sidecore_keys::{Key, Kind, Value, Values};

use crate::observer::MeterObserver;
use crate::recorder::{Names, Recorder};

/// The seconds between two records unless told otherwise.
const INTERVAL_S: u64 = 300;

/// A day: records of longer intervals are too coarse for a bill.
const INTERVAL_MAX_S: u64 = 86_400;

/// The longest name, in bytes.
const NAME_MAX: usize = 128;

/// Counts requests, and writes records of the counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeterStage {
    /// The name in reports and records; `None` for that of the store.
    pub name: Option<String>,
    /// The file of the records; `None` writes none.
    pub records: Option<PathBuf>,
    /// The seconds between two records; `None` for 300.
    pub interval_s: Option<u64>,
}

impl Stage for MeterStage {
    const WORD: &'static str = "meter";
    const MEANING: &'static str =
        "Counts requests and bytes, and records them for bills: [usage](monitoring.md#usage).";
    const KEYS: &'static [Key] = &[
        Key::new(
            "name",
            Kind::Text,
            "the store's name",
            "the name in reports, metrics and records, at most 128 bytes. Meters of one name are \
             reported as their sum",
        )
        .checked(is_meter_name),
        Key::new(
            "records",
            Kind::Path,
            "none",
            "the file that usage records are appended to, as lines of JSON; several meters may \
             share it. In the configuration file only: with a path of their choice, users of the \
             control API could append to any file",
        )
        .in_file_only(),
        Key::new(
            "interval_s",
            Kind::Number(1, INTERVAL_MAX_S),
            "300",
            "the seconds between two records, 1 to 86400",
        ),
    ];
    // The filesystem of the records may not answer.
    const MAY_NOT_ANSWER: bool = true;
    const OBSERVES: bool = true;

    fn from_values(values: &Values) -> Self {
        Self {
            name: values.get("name"),
            records: values.get("records"),
            interval_s: values.get("interval_s"),
        }
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn open(&self, store: &str, below: Arc<dyn BlockDevice>) -> OpenedStage {
        observe(Self::WORD, store, below, || self.observer(store))
    }
}

impl MeterStage {
    fn observer(&self, store: &str) -> OpenedObserver {
        let name = self.name.as_deref().unwrap_or(store);
        let meter = Arc::new(Meter::new(name));
        let Some(path) = &self.records else {
            return Ok(Arc::new(MeterObserver::new(meter)));
        };
        let failed = |reason: String| StageError { stage: Self::WORD, reason };
        let names = Names { store: store.to_owned(), name: name.to_owned() };
        let recorder = Recorder::new(path.clone(), names, std::time::SystemTime::now());
        let recorder = recorder.map_err(|error| failed(format!("no random number: {error}")))?;
        let interval = Duration::from_secs(self.interval_s.unwrap_or(INTERVAL_S));
        let observer = MeterObserver::recorded(meter, recorder, interval);
        let failed = |error| failed(format!("no thread for its records: {error}"));
        Ok(Arc::new(observer.map_err(failed)?))
    }
}

/// A name is a label of metrics and a text in records.
fn is_meter_name(key: &str, value: &Value) -> Result<(), String> {
    let name = value.text();
    let is_good = (1..=NAME_MAX).contains(&name.len()) && !name.chars().any(char::is_control);
    if is_good {
        return Ok(());
    }
    Err(format!("`{key}` is empty, more than {NAME_MAX} bytes, or has control characters"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_short_text_without_control_characters() {
        let check = |name: &str| is_meter_name("name", &Value::Text(name.to_owned()));
        assert!(check("tenant 7/db-1").is_ok() && check(&"x".repeat(128)).is_ok());
        for bad in ["", "a\nb", &"x".repeat(129)] {
            assert!(check(bad).unwrap_err().contains("`name`"), "{bad:?}");
        }
    }

    #[test]
    fn only_the_path_of_the_records_is_refused_outside_of_the_file() {
        let keys = MeterStage::KEYS.iter().filter(|key| key.in_file_only);
        assert_eq!(keys.map(|key| key.name).collect::<Vec<_>>(), ["records"]);
    }
}
