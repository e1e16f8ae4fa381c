//! The state machine against answers made by hand.

mod claims;

use std::collections::BTreeMap;

use sidecore_units::Nanos;

use crate::{
    Answer, Call, Daemon, Held, Ledger, Member, Numbered, Options, Origin, Outcome, Record, Seen,
    Settled, State, Task,
};

const CLUSTER: u64 = 0xc1;
const LEASE: i64 = 77;

fn member(name: &str) -> Member {
    Member { name: name.into(), host: format!("host-{name}"), incarnation: 1 }
}

fn origin(term: u64, revision: u64) -> Origin {
    Origin { cluster: CLUSTER, member: 1, term, revision }
}

fn ms(ms: u64) -> Nanos {
    Nanos::from_millis(ms)
}

/// A daemon, with the answers of an etcd that obeys.
struct Rig {
    daemon: Daemon,
    now: Nanos,
    ledger: Option<(u64, Ledger)>,
    owner: Option<Held>,
    revision: u64,
    record: Option<Record>,
    /// So many times, the store is closed and requests to it may be in flight.
    leaves: u32,
}

impl Rig {
    fn new() -> Self {
        let mut daemon = Daemon::new(member("a"), Options::of_lease(3), 5);
        daemon.add("disk");
        let (ledger, owner, record) = (None, None, None);
        Self { daemon, now: ms(1_000), ledger, owner, revision: 10, record, leaves: 0 }
    }

    fn seen(&self) -> BTreeMap<String, Seen> {
        let seen = Seen { owner: self.owner.clone(), ledger: self.ledger.clone(), fault: None };
        BTreeMap::from([("disk".to_owned(), seen)])
    }

    /// The answer to a call, and its effect.
    fn answer(&mut self, call: &Call) -> Answer {
        match call {
            Call::Grant { ttl_s } => {
                Answer::Granted { origin: origin(2, self.revision), lease: LEASE, ttl_s: *ttl_s }
            }
            Call::Renew { .. } => {
                let at = origin(2, self.revision);
                Answer::Renewed { renewal: (at, 3), read: at, seen: self.seen() }
            }
            Call::Claim { by, ledger, ledger_revision, .. } => {
                let known = self.ledger.as_ref().map_or(0, |(revision, _)| *revision);
                let is_done = self.owner.is_none() && known == *ledger_revision;
                if is_done {
                    self.revision += 1;
                    let epoch = self.revision;
                    self.owner = Some(Held { by: by.clone(), epoch, is_leaving: false });
                    self.ledger = Some((epoch, ledger.clone()));
                }
                Answer::Done { origin: origin(2, self.revision), is_done }
            }
            Call::Settle { epoch, ledger, .. } | Call::Release { epoch, ledger, .. } => {
                let is_done = self.owner.as_ref().is_some_and(|held| held.epoch == *epoch);
                if is_done {
                    self.revision += 1;
                    self.ledger = Some((self.revision, ledger.clone()));
                    if matches!(call, Call::Release { .. }) {
                        self.owner = None;
                    }
                }
                Answer::Done { origin: origin(2, self.revision), is_done }
            }
            Call::Announce { .. } | Call::Revoke { .. } => {
                Answer::Done { origin: origin(2, self.revision), is_done: true }
            }
        }
    }

    /// The outcome of a task, and its effect.
    fn outcome(&mut self, task: &Task) -> Outcome {
        match task {
            Task::ReadRecord => Outcome::Recorded(self.record.clone()),
            Task::WriteRecord { record } => {
                self.record = Some(record.clone());
                Outcome::Done
            }
            Task::Close if self.leaves > 0 => {
                self.leaves -= 1;
                Outcome::Left
            }
            Task::Fence { .. } | Task::Open { .. } | Task::Close => Outcome::Done,
        }
    }

    /// Runs the daemon until it is in a state. Returns the tasks.
    fn run_to(&mut self, state: State) -> Vec<Task> {
        let mut tasks = Vec::new();
        for _ in 0..200 {
            if self.state() == state {
                return tasks;
            }
            if let Some(numbered) = self.daemon.call(self.now) {
                let answer = self.answer(&numbered.call);
                self.daemon.answered(self.now, numbered.number, answer);
            } else if let Some((store, task)) = self.daemon.task(self.now) {
                let outcome = self.outcome(&task);
                tasks.push(task);
                self.daemon.ended(self.now, &store, outcome);
            } else {
                self.now = self.daemon.wake_at().max(self.now.after(Nanos(1)));
            }
        }
        panic!("never {state:?}: {:?}", self.daemon.status(self.now));
    }

