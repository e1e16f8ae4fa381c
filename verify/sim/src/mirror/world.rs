//! A history: runs of a mirror, and a power cut after every event of each.

use std::sync::Arc;

use sidecore_block::BlockDevice;
use sidecore_mirror::{
    CreateOptions, Granted, Keeper, LegSet, LegState, Mirror, MirrorError, OpenOptions, Rule,
    Status, Waits, create,
};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use super::check::{Left, Stores, check, compare, devices, named};
use super::guest::{DEPTH, Guest, Inner};
use super::legs::{LegStore, Manner, Order, QUICK};
use super::model::fill;
use super::rival;
use super::witness::SimWitness;
use super::{Options, Outcome};
use crate::Random;
use crate::volumes::cut::Cutter;
use crate::volumes::disk::{Recording, SECTOR_BYTES, SimDisk};

/// The size of a leg: metadata of three blocks, and 17 regions.
const LEG_BYTES: usize = 80 << 10;
const REGION_BYTES: u64 = 4096;
/// One in so many power cuts is followed by two daemons that have the legs in turn.
const CUTS_PER_RIVAL: u64 = 4;
/// Turns in which everything ends after a run.
const MOST_TURNS: usize = 20_000;

/// Choices for a whole history.
#[derive(Clone, Copy, Debug)]
struct Habits {
    legs: usize,
    manner: Manner,
    hot_sectors: u64,
    /// One in so many steps is a turn of the keeper.
    steps_per_turn: u64,
    /// One in so many steps breaks a leg.
    steps_per_break: u64,
    /// One in so many steps adds, removes or repairs a leg.
    steps_per_change: u64,
    copy_bytes_per_s: u64,
    clear_after: Nanos,
    /// The witness is an operator.
    is_operator: bool,
}

impl Habits {
    fn draw(random: &mut Random) -> Self {
        let mut pick = |choices: &[u64]| choices[random.below(choices.len() as u64) as usize];
        Self {
            legs: pick(&[2, 2, 2, 3, 4]) as usize,
            manner: Manner {
                delay: pick(&[1, 2, 6]),
                requests_per_fault: pick(&[300, u64::MAX, u64::MAX]),
            },
            hot_sectors: pick(&[4, 16, 64, 128]),
            steps_per_turn: pick(&[2, 4, 12]),
            steps_per_break: pick(&[40, 120, u64::MAX]),
            steps_per_change: pick(&[20, 60, u64::MAX]),
            copy_bytes_per_s: pick(&[1 << 22, 1 << 30]),
            clear_after: Nanos(pick(&[100_000, 3_000_000])),
            is_operator: pick(&[0, 0, 1]) == 1,
        }
    }
}

/// See the module.
pub(super) struct History {
    random: Random,
    habits: Habits,
    /// The legs as the last power cut has left them.
    images: Vec<Vec<u8>>,
    granted: Option<Granted>,
    /// The stores that are legs.
    named: Vec<usize>,
    given: Stores,
    /// The mirror's contents.
    stamps: Vec<u64>,
    next_stamp: u64,
    outcome: Outcome,
    trace: Vec<(usize, String)>,
}

/// The start of another run, which is behind the recovery from a power cut.
struct Start {
    /// The legs.
    images: Vec<Vec<u8>>,
    granted: Option<Granted>,
    named: Vec<usize>,
    /// The mirror's contents.
    found: Vec<Option<u64>>,
}

/// A run.
struct World {
    habits: Habits,
    options: Options,
    stores: Vec<LegStore>,
    witness: SimWitness,
    mirror: Mirror,
    keeper: Keeper,
    inner: Inner,
    /// The stores of numbers of their own.
    given: Stores,
    /// Stores that are no legs, or are added or removed, from a time on.
    outside: Vec<(u64, LegSet)>,
}

