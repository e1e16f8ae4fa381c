//! All I/O queues of a controller, wherever they run.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use sidecore_memory::{GuestAddress, GuestMemory};
use sidecore_reactor::{CoreContext, EventFd, Signal, Unit};
use sidecore_ring::nvme::Doorbells;
use sidecore_units::Nanos;

use super::completions::Coalescing;
use super::queue::{IoQueue, Start};
use super::shared::Shared;
use super::{IoOptions, QueueStats};
use crate::{
    CompletionQueueSetup, CompletionQueueState, Done, ErrorLog, Namespace, QueueEvent, QueueHost,
    QueuesState, StartError, SubmissionQueueSetup,
};

/// Makes a queue, on its sidecore.
pub type MakeQueue = Box<dyn FnOnce(&Rc<CoreContext>) -> Result<IoQueue, StartError> + Send>;

/// Does something to a queue, on its sidecore.
pub type Task = Box<dyn FnOnce(&mut IoQueue) + Send>;

/// Sends tasks to one queue, which runs them in the order of the calls; does not wait. If the queue
/// or its sidecore is gone, the task is dropped.
pub type SendTask = Arc<dyn Fn(Task) + Send + Sync>;

/// A sidecore that runs queues.
pub trait QueueRunner: Send + Sync {
    /// Makes completion queue `id` there and starts to poll it. Waits for that: a turn at most.
    ///
    /// # Errors
    /// The queue's, or [`StartError::SidecoreGone`].
    fn start(&self, id: u16, make: MakeQueue) -> Result<SendTask, StartError>;
}

/// A completion queue that runs.
struct Running {
    send: SendTask,
    kick: Arc<EventFd>,
    vector: Option<u16>,
}

impl Running {
    fn send(&self, task: impl FnOnce(&mut IoQueue) + Send + 'static) {
        (self.send)(Box::new(task));
    }
}

/// An interrupt vector.
struct Vector {
    event: Option<OwnedFd>,
    is_coalesced: bool,
}

/// Handles that are to be called when what is ending has ended.
type Followers = Mutex<Vec<Done>>;

/// Queues, by their numbers, or flushes that are ending, and for which no call has waited.
type Ending = Vec<(u16, Weak<Followers>)>;

/// The number that no queue has.
const NO_QUEUE: u16 = 0;

/// The events that queues signal no longer.
type Retired = (mpsc::Sender<Box<dyn Signal>>, mpsc::Receiver<Box<dyn Signal>>);

struct State {
    /// By number.
    queues: BTreeMap<u16, Running>,
    /// Queues that were told to end, and may still have something at the store.
    ending: Ending,
    /// Flushes: they use a namespace, and nothing else.
    flushing: Ending,
    /// The completion queue of each submission queue.
    submissions: BTreeMap<u16, u16>,
    vectors: Vec<Vector>,
    coalescing: Option<Coalescing>,
    namespace: Option<Arc<Namespace>>,
    shadow: Option<(GuestAddress, GuestAddress)>,
    doorbells: Arc<Doorbells>,
    /// The events that queues no longer signal. Closing a descriptor takes tens of microseconds,
    /// which a sidecore has better uses for.
    retired: Retired,
}

impl State {
    fn coalescing_of(&self, vector: Option<u16>) -> Option<Coalescing> {
        let vector = self.vectors.get(usize::from(vector?))?;
        self.coalescing.filter(|_| vector.is_coalesced)
    }
}

/// A [`QueueHost`] over sidecores. Completion queues take them in turn, by their numbers; a
/// submission queue is on its completion queue's.
pub struct QueueSet {
    shared: Arc<Shared>,
    runners: Vec<Box<dyn QueueRunner>>,
    state: Mutex<State>,
}

