//! How an owner gets a disk's reservation, and takes it from others: the fence of hosts whose disk
//! has persistent reservations.
//!
//! An [`Acquisition`] is the state machine for one disk. It has no descriptors: the results of its
//! [`Order`]s are arguments.
//!
//! # Rules
//!
//! * A claim's [key](Member::reservation_key) is made of its incarnation: each claim has another
//!   one, and the ledger and the record name it.
//! * The host registers only when no process of it has a request in flight: a registration lets all
//!   of the host write, also a former daemon that was fenced. The caller sees to that.
//! * The host's own key is tried first, and none last: `dm-multipath` answers an order to register
//!   that fails on one path by ending the new key on all paths, and with it the reservation, if the
//!   host has that key already.
//! * Keys of other hosts are never replaced as this host's own: a disk that takes such an order
//!   takes two hosts for one, and lets both write.
//! * The reservation of a host that neither the ledger nor the record names is not ended, nor are
//!   keys that are not Sidecore's: the disk may be another cluster's, or another program's. A key
//!   of Sidecore's without the reservation is no owner's, but that of a late attempt.
//! * A key that is not registered was never there, or was preempted. A disk ends a registration
//!   first, and aborts its commands then. So each preemption is [noted](Notes) before it is sent,
//!   and until its end is known: meanwhile nobody takes the missing key for a fenced host.
//! * The reservation is done when the disk says so: after the order to reserve, and by a read of
//!   all keys if the kernel can read them.
//! * No owner ends its reservation, also not in order: it still keeps hosts out that were fenced
//!   and have not ended. The successor preempts it.

mod notes;
#[cfg(test)]
mod tests;

pub use notes::Notes;

use crate::Member;

/// The first 16 bits of all keys.
const MARK: u64 = 0x51de;
const MARK_SHIFT: u32 = 48;

impl Member {
    /// The key with which this claim's host registers at a disk: a mark of Sidecore's, and 48 bits
    /// of the incarnation. It is never 0, which is no key.
    #[must_use]
    pub const fn reservation_key(&self) -> u64 {
        MARK << MARK_SHIFT | self.incarnation & !(u64::MAX << MARK_SHIFT)
    }
}

const fn is_marked(key: u64) -> bool {
    key >> MARK_SHIFT == MARK
}

/// An order to a disk, or about the notes of hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Replace this host's notes, durably, where all candidates can read them.
    Note(Notes),
    /// Read the [keys](Notes::preempted) in the notes of all other hosts.
    Recall,
    /// Register this host with a key, in place of another one; 0 is none.
    Register {
        /// The key that the host has.
        old: u64,
        /// The key that it gets.
        new: u64,
    },
    /// End the registrations with a key, abort the commands of their hosts, and take over a
    /// reservation that one of them holds. It is sent once.
    PreemptAndAbort {
        /// The key of the other host.
        victim: u64,
        /// The key of this one.
        mine: u64,
    },
    /// Reserve the disk, write exclusive for registered hosts.
    Reserve {
        /// This host's key.
        key: u64,
    },
    /// Read all keys and the reservation.
    Read,
}

/// The registrations of a disk, and its reservation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The keys of all registrations.
    pub keys: Vec<u64>,
    /// The holder's key, if the disk is reserved.
    pub holder: Option<u64>,
    /// Whether the reservation is write exclusive for registered hosts.
    pub is_write_exclusive: bool,
}

/// The result of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The disk has carried it out.
    Done,
    /// A reservation conflict: nothing was changed.
    Conflict,
    /// Of [`Order::Read`]: what was found; `None` if the kernel cannot read it.
    Read(Option<Found>),
    /// Of [`Order::Recall`]: the keys.
    Recalled(Vec<u64>),
    /// It failed, with the reason, and may have been carried out.
    Failed(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// The key is noted.
    Beginning,
    /// The keys that this host may have, without the one that is tried.
    Registering {
        old: u64,
        others: Vec<u64>,
        has_searched: bool,
    },
    /// This host is registered with a key that the ledger, the record and the notes do not name.
    Searching,
    /// The keys are read before one of them is preempted.
    Listing,
    /// The next key, which is noted, and those after it.
    Noting {
        victim: Option<u64>,
        others: Vec<u64>,
    },
    /// The keys that may be registered, without the one that is preempted.
    Preempting {
        victim: u64,
        others: Vec<u64>,
    },
    Recalling,
    Reserving,
    Reading,
    Ended(Result<(), String>),
}

/// The way of one host to the reservation of one disk.
#[derive(Clone, Debug)]
pub struct Acquisition {
    disk: String,
    me: Member,
    key: u64,
    /// The daemons that may have registered before.
    members: Vec<Member>,
    /// Their keys, and those of late attempts.
    known: Vec<u64>,
    /// Those that the disk has listed.
    listed: Vec<u64>,
    /// Those that were not registered when they were preempted.
    absent: Vec<u64>,
    /// This host's, but for the order that is under way.
    notes: Notes,
    phase: Phase,
    #[cfg(test)]
    neglected: Option<tests::Rule>,
}

