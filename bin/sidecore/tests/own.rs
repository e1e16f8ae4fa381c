//! `sidecore own` with a real etcd of three members, in a network namespace.
//!
//! The command of the owner is this test binary, as [`writer`]. It counts in the store, and notes
//! each number in a history, which stands for an answer. The history shows whether two wrote at
//! once, or a number was lost.

mod owning;

use std::sync::Arc;
use std::time::Duration;

use owning::skewed::{Answers, Skewed};
use owning::{Candidate, Cluster, Fence, LEASE, Site};
use rustix::process::Signal;
use sidecore_cluster::boot_time;
use sidecore_kit::wait;
use sidecore_units::Nanos;

/// Candidates of the long test.
const NAMES: [&str; 3] = ["a", "b", "c"];
/// Takeovers of the long test, unless `SIDECORE_TAKEOVERS` has another number.
const TAKEOVERS: u64 = 20;
/// Stores of the long test, whose owners change at the same time.
const STORES: u64 = 4;

#[test]
#[ignore = "the command of the owners in the tests below"]
fn writer() {
    owning::write_until_sigterm();
}

#[test]
fn the_lease_of_a_killed_owner_ends_and_another_continues() {
    let Some(site) = Site::start() else { return };
    let cluster = Cluster::new(1);
    let first = cluster.candidate(&site, "a", Fence::Lock);
    let epoch = cluster.progress_after(0);
    let _second = cluster.candidate(&site, "b", Fence::Lock);
    first.kill();
    let next = cluster.progress_after(epoch);
    assert_eq!(cluster.owner(), "b");
    cluster.check();
    println!("a kill: pause {:?}", cluster.pause_before(next));
}

#[test]
fn a_hand_over_needs_no_end_of_a_lease() {
    let Some(site) = Site::start() else { return };
    let cluster = Cluster::new(1);
    let mut first = cluster.candidate(&site, "a", Fence::Lock);
    let mut epoch = cluster.progress_after(0);
    let mut second = cluster.candidate(&site, "b", Fence::Lock);
    second.until_it_says("waiting for key");
    let mut pauses = Vec::new();
    for _ in 0..3 {
        first.signal(Signal::USR1);
        epoch = cluster.progress_after(epoch);
        pauses.push(cluster.pause_before(epoch));
        // The former owner lives on, and so does its lease: a key that it kept would stay its own.
        std::mem::swap(&mut first, &mut second);
        second.until_it_says("waiting for key");
    }
    cluster.check();
    println!("hand-overs: pauses {pauses:?}");
}

#[test]
fn a_stopped_owner_is_fenced_by_the_command_and_writes_nothing_when_it_continues() {
    let Some(site) = Site::start() else { return };
    let cluster = Cluster::new(1);
    let first = cluster.candidate(&site, "a", Fence::Command);
    let epoch = cluster.progress_after(0);
    let _second = cluster.candidate(&site, "b", Fence::Command);
    first.signal_with_its_command(Signal::STOP);
    cluster.progress_after(epoch);
    first.signal_with_its_command(Signal::CONT);
    let fenced = cluster.fenced();
    assert!(!fenced.is_empty() && fenced.iter().all(|name| name == "a"), "{fenced:?}");
    assert_eq!(cluster.owner(), "b");
    cluster.progress();
    cluster.check();
}

#[test]
fn a_stopped_owner_keeps_its_locks_and_is_not_replaced_before_it_has_ended() {
    let Some(site) = Site::start() else { return };
    let cluster = Cluster::new(1);
    let first = cluster.candidate(&site, "a", Fence::Lock);
    let epoch = cluster.progress_after(0);
    let mut second = cluster.candidate(&site, "b", Fence::Lock);
    first.signal_with_its_command(Signal::STOP);
    second.until_it_says("a live process");
    assert_eq!(cluster.epoch(), epoch, "the stopped owner was replaced");
    first.signal_with_its_command(Signal::CONT);
    cluster.progress_after(epoch);
    cluster.check();
}

#[test]
fn an_owner_that_loses_etcd_ends_its_command_before_its_lease_ends() {
    let Some(site) = Site::start() else { return };
    let cluster = Cluster::new(1);
    let mut first = cluster.candidate(&site, "a", Fence::Lock);
    let epoch = cluster.progress_after(0);
    site.etcd().signal(Signal::STOP);
    first.until_it_says("the lease has ended: the command was killed");
    assert!(!first.has_a_command(), "a command after the end of the lease");
    site.etcd().signal(Signal::CONT);
    cluster.progress_after(epoch);
    cluster.check();
}

