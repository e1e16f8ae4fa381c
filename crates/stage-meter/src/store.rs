//! The store.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, Geometry, Mapped, Meter, MeterStats, Readiness,
};
use sidecore_memory::GuestMemory;
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::recorder::Recorder;
use crate::thread::RecordThread;

/// Counts the requests to the device below that have ended.
pub struct MeterStore {
    inner: Arc<dyn BlockDevice>,
    meter: Arc<Meter>,
    /// Its drop writes the last record.
    _records: Option<RecordThread>,
}

impl MeterStore {
    /// Counts in `meter`.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockDevice>, meter: Arc<Meter>) -> Self {
        Self { inner, meter, _records: None }
    }

    /// The same, with a record at the end of each `interval` and one when the store is dropped.
    ///
    /// # Errors
    /// The thread for the records cannot be started.
    pub fn recorded(
        inner: Arc<dyn BlockDevice>,
        meter: Arc<Meter>,
        recorder: Recorder,
        interval: Duration,
    ) -> io::Result<Self> {
        let records = RecordThread::start(recorder, Arc::clone(&meter), interval)?;
        Ok(Self { inner, meter, _records: Some(records) })
    }
}

impl BlockDevice for MeterStore {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn meters(&self) -> Vec<Arc<Meter>> {
        let mut meters = self.inner.meters();
        meters.push(Arc::clone(&self.meter));
        meters
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        let inner = self.inner.open_channel(core, depth)?;
        Ok(Box::new(MeterChannel { inner, stats: self.meter.open_channel() }))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.inner.allocate(offset_bytes, len_bytes)
    }

    fn fallback(&self) -> Option<String> {
        self.inner.fallback()
    }

    fn loss(&self) -> Option<String> {
        self.inner.loss()
    }
}

/// Requests go to the channel below as they come, so that the stage has no list of its own.
struct MeterChannel {
    inner: Box<dyn BlockChannel>,
    stats: Arc<MeterStats>,
}

impl MeterChannel {
    /// Counts what `run` has appended to `completed`.
    #[inline]
    fn counted(
        &mut self,
        completed: &mut Batch,
        run: impl FnOnce(&mut dyn BlockChannel, &mut Batch),
    ) {
        let start = completed.len();
        run(self.inner.as_mut(), completed);
        self.stats.count(completed.get(start..).unwrap_or_default());
    }
}

impl BlockChannel for MeterChannel {
    fn attach_memory(&mut self, memory: &GuestMemory) -> io::Result<()> {
        self.inner.attach_memory(memory)
    }

    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        self.inner.submit(now, batch);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        self.counted(completed, |inner, completed| inner.poll(now, completed));
    }

    fn exchange(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) {
        self.counted(completed, |inner, completed| inner.exchange(now, batch, completed));
    }

    fn exchange_mapped(&mut self, mapped: &Mapped, batch: &mut Batch, completed: &mut Batch) {
        self.counted(completed, |inner, completed| {
            inner.exchange_mapped(mapped, batch, completed);
        });
    }

    fn takes_mapped(&self) -> bool {
        self.inner.takes_mapped()
    }

    fn takes_write_through(&self) -> bool {
        self.inner.takes_write_through()
    }

    fn readiness(&self) -> Readiness {
        self.inner.readiness()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.inner.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}
