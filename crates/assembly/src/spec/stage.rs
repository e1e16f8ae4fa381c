//! The stages that there are. A stage is its own crate, and a line at the end of this file.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use sidecore_block::{BlockDevice, OpenedStage, Stage, open_stage};
use sidecore_keys::{Key, Kind, Value, Values, Variant};
use sidecore_offload::{THREADS_MAX, offload};

use super::DEVICE_IN_PATH;

/// The key that all types of stages have, beside their own.
pub const STAGE_THREADS: Key = Key::new(
    "threads",
    Kind::Number(0, THREADS_MAX),
    "0",
    "the number of [threads](stages.md#threads-of-its-own) of its own that the stage runs on, for \
     one that takes long; 0 runs it on the sidecores of its disks; 0 to 16",
);

/// The key of a store for the stages in front of it.
pub const STAGE: Key = Key::new(
    "stage",
    Kind::Sections("store.stage", StageSpec::VARIANTS),
    "none",
    "the [stages](#storestage) in front of it",
);

/// The key of a pattern for the stages in front of each of its devices.
pub(super) const SERVE_STAGE: Key = Key::new(
    "stage",
    Kind::Sections("serve.stage", StageSpec::VARIANTS),
    "none",
    "the [stages](#storestage) in front of each device, as sections `[[serve.stage]]`. `{device}` \
     in their texts and paths stands for the name of the device",
);

/// A stage that is not one device's: its word, and the values of its keys, in whose texts and paths
/// [`DEVICE_IN_PATH`] stands for the name of a device.
pub type StageOfMany = (&'static str, Values);

/// A stage: an interposer on the path of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageSpec {
    /// The stage, with its own keys.
    pub kind: StageKind,
    /// The threads of its own that it runs on; 0 for the sidecores of its disks.
    pub threads: u8,
}

impl From<StageKind> for StageSpec {
    /// The stage on the sidecores of its disks.
    fn from(kind: StageKind) -> Self {
        Self { kind, threads: 0 }
    }
}

/// The keys of a stage, and behind them [`STAGE_THREADS`].
const fn and_threads<const N: usize>(own: &[Key]) -> [Key; N] {
    let mut keys = [STAGE_THREADS; N];
    let mut index = 0;
    while index < own.len() {
        keys[index] = own[index];
        index += 1;
    }
    keys
}

macro_rules! stages {
    ($( $name:ident($stage:ty); )*) => {
        /// A stage by its type.
        #[allow(missing_docs)]
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum StageKind {
            $( $name($stage), )*
        }

        impl StageSpec {
            /// Each stage by its word in the configuration and in reports.
            pub const VARIANTS: &'static [Variant] = &[$(
                Variant {
                    word: <$stage as Stage>::WORD,
                    meaning: <$stage as Stage>::MEANING,
                    keys: &and_threads::<{ <$stage as Stage>::KEYS.len() + 1 }>(
                        <$stage as Stage>::KEYS,
                    ),
                },
            )*];
        }

        impl StageKind {
            /// The stage of this word, with these values of its keys.
            fn from_values(word: &str, values: &Values) -> Option<Self> {
                $( if word == <$stage as Stage>::WORD {
                    return Some(Self::$name(<$stage as Stage>::from_values(values)));
                } )*
                None
            }

            /// The word for it in the configuration and in reports.
            const fn word(&self) -> &'static str {
                match self {
                    $( Self::$name(_) => <$stage as Stage>::WORD, )*
                }
            }

            /// Whether no write gets past it.
            fn is_read_only(&self) -> bool {
                match self {
                    $( Self::$name(stage) => stage.is_read_only(), )*
                }
            }

            /// Whether the store holds other bytes because of it.
            const fn transforms(&self) -> bool {
                match self {
                    $( Self::$name(_) => <$stage as Stage>::TRANSFORMS, )*
                }
            }

            /// Whether a thread of its own opens it.
            const fn may_not_answer(&self) -> bool {
                match self {
                    $( Self::$name(_) => <$stage as Stage>::MAY_NOT_ANSWER, )*
                }
            }

            /// The device that it makes of the one below it, for the store of this name. Its
            /// panics are contained.
            fn open(&self, store: &str, below: Arc<dyn BlockDevice>) -> OpenedStage {
                match self {
                    $( Self::$name(stage) => open_stage(stage, store, below), )*
                }
            }
        }
    };
}

