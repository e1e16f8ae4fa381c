//! A history: runs of a store with checksums, and a power cut after every event of each.

use sidecore_block::BlockDevice;
use sidecore_reactor::CoreContext;
use sidecore_stage_integrity::{FormatOptions, IntegrityStore, format};

use super::check::{check, flush, look, open, read_all, stamps};
use super::{Options, Outcome};
use crate::Random;
use crate::mirror::guest::{DEPTH, Guest, Inner};
use crate::mirror::legs::{LegStore, Manner, Order, QUICK};
use crate::volumes::cut::Cutter;
use crate::volumes::disk::{SECTOR_BYTES, SimDisk};

/// The size of the store: metadata, and some tens of blocks.
const STORE_BYTES: usize = 56 << 10;
/// Polls in which everything ends after a run.
const MOST_POLLS: usize = 20_000;
/// The last states of the data that a lost write may leave.
const STATES: usize = 6;

/// Choices for a whole history.
#[derive(Clone, Copy, Debug)]
struct Habits {
    block_bytes: u32,
    slots: u32,
    manner: Manner,
    hot_sectors: u64,
    /// One in so many steps the daemon dies.
    steps_per_death: u64,
    /// One in so many steps the guests are killed.
    steps_per_kill: u64,
}

impl Habits {
    fn draw(random: &mut Random) -> Self {
        let mut pick = |choices: &[u64]| choices[random.below(choices.len() as u64) as usize];
        Self {
            block_bytes: pick(&[512, 1024, 1024, 2048]) as u32,
            slots: pick(&[1, 2, 3, 6]) as u32,
            manner: Manner {
                delay: pick(&[1, 2, 4]),
                requests_per_fault: pick(&[200, u64::MAX, u64::MAX]),
            },
            hot_sectors: pick(&[4, 8, 16, 64]),
            steps_per_death: pick(&[80, 200, u64::MAX]),
            steps_per_kill: pick(&[60, 150, u64::MAX]),
        }
    }
}

/// See the module.
pub(super) struct History {
    random: Random,
    habits: Habits,
    /// The store as the last power cut has left it.
    image: Vec<u8>,
    data_at: usize,
    /// Its data.
    stamps: Vec<u64>,
    next_stamp: u64,
    pub(super) outcome: Outcome,
    pub(super) trace: Vec<(usize, String)>,
}

/// A run.
struct World {
    habits: Habits,
    options: Options,
    store: LegStore,
    /// `None` while the daemon is dead.
    opened: Option<IntegrityStore>,
    /// Guests of daemons that have died, with their requests, which stay in flight.
    dead: Vec<Guest>,
    inner: Inner,
    data_at: usize,
    /// Whether blocks are torn without a power cut.
    may_be_bad: bool,
    /// Requests that have met bad blocks before that was known last.
    met_bad: u64,
    deaths: u64,
    kills: u64,
    /// Requests that failed when guests were killed.
    excused: u64,
}

