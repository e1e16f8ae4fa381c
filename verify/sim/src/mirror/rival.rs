//! Two daemons that have the same legs in turn: the first one loses some and waits, the second one
//! goes on with these and dies, and then they come back to the first one.
//!
//! An operator permits the second daemon to go on, and never the first one after that.

use std::sync::Arc;

use sidecore_block::{Batch, BlockChannel, BlockDevice, BlockRequest, Operation};
use sidecore_memory::{GuestAddress, RegionHint, SharedPages};
use sidecore_mirror::{LegState, MirrorError, Wait as _};
use sidecore_reactor::CoreContext;

use super::check::{Left, Opened, named};
use super::legs::LegStore;
use super::model::fill;
use crate::Random;
use crate::volumes::disk::{SECTOR_BYTES, SimDisk};

/// Polls within which what has begun at a leg has ended.
const POLLS: usize = 64;
/// Turns in which a keeper has decided.
const TURNS: usize = 12;
/// The sector that the first daemon writes, and that of the second one.
const SECTORS: [usize; 2] = [0, 9];

/// A queue with one write of a sector.
struct Writer {
    channel: Box<dyn BlockChannel>,
    batch: Batch,
    /// Keeps the memory of the write.
    _pages: SharedPages,
}

impl Writer {
    fn begin(device: &dyn BlockDevice, sector: usize, stamp: u64) -> Result<Self, String> {
        let text = |error: std::io::Error| error.to_string();
        let channel = device.open_channel(&CoreContext::default(), 1).map_err(text)?;
        let pages = SharedPages::new("writer", SECTOR_BYTES).map_err(text)?;
        let (start, mut hint) = (GuestAddress(0), RegionHint::default());
        pages.memory().write_slice(start, &fill(stamp), &mut hint).expect("a sector");
        let mut request = BlockRequest::blank(1);
        request.operation = Operation::Write;
        request.offset_bytes = (sector * SECTOR_BYTES) as u64;
        request.len_bytes = SECTOR_BYTES as u64;
        request.segments.bind(pages.memory());
        request.segments.push(start, SECTOR_BYTES as u64, &mut hint).expect("a sector");
        // It has no tag: a write that a mirror holds when its daemon dies is dropped.
        Ok(Self { channel, batch: vec![request], _pages: pages })
    }
}

impl Opened {
    /// Turns the keeper until the write has ended, or the mirror waits. True if it was answered.
    fn write(&mut self, writer: &mut Writer) -> bool {
        for _ in 0..TURNS {
            // The keeper waits until nothing is at a leg, and the queue does not move meanwhile.
            for _ in 0..POLLS {
                let mut completed = Batch::new();
                let now = self.wait.now();
                writer.channel.exchange(now, &mut writer.batch, &mut completed);
                if let Some(request) = completed.pop() {
                    return request.result.is_ok();
                }
            }
            self.keeper.turn(&mut self.wait);
            self.wait.pass_second();
        }
        false
    }

    /// Whether the first daemon has lost all of these stores.
    fn has_lost(&self, lost: &[usize]) -> bool {
        let status = self.mirror.status();
        let is_lost = |(leg, store): &(usize, usize)| {
            !lost.contains(store)
                || matches!(status.legs[*leg], LegState::Missing | LegState::Failed)
        };
        named(&status, &self.given).iter().all(is_lost)
    }
}

/// The same with an operator as the witness.
fn asked<'a>(left: &Left<'a>) -> Left<'a> {
    let Left { images, granted, neglect, outside, given, .. } = *left;
    Left { images, granted, is_operator: true, neglect, outside, given }
}

/// Has two daemons use the legs in turn. Returns whether the second one went on.
pub(super) fn check(left: &Left<'_>, random: &mut Random) -> Result<bool, String> {
    let all: Vec<usize> = (0..left.images.len()).filter(|it| !left.outside.has(*it)).collect();
    let lost: Vec<usize> = all.iter().copied().filter(|_| random.once_in(2)).collect();
    let kept: Vec<usize> = all.iter().copied().filter(|it| !lost.contains(it)).collect();
    if lost.is_empty() || kept.is_empty() {
        return Ok(false);
    }
    // Legs are lost before the first daemon begins an epoch, or in one.
    let has_run = random.once_in(2);
    let mut first = asked(left).open(if has_run { &all } else { &kept }, random)?;
    let mut writer = Writer::begin(&first.mirror, SECTORS[0], u64::MAX - 1)?;
    first.check_with(&mut writer, left, &lost, random)
}

impl Opened {
    fn check_with(
        &mut self,
        writer: &mut Writer,
        left: &Left<'_>,
        lost: &[usize],
        random: &mut Random,
    ) -> Result<bool, String> {
        for _ in 0..random.below(4) {
            self.keeper.turn(&mut self.wait);
        }
        let lose = |store: &&LegStore| lost.contains(&store.index);
        self.legs.iter().filter(lose).for_each(|store| store.set_broken(true));
        if self.write(writer) || !self.waits() || !self.has_lost(lost) {
            return Ok(false);
        }
        let mut images = self.images(left.images);
        let by_then = Left { images: &images, granted: None, ..asked(left) };
        let mut second = by_then.open(lost, random)?;
        if second.waits() {
            return Ok(false);
        }
        for _ in 0..random.below(3) {
            second.keeper.turn(&mut second.wait);
        }
        let mut written = Writer::begin(&second.mirror, SECTORS[1], u64::MAX - 2)?;
        if !second.write(&mut written) {
            return Ok(false);
        }
        let mut expected = second.read()?;
        images = second.images(&images);
        // It dies here.
        drop((written, second));
        let mut order = lost.to_vec();
        while !order.is_empty() {
            let index = order.swap_remove(random.below(order.len() as u64) as usize);
            if let Some(old) = self.legs.iter().find(|store| store.index == index) {
                let written = old.disk.write_sectors(0, &images[index]);
                written.map_err(|error| error.to_string())?;
                old.set_broken(false);
            } else {
                let disk = SimDisk::new(images[index].clone());
                self.legs.push(LegStore::new(index, disk, &self.order, Random::new(1)));
            }
            let store = self.legs.iter().find(|store| store.index == index).cloned();
            let device: Arc<dyn BlockDevice> = Arc::new(store.expect("a store"));
            let _: Result<(), MirrorError> = self.keeper.attach(&device, &mut self.wait);
            self.write(writer);
            if self.waits() {
                continue;
            }
            let mut found = self.read()?;
            // The first daemon's own write may have been made meanwhile.
            (found[SECTORS[0]], expected[SECTORS[0]]) = (None, None);
            if found != expected {
                return Err(format!("the legs {lost:?} went on, and the others forget that"));
            }
        }
        Ok(true)
    }
}
