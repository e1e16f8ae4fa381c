//! Legs that fail, come back, come and go, and stores that are no legs.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_block::{Batch, BlockDevice, BlockError, Geometry, Operation, RamStore, Tag};
use sidecore_block_contract::{Harness, pattern};
use sidecore_mirror::{
    CreateOptions, LegError, LegSet, LegState, Mirror, MirrorError, OpenOptions, Operator, Sleep,
    Waits, create,
};
use sidecore_stage_fault::{Affected, Fault, FaultPlan, FaultRule, FaultStore, When};
use sidecore_units::Nanos;

use common::{
    SCRATCH, Yes, breakable, creation, mirror, missing, options, poll, ram, send_write, until,
    until_in_sync, with,
};

fn guest(mirror: &Arc<Mirror>) -> Harness {
    Harness::new(&(Arc::clone(mirror) as Arc<dyn BlockDevice>), 8)
}

/// All bytes of a store.
fn bytes(store: &Arc<dyn BlockDevice>) -> Vec<u8> {
    let mut raw = Harness::new(store, 1);
    let half = raw.geometry.capacity_bytes / 4;
    (0..4).flat_map(|part| raw.load(part * half, half as usize)).collect()
}

fn of_leg(mirror: &Mirror, leg: usize, offset_bytes: u64, len_bytes: usize) -> Vec<u8> {
    Harness::new(&mirror.leg(leg).unwrap(), 1).load(offset_bytes, len_bytes)
}

#[test]
fn a_leg_that_failed_comes_back_with_all_that_it_missed() {
    let (second, is_broken) = breakable();
    let legs = [ram(), Arc::clone(&second)];
    create(&legs, &creation(), &mut Sleep::default()).unwrap();
    let mirror = Arc::new(Mirror::open(&legs, with(Arc::new(Yes))).unwrap());
    let mut guest = guest(&mirror);
    let (before, after) = (pattern(1, 200_000 / 512 * 512), pattern(2, 300_000 / 512 * 512));
    guest.store(0, &before);
    is_broken.store(true, Ordering::SeqCst);
    guest.store(70 << 10, &after);
    let status = until(&mirror, "failed", |status| status.legs[1] == LegState::Failed);
    assert_eq!((status.read, status.waits, status.failures), (Some(0), None, 1));
    let reason = status.reasons[1].clone().unwrap();
    assert!(reason.starts_with("a write or flush of a user"), "{reason}");
    assert!(Arc::ptr_eq(&mirror.store(1).unwrap(), &second));
    assert!(guest.load(70 << 10, after.len()) == after);
    let error = mirror.attach(ram()).unwrap_err();
    assert!(matches!(error, MirrorError::Leg { error: LegError::NoHeader, .. }), "{error}");
    is_broken.store(false, Ordering::SeqCst);
    mirror.attach(second).unwrap();
    let status = until_in_sync(&mirror, &[0, 1]);
    assert!(status.copied_regions >= 5, "{status:?}");
    for leg in [0, 1] {
        assert!(of_leg(&mirror, leg, 70 << 10, after.len()) == after, "leg {leg}");
        assert!(of_leg(&mirror, leg, 0, 70 << 10) == before[..70 << 10], "leg {leg}");
    }
    // The mark of a region goes when all legs have its writes.
    until(&mirror, "clean", |status| status.dirty_regions == 0);
}

#[test]
fn requests_wait_until_an_operator_has_permitted_to_go_on_alone() {
    let (second, is_broken) = breakable();
    let legs = [ram(), second];
    create(&legs, &creation(), &mut Sleep::default()).unwrap();
    let mirror = Arc::new(Mirror::open(&legs, with(Arc::new(Operator))).unwrap());
    let mut guest = guest(&mirror);
    guest.store(0, &pattern(1, 512));
    assert!(matches!(mirror.permit(missing(&mirror)), Err(MirrorError::NotWaiting)), "in advance");
    is_broken.store(true, Ordering::SeqCst);
    send_write(&mut guest);
    let mut completed = Batch::new();
    let mut has_ended = |guest: &mut Harness| poll(guest, &mut completed);
    let status = until(&mirror, "waiting", |status| {
        assert!(!has_ended(&mut guest), "a write that one leg has missed is answered");
        status.waits.is_some()
    });
    assert!(matches!(status.waits, Some(Waits::Permission { .. })), "{status:?}");
    assert!(status.waits.unwrap().to_string().starts_with("leg 1 missing"));
    mirror.permit(missing(&mirror)).unwrap();
    assert!(matches!(mirror.permit(missing(&mirror)), Err(MirrorError::NotWaiting)), "twice");
    until(&mirror, "going on", |_| has_ended(&mut guest));
    let mut request = completed.pop().unwrap();
    assert_eq!(request.result, Ok(()));
    request.tag.take().map(Tag::into_bits);
}