    fn state(&self) -> State {
        self.daemon.status(self.now)[0].1.state
    }

    fn detail(&self) -> String {
        self.daemon.status(self.now)[0].1.detail.clone().unwrap_or_default()
    }

    /// The next call, which the test answers.
    fn next_call(&mut self) -> Numbered {
        for _ in 0..50 {
            if let Some(numbered) = self.daemon.call(self.now) {
                return numbered;
            }
            self.now = self.daemon.wake_at().max(self.now.after(Nanos(1)));
        }
        panic!("no call: {:?}", self.daemon.status(self.now));
    }
}

#[test]
fn the_first_owner_has_no_suspects_and_records_its_epoch_before_it_opens() {
    let mut rig = Rig::new();
    let tasks = rig.run_to(State::Serving);
    let record = rig.record.clone().unwrap();
    assert_eq!((record.epoch, record.is_closed), (11, false));
    let [
        Task::ReadRecord,
        Task::Fence { suspects, former: None, owner: None },
        Task::ReadRecord,
        Task::WriteRecord { .. },
        Task::Open { epoch: 11, .. },
    ] = &tasks[..]
    else {
        panic!("{tasks:?}");
    };
    assert_eq!(suspects[..], []);
    let (_, ledger) = rig.ledger.clone().unwrap();
    assert_eq!((ledger.suspects, ledger.is_recorded), (vec![member("a")], true));
    assert_eq!(rig.daemon.serves_until("disk").unwrap().1, 11);
}

#[test]
fn lease_time_counts_from_before_the_renewal_was_sent_and_less_the_drift() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    let sent = rig.next_call();
    let sent_at = rig.now;
    assert!(matches!(sent.call, Call::Renew { lease: LEASE }));
    rig.now = sent_at.after(ms(1_500));
    let answer = rig.answer(&sent.call);
    rig.daemon.answered(rig.now, sent.number, answer);
    assert_eq!(rig.daemon.serves_until("disk").unwrap().0, sent_at.after(ms(2_700)));
}

#[test]
fn a_renewal_of_another_term_than_the_read_after_it_does_not_count() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    let (until, _) = rig.daemon.serves_until("disk").unwrap();
    let sent = rig.next_call();
    let seen = rig.seen();
    let answer = Answer::Renewed { renewal: (origin(2, 20), 3), read: origin(3, 20), seen };
    rig.daemon.answered(rig.now, sent.number, answer);
    assert_eq!(rig.daemon.serves_until("disk").unwrap().0, until);
}

#[test]
fn without_answers_the_store_stalls_and_is_served_again_if_the_key_is_still_there() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    let sent = rig.next_call();
    let failed = Answer::Failed { reason: "no answer in 500 ms".into() };
    rig.daemon.answered(rig.now, sent.number, failed);
    rig.now = rig.now.after(ms(5_000));
    assert_eq!(rig.state(), State::Stalled);
    assert!(rig.detail().contains("no answer"), "{}", rig.detail());
    assert!(rig.daemon.serves_until("disk").unwrap().0 < rig.now);
    assert_eq!(rig.run_to(State::Serving), [], "nothing is opened again");
}

#[test]
fn a_lease_that_is_gone_closes_the_store_and_the_next_owner_is_waited_for() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    rig.revision = 40;
    rig.owner = Some(Held { by: member("b"), epoch: 40, is_leaving: false });
    let sent = rig.next_call();
    let seen = rig.seen();
    let answer = Answer::Renewed { renewal: (origin(2, 40), 0), read: origin(2, 40), seen };
    rig.daemon.answered(rig.now, sent.number, answer);
    assert_eq!(rig.daemon.serves_until("disk"), None);
    assert_eq!(rig.run_to(State::WaitingForKey), [Task::Close]);
}

