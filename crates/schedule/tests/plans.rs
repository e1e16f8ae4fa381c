//! Plans for single moments, and the rules that hold for all of them.

use std::collections::BTreeSet;

use proptest::prelude::*;
use sidecore_schedule::{Keep, Period, Plan, Unchanged, name, plan, time_of};

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

/// 2026-11-26T00:00Z, a Thursday.
const THURSDAY: u64 = 20_783 * DAY;

fn keep(text: &str) -> Keep {
    text.parse().unwrap()
}

/// The snapshots after a plan was carried out.
fn after(now: u64, existing: &[u64], plan: &Plan) -> Vec<u64> {
    let made = plan.create.then_some(now / 60 * 60);
    existing.iter().copied().filter(|at| !plan.delete.contains(at)).chain(made).collect()
}

/// Runs a schedule at each of these times.
fn run(times: impl IntoIterator<Item = u64>, mut existing: Vec<u64>, keep: &Keep) -> Vec<u64> {
    for now in times {
        existing = after(now, &existing, &plan(now, &existing, keep, None));
    }
    existing.sort_unstable();
    existing
}

fn hours(from: u64, count: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |hour| from + hour * HOUR)
}

#[test]
fn one_snapshot_serves_several_rules() {
    let keep = keep("24 hourly, 7 daily");
    let now = THURSDAY + 9 * DAY;
    let there = run(hours(THURSDAY, 9 * 24 + 1), Vec::new(), &keep);
    let daily: Vec<u64> = (3..=9).map(|day| THURSDAY + day * DAY).collect();
    let hourly: Vec<u64> = hours(now - 23 * HOUR, 24).collect();
    let both: BTreeSet<u64> = daily.iter().chain(&hourly).copied().collect();
    assert_eq!(there, Vec::from_iter(both));
    assert_eq!(there.len(), 24 + 6);
}

#[test]
fn a_snapshot_is_due_once_in_each_slot() {
    let keep = keep("3 hourly");
    for (now, existing, create) in [
        (THURSDAY, &[][..], true),
        (THURSDAY + 1800, &[THURSDAY], false),
        (THURSDAY + HOUR - 1, &[THURSDAY + 60], false),
        (THURSDAY + HOUR, &[THURSDAY + 60], true),
        // Missed times are made up once.
        (THURSDAY + 9 * HOUR + 1234, &[THURSDAY], true),
        (THURSDAY + 9 * HOUR + 1300, &[THURSDAY, THURSDAY + 9 * HOUR + 1200], false),
        // The clock was set back by a minute.
        (THURSDAY + HOUR - 30, &[THURSDAY, THURSDAY + HOUR], false),
    ] {
        assert_eq!(plan(now, existing, &keep, None).create, create, "{now} {existing:?}");
    }
}

#[test]
fn an_unchanged_volume_needs_no_other_snapshot_in_this_slot() {
    let (keep, existing) = (keep("3 hourly"), [THURSDAY]);
    let at = THURSDAY + 2 * HOUR;
    let look = |at, since| Some(Unchanged { at, since });
    assert_eq!(plan(at, &existing, &keep, look(at, THURSDAY)), Plan::default());
    assert!(!plan(at + 1800, &existing, &keep, look(at, THURSDAY)).create);
    assert!(plan(at + HOUR, &existing, &keep, look(at, THURSDAY)).create);
    assert!(plan(at - HOUR, &existing, &keep, look(at, THURSDAY)).create, "the clock was set back");
    assert!(plan(at, &existing, &keep, look(at, THURSDAY + 60)).create, "the snapshot is gone");
    // The day's first one is kept when those of its hours have expired.
    let (keep, at) = (self::keep("3 hourly, 7 daily"), THURSDAY + DAY);
    assert!(plan(at, &[at - HOUR], &keep, look(at, at - HOUR)).create);
    assert!(!plan(at + HOUR, &[at], &keep, look(at + HOUR, at)).create);
}

#[test]
fn the_state_of_a_snapshot_that_expires_is_not_kept_by_it() {
    let now = THURSDAY + 20 * HOUR + 600;
    // The second one was made by a rule of minutes.
    let existing = [THURSDAY + 14 * HOUR, THURSDAY + 14 * HOUR + 2700];
    let expected = Plan { create: true, delete: vec![existing[1]], later: 0 };
    let look = |since| Some(Unchanged { at: now, since });
    assert_eq!(plan(now, &existing, &keep("24 hourly"), look(existing[1])), expected);
    assert!(!plan(now, &existing, &keep("24 every 15min"), look(existing[1])).create);
    // The clock was at 1970 when the volume was looked at last.
    let existing = [0, THURSDAY, THURSDAY + HOUR];
    let expected = Plan { create: true, delete: vec![0, THURSDAY], later: 0 };
    assert_eq!(plan(now, &existing, &keep("2 hourly"), look(0)), expected);
    assert!(!plan(now, &existing, &keep("3 hourly"), look(0)).create);
}

#[test]
fn a_clock_that_is_a_year_ahead_expires_one_for_each_rule() {
    let keep = keep("24 hourly, 7 daily, 3 monthly");
    let there = run(hours(THURSDAY, 120 * 24), Vec::new(), &keep);
    let now = THURSDAY + 120 * DAY + 365 * DAY;
    let next = plan(now, &there, &keep, None);
    assert!(next.create);
    assert!(next.delete.len() <= 3, "{next:?}");
    // As long as it stays there, it is the time.
    let there = run(hours(now, 2), there, &keep);
    assert!(there.len() >= 24 + 6, "{}", there.len());
}