#[test]
fn a_permission_is_for_the_legs_that_are_missing_then() {
    let (second, is_broken) = breakable();
    let legs = [ram(), Arc::clone(&second)];
    create(&legs, &creation(), &mut Sleep::default()).unwrap();
    let mirror = Arc::new(Mirror::open(&legs[..1], options()).unwrap());
    assert!(matches!(mirror.status().waits, Some(Waits::Permission { .. })));
    // The leg comes first.
    mirror.attach(Arc::clone(&second)).unwrap();
    assert!(matches!(mirror.permit(missing(&mirror)), Err(MirrorError::NotWaiting)));
    until_in_sync(&mirror, &[0, 1]);
    let mut guest = guest(&mirror);
    let mut completed = Batch::new();
    let mut has_ended = |guest: &mut Harness| {
        let now = guest.now();
        guest.channel.poll(now, &mut completed);
        completed.pop()
    };
    for round in 1..3 {
        is_broken.store(true, Ordering::SeqCst);
        send_write(&mut guest);
        // It is asked again, though the leg that is missing is the one that was before.
        let status = until(&mirror, "waiting", |status| {
            assert!(has_ended(&mut guest).is_none(), "round {round}");
            status.waits.is_some()
        });
        assert!(matches!(status.waits, Some(Waits::Permission { .. })), "{status:?}");
        mirror.permit(missing(&mirror)).unwrap();
        is_broken.store(false, Ordering::SeqCst);
        mirror.attach(Arc::clone(&second)).unwrap();
        let mut ended = None;
        until(&mirror, "answered", |_| {
            ended = ended.take().or_else(|| has_ended(&mut guest));
            ended.is_some()
        });
        let mut request = ended.unwrap();
        assert_eq!(request.result, Ok(()), "round {round}");
        request.tag.take().map(Tag::into_bits);
        until_in_sync(&mirror, &[0, 1]);
    }
    drop((guest, mirror));
    let other = Mirror::open(&legs[..1], with(Arc::new(Yes))).unwrap();
    assert!(matches!(other.permit(missing(&other)), Err(MirrorError::NoOperator)));
}

#[test]
fn a_permission_for_other_legs_than_those_that_are_missing_now_is_refused() {
    let legs = [ram(), ram(), ram(), ram()];
    create(&legs, &creation(), &mut Sleep::default()).unwrap();
    let mirror = Arc::new(Mirror::open(&legs[..2], options()).unwrap());
    let (known, now) = (missing(&mirror), LegSet::of(1).with(LegSet::of(3)));
    drop(mirror);
    // Meanwhile leg 2 has come, and leg 1 is away.
    let mirror =
        Arc::new(Mirror::open(&[Arc::clone(&legs[0]), Arc::clone(&legs[2])], options()).unwrap());
    for named in [known, LegSet::EMPTY, LegSet::of(1), now.with(LegSet::of(2))] {
        let error = mirror.permit(named).unwrap_err();
        assert!(matches!(error, MirrorError::Without { missing, .. } if missing == now), "{error}");
        assert!(missing(&mirror) == now, "it waits as before");
    }
    mirror.permit(now).unwrap();
    assert_eq!(mirror.status().waits, None);
}

#[test]
fn a_dead_leg_of_two_is_replaced_with_one_permission() {
    for adds_first in [false, true] {
        let legs = [ram(), ram()];
        create(&legs, &creation(), &mut Sleep::default()).unwrap();
        let mirror = Arc::new(Mirror::open(&legs[..1], options()).unwrap());
        assert!(matches!(mirror.remove(1), Err(MirrorError::Waits(_))));
        mirror.permit(missing(&mirror)).unwrap();
        let third = ram();
        let add = || mirror.add((2, 12), Arc::clone(&third)).unwrap();
        if adds_first {
            add();
        }
        mirror.remove(1).unwrap();
        if !adds_first {
            add();
        }
        let status = until_in_sync(&mirror, &[0, 2]);
        assert_eq!((status.members.len(), status.waits), (2, None));
        let bytes = pattern(3, 64 << 10);
        guest(&mirror).store(0, &bytes);
        drop(mirror);
        let again = Mirror::open(&[Arc::clone(&legs[0]), third], options()).unwrap();
        assert_eq!(until_in_sync(&again, &[0, 2]).waits, None);
        assert!(of_leg(&again, 2, 0, bytes.len()) == bytes);
        drop(again);
        // The next failure needs another permission.
        let alone = Mirror::open(&legs[..1], options()).unwrap();
        assert!(matches!(alone.status().waits, Some(Waits::Permission { .. })));
    }
}

