//! The floors: measurements of the machine itself, which a design can approach and not beat.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::EventfdFlags;
use rustix::fs::{FallocateFlags, MemfdFlags};
use sidecore_memory::{
    Arena, GuestAddress, GuestMemory, PageKind, Part, RegionHint, RegionSpec, Segments, UserAddress,
};
use sidecore_ring::driver::{CopyHow, SharedMemory};

use crate::cores::Partner;
use crate::load::{BLOCK_BYTES, Places};
use crate::{huge_pages, stats};

/// Measures the round trip of a token through two eventfds, in nanoseconds: both sides spin on the
/// system call, or sleep in it.
///
/// # Errors
/// A system call fails; the partner died.
pub fn eventfd_round_trip_ns(partner: &Partner, blocking: bool, rounds: u32) -> Result<f64> {
    let flags = if blocking {
        EventfdFlags::CLOEXEC
    } else {
        EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK
    };
    let (there, back) = (rustix::event::eventfd(0, flags)?, rustix::event::eventfd(0, flags)?);
    let (their_there, their_back) = (there.try_clone()?, back.try_clone()?);
    let done = partner.run(move || {
        for _ in 0..rounds {
            take(&their_there)?;
            put(&their_back)?;
        }
        Ok::<_, rustix::io::Errno>(())
    })?;
    let mut trips = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        put(&there)?;
        take(&back)?;
        trips.push(start.elapsed().as_nanos() as f64);
    }
    done.recv().context("the partner thread died")??;
    Ok(stats::median(&trips))
}

fn put(eventfd: &impl std::os::fd::AsFd) -> rustix::io::Result<()> {
    rustix::io::write(eventfd, &1_u64.to_ne_bytes()).map(|_| ())
}

fn take(eventfd: &impl std::os::fd::AsFd) -> rustix::io::Result<()> {
    let mut count = [0; 8];
    loop {
        match rustix::io::read(eventfd, &mut count) {
            Err(rustix::io::Errno::AGAIN) => std::hint::spin_loop(),
            other => return other.map(|_| ()),
        }
    }
}

/// The way of a copy. No way prefetches beyond the block that it copies: that is left to designs.
/// The store's own loop streams: its writes into the arena bypass the caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// The store's own loop, without a next block to prefetch.
    Store,
    Plain(CopyHow),
}

const PLAIN: [CopyHow; 2] = [CopyHow::RepMovsb, CopyHow::CLibrary];

impl How {
    fn name(self) -> &'static str {
        match self {
            Self::Store => "the store's own loop",
            Self::Plain(CopyHow::RepMovsb) => "rep movsb",
            Self::Plain(CopyHow::CLibrary) => "memcpy",
        }
    }
}

/// The buffers that the copies cycle through: as many as a client's requests in flight.
const BUFFERS: u64 = 32;

const GUEST_BASE: u64 = 1 << 30;
const USER_BASE: u64 = 1 << 40;

/// A store's memory and a client's, with copies as the only work between them.
#[derive(Debug)]
pub struct CopyFloor {
    arena: Arena,
    /// Shared memory of the arena's size, if the arena is on huge pages: the copy instructions that
    /// the arena does not use are measured on it.
    shared: Option<SharedMemory>,
    client: GuestMemory,
    buffers: SharedMemory,
    blocks: u64,
    best: [Option<How>; 2],
}

