//! The way of one store from candidate to owner, and back.

mod fault;

use sidecore_units::Nanos;

use fault::describe;

use crate::rules::Neglected;
use crate::{
    Call, Held, Ledger, Member, Options, Outcome, Record, Rule, Seen, Settled, State, Status, Task,
};

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    Candidate,
    Waiting { holder: Option<Held> },
    Claiming { ledger: Ledger, before: Ledger },
    Reading,
    Fencing { suspects: Vec<Member>, former: Option<Member>, owner: Option<Member> },
    Checking,
    Recording,
    Settling,
    Opening,
    Serving { checks: bool },
    Announcing { until: Option<Nanos> },
    Closing { releases: bool },
    CheckingEnd,
    RecordingEnd,
    Releasing { ledger: Ledger, then: Then },
    Refused,
}

/// The state after the key was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// Others claim the key first.
    Yield,
    Refuse,
}

/// The claims without a fence that succeeded, in a row, after which the pause between two does not
/// double any more.
const DOUBLINGS: u32 = 4;

/// A store.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    name: String,
    neglected: Neglected,
    /// See [`Options::fence_admits`].
    fence_admits: bool,
    /// This daemon, as it has the key or claims it next.
    me: Member,
    /// The incarnation of its first claim, and the ownerships since.
    first: u64,
    ownerships: u64,
    /// The failures of the fence since the claim.
    failures: u32,
    /// Whether a fence since the claim may have let this host in.
    has_admitted: bool,
    /// The claims in a row whose fence has failed for good.
    vain: u32,
    phase: Phase,
    /// The epoch of the key that this daemon has, or had until the store is closed.
    epoch: u64,
    /// The ledger before this daemon's claim.
    before: Ledger,
    ledger: Ledger,
    /// Whether the key is gone, so that the phase ends as soon as its task has.
    is_lost: bool,
    /// Whether the task of the phase was handed out, and its outcome is not there yet.
    has_task: bool,
    /// Whether the store is open, or may be.
    is_open: bool,
    /// No claim, and no repetition of a task, before this.
    not_before: Nanos,
    hands_over: bool,
    /// Whether the daemon claims the key no more.
    ends: bool,
    detail: Option<String>,
}

impl Store {
    pub(crate) fn new(
        name: &str,
        me: Member,
        (neglected, fence_admits): (Neglected, bool),
    ) -> Self {
        Self {
            name: name.to_owned(),
            neglected,
            fence_admits,
            first: me.incarnation,
            me,
            ownerships: 0,
            failures: 0,
            has_admitted: false,
            vain: 0,
            phase: Phase::Candidate,
            epoch: 0,
            before: Ledger::default(),
            ledger: Ledger::default(),
            is_lost: false,
            has_task: false,
            is_open: false,
            not_before: Nanos::ZERO,
            hands_over: false,
            ends: false,
            detail: None,
        }
    }

    pub(crate) const fn claimant(&self) -> &Member {
        &self.me
    }

    /// An ownership is over. The next one has another incarnation.
    fn renew(&mut self) {
        self.ownerships = self.ownerships.saturating_add(1);
        self.me.incarnation = self.first.wrapping_add(self.ownerships);
    }

    /// Whether the daemon is this one, in this ownership or in a former one.
    fn is_mine(&self, by: &Member) -> bool {
        let ownership = by.incarnation.wrapping_sub(self.first);
        (&by.name, &by.host) == (&self.me.name, &self.me.host) && ownership <= self.ownerships
    }

    /// The epoch in which the store may be served, lease permitting.
    pub(crate) fn serves(&self) -> Option<u64> {
        let serves = matches!(self.phase, Phase::Serving { .. } | Phase::Announcing { .. });
        (serves && !self.is_lost).then_some(self.epoch)
    }

    /// Whether the store is open, or may be, and the key is there.
    pub(crate) fn holds(&self) -> bool {
        self.is_open && !self.is_lost
    }

