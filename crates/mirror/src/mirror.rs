//! The device, and how it is made and opened.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use sidecore_block::{BlockChannel, BlockDevice, Geometry};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::channel::MirrorChannel;
use crate::disk::{LegDisk, Sleep, Wait};
use crate::epoch::{Config, StoreId};
use crate::error::{LegError, MirrorError};
use crate::former::Former;
use crate::header::{Header, Identity, slot_bytes};
use crate::keeper::{Found, Keeper, Late, read_leg};
use crate::layout::{BLOCK_BYTES, Layout, SLOTS};
use crate::legs::{LegSet, MAX_LEGS};
use crate::mail::{Command, Message};
use crate::map::DirtyMap;
use crate::rules::Neglected;
use crate::shared::Shared;
use crate::status::Status;
use crate::view::LegView;
use crate::witness::Witness;

/// How a mirror is made.
#[derive(Clone, Copy, Debug)]
pub struct CreateOptions {
    /// The mirror's identity: random.
    pub uuid: [u8; 16],
    /// The unit in which legs are compared and copied; `None` for what suits their size.
    pub region_bytes: Option<u64>,
    /// Whether all stores hold the same bytes, for instance zeros. Otherwise those of the first one
    /// are copied to the others.
    pub are_equal: bool,
    /// Whether headers of other mirrors are overwritten.
    pub force: bool,
}

/// How a mirror is opened.
#[derive(Clone)]
pub struct OpenOptions {
    /// The mirror's name in the log.
    pub name: String,
    /// The leg that is read while it is in sync; otherwise the one with the lowest number.
    pub read: Option<usize>,
    /// The rate of copies to a leg that is behind.
    pub copy_bytes_per_s: u64,
    /// Marks of regions that were not written for so long are cleared.
    pub clear_after: Nanos,
    /// The longest time that a store that is attached or added may take for a request, until it
    /// is in sync.
    pub patience: Nanos,
    /// Decides whether half of the legs goes on.
    pub witness: Arc<dyn Witness>,
    /// Stores that earlier openings have refused as legs.
    pub former: Former,
    /// A rule that is neglected, for simulations.
    #[cfg(feature = "neglect")]
    pub neglect: Option<crate::rules::Rule>,
}

impl OpenOptions {
    /// The usual options.
    #[must_use]
    pub fn new(witness: Arc<dyn Witness>) -> Self {
        Self {
            name: String::new(),
            read: None,
            copy_bytes_per_s: 64 << 20,
            clear_after: Nanos::from_millis(5000),
            patience: Nanos::from_millis(10_000),
            witness,
            former: Former::default(),
            #[cfg(feature = "neglect")]
            neglect: None,
        }
    }

    fn neglected(&self) -> Neglected {
        #[cfg(feature = "neglect")]
        return Neglected(self.neglect);
        #[cfg(not(feature = "neglect"))]
        Neglected::default()
    }
}

/// Opens a store, and reads the header that it may have. With a limit of time, a disk that is late
/// is put into `late`.
pub(crate) fn probe(
    device: &Arc<dyn BlockDevice>,
    limit: Option<(Nanos, &mut Late)>,
    wait: &mut dyn Wait,
) -> Result<(LegDisk, Result<Header, LegError>), LegError> {
    let mut disk = LegDisk::open(device, limit.as_ref().map(|(limit, _)| *limit))?;
    let len_bytes = SLOTS.saturating_mul(BLOCK_BYTES as u64);
    if device.geometry().capacity_bytes < len_bytes {
        return Ok((disk, Err(LegError::NoHeader)));
    }
    let mut slots = vec![0; usize::try_from(len_bytes).unwrap_or(0)];
    let read = disk.read(wait, 0, &mut slots);
    if let Some((limit, late)) = limit.filter(|_| disk.is_late()) {
        late.push((None, disk));
        return Err(LegError::Silent { limit: Duration::from(limit) });
    }
    read.map_err(|error| LegError::Io(error.to_string()))?;
    Ok((disk, Header::newest(&slots)))
}

