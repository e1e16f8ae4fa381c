//! Histories of hosts that reserve a disk, over a model of its reservations.
//!
//! Etcd is reduced to what it gives: an epoch, a ledger and a record that change together. The
//! lease is left out: any host may lose its key at any time and not know it. The fence alone has to
//! make sure that no write of an owner lands after a successor has begun to serve.

mod disk;
mod evidence;
mod hosts;

use disk::{Disk, Files};
use hosts::{Hosts, Paths, Step};

use super::{Acquisition, Ended, Found, Neglect, Notes, Order, Reply, Rivals};
use crate::Member;

/// A rule that a history neglects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// One of the state machine's own.
    Own(Neglect),
    /// A host registers when nothing of it is in flight. Neglected: at any time.
    LocalFirst,
    /// The reservation outlives its owner's orderly end. Neglected: it is ended.
    Keep,
    /// Commands in flight of a preempted host are aborted. Neglected: they land.
    Abort,
    /// Each claim has another key. Neglected: each daemon.
    Fresh,
    /// The disk keeps registrations over a loss of power. Neglected: it forgets them.
    Persist,
}

impl Acquisition {
    pub(super) fn keeps(&self, rule: Neglect) -> bool {
        self.neglected != Some(Rule::Own(rule))
    }
}

/// A generator of random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}

const SEEDS: u64 = 3_000;
/// For rules that few histories reach.
const RARE_SEEDS: u64 = 30_000;
const STEPS: usize = 10_000;

/// The reasons for which a history fails.
const LATE: &str = "has begun";
const FENCED: &str = "is fenced and owns";
const UNRESERVED: &str = "without reservation";

/// Runs a history, and returns how often an owner began to serve.
fn history(seed: u64, rule: Option<Rule>, disk: &dyn Fn() -> Disk) -> Result<usize, String> {
    let mut random = Random(seed);
    let paths = Paths::choose(&mut random);
    let mut disks = vec![disk()];
    if !random.once_in(4) {
        let files = Files::clone(&disks[0].files);
        disks.push(Disk { id: "naa.2".to_owned(), files, ..disk() });
    }
    let mut hosts = Hosts::new(rule, disks, paths);
    if random.once_in(4) {
        hosts.serve_unregistered();
    }
    for _ in 0..STEPS {
        let step = Step::ALL[random.below(Step::ALL.len())];
        hosts.step(step, &mut random)?;
    }
    Ok(hosts.served)
}

