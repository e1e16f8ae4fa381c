//! The way of requests from a queue to a session on the same sidecore.

use std::cell::{Cell, RefCell};
use std::os::fd::BorrowedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use sidecore_block::{Batch, BlockChannel, Next, Readiness};
use sidecore_reactor::{CoreContext, Port};
use sidecore_units::Nanos;

use super::store::{Opened, OpeningShared};
use super::table::LineNumber;

/// A session's desk, whatever its handshake.
pub(super) trait Desk {
    /// Opens a line for a queue of `depth`. A message to `wake` wakes the queue.
    fn open_line(
        &mut self,
        opened: &Opened,
        depth: usize,
        wake: sidecore_reactor::PortSender<()>,
    ) -> LineNumber;

    /// The queue of a line is gone.
    fn close_line(&mut self, line: LineNumber);

    /// Takes as many requests of a line as it has room for.
    fn submit(&mut self, now: Nanos, line: LineNumber, batch: &mut Batch);

    /// Hands out the requests of a line that have ended.
    fn take(&mut self, line: LineNumber, completed: &mut Batch);

    /// Requests that were taken and not handed out, and whether some of them have ended. If none
    /// has, the next one wakes the queue.
    fn readiness(&mut self, line: LineNumber) -> (usize, bool);

    /// When the oldest request was taken that has not ended.
    fn waits_since(&self, line: LineNumber) -> Option<Nanos>;
}

/// The desks of a sidecore, by the numbers of their sessions.
#[derive(Default)]
pub(super) struct Desks(RefCell<Vec<Place>>);

/// The number of a session, and its desk while there is one.
type Place = (u64, Weak<RefCell<dyn Desk>>);

impl Desks {
    pub(super) fn add(&self, session: u64, desk: Weak<RefCell<dyn Desk>>) {
        let mut desks = self.0.borrow_mut();
        desks.retain(|(_, desk)| desk.strong_count() > 0);
        desks.push((session, desk));
    }

    pub(super) fn remove(&self, session: u64) {
        self.0.borrow_mut().retain(|(number, _)| *number != session);
    }

    pub(super) fn find(&self, session: u64) -> Option<Rc<RefCell<dyn Desk>>> {
        let desks = self.0.borrow();
        desks.iter().find(|(number, _)| *number == session)?.1.upgrade()
    }
}

/// A queue's channel to a session of its own sidecore.
pub(super) struct LocalChannel {
    desk: Rc<RefCell<dyn Desk>>,
    line: LineNumber,
    /// A message wakes the sleeping queue.
    wake: Port<()>,
    is_asleep: Cell<bool>,
    /// Dropped last.
    _opening: Arc<OpeningShared>,
}

impl LocalChannel {
    pub(super) fn new(
        core: &CoreContext,
        desk: Rc<RefCell<dyn Desk>>,
        (opened, opening): (&Opened, Arc<OpeningShared>),
        depth: usize,
    ) -> Option<Self> {
        let wake = core.open_port(1);
        let sender = core.connect(wake.id())?;
        let line = desk.borrow_mut().open_line(opened, depth, sender);
        Some(Self { desk, line, wake, is_asleep: Cell::new(false), _opening: opening })
    }

    #[inline]
    fn wake(&self) {
        if self.is_asleep.replace(false) {
            self.wake.disarm();
            let _ = self.wake.receive();
        }
    }
}

impl BlockChannel for LocalChannel {
    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        self.desk.borrow_mut().submit(now, self.line, batch);
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        self.wake();
        self.desk.borrow_mut().take(self.line, completed);
    }

    fn takes_write_through(&self) -> bool {
        true
    }

    fn readiness(&self) -> Readiness {
        let (in_flight, has_ended) = self.desk.borrow_mut().readiness(self.line);
        if has_ended {
            return Readiness { in_flight, next: Next::Now };
        }
        if in_flight > 0 && !self.is_asleep.replace(true) {
            let _ = self.wake.arm();
        }
        Readiness { in_flight, next: Next::OnWake }
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.desk.borrow().waits_since(self.line)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Drop for LocalChannel {
    fn drop(&mut self) {
        self.desk.borrow_mut().close_line(self.line);
    }
}