/// Makes stores the legs of a new mirror, numbered in their order. What they held is lost, but for
/// the bytes behind the metadata of the first one.
///
/// # Errors
/// A store cannot be a leg: then nothing was changed. Or it cannot be written.
pub fn create(
    devices: &[Arc<dyn BlockDevice>],
    options: &CreateOptions,
    wait: &mut dyn Wait,
) -> Result<Layout, MirrorError> {
    if devices.is_empty() || devices.len() > MAX_LEGS {
        return Err(MirrorError::Count(devices.len()));
    }
    let geometries = || devices.iter().map(|device| device.geometry());
    let leg_bytes = geometries().map(|it| it.capacity_bytes).min().unwrap_or(0);
    let block_bytes = geometries().map(|it| it.block_bytes).max().unwrap_or(512);
    let layout = Layout::of(leg_bytes, block_bytes, options.region_bytes)
        .ok_or(MirrorError::Layout { leg_bytes })?;
    let mut disks = Vec::new();
    for (store, device) in devices.iter().enumerate() {
        let at = |error| MirrorError::Leg { store, error };
        layout.takes(&device.geometry()).map_err(at)?;
        let (disk, header) = probe(device, None, wait).map_err(at)?;
        if !options.force && header != Err(LegError::NoHeader) {
            return Err(at(LegError::HasHeader));
        }
        disks.push(disk);
    }
    let members = LegSet::first(devices.len());
    let in_sync = if options.are_equal { members } else { LegSet::of(0) };
    let mut map = DirtyMap::new(layout.regions(), &options.uuid);
    map.set_all(!options.are_equal);
    let writes_zeroes = geometries().all(|it| it.write_zeroes);
    let identity = Identity { uuid: options.uuid, layout, writes_zeroes };
    let config = Config::first(members, in_sync, identity.first_stores(members));
    for (leg, disk) in disks.iter_mut().enumerate() {
        let (store, generation) = (config.store(leg), 1);
        let header = Header { identity, leg, store, generation, config, is_clean: true };
        let written = write_leg(disk, &header, &map, wait);
        let failed = |error: sidecore_block::BlockError| LegError::Io(error.to_string());
        written.map_err(|error| MirrorError::Leg { store: leg, error: failed(error) })?;
    }
    Ok(layout)
}

/// Writes the metadata of a new leg: the header last.
fn write_leg(
    disk: &mut LegDisk,
    header: &Header,
    map: &DirtyMap,
    wait: &mut dyn Wait,
) -> Result<(), sidecore_block::BlockError> {
    for slot in 0..SLOTS {
        disk.write(wait, slot_bytes(slot), &[0; BLOCK_BYTES])?;
    }
    for block in 0..map.blocks() {
        let at = SLOTS.saturating_add(block as u64).saturating_mul(BLOCK_BYTES as u64);
        disk.write(wait, at, &map.encode(block))?;
    }
    disk.flush(wait)?;
    disk.write(wait, slot_bytes(header.generation), &header.encode())?;
    disk.flush(wait)
}

/// A store of several legs that hold the same bytes.
///
/// It is closed in good order when it and all of its channels are dropped. If it is dropped last,
/// that waits for the end of the keeper, at most ten seconds; a channel never waits.
pub struct Mirror {
    shared: Arc<Shared>,
    geometry: Geometry,
    /// `None` only while it is dropped.
    life: Option<Arc<Life>>,
}

/// The time between two looks whether an answer is waited for in vain.
const LOOK: Duration = Duration::from_millis(100);

/// The longest wait for the keeper's end.
const END: Duration = Duration::from_secs(10);

/// The keeper's thread, which ends with the last user.
pub(crate) struct Life {
    shared: Arc<Shared>,
    end: End,
}

/// The end of a mirror's keeper. Until then it uses the legs.
#[derive(Clone, Default)]
pub struct End(Arc<(Mutex<bool>, Condvar)>);

impl End {
    /// Waits for the end, at most for this time. False if the keeper has not ended by then.
    #[must_use]
    pub fn wait(&self, limit: Duration) -> bool {
        let (has_ended, changed) = &*self.0;
        let guard = has_ended.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = changed.wait_timeout_while(guard, limit, |has_ended| !*has_ended);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn set(&self) {
        let (has_ended, changed) = &*self.0;
        *has_ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_all();
    }
}

/// Says that the keeper has ended, also if it has panicked.
struct Ending(End);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.set();
    }
}

impl Drop for Life {
    /// A sidecore may drop the last channel: nothing waits for the keeper here.
    fn drop(&mut self) {
        let (reply, _) = mpsc::channel();
        // A keeper that has ended has nothing to close.
        let _ = self.shared.keeper.send(Message::Command(Command::Close, reply));
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        // Channels that are open end it later.
        let Some(life) = self.life.take().and_then(Arc::into_inner) else { return };
        let end = life.end.clone();
        drop(life);
        if !end.wait(END) {
            tracing::error!("a mirror does not close; at its next start its legs are copied to");
        }
    }
}

