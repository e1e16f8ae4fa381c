//! The candidates, etcd, the store, the client, and what happens to them.

use sidecore_ownership::{Options as DaemonOptions, Outcome as Ended, State, Task};
use sidecore_units::Nanos;

use super::candidate::{Candidate, Line, Progress, Work, process_of};
use super::etcd::{Etcd, STORE};
use super::history::{Options, Outcome};
use super::store::{BLOCKS, Disk, Landing, Request};
use crate::Random;

const MS: u64 = 1_000_000;
const TTL_S: u64 = 3;
/// The time after which the client tries the next candidate.
const CLIENT_PATIENCE: Nanos = Nanos::from_millis(300);
/// One write of the record in so many hangs, for up to this time.
const RECORD_HANGS: u64 = 3;
const RECORD_HANG_MS: u64 = 9_000;
/// Time for the client to get answers after everything has healed.
const HEALED_S: u64 = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fence {
    /// Succeeds when the suspects have the store closed and nothing in flight.
    Lock,
    /// Ends the suspects, and cuts their hosts off.
    Command,
    /// Succeeds without effect.
    Lie,
}

/// The client's request that waits for an answer.
struct Asked {
    request: Request,
    to: usize,
    arrives_at: Option<Nanos>,
    next_at: Nanos,
}

pub(super) struct World {
    random: Random,
    now: Nanos,
    ends_at: Nanos,
    is_healed: bool,
    options: DaemonOptions,
    fence: Fence,
    fault_every: u64,
    slow: bool,
    etcd: Etcd,
    other_etcd: Option<Etcd>,
    backup: Option<Etcd>,
    etcd_away_until: Nanos,
    /// Calls that a leader of the last term answers, until this time.
    deposed_until: Nanos,
    candidates: Vec<Candidate>,
    disks: [Disk; 2],
    next_process: u64,
    openings: u64,
    /// The disk of the last opening.
    used_disk: usize,
    last_epoch: u64,
    asked: Option<Asked>,
    next_number: u64,
    /// The newest answered values.
    answered: [u64; BLOCKS],
    answered_after_heal: u64,
    pub(super) outcome: Outcome,
    tells: bool,
    pub(super) trace: Vec<(usize, String)>,
}

type Step = Result<(), String>;

impl World {
    pub(super) fn new(seed: u64, options: &Options, tells: bool) -> Self {
        let mut random = Random::new(seed);
        let mut daemon = DaemonOptions::of_lease(TTL_S);
        daemon.neglect = options.neglect;
        let fence = [Fence::Lock, Fence::Command, Fence::Lie][random.below(3) as usize];
        // As `sidecore own`: neither locks nor a command let a host in.
        daemon.fence_admits = fence == Fence::Lie;
        if fence == Fence::Lock {
            // The same: the other candidates see the same locks.
            daemon.fence_attempts = u32::MAX;
        }
        let count = 2 + random.below(2);
        let has_namesakes = random.once_in(10);
        let mut candidates: Vec<Candidate> = (0..count)
            .map(|index| {
                let name = if has_namesakes && index > 0 { 1 } else { index };
                // Half of the clocks are as wrong as they may be.
                let rate = match random.below(4) {
                    0 => 900,
                    1 => 1_100,
                    _ => 900 + random.below(201),
                };
                let clock = (rate, random.below(1_000) * 1_000 * MS);
                let names = (format!("d{name}"), format!("h{index}"));
                Candidate::new((&names.0, &names.1), index + 1, clock, daemon)
            })
            .collect();
        if fence != Fence::Lie && random.once_in(10) {
            candidates[0].disk = 1;
        }
        Self {
            fence,
            options: daemon,
            fault_every: 1 + random.below(8),
            slow: random.once_in(2),
            now: Nanos(1),
            ends_at: Nanos::from_millis(options.seconds * 1_000),
            is_healed: false,
            etcd: Etcd::new(),
            other_etcd: None,
            backup: None,
            etcd_away_until: Nanos::ZERO,
            deposed_until: Nanos::ZERO,
            next_process: count + 1,
            candidates,
            disks: Default::default(),
            openings: 0,
            used_disk: 0,
            last_epoch: 0,
            asked: None,
            next_number: 1,
            answered: [0; BLOCKS],
            answered_after_heal: 0,
            outcome: Outcome::default(),
            random,
            tells,
            trace: Vec::new(),
        }
    }

