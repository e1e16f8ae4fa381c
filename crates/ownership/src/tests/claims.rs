//! Claims whose fence fails.

use super::*;

fn fail_fences(rig: &mut Rig) -> usize {
    fail_fences_by(rig, &Outcome::Failed("no path".into()))
}

/// Runs the daemon with a fence that fails, until etcd has no owner. Returns the attempts.
fn fail_fences_by(rig: &mut Rig, failure: &Outcome) -> usize {
    let mut attempts = 0;
    for _ in 0..500 {
        if let Some(numbered) = rig.daemon.call(rig.now) {
            let answer = rig.answer(&numbered.call);
            rig.daemon.answered(rig.now, numbered.number, answer);
            if matches!(numbered.call, Call::Release { .. }) {
                return attempts;
            }
        }
        match rig.daemon.task(rig.now) {
            Some((store, Task::Fence { .. })) => {
                attempts += 1;
                rig.daemon.ended(rig.now, &store, failure.clone());
            }
            Some((store, task)) => {
                let outcome = rig.outcome(&task);
                rig.daemon.ended(rig.now, &store, outcome);
            }
            None => rig.now = rig.now.after(ms(10)),
        }
    }
    panic!("the key is kept after {attempts} attempts");
}

fn unfenced(hangs: bool, admits: bool) -> Outcome {
    Outcome::Unfenced { why: "no answer".into(), hangs, admits }
}

#[test]
fn a_candidate_whose_fence_fails_leaves_the_key_to_others_and_stays_a_suspect() {
    let mut rig = Rig::new();
    let ledger =
        Ledger { store: 9, is_recorded: false, suspects: vec![member("b")], settled: None };
    rig.ledger = Some((4, ledger));
    let mut pause = ms(0);
    for claim in 1..4 {
        let me = rig.daemon.claimant("disk").clone();
        assert_eq!(me.incarnation, claim, "orders of a former claim may still come");
        assert_eq!(fail_fences(&mut rig), 5);
        assert_eq!(rig.owner, None);
        assert!(rig.ledger.as_ref().unwrap().1.suspects.contains(&me));
        let released_at = rig.now;
        rig.run_to(State::Fencing);
        let waited = Nanos(rig.now.since(released_at).0);
        assert!(waited >= ms(1_500) && waited > pause, "{waited:?} after {pause:?}");
        pause = waited;
    }
    rig.run_to(State::Serving);
    let me = rig.daemon.claimant("disk").clone();
    assert_eq!(rig.ledger.unwrap().1.suspects, [me]);
}

#[test]
fn a_candidate_whose_fence_hangs_leaves_the_key_to_others_at_once() {
    let mut rig = Rig::new();
    assert_eq!(fail_fences_by(&mut rig, &unfenced(true, true)), 1);
    assert_eq!(rig.owner, None);
    assert!(rig.detail().contains("no answer"), "{}", rig.detail());
}

#[test]
fn claims_whose_fences_fail_fill_no_ledger() {
    for is_recorded in [false, true] {
        let mut rig = Rig::new();
        // A former start of this daemon has opened the store, and is a suspect.
        let former = Member { incarnation: 1_000, ..member("a") };
        let by = if is_recorded { former.clone() } else { member("c") };
        let settled = is_recorded.then_some(Settled { by, epoch: 6 });
        let suspects = vec![former.clone(), member("b")];
        rig.ledger = Some((4, Ledger { store: 9, is_recorded, suspects, settled }));
        if is_recorded {
            let owner = former.clone();
            let record = Record { cluster: CLUSTER, store: 9, epoch: 6, owner, is_closed: false };
            rig.record = Some(record);
        }
        for _ in 0..40 {
            rig.run_to(State::Fencing);
            fail_fences(&mut rig);
        }
        let suspects = rig.ledger.as_ref().unwrap().1.suspects.clone();
        assert!(suspects.contains(&member("b")), "{suspects:?}");
        assert_eq!(suspects.contains(&former), is_recorded, "{suspects:?}");
        let mine = suspects.iter().filter(|suspect| suspect.name == "a" && **suspect != former);
        let mine: Vec<u64> = mine.map(|suspect| suspect.incarnation).collect();
        assert_eq!(mine, (25..=40).collect::<Vec<u64>>());
    }
}

