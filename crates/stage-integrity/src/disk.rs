//! The store as it is opened or made: one synchronous request at a time.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use sidecore_block::{Batch, BlockChannel, BlockDevice, BlockRequest, Next, Operation, Tag};
use sidecore_memory::{GuestAddress, RegionHint, SharedPages};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::error::IntegrityError;

/// The largest transfer in bytes.
pub(crate) const MOST_BYTES: usize = 256 << 10;
/// The longest sleep without a descriptor to wait for.
const NAP: Duration = Duration::from_micros(100);

/// See the module.
pub(crate) struct Disk {
    channel: Box<dyn BlockChannel>,
    pages: SharedPages,
    opened_at: Instant,
    /// `None` while it is at the store.
    request: Option<Box<BlockRequest>>,
}

impl Disk {
    pub(crate) fn open(device: &dyn BlockDevice) -> Result<Self, IntegrityError> {
        let pages = SharedPages::new("sidecore-integrity-open", MOST_BYTES)?;
        let mut channel = device.open_channel(&CoreContext::default(), 1)?;
        channel.attach_memory(pages.memory())?;
        let request = Some(BlockRequest::blank(1));
        Ok(Self { channel, pages, opened_at: Instant::now(), request })
    }

    fn run(
        &mut self,
        operation: Operation,
        (offset_bytes, len_bytes): (u64, u64),
    ) -> Result<(), IntegrityError> {
        let mut request = self.request.take().unwrap_or_else(|| BlockRequest::blank(1));
        request.operation = operation;
        (request.offset_bytes, request.len_bytes) = (offset_bytes, len_bytes);
        request.result = Ok(());
        request.tag = Some(Tag::from_bits(0));
        request.segments.bind(self.pages.memory());
        if matches!(operation, Operation::Read | Operation::Write) {
            let hint = &mut RegionHint::default();
            let pushed = request.segments.push(GuestAddress(0), len_bytes, hint);
            pushed.map_err(|error| IntegrityError::Io(error.to_string()))?;
        }
        let (mut batch, mut completed) = (vec![request], Batch::new());
        // The store owns the buffer until the end, so there is no timeout.
        loop {
            let now = Nanos::from(self.opened_at.elapsed());
            self.channel.exchange(now, &mut batch, &mut completed);
            if let Some(mut request) = completed.pop() {
                request.tag.take().map(Tag::into_bits);
                let result = request.result;
                self.request = Some(request);
                let what = || format!("{operation:?} of {len_bytes} bytes at byte {offset_bytes}");
                return result.map_err(|error| IntegrityError::Io(format!("{}: {error}", what())));
            }
            self.wait(now);
        }
    }

    fn wait(&self, now: Nanos) {
        let time = match self.channel.readiness().next {
            Next::Now => return,
            Next::At(at) => Duration::from(at.since(now)),
            Next::OnWake => Duration::from_secs(1),
        };
        let Some(wake) = self.channel.wake_fd() else { return std::thread::sleep(time.min(NAP)) };
        let timeout = Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(1),
            tv_nsec: time.subsec_nanos().into(),
        };
        // An interrupted wait is a short one.
        let wake = wake.as_fd();
        let _ = rustix::event::poll(&mut [PollFd::new(&wake, PollFlags::IN)], Some(&timeout));
    }

    /// Reads [`MOST_BYTES`] at most.
    pub(crate) fn read(&mut self, at_bytes: u64, to: &mut [u8]) -> Result<(), IntegrityError> {
        self.run(Operation::Read, (at_bytes, to.len() as u64))?;
        let read = self.pages.memory().read_slice(GuestAddress(0), to, &mut RegionHint::default());
        read.map_err(|error| IntegrityError::Io(error.to_string()))
    }

    /// Writes [`MOST_BYTES`] at most.
    pub(crate) fn write(&mut self, at_bytes: u64, data: &[u8]) -> Result<(), IntegrityError> {
        let memory = self.pages.memory();
        let put = memory.write_slice(GuestAddress(0), data, &mut RegionHint::default());
        put.map_err(|error| IntegrityError::Io(error.to_string()))?;
        self.run(Operation::Write, (at_bytes, data.len() as u64))
    }

    /// Writes zeros, by the store's own means if it has any.
    pub(crate) fn zero(
        &mut self,
        (start, end): (u64, u64),
        may_unmap: bool,
        has_means: bool,
    ) -> Result<(), IntegrityError> {
        const STEP: u64 = 1 << 30;
        let zeros = vec![0; if has_means { 0 } else { MOST_BYTES }];
        let mut at = start;
        while at < end {
            let step = if has_means { STEP } else { MOST_BYTES as u64 };
            let count = end.saturating_sub(at).min(step);
            match usize::try_from(count).ok().and_then(|count| zeros.get(..count)) {
                Some(zeros) => self.write(at, zeros)?,
                None => self.run(Operation::WriteZeroes { may_unmap }, (at, count))?,
            }
            at = at.saturating_add(count);
        }
        Ok(())
    }

    pub(crate) fn flush(&mut self) -> Result<(), IntegrityError> {
        self.run(Operation::Flush, (0, 0))
    }
}