#[test]
fn writes_that_wait_for_their_marks_say_so() {
    let (only, is_broken) = breakable();
    let mirror = mirror(&[only]);
    let mut guest = guest(&mirror);
    is_broken.store(true, Ordering::SeqCst);
    let write = guest.request(Operation::Write, 0, &[(SCRATCH, 512)]);
    guest.submit(&mut vec![write]);
    let status = until(&mirror, "waiting", |status| status.waits.is_some());
    assert_eq!(status.waits, Some(Waits::Write { leg: 0 }));
    is_broken.store(false, Ordering::SeqCst);
    let mut completed = Batch::new();
    until(&mirror, "answered", |status| {
        let now = guest.now();
        guest.channel.poll(now, &mut completed);
        !completed.is_empty() && status.waits.is_none()
    });
    let mut request = completed.pop().unwrap();
    assert_eq!(request.result, Ok(()));
    request.tag.take().map(Tag::into_bits);
}

#[test]
fn stores_that_are_no_legs_of_the_mirror_are_refused_and_not_changed() {
    let make = |uuid: u8| {
        let legs = [ram(), ram()];
        let options = CreateOptions { uuid: [uuid; 16], ..creation() };
        create(&legs, &options, &mut Sleep::default()).unwrap();
        legs
    };
    let ([one, two], [other, _]) = (make(1), make(2));
    let blank = ram();
    let copy = ram();
    let size = 1 << 20;
    for at in 0..4 {
        let part = Harness::new(&one, 1).load(at * size, size as usize);
        Harness::new(&copy, 1).store(at * size, &part);
    }
    let small: Arc<dyn BlockDevice> = Arc::new(RamStore::new(Geometry::new(1 << 20, 512)).unwrap());
    Harness::new(&small, 1).store(0, &Harness::new(&two, 1).load(0, 1 << 20));
    for (stores, expected) in [
        (vec![&one, &other], LegError::OtherMirror),
        (vec![&one, &blank], LegError::NoHeader),
        (vec![&one, &copy], LegError::Twice { leg: 0 }),
        (vec![&one, &small], LegError::TooSmall { has_bytes: 1 << 20, needs_bytes: 4 << 20 }),
    ] {
        let stores: Vec<_> = stores.into_iter().cloned().collect();
        let before: Vec<_> = stores.iter().map(|store| (store.geometry(), store)).collect();
        let before: Vec<_> = before.into_iter().map(|(_, store)| bytes(store)).collect();
        let error = Mirror::open(&stores, options()).err().expect("a refusal");
        let MirrorError::Leg { store, error } = error else { panic!("{error}") };
        assert_eq!((store, error), (1, expected));
        let after: Vec<_> = stores.iter().map(bytes).collect();
        assert!(before == after, "a store was changed");
    }
    let error = create(&[one, blank], &creation(), &mut Sleep::default()).unwrap_err();
    assert!(matches!(error, MirrorError::Leg { store: 0, error: LegError::HasHeader }), "{error}");
}

#[test]
fn two_halves_that_both_went_on_are_not_put_together() {
    let legs = [ram(), ram()];
    create(&legs, &creation(), &mut Sleep::default()).unwrap();
    for leg in &legs {
        let alone = Mirror::open(std::slice::from_ref(leg), with(Arc::new(Yes))).unwrap();
        assert_eq!(alone.status().waits, None);
    }
    let error = Mirror::open(&legs, options()).err().expect("a refusal");
    assert!(error.to_string().contains("went on by itself"), "{error}");
    // One that was opened and may not go on is part of the mirror as before.
    let legs = [ram(), ram()];
    create(&legs, &creation(), &mut Sleep::default()).unwrap();
    let alone = Mirror::open(&legs[..1], options()).unwrap();
    assert!(matches!(alone.status().waits, Some(Waits::Permission { .. })));
    drop(alone);
    until_in_sync(&Mirror::open(&legs, options()).unwrap(), &[0, 1]);
}

