//! A file on the host's own filesystem as a virtual function (thesis 5.2: "the same mappings used
//! by the filesystem to map file offsets to disk blocks, is used by NeSC"): requests go directly to
//! its blocks while no other program has it open, and through the filesystem otherwise.
//!
//! The host's filesystem is the hypervisor side here: a miss asks it for the mapping, or for an
//! allocation.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use sidecore_block::{BlockChannel, BlockDevice, BlockError, Geometry};
use sidecore_extent::{BlockRange, Content, Extent, ExtentTree, FunctionId, NodeMemory, Retired};
use sidecore_reactor::{CoreContext, EventFd};

use crate::controller::next_controller;
use crate::epochs::{Epoch, Epochs};
use crate::function::{Function, Path, Ports, VirtualFunction, VolumeState};
use crate::mail::{Answer, Message, Question};
use crate::threads::Mail;
use crate::{ControllerError, FunctionOptions};

/// A file that the host's filesystem maps to a block device. All ranges and extents are in blocks
/// of [`block_bytes`](Self::block_bytes).
pub trait HostMap: Send + Sync {
    /// The file's size in bytes, a multiple of `block_bytes`.
    fn size_bytes(&self) -> u64;

    /// The filesystem's block size in bytes, a power of two.
    fn block_bytes(&self) -> u32;

    /// Appends the extents mapped in `range`, in order; none of them is shared.
    ///
    /// # Errors
    /// [`io::ErrorKind::ResourceBusy`] if another program wants the file, any other if it must not
    /// be reached directly.
    fn extents(&self, range: BlockRange, extents: &mut Vec<Extent>) -> io::Result<()>;

    /// Maps all of `range`; newly mapped blocks read as zeros.
    ///
    /// # Errors
    /// No space is left, or the filesystem fails.
    fn allocate(&self, range: BlockRange) -> io::Result<()>;

    /// Returns blocks to the filesystem. No direct I/O to them may be in flight.
    ///
    /// # Errors
    /// The filesystem's error.
    fn punch(&self, range: BlockRange) -> io::Result<()>;

    /// Readable when another program wants the file.
    fn wanted(&self) -> BorrowedFd<'_>;

    /// Gives up the lease, so that the other program can open the file. No direct I/O to its blocks
    /// may be in flight.
    ///
    /// # Errors
    /// Data written directly could not be made durable.
    fn release(&self) -> io::Result<()>;

    /// Takes the lease again after [`release`](Self::release). Calls `settle` once no other program
    /// can open the file; it returns when no I/O through the filesystem is in flight. Then makes
    /// data written that way durable, and checks that the blocks can be reached directly.
    ///
    /// # Errors
    /// [`io::ErrorKind::ResourceBusy`] while another program has the file. Any other if it must not
    /// be reached directly; it is released then.
    fn retake(&self, settle: &mut dyn FnMut()) -> io::Result<()>;

    /// The whole block device below the filesystem.
    fn device(&self) -> Arc<dyn BlockDevice>;

    /// The file, through its filesystem.
    fn file(&self) -> Arc<dyn BlockDevice>;
}

/// The pause between two checks of an epoch.
const EPOCH_POLL: Duration = Duration::from_micros(50);

/// The number of blocks whose mapping is read for one miss.
const LOOKUP_BLOCKS: u64 = 64 << 10;

/// The most nodes of a tree: half a million extents. A larger tree is pruned.
const TREE_NODES: usize = 4096;

/// The function's number: it is the only one of its controller.
const ONLY: FunctionId = FunctionId(1);

/// The usual reason to leave the direct path.
const WANTED: &str = "another program has opened it";

/// The time from the opening by another program to the first attempt to take the file back.
const RETRY_MIN: Duration = Duration::from_secs(1);

/// The longest pause between two attempts.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// The pauses between attempts to take the file back: each twice the one before. An attempt that
/// fails costs one system call; one that succeeds stops the guest for as long as it takes to write
/// the file's dirty pages, so a file that is opened again and again is taken back ever less often.
#[derive(Debug)]
struct Retry {
    pause: Duration,
}