#[test]
fn an_owner_whose_files_hang_ends_its_command_before_its_lease_ends() {
    let Some(site) = Site::start() else { return };
    let cluster = Cluster::new(1);
    let first = cluster.candidate(&site, "a", Fence::Lock);
    let epoch = cluster.progress_after(0);
    first.hang_metrics();
    site.etcd().signal(Signal::STOP);
    wait::until("the command's end", owning::PATIENCE, || !first.has_a_command());
    site.etcd().signal(Signal::CONT);
    // It is a candidate again.
    cluster.progress_after(epoch);
    cluster.check();
}

#[test]
fn an_etcd_of_another_cluster_is_refused_with_the_remedy() {
    let Some(mut site) = Site::start() else { return };
    let cluster = Cluster::new(1);
    let first = cluster.candidate(&site, "a", Fence::Lock);
    cluster.progress_after(0);
    drop(first);
    site.replace_etcd();
    let mut second = cluster.candidate(&site, "b", Fence::Lock);
    // The detail follows the state, which may be the first that is printed.
    second.until_it_says("disk: refused");
    second.until_it_says("delete its record");
    cluster.check();
}

/// An end of an owner, or what it takes for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Kill,
    KillOfTheCommand,
    HandOver,
    /// For longer than a lease, with the command.
    Pause,
    /// The same without the command, which serves on.
    PauseAlone,
    /// From etcd, for longer than a lease.
    Cut,
    KillAndNewLeader,
    /// The owner with its command, and etcd, which continues first.
    PauseWithEtcd,
}

/// Kinds after which leases are as long as before.
const QUIET: [Kind; 6] =
    [Kind::Kill, Kind::KillOfTheCommand, Kind::HandOver, Kind::Pause, Kind::PauseAlone, Kind::Cut];
/// Kinds after which etcd may have a new leader, which gives all leases their full time again.
const RESTLESS: [Kind; 3] = [Kind::KillAndNewLeader, Kind::PauseWithEtcd, Kind::Cut];

impl Kind {
    /// The most that the median pause may be, if there is a bound: a lease, the fence, which takes
    /// no time here, and a second.
    fn bound(self) -> Option<Duration> {
        let second = Duration::from_secs(1);
        match self {
            Self::Kill => Some(LEASE + second),
            // The supervisor lives on, and ends its lease.
            Self::KillOfTheCommand => Some(second),
            Self::HandOver => Some(Duration::from_millis(200)),
            // A new leader gives leases their full time again.
            Self::KillAndNewLeader => Some(LEASE * 2 + second),
            // These pauses are as long as the test lets the owner or its network stop.
            Self::Pause | Self::PauseAlone | Self::Cut | Self::PauseWithEtcd => None,
        }
    }
}

/// Lets the owner of the newest epoch end in some way.
fn end_owner(site: &Site, cluster: &Cluster, candidates: &[Candidate], kind: Kind) {
    let owner = cluster.owner();
    let index = NAMES.iter().position(|name| *name == owner).unwrap();
    let candidate = &candidates[index];
    match kind {
        Kind::Kill => candidate.kill(),
        Kind::KillOfTheCommand => candidate.kill_command(),
        Kind::HandOver => candidate.signal(Signal::USR1),
        Kind::Pause | Kind::PauseAlone | Kind::PauseWithEtcd => {
            let epoch = cluster.epoch();
            let mut marks: Vec<_> = candidates.iter().map(Candidate::mark).collect();
            let signal = |signal| match kind {
                Kind::PauseAlone => candidate.signal(signal),
                _ => candidate.signal_with_its_command(signal),
            };
            signal(Signal::STOP);
            if kind == Kind::PauseWithEtcd {
                site.etcd().signal(Signal::STOP);
                let says = |mark: &_| Candidate::says(mark, "no answer within");
                wait::until("no etcd", owning::PATIENCE, || marks.iter().any(says));
                marks = candidates.iter().map(Candidate::mark).collect();
                site.etcd().signal(Signal::CONT);
            }
            // A busy machine may have ended its lease before.
            wait::until("the fence fails, or another writes", owning::PATIENCE, || {
                let fails = |mark: &_| Candidate::says(mark, "a live process");
                marks.iter().any(fails) || cluster.epoch() > epoch
            });
            signal(Signal::CONT);
        }
        Kind::Cut => {
            let epoch = cluster.epoch();
            cluster.cut(site, &owner);
            cluster.progress_after(epoch);
            cluster.heal(site, &owner);
        }
        Kind::KillAndNewLeader => {
            candidate.kill();
            site.depose_leader();
        }
    }
}