#[test]
fn snapshots_from_later_are_left_alone_and_do_not_count() {
    let keep = keep("2 hourly");
    let later = THURSDAY + 365 * DAY;
    let there = run([THURSDAY - HOUR, THURSDAY, later, later + HOUR], Vec::new(), &keep);
    assert_eq!(there, [later, later + HOUR], "a clock that stayed ahead");
    let next = plan(THURSDAY + HOUR, &there, &keep, None);
    assert_eq!(next, Plan { create: true, delete: Vec::new(), later: 2 });
    let there = run(hours(THURSDAY + HOUR, 5), there, &keep);
    let last = THURSDAY + 5 * HOUR;
    assert_eq!(there, [last - HOUR, last, later, later + HOUR], "the present ones rotate");
    // Their time comes.
    let there = run([later, later + HOUR, later + 2 * HOUR], there, &keep);
    assert_eq!(there, [later + HOUR, later + 2 * HOUR]);
}

#[test]
fn a_clock_that_was_behind_leaves_the_newer_ones() {
    let keep = keep("3 hourly");
    let right: Vec<u64> = hours(THURSDAY, 3).collect();
    // A machine without a battery starts in 1970.
    let there = run([0, HOUR, 2 * HOUR, 3 * HOUR], right.clone(), &keep);
    assert_eq!(there, [vec![HOUR, 2 * HOUR, 3 * HOUR], right.clone()].concat());
    let there = run([THURSDAY + 3 * HOUR], there, &keep);
    assert_eq!(there, [&right[1..], &[THURSDAY + 3 * HOUR]].concat());
}

#[test]
fn fewer_are_kept_when_the_rules_say_so() {
    let there: Vec<u64> = hours(THURSDAY, 24).collect();
    let next = plan(THURSDAY + 23 * HOUR + 60, &there, &keep("3 hourly"), None);
    assert_eq!(next, Plan { create: false, delete: there[..21].to_vec(), later: 0 });
}

#[test]
fn the_next_time_is_that_of_the_finest_rule() {
    assert_eq!(keep("7 daily, 24 hourly").next(THURSDAY + 1), THURSDAY + HOUR);
    assert_eq!(keep("4 weekly").next(THURSDAY), THURSDAY + 4 * DAY, "Monday");
}

fn rules() -> impl Strategy<Value = Keep> {
    let period = prop_oneof![
        Just(Period::Minutes(15)),
        Just(Period::Hourly),
        Just(Period::Daily),
        Just(Period::Weekly),
        Just(Period::Monthly),
        Just(Period::Yearly),
    ];
    proptest::collection::btree_map(period, 1_u32..6, 1..5).prop_map(|rules| {
        let rules: Vec<String> =
            rules.iter().map(|(period, count)| format!("{count} {period}")).collect();
        rules.join(", ").parse().unwrap()
    })
}

/// Minutes of about a month, and some far away.
fn time() -> impl Strategy<Value = u64> {
    prop_oneof![
        9 => (0_u64..45_000).prop_map(|minute| THURSDAY + minute * 60),
        1 => (0_u64..100_000_000).prop_map(|minute| minute * 60),
    ]
}

proptest! {
    #[test]
    fn plans_keep_the_rules(
        now in time(), seconds in 0_u64..60, times in proptest::collection::vec(time(), 0..60),
        keep in rules(),
    ) {
        let now = now + seconds;
        let next = plan(now, &times, &keep, None);
        let past = |at: &&u64| **at <= now;
        prop_assert!(next.delete.iter().all(|at| times.contains(at) && *at <= now));
        prop_assert!(next.delete.is_sorted());
        prop_assert_eq!(next.later, times.iter().filter(|at| **at > now).count());
        let there = after(now, &times, &next);
        // The new one stays, and a second look finds nothing to do.
        let nothing = Plan { later: next.later, ..Plan::default() };
        prop_assert_eq!(plan(now, &there, &keep, None), nothing);
        // The order does not matter, and neither do some that are there twice.
        let twice: Vec<u64> = times.iter().rev().chain(&times).copied().collect();
        let same = plan(now, &twice, &keep, None);
        prop_assert_eq!((same.create, &same.delete), (next.create, &next.delete));
        // No more stay than the rules add up to.
        let most: u32 = keep.rules().iter().map(|rule| rule.count).sum();
        let stay: BTreeSet<u64> = there.iter().filter(past).copied().collect();
        prop_assert!(stay.len() <= most as usize, "{} of {most}", stay.len());
        // An unchanged volume needs no other one, unless a coarser rule does.
        let finest = keep.rules()[0];
        let alone: Keep = format!("{} {}", finest.count, finest.period).parse().unwrap();
        let without = plan(now, &times, &alone, None);
        for &since in &times {
            let next = plan(now, &times, &alone, Some(Unchanged { at: now, since }));
            // The snapshot that has the same state stays, or the new one has it.
            prop_assert!(!next.delete.contains(&since) || next == without, "{}", since);
            prop_assert!(!next.create || without.delete.contains(&since), "{}", since);
        }
    }

    #[test]
    fn names_are_all_of_the_memory(now in time(), seconds in 0_u64..60) {
        let snapshot = name("vm1", now + seconds);
        let made = time_of(&snapshot).unwrap();
        for rules in ["1 every 1min", "1 hourly", "1 daily", "1 weekly", "1 monthly", "1 yearly"] {
            let next = plan(now + seconds, &[made], &keep(rules), None);
            prop_assert_eq!(next, Plan::default(), "{}", rules);
        }
    }
}
