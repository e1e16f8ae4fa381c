//! A FUSE filesystem with one file, whose requests a test can hold and release.
//!
//! A request that the test [holds](SlowDisk::hold) stays in flight in the kernel until the test
//! releases it, also across the death of the process that sent it. That needs no device that delays
//! requests, and no sleep. A write takes effect at its release, not at its arrival, as on a slow
//! disk.
#![forbid(unsafe_code)]

mod protocol;

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

pub use protocol::{Operation, Request};

/// The file's name in the filesystem.
const NAME: &str = "disk";

/// How long a test waits for an event before it fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A mounted filesystem with one file, `disk`. Drop unmounts the filesystem and fails the requests
/// that are still held.
pub struct SlowDisk {
    shared: Arc<Shared>,
    directory: TempDir,
    fuse: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

/// Releases the held requests on drop. Declared after mounts and devices that are on the disk, it
/// is dropped before them and lets them be removed after a failed assertion.
pub struct Releaser<'a>(&'a SlowDisk);

impl Drop for Releaser<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

type Predicate = Box<dyn Fn(&Request) -> bool + Send>;

struct State {
    bytes: Vec<u8>,
    hold: Option<Predicate>,
    held: Vec<Request>,
    /// The arrival of the oldest held request.
    held_since: Option<Instant>,
    ends: bool,
    /// The error of all writes.
    refuses_writes: Option<i32>,
    /// Every request, in the order of effect.
    done: Vec<(Operation, u64)>,
}

impl SlowDisk {
    /// Mounts a file of `len_bytes` zeros; `None`, with the reason printed, if this machine cannot.
    #[must_use]
    pub fn mount(len_bytes: usize) -> Option<Self> {
        match Self::try_mount(len_bytes) {
            Ok(disk) => Some(disk),
            Err(error) => {
                sidecore_skip::skip(format_args!("no FUSE filesystem can be mounted: {error}"));
                None
            }
        }
    }

    fn try_mount(len_bytes: usize) -> io::Result<Self> {
        let fuse = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let directory = tempfile::tempdir()?;
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0\0", fuse.as_raw_fd());
        let options =
            std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).map_err(io::Error::other)?;
        mount(
            "sidecore-test",
            directory.path(),
            "fuse",
            MountFlags::NOSUID | MountFlags::NODEV,
            options,
        )?;
        let state = State {
            bytes: vec![0; len_bytes],
            hold: None,
            held: Vec::new(),
            held_since: None,
            ends: false,
            refuses_writes: None,
            done: Vec::new(),
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let fuse = Arc::new(fuse);
        let mut threads = Vec::new();
        for work in [Shared::serve, Shared::watch] {
            let (shared, fuse) = (Arc::clone(&shared), Arc::clone(&fuse));
            threads.push(std::thread::spawn(move || work(&shared, &fuse)));
        }
        Ok(Self { shared, directory, fuse, threads })
    }

    /// The path of the file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.path().join(NAME)
    }

    /// The directory that the filesystem is mounted on.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Holds every request that arrives from now on and satisfies `which`. Requests held before
    /// stay held.
    pub fn hold(&self, which: impl Fn(&Request) -> bool + Send + 'static) {
        self.state().hold = Some(Box::new(which));
    }

    /// Fails all writes from now on, as a disk that another host has reserved.
    pub fn refuse_writes(&self, errno: i32) {
        self.state().refuses_writes = Some(errno);
    }

    /// Answers every request that arrives from now on. Requests held before stay held.
    pub fn hold_no_more(&self) {
        self.state().hold = None;
    }

    /// Carries out and answers the held requests in the order of arrival, and stops holding.
    pub fn release(&self) {
        self.shared.release(&self.fuse);
    }

    /// A guard that releases the held requests on drop.
    #[must_use]
    pub fn releaser(&self) -> Releaser<'_> {
        Releaser(self)
    }

    /// The operation and offset of each held request.
    #[must_use]
    pub fn held(&self) -> Vec<(Operation, u64)> {
        self.state()
            .held
            .iter()
            .map(|request| (request.operation(), request.offset_bytes()))
            .collect()
    }

    /// The operation and offset of each request that was carried out, in order.
    #[must_use]
    pub fn done(&self) -> Vec<(Operation, u64)> {
        self.state().done.clone()
    }

    /// The file's content at `offset_bytes`, without the kernel's caches.
    ///
    /// # Panics
    /// The range is not within the file.
    #[must_use]
    pub fn bytes(&self, offset_bytes: usize, len_bytes: usize) -> Vec<u8> {
        self.state().bytes[offset_bytes..][..len_bytes].to_vec()
    }

    /// Waits until `condition` is true of the held requests.
    ///
    /// # Panics
    /// The condition is still false after a minute.
    pub fn wait_for_held(&self, condition: impl Fn(&[(Operation, u64)]) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.state();
        loop {
            let held: Vec<_> =
                state.held.iter().map(|held| (held.operation(), held.offset_bytes())).collect();
            if condition(&held) {
                return;
            }
            let left = deadline.checked_duration_since(Instant::now());
            let left = left
                .unwrap_or_else(|| panic!("the awaited requests do not arrive; held: {held:?}"));
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        // A forced unmount fails every request, so that no process stays blocked and the thread
        // ends.
        if unmount(self.directory.path(), UnmountFlags::FORCE | UnmountFlags::DETACH).is_err() {
            let _ = unmount(self.directory.path(), UnmountFlags::DETACH);
        }
        self.state().ends = true;
        self.release();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn release(&self, fuse: &OwnedFd) {
        let mut state = self.state();
        state.hold = None;
        state.held_since = None;
        for request in std::mem::take(&mut state.held) {
            let answer = state.carry_out(&request);
            // The kernel may have dropped the request.
            let _ = rustix::io::write(fuse, &answer);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Releases requests that are held for too long: a test that waits for its own disk would wait
    /// for ever, and so would every program that reads the mounts.
    fn watch(&self, fuse: &OwnedFd) {
        let mut state = self.state();
        while !state.ends {
            if state.held_since.is_some_and(|since| since.elapsed() >= PATIENCE) {
                drop(state);
                eprintln!("a request was held for {PATIENCE:?}: released");
                self.release(fuse);
                state = self.state();
            }
            let second = Duration::from_secs(1);
            state =
                self.changed.wait_timeout(state, second).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Answers requests until the filesystem is unmounted.
    fn serve(&self, fuse: &OwnedFd) {
        let mut buffer = vec![0; protocol::BUFFER_BYTES];
        loop {
            let len = match rustix::io::read(fuse, &mut buffer) {
                Ok(len) => len,
                Err(
                    rustix::io::Errno::INTR | rustix::io::Errno::AGAIN | rustix::io::Errno::NOENT,
                ) => continue,
                Err(_) => return,
            };
            let Some(request) = buffer.get(..len).and_then(Request::parse) else { continue };
            if !request.wants_answer() {
                continue;
            }
            let mut state = self.state();
            if state.hold.as_ref().is_some_and(|hold| hold(&request)) {
                state.held.push(request);
                state.held_since.get_or_insert_with(Instant::now);
            } else {
                let answer = state.carry_out(&request);
                let _ = rustix::io::write(fuse, &answer);
            }
            drop(state);
            self.changed.notify_all();
        }
    }
}

impl State {
    fn carry_out(&mut self, request: &Request) -> Vec<u8> {
        if let Some(errno) = self.refuses_writes.filter(|_| request.operation() == Operation::Write)
        {
            return request.refusal(errno);
        }
        self.done.push((request.operation(), request.offset_bytes()));
        request.answer(&mut self.bytes, NAME)
    }
}
