//! Reports of controllers that are not open.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A controller that is not open. None of its volumes is served.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct ClosedControllerReport {
    /// The controller's name in the configuration.
    pub name: String,
    /// The name of the controller's store.
    pub store: String,
    /// Whether the controller may still be opened.
    pub state: ControllerState,
    /// Why the controller is not open.
    pub reason: String,
}

impl fmt::Display for ClosedControllerReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "controller \"{}\" is {}: {}", self.name, self.state.word(), self.reason)
    }
}

/// The state of a controller that is not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ControllerState {
    /// The controller is opened when its store answers.
    Opening,
    /// The controller could not be opened. The next start of the daemon tries again.
    Refused,
}

impl ControllerState {
    /// The word for the state in reports.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Refused => "refused",
        }
    }
}
