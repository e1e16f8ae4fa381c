//! The threads of the hypervisor side: some serve misses, and one commits. None of them is on the
//! data path; all of them sleep while there is nothing to do.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use sidecore_block::BlockDevice;

use crate::ControllerError;
use crate::hypervisor::{Hypervisor, NextCommit};
use crate::mail::Message;
use crate::physical::PhysicalDisk;

/// Threads that serve misses: while one waits for the store, another works.
const SERVERS: usize = 2;

/// The highest nice value (setpriority(2)).
const HIGHEST_PRIORITY: i32 = -20;

/// The interval between checks of an epoch that a question or a block waits for.
const EPOCH_RETRY: Duration = Duration::from_millis(1);

/// Queued questions, by function. Functions are served by weight (stride scheduling: Waldspurger
/// 1995), so that one function's misses, also from many queues, do not delay another's.
pub(crate) struct Inbox {
    messages: Receiver<Mail>,
    functions: BTreeMap<u32, Questions>,
    /// The pass of the question served last.
    pass: u64,
    stopped: bool,
}

/// A function's queued questions, and its place in the order.
#[derive(Default)]
struct Questions {
    waiting: VecDeque<Message>,
    /// The function with the smallest pass is served next.
    pass: u64,
}

/// The increment of the pass for each question of a function with a weight of one.
const STRIDE: u64 = 1 << 20;

/// The messages to the hypervisor side.
pub(crate) enum Mail {
    /// A question, or a notice, of a channel.
    Message(Message),
    /// The last message.
    Stop,
}

impl Inbox {
    pub(crate) fn new(messages: Receiver<Mail>) -> Self {
        Self { messages, functions: BTreeMap::new(), pass: 0, stopped: false }
    }

    fn put(&mut self, mail: Mail) {
        match mail {
            Mail::Message(message) => {
                let questions = self.functions.entry(message.function.0).or_default();
                if questions.waiting.is_empty() {
                    // A function without questions for a while has saved nothing up.
                    questions.pass = questions.pass.max(self.pass);
                }
                questions.waiting.push_back(message);
            }
            Mail::Stop => self.stopped = true,
        }
    }

    /// The next question, if one is queued.
    pub(crate) fn try_next(&mut self) -> Option<Message> {
        while let Ok(mail) = self.messages.try_recv() {
            self.put(mail);
        }
        let waiting = self.functions.values_mut().filter(|questions| !questions.waiting.is_empty());
        let questions = waiting.min_by_key(|questions| questions.pass)?;
        let message = questions.waiting.pop_front()?;
        self.pass = questions.pass;
        let stride = STRIDE.checked_div(u64::from(message.weight)).unwrap_or(STRIDE);
        questions.pass = questions.pass.saturating_add(stride);
        let pass = self.pass;
        self.functions
            .retain(|_, questions| !questions.waiting.is_empty() || questions.pass > pass);
        Some(message)
    }

    /// Waits for the next question. `None` after [`Mail::Stop`], or when all senders are gone.
    fn next(&mut self) -> Option<Message> {
        loop {
            if let Some(message) = self.try_next() {
                return Some(message);
            }
            if self.stopped {
                return None;
            }
            match self.messages.recv() {
                Ok(mail) => self.put(mail),
                Err(_) => return None,
            }
        }
    }
}

/// The running threads. They end after [`Inbox`] and
/// [`CommitQueue`](crate::hypervisor::CommitQueue) were told to stop.
#[derive(Default)]
pub(crate) struct Threads {
    servers: Vec<JoinHandle<()>>,
    committer: Option<JoinHandle<()>>,
}

impl Threads {
    /// Starts the threads, each with its own channel to the store.
    pub(crate) fn start(
        hypervisor: &Arc<Hypervisor>,
        inbox: Inbox,
        store: &Arc<dyn BlockDevice>,
        commit_interval: Duration,
    ) -> Result<Self, ControllerError> {
        let inbox = Arc::new(Mutex::new(inbox));
        let mut threads = Self::default();
        for index in 0..SERVERS {
            let (hypervisor, inbox) = (Arc::clone(hypervisor), Arc::clone(&inbox));
            let name = format!("miss-{index}");
            let thread = start(name, store, move |mut disk| serve(&hypervisor, &inbox, &mut disk))?;
            threads.servers.push(thread);
        }
        let committing = Arc::clone(hypervisor);
        let commit = move |mut disk: PhysicalDisk| commit(&committing, commit_interval, &mut disk);
        threads.committer = Some(start("commit".to_owned(), store, commit)?);
        Ok(threads)
    }

    /// Waits for the threads that serve misses to end.
    pub(crate) fn join_servers(&mut self) {
        for thread in self.servers.drain(..) {
            join(thread);
        }
    }