#[test]
fn every_suspect_is_fenced_and_the_owner_in_the_record_too() {
    let mut rig = Rig::new();
    let ledger = Ledger {
        store: 9,
        is_recorded: true,
        suspects: vec![member("b"), member("c"), member("b")],
        settled: None,
    };
    rig.ledger = Some((4, ledger));
    let record =
        Record { cluster: CLUSTER, store: 9, epoch: 6, owner: member("d"), is_closed: false };
    rig.record = Some(record);
    let tasks = rig.run_to(State::Serving);
    let suspects = vec![member("b"), member("c"), member("d")];
    let owner = Some(member("d"));
    assert_eq!(tasks[1], Task::Fence { suspects, former: None, owner });
    let ledger = rig.ledger.unwrap().1;
    assert_eq!(ledger.suspects, [member("a")], "the fenced ones are cleared");
    assert_eq!(ledger.settled, Some(Settled { by: member("a"), epoch: 11 }));
}

#[test]
fn the_last_owner_is_the_newer_one_of_record_and_ledger() {
    // The epochs of the record and of the ledger, and the name of the last owner.
    for (epoch, is_closed, settled, expected) in [
        (6, false, None, Some("d")),
        (6, false, Some(6), Some("d")),
        (6, true, Some(6), None),
        // Its daemon was interrupted before the ledger had it.
        (6, false, Some(4), Some("d")),
        // A former owner that was paused has replaced the record.
        (6, false, Some(8), Some("e")),
        (6, true, Some(8), Some("e")),
    ] {
        let mut rig = Rig::new();
        let by = if settled == Some(6) { member("d") } else { member("e") };
        let settled = settled.map(|epoch| Settled { by, epoch });
        let ledger = Ledger { store: 9, is_recorded: true, suspects: Vec::new(), settled };
        rig.ledger = Some((9, ledger));
        rig.record =
            Some(Record { cluster: CLUSTER, store: 9, epoch, owner: member("d"), is_closed });
        let tasks = rig.run_to(State::Serving);
        let Task::Fence { suspects, owner, .. } = &tasks[1] else { panic!("{tasks:?}") };
        assert_eq!(*owner, expected.map(member));
        assert!(owner.iter().all(|owner| suspects.contains(owner)), "{suspects:?}");
    }
}

#[test]
fn an_owner_that_has_closed_the_store_is_named_to_the_fence_and_no_suspect() {
    let mut rig = Rig::new();
    let ledger = Ledger { store: 9, is_recorded: true, suspects: Vec::new(), settled: None };
    rig.ledger = Some((4, ledger));
    let record =
        Record { cluster: CLUSTER, store: 9, epoch: 6, owner: member("d"), is_closed: true };
    rig.record = Some(record);
    let tasks = rig.run_to(State::Serving);
    let former = Some(member("d"));
    assert_eq!(tasks[1], Task::Fence { suspects: Vec::new(), former, owner: None });
}

#[test]
fn a_fence_that_fails_is_tried_again_and_nothing_is_opened() {
    let mut rig = Rig::new();
    let ledger =
        Ledger { store: 9, is_recorded: false, suspects: vec![member("b")], settled: None };
    rig.ledger = Some((4, ledger));
    rig.run_to(State::Fencing);
    for _ in 0..3 {
        let (store, task) = loop {
            if let Some(numbered) = rig.daemon.call(rig.now) {
                let answer = rig.answer(&numbered.call);
                rig.daemon.answered(rig.now, numbered.number, answer);
            }
            match rig.daemon.task(rig.now) {
                Some((store, Task::ReadRecord)) => {
                    rig.daemon.ended(rig.now, &store, Outcome::Recorded(None));
                }
                Some(found) => break found,
                None => rig.now = rig.now.after(ms(50)),
            }
        };
        assert!(matches!(task, Task::Fence { .. }), "{task:?}");
        rig.daemon.ended(rig.now, &store, Outcome::Failed("exit code 1".into()));
        assert_eq!(rig.state(), State::Fencing);
        assert!(rig.detail().contains("\"b\" on host host-b"), "{}", rig.detail());
    }
}

