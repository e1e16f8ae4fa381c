//! The checks of a run with their results, and the commands that show them, in the order of the
//! run.

use crate::session::Session;
use crate::sidecore::{Sidecore, command};
use anyhow::Result;
use serde::Serialize;
use std::fmt::Write;

/// A condition that must hold, with the result of its check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The condition.
    pub what: String,
    /// The value that was found.
    pub found: String,
    /// Whether the condition holds.
    pub ok: bool,
}

/// A command and its output, for the reader of the report.
#[derive(Debug, Clone, Serialize)]
pub struct Shown {
    /// As a user would type it.
    pub command: String,
    /// The command's standard output.
    pub printed: String,
}

/// The checks and the commands of a run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Checks {
    /// All checks, in order.
    pub checks: Vec<Check>,
    /// Commands with their output, in order.
    pub shown: Vec<Shown>,
}

impl Checks {
    /// Notes a check's result. The run continues, because a later check may show why this one
    /// failed.
    pub(crate) fn note(
        &mut self,
        session: &Session<'_>,
        what: &str,
        ok: bool,
        found: impl Into<String>,
    ) {
        let check = Check { what: what.to_owned(), found: found.into(), ok };
        session.say(format!(
            "{}: {} ({})",
            if ok { "ok" } else { "NOT SO" },
            check.what,
            check.found
        ));
        self.checks.push(check);
    }

    /// Runs a command and notes its output for the report.
    pub(crate) fn show(&mut self, sidecore: &Sidecore, arguments: &[&str]) -> Result<()> {
        let printed = sidecore.run(arguments)?;
        self.shown.push(Shown { command: command(arguments), printed });
        Ok(())
    }

    /// The report under a title.
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

    /// The checks that failed, in words.
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
        let check =
            |what: &str, ok| Check { what: what.to_owned(), found: "7 hits".to_owned(), ok };
        let checks = Checks {
            checks: vec![check("good", true), check("none is found", false)],
            ..Checks::default()
        };
        assert_eq!(checks.faults(), ["not so: none is found; but: 7 hits"]);
        let text = checks.text("Title");
        assert!(
            text.contains("  yes  good: 7 hits\n")
                && text.contains("  NO   none is found: 7 hits\n"),
            "{text}"
        );
    }
}