    fn tell(&mut self, what: impl FnOnce() -> String) {
        if self.tells {
            self.trace.push(((self.now.0 / MS) as usize, what()));
        }
    }

    pub(super) fn run(&mut self) -> Step {
        while self.now < self.ends_at {
            self.step()?;
        }
        self.heal();
        let end = self.now.after(Nanos::from_millis(HEALED_S * 1_000));
        while self.now < end && self.answered_after_heal < 20 {
            self.step()?;
            self.operate();
        }
        if self.answered_after_heal < 20 {
            let states: Vec<_> =
                self.candidates.iter().map(|c| c.daemon.status(self.now)).collect();
            return Err(format!("no service though everything has healed: {states:?}"));
        }
        Ok(())
    }

    fn step(&mut self) -> Step {
        self.now = self.now.after(Nanos((1 + self.random.below(8)) * MS));
        self.etcd.pass(self.now);
        if let Some(other) = &mut self.other_etcd {
            other.pass(self.now);
        }
        if !self.is_healed && self.random.below(1_000) < self.fault_every {
            self.break_something();
        }
        self.land()?;
        for index in 0..self.candidates.len() {
            if self.candidates[index].runs(self.now) {
                self.converse(index);
                self.work(index)?;
                self.serve(index);
            }
        }
        self.ask()?;
        self.check_one_serves()
    }

    fn check_one_serves(&self) -> Step {
        let serving =
            |candidate: &&Candidate| candidate.is_alive && candidate.may(self.now, Nanos::ZERO);
        let serving: Vec<String> = self
            .candidates
            .iter()
            .filter(serving)
            .map(|candidate| candidate.daemon.me().to_string())
            .collect();
        if serving.len() > 1 {
            return Err(format!("{} serve", serving.join(" and ")));
        }
        Ok(())
    }

    /// Exchanges messages between a daemon and etcd.
    fn converse(&mut self, index: usize) {
        let now = self.now;
        let delay = Nanos((1 + self.random.below(12)) * MS);
        let (is_lost, is_slow) = (self.random.once_in(60), self.random.once_in(60));
        let back = if is_slow && !self.is_healed { Nanos(900 * MS) } else { delay };
        let is_away = now < self.etcd_away_until;
        let is_deposed = now < self.deposed_until && !self.is_healed;
        let candidate = &mut self.candidates[index];
        let is_cut = now < candidate.cut_until || is_lost && !self.is_healed;
        let line = Line { there: delay, back, is_cut: is_cut || is_away, is_deposed };
        let etcd = match &mut self.other_etcd {
            Some(other) if candidate.is_astray => other,
            _ => &mut self.etcd,
        };
        let exchanged = candidate.converse(now, etcd, &line);
        self.outcome.deposed_renewals += u64::from(exchanged.deposed_renewal);
        self.outcome.late_answers += exchanged.late_answers;
    }