#[test]
fn an_end_while_the_fence_fails_releases_the_key_and_stays_a_suspect() {
    let mut rig = Rig::new();
    let ledger =
        Ledger { store: 9, is_recorded: false, suspects: vec![member("b")], settled: None };
    rig.ledger = Some((4, ledger));
    rig.run_to(State::Fencing);
    let mut has_failed = false;
    for _ in 0..100 {
        if rig.daemon.has_ended(rig.now) {
            break;
        }
        if let Some(numbered) = rig.daemon.call(rig.now) {
            let answer = rig.answer(&numbered.call);
            rig.daemon.answered(rig.now, numbered.number, answer);
        }
        match rig.daemon.task(rig.now) {
            Some((store, Task::ReadRecord)) => {
                rig.daemon.ended(rig.now, &store, Outcome::Recorded(None));
            }
            Some((store, Task::Fence { .. })) => {
                assert!(!std::mem::replace(&mut has_failed, true), "it is tried again");
                rig.daemon.end();
                rig.daemon.ended(rig.now, &store, Outcome::Failed("exit code 1".into()));
            }
            task => assert_eq!(task, None),
        }
        rig.now = rig.now.after(ms(50));
    }
    assert!(has_failed && rig.owner.is_none(), "the key is kept");
    assert_eq!(rig.ledger.unwrap().1.suspects, [member("b"), member("a")]);
}

#[test]
fn a_store_that_is_refused_after_the_fence_leaves_this_daemon_a_suspect() {
    let mut rig = Rig::new();
    let ledger = Ledger { store: 9, is_recorded: true, suspects: vec![member("b")], settled: None };
    rig.ledger = Some((4, ledger));
    let record =
        Record { cluster: CLUSTER, store: 9, epoch: 6, owner: member("b"), is_closed: false };
    rig.record = Some(record.clone());
    rig.run_to(State::Fencing);
    let mut was_read = false;
    while rig.state() != State::Refused {
        if let Some(numbered) = rig.daemon.call(rig.now) {
            let answer = rig.answer(&numbered.call);
            rig.daemon.answered(rig.now, numbered.number, answer);
        }
        if let Some((store, task)) = rig.daemon.task(rig.now) {
            let outcome = rig.outcome(&task);
            // A suspect writes it just before it is fenced.
            if !std::mem::replace(&mut was_read, true) {
                rig.record = Some(Record { epoch: 99, ..record.clone() });
            }
            rig.daemon.ended(rig.now, &store, outcome);
        }
        rig.now = rig.now.after(ms(10));
    }
    assert_eq!(rig.ledger.unwrap().1.suspects, [member("b"), member("a")]);
}

#[test]
fn each_ownership_has_another_incarnation() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    let first = rig.record.clone().unwrap().owner;
    rig.owner = None;
    rig.run_to(State::Closing);
    rig.run_to(State::Serving);
    let second = rig.record.clone().unwrap().owner;
    assert_ne!(first.incarnation, second.incarnation);
    assert_eq!(rig.owner.as_ref().map(|held| &held.by), Some(&second));
    // A key of the first one, from a backup of etcd, is this daemon's.
    rig.owner = Some(Held { by: first, epoch: 5, is_leaving: false });
    rig.run_to(State::Refused);
    assert_eq!(rig.owner, None);
}

#[test]
fn an_etcd_from_a_backup_a_foreign_cluster_and_a_store_that_is_not_shared_are_refused() {
    let record =
        Record { cluster: CLUSTER, store: 9, epoch: 100, owner: member("b"), is_closed: true };
    let cases = [
        (Some(record.clone()), "backup"),
        (Some(Record { cluster: 3, epoch: 1, ..record.clone() }), "endpoints"),
        (Some(Record { store: 8, epoch: 1, ..record }), "share one store"),
        (None, "share one store"),
    ];
    for (record, remedy) in cases {
        let mut rig = Rig::new();
        let ledger =
            Ledger { store: 9, is_recorded: true, suspects: vec![member("b")], settled: None };
        rig.ledger = Some((4, ledger));
        rig.record = record;
        let tasks = rig.run_to(State::Refused);
        assert!(rig.detail().contains(remedy), "{}", rig.detail());
        let is_harm = |task: &Task| matches!(task, Task::Fence { .. } | Task::Open { .. });
        assert!(!tasks.iter().any(is_harm), "{tasks:?}");
        assert_eq!(rig.owner, None, "others may have the key");
        assert_eq!(rig.ledger.unwrap().1.suspects, [member("b")], "no suspect was cleared");
    }
}