impl History {
    pub(super) fn new(seed: u64, options: &Options) -> Self {
        let mut random = Random::new(seed);
        let mut habits = Habits::draw(&mut random);
        // Few histories without an operator would show this neglect.
        habits.is_operator |= options.neglect == Some(Rule::PermitOnce);
        if habits.is_operator {
            // An operator is asked when legs fail.
            habits.steps_per_break = 40;
        }
        let order = Order::default();
        let image = fill(1).repeat(LEG_BYTES / SECTOR_BYTES);
        let mut stores: Vec<LegStore> = (0..habits.legs)
            .map(|leg| LegStore::new(leg, SimDisk::new(image.clone()), &order, Random::new(1)))
            .collect();
        let mut inner = Inner::new(Random::new(seed), order.clone(), &[], 1);
        let options = CreateOptions {
            uuid: [7; 16],
            region_bytes: Some(REGION_BYTES),
            are_equal: random.once_in(2),
            force: false,
        };
        let layout = create(&devices(&stores), &options, &mut inner).expect("a mirror");
        // It gets the number of a leg that was removed.
        stores.push(LegStore::new(habits.legs, SimDisk::new(image), &order, Random::new(1)));
        Self {
            random,
            habits,
            images: stores.iter().map(|store| store.disk.bytes()).collect(),
            granted: None,
            named: (0..habits.legs).collect(),
            given: Stores::new(),
            stamps: vec![1; layout.capacity_bytes as usize / SECTOR_BYTES],
            next_stamp: 1,
            outcome: Outcome::default(),
            trace: Vec::new(),
        }
    }

    pub(super) fn outcome(&self) -> Outcome {
        self.outcome
    }

    pub(super) fn trace(&self) -> Vec<(usize, String)> {
        self.trace.clone()
    }

    pub(super) fn describe(&self) -> String {
        format!("{:?}", self.habits)
    }

    /// A run, and the power cuts at all of its events. One of them is the start of the next run.
    pub(super) fn run(&mut self, options: &Options) -> Result<(), String> {
        let mut world = self.start(options)?;
        let result = world.run();
        self.trace = std::mem::take(&mut world.inner.trace);
        self.next_stamp = world.inner.next_stamp;
        self.given.clone_from(&world.given);
        add(&mut self.outcome, world.inner.outcome);
        if let Err(what) = result {
            // Its requests in flight will never end.
            std::mem::forget(world);
            return Err(what);
        }
        let result = self.cut_everywhere(&world);
        if options.neglect.is_some() {
            // Answered requests may still be at legs.
            std::mem::forget(world);
        }
        result
    }

    fn start(&mut self, options: &Options) -> Result<World, String> {
        let order = Order::default();
        let mut random = Random::new(self.random.below(u64::MAX));
        let mut store = |(leg, image): (usize, &Vec<u8>)| {
            let luck = Random::new(random.below(u64::MAX));
            LegStore::new(leg, SimDisk::new(image.clone()), &order, luck)
        };
        let stores: Vec<LegStore> = self.images.iter().enumerate().map(&mut store).collect();
        let witness = SimWitness::new(&order, self.granted, self.habits.is_operator);
        let mut inner = Inner::new(random, order, &self.stamps, self.next_stamp);
        inner.hot_sectors = self.habits.hot_sectors;
        let mut legs: Vec<LegStore> = self.named.iter().map(|leg| stores[*leg].clone()).collect();
        if legs.len() > 1 && inner.random.once_in(4) {
            legs.remove(inner.random.below(legs.len() as u64) as usize);
        }
        let opening = self.habits.options(options, &witness, &mut inner.random);
        let opened = Mirror::without_threads(&devices(&legs), opening, &mut inner);
        let (mirror, keeper) = opened.map_err(|error| format!("open: {error}"))?;
        for store in &stores {
            store.set_manner(self.habits.manner);
        }
        let (habits, options) = (self.habits, *options);
        let members = self.named.iter().copied().map(LegSet::of).fold(LegSet::EMPTY, LegSet::with);
        let outside = vec![(0, LegSet::first(stores.len()).without(members))];
        let mut given = self.given.clone();
        if given.is_empty() {
            let status = mirror.status();
            given.extend(status.members.numbers().map(|leg| (status.stores[leg], leg)));
        }
        Ok(World { habits, options, stores, witness, mirror, keeper, inner, given, outside })
    }

