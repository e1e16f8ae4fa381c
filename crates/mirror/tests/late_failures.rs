//! Failures that queues have told and the keeper has not read, at the worst moments. Time is the
//! test's, and the keeper takes its turns when the test says so.

mod common;

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, FilterChannel, Geometry, Operation, Tag,
};
use sidecore_block_contract::{Harness, pattern};
use sidecore_mirror::{
    Claim, Keeper, LegState, Mirror, OpenOptions, Sleep, Status, Wait, Witness, create,
};
use sidecore_reactor::CoreContext;
use sidecore_stage_delay::DelayStore;
use sidecore_units::Nanos;

use common::{REGION_BYTES, SCRATCH, creation, ram, with};

/// The map of dirty regions on a leg.
const MAP: Range<u64> = 8192..12_288;
/// A leg's delay: a request is in flight until the clock has gone on.
const DELAY: Nanos = Nanos(10_000_000);
/// More turns than anything takes here.
const TURNS: usize = 1000;

/// Writes in these ranges of a leg fail, and are not done.
#[derive(Clone, Default)]
struct Flaws(Arc<Mutex<Vec<Range<u64>>>>);

impl Flaws {
    fn set(&self, ranges: &[Range<u64>]) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = ranges.to_vec();
    }

    fn touches(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        let ranges = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let end = offset_bytes + len_bytes;
        ranges.iter().any(|range| range.start < end && offset_bytes < range.end)
    }
}

struct Flawed {
    below: Arc<dyn BlockDevice>,
    flaws: Flaws,
}

impl BlockDevice for Flawed {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let flaws = self.flaws.clone();
        let below = self.below.open_channel(core, depth)?;
        Ok(Box::new(FilterChannel::new(below, depth, move |request| {
            let is_write = request.operation == Operation::Write;
            match is_write && flaws.touches(request.offset_bytes, request.len_bytes) {
                true => Err(BlockError::EIO),
                false => Ok(()),
            }
        })))
    }
}

/// A leg of the test.
struct Leg {
    raw: Arc<dyn BlockDevice>,
    device: Arc<dyn BlockDevice>,
    flaws: Flaws,
}

fn leg() -> Leg {
    let (raw, flaws) = (ram(), Flaws::default());
    let flawed = Arc::new(Flawed { below: Arc::clone(&raw), flaws: flaws.clone() });
    Leg { raw, device: Arc::new(DelayStore::new(flawed, DELAY)), flaws }
}

/// A witness that grants everything.
struct Yes;

impl Witness for Yes {
    fn may_go_on_alone(&self, _: &Claim) -> Result<(), String> {
        Ok(())
    }
}

/// The test's clock, and the guest that is polled when the keeper waits for queues.
struct Clock {
    now: Nanos,
    guest: Option<Harness>,
    /// Results of requests that have ended, by their order of submission.
    ended: Vec<(u64, Result<(), BlockError>)>,
}

impl Clock {
    fn pass(&mut self) {
        self.now = self.now.after(DELAY);
    }

    /// Polls the guest's queue until all of it that can has moved.
    fn poll(&mut self) {
        for _ in 0..4 {
            self.pass();
            let Some(guest) = &mut self.guest else { return };
            let mut completed = Batch::new();
            guest.channel.poll(self.now, &mut completed);
            for mut request in completed {
                let bits = request.tag.take().map(Tag::into_bits).unwrap();
                self.ended.push((bits, request.result));
            }
        }
    }

    /// Submits a write of a block, and returns its name.
    fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> u64 {
        let guest = self.guest.as_mut().unwrap();
        // Requests in flight are copied when they start.
        guest.poke(SCRATCH, bytes);
        let mut request =
            guest.request(Operation::Write, offset_bytes, &[(SCRATCH, bytes.len() as u64)]);
        request.taken_at = self.now;
        let bits = request.tag.take().map(Tag::into_bits).unwrap();
        request.tag = Some(Tag::from_bits(bits));
        guest.channel.submit(self.now, &mut vec![request]);
        bits
    }

    fn result(&self, write: u64) -> Option<Result<(), BlockError>> {
        self.ended.iter().find(|(of, _)| *of == write).map(|(_, result)| *result)
    }
}

