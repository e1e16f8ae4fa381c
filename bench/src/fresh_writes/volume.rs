//! A volume of a controller in this process, which a run fills and empties.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockRequest, Geometry, Operation, RamStore, Tag,
};
use sidecore_controller::{
    Answered, Controller, ControllerOptions, FunctionOptions, VirtualFunction,
};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;
use sidecore_volume::{FormatOptions, HeapMemory, LOG_ENTRY_BYTES, LogPlace};

use crate::requests;

const BLOCK_BYTES: u64 = 4096;
/// The distance between two writes: the gap keeps two writes from becoming one extent.
const STRIDE_BYTES: u64 = 2 * BLOCK_BYTES;
/// Entries of the log for each write of a run: so many that only the end of a run commits, and not
/// a log that is half full.
const ENTRIES_PER_WRITE: usize = 3;
/// A run that takes longer has lost a request.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct Volume {
    channel: Box<dyn BlockChannel>,
    /// Requests that are not in flight.
    idle: Batch,
    completed: Batch,
    writes: u64,
    depth: usize,
    begin: Instant,
    _function: Arc<VirtualFunction>,
    _controller: Arc<Controller>,
}

impl Volume {
    /// Makes a volume with room for `writes` writes. Its controller commits only on a flush.
    pub(super) fn new(has_log: bool, depth: usize, writes: u64) -> Result<Self> {
        let size_bytes = writes * STRIDE_BYTES;
        // Freed blocks are reusable after a durable commit: half of the blocks may wait for one.
        let store = RamStore::new(Geometry::new(4 * size_bytes + (64 << 20), 512))
            .context("not enough memory")?;
        let log_bytes =
            (usize::try_from(writes)? * ENTRIES_PER_WRITE * LOG_ENTRY_BYTES).max(8 << 20);
        let place = LogPlace { device: 1, inode: 1, boot: [1; 16] };
        let options = ControllerOptions {
            format: Some(FormatOptions {
                block_bytes: 4096,
                label: String::new(),
                uuid: [1; 16],
                force: false,
            }),
            commit_interval: Duration::from_secs(3600),
            answered: match has_log {
                true => Answered::InLog(Arc::new(HeapMemory::new(log_bytes)), place),
                false => Answered::WithTheStore,
            },
            ..ControllerOptions::default()
        };
        let controller = Controller::open("bench", Arc::new(store), &options, None)?;
        controller.create_volume("v", size_bytes, None)?;
        let function = controller.open_function(&FunctionOptions::new("v"))?;
        let mut channel = function.open_channel(&CoreContext::default(), depth)?;
        let memory = requests::memory(depth as u64 * BLOCK_BYTES)?;
        channel.attach_memory(&memory)?;
        let request = |index| requests::request(&memory, Operation::Write, index, BLOCK_BYTES);
        let idle = (0..depth as u64).map(request).collect::<Result<Batch>>()?;
        Ok(Self {
            channel,
            idle,
            completed: Batch::with_capacity(depth),
            writes,
            depth,
            begin: Instant::now(),
            _function: function,
            _controller: controller,
        })
    }

    /// Fills the volume and empties it again. Returns nanoseconds for each write.
    pub(super) fn run(&mut self) -> Result<f64> {
        let start = Instant::now();
        let (mut sent, mut done) = (0, 0);
        let mut batch = Batch::with_capacity(self.depth);
        while done < self.writes {
            while sent < self.writes
                && let Some(mut request) = self.idle.pop()
            {
                request.offset_bytes = sent * STRIDE_BYTES;
                request.tag = Some(Tag::from_bits(sent));
                batch.push(request);
                sent += 1;
            }
            self.channel.submit(self.now()?, &mut batch);
            done += self.collect()?;
            ensure!(start.elapsed() < PATIENCE, "{done} of {} writes came back", self.writes);
        }
        let ns = start.elapsed().as_nanos() as f64 / self.writes as f64;
        self.alone(Operation::Discard, self.writes * STRIDE_BYTES)?;
        self.alone(Operation::Flush, 0)?;
        Ok(ns)
    }

    fn now(&self) -> Result<Nanos> {
        Ok(Nanos(u64::try_from(self.begin.elapsed().as_nanos())?))
    }

    /// Collects the completed requests. Returns their number.
    fn collect(&mut self) -> Result<u64> {
        let now = self.now()?;
        self.channel.poll(now, &mut self.completed);
        let count = self.completed.len() as u64;
        for mut request in self.completed.drain(..) {
            request.result.context("a request failed")?;
            request.tag.take().map(Tag::into_bits).context("a request without its tag")?;
            self.idle.push(request);
        }
        Ok(count)
    }

    /// Carries out one request without data.
    fn alone(&mut self, operation: Operation, len_bytes: u64) -> Result<()> {
        let mut request = BlockRequest::blank(0);
        request.operation = operation;
        request.len_bytes = len_bytes;
        request.tag = Some(Tag::from_bits(0));
        let mut batch: Batch = vec![request];
        let start = Instant::now();
        loop {
            self.channel.submit(self.now()?, &mut batch);
            if self.collect()? > 0 {
                // The request has no buffer and is not one of the writes.
                self.idle.pop();
                return Ok(());
            }
            ensure!(start.elapsed() < PATIENCE, "{operation:?} does not come back");
        }
    }
}
