//! What is said of a controller that is not open.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A controller that is not open: none of its volumes is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClosedControllerReport {
    /// The controller.
    pub name: String,
    /// The store that it is to own.
    pub store: String,
    /// Whether it may still be opened.
    pub state: ControllerState,
    /// Why it is not open.
    pub reason: String,
}

impl fmt::Display for ClosedControllerReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "controller \"{}\" is {}: {}", self.name, self.state.word(), self.reason)
    }
}

/// Where a controller that is not open stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ControllerState {
    /// It is opened when its store answers.
    Opening,
    /// It could not be opened; the next start of the daemon tries again.
    Refused,
}

impl ControllerState {
    /// The word for it in reports.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Refused => "refused",
        }
    }
}