stages! {
    Delay(sidecore_stage_delay::DelayStage);
    Encrypt(sidecore_stage_encrypt::EncryptStage);
    Fault(sidecore_stage_fault::FaultPlan);
    Integrity(sidecore_stage_integrity::IntegrityStage);
    Meter(sidecore_stage_meter::MeterStage);
    ReadOnly(sidecore_stage_read_only::ReadOnlyStage);
    Record(sidecore_stage_record::RecordStage);
}

impl StageSpec {
    /// The stage of this word, with these values of its keys.
    #[must_use]
    pub fn from_values(word: &str, values: &Values) -> Option<Self> {
        let threads = values.get(STAGE_THREADS.name).unwrap_or(0);
        Some(Self { kind: StageKind::from_values(word, values)?, threads })
    }

    /// The stages that these values of [`STAGE`] name, in the order of a request.
    #[must_use]
    pub fn list(values: &Values) -> Vec<Self> {
        let sections: Vec<(&str, Values)> = values.get("stage").unwrap_or_default();
        sections.iter().filter_map(|(word, values)| Self::from_values(word, values)).collect()
    }

    /// The word for it in the configuration and in reports.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        self.kind.word()
    }

    /// Whether no write gets past it.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.kind.is_read_only()
    }

    /// Whether the store holds other bytes because of it.
    pub(crate) const fn transforms(&self) -> bool {
        self.kind.transforms()
    }

    /// Whether a thread of its own opens it.
    pub(crate) const fn may_not_answer(&self) -> bool {
        self.kind.may_not_answer()
    }

    /// The device that it makes of the one below it, for the store of this name. Its panics are
    /// contained.
    pub(crate) fn open(&self, store: &str, below: Arc<dyn BlockDevice>) -> OpenedStage {
        match self.threads {
            0 => self.kind.open(store, below),
            threads => {
                let open = |below| self.kind.open(store, below);
                offload(self.word(), threads.into(), below, open)
            }
        }
    }

    /// The file that it appends usage records to, if it writes any.
    #[must_use]
    pub fn records(&self) -> Option<&Path> {
        match &self.kind {
            StageKind::Meter(meter) => meter.records.as_deref(),
            _ => None,
        }
    }

    /// The file that it makes for a recording, if it records.
    #[must_use]
    pub fn recording(&self) -> Option<&Path> {
        match &self.kind {
            StageKind::Record(record) => Some(&record.file),
            _ => None,
        }
    }

    /// The stage of the device of this name.
    ///
    /// # Errors
    /// With the name in it, a value breaks the rule of its key.
    pub(crate) fn of_device((word, values): &StageOfMany, device: &str) -> Result<Self, String> {
        let values = values.0.iter().map(|(key, value)| (*key, with_name(value, device)));
        let values = Values(values.collect());
        let failed = |why: String| format!("stage \"{word}\": {why}");
        let variant = Self::VARIANTS.iter().find(|variant| variant.word == *word);
        for key in variant.iter().flat_map(|variant| variant.keys) {
            if let Some(value) = values.0.get(key.name) {
                (key.check)(key.name, value).map_err(failed)?;
            }
        }
        Self::from_values(word, &values).ok_or_else(|| failed("there is no such stage".to_owned()))
    }
}

/// The value with a device's name in its texts.
fn with_name(value: &Value, device: &str) -> Value {
    let named = |text: &String| text.replace(DEVICE_IN_PATH, device);
    match value {
        Value::Text(text) => Value::Text(named(text)),
        Value::Texts(texts) => Value::Texts(texts.iter().map(named).collect()),
        // Part by part: the directory of the configuration file may be no text.
        Value::Path(path) => {
            let part = |part: &OsStr| match part.to_str() {
                Some(text) => text.replace(DEVICE_IN_PATH, device).into(),
                None => part.to_owned(),
            };
            Value::Path(path.iter().map(part).collect())
        }
        other => other.clone(),
    }
}
