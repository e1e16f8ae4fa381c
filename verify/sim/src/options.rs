//! The length of a history in which the power is cut after every event.

/// The length of a history, and the rule of it that does not hold.
#[derive(Clone, Copy, Debug)]
pub struct Options<R> {
    /// Runs. Each one starts from what a power cut of the run before has left.
    pub runs: u64,
    /// Steps in each run.
    pub steps: u64,
    /// The rule to neglect.
    pub neglect: Option<R>,
}

impl<R> Default for Options<R> {
    fn default() -> Self {
        Self { runs: 3, steps: 250, neglect: None }
    }
}