#[test]
fn an_orderly_end_leaves_nothing_to_copy() {
    let legs = [ram(), ram()];
    let first = mirror(&legs);
    let bytes = pattern(3, 256 << 10);
    guest(&first).store(4096, &bytes);
    drop(first);
    let again = Arc::new(Mirror::open(&legs, options()).unwrap());
    let status = until_in_sync(&again, &[0, 1]);
    assert_eq!((status.copied_regions, status.dirty_regions), (0, 0));
    assert!(guest(&again).load(4096, bytes.len()) == bytes);
}

#[test]
fn the_first_store_of_a_new_mirror_is_copied_to_the_others() {
    let legs = [ram(), ram()];
    let options_of_creation = CreateOptions { are_equal: false, ..creation() };
    let layout = create(&legs, &options_of_creation, &mut Sleep::default()).unwrap();
    let bytes = pattern(5, 512 << 10);
    Harness::new(&legs[0], 1).store(layout.data_bytes + (1 << 20), &bytes);
    let mirror = Arc::new(Mirror::open(&legs, options()).unwrap());
    until_in_sync(&mirror, &[0, 1]);
    assert!(of_leg(&mirror, 1, 1 << 20, bytes.len()) == bytes);
}

#[test]
fn legs_are_added_and_removed_while_the_mirror_is_used() {
    let legs = [ram(), ram()];
    let mirror = mirror(&legs);
    let mut guest = guest(&mirror);
    let bytes = pattern(4, 512 << 10);
    guest.store(0, &bytes);
    assert!(matches!(mirror.add((1, 11), ram()), Err(MirrorError::State { leg: 1, .. })));
    let third = ram();
    assert!(matches!(mirror.add((2, 0), ram()), Err(MirrorError::State { leg: 2, .. })));
    mirror.add((2, 12), Arc::clone(&third)).unwrap();
    until_in_sync(&mirror, &[0, 1, 2]);
    assert!(of_leg(&mirror, 2, 0, bytes.len()) == bytes);
    mirror.remove(0).unwrap();
    let status = until(&mirror, "removed", |status| status.members.len() == 2);
    assert_eq!((status.legs[0].clone(), status.read), (LegState::None, Some(1)));
    let later = pattern(6, 64 << 10);
    guest.store(0, &later);
    assert!(of_leg(&mirror, 2, 0, later.len()) == later);
    assert!(matches!(mirror.leg(0), Err(MirrorError::State { leg: 0, .. })));
    drop((guest, mirror));
    let error = Mirror::open(&[Arc::clone(&legs[0]), third], options()).err().expect("a refusal");
    assert!(error.to_string().contains("leg 0 was removed"), "{error}");
}