/// Runs takeovers of these kinds, of a store of its own. Returns the pauses.
fn take_over(site: &Site, kinds: &[Kind], (takeovers, seed): (u64, u64)) -> Vec<(Kind, Duration)> {
    let cluster = Cluster::new(seed);
    let mut candidates: Vec<Candidate> =
        NAMES.iter().map(|name| cluster.candidate(site, name, Fence::Lock)).collect();
    let mut epoch = cluster.progress_after(0);
    let (mut pauses, mut random) = (Vec::new(), seed);
    for _ in 0..takeovers {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let kind = kinds[(random >> 33) as usize % kinds.len()];
        end_owner(site, &cluster, &candidates, kind);
        epoch = cluster.progress_after(epoch);
        pauses.push((kind, cluster.pause_before(epoch)));
        for (candidate, name) in candidates.iter_mut().zip(NAMES) {
            if candidate.has_ended() {
                *candidate = cluster.candidate(site, name, Fence::Lock);
            }
        }
    }
    cluster.check();
    pauses
}

#[test]
fn an_owner_that_is_cut_off_ends_before_its_lease_does_and_comes_back_as_a_candidate() {
    let Some(site) = Site::start() else { return };
    let cluster = Cluster::new(1);
    let mut first = cluster.candidate(&site, "a", Fence::Lock);
    let epoch = cluster.progress_after(0);
    let mut second = cluster.candidate(&site, "b", Fence::Lock);
    second.until_it_says("waiting for key");
    let mark = second.mark();
    cluster.cut(&site, "a");
    first.until_it_says("the lease has ended: the command was killed");
    let next = cluster.progress_after(epoch);
    assert!(!Candidate::says(&mark, "the fence failed"), "the command outlived the lease");
    cluster.heal(&site, "a");
    first.until_it_says("waiting for key");
    cluster.check();
    println!("a cut: pause {:?}", cluster.pause_before(next));
}

#[test]
fn the_list_shows_owners_candidates_and_faults_of_the_fence() {
    let Some(site) = Site::start() else { return };
    let cluster = Cluster::new(1);
    let first = cluster.candidate(&site, "a", Fence::Command);
    let epoch = cluster.progress_after(0);
    first.until_list_says(&format!("candidate a: serving in epoch {epoch}"));
    first.until_list_says("s left");
    let json: serde_json::Value = serde_json::from_str(&first.list(&["--json"])).unwrap();
    assert_eq!(json["own"]["name"], "a");
    assert!(!json["own"]["events"].as_array().unwrap().is_empty());
    let second = cluster.candidate(&site, "b", Fence::Command);
    second.until_list_says("candidate b: waiting for key, the owner is \"a\" on host");
    let namesake = cluster.candidate(&site, "a", Fence::Command);
    namesake.until_list_says("which needs a name of its own");
    drop(namesake);

    cluster.set_fence("exit 3");
    first.signal_with_its_command(Signal::STOP);
    second.until_list_says("exit status: 3");
    let fencing = "sidecore_own_state{store=\"disk\",candidate=\"b\",state=\"fencing\"}";
    wait::until("metrics", owning::PATIENCE, || second.metric(fencing) == Some(1.0));
    cluster.set_fence("sleep 1000");
    second.until_list_says("did not end within 1 s and was killed");
    // It succeeds, and ends nothing.
    cluster.set_fence("exit 0");
    second.until_list_says("a live process of an owner has");
    assert_eq!(cluster.epoch(), epoch, "two owners");
    first.until_list_says("was stopped or killed");
    assert!(!first.list(&[]).contains("s left"));
    first.signal_with_its_command(Signal::CONT);
    let next = cluster.progress_after(epoch);
    let (name, owner) = if cluster.owner() == "a" { ("a", &first) } else { ("b", &second) };
    owner.until_list_says(&format!("candidate {name}: serving in epoch {next}"));
    let sample = format!("sidecore_own_epoch{{store=\"disk\",candidate=\"{name}\"}}");
    wait::until("metrics", owning::PATIENCE, || owner.metric(&sample) == Some(next as f64));
    cluster.check();
}