    /// Does the daemon's task.
    fn work(&mut self, index: usize) -> Step {
        let now = self.now;
        let clock = self.candidates[index].clock(now);
        if self.candidates[index].work.is_none() {
            let Some((_, task)) = self.candidates[index].daemon.task(clock) else { return Ok(()) };
            self.tell(|| format!("candidate {index}: {task:?}"));
            let is_fence = matches!(task, Task::Fence { .. });
            let mut time = 1 + self.random.below(15);
            let fails = is_fence && !self.is_healed && self.random.once_in(3);
            if fails && self.random.once_in(2) {
                time = 1_000;
            }
            // The storage of the record hangs: its owner may have lost the key when it is written.
            // Locks do not stop such a write. A command does, if each suspect is named to it.
            let hangs = self.fence == Fence::Command && matches!(task, Task::WriteRecord { .. });
            if hangs && !self.is_healed && self.random.once_in(RECORD_HANGS) {
                time = 1 + self.random.below(RECORD_HANG_MS);
            }
            if task == Task::Close {
                self.candidates[index].serving = None;
            }
            let done_at = now.after(Nanos(time * MS));
            self.candidates[index].work = Some(Work { task, done_at, fails });
            return Ok(());
        }
        let Some(work) = self.candidates[index].work.take_if(|work| work.done_at <= now) else {
            return Ok(());
        };
        let Some(outcome) = self.outcome_of(index, &work) else {
            self.candidates[index].work = Some(work);
            return Ok(());
        };
        self.tell(|| format!("candidate {index}: {outcome:?}"));
        if let (Task::Open { epoch, .. }, Ended::Done) = (&work.task, &outcome) {
            self.open(index, *epoch)?;
        }
        self.candidates[index].ended(now, outcome);
        Ok(())
    }

    /// The store is open.
    fn open(&mut self, index: usize, epoch: u64) -> Step {
        self.openings += 1;
        self.outcome.openings += 1;
        self.candidates[index].opening = Some(self.openings);
        self.used_disk = self.candidates[index].disk;
        if epoch <= self.last_epoch && self.fence != Fence::Lie {
            let last = self.last_epoch;
            return Err(format!("the store is opened in epoch {epoch} after epoch {last}"));
        }
        self.last_epoch = epoch;
        Ok(())
    }

    /// The outcome of a task that has had its time; `None` while it is not done.
    fn outcome_of(&mut self, index: usize, work: &Work) -> Option<Ended> {
        let candidate = &mut self.candidates[index];
        let (process, disk) = (candidate.process, candidate.disk);
        match &work.task {
            Task::ReadRecord => Some(Ended::Recorded(self.disks[disk].record.clone())),
            Task::WriteRecord { record } => {
                self.disks[disk].record = Some(record.clone());
                Some(Ended::Done)
            }
            Task::Fence { .. } if work.fails => {
                self.outcome.failed_fences += 1;
                Some(Ended::Failed("the fence failed".to_owned()))
            }
            Task::Fence { suspects, .. } => {
                let name = &candidate.daemon.me().name;
                if self.fence == Fence::Command && suspects.iter().any(|s| s.name == *name) {
                    let host = &candidate.daemon.me().host;
                    if suspects.iter().any(|s| s.name == *name && s.host != *host) {
                        return Some(Ended::Failed("a suspect has this daemon's name".to_owned()));
                    }
                }
                let mut numbers: Vec<u64> = suspects.iter().map(process_of).collect();
                // Locks fence the former claims of this process, as a command does not.
                numbers.retain(|number| self.fence == Fence::Lock || *number != process);
                let outcome = self.fence(&numbers, disk);
                self.outcome.fences += u64::from(outcome == Ended::Done);
                Some(outcome)
            }
            // The lock of a former process of this host is waited for.
            Task::Open { .. } => {
                let in_flight = &self.disks[disk].in_flight;
                let is_dead = |process| {
                    self.candidates.iter().all(|other| other.process != process || !other.is_alive)
                };
                let orphans = in_flight.iter().any(|l| l.process != process && is_dead(l.process));
                if orphans && self.fence != Fence::Lie {
                    return None;
                }
                let is_locked = self.fence == Fence::Lock
                    && self.candidates.iter().any(|c| c.disk == disk && c.opening.is_some());
                let candidate = &self.candidates[index];
                let ends_at = candidate.daemon.lease_ends_at().unwrap_or(Nanos::ZERO);
                let is_late = candidate.clock(self.now) >= ends_at && self.fence != Fence::Lie;
                Some(if is_late {
                    Ended::Failed("the lease has ended".to_owned())
                } else if is_locked {
                    Ended::Failed("it is locked".to_owned())
                } else {
                    Ended::Done
                })
            }
            Task::Close => {
                if self.disks[disk].has(process) {
                    return None;
                }
                self.candidates[index].opening = None;
                Some(Ended::Done)
            }
        }
    }

