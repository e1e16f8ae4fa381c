//! Runs commands side by side. The output of each is kept, and handed over whole when it has ended.

use std::collections::VecDeque;
use std::io::{Read as _, Seek as _};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// After this long without an end, say which jobs run: one of them may be stuck.
const SILENCE: Duration = Duration::from_secs(120);

/// A command and its name.
pub struct Job {
    pub name: String,
    pub command: Command,
}

/// The jobs of one or more workers, in the order in which they start.
pub struct Queue(Mutex<VecDeque<Job>>);

impl Queue {
    pub fn new(jobs: impl IntoIterator<Item = Job>) -> Self {
        Self(Mutex::new(jobs.into_iter().collect()))
    }

    fn next(&self) -> Option<Job> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}

/// A job that has ended.
pub struct Ended {
    pub name: String,
    /// The command as a user would type it.
    pub line: String,
    pub took: Duration,
    /// Its output, of both streams.
    pub output: String,
    pub status: ExitStatus,
}

/// Runs the jobs of each worker's queue, one after another; workers may share a queue. After a job
/// that failed or could not start, and after an error of `ended`, no further job starts; the first
/// error is returned when all that run have ended.
pub fn run(workers: &[&Queue], mut ended: impl FnMut(&Ended) -> Result<()>) -> Result<()> {
    let stop = AtomicBool::new(false);
    let running = Mutex::new(Vec::new());
    let (sender, receiver) = channel();
    std::thread::scope(|scope| {
        for queue in workers {
            let (sender, stop, running) = (sender.clone(), &stop, &running);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed)
                    && let Some(job) = queue.next()
                {
                    let name = job.name.clone();
                    lock(running).push(name.clone());
                    let outcome = job.run();
                    let passed = outcome.as_ref().is_ok_and(|ended| ended.status.success());
                    stop.fetch_or(!passed, Ordering::Relaxed);
                    lock(running).retain(|other| *other != name);
                    if sender.send(outcome).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut outcome = Ok(());
        loop {
            match receiver.recv_timeout(SILENCE) {
                Ok(job) => {
                    let result = job.and_then(|job| ended(&job));
                    stop.fetch_or(result.is_err(), Ordering::Relaxed);
                    outcome = outcome.and(result);
                }
                Err(RecvTimeoutError::Timeout) => {
                    println!("    still running: {}", lock(&running).join(", "));
                }
                Err(RecvTimeoutError::Disconnected) => return outcome,
            }
        }
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    pub fn new(name: impl Into<String>, command: Command) -> Self {
        Self { name: name.into(), command }
    }

    fn run(mut self) -> Result<Ended> {
        let line = crate::shell::describe(&self.command);
        // One file for both streams keeps their order. It has no end to wait for, unlike a pipe,
        // which a process that the job left running may hold for ever.
        let mut file = tempfile::tempfile().context("cannot keep a job's output")?;
        let started = Instant::now();
        let status = self
            .command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file.try_clone()?)
            .status()
            .with_context(|| format!("cannot start `{line}`: is it installed?"))?;
        let took = started.elapsed();
        file.rewind()?;
        let mut output = Vec::new();
        file.read_to_end(&mut output)?;
        let output = String::from_utf8_lossy(&output).into_owned();
        Ok(Ended { name: self.name, line, took, output, status })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job::new(name, command)
    }

    #[test]
    fn jobs_run_side_by_side_and_their_outputs_stay_whole() {
        let directory = tempfile::tempdir().unwrap();
        let meet = |mine: &str, other: &str| {
            let path = directory.path().display();
            format!(
                "echo {mine} begins; touch {path}/{mine}; until test -e {path}/{other}; do \
                 sleep 0.01; done; echo {mine} ends >&2"
            )
        };
        // Each ends only after the other has begun.
        let both = Queue::new([job("a", &meet("a", "b")), job("b", &meet("b", "a"))]);
        let mut outputs = Vec::new();
        run(&[&both, &both], |ended| {
            assert!(ended.status.success());
            outputs.push(ended.output.clone());
            Ok(())
        })
        .unwrap();
        outputs.sort();
        assert_eq!(outputs, ["a begins\na ends\n", "b begins\nb ends\n"]);
    }

    #[test]
    fn a_failure_lets_running_jobs_end_and_starts_no_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().display();
        let touch = |name: &str| format!("touch {path}/{name}");
        let wait = |name: &str| format!("until test -e {path}/{name}; do sleep 0.01; done");
        // The first fails while the second runs, which ends only after that.
        let failing = Queue::new([
            job("fails", &format!("{}; exit 3", wait("begun"))),
            job("late", &touch("late")),
        ]);
        let other = Queue::new([
            job("runs", &format!("{}; {}", touch("begun"), wait("seen"))),
            job("later", &touch("later")),
        ]);
        let mut names = Vec::new();
        let error = run(&[&failing, &other], |ended| {
            names.push(ended.name.clone());
            std::fs::write(directory.path().join("seen"), "").unwrap();
            anyhow::ensure!(ended.status.success(), "{} with {}", ended.name, ended.status);
            Ok(())
        })
        .unwrap_err();
        assert_eq!(names, ["fails", "runs"]);
        assert!(error.to_string().starts_with("fails with exit status: 3"), "{error}");
    }

    #[test]
    fn a_process_that_is_left_running_does_not_hold_a_job() {
        let left = Queue::new([job("leaves", "sleep 600 & echo $!")]);
        let mut pid = String::new();
        run(&[&left], |ended| {
            pid = ended.output.trim().to_owned();
            Ok(())
        })
        .unwrap();
        assert!(Command::new("kill").arg(pid).status().unwrap().success());
    }
}