/// Opens the mirror of these stores without those that are refused. Returns the refusals, too.
fn open_without_refused(stores: &[&Arc<dyn BlockDevice>]) -> (Mirror, Vec<LegError>) {
    let mut stores: Vec<_> = stores.iter().map(|store| Arc::clone(store)).collect();
    let mut refused = Vec::new();
    loop {
        match Mirror::open(&stores, with(Arc::new(Yes))) {
            Ok(mirror) => return (mirror, refused),
            Err(MirrorError::Leg { store, error }) => {
                stores.remove(store);
                refused.push(error);
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_store_that_was_removed_is_not_taken_for_the_leg_that_has_its_number_now() {
    let legs = [ram(), ram()];
    create(&legs, &creation(), &mut Sleep::default()).unwrap();
    let slow = OpenOptions { copy_bytes_per_s: common::REGION_BYTES / 1000, ..options() };
    let mirror = Arc::new(Mirror::open(&legs, slow).unwrap());
    guest(&mirror).store(0, &pattern(1, 128 << 10));
    let (removed, now) = (ram(), ram());
    mirror.add((2, 12), Arc::clone(&removed)).unwrap();
    until(&mirror, "copying", |status| status.legs[2] == LegState::Copying);
    mirror.remove(2).unwrap();
    mirror.add((2, 13), Arc::clone(&now)).unwrap();
    drop(mirror);
    let stores = [&legs[0], &legs[1], &now];
    let (mirror, refused) = open_without_refused(&stores);
    assert_eq!(refused, []);
    let mirror = Arc::new(mirror);
    until_in_sync(&mirror, &[0, 1, 2]);
    let error = mirror.attach(Arc::clone(&removed)).unwrap_err();
    assert!(error.to_string().contains("leg 2 was removed"), "{error}");
    until(&mirror, "clean", |status| status.dirty_regions == 0);
    drop(mirror);
    // Beside it, and in its place.
    let (mirror, refused) = open_without_refused(&[&legs[0], &legs[1], &removed, &now]);
    assert_eq!(refused, [LegError::Removed { leg: 2 }]);
    assert_eq!(until_in_sync(&mirror, &[0, 1, 2]).copied_regions, 0);
    drop(mirror);
    let (mirror, refused) = open_without_refused(&[&legs[0], &legs[1], &removed]);
    assert_eq!(refused, [LegError::Removed { leg: 2 }]);
    assert_eq!(until_in_sync(&mirror, &[0, 1]).legs[2], LegState::Missing);
}

#[test]
fn a_leg_that_comes_shows_that_the_only_store_was_removed() {
    let legs = [ram(), ram(), ram()];
    drop(mirror(&legs));
    let without = Mirror::open(&legs[..2], options()).unwrap();
    without.remove(2).unwrap();
    drop(without);
    let mirror = Mirror::open(&legs[2..], options()).unwrap();
    assert!(matches!(mirror.status().waits, Some(Waits::Legs { .. })), "{:?}", mirror.status());
    mirror.attach(Arc::clone(&legs[0])).unwrap();
    mirror.attach(Arc::clone(&legs[1])).unwrap();
    until_in_sync(&mirror, &[0, 1]);
    assert!(mirror.store(2).is_none());
}

#[test]
fn whether_zeros_can_be_written_is_decided_when_the_mirror_is_made() {
    let plain = || {
        let geometry = Geometry { write_zeroes: false, ..Geometry::new(4 << 20, 512) };
        Arc::new(RamStore::new(geometry).unwrap()) as Arc<dyn BlockDevice>
    };
    let legs = [ram(), plain()];
    let mirror = mirror(&legs);
    assert!(!mirror.geometry().write_zeroes);
    drop(mirror);
    // Also without the one that cannot, so that it can come back.
    let mirror = Mirror::open(&legs[..1], with(Arc::new(Yes))).unwrap();
    assert!(!mirror.geometry().write_zeroes && !mirror.geometry().discard);
    mirror.attach(Arc::clone(&legs[1])).unwrap();
    until_in_sync(&mirror, &[0, 1]);
    drop(mirror);
    let mirror = common::mirror(&[ram(), ram()]);
    assert!(mirror.geometry().write_zeroes);
    let error = mirror.add((2, 12), plain()).unwrap_err();
    assert!(error.to_string().contains("made of stores that can"), "{error}");
}

#[test]
fn a_leg_is_repaired_from_another_one() {
    let legs = [ram(), ram()];
    let mirror = mirror(&legs);
    let bytes = pattern(7, 128 << 10);
    guest(&mirror).store(0, &bytes);
    let data_bytes = legs[1].geometry().capacity_bytes - mirror.geometry().capacity_bytes;
    Harness::new(&legs[1], 1).store(data_bytes + 8192, &pattern(8, 4096));
    assert!(of_leg(&mirror, 1, 8192, 4096) == pattern(8, 4096));
    mirror.repair((0, 1), (8192, 4096)).unwrap();
    assert!(of_leg(&mirror, 1, 0, bytes.len()) == bytes);
    for (legs, range) in [((0, 1), (1 << 40, 512)), ((0, 1), (0, 100)), ((0, 5), (0, 512))] {
        assert!(matches!(mirror.repair(legs, range), Err(MirrorError::State { .. })));
    }
    let mut view = Harness::new(&mirror.leg(0).unwrap(), 1);
    let write = view.request(Operation::Write, 0, &[(SCRATCH, 512)]);
    assert_eq!(view.run_one(write), Err(BlockError::ReadOnly));
}

#[test]
fn a_read_that_one_leg_fails_is_answered_by_another() {
    let below = ram();
    let legs = [Arc::clone(&below), ram()];
    let layout = create(&legs, &creation(), &mut Sleep::default()).unwrap();
    let rule = FaultRule {
        affected: Affected::Reads,
        when: When::Touching(layout.data_bytes..layout.data_bytes + 512),
        fault: Fault::Eio,
    };
    let bad = Arc::new(FaultStore::new(below, FaultPlan { seed: 0, rules: vec![rule] }));
    let mirror = Arc::new(Mirror::open(&[bad, Arc::clone(&legs[1])], options()).unwrap());
    let mut guest = guest(&mirror);
    let bytes = pattern(9, 4096);
    guest.store(0, &bytes);
    assert!(guest.load(0, bytes.len()) == bytes);
    let status = until(&mirror, "counted", |status| status.read_errors == 1);
    assert_eq!(status.legs[0], LegState::InSync, "a bad spot is no reason to lose the leg");
}

#[test]
fn a_copy_keeps_its_rate_and_writes_go_on_meanwhile() {
    let legs = [ram(), ram()];
    let unequal = CreateOptions { are_equal: false, ..creation() };
    create(&legs, &unequal, &mut Sleep::default()).unwrap();
    // A region in a quarter of an hour.
    let slow = sidecore_mirror::OpenOptions {
        copy_bytes_per_s: common::REGION_BYTES / 1000,
        clear_after: Nanos::from_millis(1),
        ..options()
    };
    let mirror = Arc::new(Mirror::open(&legs, slow).unwrap());
    let mut guest = guest(&mirror);
    let bytes = pattern(2, 4 << 10);
    for region in 0..40 {
        guest.store(region * common::REGION_BYTES, &bytes);
    }
    let status = mirror.status();
    assert!(status.regions_to_copy > 10, "{status:?}");
    assert_eq!(status.legs[1], LegState::Copying);
}

#[test]
fn reads_go_to_the_leg_that_is_preferred() {
    let mirror = mirror(&[ram(), ram()]);
    assert_eq!(mirror.status().read, Some(0));
    mirror.prefer(1).unwrap();
    until(&mirror, "read from leg 1", |status| status.read == Some(1));
}

/// Legs, and for each of them whether it is broken.
type Breakable = (Vec<Arc<dyn BlockDevice>>, Vec<Arc<AtomicBool>>);

/// A mirror of four legs that goes on without legs 2 and 3, as an operator has permitted.
fn half_of_four() -> (Arc<Mirror>, Breakable) {
    let (legs, broken): Breakable = (0..4).map(|_| breakable()).unzip();
    let mirror = mirror(&legs);
    broken[2..].iter().for_each(|is_broken| is_broken.store(true, Ordering::SeqCst));
    let mut guest = guest(&mirror);
    send_write(&mut guest);
    until(&mirror, "waiting", |status| status.waits.is_some());
    assert_eq!(missing(&mirror), LegSet::of(2).with(LegSet::of(3)));
    mirror.permit(missing(&mirror)).unwrap();
    let mut completed = Batch::new();
    until(&mirror, "going on", |_| poll(&mut guest, &mut completed));
    let mut request = completed.pop().unwrap();
    assert_eq!(request.result, Ok(()));
    request.tag.take().map(Tag::into_bits);
    (mirror, (legs, broken))
}

#[test]
fn a_permission_ends_with_a_change_that_makes_the_mirror_wait() {
    let (mirror, (legs, broken)) = half_of_four();
    // The header that a removal needs cannot be written.
    broken[1].store(true, Ordering::SeqCst);
    let error = mirror.remove(2).unwrap_err();
    assert!(matches!(error, MirrorError::Waits(Waits::Legs { .. })), "{error}");
    broken[1].store(false, Ordering::SeqCst);
    mirror.attach(Arc::clone(&legs[1])).unwrap();
    assert_eq!(missing(&mirror), LegSet::of(2).with(LegSet::of(3)), "{:?}", mirror.status());
    mirror.permit(missing(&mirror)).unwrap();
    until_in_sync(&mirror, &[0, 1]);
}

#[test]
fn a_change_that_is_refused_leaves_a_permission_in_force() {
    let (mirror, _) = half_of_four();
    let error = mirror.remove(0).unwrap_err();
    assert!(matches!(error, MirrorError::Waits(Waits::Legs { .. })), "{error}");
    assert_eq!(mirror.status().waits, None, "it goes on at once");
    until_in_sync(&mirror, &[0, 1]);
}

#[test]
fn a_store_whose_addition_is_refused_is_left_out() {
    let (leg, is_broken) = breakable();
    let (legs, store) = ([ram(), leg], ram());
    let mirror = mirror(&legs);
    is_broken.store(true, Ordering::SeqCst);
    let error = mirror.add((2, 12), Arc::clone(&store)).unwrap_err();
    assert!(matches!(error, MirrorError::Waits(Waits::Permission { .. })), "{error}");
    assert!(mirror.store(2).is_none());
    is_broken.store(false, Ordering::SeqCst);
    mirror.attach(Arc::clone(&legs[1])).unwrap();
    until_in_sync(&mirror, &[0, 1]);
    mirror.add((2, 13), store).unwrap();
    until_in_sync(&mirror, &[0, 1, 2]);
}