    pub(crate) fn status(&self, lease_is_over: bool) -> Status {
        let state = match &self.phase {
            Phase::Candidate | Phase::Waiting { holder: None } | Phase::Claiming { .. } => {
                State::Candidate
            }
            Phase::Waiting { holder: Some(_) } => State::WaitingForKey,
            Phase::Reading | Phase::Fencing { .. } | Phase::Checking => State::Fencing,
            Phase::Recording | Phase::Settling | Phase::Opening => State::Opening,
            Phase::Serving { .. } | Phase::Announcing { .. } if lease_is_over => State::Stalled,
            Phase::Serving { .. } | Phase::Announcing { .. } if !self.is_lost => State::Serving,
            Phase::Serving { .. } | Phase::Announcing { .. } => State::Closing,
            Phase::Closing { .. }
            | Phase::CheckingEnd
            | Phase::RecordingEnd
            | Phase::Releasing { .. } => State::Closing,
            Phase::Refused => State::Refused,
        };
        let holder = match &self.phase {
            Phase::Waiting { holder: Some(held) } => Some(held.by.clone()),
            _ => None,
        };
        let has_key = !self.is_lost && self.has_key();
        Status { state, epoch: has_key.then_some(self.epoch), holder, detail: self.detail.clone() }
    }

    /// Whether this daemon has the key, or may have it.
    fn has_key(&self) -> bool {
        !matches!(
            self.phase,
            Phase::Candidate | Phase::Waiting { .. } | Phase::Claiming { .. } | Phase::Refused
        )
    }

    /// Whether nothing of the store is left on this host or in etcd.
    pub(crate) fn is_idle(&self) -> bool {
        let claims = matches!(self.phase, Phase::Claiming { .. });
        !self.is_open && !self.has_task && !claims && (!self.has_key() || self.is_lost)
    }

    /// When the store has a task without another event.
    pub(crate) fn task_at(&self) -> Nanos {
        match self.phase {
            _ if self.has_task => Nanos::MAX,
            Phase::Announcing { until: Some(until) } => until,
            Phase::Reading
            | Phase::Fencing { .. }
            | Phase::Checking
            | Phase::Recording
            | Phase::Opening
            | Phase::Closing { .. }
            | Phase::CheckingEnd
            | Phase::RecordingEnd => self.not_before,
            _ => Nanos::MAX,
        }
    }

    /// When the store has a transaction without another event.
    pub(crate) fn call_at(&self) -> Nanos {
        match self.phase {
            Phase::Waiting { holder: None } if !self.ends => self.not_before,
            Phase::Settling | Phase::Announcing { until: None } | Phase::Releasing { .. } => {
                Nanos::ZERO
            }
            _ => Nanos::MAX,
        }
    }

    /// Whether the key's holder is about to release it.
    pub(crate) fn is_imminent(&self) -> bool {
        match &self.phase {
            Phase::Waiting { holder: Some(held) } => held.is_leaving,
            _ => false,
        }
    }

    /// Gives the store to another daemon, as soon as it is served. False if this daemon does not
    /// have it.
    pub(crate) fn hand_over(&mut self) -> bool {
        self.hands_over |= !self.is_lost && self.has_key();
        self.hands_over
    }

    /// Gives the store to another daemon, and claims it no more.
    pub(crate) fn end(&mut self) {
        (self.ends, self.hands_over) = (true, true);
    }

    /// An operator has acted: a refused store is tried again.
    pub(crate) fn retry(&mut self) {
        if self.phase == Phase::Refused {
            (self.phase, self.detail) = (Phase::Candidate, None);
        }
    }

    /// The key is gone, with the lease or without it.
    pub(crate) fn lose(&mut self, why: &str) {
        match self.phase {
            Phase::Candidate | Phase::Refused => {}
            Phase::Waiting { .. } | Phase::Claiming { .. } => self.phase = Phase::Candidate,
            _ if self.is_lost => {}
            _ => {
                self.is_lost = true;
                self.detail = Some(why.to_owned());
                self.end_lost();
            }
        }
    }

    /// Ends the phases of a key that is gone, as far as no task is in flight.
    fn end_lost(&mut self) {
        if !self.is_lost || self.has_task {
            return;
        }
        if self.is_open {
            self.phase = Phase::Closing { releases: false };
        } else {
            (self.phase, self.is_lost) = (Phase::Candidate, false);
            self.hands_over = self.ends;
            self.renew();
        }
    }

    fn refuse(&mut self, why: String, ledger: Ledger) {
        self.detail = Some(why);
        self.phase = Phase::Releasing { ledger, then: Then::Refuse };
    }

