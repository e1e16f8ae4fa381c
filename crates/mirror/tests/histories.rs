//! Legs of several histories: others went on without the mirror, or know more than it, or have
//! numbers that no mirror comes to.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sidecore_block::{Batch, BlockDevice, Geometry, RamStore, Tag};
use sidecore_block_contract::{Harness, pattern};
use sidecore_mirror::{
    Former, LegError, LegState, Mirror, MirrorError, OpenOptions, Sleep, Waits, create,
};
use twox_hash::XxHash3_64;

use common::{
    REGION_BYTES, Yes, breakable_of, creation, mirror, options, poll, ram, send_write, until,
    until_in_sync, with,
};

/// Epochs and generations are smaller.
const MAX_NUMBER: u64 = 1 << 63;

fn blank<const N: usize>() -> [Arc<dyn BlockDevice>; N] {
    std::array::from_fn(|_| ram())
}

fn made<const N: usize>() -> [Arc<dyn BlockDevice>; N] {
    let legs = blank();
    create(&legs, &creation(), &mut Sleep::default()).unwrap();
    legs
}

fn open(legs: &[&Arc<dyn BlockDevice>], options: OpenOptions) -> Result<Mirror, MirrorError> {
    let legs: Vec<_> = legs.iter().map(|leg| Arc::clone(leg)).collect();
    Mirror::open(&legs, options)
}

/// A copy of a store, as one that lost its connection would be left.
fn copy(store: &Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
    let copied = Arc::new(RamStore::new(Geometry::new(4 << 20, 512)).unwrap());
    let copied: Arc<dyn BlockDevice> = copied;
    let (mut from, mut to) = (Harness::new(store, 1), Harness::new(&copied, 1));
    for at in (0..4 << 20).step_by(1 << 20) {
        to.store(at, &from.load(at, 1 << 20));
    }
    copied
}

/// Writes a header with another epoch, of all that the newest one says.
fn forge(store: &Arc<dyn BlockDevice>, epoch: u64) {
    let mut raw = Harness::new(store, 1);
    let slots = [raw.load(0, 4096), raw.load(4096, 4096)];
    let number = |slot: &[u8], at: usize| u64::from_le_bytes(slot[at..at + 8].try_into().unwrap());
    let newest = slots.iter().max_by_key(|slot| number(slot, 32)).unwrap();
    let mut forged = newest.clone();
    forged[64..72].copy_from_slice(&epoch.to_le_bytes());
    let generation = number(newest, 32) + 1;
    forged[32..40].copy_from_slice(&generation.to_le_bytes());
    let sum = XxHash3_64::oneshot(&forged[..4088]);
    forged[4088..].copy_from_slice(&sum.to_le_bytes());
    raw.store(generation % 2 * 4096, &forged);
}

#[test]
fn a_leg_that_is_behind_in_another_history_is_no_vote() {
    let raw = blank::<3>();
    let (other, other_is_broken) = breakable_of(Arc::clone(&raw[1]));
    let (behind, is_broken) = breakable_of(Arc::clone(&raw[2]));
    let first = mirror(&[Arc::clone(&raw[0]), other, Arc::clone(&behind)]);
    let mut guest = Harness::new(&(Arc::clone(&first) as Arc<dyn BlockDevice>), 8);
    guest.store(0, &pattern(1, 128 << 10));
    other_is_broken.store(true, Ordering::SeqCst);
    is_broken.store(true, Ordering::SeqCst);
    send_write(&mut guest);
    let mut completed = Batch::new();
    let mut has_ended = |guest: &mut Harness| poll(guest, &mut completed);
    until(&first, "waiting", |status| {
        assert!(!has_ended(&mut guest), "a write that two legs have missed is answered");
        matches!(status.waits, Some(Waits::Legs { .. }))
    });
    // Another daemon has these two, and one of them is behind after an unclean end.
    let slow = OpenOptions { copy_bytes_per_s: REGION_BYTES / 1000, ..options() };
    let copies = [copy(&raw[1]), copy(&raw[2])];
    let second = Arc::new(Mirror::open(&copies, slow).unwrap());
    Harness::new(&(Arc::clone(&second) as Arc<dyn BlockDevice>), 1).store(0, &pattern(2, 512));
    let status = second.status();
    assert_eq!((status.waits, &status.legs[1]), (None, &LegState::InSync));
    assert_ne!(status.legs[2], LegState::InSync);
    let error = first.attach(copy(&copies[1])).unwrap_err();
    assert!(error.to_string().contains("leg 1 went on without the others"), "{error}");
    assert!(first.status().waits.is_some());
    // As it was when the first daemon lost it, it is a leg.
    is_broken.store(false, Ordering::SeqCst);
    first.attach(behind).unwrap();
    until(&first, "going on", |_| has_ended(&mut guest));
    let mut request = completed.pop().unwrap();
    assert_eq!(request.result, Ok(()));
    request.tag.take().map(Tag::into_bits);
}

