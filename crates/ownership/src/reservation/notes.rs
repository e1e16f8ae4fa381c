//! The notes of a host for the next owner, on any host.

/// The keys kept of a host: a registration that comes later than so many claims is not its own.
const KEYS: usize = 16;
/// The ends kept of a host. The next owner needs those since the last opening.
const ENDS: usize = 64;

/// The notes of one host about the disks of one store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// The newest keys that this host may have registered, the newest last.
    pub keys: Vec<u64>,
    /// The newest registrations that this host has ended, the newest last.
    pub ended: Vec<Ended>,
}

/// The end of a registration, as a disk has answered: nothing of its host is in flight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The identity of the disk.
    pub disk: String,
    /// The key of the registration.
    pub key: u64,
    /// The key of the host that has ended it, with which it was registered.
    pub by: u64,
}

impl Notes {
    /// The notes of the next attempt, with its key.
    pub(super) fn begin(mut self, key: u64) -> Self {
        self.keys.retain(|old| *old != key);
        self.keys.push(key);
        keep_newest(&mut self.keys, KEYS);
        self
    }

    pub(super) fn note(&mut self, ended: Ended) {
        self.ended.retain(|known| *known != ended);
        self.ended.push(ended);
        keep_newest(&mut self.ended, ENDS);
    }

    /// Forgets the ends at a disk by a registration that has ended itself. False if there are none.
    pub(super) fn forget(&mut self, disk: &str, by: u64) -> bool {
        let before = self.ended.len();
        self.ended.retain(|ended| ended.by != by || ended.disk != disk);
        self.ended.len() != before
    }
}

fn keep_newest<T>(notes: &mut Vec<T>, most: usize) {
    let surplus = notes.len().saturating_sub(most);
    notes.drain(..surplus);
}
