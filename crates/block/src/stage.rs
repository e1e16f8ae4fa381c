//! Stages: interposers on the path of requests.

use std::sync::Arc;

use sidecore_keys::{Key, Values};

use crate::BlockDevice;

/// The specification of a stage. It is all that the configuration, the control API, reports and the
/// manual need to know.
pub trait Stage: Sized {
    /// The word for it in the configuration and in reports.
    const WORD: &'static str;
    /// Its effect and its purpose: a paragraph in Markdown.
    const MEANING: &'static str;
    /// Its keys.
    const KEYS: &'static [Key];

    /// The stage with these values of its keys. Each value is one that its key allows.
    fn from_values(values: &Values) -> Self;

    /// Whether no write gets past it.
    fn is_read_only(&self) -> bool;

    /// The device that it makes of the one below it.
    fn open(&self, below: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice>;
}