    fn cut_everywhere(&mut self, world: &World) -> Result<(), String> {
        let recordings: Vec<Recording> =
            world.stores.iter().map(|store| store.disk.recording()).collect();
        let mut cutters: Vec<Cutter<'_>> = recordings.iter().map(Cutter::new).collect();
        cutters.iter_mut().for_each(|cutter| {
            // The flush of nothing.
            cutter.advance();
        });
        let events = world.inner.order.of_legs();
        let half = events.len() as u64 / 2;
        let wanted = (half + self.random.below(half.max(1))) as usize;
        let mut survivor = None;
        for (position, (leg, at)) in events.iter().enumerate() {
            cutters[*leg].advance();
            self.outcome.cut_points += 1;
            let mut images = Vec::new();
            for cutter in &mut cutters {
                images.push(cutter.cut(&mut self.random, false, |image| image.bytes().to_vec()));
            }
            let granted = world.witness.granted_at(*at);
            let (neglect, outside) = (world.options.neglect, world.outside_at(*at));
            let (given, is_operator) = (&world.given, self.habits.is_operator);
            let left = Left { images: &images, granted, is_operator, neglect, outside, given };
            let found = self.look(world, &left, *at);
            let found = found.map_err(|what| {
                self.trace.retain(|(begun, _)| *begun as u64 <= *at);
                format!("power cut at event {position}, time {at}: {what}")
            })?;
            if survivor.is_none() && position >= wanted {
                survivor = Some(found);
            }
        }
        if let Some(Start { images, granted, named, found }) = survivor {
            self.images = images;
            (self.granted, self.named) = (granted, named);
            self.stamps = found.into_iter().flatten().collect();
        }
        Ok(())
    }

    /// Opens what a power cut has left, with all legs and with some. Returns the legs after that,
    /// and the mirror's contents.
    fn look(&mut self, world: &World, left: &Left<'_>, at: u64) -> Result<Start, String> {
        let all: Vec<usize> = (0..left.images.len()).collect();
        if self.random.once_in(CUTS_PER_RIVAL) {
            let went_on = rival::check(left, &mut self.random);
            let went_on = went_on.map_err(|what| format!("two daemons in turn: {what}"))?;
            self.outcome.seconds += u64::from(went_on);
        }
        let mut opened = left.open(&all, &mut self.random)?;
        self.outcome.openings += 1;
        if opened.waits() {
            return Err(format!("all legs are there, and it waits: {:?}", opened.mirror.status()));
        }
        let found = opened.read()?;
        check(&world.inner.model, &found, at)?;
        let mut start = Start {
            images: opened.images(left.images),
            granted: opened.granted(),
            named: opened.named(),
            found,
        };
        opened.settle()?;
        if opened.read()? != start.found {
            return Err("other bytes are read when all legs are in sync".to_owned());
        }
        if self.random.once_in(2) {
            start.images = opened.images(left.images);
        }
        let some: Vec<usize> = all.into_iter().filter(|_| self.random.once_in(2)).collect();
        if some.is_empty() || some.len() == left.images.len() {
            return Ok(start);
        }
        let with_some = self.look_with(&some, world, left, at);
        let with_some = with_some.map_err(|what| format!("with legs {some:?}: {what}"))?;
        Ok(with_some.filter(|_| self.random.once_in(2)).unwrap_or(start))
    }

