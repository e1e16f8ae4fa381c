//! The mirror that a power cut leaves.

use std::collections::BTreeMap;
use std::sync::Arc;

use sidecore_block::{Batch, BlockDevice, BlockRequest, Operation, Tag};
use sidecore_memory::{GuestAddress, RegionHint, SharedPages};
use sidecore_mirror::{
    Granted, Keeper, LegSet, LegState, Mirror, MirrorError, OpenOptions, Rule, Status, StoreId,
    Wait, Waits,
};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use super::legs::{LegStore, Order};
use super::model::{Model, stamp_of};
use super::witness::SimWitness;
use crate::Random;
use crate::volumes::disk::{SECTOR_BYTES, SimDisk};

/// Turns of a keeper in which all legs have to be copied to.
const MOST_TURNS: usize = 2_000;

/// Time without guests.
pub(super) struct Quiet(u64);

impl Quiet {
    /// Lets a second pass.
    pub(super) fn pass_second(&mut self) {
        self.0 += 1_000_000_000;
    }
}

impl Wait for Quiet {
    fn now(&mut self) -> Nanos {
        self.0 += 1_000_000;
        Nanos(self.0)
    }

    fn for_leg(&mut self, _channel: &dyn sidecore_block::BlockChannel) {}

    fn for_queues(&mut self) {}
}

/// The stores that numbers of their own were given to. One that was added again has several.
pub(super) type Stores = BTreeMap<StoreId, usize>;

/// Some of the legs, opened after a power cut.
pub(super) struct Opened {
    pub(super) legs: Vec<LegStore>,
    pub(super) mirror: Mirror,
    pub(super) keeper: Keeper,
    pub(super) wait: Quiet,
    witness: SimWitness,
    pub(super) order: Order,
    pub(super) given: Stores,
}

/// The legs and the witness as a power cut has left them.
pub(super) struct Left<'a> {
    /// By store.
    pub(super) images: &'a [Vec<u8>],
    pub(super) granted: Option<Granted>,
    pub(super) is_operator: bool,
    pub(super) neglect: Option<Rule>,
    /// Stores that are no legs, or need not be.
    pub(super) outside: LegSet,
    pub(super) given: &'a Stores,
}

impl Left<'_> {
    /// Opens the mirror with these legs, but for those that are refused and may be.
    pub(super) fn open(&self, legs: &[usize], random: &mut Random) -> Result<Opened, String> {
        let order = Order::default();
        let mut store = |leg: &usize| {
            let disk = SimDisk::new(self.images[*leg].clone());
            LegStore::new(*leg, disk, &order, Random::new(random.below(u64::MAX)))
        };
        let mut legs: Vec<LegStore> = legs.iter().map(&mut store).collect();
        let read = random.below(self.images.len() as u64) as usize;
        loop {
            let witness = SimWitness::new(&order, self.granted, self.is_operator);
            let options = OpenOptions {
                read: Some(read),
                neglect: self.neglect,
                ..OpenOptions::new(Arc::new(witness.clone()))
            };
            let mut wait = Quiet(1);
            match Mirror::without_threads(&devices(&legs), options, &mut wait) {
                Ok((mirror, mut keeper)) => {
                    if let Some(Waits::Permission { missing, .. }) = mirror.status().waits
                        && witness.permits()
                        && keeper.permit(missing, &mut wait).is_ok()
                    {
                        keeper.turn(&mut wait);
                    }
                    let given = self.given.clone();
                    return Ok(Opened { legs, mirror, keeper, wait, witness, order, given });
                }
                Err(MirrorError::Leg { store, .. })
                    if legs.len() > 1 && self.outside.has(legs[store].index) =>
                {
                    legs.remove(store);
                }
                Err(error) => return Err(format!("open: {error}")),
            }
        }
    }
}

impl Opened {
    /// The contents of all sectors.
    pub(super) fn read(&mut self) -> Result<Vec<Option<u64>>, String> {
        let len_bytes = self.mirror.geometry().capacity_bytes;
        let pages = SharedPages::new("reader", len_bytes as usize).map_err(|at| at.to_string())?;
        let channel = self.mirror.open_channel(&CoreContext::default(), 1);
        let mut channel = channel.map_err(|error| error.to_string())?;
        let mut request = BlockRequest::blank(1);
        request.operation = Operation::Read;
        request.len_bytes = len_bytes;
        request.segments.bind(pages.memory());
        let pushed = request.segments.push(GuestAddress(0), len_bytes, &mut RegionHint::default());
        pushed.map_err(|error| error.to_string())?;
        request.tag = Some(Tag::from_bits(0));
        let (mut batch, mut completed) = (vec![request], Batch::new());
        for _ in 0..MOST_TURNS {
            let now = self.wait.now();
            channel.exchange(now, &mut batch, &mut completed);
            if let Some(mut request) = completed.pop() {
                request.tag.take().map(Tag::into_bits);
                request.result.map_err(|error| format!("a read: {error}"))?;
                let mut bytes = vec![0; len_bytes as usize];
                let memory = pages.memory();
                memory
                    .read_slice(GuestAddress(0), &mut bytes, &mut RegionHint::default())
                    .map_err(|error| error.to_string())?;
                return Ok(bytes.chunks_exact(SECTOR_BYTES).map(stamp_of).collect());
            }
        }
        Err(format!("a read does not end: {:?}", self.mirror.status()))
    }