    /// Waits for the last commit.
    pub(crate) fn join_committer(&mut self) {
        if let Some(thread) = self.committer.take() {
            join(thread);
        }
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("a thread of the controller has panicked");
    }
}

/// Starts a thread, and waits until it has opened its channel to the store.
fn start(
    name: String,
    store: &Arc<dyn BlockDevice>,
    run: impl FnOnce(PhysicalDisk) + Send + 'static,
) -> Result<JoinHandle<()>, ControllerError> {
    let (ready, opened): (SyncSender<io::Result<()>>, _) = mpsc::sync_channel(1);
    let store = Arc::clone(store);
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        // Guests and polling sidecores leave no core idle. A miss is short, and must not wait for
        // the end of their time slices. Without the privilege to raise its priority, it does wait.
        let _ = rustix::process::setpriority_process(None, HIGHEST_PRIORITY);
        let disk = match PhysicalDisk::open(&store) {
            Ok(disk) => disk,
            Err(error) => return drop(ready.send(Err(error))),
        };
        let _ = ready.send(Ok(()));
        drop(ready);
        run(disk);
    })?;
    match opened.recv() {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(io::Error::other("a thread of the controller has panicked").into()),
    }
}

fn serve(hypervisor: &Hypervisor, inbox: &Mutex<Inbox>, disk: &mut PhysicalDisk) {
    loop {
        // Locked while waiting: the other threads have nothing to do either.
        let next = inbox.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(message) = next else { return };
        hypervisor.serve(message, disk);
    }
}

fn commit(hypervisor: &Hypervisor, interval: Duration, disk: &mut PhysicalDisk) {
    let mut waiting = false;
    loop {
        let next = hypervisor.commits.wait(interval, waiting.then_some(EPOCH_RETRY));
        if next == NextCommit::Stop {
            hypervisor.close();
        }
        if next != NextCommit::Later {
            // The commit reports its error to the requests that wait for it, and to the operator.
            let _ = hypervisor.commit(disk);
            hypervisor.back_reserve(disk);
            hypervisor.note_fullness();
        }
        if next == NextCommit::Stop {
            return;
        }
        let blocks = hypervisor.reuse_blocks(disk).unwrap_or_else(|error| {
            tracing::debug!("the store refuses a discard: {error}");
            true
        });
        waiting = hypervisor.retry_after_epoch(disk) || blocks;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Sender;

    use sidecore_extent::FunctionId;
    use sidecore_reactor::EventFd;

    use super::*;
    use crate::mail::{Question, ReplyTo};

    fn ask(inbox: &Sender<Mail>, function: u32, weight: u32) {
        let (sender, _) = mpsc::channel();
        let reply_to = ReplyTo { sender, wake: Arc::new(EventFd::new().unwrap()), slot: 0 };
        let message = Message {
            function: FunctionId(function),
            weight,
            reply_to,
            question: Question::Commit,
        };
        inbox.send(Mail::Message(message)).unwrap();
    }

    /// The number of questions served for each function of `(weight, number of queued questions)`.
    fn served(functions: &[(u32, usize)]) -> Vec<u64> {
        let (sender, messages) = mpsc::channel();
        let mut inbox = Inbox::new(messages);
        for (function, (weight, count)) in (1_u32..).zip(functions) {
            (0..*count).for_each(|_| ask(&sender, function, *weight));
        }
        let mut served = vec![0; functions.len()];
        for _ in 0..10_000 {
            let function = inbox.try_next().unwrap().function.0;
            served[function as usize - 1] += 1;
            ask(&sender, function, functions[function as usize - 1].0);
        }
        served
    }

    #[test]
    fn misses_are_served_by_weight_whatever_number_waits() {
        for weights in [(100, 100), (100, 400), (400, 100), (100, 101)] {
            for counts in [(16, 16), (64, 16), (16, 64), (128, 16), (1, 128)] {
                let served = served(&[(weights.0, counts.0), (weights.1, counts.1)]);
                let wanted = f64::from(weights.0) / f64::from(weights.1);
                let off = served[0] as f64 / served[1] as f64 / wanted - 1.0;
                assert!(off.abs() < 0.01, "{weights:?} {counts:?}: {served:?}");
            }
        }
    }

    #[test]
    fn a_function_that_rested_does_not_keep_the_others_waiting() {
        let (sender, messages) = mpsc::channel();
        let mut inbox = Inbox::new(messages);
        for _ in 0..1_000 {
            ask(&sender, 1, 1);
            assert_eq!(inbox.try_next().unwrap().function.0, 1);
        }
        (0..100).for_each(|_| ask(&sender, 1, 1));
        (0..100).for_each(|_| ask(&sender, 2, 1));
        let first: Vec<_> = (0..20).map(|_| inbox.try_next().unwrap().function.0).collect();
        assert_eq!(first.iter().filter(|function| **function == 1).count(), 10, "{first:?}");
    }
}
