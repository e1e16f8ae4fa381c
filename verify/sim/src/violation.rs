//! The report of a failed check.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The number of steps that a report shows.
const STEPS_TOLD: usize = 100;

/// A failed check, with the steps before it.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The seed that shows the violation again.
    pub seed: u64,
    /// The run, from 0.
    pub run: u64,
    /// The check that failed.
    pub when: String,
    /// The difference that it found.
    pub what: String,
    /// The last steps, each with the position of the recording.
    pub trace: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}, run {}, {}: {}", self.seed, self.run, self.when, self.what)?;
        writeln!(f, "before that (position of the recording, operation):")?;
        self.trace.iter().try_for_each(|line| writeln!(f, "  {line}"))?;
        write!(f, "replay this with SIDECORE_SEED={}", self.seed)
    }
}

impl Violation {
    /// A violation `what`, found at `position` of the recording. The report shows the last steps of
    /// `trace` that had begun by then.
    pub(crate) fn new(
        (seed, run): (u64, u64),
        when: String,
        what: String,
        trace: &[(usize, String)],
        position: usize,
    ) -> Box<Self> {
        let begun = trace.partition_point(|(at, _)| *at < position.max(1));
        let told = &trace[begun.saturating_sub(STEPS_TOLD)..begun];
        let trace = told.iter().map(|(at, what)| format!("{at} {what}")).collect();
        Box::new(Self { seed, run, when, what, trace })
    }
}

/// The result of `f`; a panic becomes an error.
pub(crate) fn no_panic<T>(f: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f))
        .unwrap_or_else(|panic| Err(format!("panicked: {}", message(panic.as_ref()))))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}
