//! The keys of the stage.

use std::sync::Arc;

use sidecore_block::{BlockDevice, OpenedStage, Stage, StageError};
use sidecore_keys::{Key, Kind, Values, keys};

use crate::store::{IntegrityStore, OpenOptions};

keys! {
    /// Checks what is read.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct IntegrityStage {
        plain {}
        keys {
            "uuid" => uuid: Option<String> = None, Kind::Text, "any",
                "the UUID that `sidecore integrity format` has printed: another store is refused";
        }
    }
}

impl Stage for IntegrityStage {
    const WORD: &'static str = "integrity";
    const MEANING: &'static str = "Keeps a checksum of each block, and checks what is read: \
                                   [silent faults](integrity.md).";
    const KEYS: &'static [Key] = Self::KEYS;
    const MAY_NOT_ANSWER: bool = true;
    const TRANSFORMS: bool = true;

    fn from_values(values: &Values) -> Self {
        Self::from_values(values)
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn open(&self, store: &str, below: Arc<dyn BlockDevice>) -> OpenedStage {
        let options = OpenOptions::with_uuid(self.uuid.clone());
        match IntegrityStore::open(below, store, &options) {
            Ok(opened) => Ok(Arc::new(opened)),
            Err(error) => Err(StageError { stage: Self::WORD, reason: error.to_string() }),
        }
    }
}