impl Acquisition {
    /// Begins for the daemon `me`. `others` are those that may be registered: the suspects, and the
    /// former owner. `notes` are this host's, from its last attempt. `disk` is its name in errors.
    #[must_use]
    pub fn new<'a>(
        disk: &str,
        me: &Member,
        others: impl IntoIterator<Item = &'a Member>,
        notes: Notes,
    ) -> Self {
        let key = me.reservation_key();
        let mut members: Vec<Member> = others.into_iter().cloned().collect();
        members.retain(|other| other.reservation_key() != key);
        members.sort_unstable_by_key(Member::reservation_key);
        members.dedup_by_key(|other| other.reservation_key());
        let known: Vec<u64> = members.iter().map(Member::reservation_key).collect();
        Self {
            disk: disk.to_owned(),
            me: me.clone(),
            key,
            notes: notes.begin(key, &known),
            members,
            known,
            listed: Vec::new(),
            absent: Vec::new(),
            phase: Phase::Beginning,
            #[cfg(test)]
            neglected: None,
        }
    }

    /// The next order; `None` at the [end](Self::result).
    #[must_use]
    pub fn order(&self) -> Option<Order> {
        let key = self.key;
        Some(match &self.phase {
            Phase::Beginning => Order::Note(self.notes.clone()),
            Phase::Registering { old, .. } => Order::Register { old: *old, new: key },
            Phase::Noting { victim, .. } => Order::Note(self.notes.with(*victim)),
            Phase::Preempting { victim, .. } => {
                Order::PreemptAndAbort { victim: *victim, mine: key }
            }
            Phase::Recalling => Order::Recall,
            Phase::Reserving => Order::Reserve { key },
            Phase::Searching | Phase::Listing | Phase::Reading => Order::Read,
            Phase::Ended(_) => return None,
        })
    }

    /// Takes the result of the order.
    pub fn replied(&mut self, reply: Reply) {
        let phase = std::mem::replace(&mut self.phase, Phase::Reserving);
        self.phase = match (phase, reply) {
            (Phase::Ended(result), _) => Phase::Ended(result),
            // A preemption that has failed stays in the notes.
            (_, Reply::Failed(why)) => Phase::Ended(Err(why)),
            (Phase::Beginning, Reply::Done) => {
                Phase::Registering { old: self.key, others: self.own(), has_searched: false }
            }
            (Phase::Registering { .. }, Reply::Done) if self.known.is_empty() => Phase::Reserving,
            (Phase::Registering { .. }, Reply::Done) => Phase::Listing,
            (Phase::Registering { mut others, has_searched, .. }, Reply::Conflict) => {
                match others.pop() {
                    Some(old) => Phase::Registering { old, others, has_searched },
                    None if has_searched => Phase::Ended(Err(self.foreign_registration())),
                    None => Phase::Searching,
                }
            }
            (Phase::Searching, Reply::Read(found)) => self.search(&found.unwrap_or_default()),
            (Phase::Listing, Reply::Read(found)) => {
                self.listed = found.unwrap_or_default().keys;
                preempt(self.known.clone())
            }
            (Phase::Noting { victim: Some(victim), others }, Reply::Done) => {
                Phase::Preempting { victim, others }
            }
            (Phase::Noting { victim: None, .. }, Reply::Done) => Phase::Recalling,
            (Phase::Preempting { victim, others }, reply @ (Reply::Done | Reply::Conflict)) => {
                self.preempted(victim, reply == Reply::Done);
                preempt(others)
            }
            (Phase::Recalling, Reply::Recalled(noted)) => self.recall(&noted),
            (Phase::Reserving, Reply::Done) => Phase::Reading,
            // This host stays registered: the kernel cannot end a registration at NVMe, where it
            // makes one with the key 0 instead. The next owner ends it.
            (Phase::Reserving, Reply::Conflict) if self.obeys() => {
                Phase::Ended(Err(self.foreign_holder()))
            }
            (Phase::Reserving, Reply::Conflict) => Phase::Reading,
            (Phase::Reading, Reply::Read(Some(found))) if self.verifies() => self.verify(&found),
            (Phase::Reading, Reply::Read(_)) => Phase::Ended(Ok(())),
            (_, reply) => {
                Phase::Ended(Err(format!("{} gave no fitting reply: {reply:?}", self.disk)))
            }
        };
    }

    /// This host's notes, as far as the replies say: without an order that has none.
    #[must_use]
    pub const fn notes(&self) -> &Notes {
        &self.notes
    }

    /// The end: this host holds the reservation, and no other daemon writes; or the reason why not.
    #[must_use]
    pub fn result(&self) -> Option<&Result<(), String>> {
        match &self.phase {
            Phase::Ended(result) => Some(result),
            _ => None,
        }
    }

    /// The keys that this host may have, none first: former attempts of it, and former starts of
    /// its daemon, have registered them.
    fn own(&self) -> Vec<u64> {
        let is_mine = |other: &&Member| other.host_name() == self.me.host_name();
        let mut own = vec![0];
        own.extend(self.notes.keys.iter().filter(|noted| **noted != self.key));
        own.extend(self.members.iter().filter(is_mine).map(Member::reservation_key));
        own
    }

    /// Takes the end of a preemption, which the disk has answered clearly.
    fn preempted(&mut self, victim: u64, was_registered: bool) {
        if was_registered {
            self.notes.preempted.retain(|key| *key != victim);
            return;
        }
        // The key is not registered. Or this host is not, as the order to reserve shows.
        self.absent.push(victim);
        // A driver that has sent the order twice had no reply to the first one.
        if self.listed.contains(&victim) {
            self.notes = self.notes.with(Some(victim));
        }
    }

    /// Looks for missing keys whose preemption has no known end. All that could begin one are
    /// fenced by now, and their notes are older than their orders.
    fn recall(&self, noted: &[u64]) -> Phase {
        let is_noted = |key: &u64| self.notes.preempted.contains(key) || noted.contains(key);
        // No request of this host is in flight.
        let is_far = |other: &&Member| other.host_name() != self.me.host_name();
        let mut far = self.members.iter().filter(is_far);
        let doubt = far.find(|other| {
            let key = other.reservation_key();
            self.absent.contains(&key) && is_noted(&key)
        });
        match doubt {
            Some(other) if self.doubts() => Phase::Ended(Err(self.unknown_end(other))),
            _ => Phase::Reserving,
        }
    }

    /// Chooses the keys that a former attempt of this host may have left.
    fn search(&self, found: &Found) -> Phase {
        // The owner's, which may be alive: of another host that the disk takes for this one.
        if found.holder.is_some_and(|holder| !self.known.contains(&holder)) {
            return Phase::Ended(Err(self.foreign_registration()));
        }
        let is_left = |key: &u64| is_marked(*key) && *key != self.key && !self.known.contains(key);
        let mut others: Vec<u64> = found.keys.iter().copied().filter(is_left).collect();
        match others.pop() {
            Some(old) => Phase::Registering { old, others, has_searched: true },
            None => Phase::Ended(Err(self.foreign_registration())),
        }
    }

    /// Compares the disk's own list with what it said before.
    fn verify(&mut self, found: &Found) -> Phase {
        let Self { disk, key, known, .. } = self;
        let is_other = |other: &u64| *other != *key;
        let others: Vec<u64> = found.keys.iter().copied().filter(is_other).collect();
        let why = if found.holder != Some(*key)
            || !found.is_write_exclusive
            || !found.keys.contains(key)
        {
            format!(
                "{disk} has confirmed the reservation for key {key:#018x}, and does not list it: \
                 another host has taken it, or its reservations are no fence"
            )
        } else if let Some(other) = others.iter().find(|other| known.contains(other)) {
            format!(
                "{disk} has confirmed that key {other:#018x} was preempted, and lists it still: \
                 its reservations are no fence, choose another one"
            )
        } else if let Some(other) = others.iter().find(|other| !is_marked(**other)) {
            format!(
                "{disk} has a registration with key {other:#018x}, which is not Sidecore's, and \
                 whose host could write: {REMEDY}"
            )
        } else {
            // Late attempts have left these. They must be gone at the next look.
            known.extend(&others);
            return if others.is_empty() { Phase::Ended(Ok(())) } else { preempt(others) };
        };
        Phase::Ended(Err(why))
    }

    fn unknown_end(&self, other: &Member) -> String {
        format!(
            "{} has no registration of {other} any more, and the end of its preemption is not \
             known, so that a write of that host may still come: switch the host off, or cut it \
             from the disk, and wait for that; then delete the files FILE.HOST.keys beside the \
             record",
            self.disk
        )
    }

    fn foreign_holder(&self) -> String {
        format!(
            "{} is reserved by a host that is neither the last owner nor a suspect, or another \
             candidate has fenced this one meanwhile, which is tried again; {REMEDY}",
            self.disk
        )
    }

    fn foreign_registration(&self) -> String {
        format!(
            "{} has a registration of this host with a key that is not Sidecore's, or of an owner \
             that the record does not name, or another host has the same NVMe host ID or \
             initiator name: {REMEDY}",
            self.disk
        )
    }

    #[cfg(not(test))]
    const fn obeys(&self) -> bool {
        true
    }

    #[cfg(not(test))]
    const fn doubts(&self) -> bool {
        true
    }

    #[cfg(not(test))]
    const fn verifies(&self) -> bool {
        true
    }
}

fn preempt(mut others: Vec<u64>) -> Phase {
    let victim = others.pop();
    Phase::Noting { victim, others }
}

const REMEDY: &str = "if no daemon serves the store and no other program uses the disk, end all \
                      reservations with `sidecore reservation clear`";
