//! What the machine itself can do: nothing that is measured here can be beaten by a design, only approached.

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

/// Round trip of a token through two eventfds, in nanoseconds: both sides spin on the system call, or sleep in it.
///
/// # Errors
/// The kernel; the partner died.
pub fn eventfd_round_trip_ns(partner: &Partner, blocking: bool, rounds: u32) -> Result<f64> {
    let flags = if blocking { EventfdFlags::CLOEXEC } else { EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK };
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

/// How a copy is made. None of them fetches ahead of the block that it copies: that is for designs to do. The store's own
/// loop is the streaming one: what it copies into the arena it stores past the caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// The store's own loop, with nothing to look ahead to.
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

/// Buffers that a copy goes round: as many as a client's requests in flight.
const BUFFERS: u64 = 32;

const GUEST_BASE: u64 = 1 << 30;
const USER_BASE: u64 = 1 << 40;

/// A store's memory and a client's, and nothing between them but a copy.
#[derive(Debug)]
pub struct CopyFloor {
    arena: Arena,
    /// The same size again as shared memory, where the arena is on huge pages: the instructions which are not the
    /// arena's own are measured on it.
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
    /// Not enough memory.
    pub fn new(bytes: u64) -> Result<Self> {
        let arena = Arena::new(usize::try_from(bytes)?)?;
        let client = memory(BUFFERS * u64::from(BLOCK_BYTES), MemfdFlags::empty())?;
        let buffers = whole(&client, BUFFERS * u64::from(BLOCK_BYTES))?;
        buffers.fill_zero();
        let enough = huge_pages::free() * huge_pages::BYTES >= bytes;
        let shared = match arena.pages() {
            PageKind::Huge if enough => {
                let shared = whole(&memory(bytes, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?, bytes)?;
                shared.fill_zero();
                Some(shared)
            }
            _ => None,
        };
        Ok(Self { arena, shared, client, buffers, blocks: bytes / u64::from(BLOCK_BYTES), best: [None; 2] })
    }

    /// Whether the arena is on huge pages.
    #[must_use]
    pub fn is_on_huge_pages(&self) -> bool {
        self.arena.pages() == PageKind::Huge
    }

    /// Copies blocks out of random places (or, with `write`, into them) for about `duration`, by the instructions that
    /// turned out the fastest when this was first asked, and returns nanoseconds for each and the name of the way. Into
    /// them, streaming stores are among those.
    ///
    /// # Errors
    /// A copy fails, which none should.
    pub fn copy_ns(&mut self, write: bool, duration: Duration) -> Result<(f64, &'static str)> {
        let how = match self.best[usize::from(write)] {
            Some(how) => how,
            None => *self.best[usize::from(write)].insert(self.choose(write, duration)?),
        };
        Ok((self.measure(how, write, duration)?, how.name()))
    }

    /// The same by the store's own loop, alone; nanoseconds for each and the name of the way.
    ///
    /// # Errors
    /// As [`CopyFloor::copy_ns`].
    pub fn store_copy_ns(&self, write: bool, duration: Duration) -> Result<(f64, &'static str)> {
        Ok((self.measure(How::Store, write, duration)?, How::Store.name()))
    }

    fn choose(&self, write: bool, duration: Duration) -> Result<How> {
        // Without huge pages there is no second arena that a plain copy would be as good on.
        let mut ways = Vec::new();
        if self.shared.is_some() {
            ways.extend(PLAIN.map(How::Plain));
        }
        if write || ways.is_empty() {
            ways.push(How::Store);
        }
        let mut best = (f64::INFINITY, How::Store);
        // Round and round, so that a disturbance hits one try and not one way.
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
                        segments.push(GuestAddress(GUEST_BASE + buffer * block), block, &mut hint)?;
                        // Told to fetch what it is about to copy anyway, or what is in the cache: fetching the lines
                        // that a streaming store is about to replace would only be in its way.
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
