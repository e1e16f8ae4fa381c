//! The report of `status`.

use serde::Serialize;
use std::fmt::Write as _;

/// Whether a setting is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    InForce,
    AfterReboot,
    Off,
    Cannot,
}

impl State {
    fn words(self) -> &'static str {
        match self {
            State::InForce => "in force",
            State::AfterReboot => "after a reboot",
            State::Off => "off",
            State::Cannot => "cannot be",
        }
    }
}

/// A setting of a device, with its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) device: String,
    pub(crate) setting: &'static str,
    pub(crate) state: State,
    /// The values of the setting.
    pub(crate) value: String,
    /// The reason of the state, where there is one.
    pub(crate) reason: String,
}

impl Finding {
    pub(crate) fn new(device: &str, setting: &'static str) -> Finding {
        let (value, reason) = (String::new(), String::new());
        Finding { device: device.to_owned(), setting, state: State::Off, value, reason }
    }

    pub(crate) fn is(mut self, state: State, value: impl Into<String>) -> Finding {
        (self.state, self.value) = (state, value.into());
        self
    }

    pub(crate) fn because(mut self, reason: impl Into<String>) -> Finding {
        self.reason = reason.into();
        self
    }

    pub(crate) fn cannot(self, reason: impl Into<String>) -> Finding {
        self.is(State::Cannot, "").because(reason)
    }
}

/// The report as a table.
pub(crate) fn table(findings: &[Finding]) -> String {
    let width = |of: fn(&Finding) -> &str| findings.iter().map(|f| of(f).len()).max().unwrap_or(0);
    let (device, setting) = (width(|f| &f.device), width(|f| f.setting));
    let mut text = String::new();
    for finding in findings {
        let state = finding.state.words();
        let more = [finding.value.as_str(), finding.reason.as_str()];
        let more: Vec<&str> = more.into_iter().filter(|more| !more.is_empty()).collect();
        let line = format!(
            "{:<device$}  {:<setting$}  {state:<14}  {}",
            finding.device,
            finding.setting,
            more.join("; ")
        );
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}
