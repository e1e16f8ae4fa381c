//! A model of a disk with persistent reservations: SPC-4, 5.13, for one path per host; and of the
//! storage with the notes of all hosts.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::{Ended, Found, Notes, Order, Reply};

/// A write that a host has sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Write {
    pub(super) host: usize,
    /// The boot of the host.
    pub(super) boot: u64,
    pub(super) epoch: u64,
    /// Whether the disk has taken it, and so has looked at the reservation.
    pub(super) is_taken: bool,
}

/// The files of the hosts beside the record.
pub(super) type Files = Rc<RefCell<BTreeMap<usize, Notes>>>;

#[derive(Debug)]
pub(super) struct Disk {
    pub(super) id: String,
    pub(super) keys: BTreeMap<usize, u64>,
    pub(super) holder: Option<usize>,
    /// Writes on their way, and those that the disk has taken and not carried out.
    pub(super) writes: Vec<Write>,
    pub(super) files: Files,
    pub(super) can_read: bool,
    /// Takes a reservation over, and leaves the registration that it should end.
    pub(super) lies: bool,
    /// Commands of a preempted host are carried out.
    pub(super) aborts_nothing: bool,
    /// A loss of power ends registrations.
    pub(super) forgets: bool,
}

impl Default for Disk {
    fn default() -> Self {
        Self {
            id: "naa.1".to_owned(),
            keys: BTreeMap::new(),
            holder: None,
            writes: Vec::new(),
            files: Files::default(),
            can_read: true,
            lies: false,
            aborts_nothing: false,
            forgets: false,
        }
    }
}

impl Disk {
    /// Whether a host has the reservation.
    pub(super) fn is_reserved_by(&self, host: usize) -> bool {
        self.holder == Some(host) && self.keys.contains_key(&host)
    }

    /// Whether a host may write.
    pub(super) fn lets(&self, host: usize) -> bool {
        self.holder.is_none() || self.keys.contains_key(&host)
    }

    pub(super) fn carry_out(&mut self, host: usize, order: Order) -> Reply {
        let is_done = match order {
            Order::Note(notes) => {
                self.files.borrow_mut().insert(host, notes);
                true
            }
            Order::Recall => return Reply::Recalled(self.noted_by_others(host)),
            Order::Register { old, new } => self.register(host, old, new),
            Order::PreemptAndAbort { victim, mine } => {
                let ended = self.end_registrations(host, victim, mine);
                if !self.lies {
                    self.abort(&ended);
                }
                !ended.is_empty()
            }
            Order::Reserve { key } => {
                let is_registered = self.keys.get(&host) == Some(&key);
                let is_free = self.holder.is_none_or(|holder| holder == host);
                if is_registered && is_free {
                    self.holder = Some(host);
                }
                is_registered && is_free
            }
            Order::Read => return Reply::Read(self.can_read.then(|| self.found())),
        };
        if is_done { Reply::Done } else { Reply::Conflict }
    }

    fn register(&mut self, host: usize, old: u64, new: u64) -> bool {
        if self.keys.get(&host).copied().unwrap_or(0) != old {
            return false;
        }
        if new == 0 {
            self.keys.remove(&host);
            self.holder = self.holder.filter(|holder| *holder != host);
        } else {
            self.keys.insert(host, new);
        }
        true
    }

    /// The notes of this host.
    pub(super) fn notes_of(&self, host: usize) -> Notes {
        self.files.borrow().get(&host).cloned().unwrap_or_default()
    }

    fn noted_by_others(&self, host: usize) -> Vec<Ended> {
        let files = self.files.borrow();
        let others = files.iter().filter(|(of, _)| **of != host);
        others.flat_map(|(_, notes)| notes.ended.iter().cloned()).collect()
    }

    /// The first part of a preemption: the victims' registrations end, and a reservation is taken
    /// over. Returns the hosts whose commands are aborted next.
    pub(super) fn end_registrations(&mut self, host: usize, victim: u64, mine: u64) -> Vec<usize> {
        if self.keys.get(&host) != Some(&mine) {
            return Vec::new();
        }
        let is_victim = |other: &usize| *other != host && self.keys.get(other) == Some(&victim);
        let ended: Vec<usize> = self.keys.keys().copied().filter(is_victim).collect();
        for other in &ended {
            if !self.lies {
                self.keys.remove(other);
            }
            if self.holder == Some(*other) {
                self.holder = Some(host);
            }
        }
        ended
    }

    /// The second part.
    pub(super) fn abort(&mut self, hosts: &[usize]) {
        if !self.aborts_nothing {
            self.writes.retain(|write| !write.is_taken || !hosts.contains(&write.host));
        }
    }

    fn found(&self) -> Found {
        let holder = self.holder.and_then(|holder| self.keys.get(&holder).copied());
        let keys = self.keys.values().copied().collect();
        Found { keys, holder, is_write_exclusive: self.holder.is_some() }
    }

    pub(super) fn lose_power(&mut self) {
        // Writes that were taken are lost or carried out: a history has both by its order.
        if self.forgets {
            self.clear();
        }
    }

    /// Ends the reservation, and no registration.
    pub(super) fn release(&mut self) {
        self.holder = None;
    }

    /// Ends the reservation and all registrations, and aborts nothing.
    pub(super) fn clear(&mut self) {
        (self.keys, self.holder) = (BTreeMap::new(), None);
    }
}