    /// The ledger of a key that is released after a fence was begun, and before the store was
    /// opened. The suspects are those of before, unless the fence may have let this host in.
    fn unopened(&self) -> Ledger {
        if self.stays_suspect() { self.ledger.clone() } else { self.before.clone() }
    }

    /// Whether this host may have been let in by the fence of its claim.
    fn stays_suspect(&self) -> bool {
        self.fence_admits && self.has_admitted
    }

    /// Takes what etcd has of the store, read while this daemon had the lease.
    pub(crate) fn look(&mut self, seen: &Seen) {
        if let Some(fault) = &seen.fault {
            self.lose(fault);
            if matches!(self.phase, Phase::Candidate) {
                self.detail = Some(fault.clone());
            }
            return;
        }
        match (&self.phase, &seen.owner) {
            // An etcd that was restored from a backup has a key that was released.
            (Phase::Refused, Some(held)) if self.is_mine(&held.by) => {
                self.epoch = held.epoch;
                let ledger = seen.ledger.as_ref().map(|(_, ledger)| ledger.clone());
                let ledger = ledger.unwrap_or_default();
                self.phase = Phase::Releasing { ledger, then: Then::Refuse };
            }
            (Phase::Refused | Phase::Claiming { .. }, _) => {}
            (Phase::Candidate | Phase::Waiting { .. }, Some(held)) if !self.is_mine(&held.by) => {
                let is_namesake = held.by.name == self.me.name;
                let detail = format!(
                    "daemon {} has the key \"{}\", too, and the same name: it is a former start \
                     of this daemon, whose lease has to end, or another daemon, which needs a name \
                     of its own",
                    held.by, self.name
                );
                // Errors of former attempts are no obstacle while another daemon serves.
                self.detail = is_namesake.then_some(detail);
                if held.is_leaving || seen.has_settled(held) {
                    // The key that this daemon released has gone to another, which returns it; or
                    // whose fence has succeeded, so that this daemon's may, too.
                    self.not_before = Nanos::ZERO;
                }
                if seen.has_settled(held) {
                    self.vain = 0;
                }
                self.phase = Phase::Waiting { holder: Some(held.clone()) };
            }
            // The answer to a claim was lost. Or an etcd from a backup has given a key back.
            (Phase::Candidate | Phase::Waiting { .. }, Some(held)) => {
                self.me = held.by.clone();
                let epoch = held.epoch;
                let found = seen.ledger.as_ref().map(|(_, ledger)| ledger.clone());
                self.before = found.clone().unwrap_or_default();
                self.own(epoch, found.unwrap_or_default());
            }
            (Phase::Candidate | Phase::Waiting { .. }, None) => {
                self.phase = Phase::Waiting { holder: None };
            }
            (_, Some(held)) if held.by == self.me && held.epoch == self.epoch => {
                if let Phase::Serving { checks } = &mut self.phase {
                    *checks = true;
                }
            }
            (_, owner) => {
                let why = match owner {
                    Some(held) => format!("daemon {} has the key now", held.by),
                    None => "the key was deleted".to_owned(),
                };
                self.lose(&why);
            }
        }
        if self.hands_over && matches!(self.phase, Phase::Serving { .. }) && !self.has_task {
            self.phase = Phase::Announcing { until: None };
        }
    }

    /// The transaction that the store needs next.
    pub(crate) fn call(
        &mut self,
        now: Nanos,
        (seen, lease): (&Seen, i64),
        random: u64,
    ) -> Option<Call> {
        let by = || self.me.clone();
        let store = || self.name.clone();
        let epoch = self.epoch;
        match &self.phase {
            Phase::Waiting { holder: None } if now >= self.not_before && !self.ends => {
                let (ledger_revision, before) = match &seen.ledger {
                    Some((revision, ledger)) => (*revision, ledger.clone()),
                    None => (0, Ledger { store: random, ..Ledger::default() }),
                };
                let mut ledger = before.clone();
                if !ledger.is_recorded {
                    // Stores that are not shared must not get one number by two attempts.
                    ledger.store = random;
                }
                if !ledger.suspects.contains(&self.me) {
                    ledger.suspects.push(by());
                    ledger.forget_claims(&self.me);
                }
                let (store, by) = (store(), by());
                let call =
                    Call::Claim { store, by, lease, ledger_revision, ledger: ledger.clone() };
                self.phase = Phase::Claiming { ledger, before };
                Some(call)
            }
            Phase::Settling => {
                Some(Call::Settle { store: store(), epoch, ledger: self.ledger.clone() })
            }
            Phase::Announcing { until: None } => {
                Some(Call::Announce { store: store(), epoch, by: by(), lease })
            }
            Phase::Releasing { ledger, .. } => {
                Some(Call::Release { store: store(), epoch, ledger: ledger.clone() })
            }
            _ => None,
        }
    }