impl Mirror {
    /// Opens the mirror of these legs, in any order. Requests wait if the legs do not suffice;
    /// [`status`](Self::status) says why.
    ///
    /// # Errors
    /// The stores are not legs of one mirror: then nothing was changed.
    pub fn open(
        devices: &[Arc<dyn BlockDevice>],
        options: OpenOptions,
    ) -> Result<Self, MirrorError> {
        let (sender, opened) = mpsc::sync_channel(1);
        let end = End::default();
        let ending = Ending(end.clone());
        let devices = devices.to_vec();
        std::thread::Builder::new().name("mirror".to_owned()).spawn(move || {
            let _ending = ending;
            let _span = tracing::info_span!("mirror", store = options.name).entered();
            let mut wait = Sleep::default();
            let opened = Self::open_here(&devices, options, end, &mut wait);
            let (mirror, mut keeper) = match opened {
                Ok(opened) => opened,
                Err(error) => return drop(sender.send(Err(error))),
            };
            drop(devices);
            // The opening thread waits for this.
            let _ = sender.send(Ok(mirror));
            while let Some(time) = keeper.turn(&mut wait) {
                keeper.rest(time);
            }
        })?;
        opened.recv().map_err(|_| MirrorError::Closed)?
    }

    fn tell(&self, command: Command) -> Result<(), MirrorError> {
        let (reply, answer) = mpsc::channel();
        let sent = self.shared.keeper.send(Message::Command(command, reply));
        sent.map_err(|_| MirrorError::Closed)?;
        loop {
            if self.shared.is_ending.load(Ordering::Acquire) {
                return Err(MirrorError::Closed);
            }
            match answer.recv_timeout(LOOK) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(MirrorError::Closed),
            }
        }
    }

    /// Has all that wait for the keeper's answer return, now and later: the mirror is to end, and
    /// the keeper may be waiting for a leg.
    pub fn answer_no_more(&self) {
        self.shared.is_ending.store(true, Ordering::Release);
    }

    /// Lets half of the legs go on without the others, which are `without`, if the mirror waits for
    /// this permission now.
    ///
    /// # Errors
    /// It asks no operator, does not wait for a permission, or waits for something else meanwhile:
    /// also if other legs are missing than the operator knew.
    pub fn permit(&self, without: LegSet) -> Result<(), MirrorError> {
        self.tell(Command::Permit(without))
    }

    /// Opens a mirror whose keeper the caller runs, on this thread.
    ///
    /// # Errors
    /// See [`open`](Self::open).
    pub fn without_threads(
        devices: &[Arc<dyn BlockDevice>],
        options: OpenOptions,
        wait: &mut dyn Wait,
    ) -> Result<(Self, Keeper), MirrorError> {
        let end = End::default();
        // Nothing waits for a keeper on this thread.
        end.set();
        Self::open_here(devices, options, end, wait)
    }

    fn open_here(
        devices: &[Arc<dyn BlockDevice>],
        options: OpenOptions,
        end: End,
        wait: &mut dyn Wait,
    ) -> Result<(Self, Keeper), MirrorError> {
        if devices.is_empty() || devices.len() > MAX_LEGS {
            return Err(MirrorError::Count(devices.len()));
        }
        let mut found: Vec<Found> = Vec::new();
        for (store, device) in devices.iter().enumerate() {
            let leg = read_leg(device, None, wait);
            found.push(leg.map_err(|error| MirrorError::Leg { store, error })?);
        }
        let Some(identity) = found.first().map(|found| found.header.identity) else {
            return Err(MirrorError::Count(0));
        };
        let former = options.former.of(&identity);
        let geometry = geometry(&identity, devices);
        let (sender, inbox) = mpsc::channel();
        let (layout, neglected) = (identity.layout, options.neglected());
        let shared = Arc::new(Shared::new(layout, neglected, sender));
        let kept = Arc::clone(&shared);
        let keeper = Keeper::open((found, former), identity, kept, inbox, options, wait)?;
        let life = Arc::new(Life { shared: Arc::clone(&shared), end });
        Ok((Self { shared, geometry, life: Some(life) }, keeper))
    }

    /// The state of the mirror and its legs, as of the keeper's last turn.
    #[must_use]
    pub fn status(&self) -> Status {
        self.shared.status().clone()
    }

    /// The sizes of the mirror.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.shared.layout
    }

    /// The end of the keeper, which comes when this and all channels are dropped.
    #[must_use]
    pub fn end(&self) -> End {
        self.life.as_ref().map(|life| life.end.clone()).unwrap_or_default()
    }

    /// The store of a leg, also if it has failed; `None` if it is missing.
    #[must_use]
    pub fn store(&self, leg: usize) -> Option<Arc<dyn BlockDevice>> {
        self.shared.devices().get(leg).and_then(|(_, device)| device.clone())
    }

    /// Has reads go to this leg while it is in sync.
    ///
    /// # Errors
    /// The mirror is closed.
    pub fn prefer(&self, leg: usize) -> Result<(), MirrorError> {
        self.tell(Command::Prefer(leg))
    }

    /// Uses the store of a leg that was missing or has failed. What it missed is copied to it.
    ///
    /// # Errors
    /// It is no leg of this mirror, or cannot be used with the others: nothing was changed.
    pub fn attach(&self, device: Arc<dyn BlockDevice>) -> Result<(), MirrorError> {
        self.tell(Command::Attach(device))
    }

    /// Makes a store the leg of this number, and copies all of the mirror to it. The store gets a
    /// random number of its own.
    ///
    /// # Errors
    /// The store cannot be a leg, the number is in use, or the mirror waits.
    pub fn add(
        &self,
        leg: (usize, StoreId),
        device: Arc<dyn BlockDevice>,
    ) -> Result<(), MirrorError> {
        self.tell(Command::Add(leg, device))
    }

    /// Lets a leg go for good: the mirror never waits for it again.
    ///
    /// # Errors
    /// It is the only one in sync, or the mirror waits.
    pub fn remove(&self, leg: usize) -> Result<(), MirrorError> {
        self.tell(Command::Remove(leg))
    }

    /// Writes bytes of the leg `from` to the leg `to`, while no write of a user is in flight there.
    ///
    /// # Errors
    /// One of them is not in sync, or fails.
    pub fn repair(
        &self,
        (from, to): (usize, usize),
        (offset_bytes, len_bytes): (u64, u64),
    ) -> Result<(), MirrorError> {
        self.tell(Command::Repair { from, to, offset_bytes, len_bytes })
    }

    /// The bytes of one leg, for reading, whatever its state.
    ///
    /// # Errors
    /// The leg has no store.
    pub fn leg(&self, leg: usize) -> Result<Arc<dyn BlockDevice>, MirrorError> {
        let device = self.store(leg);
        let reason = "it has no store; attach it";
        let device = device.ok_or(MirrorError::State { leg, reason })?;
        Ok(Arc::new(LegView::new(device, self.shared.layout.data_bytes, self.geometry)))
    }
}

