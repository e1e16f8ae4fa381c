//! Another store in the place of a device's, while the device is in use.
//!
//! A channel to the next store is opened beside that of each queue. Then all queues pause, and when
//! none has a request in flight, they go on with the next store. Only the last part keeps the guest
//! waiting, and nothing has changed if a step before it fails.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use sidecore_block::{BlockDevice, SwapChannel};
use sidecore_nvme::io::SendTask;
use sidecore_reactor::Pollable;
use sidecore_sidecore::Handle;

/// The time that requests in flight get to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why the store of a device cannot be replaced. The device serves its store as before.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotSwapped {
    /// This front end cannot.
    #[error("{0}")]
    FrontEnd(&'static str),
    /// The device was closed, its host has attached another store, or its guest has started a
    /// queue.
    #[error("its guest or another command has changed the device meanwhile; try again")]
    Changed,
    #[error("a queue cannot open a channel to the store with its stages: {0}")]
    Channel(io::Error),
    #[error(
        "requests in flight have not ended within {} seconds; try again when its store answers",
        PATIENCE.as_secs()
    )]
    StillInFlight,
}

/// The queues of a device that has gone on with another store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Swapped {
    pub(crate) queues: usize,
    /// The longest time in which a sidecore opened a channel, and took no requests.
    pub(crate) opening: Duration,
    /// The time in which queues were paused, until requests in flight had ended.
    pub(crate) paused: Duration,
    /// The longest time in which a sidecore closed a channel.
    pub(crate) closing: Duration,
}

impl Swapped {
    /// The time in which queues took no requests, or may not have done so.
    pub(crate) fn pause(&self) -> Duration {
        self.opening + self.paused + self.closing
    }
}

/// A task for a queue, on its sidecore.
type Change = Box<dyn FnOnce(&mut dyn SwapChannel) + Send>;

/// A running queue, as other threads see it. A task is dropped if the queue has ended.
pub(crate) trait Line {
    /// Opens a channel to the store beside the one in use, and replies with the time that it took.
    fn open(&self, store: Arc<dyn BlockDevice>, reply: Sender<io::Result<Duration>>);

    /// Runs a task on the queue.
    fn tell(&self, task: Change);

    /// Closes the channel beside the one in use, and replies with the time that it took.
    fn close(&self, reply: Sender<Duration>);
}

impl<U: Pollable + SwapChannel> Line for Handle<U> {
    fn open(&self, store: Arc<dyn BlockDevice>, reply: Sender<io::Result<Duration>>) {
        self.change(move |queue, mut around| {
            let begun = Instant::now();
            let opened = store.open_channel(around.core(), queue.depth()).and_then(|channel| {
                if let Some(fd) = channel.wake_fd() {
                    around.watch(fd)?;
                }
                queue.set_spare(Some(channel))
            });
            let _ = reply.send(opened.map(|_| begun.elapsed()));
        });
    }

    fn tell(&self, task: Change) {
        self.change(move |queue, _| task(queue));
    }

    fn close(&self, reply: Sender<Duration>) {
        self.change(move |queue, mut around| {
            let begun = Instant::now();
            if let Ok(Some(channel)) = queue.set_spare(None)
                && let Some(fd) = channel.wake_fd()
            {
                around.unwatch(fd);
            }
            let _ = reply.send(begun.elapsed());
        });
    }
}

impl Line for SendTask {
    fn open(&self, store: Arc<dyn BlockDevice>, reply: Sender<io::Result<Duration>>) {
        self(Box::new(move |queue| {
            let begun = Instant::now();
            let opened = store.open_channel(queue.core(), queue.depth());
            let opened = opened.and_then(|channel| queue.set_spare(Some(channel)));
            let _ = reply.send(opened.map(|_| begun.elapsed()));
        }));
    }

    fn tell(&self, task: Change) {
        self(Box::new(move |queue| task(queue)));
    }

    fn close(&self, reply: Sender<Duration>) {
        self(Box::new(move |queue| {
            let begun = Instant::now();
            drop(queue.set_spare(None));
            let _ = reply.send(begun.elapsed());
        }));
    }
}

/// Has all running queues of a device go on with `store`. Calls `commit` while they are paused,
/// which has queues that start later use the store, too; false if `lines` are not all queues any
/// more.
pub(crate) fn swap(
    lines: &[&dyn Line],
    store: &Arc<dyn BlockDevice>,
    commit: impl FnOnce() -> bool,
) -> Result<Swapped, NotSwapped> {
    if lines.is_empty() {
        return if commit() { Ok(Swapped::default()) } else { Err(NotSwapped::Changed) };
    }
    let opened: io::Result<Vec<Duration>> =
        ask(lines, |line, reply| line.open(Arc::clone(store), reply)).into_iter().collect();
    let opened = opened.map_err(|error| {
        close(lines);
        NotSwapped::Channel(error)
    })?;
    let begun = Instant::now();
    let refusal = match pause(lines) {
        false => Some(NotSwapped::StillInFlight),
        true => (!commit()).then_some(NotSwapped::Changed),
    };
    resume(lines, refusal.is_none());
    if let Some(refusal) = refusal {
        close(lines);
        return Err(refusal);
    }
    let paused = begun.elapsed();
    let opening = opened.into_iter().max().unwrap_or_default();
    Ok(Swapped { queues: lines.len(), opening, paused, closing: close(lines) })
}

/// Asks all queues, and waits for the answers of those that have not ended.
fn ask<T>(lines: &[&dyn Line], question: impl Fn(&dyn Line, Sender<T>)) -> Vec<T> {
    let (reply, answers) = channel();
    lines.iter().for_each(|line| question(*line, reply.clone()));
    drop(reply);
    answers.into_iter().collect()
}

/// Pauses all queues. False if some have requests in flight for too long.
fn pause(lines: &[&dyn Line]) -> bool {
    let (reply, paused) = channel::<()>();
    for line in lines {
        let reply = reply.clone();
        // Dropped when the queue has paused, or has ended.
        line.tell(Box::new(move |queue| queue.pause(Box::new(move || drop(reply)))));
    }
    drop(reply);
    paused.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Disconnected)
}

fn resume(lines: &[&dyn Line], swaps: bool) {
    ask(lines, |line, reply| {
        line.tell(Box::new(move |queue| {
            queue.resume(swaps);
            let _ = reply.send(());
        }));
    });
}

/// Closes the channels that are not in use. Returns the longest time that this took.
fn close(lines: &[&dyn Line]) -> Duration {
    ask(lines, |line, reply| line.close(reply)).into_iter().max().unwrap_or_default()
}

/// Whether both are the same store.
pub(crate) fn is_same(one: Option<&Arc<dyn BlockDevice>>, other: &Arc<dyn BlockDevice>) -> bool {
    one.is_some_and(|one| std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other)))
}