    /// Opens some of the legs. If they go on, the others come later, and are copied to.
    fn look_with(
        &mut self,
        some: &[usize],
        world: &World,
        left: &Left<'_>,
        at: u64,
    ) -> Result<Option<Start>, String> {
        let mut opened = match left.open(some, &mut self.random) {
            Ok(opened) => opened,
            // None of them is a member.
            Err(_) if some.iter().all(|leg| left.outside.has(*leg)) => return Ok(None),
            Err(what) => return Err(what),
        };
        self.outcome.openings += 1;
        if opened.waits() {
            self.outcome.waits += 1;
            return Ok(None);
        }
        self.outcome.alone += 1;
        let found = opened.read()?;
        check(&world.inner.model, &found, at)?;
        let start = Start {
            images: opened.images(left.images),
            granted: opened.granted(),
            named: opened.named(),
            found,
        };
        opened.attach_others(left)?;
        opened.settle()?;
        if opened.read()? != start.found {
            return Err("other bytes are read when the others have come".to_owned());
        }
        Ok(Some(start))
    }
}

fn add(outcome: &mut Outcome, other: Outcome) {
    crate::many::Total::add(outcome, other);
}

impl Habits {
    fn options(&self, options: &Options, witness: &SimWitness, random: &mut Random) -> OpenOptions {
        OpenOptions {
            read: Some(random.below(self.legs as u64) as usize),
            copy_bytes_per_s: self.copy_bytes_per_s,
            clear_after: self.clear_after,
            neglect: options.neglect,
            ..OpenOptions::new(Arc::new(witness.clone()))
        }
    }
}

impl World {
    /// Takes the steps of the run, and ends all requests.
    fn run(&mut self) -> Result<(), String> {
        for _ in 0..2 {
            self.add_guest()?;
        }
        for _ in 0..self.options.steps {
            self.step()?;
        }
        self.finish()
    }

    fn add_guest(&mut self) -> Result<(), String> {
        let channel = self.mirror.open_channel(&CoreContext::default(), DEPTH);
        self.inner.guests.push(Guest::new(channel.map_err(|error| error.to_string())?));
        Ok(())
    }

    fn step(&mut self) -> Result<(), String> {
        let Habits { steps_per_turn, steps_per_break, steps_per_change, .. } = self.habits;
        if self.inner.random.once_in(steps_per_turn) {
            self.turn();
        } else if self.inner.random.once_in(steps_per_break) {
            self.break_leg();
        } else if self.inner.random.once_in(steps_per_change) {
            self.change();
        } else if self.inner.random.once_in(16) {
            self.attach();
        } else if self.habits.is_operator && self.inner.random.once_in(8) {
            self.permit();
        } else if self.inner.random.once_in(64) {
            let is_away = self.inner.random.once_in(2);
            self.witness.set_away(is_away);
        } else if self.inner.random.once_in(150) {
            self.reopen()?;
        } else {
            self.inner.step();
        }
        self.inner.wrong.take().map_or(Ok(()), Err)
    }

    fn turn(&mut self) {
        if let Some(rest) = self.keeper.turn(&mut self.inner) {
            // Time passes, but a copy's pause is not a whole one.
            let part = rest.min(std::time::Duration::from_millis(2));
            // Now and then what has failed is tried again.
            let is_long = self.inner.random.once_in(16);
            self.inner.pass(if is_long { std::time::Duration::from_secs(1) } else { part });
        }
    }

    /// Has the operator permit that legs go on alone, if the mirror waits for that.
    fn permit(&mut self) {
        if let Some(Waits::Permission { missing, .. }) = self.status().waits
            && self.witness.permits()
        {
            let permitted = self.keeper.permit(missing, &mut self.inner);
            self.inner.outcome.permits += u64::from(permitted.is_ok());
            self.inner.note(format!("the operator permits: {permitted:?}"));
            self.turn();
        }
    }

    /// Stores that need not be legs at a time.
    fn outside_at(&self, at: u64) -> LegSet {
        let before = self.outside.iter().take_while(|(since, _)| *since <= at);
        before.last().map_or(LegSet::EMPTY, |(_, legs)| *legs)
    }

