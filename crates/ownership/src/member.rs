//! Daemons, and the state that outlives them.

use std::fmt;

/// One start of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// The daemon's name in the cluster, which its fence command is given.
    pub name: String,
    /// The identity of its host.
    pub host: String,
    /// A random number of this start of the daemon.
    pub incarnation: u64,
}

impl Member {
    /// The host's name, without the number of its boot.
    #[must_use]
    pub fn host_name(&self) -> &str {
        self.host.split('/').next().unwrap_or_default()
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" on host {}", self.name, self.host)
    }
}

/// The value of a store's ledger key in etcd, which is bound to no lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// A random number that the store has for ever, also in its [`Record`].
    pub store: u64,
    /// Whether a record was written, so that a store without one is another store.
    pub is_recorded: bool,
    /// The daemons that may have requests in flight to the store: each that held the owner key, and
    /// neither released it in order nor was fenced since.
    pub suspects: Vec<Member>,
}

/// The note beside the store's data, on the storage that the candidates share.
///
/// The record is a tripwire, and no fence: it detects an etcd that forgot, a store that is not
/// shared, and an owner whose successor serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The cluster of etcd that gave the epoch.
    pub cluster: u64,
    /// See [`Ledger::store`].
    pub store: u64,
    /// The newest epoch in which the store was opened.
    pub epoch: u64,
    /// The owner in that epoch.
    pub owner: Member,
    /// Whether the owner closed the store in order.
    pub is_closed: bool,
}