impl Wait for Clock {
    fn now(&mut self) -> Nanos {
        self.now
    }

    fn for_leg(&mut self, _: &dyn BlockChannel) {
        self.pass();
    }

    fn for_queues(&mut self) {
        self.poll();
    }
}

struct World {
    mirror: Arc<Mirror>,
    keeper: Keeper,
    clock: Clock,
    data_bytes: u64,
}

impl World {
    fn open(legs: &[&Leg]) -> Self {
        let mut clock = Clock { now: Nanos(1), guest: None, ended: Vec::new() };
        let devices: Vec<_> = legs.iter().map(|leg| Arc::clone(&leg.device)).collect();
        // Marks stay until the test ends.
        let options = OpenOptions { read: Some(0), clear_after: Nanos::MAX, ..with(Arc::new(Yes)) };
        let (mirror, keeper) = Mirror::without_threads(&devices, options, &mut clock).unwrap();
        let mirror = Arc::new(mirror);
        let device = Arc::clone(&mirror) as Arc<dyn BlockDevice>;
        clock.guest = Some(Harness::new(&device, 8));
        let data_bytes = legs[0].raw.geometry().capacity_bytes - mirror.geometry().capacity_bytes;
        Self { mirror, keeper, clock, data_bytes }
    }

    fn turn(&mut self) {
        self.keeper.turn(&mut self.clock);
    }

    /// Turns the keeper and polls the guest until it is so.
    fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        for _ in 0..TURNS {
            if is_so(self) {
                return;
            }
            self.turn();
            self.clock.poll();
        }
        panic!("never {what}: {:?}", self.mirror.status());
    }

    fn status(&self) -> Status {
        self.mirror.status()
    }

    /// Writes a region for the first time.
    fn write(&mut self, region: u64, bytes: &[u8]) {
        let write = self.clock.write(region * REGION_BYTES, bytes);
        self.until("written", |world| world.clock.result(write).is_some());
        assert_eq!(self.clock.result(write), Some(Ok(())));
    }

    /// The start of a region's bytes on a leg.
    fn place(&self, region: u64) -> Range<u64> {
        let start = self.data_bytes + region * REGION_BYTES;
        start..start + REGION_BYTES
    }

    fn bytes(&self, leg: &Leg, region: u64) -> Vec<u8> {
        Harness::new(&leg.raw, 1).load(self.place(region).start, 4096)
    }
}

fn legs<const N: usize>() -> [Leg; N] {
    let legs = std::array::from_fn(|_| leg());
    let raw: Vec<_> = legs.iter().map(|leg: &Leg| Arc::clone(&leg.raw)).collect();
    create(&raw, &creation(), &mut Sleep::default()).unwrap();
    legs
}

#[test]
fn no_region_is_copied_from_a_leg_that_has_missed_a_write_to_it() {
    let [first, second, third] = legs();
    let mut world = World::open(&[&first, &second]);
    world.write(0, &pattern(1, 4096));
    world.keeper.attach(&third.device, &mut world.clock).unwrap();
    world.turn();
    assert_eq!(world.status().legs[2], LegState::Copying);
    // In flight when the region is closed for its copy: the leg that is read fails it.
    first.flaws.set(&[world.place(0)]);
    let newer = pattern(2, 4096);
    let write = world.clock.write(0, &newer);
    world.until("copied", |world| world.status().legs[2] == LegState::InSync);
    assert_eq!(world.clock.result(write), Some(Ok(())));
    assert_eq!(world.status().legs[0], LegState::Failed);
    for leg in [&second, &third] {
        assert!(world.bytes(leg, 0) == newer);
    }
}

#[test]
fn no_leg_is_repaired_from_one_that_has_missed_a_write() {
    let [first, second] = legs();
    let mut world = World::open(&[&first, &second]);
    world.write(0, &pattern(1, 4096));
    first.flaws.set(&[world.place(0)]);
    let newer = pattern(2, 4096);
    let write = world.clock.write(0, &newer);
    let refused = world.keeper.repair((0, 1), (0, 4096), &mut world.clock).unwrap_err();
    assert!(refused.to_string().contains("leg 0: it is not in sync"), "{refused}");
    world.until("answered", |world| world.clock.result(write).is_some());
    assert_eq!(world.clock.result(write), Some(Ok(())));
    assert!(world.bytes(&second, 0) == newer);
}

