//! What has to be true, what was found, and the commands that showed it, in the order of the run.

use crate::session::Session;
use crate::sidecore::{Sidecore, command};
use anyhow::Result;
use serde::Serialize;
use std::fmt::Write;

/// One thing that had to be true.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What.
    pub what: String,
    /// What was found.
    pub found: String,
    /// Whether it was true.
    pub ok: bool,
}

/// A command and what it printed, for people to see.
#[derive(Debug, Clone, Serialize)]
pub struct Shown {
    /// The command.
    pub command: String,
    /// What it printed.
    pub printed: String,
}

/// What was found in a run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Checks {
    /// Everything that was checked.
    pub checks: Vec<Check>,
    /// What some commands printed.
    pub shown: Vec<Shown>,
}

impl Checks {
    /// Notes whether something was true, and goes on: what comes later may say why it was not.
    pub(crate) fn note(&mut self, session: &Session<'_>, what: &str, ok: bool, found: impl Into<String>) {
        let check = Check { what: what.to_owned(), found: found.into(), ok };
        session.say(format!("{}: {} ({})", if ok { "ok" } else { "NOT SO" }, check.what, check.found));
        self.checks.push(check);
    }

    /// Runs a command for people to see what it prints.
    pub(crate) fn show(&mut self, sidecore: &Sidecore, arguments: &[&str]) -> Result<()> {
        let printed = sidecore.run(arguments)?;
        self.shown.push(Shown { command: command(arguments), printed });
        Ok(())
    }

    /// For people, under a title.
    pub(crate) fn text(&self, title: &str) -> String {
        let mut text = format!("{title}:\n\n");
        // Writing to a string cannot fail.
        for Check { what, found, ok } in &self.checks {
            let _ = writeln!(text, "  {:<4} {what}: {found}", if *ok { "yes" } else { "NO" });
        }
        for Shown { command, printed } in &self.shown {
            let _ = write!(text, "\n$ {command}\n{printed}");
        }
        text
    }

    /// What was not true.
    pub(crate) fn faults(&self) -> Vec<String> {
        let failed = self.checks.iter().filter(|check| !check.ok);
        failed.map(|Check { what, found, .. }| format!("not so: {what}; but: {found}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_true_is_named_with_what_was_found() {
        let check = |what: &str, ok| Check { what: what.to_owned(), found: "7 hits".to_owned(), ok };
        let checks = Checks { checks: vec![check("good", true), check("none is found", false)], ..Checks::default() };
        assert_eq!(checks.faults(), ["not so: none is found; but: 7 hits"]);
        let text = checks.text("Title");
        assert!(text.contains("  yes  good: 7 hits\n") && text.contains("  NO   none is found: 7 hits\n"), "{text}");
    }
}