#[test]
fn a_store_that_is_refused_leaves_those_that_wait_as_they_are() {
    let [zero, one, two, three] = made();
    let first = open(&[&zero, &one], with(Arc::new(Yes))).unwrap();
    first.remove(2).unwrap();
    drop(first);
    drop(open(&[&two, &three], with(Arc::new(Yes))).unwrap());
    let waiting = open(&[&two, &three], options()).unwrap();
    assert!(matches!(waiting.status().waits, Some(Waits::Permission { .. })));
    // It shows that leg 2 was removed, and that leg 3 went on by itself.
    let error = waiting.attach(Arc::clone(&zero)).unwrap_err();
    assert!(error.to_string().contains("went on by itself"), "{error}");
    assert!(waiting.store(2).is_some() && waiting.store(3).is_some());
    waiting.permit(common::missing(&waiting)).unwrap();
    until_in_sync(&waiting, &[2, 3]);
}

#[test]
fn a_leg_that_was_removed_keeps_older_ones_from_going_on() {
    let [removed, old] = made();
    let new = ram();
    let mirror = open(&[&removed], with(Arc::new(Yes))).unwrap();
    mirror.add((2, 12), Arc::clone(&new)).unwrap();
    until_in_sync(&mirror, &[0, 2]);
    mirror.remove(0).unwrap();
    drop(mirror);
    // Half of the legs that it knows, with a permission: but leg 2 has gone on without it.
    let (removed, is_broken) = breakable_of(removed);
    let former = Former::default();
    let collecting = OpenOptions { former: former.clone(), ..options() };
    let error = open(&[&removed, &old], collecting).err().expect("a refusal");
    let is_removed =
        matches!(error, MirrorError::Leg { store: 0, error: LegError::Removed { leg: 0 } });
    assert!(is_removed, "{error}");
    // It was read, and need not be readable again.
    is_broken.store(true, Ordering::SeqCst);
    let mirror = open(&[&old], OpenOptions { former, ..with(Arc::new(Yes)) }).unwrap();
    let missing = sidecore_mirror::LegSet::of(2);
    assert_eq!(mirror.status().waits, Some(Waits::Bytes { missing }));
    drop(mirror);
    is_broken.store(false, Ordering::SeqCst);
    // It comes while the others wait for a permission.
    let mirror = open(&[&old], options()).unwrap();
    assert!(matches!(mirror.status().waits, Some(Waits::Permission { .. })));
    let error = mirror.attach(Arc::clone(&removed)).unwrap_err();
    assert!(error.to_string().contains("leg 0 was removed"), "{error}");
    assert!(mirror.permit(missing).is_err());
    assert_eq!(mirror.status().waits, Some(Waits::Bytes { missing }));
    mirror.attach(new).unwrap();
    until_in_sync(&mirror, &[1, 2]);
}

#[test]
fn numbers_that_no_mirror_comes_to_are_refused() {
    let [one, two, three] = made();
    forge(&three, MAX_NUMBER - 2);
    let error = open(&[&one, &two, &three], options()).err().expect("a refusal");
    let is_refused =
        matches!(error, MirrorError::Leg { store: 2, error: LegError::Numbers { highest: 1 } });
    assert!(is_refused, "{error}");
    let mirror = open(&[&one, &two], options()).unwrap();
    let error = mirror.attach(Arc::clone(&three)).unwrap_err();
    assert!(error.to_string().contains("far above"), "{error}");
    mirror.remove(2).unwrap();
    let error = mirror.add((3, 12), Arc::clone(&three)).unwrap_err();
    assert!(error.to_string().contains("far above"), "{error}");
    assert!(mirror.status().epoch < 100, "{:?}", mirror.status());
    drop(mirror);
    until_in_sync(&open(&[&one, &two], options()).unwrap(), &[0, 1]);
}

#[test]
fn no_epoch_is_begun_that_headers_cannot_hold() {
    let [leg] = made();
    forge(&leg, MAX_NUMBER - 2);
    drop(open(&[&leg], options()).unwrap());
    for _ in 0..2 {
        let mirror = open(&[&leg], options()).expect("its header can be read");
        assert_eq!(mirror.status().waits, Some(Waits::Numbers));
    }
}
