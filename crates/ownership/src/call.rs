//! Requests to etcd, and its answers.

use std::collections::BTreeMap;

use crate::{Ledger, Member};

/// A request to etcd. Transactions change nothing unless their conditions hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Ask for a lease.
    Grant {
        /// The lease's time in seconds.
        ttl_s: u64,
    },
    /// Renew the lease, and then read all keys of the cluster through the same member of etcd,
    /// linearizably.
    Renew {
        /// The lease.
        lease: i64,
    },
    /// If the store has no owner key and its ledger has this revision, create the owner key and
    /// write the ledger.
    Claim {
        /// The store's name.
        store: String,
        /// The daemon that claims: a new incarnation after each ownership.
        by: Member,
        /// The lease that the owner key is bound to.
        lease: i64,
        /// The revision at which the ledger was last changed; 0 without a ledger.
        ledger_revision: u64,
        /// The new ledger.
        ledger: Ledger,
    },
    /// If the owner key has this epoch, write the ledger.
    Settle {
        /// The store's name.
        store: String,
        /// The create revision of the owner key.
        epoch: u64,
        /// The new ledger.
        ledger: Ledger,
    },
    /// If the owner key has this epoch, mark it: the owner is about to hand over.
    Announce {
        /// The store's name.
        store: String,
        /// The create revision of the owner key.
        epoch: u64,
        /// The owner.
        by: Member,
        /// The lease that the owner key is bound to.
        lease: i64,
    },
    /// If the owner key has this epoch, delete it and write the ledger.
    Release {
        /// The store's name.
        store: String,
        /// The create revision of the owner key.
        epoch: u64,
        /// The new ledger.
        ledger: Ledger,
    },
    /// End the lease.
    Revoke {
        /// The lease.
        lease: i64,
    },
}

/// A call and its number. At most one is in flight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbered {
    /// The number that the answer comes with.
    pub number: u64,
    /// The call.
    pub call: Call,
}

/// The header of an answer of etcd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The cluster that answered.
    pub cluster: u64,
    /// The member that answered.
    pub member: u64,
    /// The Raft term of the member that answered.
    pub term: u64,
    /// The revision of the data.
    pub revision: u64,
}

/// An owner key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The daemon that created the key.
    pub by: Member,
    /// The create revision.
    pub epoch: u64,
    /// Whether the owner is about to hand over.
    pub is_leaving: bool,
}

/// The keys of one store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The owner key.
    pub owner: Option<Held>,
    /// The ledger, and the revision of its last change.
    pub ledger: Option<(u64, Ledger)>,
    /// The reason why a value could not be read.
    pub fault: Option<String>,
}

impl Seen {
    /// Whether the holder of the key has fenced all others.
    pub(crate) fn has_settled(&self, holder: &Held) -> bool {
        let settled = self.ledger.as_ref().and_then(|(_, ledger)| ledger.settled.as_ref());
        settled.is_some_and(|settled| settled.by == holder.by && settled.epoch == holder.epoch)
    }
}

/// An answer of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To [`Call::Grant`].
    Granted {
        /// The header.
        origin: Origin,
        /// The lease.
        lease: i64,
        /// Its time in seconds.
        ttl_s: u64,
    },
    /// To [`Call::Renew`].
    Renewed {
        /// The header of the renewal, and the lease's time in seconds; 0 if there is no such lease.
        renewal: (Origin, u64),
        /// The header of the read.
        read: Origin,
        /// The stores that have keys.
        seen: BTreeMap<String, Seen>,
    },
    /// To a transaction, or to [`Call::Revoke`].
    Done {
        /// The header; its revision is that of the change.
        origin: Origin,
        /// Whether the conditions held.
        is_done: bool,
    },
    /// There was no answer in time, or an error. The call may have taken effect.
    Failed {
        /// The reason.
        reason: String,
    },
}

impl Answer {
    /// The headers.
    pub(crate) fn origins(&self) -> impl Iterator<Item = Origin> {
        let (first, second) = match self {
            Self::Granted { origin, .. } | Self::Done { origin, .. } => (Some(*origin), None),
            Self::Renewed { renewal, read, .. } => (Some(*read), Some(renewal.0)),
            Self::Failed { .. } => (None, None),
        };
        first.into_iter().chain(second)
    }
}