/// The abilities that all legs have, also those that come later.
fn geometry(identity: &Identity, devices: &[Arc<dyn BlockDevice>]) -> Geometry {
    let (layout, zeroes) = (&identity.layout, identity.writes_zeroes);
    let all = || devices.iter().map(|device| device.geometry());
    let physical = all().map(|it| it.physical_block_bytes).max().unwrap_or(layout.block_bytes);
    Geometry {
        physical_block_bytes: physical.max(layout.block_bytes),
        volatile_cache: true,
        // A discard writes zeros, which are the same on each leg.
        discard: zeroes,
        discard_zeroes: zeroes,
        write_zeroes: zeroes,
        ..Geometry::new(layout.capacity_bytes, layout.block_bytes)
    }
}

impl BlockDevice for Mirror {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let life = self.life.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(Box::new(MirrorChannel::open(&self.shared, life, core, depth)?))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let start = offset_bytes.saturating_add(self.shared.layout.data_bytes);
        let devices: Vec<_> = self.shared.devices().iter().cloned().collect();
        devices.iter().filter_map(|(_, device)| device.as_ref()).try_for_each(|device| {
            // The caller waits for the kernel, and the lock is not held meanwhile.
            device.allocate(start, len_bytes)
        })
    }

    fn fallback(&self) -> Option<String> {
        if let Some(problem) = self.status().problem() {
            return Some(format!("{problem}; `sidecore mirror list` says more"));
        }
        let devices: Vec<_> = self.shared.devices().iter().cloned().collect();
        devices.iter().filter_map(|(_, device)| device.as_ref()).find_map(|it| it.fallback())
    }

    fn loss(&self) -> Option<String> {
        let devices: Vec<_> = self.shared.devices().iter().cloned().collect();
        devices.iter().filter_map(|(_, device)| device.as_ref()).find_map(|it| it.loss())
    }

    /// Not passed on to the legs: their user is the mirror, which goes on. A leg that gave up what
    /// it holds would differ from the others, with writes that were answered.
    fn user_gone(&self) {}
}
