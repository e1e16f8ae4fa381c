//! One process, its clock, and its way to the store.

use sidecore_ownership::{Answer, Daemon, Member, Numbered, Options, Outcome, Task};
use sidecore_units::Nanos;

use super::etcd::STORE;
use super::store::Request;

/// A call to etcd, on its way.
pub(super) struct Sent {
    pub(super) numbered: Numbered,
    /// When it reaches etcd; `None` if it was carried out, or is lost.
    pub(super) arrives_at: Option<Nanos>,
    /// When the daemon gives it up, on the daemon's clock.
    pub(super) given_up_at: Nanos,
}

/// The way of a request through the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The lease was checked, and the request is not with the kernel yet.
    Checked,
    /// The kernel has it.
    Executing,
    /// The kernel has carried it out, with this value.
    Executed(u64),
    /// The lease was checked, and the answer was not sent yet.
    Answering(u64),
}

/// A task of the daemon.
pub(super) struct Work {
    pub(super) task: Task,
    pub(super) done_at: Nanos,
    pub(super) fails: bool,
}

pub(super) struct Candidate {
    pub(super) daemon: Daemon,
    /// The number of this start of the process.
    pub(super) process: u64,
    pub(super) is_alive: bool,
    pub(super) runs_at: Nanos,
    rate: u64,
    offset: u64,
    /// The disk that it reaches.
    pub(super) disk: usize,
    /// Whether it reaches the other cluster.
    pub(super) is_astray: bool,
    /// Requests to etcd and answers are lost until then.
    pub(super) cut_until: Nanos,
    pub(super) sent: Option<Sent>,
    /// Answers that are on their way, each with its time.
    pub(super) answers: Vec<(Nanos, u64, Answer)>,
    pub(super) work: Option<Work>,
    /// The opening of the store, while it is open.
    pub(super) opening: Option<u64>,
    pub(super) serving: Option<(Request, Progress)>,
    /// The last request that was carried out, and its value.
    pub(super) last: Option<(u64, u64)>,
}

impl Candidate {
    pub(super) fn new(
        (name, host): (&str, &str),
        process: u64,
        (rate, offset): (u64, u64),
        options: Options,
    ) -> Self {
        let (name, host) = (name.to_owned(), host.to_owned());
        let member = Member { name, host, incarnation: process };
        let mut daemon = Daemon::new(member, options, process.wrapping_mul(77));
        daemon.add(STORE);
        Self {
            daemon,
            process,
            is_alive: true,
            runs_at: Nanos::ZERO,
            rate,
            offset,
            disk: 0,
            is_astray: false,
            cut_until: Nanos::ZERO,
            sent: None,
            answers: Vec::new(),
            work: None,
            opening: None,
            serving: None,
            last: None,
        }
    }

    /// The next start of the process, with this name.
    pub(super) fn again(&self, name: &str, process: u64, options: Options) -> Self {
        let clock = (self.rate, self.offset);
        let mut next = Self::new((name, &self.daemon.me().host), process, clock, options);
        (next.disk, next.runs_at) = (self.disk, self.runs_at);
        next
    }

    /// The process's clock at this time.
    pub(super) fn clock(&self, now: Nanos) -> Nanos {
        Nanos(self.offset + now.0 / 1_000 * self.rate)
    }

    /// Whether the lease lets a request be taken, or answered.
    pub(super) fn may(&self, now: Nanos, margin: Nanos) -> bool {
        let until = self.daemon.serves_until(STORE);
        until.is_some_and(|(until, _)| self.clock(now).after(margin) < until)
    }

    /// Whether a write of the record is on its way.
    pub(super) fn writes_record(&self) -> bool {
        let writes = |work: &Work| matches!(work.task, Task::WriteRecord { .. });
        self.is_alive && self.work.as_ref().is_some_and(writes)
    }

    pub(super) fn runs(&self, now: Nanos) -> bool {
        self.is_alive && self.runs_at <= now
    }

    pub(super) fn ended(&mut self, now: Nanos, outcome: Outcome) {
        let clock = self.clock(now);
        self.daemon.ended(clock, STORE, outcome);
    }

    pub(super) fn die(&mut self) {
        self.is_alive = false;
        (self.opening, self.serving) = (None, None);
    }
}