impl History {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let habits = Habits::draw(&mut random);
        let disk = SimDisk::new(vec![0x5a; STORE_BYTES]);
        let store = LegStore::new(0, disk, &Order::default(), Random::new(1));
        let options = FormatOptions {
            uuid: [7; 16],
            block_bytes: habits.block_bytes,
            slots: Some(habits.slots),
            // It is full of other bytes.
            force: true,
        };
        let layout = format(&store, &options).expect("a store");
        Self {
            random,
            habits,
            image: store.disk.bytes(),
            data_at: layout.data_at() as usize,
            stamps: vec![0; layout.capacity_bytes() as usize / SECTOR_BYTES],
            next_stamp: 0,
            outcome: Outcome::default(),
            trace: Vec::new(),
        }
    }

    pub(super) fn describe(&self) -> String {
        format!("{:?}", self.habits)
    }

    /// A run, and the power cuts at all of its events. One of them is the start of the next run.
    pub(super) fn run(&mut self, options: &Options) -> Result<(), String> {
        let order = Order::default();
        let luck = Random::new(self.random.below(u64::MAX));
        let store = LegStore::new(0, SimDisk::new(self.image.clone()), &order, luck);
        let random = Random::new(self.random.below(u64::MAX));
        let mut inner = Inner::new(random, order, &self.stamps, self.next_stamp);
        inner.hot_sectors = self.habits.hot_sectors;
        inner.block_sectors = u64::from(self.habits.block_bytes) / SECTOR_BYTES as u64;
        let (habits, options) = (self.habits, *options);
        let mut world = World {
            habits,
            options,
            store,
            opened: None,
            dead: Vec::new(),
            inner,
            data_at: self.data_at,
            may_be_bad: false,
            met_bad: 0,
            deaths: 0,
            kills: 0,
            excused: 0,
        };
        let result = world.run();
        self.trace = std::mem::take(&mut world.inner.trace);
        self.next_stamp = world.inner.next_stamp;
        self.outcome.requests += world.inner.outcome.requests;
        self.outcome.failures += world.inner.outcome.failures;
        self.outcome.deaths += world.deaths;
        self.outcome.kills += world.kills;
        if let Err(what) = result {
            // Its requests in flight will never end.
            std::mem::forget(world);
            return Err(what);
        }
        let result = self.cut_everywhere(&world);
        world.bury();
        result
    }

    fn cut_everywhere(&mut self, world: &World) -> Result<(), String> {
        let recording = world.store.disk.recording();
        let mut cutter = Cutter::new(&recording);
        // The flush of nothing.
        cutter.advance();
        let events = world.inner.order.of_legs();
        let half = events.len() as u64 / 2;
        let wanted = (half + self.random.below(half.max(1))) as usize;
        let mut states: Vec<Vec<u8>> = Vec::new();
        let mut survivor = None;
        for (position, (_, at)) in events.iter().enumerate() {
            let flushed = cutter.flushed();
            cutter.advance();
            self.outcome.cut_points += 1;
            let image = cutter.cut(&mut self.random, false, |image| image.bytes().to_vec());
            let failed = |what| format!("power cut at event {position}, time {at}: {what}");
            let result = self.look(world, &image, (&states, *at));
            let found = result.map_err(|what| {
                self.trace.retain(|(begun, _)| *begun as u64 <= *at);
                failed(what)
            })?;
            if cutter.flushed() > flushed {
                states.truncate(STATES - 1);
                states.insert(0, image[self.data_at..].to_vec());
            }
            if survivor.is_none() && position >= wanted {
                survivor = found;
            }
        }
        if let Some(image) = survivor {
            let data = &image[self.data_at..][..self.stamps.len() * SECTOR_BYTES];
            self.stamps = stamps(data).into_iter().flatten().collect();
            self.image = image;
        }
        Ok(())
    }

    /// Looks at what a power cut has left. Returns the store after that, if no block is torn.
    fn look(
        &mut self,
        world: &World,
        image: &[u8],
        (states, at): (&[Vec<u8>], u64),
    ) -> Result<Option<Vec<u8>>, String> {
        let (model, neglect) = (&world.inner.model, world.options.neglect);
        let data = self.data_at..self.data_at + self.stamps.len() * SECTOR_BYTES;
        let found = look(image, neglect, &mut self.random)?;
        let torn = check(model, &image[data.clone()], &found.blocks, at)?;
        self.outcome.torn += torn;
        if !self.random.once_in(3) || states.is_empty() {
            return Ok((torn == 0).then_some(found.image));
        }
        // A block as it was, where a flush has covered a later write.
        let state = &states[self.random.below(states.len() as u64) as usize];
        let size = self.habits.block_bytes as usize;
        let is_old = |block: &usize| {
            let stamps = stamps(&state[block * size..][..size]);
            let first = block * stamps.len();
            (first..).zip(stamps).any(|(sector, it)| model.check_cut(sector, it, at).is_err())
        };
        let lost: Vec<usize> = (0..found.blocks.len()).filter(is_old).collect();
        if !lost.is_empty() {
            let block = lost[self.random.below(lost.len() as u64) as usize];
            self.outcome.lost += 1;
            let mut image = image.to_vec();
            let old = &state[block * size..][..size];
            image[data.start + block * size..][..size].copy_from_slice(old);
            let found = look(&image, neglect, &mut self.random)?;
            if found.blocks[block].is_some() {
                return Err(format!("block {block} has lost a write, and is read"));
            }
        }
        Ok((torn == 0).then_some(found.image))
    }
}

impl World {
    /// Takes the steps of the run, and ends all requests.
    fn run(&mut self) -> Result<(), String> {
        self.begin()?;
        for _ in 0..self.options.steps {
            if self.inner.random.once_in(self.habits.steps_per_death) {
                self.die()?;
            } else if self.inner.random.once_in(self.habits.steps_per_kill) {
                self.kill_guests()?;
            } else {
                self.inner.step();
            }
            self.check()?;
        }
        self.end_requests()?;
        self.inner.guests.clear();
        self.check()
    }

    /// Polls until no request is in flight.
    fn end_requests(&mut self) -> Result<(), String> {
        for _ in 0..MOST_POLLS {
            if self.inner.in_flight() == 0 {
                return Ok(());
            }
            self.inner.poll_all();
        }
        Err("requests do not end".to_owned())
    }

