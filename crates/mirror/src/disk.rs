//! A leg as the keeper uses it: one synchronous request at a time, beside those of the queues.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use sidecore_block::{
    Batch, BlockChannel, BlockDevice, BlockError, BlockRequest, Next, Operation, Tag,
};
use sidecore_memory::{GuestAddress, RegionHint, SharedPages};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

/// The largest request in bytes.
pub(crate) const BUFFER_BYTES: u64 = 256 << 10;

/// ETIMEDOUT.
const TIMED_OUT: BlockError = BlockError::Io { errno: 110 };

/// How long the keeper sleeps until it looks at the queues again.
const LOOK: Duration = Duration::from_micros(200);

/// How the keeper waits: by sleeping, or in simulated time.
pub trait Wait {
    /// The time of now.
    fn now(&mut self) -> Nanos;

    /// Waits until `channel` may have a completion.
    fn for_leg(&mut self, channel: &dyn BlockChannel);

    /// Waits until queues may have ended some requests.
    fn for_queues(&mut self);
}

/// A thread that sleeps.
#[derive(Debug)]
pub struct Sleep(Instant);

impl Default for Sleep {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Wait for Sleep {
    fn now(&mut self) -> Nanos {
        Nanos::from(self.0.elapsed())
    }

    fn for_leg(&mut self, channel: &dyn BlockChannel) {
        let timeout = match channel.readiness().next {
            Next::Now => return,
            Next::At(at) => Duration::from(at.since(self.now())),
            Next::OnWake => Duration::from_secs(1),
        };
        let Some(wake) = channel.wake_fd() else { return std::thread::sleep(timeout.min(LOOK)) };
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(1),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // An interrupted wait is a short one.
        let _ =
            rustix::event::poll(&mut [PollFd::new(&wake.as_fd(), PollFlags::IN)], Some(&timeout));
    }

    fn for_queues(&mut self) {
        std::thread::sleep(LOOK);
    }
}

/// See the module. Only the thread that opened it can use it.
pub(crate) struct LegDisk {
    device: Arc<dyn BlockDevice>,
    channel: Box<dyn BlockChannel>,
    pages: SharedPages,
    hint: RegionHint,
    /// `None` while it is in flight.
    request: Option<Box<BlockRequest>>,
    batch: Batch,
    completed: Batch,
    /// The longest time that a request may take; `None` leaves it to the store to fail one.
    limit: Option<Nanos>,
    /// A request has taken longer. The disk is not used any more, and kept until it has ended.
    is_late: bool,
}

impl LegDisk {
    pub(crate) fn open(device: &Arc<dyn BlockDevice>, limit: Option<Nanos>) -> io::Result<Self> {
        let len_bytes = usize::try_from(BUFFER_BYTES).unwrap_or(usize::MAX);
        let pages = SharedPages::new("sidecore-mirror-keeper", len_bytes)?;
        let mut channel = device.open_channel(&CoreContext::default(), 1)?;
        channel.attach_memory(pages.memory())?;
        Ok(Self {
            device: Arc::clone(device),
            channel,
            pages,
            hint: RegionHint::default(),
            request: Some(BlockRequest::blank(1)),
            batch: Batch::with_capacity(1),
            completed: Batch::with_capacity(1),
            limit,
            is_late: false,
        })
    }

    /// Whether it is one of this store, as far as can be told from here.
    pub(crate) fn is_of(&self, device: &Arc<dyn BlockDevice>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.device), Arc::as_ptr(device))
    }

    /// Leaves it to the store to fail requests.
    pub(crate) fn wait_for_store(&mut self) {
        self.limit = None;
    }

    /// Whether a request has taken too long, and not ended since.
    pub(crate) fn is_late(&self) -> bool {
        self.is_late && self.request.is_none()
    }

    /// Looks for the end of a request that has taken too long.
    pub(crate) fn look(&mut self, now: Nanos) {
        self.channel.exchange(now, &mut self.batch, &mut self.completed);
        if let Some(mut request) = self.completed.pop() {
            request.tag.take().map(Tag::into_bits);
            self.request = Some(request);
        }
    }

    /// Begins a request of [`BUFFER_BYTES`] at most, whose data are in the buffer.
    fn begin(&mut self, now: Nanos, operation: Operation, offset_bytes: u64, len_bytes: u64) {
        // A disk that was late once is not used any more.
        let Some(mut request) = self.request.take_if(|_| !self.is_late) else { return };
        request.operation = operation;
        request.offset_bytes = offset_bytes;
        request.len_bytes = len_bytes;
        request.result = Ok(());
        request.taken_at = now;
        request.segments.bind(self.pages.memory());
        if len_bytes > 0 {
            let pushed = request.segments.push(GuestAddress(0), len_bytes, &mut self.hint);
            debug_assert!(pushed.is_ok(), "{pushed:?}");
        }
        request.tag = Some(Tag::from_bits(0));
        self.batch.push(request);
        self.channel.submit(now, &mut self.batch);
    }

    /// Waits for the end of the request that was begun last. The channel owns it until then: after
    /// the time limit the disk is late.
    fn finish(&mut self, wait: &mut dyn Wait) -> Result<(), BlockError> {
        if self.is_late {
            return Err(TIMED_OUT);
        }
        let began = wait.now();
        loop {
            let now = wait.now();
            self.look(now);
            if let Some(request) = &self.request {
                return request.result;
            }
            if self.limit.is_some_and(|limit| now.since(began) > limit) {
                self.is_late = true;
                return Err(TIMED_OUT);
            }
            wait.for_leg(&*self.channel);
        }
    }

    /// Begins to write `data`, as much as the buffer takes.
    pub(crate) fn begin_write(&mut self, now: Nanos, offset_bytes: u64, data: &[u8]) {
        let written = self.pages.memory().write_slice(GuestAddress(0), data, &mut self.hint);
        debug_assert!(written.is_ok(), "{written:?}");
        self.begin(now, Operation::Write, offset_bytes, data.len() as u64);
    }

    pub(crate) fn begin_flush(&mut self, now: Nanos) {
        self.begin(now, Operation::Flush, 0, 0);
    }

    /// See [`finish`](Self::finish).
    pub(crate) fn end(&mut self, wait: &mut dyn Wait) -> Result<(), BlockError> {
        self.finish(wait)
    }

    pub(crate) fn read(
        &mut self,
        wait: &mut dyn Wait,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Result<(), BlockError> {
        let now = wait.now();
        self.begin(now, Operation::Read, offset_bytes, buffer.len() as u64);
        self.finish(wait)?;
        let read = self.pages.memory().read_slice(GuestAddress(0), buffer, &mut self.hint);
        read.map_err(|_| BlockError::EIO)
    }

    pub(crate) fn write(
        &mut self,
        wait: &mut dyn Wait,
        offset_bytes: u64,
        data: &[u8],
    ) -> Result<(), BlockError> {
        let now = wait.now();
        self.begin_write(now, offset_bytes, data);
        self.finish(wait)
    }

    pub(crate) fn flush(&mut self, wait: &mut dyn Wait) -> Result<(), BlockError> {
        let now = wait.now();
        self.begin_flush(now);
        self.finish(wait)
    }
}
