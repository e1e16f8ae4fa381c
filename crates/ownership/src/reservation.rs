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
//! * Every claim's fence precedes its opening, so one daemon alone can have requests in flight:
//!   the last one that has [settled](crate::Ledger::settled), and not closed the store in order.
//!   Its fence needs evidence: an answered preemption of its registration. A key that is missing is
//!   none. A disk ends a registration before it aborts commands; drivers send an order again; a
//!   registration also ends by hand, by a disk that forgets, or never was.
//! * The disk is reserved before a registration ends, by this host or by another one. Otherwise
//!   hosts without registration write, also one that was preempted. If the disk lists no
//!   registration to end, it is not: the reservation of a candidate that is refused keeps all
//!   others out until one that knows its key preempts it. A candidate that is refused after it has
//!   ended a rival's registration has the reservation all the same.
//! * Each answered preemption is [noted](Notes), where all hosts find it, with the key of the host
//!   that has sent it. A note counts as long as that host has stayed registered, or was itself
//!   preempted by one that did. Otherwise the reservation may have been ended in between, and a
//!   write of the fenced host taken.
//! * A host that replaces its own key notes that before the order, so that a crash does not break
//!   the chain of notes, and takes it back if the host did not have that key.
//! * By its locks, a daemon of this boot of this host has nothing in flight. No lock outlives one,
//!   and a disk may still carry out commands of the former one. So the key of an owner of a former
//!   boot is not replaced: another host can still preempt it.
//! * The host's own key is tried first, and none last: `dm-multipath` answers an order to register
//!   that fails on one path by ending the new key on all paths, and with it the reservation, if the
//!   host has that key already.
//! * Keys of other hosts are never replaced as this host's own: a disk that takes such an order
//!   takes two hosts for one, and lets both write.
//! * The reservation of a host that neither the ledger nor the record names is not ended, nor are
//!   keys that are not Sidecore's: the disk may be another cluster's, or another program's. A key
//!   of Sidecore's without the reservation is no owner's, but that of a late attempt.
//! * The reservation is done when the disk says so: after the order to reserve, and by a read of
//!   all keys if the kernel can read them.
//! * No owner ends its reservation, also not in order: it still keeps hosts out that were fenced
//!   and have not ended. The successor preempts it.

mod notes;
#[cfg(test)]
mod tests;

pub use notes::{Ended, Notes};

use crate::Member;

/// The times that registrations of late attempts are ended. A disk that lists more of them has
/// another cause for them.
const SWEEPS: u32 = 3;

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

/// The daemons that may be registered at the disks of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rivals {
    /// The suspects, and the former owner.
    pub all: Vec<Member>,
    /// The one that may have requests in flight.
    pub owner: Option<Member>,
}

/// An order to a disk, or about the notes of hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Replace this host's notes, durably, where all candidates can read them.
    Note(Notes),
    /// Read the [answered preemptions](Notes::ended) in the notes of all other hosts.
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
    /// Of [`Order::Recall`]: the answered preemptions.
    Recalled(Vec<Ended>),
    /// It failed, with the reason, and may have been carried out.
    Failed(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// The key is noted.
    Beginning,
    /// The notes say what they have to before the next key is tried: that it is replaced, and that
    /// the last one was not.
    Intending {
        old: u64,
        others: Vec<u64>,
        has_searched: bool,
    },
    /// The keys that this host may have, without the one that is tried.
    Registering {
        old: u64,
        others: Vec<u64>,
        has_searched: bool,
    },
    /// This host is registered with a key that the ledger, the record and the notes do not name.
    Searching,
    /// The key that this host had is noted.
    Replaced,
    /// The keys are read before one of them is preempted.
    Listing,
    /// The disk is reserved before a registration ends.
    Holding {
        victims: Vec<u64>,
    },
    /// The keys that may be registered, without the one that is preempted.
    Preempting {
        victim: u64,
        others: Vec<u64>,
    },
    /// An answered preemption is noted. The keys that may be registered follow.
    Noting {
        others: Vec<u64>,
    },
    Recalling,
    /// The owner's end is noted as one by this host.
    Recalled,
    Reserving,
    Reading,
    Ended(Result<(), String>),
}

/// The way of one host to the reservation of one disk.
#[derive(Clone, Debug)]
pub struct Acquisition {
    disk: String,
    /// The disk, as the notes of all hosts name it.
    id: String,
    me: Member,
    key: u64,
    rivals: Rivals,
    /// The keys of the rivals, and those of late attempts.
    known: Vec<u64>,
    /// Those that were preempted, or are not registered.
    ended: Vec<u64>,
    /// Those that the disk has confirmed to be registered in this attempt.
    confirmed: Vec<u64>,
    /// Whether the kernel reads keys; `None` before it was asked.
    can_read: Option<bool>,
    /// The times that registrations of late attempts were listed.
    sweeps: u32,
    notes: Notes,
    phase: Phase,
    #[cfg(test)]
    neglected: Option<tests::Rule>,
}

