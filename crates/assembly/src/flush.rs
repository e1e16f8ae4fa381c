//! A flush outside of any queue: the last flush of a store, or that of a controller's shutdown.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use sidecore_block::{Batch, BlockDevice, BlockRequest, Operation, Tag};
use sidecore_linux::Clock;
use sidecore_reactor::CoreContext;

use crate::mirrors::Mirrors;
use crate::remote::Remote;
use crate::stores::Unflushed;

/// The time that a last flush waits for an IOhost that is away.
pub(crate) const AWAY_PATIENCE: Duration = Duration::from_secs(5);

/// The time between two looks at flushes that have not ended.
const LOOK: Duration = Duration::from_millis(50);

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

/// Flushes stores side by side. Returns the names of those that may have lost writes. A store
/// whose IOhost is away, or a mirror that waits for legs, is given up after a while, so that this
/// ends.
pub(crate) fn flush_all(
    stores: Vec<Unflushed>,
    (remote, mirrors): (&Remote, &Mirrors),
) -> Vec<String> {
    let (sender, flushed) = channel();
    // Each with the time since when its IOhost is away.
    let (mut running, mut lost) = (BTreeMap::<String, Option<Instant>>::new(), Vec::new());
    for (name, store) in stores {
        let (sender, its) = (sender.clone(), name.clone());
        let run = move || {
            let is_flushed = flush(&its, store.as_ref());
            drop(store);
            let _ = sender.send((its, is_flushed));
        };
        match std::thread::Builder::new().name(format!("flush-{name}")).spawn(run) {
            Ok(_) => drop(running.insert(name, None)),
            Err(error) => {
                tracing::error!(store = name, "no last flush, writes may be lost: {error}");
                lost.push(name);
            }
        }
    }
    drop(sender);
    while !running.is_empty() {
        match flushed.recv_timeout(LOOK) {
            Ok((name, is_flushed)) => {
                running.remove(&name);
                lost.extend((!is_flushed).then_some(name));
            }
            // A thread has panicked.
            Err(RecvTimeoutError::Disconnected) => {
                lost.extend(std::mem::take(&mut running).into_keys());
            }
            Err(RecvTimeoutError::Timeout) => {
                running.retain(|name, away| {
                    let is_left = give_up(name, away, (remote, mirrors));
                    lost.extend(is_left.then(|| name.clone()));
                    !is_left
                });
            }
        }
    }
    lost
}

/// Fails the flush of a store whose IOhost is away for too long. True if it is that of a mirror
/// that waits: it may never end, and is left alone.
fn give_up(name: &str, away: &mut Option<Instant>, (remote, mirrors): (&Remote, &Mirrors)) -> bool {
    let is_mirror = mirrors.waits(name).is_some();
    if !is_mirror && remote.is_ready(name) {
        *away = None;
        return false;
    }
    if away.get_or_insert_with(Instant::now).elapsed() < AWAY_PATIENCE {
        return false;
    }
    remote.abandon(name);
    is_mirror
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