#[test]
fn no_write_of_a_former_owner_lands_after_its_successor_serves() {
    let mut served = 0;
    for seed in 0..SEEDS {
        // Half of the kernels cannot read a disk's keys.
        let disk = || Disk { can_read: seed % 2 == 0, ..Disk::default() };
        served += history(seed, None, &disk).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    assert!(served as u64 > 5 * SEEDS, "{served} owners in {SEEDS} histories");
}

#[test]
fn a_disk_that_lies_is_found_by_its_own_list() {
    let lies = || Disk { can_read: true, lies: true, ..Disk::default() };
    for seed in 0..SEEDS {
        history(seed, None, &lies).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    fails(Rule::Own(Neglect::Verify), lies, &[LATE]);
}

#[test]
fn each_rule_is_needed() {
    let sound = || Disk { can_read: false, ..Disk::default() };
    fails(Rule::Own(Neglect::Conflict), sound, &[UNRESERVED]);
    for rule in [
        Neglect::Evidence,
        Neglect::Continuity,
        Neglect::Disk,
        Neglect::Boot,
        Neglect::Hold,
        Neglect::Withdraw,
    ] {
        fails(Rule::Own(rule), sound, &[LATE]);
    }
    for rule in [Rule::LocalFirst, Rule::Keep, Rule::Abort] {
        fails(rule, sound, &[LATE]);
    }
    // A note about a former claim would count for a later one, whose write lands, and an order of a
    // former one would end the registration of a later one.
    fails(Rule::Fresh, sound, &[LATE, FENCED, UNRESERVED]);
    fails(Rule::Persist, || Disk { forgets: true, ..sound() }, &[LATE, FENCED, UNRESERVED]);
}

/// Some histories fail if the rule is neglected, for each of these reasons and no other one, and
/// none of them with it.
fn fails(rule: Rule, disk: impl Fn() -> Disk, reasons: &[&str]) {
    let mut failures = vec![0; reasons.len()];
    for seed in 0..RARE_SEEDS {
        if seed >= SEEDS && failures.iter().all(|failures| *failures >= 3) {
            break;
        }
        let Err(why) = history(seed, Some(rule), &disk) else { continue };
        let reason = reasons.iter().position(|reason| why.contains(reason));
        let reason = reason.unwrap_or_else(|| panic!("without {rule:?}, seed {seed}: {why}"));
        failures[reason] += 1;
        let kept = history(seed, None, &|| Disk { lies: false, forgets: false, ..disk() });
        assert!(kept.is_ok(), "seed {seed} fails with {rule:?}: {kept:?}");
    }
    // One alone would be an accident of the seeds.
    let is_missed = failures.iter().any(|failures| *failures < 3);
    assert!(!is_missed, "without {rule:?}, {failures:?} histories fail by {reasons:?}");
}

/// The key of a member.
fn key(incarnation: u64) -> u64 {
    member(incarnation).reservation_key()
}

/// The same; 0 is none.
fn key_of(incarnation: u64) -> u64 {
    if incarnation == 0 { 0 } else { key(incarnation) }
}

fn preemption(victim: u64, mine: u64) -> Order {
    Order::PreemptAndAbort { victim: key(victim), mine: key(mine) }
}

fn member(incarnation: u64) -> Member {
    Member { name: format!("d{incarnation}"), host: "h".to_owned(), incarnation }
}

/// The others, none of which has opened the store.
fn unopened(others: &[Member]) -> Rivals {
    Rivals { all: others.to_vec(), owner: None }
}

/// The others, and the first of them is the last owner.
fn of(others: &[Member]) -> Rivals {
    Rivals { owner: others.first().cloned(), ..unopened(others) }
}

/// Carries an acquisition out by a host of the disk. Returns its orders and its result.
fn acquire(disk: &mut Disk, host: usize, me: u64, others: &[u64]) -> (Vec<Order>, String) {
    let others: Vec<Member> = others.iter().map(|other| member(*other)).collect();
    acquire_as(disk, host, &member(me), &unopened(&others))
}

/// `host` is the identity that the disk sees.
fn acquire_as(disk: &mut Disk, host: usize, me: &Member, rivals: &Rivals) -> (Vec<Order>, String) {
    let id = disk.id.clone();
    let mut acquisition = Acquisition::new(("/dev/disk", &id), me, rivals, disk.notes_of(host));
    let mut orders = Vec::new();
    while let Some(order) = acquisition.order() {
        acquisition.replied(disk.carry_out(host, order.clone()));
        if !matches!(order, Order::Note(_) | Order::Recall) {
            orders.push(order);
        }
    }
    let result = acquisition.result().unwrap().clone();
    (orders, result.err().unwrap_or_default())
}

#[test]
fn a_first_owner_registers_and_reserves() {
    let mut disk = Disk::default();
    let (orders, error) = acquire(&mut disk, 0, 7, &[]);
    assert_eq!(error, "");
    let register = |old, new| Order::Register { old: key_of(old), new: key(new) };
    let reserve = [Order::Reserve { key: key(7) }, Order::Read];
    assert_eq!(orders[..2], [register(7, 7), register(0, 7)]);
    assert_eq!(orders[2..], reserve);
    assert!(disk.lets(0) && !disk.lets(1));
    // Again, as after a lost reply: no order names a key that the host does not have.
    let (orders, error) = acquire(&mut disk, 0, 7, &[5]);
    assert_eq!(error, "");
    assert_eq!(orders[0], register(7, 7));
    let last = [Order::Read, reserve[0].clone(), Order::Read];
    assert_eq!(orders[1..], last, "5 is not registered");
    // Another start on the same host.
    let (orders, error) = acquire(&mut disk, 0, 8, &[7]);
    assert_eq!(error, "");
    assert_eq!(orders[..2], [register(8, 8), register(7, 8)]);
    assert!(disk.lets(0));
}

#[test]
fn a_host_with_another_ones_identity_is_refused() {
    for (can_read, is_named) in [(true, true), (true, false), (false, true), (false, false)] {
        for [first, second] in [["a/1", "b/1"], ["localhost/1/5", "localhost/2/6"]] {
            let mut disk = Disk { can_read, ..Disk::default() };
            let first = Member { host: first.to_owned(), ..member(7) };
            assert_eq!(acquire_as(&mut disk, 0, &first, &of(&[])).1, "");
            let second = Member { host: second.to_owned(), ..member(9) };
            // The other start's notes are on another host.
            disk.files.borrow_mut().clear();
            let others = if is_named { vec![first.clone()] } else { Vec::new() };
            let (_, error) = acquire_as(&mut disk, 0, &second, &of(&others));
            disk.files.borrow_mut().clear();
            assert!(error.contains("the same NVMe host ID or initiator name"), "{error:?}");
            assert_eq!(disk.keys, [(0, key(7))].into());
            // A later start on the same host.
            let later = Member { incarnation: 9, ..first.clone() };
            assert_eq!(acquire_as(&mut disk, 0, &later, &of(&[first])).1, "");
        }
    }
}

#[test]
fn an_owner_of_a_former_boot_is_left_to_other_hosts() {
    for can_read in [true, false] {
        let mut disk = Disk { can_read, ..Disk::default() };
        let [former, booted] = ["a/1", "a/2"].map(str::to_owned);
        let former = Member { host: former, ..member(7) };
        assert_eq!(acquire_as(&mut disk, 0, &former, &of(&[])).1, "");
        let booted = Member { host: booted, ..member(9) };
        let (_, error) = acquire_as(&mut disk, 0, &booted, &of(std::slice::from_ref(&former)));
        assert!(error.contains("a former boot of this host"), "{error:?}");
        assert!(disk.is_reserved_by(0) && disk.keys[&0] == key(7));
        // Another host preempts it, and this one follows.
        let other = Member { host: "b/1".to_owned(), ..member(11) };
        let suspects = [former.clone(), booted.clone()];
        assert_eq!(acquire_as(&mut disk, 1, &other, &of(&suspects)).1, "");
        let booted = Member { incarnation: 13, ..booted };
        assert_eq!(acquire_as(&mut disk, 0, &booted, &of(&[other])).1, "");
        // An owner that has closed the store in order, and one that never opened it, have no
        // commands to wait for.
        let later = Member { host: "a/3".to_owned(), ..member(15) };
        assert_eq!(acquire_as(&mut disk, 0, &later, &unopened(&[booted])).1, "");
    }
}

#[test]
fn a_successor_preempts_suspects_that_are_registered_or_not() {
    let mut disk = Disk { can_read: false, ..Disk::default() };
    acquire(&mut disk, 0, 7, &[]);
    let (orders, error) = acquire(&mut disk, 1, 9, &[7, 5, 7, 9]);
    assert_eq!(error, "");
    let preempted = |order: &Order| match order {
        Order::PreemptAndAbort { victim, mine } if *mine == key(9) => Some(*victim),
        _ => None,
    };
    let preempted: Vec<u64> = orders.iter().filter_map(preempted).collect();
    assert_eq!(preempted, [key(7), key(5)]);
    assert!(disk.lets(1) && !disk.lets(0));
}

#[test]
fn a_holder_that_is_not_known_is_refused_and_left_alone() {
    for can_read in [true, false] {
        let mut disk = Disk { can_read, ..Disk::default() };
        acquire(&mut disk, 0, 7, &[]);
        let (_, error) = acquire(&mut disk, 1, 9, &[5]);
        assert!(error.contains("neither the last owner") && error.contains("clear"), "{error}");
        assert!(disk.is_reserved_by(0));
    }
}

#[test]
fn keys_of_other_programs_are_refused_and_left_alone() {
    let mut disk = Disk::default();
    disk.carry_out(0, Order::Register { old: 0, new: 3 });
    let (_, error) = acquire(&mut disk, 0, 8, &[5]);
    assert!(error.contains("a registration of this host"), "{error}");
    let (_, error) = acquire(&mut disk, 1, 9, &[7]);
    assert!(error.contains("0x0000000000000003") && error.contains("clear"), "{error}");
    assert_eq!(disk.keys[&0], 3);
}

#[test]
fn what_late_attempts_have_left_is_swept() {
    let mut disk = Disk::default();
    for host in [0, 2] {
        disk.carry_out(host, Order::Register { old: 0, new: key(20 + host as u64) });
    }
    assert_eq!(acquire(&mut disk, 0, 7, &[]).1, "", "of this host and of another one");
    assert_eq!(disk.keys, [(0, key(7))].into());
    // A kernel that cannot read finds what this host has noted, and nothing else.
    disk.can_read = false;
    assert_eq!(acquire(&mut disk, 0, 8, &[]).1, "");
    disk.files.borrow_mut().clear();
    let (_, error) = acquire(&mut disk, 0, 9, &[]);
    assert!(error.contains("a registration of this host"), "{error}");
}

#[test]
fn a_failure_ends_an_attempt_with_its_reason() {
    for good in 0..4 {
        let mut disk = Disk::default();
        let mut acquisition = Acquisition::new(DISK, &member(7), &of(&[]), Notes::default());
        for _ in 0..good {
            let reply = disk.carry_out(0, acquisition.order().unwrap());
            acquisition.replied(reply);
        }
        acquisition.replied(Reply::Failed("no path".to_owned()));
        assert_eq!(acquisition.result(), Some(&Err("no path".to_owned())));
        assert_eq!(acquisition.order(), None);
    }
    let mut acquisition = Acquisition::new(DISK, &member(7), &of(&[]), Notes::default());
    acquisition.replied(Reply::Read(Some(Found::default())));
    assert!(acquisition.result().unwrap().is_err());
}

/// A member on a host of its own.
fn far(incarnation: u64) -> Member {
    Member { host: format!("h{incarnation}/1"), ..member(incarnation) }
}

/// The name of a disk, and its identity.
const DISK: (&str, &str) = ("/dev/disk", "naa.1");

/// A second host whose preemption of the first one's key has no reply, or the reply to an order
/// that the driver has sent again. Returns the disk, and the error.
fn interrupted(is_carried_out: bool, reply: &Reply) -> (Disk, String) {
    let mut disk = Disk { can_read: false, ..Disk::default() };
    acquire_as(&mut disk, 0, &far(7), &of(&[]));
    let mut acquisition = Acquisition::new(DISK, &far(9), &of(&[far(7)]), Notes::default());
    while let Some(order) = acquisition.order() {
        let is_interrupted = order == preemption(7, 9);
        if !is_interrupted || is_carried_out {
            let reply = disk.carry_out(1, order);
            if !is_interrupted {
                acquisition.replied(reply);
            }
        }
        if is_interrupted {
            acquisition.replied(reply.clone());
        }
    }
    let error = acquisition.result().unwrap().clone().unwrap_err();
    (disk, error)
}

fn no_reply() -> Reply {
    Reply::Failed("no reply".to_owned())
}

#[test]
fn a_preemption_that_was_lost_is_done_when_it_is_carried_out_with_a_reply() {
    for by in [9, 11] {
        let (mut disk, _) = interrupted(false, &no_reply());
        let host = if by == 9 { 1 } else { 2 };
        let others = of(&[far(7), far(9)]);
        assert_eq!(acquire_as(&mut disk, host, &far(by), &others).1, "", "by {by}");
    }
}

#[test]
fn a_key_that_is_gone_by_a_preemption_without_reply_is_no_fenced_host() {
    let is_refused = |error: &str| {
        assert!(error.contains("switch that host off"), "{error:?}");
        assert!(error.contains("\"d7\" on host h7/1") && error.contains("fenced"), "{error}");
    };
    let refused = |disk: &mut Disk, host, by| {
        is_refused(&acquire_as(disk, host, &far(by), &of(&[far(7), far(9)])).1);
    };
    // No reply; and the driver has sent the order again.
    for reply in [no_reply(), Reply::Conflict] {
        let (mut disk, error) = interrupted(true, &reply);
        if reply == Reply::Conflict {
            is_refused(&error);
        }
        // The same claim again, a later one of that host, and another host.
        for (host, by) in [(1, 9), (1, 10), (2, 11)] {
            refused(&mut disk, host, by);
        }
        // The host in doubt itself has nothing in flight, by its locks.
        let again = Member { incarnation: 12, ..far(7) };
        let others = [7, 9, 10, 11].map(far);
        assert_eq!(acquire_as(&mut disk, 0, &again, &of(&others)).1, "");
        // And an operator can say that the owner has ended.
        let (mut disk, _) = interrupted(true, &reply);
        assert_eq!(acquire_as(&mut disk, 2, &far(11), &unopened(&others)).1, "");
    }
}

#[test]
fn a_key_that_was_listed_and_is_missing_at_its_preemption_was_sent_twice() {
    let mut disk = Disk::default();
    acquire_as(&mut disk, 0, &far(7), &of(&[]));
    let mut acquisition = Acquisition::new(DISK, &far(9), &of(&[far(7)]), Notes::default());
    while let Some(order) = acquisition.order() {
        if order == preemption(7, 9) {
            disk.carry_out(1, order.clone());
        }
        acquisition.replied(disk.carry_out(1, order));
    }
    let error = acquisition.result().unwrap().clone().unwrap_err();
    assert!(error.contains("switch that host off"), "{error}");
    assert_eq!(disk.notes_of(1).ended, []);
}

#[test]
fn an_owner_that_was_never_registered_is_refused() {
    // It had another fence, or its registration was ended by hand.
    for can_read in [true, false] {
        let mut disk = Disk { can_read, ..Disk::default() };
        let (_, error) = acquire_as(&mut disk, 1, &far(9), &of(&[far(7)]));
        assert!(error.contains("no host has noted an answer to its preemption"), "{error:?}");
    }
}

#[test]
fn an_answered_preemption_counts_for_all_hosts_while_the_disk_is_reserved() {
    for can_read in [true, false] {
        let begin = || {
            let mut disk = Disk { can_read, ..Disk::default() };
            acquire_as(&mut disk, 0, &far(7), &of(&[]));
            // This one dies before it has opened the store.
            assert_eq!(acquire_as(&mut disk, 1, &far(9), &of(&[far(7)])).1, "");
            let ended = Ended { disk: "naa.1".to_owned(), key: key(7), by: key(9) };
            assert_eq!(disk.notes_of(1).ended, [ended]);
            disk
        };
        let others = of(&[far(7), far(9)]);
        let mut disk = begin();
        assert_eq!(acquire_as(&mut disk, 2, &far(11), &others).1, "", "another host");
        let others = of(&[far(7), far(9), far(11)]);
        assert_eq!(acquire_as(&mut disk, 3, &far(13), &others).1, "", "and a third one");
        // The same host in a later claim, and after a boot.
        let later = Member { host: "h9/2".to_owned(), ..far(15) };
        for me in [Member { incarnation: 14, ..far(9) }, later] {
            assert_eq!(acquire_as(&mut begin(), 1, &me, &others).1, "");
        }
        // If all reservations were ended meanwhile, a write of the former owner was let in.
        for (host, by) in [(1, 9), (2, 11)] {
            let mut disk = begin();
            disk.clear();
            for _ in 0..2 {
                let (_, error) = acquire_as(&mut disk, host, &far(by), &others);
                assert!(error.contains("switch that host off"), "by {by}: {error:?}");
            }
        }
        // A note is of its disk.
        let mut disk = Disk { id: "naa.2".to_owned(), ..begin() };
        let (_, error) = acquire_as(&mut disk, 2, &far(11), &others);
        assert!(error.contains("switch that host off"), "{error:?}");
    }
}

#[test]
fn an_owner_whose_reservation_was_released_has_no_way_to_write_once_it_is_preempted() {
    for can_read in [true, false] {
        let mut disk = Disk { can_read, ..Disk::default() };
        acquire_as(&mut disk, 0, &far(7), &of(&[]));
        disk.release();
        let mut acquisition = Acquisition::new(DISK, &far(9), &of(&[far(7)]), Notes::default());
        let mut is_preempted = false;
        while let Some(order) = acquisition.order() {
            is_preempted |= order == preemption(7, 9);
            acquisition.replied(disk.carry_out(1, order));
            assert!(!is_preempted || !disk.lets(0), "it writes after its preemption");
        }
        assert_eq!(acquisition.result(), Some(&Ok(())));
        assert!(is_preempted);
    }
}

#[test]
fn candidates_that_never_opened_the_store_need_no_evidence() {
    let mut disk = Disk { can_read: false, ..Disk::default() };
    acquire_as(&mut disk, 0, &far(7), &of(&[]));
    // Keys 5 and 6 were never registered, or are gone.
    let others = of(&[far(7), far(5), far(6)]);
    assert_eq!(acquire_as(&mut disk, 1, &far(9), &others).1, "");
}

#[test]
fn a_kernel_that_shows_keys_shows_them_until_the_end() {
    let mut disk = Disk::default();
    acquire_as(&mut disk, 0, &far(7), &of(&[]));
    let mut acquisition = Acquisition::new(DISK, &far(9), &of(&[far(7)]), Notes::default());
    while let Some(order) = acquisition.order() {
        disk.can_read &= !matches!(order, Order::PreemptAndAbort { .. });
        acquisition.replied(disk.carry_out(1, order));
    }
    let error = acquisition.result().unwrap().clone().unwrap_err();
    assert!(error.contains("showed its keys a moment before"), "{error}");
}

#[test]
fn a_host_notes_its_newest_keys() {
    let mut disk = Disk { can_read: false, ..Disk::default() };
    for claim in 1..40 {
        assert_eq!(acquire(&mut disk, 0, claim, &[]).1, "", "claim {claim}");
    }
    let keys = disk.notes_of(0).keys;
    assert_eq!((keys.len(), keys.last()), (16, Some(&key(39))));
}
