//! A unit that runs on a sidecore.

use std::time::Duration;

use oneshot::RecvTimeoutError;
use sidecore_reactor::{Closed, Pollable, PollableId, Surroundings, Unit};

use crate::Sidecore;

/// A unit of type `U` that runs on a sidecore. Dropping the handle leaves it running.
pub struct Handle<U> {
    pub(crate) sidecore: Sidecore,
    pub(crate) id: PollableId<U>,
}

impl<U> Clone for Handle<U> {
    fn clone(&self) -> Self {
        Self { sidecore: self.sidecore.clone(), id: self.id }
    }
}

/// Whether both are of the same unit of the same sidecore.
impl<U> PartialEq for Handle<U> {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id && self.sidecore.is_same(&other.sidecore)
    }
}

/// A unit that was told to stop.
pub struct Stopping<S>(oneshot::Receiver<S>);

/// How far a unit is that was told to stop.
#[derive(Debug, PartialEq, Eq)]
pub enum Stopped<S> {
    /// It has stopped, with this state.
    Stopped(S),
    /// The store still owes it answers, which may be written to its guest's memory.
    StillInFlight,
    /// The sidecore is gone, and the unit with it.
    Gone,
}

impl<U: Pollable> Handle<U> {
    /// Runs `task` on the unit, on its sidecore, and does not wait. If the unit has stopped, or the
    /// sidecore is gone, `task` is dropped.
    pub fn tell(&self, task: impl FnOnce(&mut U) + Send + 'static) {
        let id = self.id;
        self.sidecore.tell(move |reactor| {
            if let Some(unit) = reactor.get_mut(id) {
                task(unit);
            }
        });
    }

    /// As [`tell`](Self::tell), with the unit's surroundings: for a change of its wake descriptors.
    pub fn change(&self, task: impl FnOnce(&mut U, Surroundings<'_>) + Send + 'static) {
        let id = self.id;
        self.sidecore.tell(move |reactor| {
            if let Some((unit, around)) = reactor.get_mut_with(id) {
                task(unit, around);
            }
        });
    }

    /// Runs `question` on the unit, on its sidecore, and waits for the answer; `None` if the unit
    /// has stopped.
    ///
    /// # Errors
    /// The sidecore is gone.
    pub fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut U) -> T + Send + 'static,
    ) -> Result<Option<T>, Closed> {
        let id = self.id;
        self.sidecore.ask(move |reactor| reactor.get_mut(id).map(question))
    }
}

impl<U: Unit> Handle<U> {
    /// Has the unit stop.
    #[must_use]
    pub fn stop(self) -> Stopping<U::State> {
        let (stopped, state) = oneshot::channel();
        self.tell(move |unit| {
            unit.stop(Box::new(move |state| {
                // The thread that stopped it may have ended.
                let _ = stopped.send(state);
            }));
        });
        Stopping(state)
    }
}