impl QueueSet {
    /// No queues yet. `report` is called on sidecores and must not wait.
    ///
    /// # Errors
    /// There is no runner, or the kernel has no memory for the queues' buffers.
    pub fn new(
        options: IoOptions,
        runners: Vec<Box<dyn QueueRunner>>,
        report: Box<dyn Fn(QueueEvent) + Send + Sync>,
    ) -> io::Result<Self> {
        if runners.is_empty() || options.queue_pairs == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "queues need a sidecore"));
        }
        let vectors =
            (0..options.vectors).map(|_| Vector { event: None, is_coalesced: true }).collect();
        let state = State {
            queues: BTreeMap::new(),
            ending: Ending::new(),
            flushing: Ending::new(),
            submissions: BTreeMap::new(),
            vectors,
            coalescing: None,
            namespace: None,
            shadow: None,
            doorbells: Arc::clone(&options.doorbells),
            retired: mpsc::channel(),
        };
        Ok(Self { shared: Shared::new(options, report)?, runners, state: Mutex::new(state) })
    }

    /// The counters of a completion queue, from number 1, with those of the submission queues that
    /// complete into it.
    #[must_use]
    pub fn stats(&self, queue: u16) -> Option<&QueueStats> {
        self.shared.stats(queue).map(|stats| &**stats)
    }

    /// How many I/O queue pairs there can be.
    #[must_use]
    pub fn queue_pairs(&self) -> u16 {
        self.shared.options.queue_pairs
    }

    /// How many completion queues are running.
    #[must_use]
    pub fn running_count(&self) -> usize {
        self.state().queues.len()
    }

    /// The way to each completion queue that is running.
    #[must_use]
    pub fn senders(&self) -> Vec<SendTask> {
        self.state().queues.values().map(|running| Arc::clone(&running.send)).collect()
    }

    /// Has queues that start from now on use a namespace that differs from the present one in its
    /// store alone. So does each running queue that is not in `changed`, as soon as nothing of it
    /// is in flight: the caller changes the others.
    pub fn adopt_namespace(&self, namespace: &Arc<Namespace>, changed: &[SendTask]) {
        let mut state = self.state();
        state.namespace = Some(Arc::clone(namespace));
        for running in state.queues.values() {
            if !changed.iter().any(|send| Arc::ptr_eq(send, &running.send)) {
                let namespace = Some(Arc::clone(namespace));
                running.send(move |queue| queue.set_namespace(namespace, Done::ignored()));
            }
        }
    }

    /// Aborts a command that the store has not got yet (NVMe base 2.0, 5.1), and says whether there
    /// was one.
    pub fn abort(
        &self,
        submission: u16,
        command_id: u16,
        reply: impl FnOnce(bool) + Send + 'static,
    ) {
        let state = self.state();
        let Some(running) = state.submissions.get(&submission).and_then(|id| state.queues.get(id))
        else {
            return reply(false);
        };
        running.send(move |queue| reply(queue.abort(submission, command_id)));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics between two changes that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a task to all queues, done when each of them has dropped its part of `done`, and those
    /// that are ending have ended: until then they hold the old memory, namespace or event.
    fn send_to_all<T: FnOnce(&mut IoQueue, Done) + Send + 'static>(
        &self,
        state: &mut State,
        done: Done,
        mut task: impl FnMut() -> T,
    ) {
        let part = parts(done);
        for running in state.queues.values() {
            let (task, part) = (task(), part());
            running.send(move |queue| task(queue, part));
        }
        follow(&mut state.ending, part);
    }

    /// The event of a vector, duplicated for one more queue.
    fn event(&self, state: &State, vector: Option<u16>) -> Option<Box<dyn Signal>> {
        let event = state.vectors.get(usize::from(vector?))?.event.as_ref()?;
        match (self.shared.options.signal)(event.as_fd()) {
            Ok(event) => Some(event),
            Err(error) => {
                let device = &self.shared.options.name;
                tracing::error!(device, vector, "the interrupt's descriptor is unusable: {error}");
                None
            }
        }
    }

    /// Starts a completion queue, new or where another process has left it.
    fn start(
        &self,
        state: &mut State,
        setup: CompletionQueueSetup,
        from: Option<CompletionQueueState>,
    ) -> Result<(), StartError> {
        let id = setup.id;
        let refuse =
            |why| StartError::Io { id, error: io::Error::new(io::ErrorKind::InvalidInput, why) };
        if id == 0 || id > self.queue_pairs() {
            return Err(refuse("there is no such queue"));
        }
        if state.queues.contains_key(&id) {
            return Err(refuse("it is running already"));
        }
        if state
            .ending
            .iter()
            .any(|(ending, followers)| *ending == id && followers.strong_count() > 0)
        {
            return Err(refuse("one of the same number has not ended yet"));
        }
        let index = usize::from(id.saturating_sub(1)).checked_rem(self.runners.len()).unwrap_or(0);
        let Some(runner) = self.runners.get(index) else { return Err(StartError::SidecoreGone) };
        let kick = Arc::new(EventFd::new().map_err(|error| StartError::Io { id, error })?);
        let vector = setup.vector;
        let start = Start {
            shared: Arc::clone(&self.shared),
            kick: Arc::clone(&kick),
            event: self.event(state, vector),
            coalescing: state.coalescing_of(vector),
            namespace: state.namespace.clone(),
            shadow: state.shadow,
            doorbells: Arc::clone(&state.doorbells),
            setup,
            from,
        };
        let send = runner.start(id, Box::new(move |core| IoQueue::new(start, core)))?;
        state.queues.insert(id, Running { send, kick, vector });
        Ok(())
    }
}