#[test]
fn a_leg_that_is_attached_does_not_hide_the_failure_of_another_one() {
    let [first, second, third] = legs();
    let mut world = World::open(&[&first, &second, &third]);
    world.write(0, &pattern(1, 4096));
    drop(world);
    // One leg is in sync after an unclean end. Regions that were clean are equal on the next one.
    let mut world = World::open(&[&first, &third]);
    world.turn();
    assert_eq!(world.status().legs[2], LegState::Copying);
    third.flaws.set(&[world.place(5)]);
    let newer = pattern(2, 4096);
    let write = world.clock.write(5 * REGION_BYTES, &newer);
    world.turn();
    for _ in 0..4 {
        world.clock.poll();
    }
    assert_eq!(world.clock.result(write), Some(Ok(())), "the leg in sync has it");
    world.keeper.attach(&second.device, &mut world.clock).unwrap();
    world.until("copied", |world| {
        let legs = &world.status().legs;
        legs[1] == LegState::InSync && legs[2] != LegState::Copying
    });
    assert!(world.bytes(&second, 5) == newer);
    assert_eq!(world.status().legs[2], LegState::Failed);
}

#[test]
fn a_mark_that_a_leg_may_lack_is_written_again() {
    let [first, second] = legs();
    let mut world = World::open(&[&first, &second]);
    world.write(1, &pattern(1, 4096));
    // The other leg fails a write in flight, and so this one is kept though it failed a mark.
    second.flaws.set(&[world.place(1)]);
    let in_flight = world.clock.write(REGION_BYTES, &pattern(2, 4096));
    first.flaws.set(&[MAP]);
    let write = world.clock.write(0, &pattern(3, 4096));
    world.turn();
    world.clock.poll();
    first.flaws.set(&[]);
    world.until("answered", |world| world.clock.result(write).is_some());
    assert_eq!([in_flight, write].map(|of| world.clock.result(of)), [Some(Ok(())); 2]);
    assert_eq!(world.status().legs[1], LegState::Failed);
    let marks = Harness::new(&first.raw, 1).load(MAP.start, 512);
    assert_eq!(marks[0] & 0b11, 0b11, "a region is written, and has no mark");
}

#[test]
fn a_leg_is_not_removed_while_the_one_that_stays_has_missed_a_write() {
    let [first, second] = legs();
    let mut world = World::open(&[&first, &second]);
    world.write(0, &pattern(1, 4096));
    first.flaws.set(&[world.place(0)]);
    let newer = pattern(2, 4096);
    let write = world.clock.write(0, &newer);
    let refused = world.keeper.remove(1, &mut world.clock).unwrap_err();
    assert!(refused.to_string().contains("leg 1: it is the only one in sync"), "{refused}");
    world.until("answered", |world| world.clock.result(write).is_some());
    assert_eq!(world.clock.result(write), Some(Ok(())));
    assert!(world.bytes(&second, 0) == newer);
}

#[test]
fn a_store_is_not_added_while_a_leg_counts_that_has_missed_a_write() {
    let [first, second] = legs();
    let mut world = World::open(&[&first, &second]);
    world.write(0, &pattern(1, 4096));
    first.flaws.set(&[world.place(0)]);
    let newer = pattern(2, 4096);
    let write = world.clock.write(0, &newer);
    let third = leg();
    world.keeper.add((2, 77), Arc::clone(&third.device), &mut world.clock).unwrap();
    // The members that its headers know: it left before there were more of them.
    for slot in [0, 4096] {
        assert_ne!(Harness::new(&first.raw, 1).load(slot, 512)[81], 0b111, "it has a vote");
    }
    world.turn();
    assert_eq!(world.status().legs[0], LegState::Failed);
    world.until("copied", |world| world.status().legs[2] == LegState::InSync);
    assert_eq!(world.clock.result(write), Some(Ok(())));
    for leg in [&second, &third] {
        assert!(world.bytes(leg, 0) == newer);
    }
}
