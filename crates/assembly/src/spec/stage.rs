//! The stages that there are. A stage is its own crate, and a line at the end of this file.

use std::sync::Arc;

use sidecore_block::{BlockDevice, OpenedStage, Stage};
use sidecore_keys::{Key, Kind, Values, Variant};

/// The key of a store for the stages in front of it.
pub const STAGE: Key = Key::new(
    "stage",
    Kind::Sections("store.stage", StageSpec::VARIANTS),
    "none",
    "the [stages](#storestage) in front of it",
);

macro_rules! stages {
    ($( $name:ident($stage:ty); )*) => {
        /// A stage: an interposer on the path of requests.
        #[allow(missing_docs)]
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum StageSpec {
            $( $name($stage), )*
        }

        impl StageSpec {
            /// Each stage by its word in the configuration and in reports.
            pub const VARIANTS: &'static [Variant] = &[$(
                Variant {
                    word: <$stage as Stage>::WORD,
                    meaning: <$stage as Stage>::MEANING,
                    keys: <$stage as Stage>::KEYS,
                },
            )*];

            /// The stage of this word, with these values of its keys.
            #[must_use]
            pub fn from_values(word: &str, values: &Values) -> Option<Self> {
                $( if word == <$stage as Stage>::WORD {
                    return Some(Self::$name(<$stage as Stage>::from_values(values)));
                } )*
                None
            }

            /// The stages that these values of [`STAGE`] name, in the order of a request.
            #[must_use]
            pub fn list(values: &Values) -> Vec<Self> {
                let sections: Vec<(&str, Values)> = values.get("stage").unwrap_or_default();
                sections
                    .iter()
                    .filter_map(|(word, values)| Self::from_values(word, values))
                    .collect()
            }

            /// The word for it in the configuration and in reports.
            #[must_use]
            pub const fn word(&self) -> &'static str {
                match self {
                    $( Self::$name(_) => <$stage as Stage>::WORD, )*
                }
            }

            /// Whether no write gets past it.
            #[must_use]
            pub fn is_read_only(&self) -> bool {
                match self {
                    $( Self::$name(stage) => stage.is_read_only(), )*
                }
            }

            /// Whether a thread of its own opens it.
            pub(crate) const fn may_not_answer(&self) -> bool {
                match self {
                    $( Self::$name(_) => <$stage as Stage>::MAY_NOT_ANSWER, )*
                }
            }

            /// The device that it makes of the one below it, for the store of this name.
            pub(crate) fn open(
                &self,
                store: &str,
                below: Arc<dyn BlockDevice>,
            ) -> OpenedStage {
                match self {
                    $( Self::$name(stage) => stage.open(store, below), )*
                }
            }
        }
    };
}

stages! {
    Delay(sidecore_stage_delay::DelayStage);
    Encrypt(sidecore_stage_encrypt::EncryptStage);
    Fault(sidecore_stage_fault::FaultPlan);
    ReadOnly(sidecore_stage_read_only::ReadOnlyStage);
}
