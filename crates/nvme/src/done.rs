//! The answer to what cannot be waited for.

use std::fmt;

/// Called once, from any thread, when what was asked for is done. One that is dropped is called as
/// well: whoever asked would wait for ever.
#[must_use]
pub struct Done(Option<Box<dyn FnOnce() + Send>>);

impl Done {
    /// Calls `then` when it is done.
    pub fn new(then: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(then)))
    }

    /// Nobody waits.
    pub const fn nobody() -> Self {
        Self(None)
    }

    /// It is done.
    pub fn call(self) {
        drop(self);
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then();
        }
    }
}

impl fmt::Debug for Done {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Done").field(&self.0.is_some()).finish()
    }
}
