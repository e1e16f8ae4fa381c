//! A file on the host's own filesystem as a virtual function (thesis 5.2: "the same
//! mappings used by the filesystem to map file offsets to disk blocks, is used by
//! NeSC"): its blocks are reached directly for as long as nobody else opens it, and
//! through the filesystem from then on.
//!
//! The hypervisor side here is the host's filesystem: a miss asks it for the mapping,
//! or has it allocate.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use sidecore_block::{BlockChannel, BlockDevice, BlockError, Geometry};
use sidecore_extent::{BlockRange, Content, Extent, ExtentTree, FunctionId, NodeMemory, Retired};
use sidecore_reactor::EventFd;
use sidecore_units::CoreId;

use crate::controller::next_controller;
use crate::function::{Function, Ports, VirtualFunction, VolumeState};
use crate::grace::{Epoch, Epochs};
use crate::mail::{Answer, Message, Question};
use crate::threads::Mail;
use crate::{ControllerError, FunctionOptions};

/// A file that the host's filesystem maps to a block device. All ranges and extents
/// are in blocks of [`block_bytes`](Self::block_bytes).
pub trait HostMap: Send + Sync {
    /// The file's size in bytes, a multiple of `block_bytes`.
    fn size_bytes(&self) -> u64;

    /// The filesystem's block size in bytes, a power of two.
    fn block_bytes(&self) -> u32;

    /// Appends what is mapped in `range`, in order; none of it shared.
    ///
    /// # Errors
    /// It must not, or not any more, be reached directly.
    fn extents(&self, range: BlockRange, extents: &mut Vec<Extent>) -> io::Result<()>;

    /// Makes all of `range` mapped; blocks that were not hold zeros then.
    ///
    /// # Errors
    /// There is no space, or the filesystem fails.
    fn allocate(&self, range: BlockRange) -> io::Result<()>;

    /// Gives blocks back to the filesystem. Nothing goes to them directly any more.
    ///
    /// # Errors
    /// The filesystem's.
    fn punch(&self, range: BlockRange) -> io::Result<()>;

    /// Readable when another program wants the file.
    fn wanted(&self) -> BorrowedFd<'_>;

    /// Lets the other program have it. Nothing goes to the blocks directly any more.
    ///
    /// # Errors
    /// What was written directly could not be made durable.
    fn release(&self) -> io::Result<()>;

    /// The block device below, whole.
    fn device(&self) -> Arc<dyn BlockDevice>;

    /// The file through its filesystem.
    fn file(&self) -> Arc<dyn BlockDevice>;
}

/// How long a grace period is slept through at a time.
const GRACE_NAP: Duration = Duration::from_micros(50);

/// Blocks that are looked up for one miss.
const LOOKUP_BLOCKS: u64 = 64 << 10;

/// The most nodes that its tree may have: half a million extents. Beyond that, it is
/// pruned.
const TREE_NODES: usize = 4096;

/// The function's number: it is the only one of its controller.
const ONLY: FunctionId = FunctionId(1);

/// A host file as a disk. Dropping it ends the direct path.
pub struct HostFunction {
    function: VirtualFunction,
    shared: Arc<Shared>,
    stop: Arc<EventFd>,
    mail: Sender<Mail>,
    threads: Vec<JoinHandle<()>>,
}

/// What its threads share.
struct Shared {
    map: Box<dyn HostMap>,
    name: String,
    function: Arc<Function>,
    memory: Arc<NodeMemory>,
    epochs: Arc<Epochs>,
    tree: Mutex<Tree>,
}

struct Tree {
    tree: ExtentTree,
    retired: Vec<(Epoch, Retired)>,
}

