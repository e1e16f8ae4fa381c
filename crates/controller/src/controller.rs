//! The controller: it owns one physical store.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use sidecore_block::{BlockDevice, Geometry};
use sidecore_extent::{Content, ExtentTree, FunctionId, NODE_BYTES, Node, NodeMemory};
use sidecore_telemetry::CounterSet;
use sidecore_volume::{Disk, OpenOptions, Recovery, VolumeId, Volumes};

use crate::dedup::Jobs;
use crate::function::{Function, Opening, Ports, VirtualFunction, VolumeState};
use crate::hypervisor::{Hypervisor, OpenVolume, State};
use crate::physical::PhysicalDisk;
use crate::threads::{Inbox, Mail, Threads};
use crate::usage::LastUsage;
use crate::{
    Answered, ControllerError, ControllerOptions, ControllerReport, FUNCTIONS_MAX, FunctionOptions,
    FunctionReport, Health, Limits, WEIGHT_MAX,
};

/// Pins a chunk of the trees' memory.
pub type PinNodes = Box<dyn Fn(&[Node]) + Send + Sync>;

/// The least memory for extent trees: some thousand extents, over all volumes.
const NODES_MIN: usize = 256;

static NEXT_CONTROLLER: AtomicU64 = AtomicU64::new(0);

/// A number that is unique among the controllers of this process.
pub(crate) fn next_controller() -> u64 {
    NEXT_CONTROLLER.fetch_add(1, Ordering::Relaxed)
}

/// A physical store, divided into virtual functions (thesis 5).
pub struct Controller {
    pub(crate) hypervisor: Arc<Hypervisor>,
    ports: Ports,
    block_shift: u32,
    pub(crate) last_usage: LastUsage,
    pub(crate) dedup_jobs: Jobs,
    mail: Sender<Mail>,
    running: Mutex<Running>,
    myself: Weak<Self>,
}

#[derive(Default)]
struct Running {
    threads: Threads,
    /// Without threads, [`Controller::step`] takes messages from here.
    inbox: Option<Inbox>,
    down: bool,
}

impl Controller {
    /// Opens the volumes on `store` and starts the threads that serve misses.
    ///
    /// # Errors
    /// The store is blank (and may not be formatted), foreign, damaged beyond use, or does not
    /// suit.
    pub fn open(
        name: &str,
        store: Arc<dyn BlockDevice>,
        options: &ControllerOptions,
        pin: Option<PinNodes>,
    ) -> Result<Arc<Self>, ControllerError> {
        let mut disk = PhysicalDisk::open(&store)?;
        let controller = Self::without_threads(name, store, options, pin, &mut disk)?;
        let mut running = controller.running();
        if let Some(inbox) = running.inbox.take() {
            let (hypervisor, store) = (&controller.hypervisor, &controller.ports.store);
            hypervisor.back_reserve(&mut disk);
            hypervisor.note_fullness();
            running.threads = Threads::start(hypervisor, inbox, store, options.commit_interval)?;
        }
        drop(running);
        Ok(controller)
    }

