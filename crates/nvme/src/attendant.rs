//! The thread that runs controllers when something happened that no register write tells them.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::NvmeFunction;

/// Timers that are due so soon after another one expire with it: the thread wakes up once for all
/// functions whose doorbells it looks at.
const TOGETHER: Duration = Duration::from_micros(500);

/// Runs any number of functions ([`NvmeFunction::run`]) when their queues, their manager or their
/// timers have news for them, and sleeps else. Dropping the last clone ends the thread.
#[derive(Clone, Debug)]
pub struct Attendant(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    calls: Sender<Call>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Call {
    Run(Weak<NvmeFunction>),
    Stop,
}

impl Attendant {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel refuses a thread.
    pub fn start() -> io::Result<Self> {
        let (calls, called) = channel();
        let thread = std::thread::Builder::new().name("nvme".to_owned()).spawn(move || attend(&called))?;
        Ok(Self(Arc::new(Inner { calls, thread: Some(thread) })))
    }

    /// What rings for the thread, from anywhere, without waiting.
    pub(crate) fn bell(&self) -> impl Fn(&Weak<NvmeFunction>) + Send + Sync + use<> {
        let calls = self.0.calls.clone();
        move |function| {
            // It fails when the attendant has ended: nobody is served any more.
            let _ = calls.send(Call::Run(function.clone()));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.calls.send(Call::Stop);
        // The thread itself may drop a function that holds the last clone.
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

/// When a function wants to be run though nobody calls.
struct Timer {
    function: Weak<NvmeFunction>,
    at: Instant,
}

fn attend(called: &Receiver<Call>) {
    let mut timers: Vec<Timer> = Vec::new();
    // Kept: nothing is allocated for a look at doorbells.
    let mut due = Vec::new();
    loop {
        let next = timers.iter().map(|timer| timer.at).min();
        let call = match next {
            None => called.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => called.recv_timeout(at.saturating_duration_since(Instant::now())),
        };
        match call {
            Ok(Call::Run(function)) => run(&mut timers, function),
            Err(RecvTimeoutError::Timeout) => {
                let now = Instant::now();
                let is_due = |timer: &mut Timer| timer.at.saturating_duration_since(now) <= TOGETHER;
                due.extend(timers.extract_if(.., is_due).map(|timer| timer.function));
                due.drain(..).for_each(|function| run(&mut timers, function));
            }
            Ok(Call::Stop) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn run(timers: &mut Vec<Timer>, function: Weak<NvmeFunction>) {
    timers.retain(|timer| !timer.function.ptr_eq(&function));
    if let Some(at) = function.upgrade().and_then(|function| function.run()) {
        timers.push(Timer { function, at });
    }
}