impl HostFunction {
    /// Serves the file that `map` maps, named `name` in messages.
    ///
    /// # Errors
    /// There is no memory for its tree, or no threads.
    pub fn open(name: &str, map: Box<dyn HostMap>, read_only: bool) -> Result<Self, ControllerError> {
        let block_shift = map.block_bytes().trailing_zeros();
        let blocks = map.size_bytes().checked_shr(block_shift).unwrap_or(0);
        let memory = Arc::new(NodeMemory::new(TREE_NODES));
        let tree = ExtentTree::new(Arc::clone(&memory), blocks, Content::Pruned)
            .map_err(|_| ControllerError::Store("no memory for its extent tree"))?;
        let epochs = Arc::new(Epochs::new());
        let (mail, messages) = mpsc::channel();
        let (device, file) = (map.device(), map.file());
        let below = file.geometry();
        let geometry = Geometry {
            physical_block_bytes: below.physical_block_bytes.max(map.block_bytes()),
            block_bytes: below.block_bytes.max(device.geometry().block_bytes),
            read_only: read_only || below.read_only,
            volatile_cache: true,
            discard: !read_only,
            write_zeroes: !read_only,
            ..below
        };
        // What is mapped is durable when it is mapped: no flush waits for us.
        let volume = VolumeState { changed: AtomicU64::new(0), durable: Arc::default() };
        let options = FunctionOptions::new(name);
        let mut function = Function::new(ONLY, &options, tree.root(), Arc::new(volume), geometry, block_shift);
        function.through = Some(file);
        let function = Arc::new(function);
        let ports = Ports {
            controller: next_controller(),
            store: device,
            memory: Arc::clone(&memory),
            btlb_entries: sidecore_extent::DEFAULT_BTLB_ENTRIES,
            epochs: Arc::clone(&epochs),
            units: Arc::default(),
            to_hypervisor: mail.clone(),
        };
        let shared = Arc::new(Shared {
            map,
            name: name.to_owned(),
            function: Arc::clone(&function),
            memory,
            epochs,
            tree: Mutex::new(Tree { tree, retired: Vec::new() }),
        });
        let stop = Arc::new(EventFd::new()?);
        let mut served = Self {
            function: VirtualFunction { function, ports, opening: None },
            shared: Arc::clone(&shared),
            stop: Arc::clone(&stop),
            mail,
            threads: Vec::new(),
        };
        let misses = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("host-miss".to_owned());
        served.threads.push(thread.spawn(move || misses.serve(&messages))?);
        let thread = std::thread::Builder::new().name("host-lease".to_owned());
        served.threads.push(thread.spawn(move || shared.watch(&stop))?);
        Ok(served)
    }

    /// Whether it is reached directly still.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        !self.shared.function.goes_through()
    }
}

impl BlockDevice for HostFunction {
    fn geometry(&self) -> Geometry {
        self.function.geometry()
    }

    fn open_channel(&self, core: Option<CoreId>, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        self.function.open_channel(core, depth)
    }
}

impl Drop for HostFunction {
    fn drop(&mut self) {
        let _ = self.mail.send(Mail::Stop);
        self.stop.signal();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!(file = self.shared.name, "a thread of the host file has panicked");
            }
        }
        self.shared.leave_the_direct_path("it is not served any more");
    }
}

impl Shared {
    fn tree(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, messages: &Receiver<Mail>) {
        while let Ok(Mail::Message(message)) = messages.recv() {
            self.answer(message);
        }
    }

    fn answer(&self, message: Message) {
        let answer = match message.question {
            Question::FlushFailed => return,
            _ if self.function.goes_through() => Answer::Rewalk,
            Question::Regenerate { range } => self.show(range),
            Question::Allocate { range, .. } => match self.map.allocate(range) {
                Ok(()) => self.show(range),
                Err(error) => self.refuse(&error),
            },
            Question::Unmap { range } => self.unmap(range),
            Question::Written { .. } | Question::Commit => Answer::Done,
            Question::Retry => Answer::Rewalk,
        };
        message.reply_to.reply(answer);
    }