impl<S> Stopping<S> {
    /// Waits until nothing of the unit is in flight, for at most `patience`.
    #[must_use]
    pub fn wait(&self, patience: Duration) -> Stopped<S> {
        match self.0.recv_timeout(patience) {
            Ok(state) => Stopped::Stopped(state),
            Err(RecvTimeoutError::Timeout) => Stopped::StillInFlight,
            Err(RecvTimeoutError::Disconnected) => Stopped::Gone,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;

    use sidecore_linux::Clock;
    use sidecore_reactor::{Arm, IdleMode, Polled};
    use sidecore_units::Nanos;

    use super::*;
    use crate::{NotStarted, SidecoreThread};

    /// A unit with something in flight until it is told otherwise.
    struct Worker {
        in_flight: bool,
        told: u32,
        stopped: Option<Box<dyn FnOnce(u32) + Send>>,
    }

    impl Pollable for Worker {
        fn poll(&mut self, _now: Nanos, _budget: usize) -> Polled {
            if self.stopped.is_some() && !self.in_flight { Polled::Finished } else { Polled::Idle }
        }
        fn idle_mode(&self) -> IdleMode {
            IdleMode::Interrupt
        }
        fn arm(&mut self) -> Arm {
            Arm::Armed
        }
        fn disarm(&mut self) {}
        fn wake_fds(&self, _watch: &mut dyn FnMut(BorrowedFd<'_>)) {}
        fn on_wake(&mut self) {}
        fn deadline(&self) -> Option<Nanos> {
            None
        }
        fn waits_since(&self) -> Option<Nanos> {
            None
        }
        fn finish(self: Box<Self>) {
            if let Some(stopped) = self.stopped {
                stopped(self.told);
            }
        }
    }

    impl Unit for Worker {
        type State = u32;

        fn stop(&mut self, stopped: Box<dyn FnOnce(u32) + Send>) {
            self.stopped = Some(stopped);
        }
    }

    const SOON: Duration = Duration::from_secs(10);

    fn start(thread: &SidecoreThread) -> Handle<Worker> {
        let made = thread
            .sidecore()
            .start(|_| Ok::<_, ()>(Worker { in_flight: true, told: 0, stopped: None }));
        made.unwrap()
    }

    #[test]
    fn a_unit_is_told_and_asked_and_stops_when_nothing_is_in_flight() {
        let thread = SidecoreThread::start("sc", None, &Clock::new()).unwrap();
        let unit = start(&thread);
        unit.tell(|unit| unit.told += 7);
        assert_eq!(unit.ask(|unit| unit.told).unwrap(), Some(7));
        let same = unit.clone();
        assert!(same == unit && start(&thread) != unit);
        let stopping = unit.stop();
        assert_eq!(stopping.wait(Duration::ZERO), Stopped::StillInFlight);
        same.tell(|unit| unit.in_flight = false);
        assert_eq!(stopping.wait(SOON), Stopped::Stopped(7));
        assert_eq!(same.ask(|unit| unit.told).unwrap(), None, "it has stopped");
        let again = start(&thread);
        assert_eq!(again.ask(|unit| unit.told).unwrap(), Some(0));
        assert_eq!(
            same.ask(|unit| unit.told).unwrap(),
            None,
            "the next one in its place is another"
        );
    }

    #[test]
    fn a_unit_is_started_without_a_wait() {
        let thread = SidecoreThread::start("sc", None, &Clock::new()).unwrap();
        let begin = |sidecore: &Sidecore, is_made: bool| {
            let (started, answer) = oneshot::channel();
            let unit = Worker { in_flight: false, told: 3, stopped: None };
            let make = move |_: &_| if is_made { Ok(unit) } else { Err("no") };
            sidecore.start_then(make, move |unit| drop(started.send(unit)));
            answer.recv_timeout(SOON)
        };
        let sidecore = thread.sidecore().clone();
        let Ok(Ok(unit)) = begin(&sidecore, true) else { panic!("it was not started") };
        assert_eq!(unit.ask(|unit| unit.told).unwrap(), Some(3));
        assert!(matches!(begin(&sidecore, false), Ok(Err(NotStarted::Unit("no")))));
        drop(thread);
        assert!(begin(&sidecore, true).is_err(), "there is no answer");
    }

    #[test]
    fn what_cannot_be_made_or_has_lost_its_sidecore_is_an_error() {
        let thread = SidecoreThread::start("sc", None, &Clock::new()).unwrap();
        let refused = thread.sidecore().start(|_| Err::<Worker, _>("no"));
        assert!(matches!(refused, Err(NotStarted::Unit("no"))));
        let (unit, sidecore) = (start(&thread), thread.sidecore().clone());
        drop(thread);
        assert_eq!(unit.ask(|_| ()), Err(Closed));
        assert_eq!(unit.stop().wait(SOON), Stopped::Gone);
        let late =
            sidecore.start(|_| Ok::<_, ()>(Worker { in_flight: false, told: 0, stopped: None }));
        assert!(matches!(late, Err(NotStarted::Gone)));
    }
}
