//! The store as it is opened or made: one request at a time.
//!
//! The code that does so is a future, which waits for its requests and for nothing else. A thread
//! that may wait [runs](run) it. The queue of a sidecore must not wait, and polls it as a [`Task`].

use std::cell::Cell;
use std::future::poll_fn;
use std::os::fd::AsFd;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use sidecore_block::{Batch, BlockChannel, BlockDevice, BlockRequest, Next, Operation, Tag};
use sidecore_memory::{GuestAddress, RegionHint, SharedPages};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

use crate::error::IntegrityError;

/// The largest transfer in bytes.
const MOST_BYTES: usize = 256 << 10;
/// The longest sleep without a descriptor to wait for.
const NAP: Duration = Duration::from_micros(100);

/// The request of a disk, on its way to the store and back.
#[derive(Default)]
struct Exchange {
    queued: Cell<Option<Box<BlockRequest>>>,
    ended: Cell<Option<Box<BlockRequest>>>,
}

/// See the module.
pub(crate) struct Disk {
    pages: SharedPages,
    exchange: Rc<Exchange>,
    /// `None` while it is at the store.
    request: Option<Box<BlockRequest>>,
}

impl Disk {
    fn new() -> Result<Self, IntegrityError> {
        let pages = SharedPages::new("sidecore-integrity-open", MOST_BYTES)?;
        Ok(Self { pages, exchange: Rc::default(), request: Some(BlockRequest::blank(1)) })
    }

    async fn carry_out(
        &mut self,
        operation: Operation,
        (offset_bytes, len_bytes): (u64, u64),
    ) -> Result<(), IntegrityError> {
        let mut request = self.request.take().unwrap_or_else(|| BlockRequest::blank(1));
        request.operation = operation;
        (request.offset_bytes, request.len_bytes) = (offset_bytes, len_bytes);
        request.result = Ok(());
        request.segments.bind(self.pages.memory());
        if matches!(operation, Operation::Read | Operation::Write) {
            let hint = &mut RegionHint::default();
            let pushed = request.segments.push(GuestAddress(0), len_bytes, hint);
            pushed.map_err(|error| IntegrityError::Io(error.to_string()))?;
        }
        self.exchange.queued.set(Some(request));
        let ended = poll_fn(|_| self.exchange.ended.take().map_or(Poll::Pending, Poll::Ready));
        let mut request = ended.await;
        request.tag.take().map(Tag::into_bits);
        let result = request.result;
        self.request = Some(request);
        result.map_err(|error| {
            let what = format!("{operation:?} of {len_bytes} bytes at byte {offset_bytes}");
            IntegrityError::Io(format!("{what}: {error}"))
        })
    }

    /// Reads [`MOST_BYTES`] at most.
    pub(crate) async fn read(
        &mut self,
        at_bytes: u64,
        to: &mut [u8],
    ) -> Result<(), IntegrityError> {
        self.carry_out(Operation::Read, (at_bytes, to.len() as u64)).await?;
        let read = self.pages.memory().read_slice(GuestAddress(0), to, &mut RegionHint::default());
        read.map_err(|error| IntegrityError::Io(error.to_string()))
    }

    /// Writes [`MOST_BYTES`] at most.
    pub(crate) async fn write(&mut self, at_bytes: u64, data: &[u8]) -> Result<(), IntegrityError> {
        let memory = self.pages.memory();
        let put = memory.write_slice(GuestAddress(0), data, &mut RegionHint::default());
        put.map_err(|error| IntegrityError::Io(error.to_string()))?;
        self.carry_out(Operation::Write, (at_bytes, data.len() as u64)).await
    }

    /// Writes zeros, by the store's own means if it has any.
    pub(crate) async fn zero(
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
                Some(zeros) => self.write(at, zeros).await?,
                None => self.carry_out(Operation::WriteZeroes { may_unmap }, (at, count)).await?,
            }
            at = at.saturating_add(count);
        }
        Ok(())
    }

    pub(crate) async fn flush(&mut self) -> Result<(), IntegrityError> {
        self.carry_out(Operation::Flush, (0, 0)).await
    }
}

/// Runs code that opens or makes the store on `device`, and waits for its requests.
pub(crate) fn run<T>(
    device: &dyn BlockDevice,
    code: impl AsyncFnOnce(&mut Disk) -> Result<T, IntegrityError>,
) -> Result<T, IntegrityError> {
    let mut disk = Disk::new()?;
    let mut channel = device.open_channel(&CoreContext::default(), 1)?;
    channel.attach_memory(disk.pages.memory())?;
    let exchange = Rc::clone(&disk.exchange);
    let mut future = pin!(code(&mut disk));
    let (started, mut batch, mut completed) = (Instant::now(), Batch::new(), Batch::new());
    loop {
        if let Poll::Ready(result) = poll(future.as_mut()) {
            return result;
        }
        if let Some(mut request) = exchange.queued.take() {
            request.tag = Some(Tag::from_bits(0));
            batch.push(request);
        }
        // The store owns the buffer until the end, so there is no timeout.
        while completed.is_empty() {
            let now = Nanos::from(started.elapsed());
            channel.exchange(now, &mut batch, &mut completed);
            if completed.is_empty() {
                wait(&*channel, now);
            }
        }
        exchange.ended.set(completed.pop());
    }
}

fn poll<T>(future: Pin<&mut (impl Future<Output = T> + ?Sized)>) -> Poll<T> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn wait(channel: &dyn BlockChannel, now: Nanos) {
    let time = match channel.readiness().next {
        Next::Now => return,
        Next::At(at) => Duration::from(at.since(now)),
        Next::OnWake => Duration::from_secs(1),
    };
    let Some(wake) = channel.wake_fd() else { return std::thread::sleep(time.min(NAP)) };
    let timeout = Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(1),
        tv_nsec: time.subsec_nanos().into(),
    };
    // An interrupted wait is a short one.
    let wake = wake.as_fd();
    let _ = rustix::event::poll(&mut [PollFd::new(&wake, PollFlags::IN)], Some(&timeout));
}

/// Code that opens the store, and is polled.
pub(crate) struct Task {
    exchange: Rc<Exchange>,
    is_at_store: bool,
    future: Pin<Box<dyn Future<Output = Result<(), IntegrityError>>>>,
}

impl Task {
    pub(crate) fn new<F>(code: impl FnOnce(Disk) -> F) -> Result<Self, IntegrityError>
    where
        F: Future<Output = Result<(), IntegrityError>> + 'static,
    {
        let disk = Disk::new()?;
        let exchange = Rc::clone(&disk.exchange);
        Ok(Self { exchange, is_at_store: false, future: Box::pin(code(disk)) })
    }

    /// Goes on with the code. While it is pending, it waits for a request: the one that
    /// [`queued`](Self::queued) returns, or the one at the store.
    pub(crate) fn poll(&mut self) -> Poll<Result<(), IntegrityError>> {
        poll(self.future.as_mut())
    }

    /// A request for the store, without a tag.
    pub(crate) fn queued(&mut self) -> Option<Box<BlockRequest>> {
        let request = self.exchange.queued.take();
        self.is_at_store |= request.is_some();
        request
    }

    /// Whether the store has the request.
    pub(crate) fn is_at_store(&self) -> bool {
        self.is_at_store
    }

    /// Takes the request back from the store.
    pub(crate) fn came_back(&mut self, mut request: Box<BlockRequest>) {
        // The task may be dropped before it takes the request.
        request.tag.take().map(Tag::into_bits);
        self.exchange.ended.set(Some(request));
        self.is_at_store = false;
    }
}
