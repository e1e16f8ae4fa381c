//! Stores that were refused as legs, and tell which epochs were in force.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::header::{Header, Identity};

/// The headers of such stores. Clones share them: an opening adds the header of a store that it
/// refuses, for the next opening without that store, which need not be readable any more.
#[derive(Clone, Default)]
pub struct Former(Arc<Mutex<Vec<Header>>>);

impl Former {
    pub(crate) fn note(&self, header: &Header) {
        self.lock().push(header.clone());
    }

    /// The headers of this mirror.
    pub(crate) fn of(&self, identity: &Identity) -> Vec<Header> {
        self.lock().iter().filter(|header| header.identity == *identity).cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Header>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