#[test]
fn a_record_without_a_settled_ledger_names_the_store_and_no_other_store_gets_its_number() {
    let unsettled =
        Ledger { store: 9, is_recorded: false, suspects: vec![member("b")], settled: None };
    let mut shared = Rig::new();
    shared.ledger = Some((4, unsettled.clone()));
    let record =
        Record { cluster: CLUSTER, store: 9, epoch: 4, owner: member("b"), is_closed: false };
    shared.record = Some(record);
    shared.run_to(State::Serving);
    assert_eq!(shared.ledger.unwrap().1.store, 9);
    let mut other = Rig::new();
    other.ledger = Some((4, unsettled));
    other.run_to(State::Serving);
    assert_ne!(other.ledger.unwrap().1.store, 9);
}

#[test]
fn a_hand_over_is_announced_closed_and_recorded_before_the_key_is_released() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    assert!(rig.daemon.hand_over("disk"));
    let tasks = rig.run_to(State::Candidate);
    let [.., Task::Close, Task::ReadRecord, Task::WriteRecord { record }] = &tasks[..] else {
        panic!("{tasks:?}")
    };
    assert!(record.is_closed);
    assert_eq!(rig.owner, None);
    assert_eq!(rig.ledger.clone().unwrap().1.suspects, []);
    let released_at = rig.now;
    rig.run_to(State::Serving);
    assert!(rig.now >= released_at.after(ms(1_000)), "others had no time to claim the key");
}

#[test]
fn a_hand_over_of_a_store_that_is_being_opened_is_remembered() {
    let mut rig = Rig::new();
    rig.run_to(State::Opening);
    assert!(rig.daemon.hand_over("disk"));
    rig.run_to(State::Serving);
    rig.run_to(State::Candidate);
    assert_eq!(rig.owner, None);
}

#[test]
fn a_key_that_comes_back_is_claimed_at_once() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    assert!(rig.daemon.hand_over("disk"));
    rig.run_to(State::Candidate);
    let released_at = rig.now;
    rig.owner = Some(Held { by: member("b"), epoch: 40, is_leaving: true });
    rig.revision = 40;
    rig.run_to(State::WaitingForKey);
    rig.owner = None;
    rig.run_to(State::Serving);
    assert!(rig.now < released_at.after(ms(500)), "{:?}", rig.now.since(released_at));
}

#[test]
fn a_store_with_requests_in_flight_is_not_released_though_its_lease_was_renewed_after_all() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    assert!(rig.daemon.hand_over("disk"));
    rig.leaves = 2;
    let tasks = rig.run_to(State::Candidate);
    let [.., Task::Close, Task::Close, Task::Close, Task::ReadRecord, Task::WriteRecord { .. }] =
        &tasks[..]
    else {
        panic!("{tasks:?}")
    };
    assert_eq!(rig.ledger.clone().unwrap().1.suspects, [], "the last close has looked");
}

#[test]
fn a_store_with_requests_in_flight_is_left_to_the_next_owners_fence_when_the_key_is_gone() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    rig.leaves = 1;
    rig.owner = Some(Held { by: member("b"), epoch: 12, is_leaving: false });
    assert_eq!(rig.run_to(State::WaitingForKey), [Task::Close]);
    assert_eq!(rig.ledger.clone().unwrap().1.suspects, [member("a")]);
}

#[test]
fn the_lease_of_a_store_that_is_being_closed_is_told_too() {
    let mut rig = Rig::new();
    assert_eq!(rig.daemon.holds_until("disk"), None);
    rig.run_to(State::Serving);
    assert_eq!(rig.daemon.holds_until("disk"), rig.daemon.lease_ends_at());
    assert!(rig.daemon.hand_over("disk"));
    rig.leaves = 1;
    rig.run_to(State::Closing);
    let until = rig.daemon.holds_until("disk").unwrap();
    rig.now = rig.now.after(ms(300));
    let Numbered { number, call } = rig.next_call();
    let answer = rig.answer(&call);
    rig.daemon.answered(rig.now, number, answer);
    assert!(rig.daemon.holds_until("disk").unwrap() > until);
    rig.run_to(State::Candidate);
    assert_eq!(rig.daemon.holds_until("disk"), None);
}