impl CopyFloor {
    /// Makes arenas of `bytes`, on huge pages if there are enough free ones.
    ///
    /// # Errors
    /// The machine has not enough memory.
    pub fn new(bytes: u64) -> Result<Self> {
        let arena = Arena::new(usize::try_from(bytes)?)?;
        let client = memory(BUFFERS * u64::from(BLOCK_BYTES), MemfdFlags::empty())?;
        let buffers = whole(&client, BUFFERS * u64::from(BLOCK_BYTES))?;
        buffers.fill_zero();
        let enough = huge_pages::free() * huge_pages::BYTES >= bytes;
        let shared = match arena.pages() {
            PageKind::Huge if enough => {
                let shared =
                    whole(&memory(bytes, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?, bytes)?;
                shared.fill_zero();
                Some(shared)
            }
            _ => None,
        };
        Ok(Self {
            arena,
            shared,
            client,
            buffers,
            blocks: bytes / u64::from(BLOCK_BYTES),
            best: [None; 2],
        })
    }

    /// Whether the arena is on huge pages.
    #[must_use]
    pub fn is_on_huge_pages(&self) -> bool {
        self.arena.pages() == PageKind::Huge
    }

    /// Copies blocks from random places of the arena (with `write`, to such places) for about
    /// `duration`, by the way that was the fastest at the first call. Streaming stores are among
    /// the ways only with `write`, or if there is no other way. Returns nanoseconds for each block
    /// and the name of the way.
    ///
    /// # Errors
    /// A copy is outside of the arena, which is a bug.
    pub fn copy_ns(&mut self, write: bool, duration: Duration) -> Result<(f64, &'static str)> {
        let how = match self.best[usize::from(write)] {
            Some(how) => how,
            None => *self.best[usize::from(write)].insert(self.choose(write, duration)?),
        };
        Ok((self.measure(how, write, duration)?, how.name()))
    }

    /// As [`CopyFloor::copy_ns`], but always by the store's own loop.
    ///
    /// # Errors
    /// As [`CopyFloor::copy_ns`].
    pub fn store_copy_ns(&self, write: bool, duration: Duration) -> Result<(f64, &'static str)> {
        Ok((self.measure(How::Store, write, duration)?, How::Store.name()))
    }

    fn choose(&self, write: bool, duration: Duration) -> Result<How> {
        // Plain copies need shared memory on huge pages: on small pages they would be slower than
        // in the arena.
        let mut ways = Vec::new();
        if self.shared.is_some() {
            ways.extend(PLAIN.map(How::Plain));
        }
        if write || ways.is_empty() {
            ways.push(How::Store);
        }
        let mut best = (f64::INFINITY, How::Store);
        // The ways take turns, so that a disturbance hits one trial and not one way.
        for how in ways.iter().copied().cycle().take(3 * ways.len()) {
            let ns = self.measure(how, write, duration / 6)?;
            best = if ns < best.0 { (ns, how) } else { best };
        }
        Ok(best.1)
    }

    fn measure(&self, how: How, write: bool, duration: Duration) -> Result<f64> {
        let block = u64::from(BLOCK_BYTES);
        let whole_block = Part { skip_bytes: 0, len_bytes: BLOCK_BYTES as usize };
        let mut segments = Segments::with_capacity(1);
        let mut hint = RegionHint::default();
        let mut places = Places::new(self.blocks);
        let mut copies = 0_u64;
        let start = Instant::now();
        loop {
            for buffer in 0..BUFFERS {
                let at = places.next_block() * block;
                let copied = match (how, &self.shared) {
                    (How::Plain(how), Some(shared)) => {
                        let (at, buffer) = (at as usize, (buffer * block) as usize);
                        if write {
                            shared.copy_from(at, &self.buffers, buffer, BLOCK_BYTES as usize, how)
                        } else {
                            self.buffers.copy_from(buffer, shared, at, BLOCK_BYTES as usize, how)
                        }
                    }
                    _ => {
                        segments.bind(&self.client);
                        segments.push(
                            GuestAddress(GUEST_BASE + buffer * block),
                            block,
                            &mut hint,
                        )?;
                        // Prefetches the block that is read anyway; for a write, a line in the
                        // cache, because fetching the lines that a streaming store replaces would
                        // only delay the store.
                        let next = self.arena.address_of(if write { 0 } else { at });
                        if write {
                            self.arena.write(at, &segments, whole_block, next)
                        } else {
                            self.arena.read(at, &segments, whole_block, next)
                        }
                    }
                };
                anyhow::ensure!(copied, "a copy outside of the arena");
            }
            self.arena.settle();
            copies += BUFFERS;
            let elapsed = start.elapsed();
            if elapsed >= duration {
                return Ok(elapsed.as_nanos() as f64 / copies as f64);
            }
        }
    }
}

fn memory(bytes: u64, kind: MemfdFlags) -> Result<GuestMemory> {
    let file = rustix::fs::memfd_create("sidecore-bench", MemfdFlags::CLOEXEC | kind)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
    Ok(GuestMemory::map(vec![RegionSpec {
        guest_address: GuestAddress(GUEST_BASE),
        user_address: UserAddress(USER_BASE),
        len_bytes: bytes,
        file,
        file_offset_bytes: 0,
    }])?)
}

fn whole(memory: &GuestMemory, bytes: u64) -> Result<SharedMemory> {
    Ok(SharedMemory::new(memory.window(UserAddress(USER_BASE), usize::try_from(bytes)?, 4096)?))
}