#[test]
fn the_list_shows_faults_of_etcd_and_of_the_store() {
    let Some(mut site) = Site::start() else { return };
    let (cluster, unshared) = (Cluster::new(1), Cluster::new(1));
    let first = cluster.candidate(&site, "a", Fence::Command);
    cluster.progress_after(0);
    let second = unshared.candidate(&site, "b", Fence::Command);
    second.until_list_says("candidate b: waiting for key");
    site.etcd().signal(Signal::STOP);
    for candidate in [&first, &second] {
        let listed = candidate.until_list_says("etcd does not answer since");
        assert!(listed.contains("no answer within"), "{listed}");
    }
    site.etcd().signal(Signal::CONT);
    first.until_list_says("serving");
    first.signal(Signal::TERM);
    let listed = second.until_list_says("candidate b: refused");
    assert!(listed.contains("has no record") && listed.contains("share one store"), "{listed}");

    let first = cluster.candidate(&site, "a", Fence::Command);
    first.until_list_says("serving");
    site.replace_etcd();
    second.until_list_says("this daemon's lease is with");
    first.until_list_says("was served under etcd cluster");
    cluster.check();
}

fn slow() -> Nanos {
    Nanos(boot_time().0 / 10 * 9)
}

fn fast() -> Nanos {
    Nanos(boot_time().0 / 10 * 11)
}

#[test]
fn owners_with_clocks_that_differ_by_a_tenth_stop_before_their_leases_end() {
    let Some(site) = Site::start() else { return };
    let answers = Arc::new(Answers::default());
    let address = |name: &str| if name == "a" { "127.9.1.1" } else { "127.9.2.1" };
    let owner_other_than = |name: &str| {
        wait::succeed(owning::PATIENCE, || {
            let (_, owner) = answers.newest().ok_or("no answers")?;
            if owner == name { Err("no other owner") } else { Ok(owner) }
        })
    };
    let a = Skewed::start(&site, ("a", address("a")), slow, &answers);
    let mut owner = owner_other_than("");
    let b = Skewed::start(&site, ("b", address("b")), fast, &answers);
    let mut names = Vec::new();
    for _ in 0..4 {
        site.cut(address(&owner));
        let next = owner_other_than(&owner);
        site.heal(address(&owner));
        names.push(std::mem::replace(&mut owner, next));
    }
    drop((a, b));
    assert!(["a", "b"].iter().all(|name| names.iter().any(|of| of == name)), "{names:?}");
    assert!(answers.epochs().is_sorted(), "two owners answered at once");
}

#[test]
fn random_takeovers_lose_nothing_and_never_do_two_write() {
    let (Some(site), Some(restless)) = (Site::start(), Site::start()) else { return };
    let asked = std::env::var("SIDECORE_TAKEOVERS").ok().map(|number| number.parse().unwrap());
    let takeovers = asked.unwrap_or(TAKEOVERS);
    let mut pauses: Vec<(Kind, Duration)> = std::thread::scope(|scope| {
        let run = |seed| {
            let (site, kinds) =
                if seed == STORES { (&restless, &RESTLESS[..]) } else { (&site, &QUIET[..]) };
            scope.spawn(move || take_over(site, kinds, (takeovers / STORES, seed)))
        };
        let runs: Vec<_> = (1..=STORES).map(run).collect();
        runs.into_iter().flat_map(|run| run.join().unwrap()).collect()
    });
    pauses.sort_by_key(|(_, pause)| *pause);
    let kinds = QUIET.iter().chain(&RESTLESS[..2]);
    for kind in kinds {
        let pauses: Vec<Duration> =
            pauses.iter().filter(|(of, _)| of == kind).map(|(_, pause)| *pause).collect();
        if let (Some(median), Some(longest)) = (pauses.get(pauses.len() / 2), pauses.last()) {
            println!(
                "{kind:?}: {} takeovers, median {median:?}, {longest:?} at most",
                pauses.len()
            );
            // A few beside other tests say nothing about time.
            let is_kept = kind.bound().is_none_or(|bound| *median < bound);
            assert!(asked.is_none() || is_kept, "{kind:?}: not within {:?}", kind.bound());
        }
    }
}