    fn fence(&mut self, suspects: &[u64], disk: usize) -> Ended {
        match self.fence {
            Fence::Lie => Ended::Done,
            Fence::Lock => {
                let is_open = |candidate: &Candidate| {
                    suspects.contains(&candidate.process) && candidate.opening.is_some()
                };
                let in_flight = suspects.iter().any(|suspect| self.disks[disk].has(*suspect));
                if in_flight || self.candidates.iter().any(is_open) {
                    return Ended::Failed("the store is locked".to_owned());
                }
                Ended::Done
            }
            Fence::Command => {
                for suspect in suspects {
                    self.outcome.orphans += u64::from(self.disks[disk].has(*suspect));
                    self.disks.iter_mut().for_each(|disk| disk.cut(*suspect));
                }
                for candidate in &mut self.candidates {
                    if suspects.contains(&candidate.process) {
                        self.outcome.cut_records += u64::from(candidate.writes_record());
                        candidate.die();
                    }
                }
                Ended::Done
            }
        }
    }

    /// Carries the owner's request on, a step at a time: a pause can come between two.
    fn serve(&mut self, index: usize) {
        let now = self.now;
        let answers = self.candidates[index].may(now, Nanos::ZERO);
        let candidate = &mut self.candidates[index];
        let Some((request, progress)) = candidate.serving else { return };
        let Some(opening) = candidate.opening else {
            candidate.serving = None;
            return;
        };
        let next = match progress {
            Progress::Checked => {
                self.outcome.ends_after_check += u64::from(!answers);
                let time = if self.slow && self.random.once_in(20) { 4_000 } else { 40 };
                let lands_at = now.after(Nanos((1 + self.random.below(time)) * MS));
                let process = candidate.process;
                let landing = Landing { request, lands_at, process, opening };
                self.disks[candidate.disk].in_flight.push(landing);
                Some((request, Progress::Executing))
            }
            Progress::Executing => Some((request, Progress::Executing)),
            Progress::Executed(value) if answers => Some((request, Progress::Answering(value))),
            Progress::Executed(value) => Some((request, Progress::Executed(value))),
            Progress::Answering(value) => {
                self.outcome.ends_after_check += u64::from(!answers);
                candidate.last = Some((request.number, value));
                None
            }
        };
        candidate.serving = next;
        if let (None, Progress::Answering(value)) = (next, progress) {
            self.take_answer(index, request, value);
        }
    }

    /// The client takes an answer, if it comes from the candidate that it asked.
    fn take_answer(&mut self, index: usize, request: Request, value: u64) {
        let is_awaited =
            |asked: &mut Asked| asked.request.number == request.number && asked.to == index;
        let Some(asked) = self.asked.take_if(is_awaited) else { return };
        let block = asked.request.block;
        if asked.request.write.is_some() {
            self.answered[block] = value;
        } else if value != self.answered[block] && self.fence != Fence::Lie {
            let newest = self.answered[block];
            self.trace.push((
                (self.now.0 / MS) as usize,
                format!("WRONG: block {block} reads {value}, and {newest} was answered"),
            ));
            self.asked = Some(Asked { next_at: Nanos::MAX, ..asked });
            return;
        }
        self.outcome.answered += 1;
        self.answered_after_heal += u64::from(self.is_healed);
        // The next request goes to the same candidate.
        self.new_request(index);
    }

    fn new_request(&mut self, to: usize) {
        let block = self.random.below(BLOCKS as u64) as usize;
        let number = self.next_number;
        self.next_number += 1;
        let write = (!self.random.once_in(3)).then_some(number);
        let request = Request { number, block, write };
        let arrives_at = Some(self.now.after(Nanos((1 + self.random.below(4)) * MS)));
        let next_at = self.now.after(CLIENT_PATIENCE);
        self.asked = Some(Asked { request, to, arrives_at, next_at });
    }