    /// Says that a store need not be a leg from now on, or is one.
    fn set_outside(&mut self, store: usize, is_outside: bool) {
        let stores = self.outside_at(u64::MAX);
        let at = self.inner.order.tick();
        let store = LegSet::of(store);
        self.outside
            .push((at, if is_outside { stores.with(store) } else { stores.without(store) }));
    }

    /// Adds a store, removes a leg, or repairs one.
    fn change(&mut self) {
        let store = self.inner.random.below(self.stores.len() as u64) as usize;
        let result = match self.number_of(store) {
            None => self.add(store),
            Some(leg) if self.inner.random.once_in(2) => self.remove(leg, store),
            Some(leg) => self.repair(leg),
        };
        self.inner.note(format!("that was {result:?}"));
        // The state is that of a turn.
        self.turn();
    }

    /// The number of the leg that a store is.
    fn number_of(&self, store: usize) -> Option<usize> {
        let named = named(&self.status(), &self.given);
        named.into_iter().find(|(_, of)| *of == store).map(|(leg, _)| leg)
    }

    /// Makes a store a leg, with the lowest number that is free: another store may have had it.
    fn add(&mut self, store: usize) -> Result<(), MirrorError> {
        let members = self.status().members;
        let leg = (0..self.stores.len()).find(|leg| !members.has(*leg)).unwrap_or(0);
        let own = 1 + self.given.len() as u64;
        self.given.insert(own, store);
        self.inner.note(format!("store {store} is added as leg {leg}"));
        let device = Arc::new(self.stores[store].clone());
        let added = self.keeper.add((leg, own), device, &mut self.inner);
        self.inner.outcome.added_legs += u64::from(added.is_ok());
        if added.is_ok() {
            self.set_outside(store, false);
        }
        added
    }

    fn remove(&mut self, leg: usize, store: usize) -> Result<(), MirrorError> {
        self.inner.note(format!("store {store}, which is leg {leg}, is removed"));
        let was_outside = self.outside_at(u64::MAX).has(store);
        self.set_outside(store, true);
        let removed = self.keeper.remove(leg, &mut self.inner);
        self.inner.outcome.removed_legs += u64::from(removed.is_ok());
        if matches!(removed, Err(MirrorError::State { .. })) && !was_outside {
            self.set_outside(store, false);
        }
        removed
    }

    fn repair(&mut self, leg: usize) -> Result<(), MirrorError> {
        let from = self.inner.random.below(self.stores.len() as u64) as usize;
        let sector = self.inner.random.below(self.inner.sectors - 8);
        let range = (sector * SECTOR_BYTES as u64, 8 * SECTOR_BYTES as u64);
        self.inner.note(format!("leg {leg} is repaired from {from}, sector {sector}"));
        let repaired = self.keeper.repair((from, leg), range, &mut self.inner);
        self.inner.outcome.repairs += u64::from(repaired.is_ok());
        repaired
    }

    /// The stores that are legs.
    fn legs(&self) -> Vec<LegStore> {
        let stores = self.stores.iter();
        stores.filter(|store| self.number_of(store.index).is_some()).cloned().collect()
    }

    fn status(&self) -> Status {
        self.mirror.status()
    }

    /// Has all requests of a leg fail.
    fn break_leg(&mut self) {
        let store = self.inner.random.below(self.stores.len() as u64) as usize;
        self.inner.note(format!("store {store} breaks"));
        self.inner.outcome.failed_legs += 1;
        self.stores[store].set_broken(true);
    }

