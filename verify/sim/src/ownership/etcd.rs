//! A cluster of etcd, as far as its clients can see it.

use std::collections::BTreeMap;

use sidecore_ownership::{Answer, Call, Held, Ledger, Member, Origin, Seen};
use sidecore_units::Nanos;

use super::candidate::process_of;

/// The name of the only store.
pub(crate) const STORE: &str = "disk";

#[derive(Clone)]
pub(crate) struct Etcd {
    pub(super) cluster: u64,
    pub(super) term: u64,
    pub(super) revision: u64,
    /// With the time when each ends.
    leases: BTreeMap<i64, Nanos>,
    /// With the lease that it is bound to.
    owner: Option<(Held, i64)>,
    ledger: Option<(u64, Ledger)>,
}

impl Etcd {
    pub(crate) fn new() -> Self {
        Self {
            cluster: 1,
            term: 1,
            revision: 1,
            leases: BTreeMap::new(),
            owner: None,
            ledger: None,
        }
    }

    /// Another cluster with the same keys, made from a backup of this one.
    pub(super) fn copied(&self) -> Self {
        Self { cluster: 2, revision: self.revision + 1_000, ..self.clone() }
    }

    /// Revokes the leases that have ended.
    pub(crate) fn pass(&mut self, now: Nanos) {
        let ended: Vec<i64> =
            self.leases.iter().filter(|(_, ends)| **ends <= now).map(|(id, _)| *id).collect();
        ended.into_iter().for_each(|id| self.revoke(id));
    }

    fn revoke(&mut self, id: i64) {
        if self.leases.remove(&id).is_some() {
            self.revision += 1;
        }
        if self.owner.as_ref().is_some_and(|(_, lease)| *lease == id) {
            self.owner = None;
        }
    }

    /// Revokes the owner's lease before its end, as a deposed leader can (etcd issue 15247).
    pub(super) fn revoke_owner(&mut self) {
        if let Some((_, lease)) = self.owner {
            self.revoke(lease);
        }
    }

    /// Elects another leader, which gives all leases their whole time again.
    pub(super) fn elect(&mut self, now: Nanos, ttl: Nanos) {
        self.term += 1;
        self.leases.values_mut().for_each(|ends| *ends = now.after(ttl));
    }

    /// The keys are deleted, by an operator.
    pub(super) fn delete_keys(&mut self) {
        (self.owner, self.ledger) = (None, None);
        self.revision += 1;
    }

    const fn origin(&self) -> Origin {
        Origin { cluster: self.cluster, member: 1, term: self.term, revision: self.revision }
    }

    /// Carries out a call. `is_deposed` if it reached a leader of the last term that does not know.
    pub(crate) fn carry_out(
        &mut self,
        now: Nanos,
        call: &Call,
        me: &Member,
        is_deposed: bool,
    ) -> Answer {
        let time = |ttl_s: u64| Nanos::from_millis(ttl_s * 1_000);
        match call {
            Call::Grant { ttl_s } => {
                self.revision += 1;
                // Never given twice, also not after a restore from a backup.
                let lease = i64::try_from(now.0 * 64 + process_of(me) % 64).unwrap_or(0);
                self.leases.insert(lease, now.after(time(*ttl_s)));
                Answer::Granted { origin: self.origin(), lease, ttl_s: *ttl_s }
            }
            Call::Renew { lease } => {
                let mut origin = self.origin();
                let mut ttl_s = 3;
                if is_deposed {
                    origin.term -= 1;
                } else {
                    match self.leases.get_mut(lease) {
                        Some(ends) => *ends = now.after(time(3)),
                        None => ttl_s = 0,
                    }
                }
                let owner = self.owner.as_ref().map(|(held, _)| held.clone());
                let seen = Seen { owner, ledger: self.ledger.clone(), fault: None };
                let seen = BTreeMap::from([(STORE.to_owned(), seen)]);
                Answer::Renewed { renewal: (origin, ttl_s), read: self.origin(), seen }
            }
            Call::Revoke { lease } => {
                self.revoke(*lease);
                Answer::Done { origin: self.origin(), is_done: true }
            }
            _ => {
                let is_done = self.transact(call);
                Answer::Done { origin: self.origin(), is_done }
            }
        }
    }

    fn transact(&mut self, call: &Call) -> bool {
        let next = self.revision + 1;
        let has = |epoch: &u64| self.owner.as_ref().is_some_and(|(held, _)| held.epoch == *epoch);
        match call {
            Call::Claim { by, lease, ledger_revision, ledger, .. } => {
                let revision = self.ledger.as_ref().map_or(0, |(revision, _)| *revision);
                let is_free = self.owner.is_none() && self.leases.contains_key(lease);
                if !is_free || revision != *ledger_revision {
                    return false;
                }
                let held = Held { by: by.clone(), epoch: next, is_leaving: false };
                self.owner = Some((held, *lease));
                self.ledger = Some((next, ledger.clone()));
            }
            Call::Settle { epoch, ledger, .. } if has(epoch) => {
                self.ledger = Some((next, ledger.clone()));
            }
            Call::Release { epoch, ledger, .. } if has(epoch) => {
                self.owner = None;
                self.ledger = Some((next, ledger.clone()));
            }
            Call::Announce { epoch, .. } if has(epoch) => {
                if let Some((held, _)) = &mut self.owner {
                    held.is_leaving = true;
                }
            }
            _ => return false,
        }
        self.revision = next;
        true
    }
}
