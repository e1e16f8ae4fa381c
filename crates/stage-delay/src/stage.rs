//! The keys of the stage.

use std::sync::Arc;

use sidecore_block::{BlockDevice, OpenedStage, Stage};
use sidecore_keys::{Key, Kind, Values, keys};
use sidecore_units::Nanos;

use crate::DelayStore;

/// More than a minute is a slip of the unit.
const MINUTE_US: u64 = 60_000_000;

keys! {
    /// Holds each request back.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct DelayStage {
        plain {}
        keys {
            #[required = "100"]
            "delay_us" => delay_us: u64 = 0, Kind::Number(0, MINUTE_US), "required",
                "the delay in microseconds; 0 to 60000000";
        }
    }
}

impl Stage for DelayStage {
    const WORD: &'static str = "delay";
    const MEANING: &'static str = "Holds each request back, to see how guests bear it.";
    const KEYS: &'static [Key] = Self::KEYS;

    fn from_values(values: &Values) -> Self {
        Self::from_values(values)
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn open(&self, _: &str, below: Arc<dyn BlockDevice>) -> OpenedStage {
        Ok(Arc::new(DelayStore::new(below, Nanos::from_micros(self.delay_us))))
    }
}
