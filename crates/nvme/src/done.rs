//! A completion callback.

use std::fmt;

/// Called exactly once, from any thread, when the request is complete. Dropping it calls it too,
/// because the requester would otherwise wait forever.
#[must_use]
pub struct Done(Option<Box<dyn FnOnce() + Send>>);

impl Done {
    /// Calls `then` upon completion.
    pub fn new(then: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(then)))
    }

    /// A completion that has no listener.
    pub const fn ignored() -> Self {
        Self(None)
    }

    /// Completes the request.
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