    /// The client's part: its request arrives, or goes to the next candidate.
    fn ask(&mut self) -> Step {
        let now = self.now;
        if let Some((_, wrong)) = self.trace.last().filter(|(_, what)| what.starts_with("WRONG")) {
            return Err(wrong.clone());
        }
        let Some(asked) = &mut self.asked else {
            self.new_request(0);
            return Ok(());
        };
        if asked.arrives_at.is_some_and(|at| at <= now) {
            asked.arrives_at = None;
            let candidate = &mut self.candidates[asked.to];
            let process = candidate.process;
            // A session takes requests when the store has none of the last one.
            let is_idle = candidate.serving.is_none() && !self.disks[candidate.disk].has(process);
            let may = candidate.may(now, self.options.margin);
            if candidate.runs(now) && candidate.opening.is_some() && is_idle && may {
                let known = candidate.last.filter(|(number, _)| *number == asked.request.number);
                let progress = match known {
                    Some((_, value)) => Progress::Executed(value),
                    None => Progress::Checked,
                };
                candidate.serving = Some((asked.request, progress));
            }
        }
        if asked.next_at <= now {
            let number = asked.request.number;
            let in_flight = self.disks.iter().flat_map(|disk| &disk.in_flight);
            let is_in_flight = in_flight.into_iter().any(|l| l.request.number == number);
            self.outcome.resent_in_flight += u64::from(is_in_flight);
            asked.to = (asked.to + 1) % self.candidates.len();
            asked.arrives_at = Some(now.after(Nanos(2 * MS)));
            asked.next_at = now.after(CLIENT_PATIENCE);
        }
        Ok(())
    }

    /// Requests that the kernel has take effect, also those of processes that have ended.
    fn land(&mut self) -> Step {
        for index in 0..self.disks.len() {
            let disk = &mut self.disks[index];
            let (landed, rest) =
                disk.in_flight.drain(..).partition(|landing| landing.lands_at <= self.now);
            disk.in_flight = rest;
            let landed: Vec<Landing> = landed;
            for Landing { request, process, opening, .. } in landed {
                let block = request.block;
                if let Some(value) = request.write {
                    if opening != self.openings && self.fence != Fence::Lie {
                        return Err(format!(
                            "a write of process {process} takes effect in opening {} of the store, \
                             and was accepted in opening {opening}",
                            self.openings
                        ));
                    }
                    self.disks[index].values[block] = value;
                }
                let value = self.disks[index].values[block];
                let mut candidates = self.candidates.iter_mut();
                if let Some(candidate) = candidates.find(|c| c.process == process) {
                    match &mut candidate.serving {
                        Some((serving, progress)) if serving.number == request.number => {
                            *progress = Progress::Executed(value);
                        }
                        _ => {}
                    }
                    candidate.last = Some((request.number, value));
                }
            }
        }
        Ok(())
    }

    fn break_something(&mut self) {
        let now = self.now;
        let index = self.random.below(self.candidates.len() as u64) as usize;
        // Long enough for a lease to end, or short.
        let most = if self.random.once_in(2) { 9_000 } else { 400 };
        let time = Nanos((1 + self.random.below(most)) * MS);
        let kind = self.random.below(12);
        self.tell(|| format!("fault {kind} of candidate {index} for {} ms", time.0 / MS));
        match kind {
            0..=2 => {
                self.candidates[index].runs_at = now.after(time);
                self.outcome.pauses += 1;
            }
            3 => self.kill(index),
            4 | 5 => self.candidates[index].cut_until = now.after(time),
            6 => self.etcd_away_until = now.after(time),
            7 | 8 => {
                self.etcd.elect(now, Nanos::from_millis(TTL_S * 1_000));
                self.deposed_until = now.after(Nanos(4_000 * MS));
                // A partition follows, as it often does.
                if self.random.once_in(2) {
                    let at = now.after(Nanos(self.random.below(4_000) * MS));
                    self.candidates[index].cut_until = at.after(time);
                }
            }
            9 => {
                self.outcome.hand_overs += u64::from(self.candidates[index].daemon.hand_over(STORE))
            }
            10 => self.break_etcd(),
            _ => {
                // Before the first record, nothing tells the clusters apart.
                let is_astray = !self.candidates[index].is_astray && self.openings > 0;
                if is_astray && self.other_etcd.is_none() {
                    self.other_etcd = Some(self.etcd.copied());
                }
                self.candidates[index].is_astray = is_astray;
            }
        }
    }

