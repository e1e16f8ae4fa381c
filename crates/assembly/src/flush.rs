//! A flush outside of any queue: the last flush of a store, or that of a controller's shutdown.

use std::io;
use std::time::{Duration, Instant};

use sidecore_block::{Batch, BlockDevice, BlockRequest, Operation, Tag};
use sidecore_linux::Clock;
use sidecore_reactor::CoreContext;

/// Longer than any disk takes for a flush that it will ever finish.
const PATIENCE: Duration = Duration::from_secs(60);

/// Makes all written data durable and logs the result. False if writes may be lost.
pub(crate) fn flush(name: &str, device: &dyn BlockDevice) -> bool {
    match flush_and_wait(device) {
        Ok(()) => tracing::info!(store = name, "flushed"),
        Err(error) => {
            tracing::error!(store = name, "the last flush failed, writes may be lost: {error}");
            return false;
        }
    }
    true
}

/// Flushes a store and waits for the completion.
///
/// # Errors
/// The store's error, or [`TimedOut`](io::ErrorKind::TimedOut) if the flush took longer than any
/// disk does.
pub(crate) fn flush_and_wait(device: &dyn BlockDevice) -> io::Result<()> {
    let mut channel = device.open_channel(&CoreContext::default(), 1)?;
    let mut request = BlockRequest::blank(0);
    request.operation = Operation::Flush;
    request.tag = Some(Tag::from_bits(0));
    let (mut batch, mut completed) = (vec![request], Batch::new());
    let (clock, started) = (Clock::new(), Instant::now());
    let mut result = Ok(());
    loop {
        channel.exchange(clock.now(), &mut batch, &mut completed);
        if let Some(mut request) = completed.pop() {
            request.tag.take().map(Tag::into_bits);
            return result.and(request.result.map_err(io::Error::other));
        }
        // The store owns the request until it completes, so this thread cannot give the flush up.
        if started.elapsed() > PATIENCE && result.is_ok() {
            tracing::warn!("a flush takes long");
            result = Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}
