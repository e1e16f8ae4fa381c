//! A host of queues that keeps books, and insists on the order that controllers promise.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use sidecore_memory::{GuestAddress, GuestMemory, MemoryError, UserAddress};
use sidecore_nvme::{
    CompletionQueueSetup, CompletionQueueState, Done, Namespace, PositionState, QueueHost,
    QueuesState, StartError, SubmissionQueueSetup, SubmissionQueueState,
};
use sidecore_ring::nvme::Doorbells;

#[derive(Default)]
pub struct FakeHost(Mutex<Books>);

type AbortReply = Box<dyn FnOnce(bool) + Send>;

#[derive(Default)]
pub struct Books {
    /// Completion queues, and their vectors.
    pub completion: BTreeMap<u16, Option<u16>>,
    /// Submission queues, and their completion queues.
    pub submission: BTreeMap<u16, u16>,
    /// Whether stopping takes until [`FakeHost::release`].
    pub holds: bool,
    held: Vec<Done>,
    pub kicks: Vec<u16>,
    pub coalescing: (u16, u32),
    pub coalesced: BTreeMap<u16, bool>,
    pub shadow: Option<(GuestAddress, GuestAddress)>,
    pub events: BTreeMap<u16, bool>,
    pub namespace: Option<Arc<Namespace>>,
    pub memory_changes: usize,
    pub stops: usize,
    pub flushes: usize,
    pub pending: Vec<u16>,
    /// Aborts that were not answered yet.
    pub aborts: Vec<(u16, u16, AbortReply)>,
}

impl FakeHost {
    pub fn books(&self) -> MutexGuard<'_, Books> {
        self.0.lock().unwrap()
    }

    /// Answers what was held; how many that were.
    pub fn release(&self) -> usize {
        let held = std::mem::take(&mut self.books().held);
        let count = held.len();
        held.into_iter().for_each(Done::call);
        count
    }

    fn answer(&self, done: Done) {
        let mut books = self.books();
        if books.holds {
            books.held.push(done);
        } else {
            drop(books);
            done.call();
        }
    }
}

fn check(
    memory: &GuestMemory,
    id: u16,
    address: GuestAddress,
    bytes: u32,
) -> Result<(), StartError> {
    let window = memory.window(UserAddress(address.0), bytes as usize, 4096);
    window.map(|_| ()).map_err(|error: MemoryError| StartError::Memory { id, error })
}

impl QueueHost for FakeHost {
    fn start_completion_queue(&self, setup: CompletionQueueSetup) -> Result<(), StartError> {
        check(&setup.memory, setup.id, setup.address, setup.entries * 16)?;
        assert!((2..=65536).contains(&setup.entries) && setup.id > 0);
        assert!(self.books().completion.insert(setup.id, setup.vector).is_none(), "started twice");
        Ok(())
    }

    fn start_submission_queue(&self, setup: SubmissionQueueSetup) -> Result<(), StartError> {
        check(&setup.memory, setup.id, setup.address, setup.entries * 64)?;
        assert!((2..=65536).contains(&setup.entries) && setup.id > 0);
        let mut books = self.books();
        assert!(books.completion.contains_key(&setup.completion_queue), "no such completion queue");
        assert!(
            books.submission.insert(setup.id, setup.completion_queue).is_none(),
            "started twice"
        );
        Ok(())
    }

    fn stop_submission_queue(&self, id: u16, done: Done) {
        self.books().submission.remove(&id).expect("no such submission queue");
        self.answer(done);
    }

    fn stop_completion_queue(&self, id: u16, done: Done) {
        let mut books = self.books();
        assert!(books.submission.values().all(|used| *used != id), "a submission queue uses it");
        books.completion.remove(&id).expect("no such completion queue");
        drop(books);
        self.answer(done);
    }

    fn stop_all(&self, done: Done) {
        let mut books = self.books();
        books.completion.clear();
        books.submission.clear();
        books.stops += 1;
        drop(books);
        self.answer(done);
    }

    fn hand_over(&self, reply: Box<dyn FnOnce(Option<QueuesState>) + Send>) {
        let mut books = self.books();
        let submission = std::mem::take(&mut books.submission);
        let completion_queues =
            std::mem::take(&mut books.completion).into_iter().map(|(id, vector)| {
                let its = submission.iter().filter(|(_, completion)| **completion == id);
                let submission_queues = its.map(|(id, _)| SubmissionQueueState {
                    id: *id,
                    address: 0,
                    entries: 2,
                    head: 0,
                    ahead: None,
                });
                CompletionQueueState {
                    id,
                    address: 0,
                    entries: 2,
                    vector,
                    position: PositionState { head: 0, tail: 0, phase: true },
                    backlog: Vec::new(),
                    submission_queues: submission_queues.collect(),
                }
            });
        let queues =
            QueuesState { shadow_doorbells: None, completion_queues: completion_queues.collect() };
        drop(books);
        reply(Some(queues));
    }

    fn take_over(&self, _memory: &GuestMemory, queues: &QueuesState) -> Result<(), StartError> {
        let mut books = self.books();
        for queue in &queues.completion_queues {
            books.completion.insert(queue.id, queue.vector);
            books
                .submission
                .extend(queue.submission_queues.iter().map(|submission| (submission.id, queue.id)));
        }
        Ok(())
    }

    fn set_memory(&self, _memory: &GuestMemory, done: Done) {
        self.books().memory_changes += 1;
        self.answer(done);
    }

    fn set_vector(&self, vector: u16, event: Option<OwnedFd>) {
        self.books().events.insert(vector, event.is_some());
    }

    fn is_pending(&self, vector: u16) -> bool {
        self.books().pending.contains(&vector)
    }

    fn set_namespace(&self, namespace: Option<Arc<Namespace>>, done: Done) {
        self.books().namespace = namespace;
        self.answer(done);
    }

    fn flush(&self, done: Done) {
        self.books().flushes += 1;
        self.answer(done);
    }

    fn set_coalescing(&self, threshold: u16, time_us: u32) {
        self.books().coalescing = (threshold, time_us);
    }

    fn set_vector_coalescing(&self, vector: u16, enabled: bool) {
        self.books().coalesced.insert(vector, enabled);
    }

    fn abort(&self, queue: u16, command: u16, reply: Box<dyn FnOnce(bool) + Send>) {
        self.books().aborts.push((queue, command, reply));
    }

    fn set_doorbells(&self, _doorbells: Arc<Doorbells>) {
        let books = self.books();
        assert!(
            books.completion.is_empty() && books.submission.is_empty(),
            "queues look at other doorbells"
        );
    }

    fn kick(&self, queue: u16) {
        self.books().kicks.push(queue);
    }

    fn set_shadow_doorbells(&self, pages: Option<(GuestAddress, GuestAddress)>) {
        self.books().shadow = pages;
    }
}
