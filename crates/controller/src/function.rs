//! A virtual function: a whole disk, every access to which goes through its own
//! extent tree (thesis 5.1).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::Sender;

use sidecore_block::{BlockChannel, BlockDevice, Geometry};
use sidecore_extent::{FunctionId, TreeRoot};
use sidecore_reactor::CoreContext;

use crate::channel::{FunctionChannel, Stores};
use crate::grace::Epochs;
use crate::limits::Gate;
use crate::multiplexer::Multiplexer;
use crate::shares::Boards;
use crate::stats::{StatsBook, UnitStats};
use crate::threads::Mail;
use crate::{Controller, FunctionOptions, Limits};

/// What the functions of one volume share.
#[derive(Debug)]
pub(crate) struct VolumeState {
    /// The transaction that the volume's mappings were last changed in.
    pub(crate) changed: AtomicU64,
    /// The last transaction that is durable: the controller's.
    pub(crate) durable: Arc<AtomicU64>,
}

impl VolumeState {
    /// Whether mappings were changed that are not durable yet.
    #[inline]
    pub(crate) fn is_uncommitted(&self) -> bool {
        self.changed.load(Ordering::Acquire) > self.durable.load(Ordering::Acquire)
    }
}

/// What a function's channels and the hypervisor side share.
pub(crate) struct Function {
    pub(crate) id: FunctionId,
    pub(crate) volume_name: String,
    pub(crate) root: Arc<TreeRoot>,
    pub(crate) volume: Arc<VolumeState>,
    pub(crate) geometry: Geometry,
    /// Bytes in a block, as a power of two.
    pub(crate) block_shift: u32,
    pub(crate) weight: u32,
    pub(crate) limits: Limits,
    pub(crate) reads: Gate,
    pub(crate) writes: Gate,
    pub(crate) stats: StatsBook,
    /// The other way to the same blocks: a host file that another program has opened is
    /// reached through its filesystem.
    pub(crate) through: Option<Arc<dyn BlockDevice>>,
    /// Which way is taken, a [`Path`].
    path: AtomicU8,
}

/// The way to a host file's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// By the tree, to the device.
    Direct,
    /// Through the filesystem.
    Through,
    /// Reads and writes wait for the tree to be filled again. A flush still goes through the
    /// filesystem: it has to cover writes that went that way.
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

    /// Whether its blocks are to be reached through the filesystem.
    #[inline]
    pub(crate) fn goes_through(&self) -> bool {
        self.path.load(Ordering::Acquire) == Path::Through as u8
    }

    /// Whether a flush has to go through the filesystem.
    pub(crate) fn flushes_through(&self) -> bool {
        self.path.load(Ordering::Acquire) != Path::Direct as u8
    }

    /// Sets the way to its blocks; true if it was another one.
    pub(crate) fn set_path(&self, path: Path) -> bool {
        self.path.swap(path as u8, Ordering::AcqRel) != path as u8
    }

    /// Whether nothing limits it.
    #[inline]
    pub(crate) fn is_unlimited(&self) -> bool {
        self.reads.is_open() && self.writes.is_open()
    }
}

/// What a channel needs of its controller.
#[derive(Clone)]
pub(crate) struct Ports {
    /// Tells the sidecores' multiplexers of one controller from another's.
    pub(crate) controller: u64,
    pub(crate) store: Arc<dyn BlockDevice>,
    pub(crate) memory: Arc<sidecore_extent::NodeMemory>,
    pub(crate) btlb_entries: usize,
    pub(crate) epochs: Arc<Epochs>,
    /// The counters of the sidecores' translation units.
    pub(crate) units: Arc<UnitStats>,
    /// What the sidecores tell each other about shares of the store.
    pub(crate) boards: Arc<Boards>,
    pub(crate) to_hypervisor: Sender<Mail>,
    /// Why writes that were answered by an earlier process may be missing, if so.
    pub(crate) loss: Option<Arc<str>>,
}

/// A function's place in its controller: given back when nobody uses the function
/// any more, neither a front end nor a queue.
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

/// A virtual function as a front end sees it. It, and each queue of it, keeps its
/// controller running.
pub struct VirtualFunction {
    pub(crate) function: Arc<Function>,
    pub(crate) ports: Ports,
    /// `None` for a host file, which is its own controller.
    pub(crate) opening: Option<Arc<Opening>>,
}

impl VirtualFunction {
    /// Its number: the physical function is 0.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.function.id.0
    }

    /// The volume that it shows.
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
        let through = self.function.through.as_ref().map(|file| file.open_channel(core, below)).transpose()?;
        let stores = Stores { physical, through };
        let users = (Arc::clone(&self.function), self.opening.clone());
        let channel = FunctionChannel::new(users, &self.ports, multiplexer, stores, depth)?;
        Ok(Box::new(channel))
    }

    fn loss(&self) -> Option<String> {
        self.ports.loss.as_deref().map(str::to_owned)
    }
}