/// Makes parts of a handle, which is called when the last of them, and what makes them, is gone.
fn parts(done: Done) -> impl Fn() -> Done {
    let done = Arc::new(Mutex::new(done));
    move || {
        let part = Arc::clone(&done);
        Done::new(move || drop(part))
    }
}

/// `done`, for what is told to end.
fn end(ending: &mut Ending, id: u16, done: Done) -> Done {
    let followers = Arc::new(Followers::default());
    ending.retain(|(_, followers)| followers.strong_count() > 0);
    ending.push((id, Arc::downgrade(&followers)));
    Done::new(move || {
        drop(followers);
        done.call();
    })
}

/// Leaves a part with everything that is ending.
fn follow(ending: &mut Ending, part: impl Fn() -> Done) {
    ending.retain(|(_, followers)| {
        let Some(followers) = followers.upgrade() else { return false };
        // If it ends just now, this is the last hold on the list, and calls what is in it.
        followers.lock().unwrap_or_else(PoisonError::into_inner).push(part());
        true
    });
}

impl QueueHost for QueueSet {
    fn start_completion_queue(&self, setup: CompletionQueueSetup) -> Result<(), StartError> {
        self.start(&mut self.state(), setup, None)
    }

    fn start_submission_queue(&self, setup: SubmissionQueueSetup) -> Result<(), StartError> {
        let (id, completion_queue) = (setup.id, setup.completion_queue);
        let mut state = self.state();
        let Some(running) = state.queues.get(&completion_queue) else {
            let error =
                io::Error::new(io::ErrorKind::InvalidInput, "its completion queue is not running");
            return Err(StartError::Io { id, error });
        };
        let (reply, answer) = mpsc::sync_channel(1);
        running.send(move |queue| {
            // The caller waits for this reply.
            let _ = reply.send(queue.add_submission(&setup));
        });
        answer.recv().map_err(|_| StartError::SidecoreGone)??;
        state.submissions.insert(id, completion_queue);
        Ok(())
    }

    fn stop_submission_queue(&self, id: u16, done: Done) {
        let mut state = self.state();
        let Some(completion_queue) = state.submissions.remove(&id) else { return };
        if let Some(running) = state.queues.get(&completion_queue) {
            running.send(move |queue| queue.remove_submission(id, done));
        }
    }

    fn stop_completion_queue(&self, id: u16, done: Done) {
        let mut state = self.state();
        state.submissions.retain(|_, completion_queue| *completion_queue != id);
        if let Some(running) = state.queues.remove(&id) {
            let done = end(&mut state.ending, id, done);
            running.send(move |queue| queue.end(done));
        }
    }

    fn stop_all(&self, done: Done) {
        let mut state = self.state();
        for (id, running) in std::mem::take(&mut state.queues) {
            let done = end(&mut state.ending, id, Done::ignored());
            running.send(move |queue| queue.end(done));
        }
        state.submissions.clear();
        self.send_to_all(&mut state, done, || |_: &mut IoQueue, _| {});
    }

    fn hand_over(&self, reply: Box<dyn FnOnce(Option<QueuesState>) + Send>) {
        let mut state = self.state();
        let queues = std::mem::take(&mut state.queues);
        state.submissions.clear();
        let count = queues.len();
        let shadow_doorbells = state.shadow.map(|(shadow, event_index)| (shadow.0, event_index.0));
        let left = Arc::new(Mutex::new(Vec::with_capacity(count)));
        let all = Arc::clone(&left);
        let part = parts(Done::new(move || {
            let completion_queues =
                std::mem::take(&mut *all.lock().unwrap_or_else(PoisonError::into_inner));
            // One that is missing was on a sidecore that has gone.
            let is_whole = completion_queues.len() == count;
            reply(is_whole.then_some(QueuesState { shadow_doorbells, completion_queues }));
        }));
        for (id, running) in queues {
            let done = end(&mut state.ending, id, Done::ignored());
            let left = Arc::clone(&left);
            let stopped = Box::new(move |state| {
                left.lock().unwrap_or_else(PoisonError::into_inner).push(state);
                done.call();
            });
            running.send(move |queue| queue.stop(stopped));
        }
        follow(&mut state.ending, part);
    }

    fn take_over(&self, memory: &GuestMemory, queues: &QueuesState) -> Result<(), StartError> {
        let mut state = self.state();
        state.shadow = queues
            .shadow_doorbells
            .map(|(shadow, event)| (GuestAddress(shadow), GuestAddress(event)));
        for queue in &queues.completion_queues {
            let CompletionQueueState { id, address, entries, vector, .. } = *queue;
            let setup = CompletionQueueSetup {
                id,
                memory: memory.clone(),
                address: GuestAddress(address),
                entries,
                vector,
            };
            self.start(&mut state, setup, Some(queue.clone()))?;
            state
                .submissions
                .extend(queue.submission_queues.iter().map(|submission| (submission.id, id)));
        }
        Ok(())
    }