#[test]
fn claims_that_have_sent_no_order_drop_no_key_that_a_disk_may_have() {
    for hangs in [false, true] {
        let mut rig = Rig::new();
        let suspects = vec![member("b")];
        rig.ledger = Some((4, Ledger { store: 9, suspects, ..Ledger::default() }));
        rig.run_to(State::Fencing);
        let holder = rig.daemon.claimant("disk").clone();
        // One attempt of the claim has sent orders, and those after it have not.
        for outcome in [Outcome::Recorded(None), unfenced(false, true)] {
            let (store, _) = rig.daemon.task(rig.now).unwrap();
            rig.daemon.ended(rig.now, &store, outcome);
        }
        fail_fences_by(&mut rig, &unfenced(hangs, false));
        for _ in 0..40 {
            rig.run_to(State::Fencing);
            fail_fences_by(&mut rig, &unfenced(hangs, false));
        }
        assert_eq!(rig.ledger.unwrap().1.suspects, [member("b"), holder], "hangs: {hangs}");
    }
}

#[test]
fn a_ledger_of_an_older_version_keeps_all_suspects() {
    let mut rig = Rig::new();
    let suspects = vec![member("b")];
    rig.ledger = Some((4, Ledger { store: 9, is_recorded: true, suspects, settled: None }));
    let owner = member("b");
    let record = Record { cluster: CLUSTER, store: 9, epoch: 3, owner, is_closed: false };
    rig.record = Some(record);
    for _ in 0..20 {
        rig.run_to(State::Fencing);
        fail_fences(&mut rig);
    }
    assert_eq!(rig.ledger.unwrap().1.suspects.len(), 21);
}

#[test]
fn a_fence_that_lets_no_host_in_leaves_no_suspect_when_it_fails() {
    let mut rig = Rig::new();
    let options = Options { fence_admits: false, ..Options::of_lease(3) };
    rig.daemon = Daemon::new(member("a"), options, 5);
    rig.daemon.add("disk");
    let ledger =
        Ledger { store: 9, is_recorded: false, suspects: vec![member("b")], settled: None };
    rig.ledger = Some((4, ledger));
    fail_fences(&mut rig);
    assert_eq!(rig.ledger.unwrap().1.suspects, [member("b")]);
}

#[test]
fn a_sole_candidate_finds_a_fence_that_works_again_within_a_lease() {
    // A fence that lets no host in, and one that has sent no order.
    for fence_admits in [false, true] {
        let mut rig = Rig::new();
        let options = Options { fence_admits, ..Options::of_lease(3) };
        rig.daemon = Daemon::new(member("a"), options, 5);
        rig.daemon.add("disk");
        let suspects = vec![member("b")];
        rig.ledger = Some((4, Ledger { store: 9, suspects, ..Ledger::default() }));
        for claim in 0..10 {
            fail_fences_by(&mut rig, &unfenced(false, !fence_admits));
            let released_at = rig.now;
            rig.run_to(State::Fencing);
            let waited = Nanos(rig.now.since(released_at).0);
            assert!(waited < ms(3_000), "{waited:?} after claim {claim}: {fence_admits}");
        }
    }
}

#[test]
fn an_owner_that_has_settled_ends_the_pauses_of_claims_in_vain() {
    let mut rig = Rig::new();
    let pause = |rig: &mut Rig| {
        rig.run_to(State::Fencing);
        fail_fences(rig);
        let released_at = rig.now;
        rig.run_to(State::Fencing);
        let waited = Nanos(rig.now.since(released_at).0);
        fail_fences(rig);
        waited
    };
    let first = pause(&mut rig);
    assert!(pause(&mut rig) > first);
    let other = |epoch| Held { by: member("b"), epoch, is_leaving: false };
    let hold = |rig: &mut Rig, has_settled: bool| {
        rig.revision += 1;
        let epoch = rig.revision;
        let (by, ledger) = (other(epoch).by, &mut rig.ledger.as_mut().unwrap().1);
        if has_settled {
            ledger.settled = Some(Settled { by, epoch });
        }
        rig.owner = Some(other(epoch));
        rig.run_to(State::WaitingForKey);
        rig.owner = None;
        let since = rig.now;
        rig.run_to(State::Fencing);
        Nanos(rig.now.since(since).0)
    };
    // One that has the key, and has fenced none yet, ends no pause.
    assert!(hold(&mut rig, false) > first);
    fail_fences(&mut rig);
    assert!(hold(&mut rig, true) < ms(1_000), "the key is claimed at the next look");
    fail_fences(&mut rig);
    let released_at = rig.now;
    rig.run_to(State::Fencing);
    assert_eq!(Nanos(rig.now.since(released_at).0), first, "as after a first claim");
}
