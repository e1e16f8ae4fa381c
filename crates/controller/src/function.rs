//! A virtual function: a whole disk, every access to which goes through its own extent tree (thesis
//! 5.1).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::Sender;

use sidecore_block::{BlockChannel, BlockDevice, Gate, Geometry, Meter, StageAccount};
use sidecore_extent::{FunctionId, TreeRoot};
use sidecore_reactor::CoreContext;

use crate::channel::{FunctionChannel, Stores};
use crate::epochs::Epochs;
use crate::multiplexer::Multiplexer;
use crate::shares::Boards;
use crate::stats::{StatsBook, UnitStats};
use crate::threads::Mail;
use crate::{Controller, FunctionOptions, Limits};

/// State shared by the functions of one volume.
#[derive(Debug)]
pub(crate) struct VolumeState {
    /// The transaction of the last change of the volume's mappings.
    pub(crate) changed: AtomicU64,
    /// The controller's last durable transaction.
    pub(crate) durable: Arc<AtomicU64>,
}

impl VolumeState {
    /// Whether some changes of the mappings are not durable yet.
    #[inline]
    pub(crate) fn is_uncommitted(&self) -> bool {
        self.changed.load(Ordering::Acquire) > self.durable.load(Ordering::Acquire)
    }
}

/// State shared by a function's channels and the hypervisor side.
pub(crate) struct Function {
    pub(crate) id: FunctionId,
    pub(crate) volume_name: String,
    pub(crate) root: Arc<TreeRoot>,
    pub(crate) volume: Arc<VolumeState>,
    pub(crate) geometry: Geometry,
    /// The block size in bytes, as a power of two.
    pub(crate) block_shift: u32,
    pub(crate) weight: u32,
    pub(crate) limits: Limits,
    pub(crate) reads: Gate,
    pub(crate) writes: Gate,
    pub(crate) stats: StatsBook,
    /// The second path to the same blocks: while another program has the host file open, requests
    /// go through its filesystem.
    pub(crate) through: Option<Arc<dyn BlockDevice>>,
    /// The path in use, a [`Path`].
    path: AtomicU8,
}

/// The path to a host file's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// To the device, by the extent tree.
    Direct,
    /// Through the filesystem.
    Through,
    /// Reads and writes wait for the tree to be filled again. A flush still goes through the
    /// filesystem: it has to cover writes that took that path.
    Returning,
}

impl Function {
    pub(crate) fn new(
        id: FunctionId,
        options: &FunctionOptions,
        root: Arc<TreeRoot>,
        volume: Arc<VolumeState>,
        geometry: Geometry,
        block_shift: u32,
    ) -> Self {
        let limits = options.limits;
        Self {
            id,
            volume_name: options.volume.clone(),
            root,
            volume,
            geometry,
            block_shift,
            weight: options.weight,
            limits,
            reads: Gate::new(limits.read_iops, limits.read_bytes_per_s),
            writes: Gate::new(limits.write_iops, limits.write_bytes_per_s),
            stats: StatsBook::default(),
            through: None,
            path: AtomicU8::new(Path::Direct as u8),
        }
    }

    /// Whether requests go through the filesystem.
    #[inline]
    pub(crate) fn goes_through(&self) -> bool {
        self.path.load(Ordering::Acquire) == Path::Through as u8
    }

    /// Whether flushes go through the filesystem.
    pub(crate) fn flushes_through(&self) -> bool {
        self.path.load(Ordering::Acquire) != Path::Direct as u8
    }

    /// Sets the path; true if it has changed.
    pub(crate) fn set_path(&self, path: Path) -> bool {
        self.path.swap(path as u8, Ordering::AcqRel) != path as u8
    }

    /// Whether the function has no rate limits.
    #[inline]
    pub(crate) fn is_unlimited(&self) -> bool {
        self.reads.is_open() && self.writes.is_open()
    }
}

/// The controller's resources for its channels.
#[derive(Clone)]
pub(crate) struct Ports {
    /// Distinguishes the controllers that a sidecore has multiplexers of.
    pub(crate) controller: u64,
    pub(crate) store: Arc<dyn BlockDevice>,
    pub(crate) memory: Arc<sidecore_extent::NodeMemory>,
    pub(crate) btlb_entries: usize,
    pub(crate) epochs: Arc<Epochs>,
    /// The counters of the sidecores' translation units.
    pub(crate) units: Arc<UnitStats>,
    /// The sidecores' published demands for shares of the store.
    pub(crate) boards: Arc<Boards>,
    pub(crate) to_hypervisor: Sender<Mail>,
    /// Why writes completed by an earlier process may be missing, if so.
    pub(crate) loss: Option<Arc<str>>,
}

/// A function's place in its controller: freed when the last front end and the last queue of the
/// function are gone.
pub(crate) struct Opening {
    controller: Arc<Controller>,
    id: FunctionId,
}

impl Opening {
    pub(crate) fn new(controller: Arc<Controller>, id: FunctionId) -> Arc<Self> {
        Arc::new(Self { controller, id })
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.controller.close_function(self.id);
    }
}

/// A virtual function as a front end uses it. The function, and each of its queues, keeps its
/// controller running.
pub struct VirtualFunction {
    pub(crate) function: Arc<Function>,
    pub(crate) ports: Ports,
    /// `None` for a host file, which has no controller of volumes.
    pub(crate) opening: Option<Arc<Opening>>,
}

impl VirtualFunction {
    /// The function's number: the physical function is 0.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.function.id.0
    }

    /// The volume's name.
    #[must_use]
    pub fn volume(&self) -> &str {
        &self.function.volume_name
    }
}

impl BlockDevice for VirtualFunction {
    fn geometry(&self) -> Geometry {
        let capacity_bytes = self.function.root.blocks().checked_shl(self.function.block_shift);
        Geometry { capacity_bytes: capacity_bytes.unwrap_or(0), ..self.function.geometry }
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let multiplexer = Multiplexer::of_core(core, &self.ports);
        let below = depth.saturating_add(Multiplexer::PARTS);
        let physical = self.ports.store.open_channel(core, below)?;
        let through = self
            .function
            .through
            .as_ref()
            .map(|file| file.open_channel(core, below))
            .transpose()?;
        let stores = Stores { physical, through };
        let users = (Arc::clone(&self.function), self.opening.clone());
        let channel = FunctionChannel::new(users, &self.ports, multiplexer, stores, depth)?;
        Ok(Box::new(channel))
    }

    fn loss(&self) -> Option<String> {
        self.ports.loss.as_deref().map(str::to_owned)
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        self.ports.store.meters()
    }

    fn stages(&self) -> Vec<Arc<StageAccount>> {
        self.ports.store.stages()
    }
}