    fn set_memory(&self, memory: &GuestMemory, done: Done) {
        self.send_to_all(&mut self.state(), done, || {
            let memory = memory.clone();
            move |queue: &mut IoQueue, done| queue.set_memory(memory, done)
        });
    }

    fn set_vector(&self, vector: u16, event: Option<OwnedFd>) {
        let mut state = self.state();
        let Some(entry) = state.vectors.get_mut(usize::from(vector)) else { return };
        entry.event = event;
        state.retired.1.try_iter().for_each(drop);
        for running in state.queues.values().filter(|running| running.vector == Some(vector)) {
            let event = self.event(&state, Some(vector));
            let retired = state.retired.0.clone();
            running.send(move |queue| {
                if let Some(old) = queue.set_event(event) {
                    let _ = retired.send(old);
                }
            });
        }
    }

    fn is_pending(&self, vector: u16) -> bool {
        self.shared.is_pending(vector)
    }

    fn set_namespace(&self, namespace: Option<Arc<Namespace>>, done: Done) {
        let mut state = self.state();
        state.namespace.clone_from(&namespace);
        let part = parts(done);
        follow(&mut state.flushing, &part);
        self.send_to_all(&mut state, part(), || {
            let namespace = namespace.clone();
            move |queue: &mut IoQueue, done| queue.set_namespace(namespace, done)
        });
    }

    fn error_log(&self) -> Arc<ErrorLog> {
        Arc::clone(&self.shared.errors)
    }

    fn flush(&self, done: Done) {
        let mut state = self.state();
        let Some(namespace) = state.namespace.clone() else { return };
        let geometry = namespace.store.geometry();
        if geometry.read_only || !geometry.volatile_cache {
            return;
        }
        let done = end(&mut state.flushing, NO_QUEUE, done);
        drop(state);
        let shared = Arc::clone(&self.shared);
        let flush = move || {
            if let Err(error) = (shared.options.flush)(&*namespace.store) {
                shared.report_failed_flush(&error);
            }
            // A waiter of `done` may close the store: drop this reference before.
            drop(namespace);
            done.call();
        };
        // A thread for each, for a slow store is to hold up no other function's. A controller has
        // one under way at a time.
        if let Err(error) = std::thread::Builder::new().name("nvme-flush".to_owned()).spawn(flush) {
            self.shared.report_failed_flush(&error);
        }
    }

    fn set_coalescing(&self, threshold: u16, time_us: u32) {
        let mut state = self.state();
        let time = Nanos::from_micros(u64::from(time_us));
        let on = threshold > 0 && time_us > 0;
        state.coalescing = on.then_some(Coalescing { threshold: u32::from(threshold), time });
        for running in state.queues.values() {
            let coalescing = state.coalescing_of(running.vector);
            running.send(move |queue| queue.set_coalescing(coalescing));
        }
    }

    fn set_vector_coalescing(&self, vector: u16, enabled: bool) {
        let mut state = self.state();
        let Some(entry) = state.vectors.get_mut(usize::from(vector)) else { return };
        entry.is_coalesced = enabled;
        let coalescing = state.coalescing_of(Some(vector));
        for running in state.queues.values().filter(|running| running.vector == Some(vector)) {
            running.send(move |queue| queue.set_coalescing(coalescing));
        }
    }

    fn set_write_cache(&self, enabled: bool) -> bool {
        self.shared.set_write_through(!enabled);
        true
    }

    fn abort(&self, queue: u16, command: u16, reply: Box<dyn FnOnce(bool) + Send>) {
        // The one above, which takes any closure.
        Self::abort(self, queue, command, reply);
    }

    fn set_doorbells(&self, doorbells: Arc<Doorbells>) {
        self.state().doorbells = doorbells;
    }

    fn kick(&self, queue: u16) {
        let state = self.state();
        let its_own = state.queues.get(&queue);
        let of_its_commands = state.submissions.get(&queue).filter(|id| **id != queue);
        for running in
            its_own.into_iter().chain(of_its_commands.and_then(|id| state.queues.get(id)))
        {
            running.kick.signal();
        }
    }

    fn set_shadow_doorbells(&self, pages: Option<(GuestAddress, GuestAddress)>) {
        let mut state = self.state();
        state.shadow = pages;
        for running in state.queues.values() {
            running.send(move |queue| queue.set_shadow_doorbells(pages));
        }
    }
}
