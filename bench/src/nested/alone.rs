//! A disk without guests, functions and filesystems: the most that it can do.
//!
//! One thread on the server's core drives the disk as a sidecore would, through the store that the
//! controller uses, and has no other work. The client's core is left to the kernel's workers.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, MemfdFlags};
use sidecore_block::{Batch, BlockDevice, BlockRequest, Operation, Tag};
use sidecore_linux::{FileOptions, FileStore};
use sidecore_memory::{GuestAddress, GuestMemory, RegionHint, RegionSpec, UserAddress};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::cores::Partner;
use crate::huge_pages;
use crate::load::{Places, Sample, Work};
use crate::stats::Histogram;

/// A disk without other users, written from its start to its end.
pub(super) struct Alone {
    store: Arc<FileStore>,
    memory: GuestMemory,
}

impl Alone {
    /// Opens the disk and writes all of it.
    ///
    /// # Errors
    /// The disk is in use, or cannot be written.
    pub(super) fn new(path: &Path, bytes: u64) -> Result<Self> {
        let store = Arc::new(FileStore::open(&FileOptions::new(PathBuf::from(path)))?);
        // As large as the clients': the buffers of the largest requests in flight.
        let memory = memory(64 << 20)?;
        let alone = Self { store, memory };
        let mut channel = alone.store.open_channel(&CoreContext::default(), 1)?;
        let write = Request { operation: Operation::Write, bytes: 1 << 20, slot: 0 };
        for offset_bytes in (0..bytes).step_by(1 << 20) {
            let mut request = write.make(&alone.memory)?;
            request.offset_bytes = offset_bytes;
            run_one(channel.as_mut(), request)?;
        }
        Ok(alone)
    }

    /// Runs the load on the partner's core.
    ///
    /// # Errors
    /// The disk fails.
    pub(super) fn run(&self, partner: &Partner, work: &Work) -> Result<Sample> {
        let (store, memory, work) = (Arc::clone(&self.store), self.memory.clone(), *work);
        partner
            .run(move || load(&store, &memory, &work))?
            .recv()
            .context("the partner thread died")?
    }
}

/// A request of a load, without its place.
#[derive(Clone, Copy)]
struct Request {
    operation: Operation,
    bytes: u64,
    /// The index of the buffer.
    slot: u64,
}

impl Request {
    fn make(self, memory: &GuestMemory) -> Result<Box<BlockRequest>> {
        let mut request = BlockRequest::blank(1);
        request.operation = self.operation;
        request.segments.bind(memory);
        request.len_bytes = self.bytes;
        request.segments.push(
            GuestAddress(self.slot * self.bytes),
            self.bytes,
            &mut RegionHint::default(),
        )?;
        request.tag = Some(Tag::from_bits(self.slot));
        Ok(request)
    }
}

fn load(store: &FileStore, memory: &GuestMemory, work: &Work) -> Result<Sample> {
    let operation = if work.write { Operation::Write } else { Operation::Read };
    let mut channel = store.open_channel(&CoreContext::default(), usize::from(work.depth))?;
    channel.attach_memory(memory)?;
    let mut places = Places::new(work.blocks);
    let bytes = u64::from(work.bytes);
    let mut batch = Batch::new();
    for slot in 0..u64::from(work.depth) {
        batch.push(Request { operation, bytes, slot }.make(memory)?);
    }
    let mut place = |request: &mut BlockRequest| request.offset_bytes = places.next_block() * bytes;
    batch.iter_mut().for_each(|request| place(request));
    let (mut done, mut latency) = (0_u64, Histogram::default());
    let mut completed = Batch::with_capacity(batch.len());
    let start = Instant::now();
    let mut began = start;
    channel.submit(Nanos::ZERO, &mut batch);
    let mut ended = false;
    while channel.readiness().in_flight > 0 {
        channel.poll(Nanos::ZERO, &mut completed);
        if completed.is_empty() {
            std::hint::spin_loop();
            continue;
        }
        let now = Instant::now();
        if work.depth == 1 {
            latency.add((now - began).as_nanos() as u64);
            began = now;
        }
        done += completed.len() as u64;
        ended |= now - start >= work.duration;
        for mut request in completed.drain(..) {
            ensure!(request.result.is_ok(), "the disk fails: {:?}", request.result);
            if ended {
                let _ = request.tag.take().map(Tag::into_bits);
            } else {
                place(&mut request);
                batch.push(request);
            }
        }
        channel.submit(Nanos::ZERO, &mut batch);
    }
    let seconds = start.elapsed().as_secs_f64();
    let (p50, p99) = (latency.quantile(0.5), latency.quantile(0.99));
    Ok(Sample {
        iops: done as f64 / seconds,
        latency_p50_ns: if work.depth == 1 { p50 } else { 0.0 },
        latency_p99_ns: if work.depth == 1 { p99 } else { 0.0 },
        latency_mean_ns: seconds * 1e9 * f64::from(work.depth) / done.max(1) as f64,
        ..Sample::default()
    })
}

fn run_one(
    channel: &mut dyn sidecore_block::BlockChannel,
    request: Box<BlockRequest>,
) -> Result<()> {
    let (mut batch, mut completed) = (vec![request], Batch::new());
    while completed.is_empty() {
        channel.submit(Nanos::ZERO, &mut batch);
        channel.poll(Nanos::ZERO, &mut completed);
    }
    for mut request in completed {
        let _ = request.tag.take().map(Tag::into_bits);
        ensure!(request.result.is_ok(), "the disk fails: {:?}", request.result);
    }
    Ok(())
}

/// Memory of this program, on huge pages if any are free, like a guest's.
fn memory(bytes: u64) -> Result<GuestMemory> {
    let huge = bytes.next_multiple_of(huge_pages::BYTES);
    let make = |kind: MemfdFlags| -> rustix::io::Result<_> {
        let file = rustix::fs::memfd_create("sidecore-bench", MemfdFlags::CLOEXEC | kind)?;
        rustix::fs::ftruncate(&file, huge)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, huge)?;
        Ok(file)
    };
    let file =
        make(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).or_else(|_| make(MemfdFlags::empty()))?;
    let (guest_address, user_address) = (GuestAddress(0), UserAddress(0));
    let region =
        RegionSpec { guest_address, user_address, len_bytes: huge, file, file_offset_bytes: 0 };
    Ok(GuestMemory::map(vec![region])?)
}