    /// A transaction of this store was answered: with the revision if its conditions held.
    pub(crate) fn answered(&mut self, now: Nanos, revision: Option<u64>, options: &Options) {
        match (std::mem::replace(&mut self.phase, Phase::Candidate), revision) {
            (Phase::Claiming { ledger, before }, Some(revision)) => {
                self.before = before;
                self.own(revision, ledger);
            }
            (Phase::Claiming { .. }, None) => {}
            (Phase::Settling, Some(_)) => self.phase = Phase::Opening,
            (Phase::Announcing { .. }, Some(_)) => {
                self.phase = Phase::Announcing { until: Some(now.after(options.announce)) };
            }
            (Phase::Releasing { then, .. }, Some(_)) => self.released(now, then, options),
            (phase, _) => {
                self.phase = phase;
                self.lose("the key was not this daemon's");
            }
        }
    }

    /// A transaction of this store has no answer, and may have taken effect.
    pub(crate) fn unanswered(&mut self, why: &str) {
        self.detail = Some(why.to_owned());
        if let Phase::Claiming { .. } = self.phase {
            // The next read says whether it did.
            self.phase = Phase::Candidate;
        }
    }

    fn released(&mut self, now: Nanos, then: Then, options: &Options) {
        let doublings = self.vain.min(DOUBLINGS);
        self.not_before =
            now.after(Nanos(options.yields.0.saturating_mul(2_u64.saturating_pow(doublings))));
        self.hands_over = false;
        self.renew();
        self.phase = match then {
            Then::Yield => Phase::Candidate,
            Then::Refuse => Phase::Refused,
        };
    }

    fn own(&mut self, epoch: u64, ledger: Ledger) {
        self.epoch = epoch;
        self.ledger = ledger;
        self.detail = None;
        (self.failures, self.has_admitted) = (0, false);
        self.phase = Phase::Reading;
    }

    /// The task that the store needs next. It is handed out once. After the end of the lease,
    /// nothing but the close of the store goes on: a successor may serve, and has the record.
    pub(crate) fn task(&mut self, now: Nanos, cluster: u64, lease_is_over: bool) -> Option<Task> {
        if let Phase::Announcing { until: Some(until) } = self.phase
            && now >= until
        {
            self.phase = if self.neglected.keeps(Rule::CloseFirst) {
                Phase::Closing { releases: true }
            } else {
                self.releasing()
            };
        }
        self.give_up();
        let begins = matches!(
            self.phase,
            Phase::Fencing { .. }
                | Phase::Recording
                | Phase::Settling
                | Phase::Opening
                | Phase::CheckingEnd
                | Phase::RecordingEnd
        );
        if self.has_task || now < self.not_before || begins && lease_is_over {
            return None;
        }
        let record = |is_closed| Record {
            cluster,
            store: self.ledger.store,
            epoch: self.epoch,
            owner: self.me.clone(),
            is_closed,
        };
        let task = match &mut self.phase {
            Phase::Reading | Phase::Checking | Phase::CheckingEnd => Task::ReadRecord,
            Phase::Serving { checks } if *checks => {
                *checks = false;
                Task::ReadRecord
            }
            Phase::Fencing { suspects, former, owner } => Task::Fence {
                suspects: suspects.clone(),
                former: former.clone(),
                owner: owner.clone(),
            },
            Phase::Recording => Task::WriteRecord { record: record(false) },
            Phase::RecordingEnd => Task::WriteRecord { record: record(true) },
            Phase::Opening => {
                self.is_open = true;
                Task::Open { epoch: self.epoch, number: self.ledger.store }
            }
            Phase::Closing { .. } => Task::Close,
            _ => return None,
        };
        self.has_task = true;
        Some(task)
    }