    /// Repairs a leg, and attaches it if the mirror does not use it.
    fn attach(&mut self) {
        let store = self.inner.random.below(self.stores.len() as u64) as usize;
        self.stores[store].set_broken(false);
        let (status, leg) = (self.status(), self.number_of(store));
        let may_come = match leg {
            Some(leg) => matches!(status.legs[leg], LegState::Missing | LegState::Failed),
            // Legs that are there show that it is none.
            None => status.waits.is_none(),
        };
        if !may_come {
            return;
        }
        self.inner.note(format!("store {store} is attached"));
        let device: Arc<dyn BlockDevice> = Arc::new(self.stores[store].clone());
        match self.keeper.attach(&device, &mut self.inner) {
            Ok(()) if leg.is_none() => {
                self.inner.wrong.get_or_insert(format!("store {store} is attached, and no leg"));
            }
            Ok(()) => self.inner.outcome.attached_legs += 1,
            // It may fail again at once.
            Err(error) => self.inner.note(format!("store {store} is refused: {error}")),
        }
        // The state is that of a turn.
        self.turn();
    }

    /// Closes the mirror in good order, and opens it again.
    fn reopen(&mut self) -> Result<(), String> {
        if matches!(self.options.neglect, Some(Rule::AllLegs | Rule::FlushAll)) {
            // Answered requests are still at legs, and a queue that closes would drop them.
            return Ok(());
        }
        self.inner.is_ending = true;
        self.drain()?;
        self.inner.guests.clear();
        self.inner.note("closes");
        self.keeper.close(&mut self.inner);
        self.inner.outcome.closed += 1;
        let options = self.habits.options(&self.options, &self.witness, &mut self.inner.random);
        self.stores.iter().for_each(|store| {
            store.set_broken(false);
            store.set_manner(QUICK);
        });
        let legs = self.legs();
        let opened = Mirror::without_threads(&devices(&legs), options, &mut self.inner);
        let (mirror, keeper) = opened.map_err(|error| format!("open again: {error}"))?;
        self.inner.note("opened again");
        (self.mirror, self.keeper) = (mirror, keeper);
        self.stores.iter().for_each(|store| store.set_manner(self.habits.manner));
        self.inner.is_ending = false;
        for _ in 0..2 {
            self.add_guest()?;
        }
        Ok(())
    }

    /// Ends all requests: legs and the witness are there again.
    fn drain(&mut self) -> Result<(), String> {
        self.witness.set_away(false);
        for _ in 0..MOST_TURNS {
            if self.inner.in_flight() == 0 {
                return self.inner.wrong.take().map_or(Ok(()), Err);
            }
            self.inner.poll_all();
            self.turn();
            self.attach_all();
        }
        Err(format!("requests do not end: {:?}", self.status()))
    }

    fn attach_all(&mut self) {
        for store in 0..self.stores.len() {
            self.stores[store].set_broken(false);
            let Some(leg) = self.number_of(store) else { continue };
            if matches!(self.status().legs[leg], LegState::Missing | LegState::Failed) {
                let device: Arc<dyn BlockDevice> = Arc::new(self.stores[store].clone());
                let attached = self.keeper.attach(&device, &mut self.inner);
                self.inner.note(format!("store {store} is attached: {attached:?}"));
                self.turn();
            }
        }
    }

    /// Ends the run: all legs come in sync, and are equal.
    fn finish(&mut self) -> Result<(), String> {
        self.inner.is_ending = true;
        self.stores.iter().for_each(|store| {
            store.set_manner(Manner { requests_per_fault: u64::MAX, ..self.habits.manner });
        });
        self.drain()?;
        for _ in 0..MOST_TURNS {
            let status = self.status();
            if status.members.numbers().all(|leg| status.legs[leg] == LegState::InSync) {
                self.inner.outcome.copied_regions += status.copied_regions;
                let capacity_bytes = self.mirror.geometry().capacity_bytes as usize;
                return compare(&self.legs(), LEG_BYTES - capacity_bytes);
            }
            self.attach_all();
            self.turn();
            self.inner.pass(std::time::Duration::from_millis(20));
        }
        Err(format!("legs never come in sync: {:?}", self.status()))
    }
}
