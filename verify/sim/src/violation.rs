//! What a simulation says when something is wrong.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Steps that are told before the one in which something was wrong.
const STEPS_TOLD: usize = 100;

/// Something that must not be.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The seed that shows it again.
    pub seed: u64,
    /// The run, from 0.
    pub run: u64,
    /// How it was found.
    pub when: String,
    /// What is wrong.
    pub what: String,
    /// What was done before, with the recording's position.
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
    /// `what` is wrong, found at `position` of the recording. Of the `trace`, that tells the steps which had begun by then.
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

/// What `f` gives; a panic is an error like another.
pub(crate) fn no_panic<T>(f: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| Err(format!("panicked: {}", message(panic.as_ref()))))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}
