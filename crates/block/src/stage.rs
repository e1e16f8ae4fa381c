//! Stages: interposers on the path of requests.

use std::sync::Arc;

use sidecore_keys::{Key, Values};

use crate::{BlockDevice, contain};

/// The specification of a stage. It is all that the configuration, the control API, reports and the
/// manual need to know.
pub trait Stage: Sized {
    /// The word for it in the configuration and in reports.
    const WORD: &'static str;
    /// Its effect and its purpose: a paragraph in Markdown.
    const MEANING: &'static str;
    /// Its keys.
    const KEYS: &'static [Key];
    /// Whether [`open`](Self::open) reads files or takes long, so that a thread of its own calls
    /// it.
    const MAY_NOT_ANSWER: bool = false;

    /// Whether the device below holds other bytes than the guest's, so that the stage cannot come
    /// or go once there are some.
    const TRANSFORMS: bool = false;

    /// Whether the stage only looks at requests: [`open`](Self::open) calls
    /// [`observe`](crate::observe()), which contains its panics at less cost than
    /// [`contain`](crate::contain()) does for other stages.
    const OBSERVES: bool = false;

    /// The stage with these values of its keys. Each value is one that its key allows.
    fn from_values(values: &Values) -> Self;

    /// Whether no write gets past it.
    fn is_read_only(&self) -> bool;

    /// The device that it makes of the one below it, as a stage of the store called `store`.
    ///
    /// # Errors
    /// A file that the stage needs cannot be used, or the device below does not fit the stage.
    fn open(&self, store: &str, below: Arc<dyn BlockDevice>) -> OpenedStage;
}

/// Opens a stage of the store called `store` in front of `below`, with its panics contained.
///
/// # Errors
/// The stage's, or its panic.
pub fn open_stage<S: Stage>(stage: &S, store: &str, below: Arc<dyn BlockDevice>) -> OpenedStage {
    if S::OBSERVES {
        return stage.open(store, below);
    }
    contain(S::WORD, store, below, |below| stage.open(store, below))
}

/// The device that a stage has made, or why it could not.
pub type OpenedStage = Result<Arc<dyn BlockDevice>, StageError>;

/// Why a stage cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stage \"{stage}\": {reason}")]
pub struct StageError {
    /// The stage's word.
    pub stage: &'static str,
    /// The file or value at fault, the rule, and the remedy.
    pub reason: String,
}