#[test]
fn the_end_of_an_ownership_is_not_recorded_after_the_lease() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    assert!(rig.daemon.hand_over("disk"));
    assert!(rig.run_to(State::Closing).contains(&Task::Close));
    rig.now = rig.daemon.lease_ends_at().unwrap();
    assert_eq!(rig.daemon.task(rig.now), None, "a successor may have recorded its epoch");
    let closed = rig.run_to(State::Candidate);
    assert!(matches!(closed[..], [Task::ReadRecord, Task::WriteRecord { .. }]), "{closed:?}");
}

#[test]
fn the_end_of_an_ownership_is_not_recorded_over_a_successor() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    assert!(rig.daemon.hand_over("disk"));
    rig.run_to(State::Closing);
    // As after a restore of etcd from a backup, in which this daemon still has the key.
    rig.record.as_mut().unwrap().epoch = 12;
    assert_eq!(rig.run_to(State::Candidate), [Task::ReadRecord]);
    assert_eq!(rig.record.unwrap().epoch, 12);
}

#[test]
fn a_namesake_is_reported() {
    let mut rig = Rig::new();
    let by = Member { host: "elsewhere".into(), ..member("a") };
    rig.owner = Some(Held { by, epoch: 5, is_leaving: false });
    rig.run_to(State::WaitingForKey);
    assert!(rig.detail().contains("a name of its own"), "{}", rig.detail());
}

#[test]
fn a_record_of_a_successor_ends_the_ownership() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    rig.record.as_mut().unwrap().epoch = 12;
    assert_eq!(rig.run_to(State::Closing), [Task::ReadRecord]);
    assert_eq!(rig.daemon.serves_until("disk"), None);
}

#[test]
fn answers_that_are_late_or_of_another_cluster_are_not_taken() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    let until = rig.daemon.serves_until("disk");
    let sent = rig.next_call();
    let foreign = Origin { cluster: 2, ..origin(2, 50) };
    let answer = Answer::Renewed { renewal: (foreign, 0), read: foreign, seen: BTreeMap::new() };
    rig.daemon.answered(rig.now, sent.number.wrapping_sub(1), answer.clone());
    assert_eq!(rig.daemon.serves_until("disk"), until, "late");
    rig.daemon.answered(rig.now, sent.number, answer);
    assert_eq!(rig.daemon.serves_until("disk"), until, "of another cluster");
    assert!(rig.detail().contains("00000000000000c1"), "{}", rig.detail());
}

#[test]
fn the_end_of_a_daemon_releases_its_stores_and_its_lease() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    rig.daemon.end();
    rig.run_to(State::Candidate);
    assert_eq!(rig.owner, None);
    let sent = rig.next_call();
    assert_eq!(sent.call, Call::Revoke { lease: LEASE });
    let answer = rig.answer(&sent.call);
    rig.daemon.answered(rig.now, sent.number, answer);
    assert!(rig.daemon.has_ended(rig.now));
    assert_eq!(rig.daemon.call(rig.now.after(ms(9_000))), None);
}

#[test]
fn a_daemon_ends_without_etcd_when_its_lease_has_ended() {
    let mut rig = Rig::new();
    rig.run_to(State::Serving);
    rig.daemon.end();
    let until = rig.daemon.lease_ends_at().unwrap();
    while !rig.daemon.has_ended(rig.now) {
        if let Some(numbered) = rig.daemon.call(rig.now) {
            let failed = Answer::Failed { reason: "connection refused".into() };
            rig.daemon.answered(rig.now, numbered.number, failed);
        }
        if let Some((store, task)) = rig.daemon.task(rig.now) {
            assert_eq!(task, Task::Close);
            assert!(rig.now >= until, "closed while the lease lasted, and not released");
            rig.daemon.ended(rig.now, &store, Outcome::Done);
        }
        rig.now = rig.daemon.wake_at().min(until).max(rig.now.after(ms(1)));
        assert!(rig.now < until.after(ms(1_000)), "{:?}", rig.daemon.status(rig.now));
    }
}