    /// Reads the mapping of `range`, or of its first part, and shows it.
    fn show(&self, range: BlockRange) -> Answer {
        let (range, _) = range.split(LOOKUP_BLOCKS);
        let mut extents = Vec::new();
        if let Err(error) = self.map.extents(range, &mut extents) {
            self.leave_the_direct_path(&error.to_string());
            return Answer::Rewalk;
        }
        if self.set(range, &extents) {
            return Answer::Rewalk;
        }
        // The trees' memory is too small for this file: it starts anew.
        self.forget_all();
        if self.set(range, &extents) { Answer::Rewalk } else { Answer::Failed(BlockError::EIO) }
    }

    fn set(&self, range: BlockRange, extents: &[Extent]) -> bool {
        let mut tree = self.tree();
        let is_set = tree.tree.set(range, extents).is_ok();
        self.collect(&mut tree);
        is_set
    }

    /// Retires what was replaced, and frees what nobody walks any more.
    fn collect(&self, tree: &mut Tree) {
        let retired = tree.tree.take_retired();
        if !retired.is_empty() {
            tree.retired.push((self.epochs.advance(), retired));
        }
        let mut waiting = Vec::new();
        for (epoch, retired) in tree.retired.drain(..) {
            if self.epochs.passed(epoch) {
                self.memory.free(retired);
            } else {
                waiting.push((epoch, retired));
            }
        }
        tree.retired = waiting;
    }

    fn forget_all(&self) {
        let mut tree = self.tree();
        tree.tree.prune_all();
        self.collect(&mut tree);
        drop(tree);
        self.quiesce();
        self.collect(&mut self.tree());
    }

    /// Waits until all I/O has ended that started before.
    fn quiesce(&self) {
        let epoch = self.epochs.advance();
        while !self.epochs.passed(epoch) {
            std::thread::sleep(GRACE_NAP);
        }
    }

    /// Gives blocks back: nothing may go to them directly when the filesystem gives
    /// them to another file. Misses are not served meanwhile, so nobody maps them
    /// again.
    fn unmap(&self, range: BlockRange) -> Answer {
        if !self.set(range, &[]) {
            self.forget_all();
        }
        self.quiesce();
        match self.map.punch(range) {
            Ok(()) => Answer::Done,
            Err(error) => self.refuse(&error),
        }
    }

    fn refuse(&self, error: &io::Error) -> Answer {
        tracing::warn!(file = self.name, "a request failed: {error}");
        Answer::Failed(match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => BlockError::NoSpace,
            _ => error.raw_os_error().map_or(BlockError::EIO, |errno| BlockError::Io { errno }),
        })
    }

    /// Waits for another program to want the file.
    fn watch(&self, stop: &EventFd) {
        loop {
            let wanted = self.map.wanted();
            let mut fds = [PollFd::new(&wanted, PollFlags::IN), PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN)];
            match rustix::event::poll(&mut fds, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => {
                    tracing::error!(file = self.name, "cannot watch the lease: {error}");
                    return self.leave_the_direct_path("its lease cannot be watched");
                }
            }
            let [lease, stopped] = fds.map(|fd| !fd.revents().is_empty());
            if lease {
                return self.leave_the_direct_path("another program opens it");
            }
            if stopped {
                return;
            }
        }
    }

    /// From now on everything goes through the filesystem. Returns when nothing goes
    /// to the blocks directly any more, and the lease is given up.
    fn leave_the_direct_path(&self, why: &str) {
        if self.function.is_through.swap(true, Ordering::AcqRel) {
            return;
        }
        {
            // After the flag: whoever finds no mapping any more sees that.
            let mut tree = self.tree();
            tree.tree.prune_all();
            self.collect(&mut tree);
        }
        self.quiesce();
        tracing::warn!(file = self.name, "it is reached through its filesystem from now on: {why}");
        if let Err(error) = self.map.release() {
            tracing::error!(file = self.name, "the lease could not be released in order: {error}");
        }
    }
}