impl Acquisition {
    /// Begins for the daemon `me`. `disk` is its name in errors, and the identity that all hosts
    /// know it by. `notes` are this host's, from its last attempt.
    #[must_use]
    pub fn new((disk, id): (&str, &str), me: &Member, rivals: &Rivals, notes: Notes) -> Self {
        let key = me.reservation_key();
        let mut rivals = rivals.clone();
        rivals.all.extend(rivals.owner.clone());
        rivals.all.retain(|other| other.reservation_key() != key);
        rivals.all.sort_unstable_by_key(Member::reservation_key);
        rivals.all.dedup_by_key(|other| other.reservation_key());
        rivals.owner = rivals.owner.filter(|owner| owner.reservation_key() != key);
        Self {
            disk: disk.to_owned(),
            id: id.to_owned(),
            me: me.clone(),
            key,
            notes: notes.begin(key),
            known: rivals.all.iter().map(Member::reservation_key).collect(),
            rivals,
            ended: Vec::new(),
            confirmed: Vec::new(),
            can_read: None,
            sweeps: 0,
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
            Phase::Beginning
            | Phase::Intending { .. }
            | Phase::Replaced
            | Phase::Noting { .. }
            | Phase::Recalled => Order::Note(self.notes.clone()),
            Phase::Registering { old, .. } => Order::Register { old: *old, new: key },
            Phase::Preempting { victim, .. } => {
                Order::PreemptAndAbort { victim: *victim, mine: key }
            }
            Phase::Recalling => Order::Recall,
            Phase::Holding { .. } | Phase::Reserving => Order::Reserve { key },
            Phase::Searching | Phase::Listing | Phase::Reading => Order::Read,
            Phase::Ended(_) => return None,
        })
    }

    /// Takes the result of the order.
    pub fn replied(&mut self, reply: Reply) {
        let phase = std::mem::replace(&mut self.phase, Phase::Reserving);
        self.phase = match (phase, reply) {
            (Phase::Ended(result), _) => Phase::Ended(result),
            // A preemption that has failed has no note: its end is not known.
            (_, Reply::Failed(why)) => Phase::Ended(Err(why)),
            (Phase::Beginning, Reply::Done) => {
                Phase::Registering { old: self.key, others: self.own(), has_searched: false }
            }
            (Phase::Intending { old, others, has_searched }, Reply::Done) => {
                Phase::Registering { old, others, has_searched }
            }
            (Phase::Registering { old, .. }, Reply::Done) => self.registered(old),
            (Phase::Registering { old, others, has_searched }, Reply::Conflict) => {
                self.not_registered(old);
                self.register_next(others, has_searched)
            }
            (Phase::Searching, Reply::Read(found)) => self.search(&found.unwrap_or_default()),
            (Phase::Replaced, Reply::Done) => self.begin_preemptions(),
            // A conflict: another host holds it.
            (Phase::Holding { victims }, Reply::Done | Reply::Conflict) => self.preempt(victims),
            (Phase::Listing, Reply::Read(found)) => self.list(found),
            (Phase::Preempting { victim, others }, Reply::Done) => {
                self.ended.push(victim);
                self.confirmed.push(victim);
                self.note(victim);
                Phase::Noting { others }
            }
            // The key is not registered. Or this host is not, as the order to reserve shows.
            (Phase::Preempting { victim, others }, Reply::Conflict) => {
                self.ended.push(victim);
                self.preempt(others)
            }
            (Phase::Noting { others }, Reply::Done) => self.preempt(others),
            (Phase::Recalling, Reply::Recalled(noted)) => self.recall(&noted),
            (Phase::Recalled, Reply::Done) => Phase::Reserving,
            (Phase::Reserving, Reply::Done) => Phase::Reading,
            // This host stays registered: the kernel cannot end a registration at NVMe, where it
            // makes one with the key 0 instead. The next owner ends it.
            (Phase::Reserving, Reply::Conflict) if self.keeps(Neglect::Conflict) => {
                Phase::Ended(Err(self.foreign_holder()))
            }
            (Phase::Reserving, Reply::Conflict) => Phase::Reading,
            (Phase::Reading, Reply::Read(found)) => self.verify(found),
            (_, reply) => {
                Phase::Ended(Err(format!("{} gave no fitting reply: {reply:?}", self.disk)))
            }
        };
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
        let kept = self.rebooted_owner().map(Member::reservation_key);
        let is_mine = |other: &&Member| other.is_same_machine(&self.me);
        let mut own = vec![0];
        let named = self.rivals.all.iter().filter(is_mine).map(Member::reservation_key);
        let named: Vec<u64> = named.collect();
        let is_unnamed = |key: &&u64| **key != self.key && !named.contains(key);
        own.extend(self.notes.keys.iter().filter(is_unnamed));
        own.extend(named);
        own.retain(|key| Some(*key) != kept);
        own
    }

    /// The owner, if it is one of a former boot of this host.
    fn rebooted_owner(&self) -> Option<&Member> {
        let is_former = |owner: &&Member| {
            owner.is_same_machine(&self.me)
                && owner.host != self.me.host
                && self.keeps(Neglect::Boot)
        };
        self.rivals.owner.as_ref().filter(is_former)
    }

    /// Tries the next key that this host may have.
    fn register_next(&mut self, mut others: Vec<u64>, has_searched: bool) -> Phase {
        match others.pop() {
            Some(old) => self.intend(old, others, has_searched),
            None => match self.rebooted_owner() {
                Some(owner) => Phase::Ended(Err(self.former_boot(owner))),
                None if has_searched => Phase::Ended(Err(self.foreign_registration())),
                None => Phase::Searching,
            },
        }
    }

    /// Notes that `old` is replaced before it is: a crash between the order and a later note would
    /// break the chain of evidence. It counts only while this host is registered with its new key.
    fn intend(&mut self, old: u64, others: Vec<u64>, has_searched: bool) -> Phase {
        if old != 0 {
            self.note(old);
        }
        Phase::Intending { old, others, has_searched }
    }

    /// This host is not registered with the key `old`.
    fn not_registered(&mut self, old: u64) {
        if old == self.key {
            // It was, perhaps: its notes do not count any more.
            self.notes.forget(&self.id, old);
        } else if self.keeps(Neglect::Withdraw) {
            self.notes.withdraw(&self.ended(old));
        }
    }

    /// This host is registered, and was with the key `old`; 0 is none.
    fn registered(&mut self, old: u64) -> Phase {
        if old != 0 {
            self.confirmed.push(old);
        }
        if old == 0 || old == self.key {
            return self.begin_preemptions();
        }
        // Nothing of this host was in flight, and it has been registered all the time.
        self.confirmed.push(self.key);
        let owner = self.rivals.owner.as_ref().map(Member::reservation_key);
        self.notes.replace(&self.id, (old, self.key), owner);
        Phase::Replaced
    }

    fn begin_preemptions(&self) -> Phase {
        if self.known.is_empty() { self.preempt(Vec::new()) } else { Phase::Listing }
    }

    /// The end of a registration by this host.
    fn ended(&self, key: u64) -> Ended {
        Ended { disk: self.id.clone(), key, by: self.key }
    }

    /// Notes that a registration has ended, and that nothing of its host is in flight.
    fn note(&mut self, key: u64) {
        self.notes.note(self.ended(key));
    }

    /// Takes the keys that are registered. Others are preempted only if there is no such list.
    fn list(&mut self, found: Option<Found>) -> Phase {
        self.can_read = Some(found.is_some());
        let mut victims = self.known.clone();
        if let Some(found) = found {
            victims.retain(|key| found.keys.contains(key));
        }
        // The evidence comes first: if this attempt fails, it is noted.
        let owner = self.rivals.owner.as_ref().map(Member::reservation_key);
        victims.sort_by_key(|key| Some(*key) == owner);
        let holds = !victims.is_empty() && self.keeps(Neglect::Hold);
        if holds { Phase::Holding { victims } } else { self.preempt(victims) }
    }

    fn preempt(&self, mut others: Vec<u64>) -> Phase {
        match (others.pop(), &self.rivals.owner) {
            (Some(victim), _) => Phase::Preempting { victim, others },
            (None, Some(owner)) if !self.is_quiet(owner) => Phase::Recalling,
            (None, _) => Phase::Reserving,
        }
    }

    /// Whether nothing of the owner is in flight, by the replies of this attempt. A registration of
    /// the same boot of its host is a later one: that host has registered again only when nothing
    /// of the owner was in flight, or it is the owner's own.
    fn is_quiet(&self, owner: &Member) -> bool {
        let is_local = |other: &Member| {
            other.host == self.me.host
                || !self.keeps(Neglect::Boot) && other.is_same_machine(&self.me)
        };
        let is_confirmed = |other: &Member| self.confirmed.contains(&other.reservation_key());
        let mut same = self.rivals.all.iter().filter(|other| other.host == owner.host);
        is_local(owner) || same.any(is_confirmed) || !self.keeps(Neglect::Evidence)
    }

    /// Looks for the owner's end in the notes of all hosts.
    fn recall(&mut self, noted: &[Ended]) -> Phase {
        let Some(owner) = self.rivals.owner.clone() else { return Phase::Reserving };
        let is_here = |ended: &&Ended| ended.disk == self.id || !self.keeps(Neglect::Disk);
        let edges: Vec<Ended> =
            self.notes.ended.iter().chain(noted).filter(is_here).cloned().collect();
        let mut reached = vec![owner.reservation_key()];
        let mut next = 0;
        while let Some(key) = reached.get(next).copied() {
            next = next.saturating_add(1);
            for ended in edges.iter().filter(|ended| ended.key == key) {
                if !reached.contains(&ended.by) {
                    reached.push(ended.by);
                }
            }
        }
        let lasts = |key: &u64| self.confirmed.contains(key) || !self.keeps(Neglect::Continuity);
        if reached.iter().skip(1).any(lasts) {
            // The way of many claims becomes one step, which stays the newest.
            self.note(owner.reservation_key());
            return Phase::Recalled;
        }
        Phase::Ended(Err(self.unknown_end(&owner)))
    }

    /// Chooses the keys that a former attempt of this host may have left.
    fn search(&mut self, found: &Found) -> Phase {
        // The owner's, which may be alive: of another host that the disk takes for this one.
        if found.holder.is_some_and(|holder| !self.known.contains(&holder)) {
            return Phase::Ended(Err(self.foreign_registration()));
        }
        let is_left = |key: &u64| is_marked(*key) && *key != self.key && !self.known.contains(key);
        let mut others: Vec<u64> = found.keys.iter().copied().filter(is_left).collect();
        match others.pop() {
            Some(old) => self.intend(old, others, true),
            None => Phase::Ended(Err(self.foreign_registration())),
        }
    }

    /// Compares the disk's own list with what it said before.
    fn verify(&mut self, found: Option<Found>) -> Phase {
        let showed = *self.can_read.get_or_insert(found.is_some());
        let Some(found) = found.filter(|_| self.keeps(Neglect::Verify)) else {
            let why = format!("{} showed its keys a moment before, and does not now", self.disk);
            let is_fit = !showed || !self.keeps(Neglect::Verify);
            return Phase::Ended(if is_fit { Ok(()) } else { Err(why) });
        };
        let Self { disk, key, known, ended, sweeps, .. } = self;
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
        } else if let Some(other) = others.iter().find(|other| ended.contains(other)) {
            format!(
                "{disk} has confirmed that key {other:#018x} was preempted, and lists it still: \
                 its reservations are no fence, choose another one"
            )
        } else if let Some(other) = others.iter().find(|other| !is_marked(**other)) {
            format!(
                "{disk} has a registration with key {other:#018x}, which is not Sidecore's, and \
                 whose host could write: {REMEDY}"
            )
        } else if let Some(other) = others.first().filter(|_| *sweeps >= SWEEPS) {
            format!(
                "{disk} lists another registration at each look, the last with key {other:#018x}: \
                 end the program that makes them, or choose another fence"
            )
        } else if others.is_empty() {
            return Phase::Ended(Ok(()));
        } else {
            // Late attempts have left these. They must be gone at the next look.
            known.extend(&others);
            *sweeps = sweeps.saturating_add(1);
            return self.preempt(others);
        };
        Phase::Ended(Err(why))
    }

    fn unknown_end(&self, owner: &Member) -> String {
        format!(
            "{} has no registration of {owner} any more, and no host has noted an answer to its \
             preemption, so that a write of that host may still come: {FENCED}",
            self.disk
        )
    }

    fn former_boot(&self, owner: &Member) -> String {
        format!(
            "{} has a registration of {owner}, a former boot of this host, whose commands it may \
             still carry out: let a candidate on another host take over; if there is none, \
             {FENCED}",
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
    const fn keeps(&self, _: Neglect) -> bool {
        true
    }
}

/// A rule that a test of this module can neglect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Neglect {
    /// A conflict at the reservation is its end.
    Conflict,
    /// The disk's list is compared.
    Verify,
    /// A missing key is no evidence of a fence.
    Evidence,
    /// A note counts while its host stays registered.
    Continuity,
    /// A note counts for its disk.
    Disk,
    /// No lock outlives a boot.
    Boot,
    /// The disk is reserved before a registration ends.
    Hold,
    /// A key that this host did not have is not noted as replaced.
    Withdraw,
}

const FENCED: &str = "switch that host off, or cut it from the disk, and wait until the disk has \
                      ended its connection; then say so by `sidecore reservation fenced`";
const REMEDY: &str = "if no daemon serves the store and no other program uses the disk, end all \
                      reservations with `sidecore reservation clear`";