    /// Turns the keeper until all legs are in sync, and compares them.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        for _ in 0..MOST_TURNS {
            let status = self.mirror.status();
            let members = self.members();
            if members.iter().all(|(leg, _)| status.legs[*leg] == LegState::InSync) {
                let stores: Vec<LegStore> = members.into_iter().map(|(_, store)| store).collect();
                return compare(&stores, self.data_bytes());
            }
            self.keeper.turn(&mut self.wait);
            self.wait.pass_second();
        }
        Err(format!("legs are never copied to: {:?}", self.mirror.status()))
    }

    /// The legs that were opened, by number, with their stores.
    fn members(&self) -> Vec<(usize, LegStore)> {
        let members = named(&self.mirror.status(), &self.given).into_iter();
        let store = |index: usize| self.legs.iter().find(|store| store.index == index).cloned();
        members.filter_map(|(leg, index)| Some((leg, store(index)?))).collect()
    }

    /// The stores that are legs.
    pub(super) fn named(&self) -> Vec<usize> {
        named(&self.mirror.status(), &self.given).into_iter().map(|(_, store)| store).collect()
    }

    /// The legs as they are now, and those that are not here as they were.
    pub(super) fn images(&self, before: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut images = before.to_vec();
        for leg in &self.legs {
            images[leg.index] = leg.disk.bytes();
        }
        images
    }

    /// The last claim that the witness has granted.
    pub(super) fn granted(&self) -> Option<Granted> {
        self.witness.granted_at(u64::MAX)
    }

    /// Attaches the other members, which have missed that the mirror went on.
    pub(super) fn attach_others(&mut self, left: &Left<'_>) -> Result<(), String> {
        for index in self.named().into_iter().filter(|index| !left.outside.has(*index)) {
            if self.legs.iter().any(|present| present.index == index) {
                continue;
            }
            let disk = SimDisk::new(left.images[index].clone());
            let store = LegStore::new(index, disk, &self.order, Random::new(1));
            let device: Arc<dyn BlockDevice> = Arc::new(store.clone());
            let attached = self.keeper.attach(&device, &mut self.wait);
            attached.map_err(|error| format!("store {index} comes back: {error}"))?;
            self.legs.push(store);
        }
        Ok(())
    }

    fn data_bytes(&self) -> usize {
        let leg_bytes = self.legs[0].geometry().capacity_bytes;
        (leg_bytes - self.mirror.geometry().capacity_bytes) as usize
    }

    /// Opens and reads a mirror without all of its legs, if it goes on.
    pub(super) fn waits(&self) -> bool {
        self.mirror.status().waits.is_some()
    }
}

/// The legs by number, and the stores that they are.
pub(super) fn named(status: &Status, given: &Stores) -> Vec<(usize, usize)> {
    let store = |leg: usize| Some((leg, *given.get(&status.stores[leg])?));
    status.members.numbers().filter_map(store).collect()
}

/// The legs as devices.
pub(super) fn devices(legs: &[LegStore]) -> Vec<Arc<dyn BlockDevice>> {
    legs.iter().map(|leg| Arc::new(leg.clone()) as _).collect()
}

/// Compares the mirror's bytes on all legs.
pub(super) fn compare(legs: &[LegStore], data_bytes: usize) -> Result<(), String> {
    let first = legs[0].disk.bytes();
    for leg in &legs[1..] {
        let other = leg.disk.bytes();
        let pairs = first[data_bytes..].chunks(SECTOR_BYTES);
        let mut pairs = pairs.zip(other[data_bytes..].chunks(SECTOR_BYTES));
        if let Some(sector) = pairs.position(|(one, other)| one != other) {
            let at = data_bytes + sector * SECTOR_BYTES;
            let stamps = [&first, &other].map(|bytes| stamp_of(&bytes[at..][..SECTOR_BYTES]));
            return Err(format!(
                "sector {sector} of stores {} and {} differs, though they are in sync: {stamps:x?}",
                legs[0].index, leg.index
            ));
        }
    }
    Ok(())
}

/// Checks the contents after a power cut at a time.
pub(super) fn check(model: &Model, found: &[Option<u64>], at: u64) -> Result<(), String> {
    let mut sectors = found.iter().enumerate();
    sectors.try_for_each(|(sector, found)| model.check_cut(sector, *found, at))
}