impl Retry {
    fn new() -> Self {
        Self { pause: RETRY_MIN }
    }

    /// Doubles the pause: another program still has the file open.
    fn is_busy(&mut self) {
        self.pause = self.pause.saturating_mul(2).min(RETRY_MAX);
    }

    /// Sets the longest pause: the file cannot be reached directly, and another attempt would stop
    /// the guest again.
    fn is_unfit(&mut self) {
        self.pause = RETRY_MAX;
    }

    /// Adapts the pause after the direct path was in use for `direct_for`.
    fn left(&mut self, direct_for: Duration) {
        if direct_for > self.pause.saturating_mul(2) { *self = Self::new() } else { self.is_busy() }
    }
}

/// A host file as a disk. Dropping it ends the direct path.
pub struct HostFunction {
    function: VirtualFunction,
    shared: Arc<Shared>,
    mail: Sender<Mail>,
    threads: Vec<JoinHandle<()>>,
}

/// State shared by the threads.
struct Shared {
    map: Box<dyn HostMap>,
    name: String,
    function: Arc<Function>,
    memory: Arc<NodeMemory>,
    epochs: Arc<Epochs>,
    tree: Mutex<Tree>,
    /// Held while a miss is served and while the path to the blocks changes: each sees the other
    /// only complete.
    way: Mutex<()>,
    /// Why requests go through the filesystem, if they do.
    fallback: Mutex<Option<String>>,
    /// Wakes the thread that watches the lease.
    wake: EventFd,
    is_ending: AtomicBool,
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
    pub fn open(
        name: &str,
        map: Box<dyn HostMap>,
        read_only: bool,
    ) -> Result<Self, ControllerError> {
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
        // A mapping is durable as soon as the filesystem reports it: no flush has to wait.
        let volume = VolumeState { changed: AtomicU64::new(0), durable: Arc::default() };
        let options = FunctionOptions::new(name);
        let mut function =
            Function::new(ONLY, &options, tree.root(), Arc::new(volume), geometry, block_shift);
        function.through = Some(file);
        let function = Arc::new(function);
        let ports = Ports {
            controller: next_controller(),
            store: device,
            memory: Arc::clone(&memory),
            btlb_entries: sidecore_extent::DEFAULT_BTLB_ENTRIES,
            epochs: Arc::clone(&epochs),
            units: Arc::default(),
            boards: Arc::default(),
            to_hypervisor: mail.clone(),
            // Completed writes are in the filesystem.
            loss: None,
        };
        let shared = Arc::new(Shared {
            map,
            name: name.to_owned(),
            function: Arc::clone(&function),
            memory,
            epochs,
            tree: Mutex::new(Tree { tree, retired: Vec::new() }),
            way: Mutex::default(),
            fallback: Mutex::default(),
            wake: EventFd::new()?,
            is_ending: AtomicBool::new(false),
        });
        let mut served = Self {
            function: VirtualFunction { function, ports, opening: None },
            shared: Arc::clone(&shared),
            mail,
            threads: Vec::new(),
        };
        let misses = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("host-miss".to_owned());
        served.threads.push(thread.spawn(move || misses.serve(&messages))?);
        let thread = std::thread::Builder::new().name("host-lease".to_owned());
        served.threads.push(thread.spawn(move || shared.watch())?);
        Ok(served)
    }

    /// Whether requests go directly to the blocks.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        !self.shared.function.goes_through()
    }
}

impl BlockDevice for HostFunction {
    fn geometry(&self) -> Geometry {
        self.function.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        self.function.open_channel(core, depth)
    }

    fn fallback(&self) -> Option<String> {
        lock(&self.shared.fallback).clone()
    }
}

