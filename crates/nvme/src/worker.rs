//! The worker thread of controllers: runs a controller after events that come by no register write.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::NvmeFunction;

/// Timers due within this time of another one expire with it, so that the thread wakes up once for
/// all functions whose doorbells it reads.
const TOGETHER: Duration = Duration::from_micros(500);

/// Runs any number of functions ([`NvmeFunction::run`]) when an event of their queues, manager or
/// timers is queued, and sleeps otherwise. Dropping the last clone ends the thread.
#[derive(Clone, Debug)]
pub struct ControllerWorker(Arc<Inner>);

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

impl ControllerWorker {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel refuses a thread.
    pub fn start() -> io::Result<Self> {
        let (calls, called) = channel();
        let thread = std::thread::Builder::new()
            .name("nvme".to_owned())
            .spawn(move || run_controllers(&called))?;
        Ok(Self(Arc::new(Inner { calls, thread: Some(thread) })))
    }

    /// A notifier: asks the thread to run a function. Callable from any thread, never waits.
    pub(crate) fn notifier(&self) -> impl Fn(&Weak<NvmeFunction>) + Send + Sync + use<> {
        let calls = self.0.calls.clone();
        move |function| {
            // Sending fails only after the thread has ended: then no function is served.
            let _ = calls.send(Call::Run(function.clone()));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _ = self.calls.send(Call::Stop);
        // The thread itself may drop a function that holds the last clone.
        if let Some(thread) =
            self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id())
        {
            let _ = thread.join();
        }
    }
}

/// The next deadline of a function.
struct Timer {
    function: Weak<NvmeFunction>,
    at: Instant,
}

fn run_controllers(called: &Receiver<Call>) {
    let mut timers: Vec<Timer> = Vec::new();
    // Kept over the loop, so that looking at doorbells allocates nothing.
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
                let is_due =
                    |timer: &mut Timer| timer.at.saturating_duration_since(now) <= TOGETHER;
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
