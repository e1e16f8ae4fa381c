//! The notes of a host for the next owner, on any host.

/// The keys kept of a host: a registration that comes later than so many claims is not its own.
const KEYS: usize = 16;
/// The ends kept of a disk. The next owner needs those since the last opening.
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
        self.withdraw(&ended);
        let disk = ended.disk.clone();
        self.ended.push(ended);
        // Those of other disks stay, however often this one fails.
        let count = self.ended.iter().filter(|known| known.disk == disk).count();
        let mut surplus = count.saturating_sub(ENDS);
        self.ended.retain(|known| {
            let is_surplus = surplus > 0 && known.disk == disk;
            surplus = surplus.saturating_sub(usize::from(is_surplus));
            !is_surplus
        });
    }

    /// Takes back what has not come to pass.
    pub(super) fn withdraw(&mut self, ended: &Ended) {
        self.ended.retain(|known| known != ended);
    }

    /// Forgets the ends at a disk by a registration that has ended itself.
    pub(super) fn forget(&mut self, disk: &str, by: u64) {
        self.ended.retain(|ended| ended.by != by || ended.disk != disk);
    }

    /// This host's key `old` at a disk has become `new`: what was ended by it, and by those before
    /// it, counts while `new` is registered. Of the keys between, only the last owner's is needed.
    pub(super) fn replace(&mut self, disk: &str, (old, new): (u64, u64), owner: Option<u64>) {
        let all = std::mem::take(&mut self.ended).into_iter();
        let (mut here, elsewhere): (Vec<Ended>, _) = all.partition(|ended| ended.disk == disk);
        self.ended = elsewhere;
        // This host's former keys, from the last one back. All that have ended one were its own.
        let is_mine = |key| self.keys.contains(&key) || here.iter().any(|ended| ended.by == key);
        let mut own = vec![old];
        while let Some(former) = here.iter().find(|ended| {
            own.contains(&ended.by) && !own.contains(&ended.key) && is_mine(ended.key)
        }) {
            own.push(former.key);
        }
        let is_needed = |key: u64| !own.contains(&key) || key == old || Some(key) == owner;
        here.retain(|ended| is_needed(ended.key));
        for mut ended in here {
            if own.contains(&ended.by) {
                ended.by = new;
            }
            self.note(ended);
        }
    }
}

fn keep_newest<T>(notes: &mut Vec<T>, most: usize) {
    let surplus = notes.len().saturating_sub(most);
    notes.drain(..surplus);
}