    /// Releases the key of a store whose fence has failed, if this daemon is to end.
    fn give_up(&mut self) {
        let has_failed = matches!(self.phase, Phase::Fencing { .. }) && self.detail.is_some();
        if self.ends && has_failed && !self.has_task && !self.is_lost {
            self.phase = Phase::Releasing { ledger: self.unopened(), then: Then::Yield };
        }
    }

    /// The outcome of the task that was handed out.
    pub(crate) fn ended(&mut self, now: Nanos, outcome: Outcome, cluster: u64, options: &Options) {
        if !std::mem::take(&mut self.has_task) {
            return;
        }
        let outcome = match (outcome, &self.phase) {
            (Outcome::Failed(_) | Outcome::Unfenced { .. }, Phase::Fencing { .. })
                if !self.neglected.keeps(Rule::FenceResult) =>
            {
                Outcome::Done
            }
            (outcome, _) => outcome,
        };
        let is_shut = matches!(outcome, Outcome::Unfenced { admits: false, .. });
        self.has_admitted |= matches!(self.phase, Phase::Fencing { .. }) && !is_shut;
        match (&self.phase, outcome) {
            (Phase::Closing { releases }, Outcome::Done) => {
                self.is_open = false;
                if *releases && !self.is_lost {
                    self.phase = Phase::CheckingEnd;
                }
            }
            (Phase::Closing { .. }, Outcome::Left) if self.is_lost => self.is_open = false,
            // The lease was renewed after all, or that is not known yet. Without a look at the
            // locks, nothing says that the next owner needs no fence.
            (Phase::Closing { .. }, Outcome::Left) => self.not_before = now.after(options.retry),
            (phase, Outcome::Failed(why)) => {
                let why = describe(phase, &self.name, &why);
                self.failed(now, why, options);
            }
            (phase, Outcome::Unfenced { why, hangs, .. }) => {
                let why = describe(phase, &self.name, &why);
                self.failures = if hangs { options.fence_attempts } else { self.failures };
                self.failed(now, why, options);
            }
            _ if self.is_lost => {}
            (Phase::Reading, Outcome::Recorded(record)) => self.read(record, cluster),
            (Phase::Fencing { .. }, Outcome::Done) => {
                self.vain = 0;
                self.phase = Phase::Checking;
            }
            (Phase::Checking, Outcome::Recorded(record)) => self.check(record, cluster),
            (Phase::Recording, Outcome::Done) => {
                self.ledger.suspects = vec![self.me.clone()];
                self.ledger.is_recorded = true;
                self.ledger.settled = Some(Settled { by: self.me.clone(), epoch: self.epoch });
                self.phase = Phase::Settling;
            }
            (Phase::Opening, Outcome::Done) => {
                self.detail = None;
                self.phase = Phase::Serving { checks: false };
            }
            (Phase::Serving { .. } | Phase::Announcing { .. }, Outcome::Recorded(record)) => {
                self.trip(record);
            }
            (Phase::CheckingEnd, Outcome::Recorded(record)) => {
                // An etcd that was restored from a backup may have given the key back.
                self.phase = Phase::RecordingEnd;
                self.trip(record);
            }
            (Phase::RecordingEnd, Outcome::Done) => {
                self.phase = self.releasing();
            }
            _ => {}
        }
        self.end_lost();
    }

    fn failed(&mut self, now: Nanos, why: String, options: &Options) {
        self.detail = Some(why);
        self.not_before = now.after(options.retry);
        match self.phase {
            Phase::Opening => {
                self.is_open = false;
                // Nothing of this daemon is in flight, and all others are fenced.
                self.phase = self.releasing();
            }
            Phase::Fencing { .. } if !self.is_lost => {
                self.failures = self.failures.saturating_add(1);
                if self.failures >= options.fence_attempts {
                    // This host may not reach what another one reaches. Without a suspect that
                    // stays behind, a pause that grows would only delay a sole candidate.
                    self.vain = self.vain.saturating_add(self.stays_suspect().into());
                    let ledger = self.unopened();
                    self.phase = Phase::Releasing { ledger, then: Then::Yield };
                }
            }
            _ => {}
        }
    }

