//! Changes of mirrors by an operator.

use std::io;
use std::sync::Arc;

use sidecore_block::BlockDevice;
use sidecore_mirror::{LegSet, MAX_LEGS, Mirror, MirrorError};

use super::{MirrorInUse, Mirrors, about};
use crate::operation::{ErrorKind, OperationError};
use crate::remote::random;

/// Bytes that are repaired at once: writes of users to them wait meanwhile.
const REPAIR_BYTES: u64 = 4 << 20;

fn conflict(message: String) -> OperationError {
    OperationError::new(ErrorKind::Conflict, message)
}

fn refused(store: &str, error: MirrorError) -> OperationError {
    let kind = match &error {
        MirrorError::Io(_) => ErrorKind::Failed,
        MirrorError::Closed => ErrorKind::Ending,
        _ => ErrorKind::Conflict,
    };
    OperationError::new(kind, about(store, error))
}

impl Mirrors {
    fn find(&self, name: &str) -> Result<(Arc<MirrorInUse>, Arc<Mirror>), OperationError> {
        let unknown = || {
            let message = format!("there is no mirror \"{name}\" in use; `sidecore mirror list`");
            OperationError::new(ErrorKind::NotFound, message)
        };
        let found = self.get(name).ok_or_else(unknown)?;
        let state = found.state();
        let closed = || {
            let why = state.failure.as_deref().unwrap_or("it is being opened");
            conflict(format!("mirror \"{name}\" is not open: {why}"))
        };
        let mirror = state.mirror.clone().ok_or_else(closed)?;
        drop(state);
        Ok((found, mirror))
    }

    /// Uses the store of a leg that was missing or has failed.
    pub(crate) fn attach(&self, name: &str, store: &str) -> Result<(), OperationError> {
        let (found, mirror) = self.find(name)?;
        let device = found.device(store)?;
        mirror.attach(device).map_err(|error| refused(store, error))?;
        found.is_leg(store);
        Ok(())
    }

    /// Makes a store a new leg, and copies everything to it. Returns its number.
    pub(crate) fn add(&self, name: &str, store: &str) -> Result<usize, OperationError> {
        let (found, mirror) = self.find(name)?;
        let device = found.device(store)?;
        let status = mirror.status();
        let is_free = |leg: &usize| !status.members.has(*leg);
        // A number that was used before is one more that reports have to tell apart.
        let unused = (0..MAX_LEGS).find(|leg| is_free(leg) && !status.former.has(*leg));
        let free = unused.or_else(|| (0..MAX_LEGS).find(is_free));
        let full = || conflict(format!("a mirror has at most {MAX_LEGS} legs; remove one before"));
        let number = free.ok_or_else(full)?;
        let failed = |error: io::Error| refused(store, error.into());
        let [identity] = random().map_err(failed)?;
        let added = mirror.add((number, identity.max(1)), device);
        added.map_err(|error| refused(store, error))?;
        found.is_leg(store);
        Ok(number)
    }

    /// Lets a leg go for good. It is named by its store, or by its number.
    pub(crate) fn remove(&self, name: &str, leg: &str) -> Result<(), OperationError> {
        let (found, mirror) = self.find(name)?;
        let number = found.leg(leg, &mirror)?;
        let store = found.store_of(number, &mirror);
        mirror.remove(number).map_err(|error| refused(leg, error))?;
        if let Some(store) = store {
            let why = "it was removed from the mirror; take it out of `legs`, or add it again";
            found.state().refused.insert(store, why.to_owned());
        }
        Ok(())
    }

    /// Writes the bytes of one leg to another.
    pub(crate) fn repair(
        &self,
        name: &str,
        (from, to): (&str, &str),
        (offset_bytes, len_bytes): (u64, Option<u64>),
    ) -> Result<(), OperationError> {
        let (found, mirror) = self.find(name)?;
        let (source, target) = (found.leg(from, &mirror)?, found.leg(to, &mirror)?);
        if source == target {
            return Err(conflict("a leg is repaired from another one; name two".to_owned()));
        }
        let rest = mirror.layout().capacity_bytes.saturating_sub(offset_bytes);
        let mut left = len_bytes.unwrap_or(rest);
        let mut at = offset_bytes;
        loop {
            let piece = left.min(REPAIR_BYTES);
            mirror.repair((source, target), (at, piece)).map_err(|error| refused(to, error))?;
            left = left.saturating_sub(piece);
            at = at.saturating_add(piece);
            if left == 0 {
                return Ok(());
            }
        }
    }

    /// Lets half of the legs go on without these, once.
    pub(crate) fn permit(&self, name: &str, without: &[usize]) -> Result<(), OperationError> {
        let (_, mirror) = self.find(name)?;
        let without = without.iter().copied().map(LegSet::of).fold(LegSet::EMPTY, LegSet::with);
        mirror.permit(without).map_err(|error| refused(name, error))
    }
}

impl MirrorInUse {
    /// A store of the mirror's list that is open.
    fn device(&self, store: &str) -> Result<Arc<dyn BlockDevice>, OperationError> {
        if !self.spec.legs.iter().any(|leg| leg == store) {
            let message = format!(
                "store \"{store}\" is none of the `legs` of mirror \"{}\" in the configuration; \
                 put it there, and restart the daemon",
                self.name
            );
            return Err(OperationError::new(ErrorKind::NotFound, message));
        }
        match self.state().stores.get(store) {
            Some(Ok(device)) => Ok(Arc::clone(device)),
            Some(Err(why)) => Err(conflict(format!("store \"{store}\" is not open: {why}"))),
            None => Err(conflict(format!("store \"{store}\" does not answer yet"))),
        }
    }

    /// The number of a leg that is named by its store or by its number. The name of a store is
    /// never a number of another one's leg, also if the store is none now.
    fn leg(&self, name: &str, mirror: &Mirror) -> Result<usize, OperationError> {
        let number = self.number_of(name, &self.state(), mirror);
        let members = mirror.status().members;
        let is_store = self.spec.legs.iter().any(|leg| leg == name);
        let named = || name.parse().ok().filter(|leg| !is_store && members.has(*leg));
        let unknown = || {
            let mut message =
                format!("\"{name}\" is no leg of mirror \"{}\"; `sidecore mirror list`", self.name);
            if is_store && name.parse::<usize>().is_ok() {
                message +=
                    ". A store has this name, so no number of a leg is meant; rename the store";
            }
            OperationError::new(ErrorKind::NotFound, message)
        };
        number.or_else(named).ok_or_else(unknown)
    }

    /// The store of a leg.
    pub(super) fn store_of(&self, leg: usize, mirror: &Mirror) -> Option<String> {
        let state = self.state();
        let is_it = |store: &&String| self.number_of(store, &state, mirror) == Some(leg);
        self.spec.legs.iter().find(is_it).cloned()
    }

    /// Notes that a store has become a leg.
    fn is_leg(&self, store: &str) {
        self.state().refused.remove(store);
        self.read_preferred();
    }
}