    /// Opens a controller without threads: [`step`](Self::step) does the work of the hypervisor
    /// side. For simulations, where `disk` is another way to `store`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn without_threads(
        name: &str,
        store: Arc<dyn BlockDevice>,
        options: &ControllerOptions,
        pin: Option<PinNodes>,
        disk: &mut dyn Disk,
    ) -> Result<Arc<Self>, ControllerError> {
        let min_bytes = NODES_MIN.saturating_mul(NODE_BYTES) as u64;
        if options.tree_memory_bytes < min_bytes {
            return Err(ControllerError::TreeMemory {
                bytes: options.tree_memory_bytes,
                min_bytes,
            });
        }
        let (volumes, recovery) = open_volumes(options, disk)?;
        let block_bytes = volumes.block_bytes();
        if store.geometry().block_bytes > block_bytes {
            return Err(ControllerError::Store("its own blocks are larger than the controller's"));
        }
        log_opened(name, &volumes, &recovery);
        let nodes = usize::try_from(options.tree_memory_bytes).unwrap_or(usize::MAX) / NODE_BYTES;
        let memory = match pin {
            Some(pin) => NodeMemory::with_pin(nodes, pin),
            None => NodeMemory::new(nodes),
        };
        let when_durable = matches!(options.answered, Answered::WhenDurable(_));
        let hypervisor = Arc::new(Hypervisor::new(
            name,
            volumes,
            memory,
            when_durable,
            options.warn_used_percent,
            options.ownership.clone(),
        ));
        if let Some(loss) = &recovery.loss {
            hypervisor
                .events
                .note(name, format!("writes that were answered to guests may be missing: {loss}"));
        }
        let (mail, messages) = mpsc::channel();
        let ports = Ports {
            controller: next_controller(),
            store,
            memory: Arc::clone(&hypervisor.memory),
            btlb_entries: options.btlb_entries,
            epochs: Arc::clone(&hypervisor.epochs),
            units: Arc::default(),
            boards: Arc::default(),
            to_hypervisor: mail.clone(),
            loss: recovery.loss.map(Arc::from),
        };
        let running = Running { inbox: Some(Inbox::new(messages)), ..Running::default() };
        Ok(Arc::new_cyclic(|myself| Self {
            hypervisor,
            ports,
            block_shift: block_bytes.trailing_zeros(),
            last_usage: LastUsage::default(),
            dedup_jobs: Jobs::default(),
            mail,
            running: Mutex::new(running),
            myself: Weak::clone(myself),
        }))
    }

    fn running(&self) -> std::sync::MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The controller's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.hypervisor.name
    }

    /// The granularity of extents, in bytes.
    #[must_use]
    pub fn block_bytes(&self) -> u32 {
        1_u32.checked_shl(self.block_shift).unwrap_or(0)
    }

    /// The physical function as a disk: the whole store, untranslated (thesis 5.1). It bypasses the
    /// translation, so that no stalled function delays it (6.3). Its user can read and destroy the
    /// data of all volumes.
    #[must_use]
    pub fn physical_function(&self) -> Arc<dyn BlockDevice> {
        Arc::clone(&self.ports.store)
    }

    pub(crate) fn store(&self) -> &Arc<dyn BlockDevice> {
        &self.ports.store
    }

    pub(crate) fn is_down(&self) -> bool {
        self.running().down
    }

    /// Does this unless the controller was shut down; a shutdown waits for it.
    pub(crate) fn unless_down<T>(
        &self,
        act: impl FnOnce() -> Result<T, ControllerError>,
    ) -> Result<T, ControllerError> {
        let running = self.running();
        if running.down { Err(ControllerError::Down) } else { act() }
    }

    /// Opens a virtual function that exposes a volume as a disk.
    ///
    /// # Errors
    /// The volume does not exist, is damaged or not durable yet; all functions are taken; or an
    /// option is out of its range.
    pub fn open_function(
        &self,
        options: &FunctionOptions,
    ) -> Result<Arc<VirtualFunction>, ControllerError> {
        check(options)?;
        if self.running().down {
            return Err(ControllerError::Down);
        }
        let mut state = self.hypervisor.state();
        let state = &mut *state;
        let volume = state.volumes.find(&options.volume);
        let volume = volume.ok_or_else(|| ControllerError::NoSuchVolume(options.volume.clone()))?;
        let volume_id = volume.id;
        if !state.volumes.is_made(volume_id) {
            return Err(ControllerError::NotMade(options.volume.clone()));
        }
        let read_only = options.read_only || !state.volumes.takes_writes(volume_id);
        let is_frozen = state.volumes.is_frozen();
        if volume.state == sidecore_volume::VolumeState::Damaged {
            let what =
                state.volumes.read_only().unwrap_or("its metadata cannot be trusted").to_owned();
            return Err(ControllerError::Damaged { volume: options.volume.clone(), what });
        }
        let id = (1_u32..).take(FUNCTIONS_MAX).find(|id| !state.functions.contains_key(id));
        let id = FunctionId(id.ok_or(ControllerError::NoFunction)?);
        let blocks = state.served_blocks(volume_id);
        let open = self.open_volume(state, volume_id, blocks)?;
        let geometry = self.function_geometry(read_only);
        let geometry = Geometry { discard: geometry.discard && !is_frozen, ..geometry };
        let function = Arc::new(Function::new(
            id,
            options,
            open.tree.root(),
            Arc::clone(&open.state),
            geometry,
            self.block_shift,
        ));
        open.functions.push(id);
        state.functions.insert(id.0, (volume_id, Arc::clone(&function)));
        let controller = self.myself.upgrade().ok_or(ControllerError::Down)?;
        let opening = Some(Opening::new(controller, id));
        Ok(Arc::new(VirtualFunction { function, ports: self.ports.clone(), opening }))
    }

    /// The volume's tree. The first function to open makes it with all its mappings pruned: they
    /// are read from the metadata as requests need them.
    fn open_volume<'a>(
        &self,
        state: &'a mut State,
        id: VolumeId,
        blocks: u64,
    ) -> Result<&'a mut OpenVolume, ControllerError> {
        if !state.open.contains_key(&id) {
            let out_of_nodes =
                || ControllerError::Store("no memory is left for extent trees: raise tree_memory");
            let new =
                || ExtentTree::new(Arc::clone(&self.hypervisor.memory), blocks, Content::Pruned);
            let tree = new().or_else(|_| {
                self.hypervisor.make_room(state);
                new().map_err(|_| out_of_nodes())
            })?;
            let durable = Arc::clone(&self.hypervisor.durable);
            // Changes from before the volume was opened may not be durable yet.
            let volume =
                Arc::new(VolumeState { changed: AtomicU64::new(state.transaction), durable });
            let open = OpenVolume {
                tree,
                state: volume,
                functions: Vec::new(),
                grants: state.lock_withheld(id),
                shared_at: 0,
                blocked: Vec::new(),
            };
            state.open.insert(id, open);
        }
        state.open.get_mut(&id).ok_or(ControllerError::Down)
    }

    fn function_geometry(&self, read_only: bool) -> Geometry {
        let store = self.ports.store.geometry();
        Geometry {
            // Filled in by [`VirtualFunction`] on each call: volumes grow.
            capacity_bytes: 0,
            block_bytes: store.block_bytes,
            physical_block_bytes: store.physical_block_bytes.max(self.block_bytes()),
            read_only: read_only || store.read_only,
            // Mappings of fresh blocks are durable only after a flush, also on a store without a
            // cache.
            volatile_cache: true,
            discard: !read_only,
            // A discard unmaps the blocks.
            discard_zeroes: !read_only,
            write_zeroes: !read_only && store.write_zeroes,
        }
    }

    /// Frees a function's number, and the volume's tree after its last function.
    pub(crate) fn close_function(&self, id: FunctionId) {
        let mut state = self.hypervisor.state();
        let state = &mut *state;
        let Some((volume_id, _)) = state.functions.remove(&id.0) else { return };
        let Some(open) = state.open.get_mut(&volume_id) else { return };
        open.functions.retain(|function| *function != id);
        if !open.functions.is_empty() {
            return;
        }
        if let Some(mut open) = state.open.remove(&volume_id) {
            for grant in open.grants.take_all() {
                state.volumes.release(grant);
            }
            state.limbo.retire(open.tree.dismantle(), &self.hypervisor.epochs);
        }
        let gone = |message: &crate::mail::Message| message.function != id;
        state.for_space.retain(gone);
        state.for_epoch.retain(gone);
    }

    /// Answers one question, if there is one, else reclaims blocks and retries: the work of the
    /// hypervisor side for a controller [without threads](Self::without_threads).
    pub fn step(&self, disk: &mut dyn Disk) -> bool {
        let message = self.running().inbox.as_mut().and_then(Inbox::try_next);
        match message {
            Some(message) => {
                self.hypervisor.serve(message, disk);
                true
            }
            None => {
                let _ = self.hypervisor.reuse_blocks(disk);
                self.hypervisor.retry_after_epoch(disk);
                false
            }
        }
    }

    /// Whether a request waits for a commit: for a controller [without
    /// threads](Self::without_threads).
    #[must_use]
    pub fn wants_commit(&self) -> bool {
        use crate::hypervisor::NextCommit;
        self.hypervisor.commits.wait(Duration::MAX, Some(Duration::ZERO)) == NextCommit::Now
    }

    /// Commits on the calling thread: for a controller [without threads](Self::without_threads).
    ///
    /// # Errors
    /// The store's write or flush error.
    pub fn commit_on(&self, disk: &mut dyn Disk) -> std::io::Result<()> {
        self.hypervisor.commit(disk)?;
        self.hypervisor.back_reserve(disk);
        self.hypervisor.reuse_blocks(disk)?;
        Ok(())
    }

    /// The UUID that formatting gave to the store.
    #[must_use]
    pub fn store_uuid(&self) -> [u8; 16] {
        self.hypervisor.state().volumes.uuid()
    }

    /// Adds an event for the operator, who reads it in the report and in the log.
    pub fn note(&self, what: String) {
        self.hypervisor.events.note(self.name(), what);
    }

    /// The controller's state and counters at this moment.
    #[must_use]
    pub fn report(&self) -> ControllerReport {
        let state = self.hypervisor.state();
        let functions = state.functions.values().map(|(volume, function)| {
            let (book, tree) =
                (&function.stats, state.open.get(volume).map(|open| open.tree.shape()));
            let (stats, channels) = book.total();
            FunctionReport {
                id: function.id.0,
                volume: state.name_of(*volume),
                weight: function.weight,
                limits: function.limits,
                read_only: function.geometry.read_only,
                tree: tree.unwrap_or_default(),
                channels,
                stats,
                miss_address: book.miss_address.load(Ordering::Relaxed),
                miss_size: book.miss_size.load(Ordering::Relaxed),
            }
        });
        let memory = &self.hypervisor.memory;
        ControllerReport {
            name: self.name().to_owned(),
            label: state.volumes.label().to_owned(),
            store: self.ports.store.geometry(),
            block_bytes: self.block_bytes(),
            space: state.volumes.space(),
            read_only: state.volumes.read_only().map(str::to_owned),
            full: state.volumes.disk_is_full().map(str::to_owned),
            used_percent: self.hypervisor.too_full(&state.volumes),
            is_frozen: state.volumes.is_frozen(),
            damage: state.volumes.damage().to_vec(),
            functions: functions.collect(),
            translation: self.ports.units.total(),
            tree_bytes: memory.used_nodes().saturating_mul(NODE_BYTES) as u64,
            tree_bytes_max: memory.max_nodes().saturating_mul(NODE_BYTES) as u64,
            counts: self.hypervisor.stats.counts(),
            events: self.hypervisor.events.list(),
        }
    }

    /// The conditions that restrict the controller, also for a function of this volume.
    #[must_use]
    pub fn health(&self, volume: Option<&str>) -> Health {
        let state = self.hypervisor.state();
        let volume = volume.and_then(|name| state.volumes.find(name));
        Health {
            read_only: state.volumes.read_only().map(str::to_owned),
            is_frozen: state.volumes.is_frozen(),
            full: state.volumes.disk_is_full().map(str::to_owned),
            used_percent: self.hypervisor.too_full(&state.volumes),
            is_damaged: volume
                .is_some_and(|info| info.state == sidecore_volume::VolumeState::Damaged),
        }
    }

    /// Commits the metadata and ends the threads. Functions still in use then fail the requests
    /// that need the hypervisor side. A second call does nothing.
    pub fn shutdown(&self) {
        let mut threads = {
            let mut running = self.running();
            running.down = true;
            std::mem::take(&mut running.threads)
        };
        // While commits are made that the run may wait for.
        let _ = self.stop_dedup();
        let _ = self.mail.send(Mail::Stop);
        threads.join_servers();
        self.hypervisor.commits.stop();
        threads.join_committer();
        self.hypervisor.state().volumes.discard_log();
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.shutdown();
    }
}

