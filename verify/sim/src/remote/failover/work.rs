//! The supervisors: leases, fences, and the start and the end of daemons.

use sidecore_ownership::{Member as Suspect, Outcome as Ended, Task};
use sidecore_units::Nanos;

use super::super::world::Step;
use super::Rule;
use super::machine::{Machine, name_of};
use super::process::Process;
use super::world::{Fence, MS, World};
use crate::ownership::candidate::{Line, Work, process_of};

/// A supervisor looks at its daemon at least this often while it runs.
const LOOK: Nanos = Nanos::from_millis(100);

impl World {
    /// Each supervisor that runs talks to etcd, looks at the lease, and does its tasks.
    pub(super) fn supervise(&mut self) -> Step {
        self.etcd.pass(self.now);
        for index in 0..2 {
            let supervisor = &self.machines[index].supervisor;
            if !supervisor.is_alive && supervisor.runs_at <= self.now {
                self.start_supervisor(index);
            }
            if self.machines[index].supervisor.runs(self.now) {
                self.converse(index);
                self.kill_in_time(index)?;
                self.work(index);
            }
        }
        Ok(())
    }

    fn converse(&mut self, index: usize) {
        let time = Nanos((1 + self.random.below(12)) * MS);
        let is_lost = self.random.once_in(60) && !self.is_healed;
        let supervisor = &mut self.machines[index].supervisor;
        let is_cut = is_lost || self.now < supervisor.cut_until.max(self.etcd_away_until);
        let line = Line { there: time, back: time, is_cut, is_deposed: false };
        supervisor.converse(self.now, &mut self.etcd, &line);
        self.machines[index].hear(self.neglect);
    }

    /// The daemon is killed before its lease ends.
    fn kill_in_time(&mut self, index: usize) -> Step {
        let machine = &self.machines[index];
        if machine.daemon.is_none() {
            return Ok(());
        }
        if machine.is_over(self.now, self.options.margin) && self.neglect != Some(Rule::Kill) {
            self.tell(|| format!("the daemon of {index} is killed: its lease ends"));
            if self.machines[index].daemon.take_if(|daemon| daemon.is_ending).is_none() {
                // The supervisor ends with it, and is started again.
                self.end_machine(index, 1_000);
            }
        } else if machine.supervisor.clock(self.now) >= machine.until.after(LOOK) {
            return Err(format!("the daemon of {index} outlives its lease beside its supervisor"));
        }
        Ok(())
    }

    /// The supervisor and its daemon end. What the kernel has of the daemon's goes on.
    pub(super) fn end_machine(&mut self, index: usize, most_ms: u64) {
        let time = Nanos((1 + self.random.below(most_ms)) * MS);
        let machine = &mut self.machines[index];
        machine.daemon = None;
        machine.supervisor.is_alive = false;
        machine.supervisor.runs_at = self.now.after(time);
    }

    fn start_supervisor(&mut self, index: usize) {
        let number = self.next_process;
        self.next_process += 1;
        let Machine { supervisor, former, .. } = &mut self.machines[index];
        former.push(supervisor.process);
        *supervisor = supervisor.again(&name_of(index), number, self.options);
    }

    fn work(&mut self, index: usize) {
        let clock = self.machines[index].supervisor.clock(self.now);
        let Some(work) = self.machines[index].supervisor.work.take() else {
            if let Some((_, task)) = self.machines[index].supervisor.daemon.task(clock) {
                self.begin(index, task);
            }
            return;
        };
        let outcome = if work.done_at <= self.now { self.outcome_of(index, &work) } else { None };
        let supervisor = &mut self.machines[index].supervisor;
        match outcome {
            Some(outcome) => {
                supervisor.ended(self.now, outcome.clone());
                self.machines[index].hear(self.neglect);
                self.tell(|| format!("{index}: {outcome:?}"));
            }
            None => supervisor.work = Some(work),
        }
    }

    fn begin(&mut self, index: usize, task: Task) {
        self.tell(|| format!("{index}: {task:?}"));
        let mut time = 1 + self.random.below(15);
        let mut fails = false;
        if let Task::Fence { suspects, .. } = &task {
            self.kernel.note_attempts(&numbers(suspects));
            fails = !self.is_healed && self.random.once_in(3);
            if fails && self.random.once_in(2) {
                time = 1_000;
            }
        }
        let done_at = self.now.after(Nanos(time * MS));
        self.machines[index].supervisor.work = Some(Work { task, done_at, fails });
    }