impl Drop for HostFunction {
    fn drop(&mut self) {
        let _ = self.mail.send(Mail::Stop);
        self.shared.is_ending.store(true, Ordering::Release);
        self.shared.wake.signal();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!(file = self.shared.name, "a thread of the host file has panicked");
            }
        }
        if self.shared.end_direct_path(&lock(&self.shared.way)) {
            tracing::debug!(
                file = self.shared.name,
                "the file is closed, and its lease is released"
            );
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn tree(&self) -> MutexGuard<'_, Tree> {
        lock(&self.tree)
    }

    fn serve(&self, messages: &Receiver<Mail>) {
        while let Ok(Mail::Message(message)) = messages.recv() {
            self.answer(message);
        }
    }

    fn answer(&self, message: Message) {
        let way = lock(&self.way);
        let answer = match message.question {
            Question::FlushFailed => return,
            // The filesystem frees the blocks itself; a discard that is answered with a rewalk
            // would ask again.
            Question::Unmap { range } => self.unmap(range),
            _ if self.function.goes_through() => Answer::Rewalk,
            Question::Regenerate { range } => self.show(range, &way),
            Question::Allocate { range, .. } => match self.map.allocate(range) {
                Ok(()) => self.show(range, &way),
                Err(error) => self.refuse(&error),
            },
            Question::Written { .. } | Question::Commit => Answer::Done,
            Question::Retry => Answer::Rewalk,
        };
        drop(way);
        message.reply_to.reply(answer);
    }

    /// Reads the mapping of `range`, or of its first part, into the tree.
    fn show(&self, range: BlockRange, way: &MutexGuard<'_, ()>) -> Answer {
        let (range, _) = range.split(LOOKUP_BLOCKS);
        let mut extents = Vec::new();
        if let Err(error) = self.map.extents(range, &mut extents) {
            // A miss may notice the other program before the thread that watches the lease does.
            let is_wanted = error.kind() == io::ErrorKind::ResourceBusy;
            self.leave_direct_path(
                &if is_wanted { WANTED.to_owned() } else { error.to_string() },
                way,
            );
            return Answer::Rewalk;
        }
        if self.set(range, &extents) {
            return Answer::Rewalk;
        }
        // The memory for tree nodes is too small for this file: start with an empty tree.
        self.forget_all();
        if self.set(range, &extents) { Answer::Rewalk } else { Answer::Failed(BlockError::EIO) }
    }

    fn set(&self, range: BlockRange, extents: &[Extent]) -> bool {
        let mut tree = self.tree();
        let is_set = tree.tree.set(range, extents).is_ok();
        self.collect(&mut tree);
        is_set
    }

    /// Retires replaced nodes, and frees those that no channel can walk to.
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

    /// Waits until all I/O that started before has ended.
    fn quiesce(&self) {
        let epoch = self.epochs.advance();
        while !self.epochs.passed(epoch) {
            std::thread::sleep(EPOCH_POLL);
        }
    }

    /// Returns blocks to the filesystem: no direct I/O may reach them once another file has them.
    /// Misses are not served meanwhile, so the blocks are not mapped again.
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

    /// Leaves the direct path when another program wants the file, and returns to the path when the
    /// program has closed the file.
    fn watch(&self) {
        let mut retry = Retry::new();
        let mut direct_since = Instant::now();
        while !self.is_ending.load(Ordering::Acquire) {
            if self.function.goes_through() {
                match self.wait(None, Some(retry.pause)) {
                    Some(Event::TimedOut) => {}
                    Some(Event::Woken | Event::Wanted) => continue,
                    None => return,
                }
                match self.return_to_direct_path() {
                    Ok(()) => direct_since = Instant::now(),
                    Err(error) if error.kind() == io::ErrorKind::ResourceBusy => retry.is_busy(),
                    Err(_) => retry.is_unfit(),
                }
                continue;
            }
            match self.wait(Some(self.map.wanted()), None) {
                Some(Event::Wanted) => self.leave_direct_path(WANTED, &lock(&self.way)),
                Some(Event::Woken | Event::TimedOut) => {}
                None => {
                    return self.leave_direct_path("its lease cannot be watched", &lock(&self.way));
                }
            }
            if self.function.goes_through() {
                retry.left(direct_since.elapsed());
            }
        }
    }

    /// Waits for another program to want the file (if the lease is held), for a wake-up, or for the
    /// time. `None` if polling failed.
    fn wait(&self, wanted: Option<BorrowedFd<'_>>, at_most: Option<Duration>) -> Option<Event> {
        let wake = PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN);
        let lease = PollFd::from_borrowed_fd(wanted.unwrap_or(self.wake.as_fd()), PollFlags::IN);
        let mut fds = [wake, lease];
        let timeout = at_most.and_then(|time| Timespec::try_from(time).ok());
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Some(Event::Woken),
            Err(error) => {
                tracing::error!(file = self.name, "cannot watch the lease: {error}");
                return None;
            }
        }
        let [woken, lease] = fds.map(|fd| !fd.revents().is_empty());
        if woken {
            self.wake.drain();
            return Some(Event::Woken);
        }
        Some(if lease { Event::Wanted } else { Event::TimedOut })
    }

    /// Redirects all requests through the filesystem. Returns when no direct I/O is in flight, and
    /// the lease is given up.
    fn leave_direct_path(&self, why: &str, way: &MutexGuard<'_, ()>) {
        if self.end_direct_path(way) {
            tracing::warn!(file = self.name, "the file is reached through its filesystem: {why}");
            *lock(&self.fallback) =
                Some(format!("\"{}\" is reached through its filesystem: {why}", self.name));
            // The thread that watches the lease has to resume its attempts.
            self.wake.signal();
        }
    }

    /// Leaves the direct path without a message; whether it was in use.
    fn end_direct_path(&self, _way: &MutexGuard<'_, ()>) -> bool {
        if !self.function.set_path(Path::Through) {
            return false;
        }
        // After the flag: a channel that misses in the empty tree then sees the new path.
        self.empty_tree();
        self.quiesce();
        if let Err(error) = self.map.release() {
            tracing::error!(file = self.name, "the lease could not be released in order: {error}");
        }
        true
    }

    fn empty_tree(&self) {
        let mut tree = self.tree();
        tree.tree.prune_all();
        self.collect(&mut tree);
    }

    /// Returns to the direct path. Requests that come meanwhile miss, and wait for `way`.
    fn return_to_direct_path(&self) -> io::Result<()> {
        let _way = lock(&self.way);
        let retaken = self.map.retake(&mut || {
            self.empty_tree();
            self.function.set_path(Path::Returning);
            self.quiesce();
        });
        match &retaken {
            Ok(()) => {
                self.function.set_path(Path::Direct);
                *lock(&self.fallback) = None;
                tracing::info!(file = self.name, "the file is reached directly again");
            }
            Err(error) => {
                self.function.set_path(Path::Through);
                if error.kind() != io::ErrorKind::ResourceBusy {
                    let why =
                        format!("\"{}\" is reached through its filesystem: {error}", self.name);
                    if lock(&self.fallback).replace(why.clone()) != Some(why) {
                        tracing::warn!(
                            file = self.name,
                            "the file cannot be reached directly again: {error}"
                        );
                    }
                }
            }
        }
        retaken
    }
}

/// The event that ended a wait of the thread that watches the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// Another program wants the file.
    Wanted,
    /// The path to the blocks has changed, or the function ends.
    Woken,
    /// The time has passed.
    TimedOut,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_become_rarer_up_to_a_minute_and_frequent_again_after_a_long_while() {
        let mut retry = Retry::new();
        let pauses: Vec<u64> = std::iter::repeat_with(|| {
            let pause = retry.pause.as_secs();
            retry.is_busy();
            pause
        })
        .take(8)
        .collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        retry.left(Duration::from_secs(1));
        assert_eq!(retry.pause, RETRY_MAX, "it is opened again and again");
        retry.left(Duration::from_secs(121));
        assert_eq!(retry.pause, RETRY_MIN);
        retry.left(Duration::from_secs(1));
        assert_eq!(retry.pause, RETRY_MIN * 2);
        retry.is_unfit();
        assert_eq!(retry.pause, RETRY_MAX);
    }
}
