//! Daemons, and the state that outlives them.

use std::fmt;

/// One start of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// The daemon's name in the cluster, which its fence command is given.
    pub name: String,
    /// The identity of its host: `NAME/BOOT/MACHINE`.
    pub host: String,
    /// A random number of this start of the daemon.
    pub incarnation: u64,
}

impl Member {
    /// The host's name, without the numbers of its boot and its machine.
    #[must_use]
    pub fn host_name(&self) -> &str {
        self.part(0)
    }

    /// The number of the host's boot.
    #[must_use]
    pub fn boot(&self) -> &str {
        self.part(1)
    }

    /// The number of the host's machine, which tells hosts of one name apart. Hosts without one,
    /// and older versions, have none.
    #[must_use]
    pub fn machine(&self) -> &str {
        self.part(2)
    }

    fn part(&self, index: usize) -> &str {
        self.host.split('/').nth(index).unwrap_or_default()
    }

    /// Whether both are on one host, in any boot of it. One boot is one machine's, also if the
    /// machine was given another number since.
    #[must_use]
    pub fn is_same_machine(&self, other: &Self) -> bool {
        let [mine, others] = [self, other].map(Self::machine);
        let is_same_boot = !self.boot().is_empty() && self.boot() == other.boot();
        self.host_name() == other.host_name()
            && (mine == others || mine.is_empty() || others.is_empty() || is_same_boot)
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
    /// The last daemon that may have opened the store by what etcd knows: all before it were fenced
    /// or had closed the store. A suspect that is not this one, nor the record's owner, has never
    /// opened the store.
    pub settled: Option<Settled>,
}

/// The claims of one daemon in the ledger that have not opened the store: as many as its host has
/// keys in its notes.
const CLAIMS: usize = 16;

impl Ledger {
    /// Takes out the oldest claims of a daemon that never opened the store. The ledger would
    /// otherwise grow by one with each claim whose fence fails. The newest stay: their host may be
    /// registered with their keys.
    pub(crate) fn forget_claims(&mut self, me: &Member) {
        let settled = self.settled.as_ref().map(|settled| &settled.by);
        if self.is_recorded && settled.is_none() {
            // By an older version, which does not say who opened the store.
            return;
        }
        let is_old = |other: &Member| {
            other.name == me.name && other.is_same_machine(me) && Some(other) != settled
        };
        let count = self.suspects.iter().filter(|other| is_old(other)).count();
        let mut surplus = count.saturating_sub(CLAIMS);
        self.suspects.retain(|other| {
            let is_surplus = surplus > 0 && is_old(other);
            surplus = surplus.saturating_sub(usize::from(is_surplus));
            !is_surplus
        });
    }
}

/// A daemon that has written the record in its epoch, and opens the store next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settled {
    /// The daemon.
    pub by: Member,
    /// Its epoch.
    pub epoch: u64,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_one_name_are_one_machine_by_its_number_or_its_boot() {
        let is_same = |hosts: [&str; 2]| {
            let [one, other] =
                hosts.map(|host| Member { host: host.to_owned(), ..Member::default() });
            assert_eq!(one.is_same_machine(&other), other.is_same_machine(&one));
            one.is_same_machine(&other)
        };
        for same in [["h/1/7", "h/2/7"], ["h/1/7", "h/2"], ["h/1", "h/2"], ["h/1/7", "h/1/8"]] {
            assert!(is_same(same), "{same:?}");
        }
        for other in [["h/1/7", "h/2/8"], ["g/1/7", "h/1/7"], ["h//7", "h//8"]] {
            assert!(!is_same(other), "{other:?}");
        }
    }
}