    /// The outcome of a task that has had its time; `None` while it is not done.
    fn outcome_of(&mut self, index: usize, work: &Work) -> Option<Ended> {
        Some(match &work.task {
            Task::ReadRecord => Ended::Recorded(self.record.clone()),
            Task::WriteRecord { record } => {
                self.record = Some(record.clone());
                Ended::Done
            }
            Task::Fence { .. } if work.fails => {
                self.outcome.failed_fences += 1;
                Ended::Failed("the fence failed".to_owned())
            }
            Task::Fence { suspects, .. } => self.fence(index, suspects),
            Task::Open { .. } => return self.open(index),
            Task::Close => return self.close(index),
        })
    }

    fn fence(&mut self, index: usize, suspects: &[Suspect]) -> Ended {
        let (far, own): (Vec<_>, Vec<_>) =
            suspects.iter().cloned().partition(|suspect| suspect.name != name_of(index));
        // A host does not switch itself off: its former processes are fenced by their locks.
        let by_locks = if self.fence == Fence::Lock { suspects } else { &own };
        let is_alive = |number: &u64| {
            self.machines
                .iter()
                .filter_map(|machine| machine.daemon.as_ref())
                .any(|daemon| daemon.number == *number)
        };
        if numbers(by_locks).iter().any(|n| is_alive(n) || self.kernel.has(*n)) {
            return Ended::Failed("the stores are locked".to_owned());
        }
        if self.fence == Fence::Command && !far.is_empty() {
            self.switch_off(1 - index, &numbers(&far));
        }
        Ended::Done
    }

    /// A fence command ends an IOhost.
    fn switch_off(&mut self, index: usize, suspects: &[u64]) {
        if self.neglect == Some(Rule::Silence) {
            suspects.iter().for_each(|number| self.kernel.cut_off(self.now, *number));
            return;
        }
        self.tell(|| format!("{index} is switched off"));
        self.end_machine(index, 6_000);
        suspects.iter().for_each(|number| self.kernel.power_off(*number));
        if self.caches_are_hosts {
            self.kernel.lose_caches();
        }
    }

    /// Starts the daemon. It waits for the requests of former ones of its host.
    fn open(&mut self, index: usize) -> Option<Ended> {
        let machine = &self.machines[index];
        let number = machine.supervisor.process;
        let is_locked = match self.fence {
            Fence::Lock if self.machines[1 - index].daemon.is_some() => {
                return Some(Ended::Failed("the stores are locked".to_owned()));
            }
            Fence::Lock => self.kernel.has_others(number),
            Fence::Command => machine.former.iter().any(|former| self.kernel.has(*former)),
        };
        if is_locked {
            return None;
        }
        let until = machine.supervisor.daemon.lease_ends_at().unwrap_or(Nanos::ZERO);
        self.machines[index].until = until;
        if self.machines[index].is_over(self.now, self.options.margin) {
            return Some(Ended::Failed("the lease has ended".to_owned()));
        }
        self.opened(index);
        let incarnation = match self.neglect {
            Some(Rule::Incarnation) => 1,
            _ => self.random.below(u64::MAX - 1) + 1,
        };
        let names = (number, self.kernel.openings);
        let secrets = (incarnation, self.random.below(u64::MAX));
        let engine = (self.manner(), Rule::of_channel(self.neglect));
        self.machines[index].daemon = Some(Process::new(self.now, names, engine, secrets));
        Some(Ended::Done)
    }

    /// Ends the daemon in order, or at once if the lease is over.
    fn close(&mut self, index: usize) -> Option<Ended> {
        let machine = &mut self.machines[index];
        if machine.is_over(self.now, Nanos::ZERO) {
            machine.daemon = None;
            let has_looked = self.neglect == Some(Rule::Look);
            return Some(if has_looked { Ended::Done } else { Ended::Left });
        }
        if let Some(daemon) = &mut machine.daemon {
            daemon.is_ending = true;
            if !daemon.is_idle(self.now) || daemon.runs_at > self.now {
                return None;
            }
        }
        let has_requests = self.kernel.has(machine.supervisor.process);
        if !has_requests {
            machine.daemon = None;
        }
        (!has_requests).then_some(Ended::Done)
    }
}

fn numbers(suspects: &[Suspect]) -> Vec<u64> {
    suspects.iter().map(process_of).collect()
}