    /// The release of a key whose owner has nothing in flight, as all before it.
    fn releasing(&self) -> Phase {
        let ledger = Ledger { suspects: Vec::new(), ..self.ledger.clone() };
        Phase::Releasing { ledger, then: Then::Yield }
    }

    /// Takes the record as it was before the fence, which names the last owner.
    fn read(&mut self, record: Option<Record>, cluster: u64) {
        if let Some(why) = self.flaw(record.as_ref(), cluster) {
            // A fence would harm an owner that is none of this candidate's.
            self.refuse(why, self.before.clone());
            return;
        }
        let mut suspects = self.before.suspects.clone();
        if !self.neglected.keeps(Rule::AllSuspects) {
            suspects.clear();
        }
        let owner = self.last_owner(record.as_ref()).filter(|owner| *owner != self.me);
        let (closed, open) = match record {
            Some(record) if record.is_closed => (Some(record.owner), None),
            record => (None, record.map(|record| record.owner)),
        };
        // An etcd that was restored from a backup may have forgotten a suspect.
        suspects.extend(open);
        suspects.extend(owner.clone());
        suspects.retain(|suspect| *suspect != self.me);
        suspects.sort();
        suspects.dedup();
        let former = closed.filter(|owner| *owner != self.me && !suspects.contains(owner));
        self.phase = if self.neglected.keeps(Rule::Fence) {
            Phase::Fencing { suspects, former, owner }
        } else {
            Phase::Checking
        };
    }

    /// The daemon that may have opened the store last, and has not closed it in order: the record's
    /// owner, or the ledger's if a former owner that was paused has replaced the record since.
    fn last_owner(&self, record: Option<&Record>) -> Option<Member> {
        match (record, &self.before.settled) {
            (Some(record), Some(settled)) if settled.epoch > record.epoch => {
                Some(settled.by.clone())
            }
            (Some(record), _) => (!record.is_closed).then(|| record.owner.clone()),
            (None, settled) => settled.as_ref().map(|settled| settled.by.clone()),
        }
    }

    /// Compares the record after the fence: a suspect may have written it before.
    fn check(&mut self, record: Option<Record>, cluster: u64) {
        match self.flaw(record.as_ref(), cluster) {
            Some(why) => self.refuse(why, self.unopened()),
            None => self.phase = Phase::Recording,
        }
    }

    /// Compares the record with the epoch and the ledger. Returns the reason of a refusal.
    fn flaw(&mut self, record: Option<&Record>, cluster: u64) -> Option<String> {
        if let (Some(found), false) = (&record, self.ledger.is_recorded) {
            // Its owner was interrupted after it had written the record.
            self.ledger.store = found.store;
        }
        let name = &self.name;
        let keeps = |rule| self.neglected.keeps(rule);
        match record {
            None if self.ledger.is_recorded && keeps(Rule::Shared) => Some(format!(
                "store \"{name}\" has no record, and etcd says that it was served: let all \
                 candidates share one store and its record, or, if no daemon serves the store, \
                 delete its keys in etcd"
            )),
            Some(found) if found.store != self.ledger.store && keeps(Rule::Shared) => {
                Some(format!(
                    "store \"{name}\" is {:016x} by its record and {:016x} in etcd: let all \
                     candidates share one store, or, if no daemon serves the store, delete its \
                     record and its keys in etcd",
                    found.store, self.ledger.store
                ))
            }
            Some(found) if found.cluster != cluster && keeps(Rule::Cluster) => Some(format!(
                "store \"{name}\" was served under etcd cluster {:016x}, and this is cluster \
                 {cluster:016x}: give the endpoints of that cluster, or, if no daemon serves the \
                 store, delete its record",
                found.cluster
            )),
            Some(found) if found.epoch >= self.epoch && keeps(Rule::Epoch) => Some(format!(
                "store \"{name}\" was served in epoch {}, and etcd is at {} only, as after a \
                 restore from a backup: if no daemon serves the store, delete its record and its \
                 keys in etcd",
                found.epoch, self.epoch
            )),
            _ => None,
        }
    }

    /// Ends the ownership if the record has a successor.
    fn trip(&mut self, record: Option<Record>) {
        let successor = record.filter(|record| record.epoch > self.epoch);
        if let Some(record) = successor {
            let why = format!("daemon {} serves it in epoch {}", record.owner, record.epoch);
            self.lose(&why);
        }
    }
}