    fn break_etcd(&mut self) {
        match self.random.below(3) {
            0 => self.backup = Some(self.etcd.clone()),
            // Both would let two daemons serve where the fence lies.
            // An etcd that forgot the first owner cannot know that a store is not shared, and one
            // that forgot the writer of a record cannot name it to the fence.
            1 if self.fence != Fence::Lie
                && self.candidates.iter().all(|c| c.disk == 0 && !c.writes_record()) =>
            {
                if let Some(mut backup) = self.backup.clone() {
                    backup.elect(self.now, Nanos::from_millis(TTL_S * 1_000));
                    backup.term = self.etcd.term + 1;
                    self.etcd = backup;
                    self.outcome.restores += 1;
                }
            }
            2 if self.fence != Fence::Lie => {
                self.etcd.revoke_owner();
                self.outcome.early_ends += 1;
            }
            _ => {}
        }
    }

    fn kill(&mut self, index: usize) {
        let process = self.candidates[index].process;
        self.outcome.deaths += 1;
        self.outcome.orphans += u64::from(self.disks.iter().any(|disk| disk.has(process)));
        self.candidates[index].die();
        self.restart(index);
    }

    fn restart(&mut self, index: usize) {
        let process = self.next_process;
        self.next_process += 1;
        let me = self.candidates[index].daemon.me();
        // The operator gives each daemon a name of its own.
        let name = if self.is_healed { format!("d{}", me.host) } else { me.name.clone() };
        self.candidates[index] = self.candidates[index].again(&name, process, self.options);
        let time = self.random.below(6_000);
        self.candidates[index].runs_at = self.now.after(Nanos(time * MS));
    }

    /// Nothing breaks any more.
    fn heal(&mut self) {
        self.tell(|| "healed".to_owned());
        self.is_healed = true;
        self.etcd_away_until = Nanos::ZERO;
        let name = |candidate: &Candidate| candidate.daemon.me().name.clone();
        let names: Vec<String> = self.candidates.iter().map(name).collect();
        for index in 0..self.candidates.len() {
            let candidate = &mut self.candidates[index];
            candidate.cut_until = Nanos::ZERO;
            candidate.is_astray = false;
            let name = &candidate.daemon.me().name;
            let is_namesake = names.iter().filter(|other| *other == name).count() > 1;
            if is_namesake {
                self.kill(index);
            }
            self.candidates[index].runs_at = self.now;
        }
    }

    /// The operator does what refusals name, and gives each daemon a name of its own.
    fn operate(&mut self) {
        let now = self.now;
        let refuses = |candidate: &Candidate| {
            let status = candidate.daemon.status(candidate.clock(now));
            status.iter().any(|(_, status)| status.state == State::Refused)
        };
        for index in 0..self.candidates.len() {
            let candidate = &self.candidates[index];
            // Also one whose lease came when all had healed, from a request of before.
            let is_foreign = candidate.daemon.cluster().is_some_and(|cluster| cluster != 1);
            if !candidate.is_alive || is_foreign {
                self.kill(index);
                self.candidates[index].runs_at = self.now;
            }
        }
        if !self.candidates.iter().any(refuses) {
            return;
        }
        let serves = |candidate: &Candidate| candidate.opening.is_some();
        if self.candidates.iter().any(serves) {
            return;
        }
        let refusing = self.candidates.iter().filter(|candidate| refuses(candidate)).count();
        if refusing < self.candidates.len() {
            return;
        }
        self.tell(|| "the operator deletes records and keys".to_owned());
        self.outcome.refusals += 1;
        self.etcd.delete_keys();
        self.last_epoch = 0;
        // One store remains: the one that the client's data is on.
        for candidate in &mut self.candidates {
            candidate.disk = self.used_disk;
            candidate.daemon.retry(STORE);
        }
        self.disks.iter_mut().for_each(|disk| disk.record = None);
    }
}