fn check(options: &FunctionOptions) -> Result<(), ControllerError> {
    if !(1..=WEIGHT_MAX).contains(&options.weight) {
        return Err(ControllerError::BadWeight(options.weight));
    }
    let Limits { read_iops, write_iops, read_bytes_per_s, write_bytes_per_s } = options.limits;
    let mut limits =
        [read_iops, write_iops, read_bytes_per_s, write_bytes_per_s].into_iter().flatten();
    if limits.any(|limit| limit.per_s == 0 || limit.burst == 0) {
        return Err(ControllerError::BadLimit);
    }
    Ok(())
}

/// Opens the volumes on a disk, which it formats if that is wanted and the disk is blank, with what
/// the last process answered and did not make durable.
fn open_volumes(
    options: &ControllerOptions,
    disk: &mut dyn Disk,
) -> Result<(Volumes, Recovery), ControllerError> {
    if let Some(format) = &options.format
        && sidecore_volume::probe(disk)? == sidecore_volume::Content::Blank
    {
        sidecore_volume::format(disk, format)?;
    }
    let owner = options.ownership.as_ref().map(|ownership| ownership.owner);
    let mut volumes = Volumes::open_with(disk, &OpenOptions { owner, ..OpenOptions::default() })?;
    let recovery = match &options.answered {
        Answered::InLog(memory, place) => volumes.recover(disk, Arc::clone(memory), place),
        Answered::WhenDurable(boot) => volumes.recover_without_log(boot),
        Answered::WithTheStore => Recovery::default(),
    };
    volumes.announce_owner(disk)?;
    Ok((volumes, recovery))
}

fn log_opened(controller: &str, volumes: &Volumes, recovery: &Recovery) {
    for damage in volumes.damage() {
        tracing::error!(controller, "damaged metadata: {damage}");
    }
    for volume in volumes.list().filter(|info| info.state == sidecore_volume::VolumeState::Damaged)
    {
        tracing::error!(controller, volume = volume.name, "the volume is damaged and not served");
    }
    if recovery.replayed > 0 {
        tracing::info!(
            controller,
            changes = recovery.replayed,
            "the log of the last process was replayed"
        );
    }
}
