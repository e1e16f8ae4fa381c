//! Mirrors: reported, and changed by an operator. Changes wait for the legs.

use super::Assembly;
use crate::operation::OperationError;
use crate::report::MirrorReport;

impl Assembly {
    /// Reports the mirrors in use, by their names.
    #[must_use]
    pub fn mirrors(&self) -> Vec<MirrorReport> {
        self.lists.mirrors.reports()
    }

    /// Uses a store of a mirror's list that is a leg, and was missing or has failed.
    ///
    /// # Errors
    /// It is no leg of this mirror, or cannot be used with the others: nothing has changed then.
    pub fn attach_leg(&self, mirror: &str, store: &str) -> Result<(), OperationError> {
        self.lists.mirrors.attach(mirror, store)
    }

    /// Makes a store of a mirror's list a new leg, and copies everything to it. Returns its number.
    ///
    /// # Errors
    /// The store cannot be a leg, or the mirror waits.
    pub fn add_leg(&self, mirror: &str, store: &str) -> Result<usize, OperationError> {
        self.lists.mirrors.add(mirror, store)
    }

    /// Lets a leg of a mirror go for good, by its store or its number.
    ///
    /// # Errors
    /// There is no such leg, it is the only one in sync, or the mirror waits.
    pub fn remove_leg(&self, mirror: &str, leg: &str) -> Result<(), OperationError> {
        self.lists.mirrors.remove(mirror, leg)
    }

    /// Writes bytes of one leg to another, to the end unless there is a length.
    ///
    /// # Errors
    /// One of them is not in sync, or fails.
    pub fn repair_leg(
        &self,
        mirror: &str,
        legs: (&str, &str),
        range: (u64, Option<u64>),
    ) -> Result<(), OperationError> {
        self.lists.mirrors.repair(mirror, legs, range)
    }

    /// Lets half of a mirror's legs go on without the others, once. Their numbers are `without`.
    ///
    /// # Errors
    /// The mirror asks no operator, waits for no permission, or lacks other legs than these.
    pub fn permit_mirror(&self, mirror: &str, without: &[usize]) -> Result<(), OperationError> {
        self.lists.mirrors.permit(mirror, without)
    }
}
