//! A bounded number of threads for what may wait: mapping, closing, starting and stopping.
//!
//! A thread whose job takes longer than [`PATIENCE`] does not count: another one takes its place, so
//! that jobs behind it wait no longer. Each socket has one job at a time at most, so that even with
//! peers that make all of theirs wait for ever there are no more threads than sockets.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a job counts as one that is soon over.
pub(crate) const PATIENCE: Duration = Duration::from_millis(10);

/// Code that may wait.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The threads, and the jobs that are queued for them.
pub(crate) struct Pool {
    /// Threads at most, besides those whose jobs take long.
    limit: usize,
    state: Mutex<State>,
    queued: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// When the jobs that run were started, by their numbers.
    running: BTreeMap<u64, Instant>,
    next: u64,
    threads: usize,
    is_closed: bool,
}

impl State {
    fn idle(&self) -> usize {
        self.threads.saturating_sub(self.running.len())
    }

    /// Whether a job is queued that no idle thread is going to take.
    fn is_behind(&self) -> bool {
        self.jobs.len() > self.idle()
    }

    /// Whether another thread is to be started.
    fn lacks_a_thread(&self, now: Instant, limit: usize) -> bool {
        let soon_over = self.running.values().filter(|since| now.saturating_duration_since(**since) < PATIENCE);
        self.is_behind() && self.idle().saturating_add(soon_over.count()) < limit
    }
}

impl Pool {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, state: Mutex::default(), queued: Condvar::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a job.
    pub(crate) fn run(self: &Arc<Self>, now: Instant, job: Job) {
        self.state().jobs.push_back(job);
        self.queued.notify_one();
        self.tend(now);
    }

    /// Starts threads that are lacking. If true, jobs are queued all the same: it is to be called again
    /// after [`PATIENCE`].
    pub(crate) fn tend(self: &Arc<Self>, now: Instant) -> bool {
        loop {
            {
                let mut state = self.state();
                if !state.lacks_a_thread(now, self.limit) {
                    return state.is_behind();
                }
                state.threads = state.threads.saturating_add(1);
            }
            let pool = Arc::clone(self);
            if let Err(error) = thread::Builder::new().name("peer-job".to_owned()).spawn(move || pool.serve()) {
                tracing::error!(%error, "no thread for what waits for a peer");
                let mut state = self.state();
                state.threads = state.threads.saturating_sub(1);
                return true;
            }
        }
    }

    /// A thread of the pool.
    fn serve(&self) {
        while let Some((number, job)) = self.take() {
            let running = Running { pool: self, number };
            job();
            drop(running);
        }
    }

    /// Waits for a job; `None` ends the thread.
    fn take(&self) -> Option<(u64, Job)> {
        let mut state = self.state();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                let number = state.next;
                state.next = state.next.wrapping_add(1);
                state.running.insert(number, Instant::now());
                return Some((number, job));
            }
            // One that has taken the place of another, which is back now, is not needed any longer.
            if state.is_closed || state.threads > self.limit {
                state.threads = state.threads.saturating_sub(1);
                return None;
            }
            state = self.queued.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the threads when their jobs are done, which nobody waits for.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.queued.notify_all();
    }

    /// Runs the first of the queued jobs here. False if there is none.
    #[cfg(test)]
    pub(crate) fn run_next(&self) -> bool {
        let job = self.state().jobs.pop_front();
        job.map(|job| job()).is_some()
    }
}

/// A job that runs, also while its panic unwinds.
struct Running<'a> {
    pool: &'a Pool,
    number: u64,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.running.remove(&self.number);
        if thread::panicking() {
            state.threads = state.threads.saturating_sub(1);
            tracing::error!("a job for a peer has panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    fn state(threads: usize, since: &[Instant], jobs: usize) -> State {
        let running = (0..).zip(since.iter().copied()).collect();
        let jobs = (0..jobs).map(|_| Box::new(|| {}) as Job).collect();
        State { jobs, running, threads, ..State::default() }
    }

    #[test]
    fn a_thread_is_lacking_when_those_there_are_take_long() {
        let start = Instant::now();
        let late = start + PATIENCE;
        assert!(!state(0, &[], 0).lacks_a_thread(start, 2));
        assert!(state(0, &[], 1).lacks_a_thread(start, 2));
        assert!(!state(1, &[], 1).lacks_a_thread(start, 2), "an idle one takes it");
        assert!(state(1, &[start], 1).lacks_a_thread(start, 2));
        let full = state(2, &[start, start], 1);
        assert!(!full.lacks_a_thread(start, 2));
        assert!(full.is_behind());
        assert!(full.lacks_a_thread(late, 2));
        assert!(state(3, &[start, start, late], 1).lacks_a_thread(late, 2));
        assert!(!state(4, &[start, start, late, late], 1).lacks_a_thread(late, 2));
        assert!(!state(2, &[start, start], 0).is_behind(), "nothing is queued");
    }

    #[test]
    fn a_job_that_never_ends_holds_up_no_other() {
        let pool = Pool::new(1);
        let (let_go, held) = channel::<()>();
        let (begun, begins) = channel();
        let now = Instant::now();
        pool.run(
            now,
            Box::new(move || {
                begun.send(()).unwrap();
                let _ = held.recv_timeout(6 * SOON);
            }),
        );
        begins.recv_timeout(SOON).unwrap();
        let (done, wait) = channel();
        pool.run(now, Box::new(move || done.send(()).unwrap()));
        assert!(pool.tend(now - PATIENCE), "it waits for the first one's patience to end");
        assert!(!pool.tend(Instant::now() + PATIENCE));
        wait.recv_timeout(SOON).unwrap();
        drop(let_go);
        pool.close();
    }

    #[test]
    fn a_panic_takes_a_thread_and_not_the_pool() {
        let pool = Pool::new(1);
        pool.run(Instant::now(), Box::new(|| panic!("on purpose")));
        let (done, wait) = channel();
        pool.run(Instant::now(), Box::new(move || done.send(()).unwrap()));
        while wait.try_recv().is_err() {
            pool.tend(Instant::now());
            thread::yield_now();
        }
        pool.close();
    }
}
