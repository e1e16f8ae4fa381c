//! One process, its clock, and its way to the store.

use sidecore_ownership::{Answer, Call, Daemon, Member, Numbered, Options, Outcome, Task};
use sidecore_units::Nanos;

use super::etcd::{Etcd, STORE};
use super::store::Request;

/// The time after which a daemon gives up a call, on its clock.
const PATIENCE: Nanos = Nanos::from_millis(500);

/// The way between a daemon and etcd.
pub(crate) struct Line {
    /// The time of a message to etcd, and of one back.
    pub(crate) there: Nanos,
    pub(crate) back: Nanos,
    /// Calls do not reach etcd.
    pub(crate) is_cut: bool,
    /// They reach a leader of the last term that does not know.
    pub(crate) is_deposed: bool,
}

/// The remarkable events of an exchange.
#[derive(Default)]
pub(crate) struct Exchanged {
    /// A leader that was deposed has renewed the lease.
    pub(crate) deposed_renewal: bool,
    /// Answers to calls that the daemon had given up.
    pub(crate) late_answers: u64,
}

/// The bits of an incarnation that count the claims of a process.
const CLAIM_BITS: u32 = 20;

/// The number of the process that a member is an incarnation of.
pub(crate) const fn process_of(member: &Member) -> u64 {
    member.incarnation >> CLAIM_BITS
}

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
pub(crate) struct Work {
    pub(crate) task: Task,
    pub(crate) done_at: Nanos,
    pub(crate) fails: bool,
}

pub(crate) struct Candidate {
    pub(crate) daemon: Daemon,
    /// The number of this start of the process.
    pub(crate) process: u64,
    pub(crate) is_alive: bool,
    pub(crate) runs_at: Nanos,
    rate: u64,
    offset: u64,
    /// The disk that it reaches.
    pub(super) disk: usize,
    /// Whether it reaches the other cluster.
    pub(super) is_astray: bool,
    /// Requests to etcd and answers are lost until then.
    pub(crate) cut_until: Nanos,
    pub(super) sent: Option<Sent>,
    /// Answers that are on their way, each with its time.
    pub(super) answers: Vec<(Nanos, u64, Answer)>,
    pub(crate) work: Option<Work>,
    /// The opening of the store, while it is open.
    pub(super) opening: Option<u64>,
    pub(super) serving: Option<(Request, Progress)>,
    /// The last request that was carried out, and its value.
    pub(super) last: Option<(u64, u64)>,
}

impl Candidate {
    pub(crate) fn new(
        (name, host): (&str, &str),
        process: u64,
        (rate, offset): (u64, u64),
        options: Options,
    ) -> Self {
        let (name, host) = (name.to_owned(), host.to_owned());
        let member = Member { name, host, incarnation: process << CLAIM_BITS };
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
    pub(crate) fn again(&self, name: &str, process: u64, options: Options) -> Self {
        let clock = (self.rate, self.offset);
        let mut next = Self::new((name, &self.daemon.me().host), process, clock, options);
        (next.disk, next.runs_at) = (self.disk, self.runs_at);
        next
    }

    /// The process's clock at this time.
    pub(crate) fn clock(&self, now: Nanos) -> Nanos {
        Nanos(self.offset + now.0 / 1_000 * self.rate)
    }

    /// Exchanges messages with etcd.
    pub(crate) fn converse(&mut self, now: Nanos, etcd: &mut Etcd, line: &Line) -> Exchanged {
        let clock = self.clock(now);
        let mut exchanged = Exchanged::default();
        if let Some(sent) = &mut self.sent
            && sent.arrives_at.take_if(|at| *at <= now).is_some()
            && !line.is_cut
        {
            let call = &sent.numbered.call;
            let answer = etcd.carry_out(now, call, self.daemon.me(), line.is_deposed);
            exchanged.deposed_renewal = line.is_deposed && matches!(call, Call::Renew { .. });
            self.answers.push((now.after(line.back), sent.numbered.number, answer));
        }
        while let Some(position) = self.answers.iter().position(|(at, ..)| *at <= now) {
            let (_, number, answer) = self.answers.swap_remove(position);
            let is_awaited = |sent: &mut Sent| sent.numbered.number == number;
            exchanged.late_answers += u64::from(self.sent.take_if(is_awaited).is_none());
            self.daemon.answered(clock, number, answer);
        }
        // After answers, as a runtime that polls a request before its timer.
        if let Some(sent) = self.sent.take_if(|sent| clock >= sent.given_up_at) {
            let failed = Answer::Failed { reason: "no answer in time".to_owned() };
            self.daemon.answered(clock, sent.numbered.number, failed);
        }
        if self.sent.is_none()
            && self.daemon.wake_at() <= clock
            && let Some(numbered) = self.daemon.call(clock)
        {
            let arrives_at = Some(now.after(line.there));
            self.sent = Some(Sent { numbered, arrives_at, given_up_at: clock.after(PATIENCE) });
        }
        exchanged
    }

    /// Whether the lease lets a request be taken, or answered.
    pub(crate) fn may(&self, now: Nanos, margin: Nanos) -> bool {
        let until = self.daemon.serves_until(STORE);
        until.is_some_and(|(until, _)| self.clock(now).after(margin) < until)
    }

    /// Whether a write of the record is on its way.
    pub(super) fn writes_record(&self) -> bool {
        let writes = |work: &Work| matches!(work.task, Task::WriteRecord { .. });
        self.is_alive && self.work.as_ref().is_some_and(writes)
    }

    pub(crate) fn runs(&self, now: Nanos) -> bool {
        self.is_alive && self.runs_at <= now
    }

    pub(crate) fn ended(&mut self, now: Nanos, outcome: Outcome) {
        let clock = self.clock(now);
        self.daemon.ended(clock, STORE, outcome);
    }

    pub(super) fn die(&mut self) {
        self.is_alive = false;
        (self.opening, self.serving) = (None, None);
    }
}