    fn check(&mut self) -> Result<(), String> {
        let may_fail = self.habits.manner.requests_per_fault != u64::MAX;
        if self.inner.bad_blocks > self.met_bad && !self.may_be_bad && !may_fail {
            return Err("a good block is called bad".to_owned());
        }
        let failures = self.inner.outcome.failures - self.inner.bad_blocks;
        if failures > self.excused && !may_fail {
            return Err("a request fails, though the store carries all of them out".to_owned());
        }
        self.inner.wrong.take().map_or(Ok(()), Err)
    }

    /// Opens the store.
    fn begin(&mut self) -> Result<(), String> {
        self.store.set_manner(QUICK);
        self.opened = Some(open(&self.store, self.options.neglect)?);
        self.look_at_blocks()?;
        self.begin_guests()?;
        self.store.set_manner(self.habits.manner);
        Ok(())
    }

    /// Looks at all blocks when the store was just opened: those that are torn are bad, and no
    /// others.
    fn look_at_blocks(&mut self) -> Result<(), String> {
        let Some(opened) = &self.opened else { return Ok(()) };
        let found = read_all(opened)?;
        let len_bytes = opened.geometry().capacity_bytes as usize;
        let image = self.store.disk.bytes();
        let data = &image[self.data_at..][..len_bytes];
        let at = self.inner.order.tick();
        self.may_be_bad = check(&self.inner.model, data, &found, at)? > 0;
        self.met_bad = self.inner.bad_blocks;
        Ok(())
    }

    fn begin_guests(&mut self) -> Result<(), String> {
        let Some(opened) = &self.opened else { return Ok(()) };
        for _ in 0..2 {
            let channel = opened.open_channel(&CoreContext::default(), DEPTH);
            self.inner.guests.push(Guest::new(channel.map_err(|error| error.to_string())?));
        }
        Ok(())
    }

    /// The store is away, and requests in flight fail, or are done all the same. The guests are
    /// killed, and others begin: sometimes others are killed before. Or the guests go on for a
    /// while without being told that their writes are durable.
    fn kill_guests(&mut self) -> Result<(), String> {
        self.inner.note("the guests are killed");
        self.kills += 1;
        self.may_be_bad = true;
        self.store.set_broken(true);
        self.end_requests()?;
        if self.inner.random.once_in(2) {
            self.pause_guests()?;
        }
        self.leave_guests();
        while self.inner.random.once_in(3) {
            self.begin_guests()?;
            (0..20).for_each(|_| self.inner.step());
            self.end_requests()?;
            self.leave_guests();
        }
        self.begin_guests()?;
        self.excused = self.inner.outcome.failures - self.inner.bad_blocks;
        self.store.set_broken(false);
        // A place that cannot be read when the store is opened counts as torn, and here whole
        // blocks must not.
        self.store.set_manner(QUICK);
        while self.inner.in_flight() == 0 {
            self.inner.step();
        }
        self.end_requests()?;
        self.look_at_blocks()?;
        // A flush does not open the store, and fails if it is the first request.
        self.excused = self.inner.outcome.failures - self.inner.bad_blocks;
        self.store.set_manner(self.habits.manner);
        Ok(())
    }

    /// The guests are gone, and say so.
    fn leave_guests(&mut self) {
        self.inner.guests.clear();
        self.opened.iter().for_each(|opened| opened.user_gone());
    }

    /// A flush fails, and the guests are paused and go on. Answered writes may be lost then, so no
    /// flush may succeed.
    fn pause_guests(&mut self) -> Result<(), String> {
        let Some(opened) = &self.opened else { return Ok(()) };
        if flush(opened)? {
            return Err("a flush succeeds while the store is away".to_owned());
        }
        self.inner.guests.clear();
        self.store.set_broken(false);
        self.begin_guests()?;
        (0..20).for_each(|_| self.inner.step());
        self.end_requests()?;
        if self.opened.as_ref().is_some_and(|opened| flush(opened) != Ok(false)) {
            return Err("a flush succeeds, though one before it has failed".to_owned());
        }
        self.store.set_broken(true);
        Ok(())
    }

    /// The daemon dies, with requests in flight, and another one opens the store.
    fn die(&mut self) -> Result<(), String> {
        self.inner.note("the daemon dies");
        self.deaths += 1;
        // Its requests do not end while this history runs.
        self.dead.append(&mut self.inner.guests);
        self.opened = None;
        self.begin()
    }

    /// Ends the requests of dead daemons, when nothing looks at the store any more: tags must not
    /// be dropped, and memory that is left over would be too much for many histories.
    fn bury(mut self) {
        self.store.set_broken(true);
        self.store.set_manner(QUICK);
        self.inner.guests = std::mem::take(&mut self.dead);
        if self.end_requests().is_err() {
            std::mem::forget(self);
        }
    }
}
