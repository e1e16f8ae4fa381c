//! Gives requests to a device, and looks at how they end.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use serde::Serialize;
use sidecore_driver::{BlkQueue, ClientError, Completion, Slot, Status};
use sidecore_recording::{Outcome, RequestKind, checksum};
use sidecore_units::{SECTOR_BYTES, Sector};

use super::steps::{Step, Steps};
use crate::interrupt::Interrupt;

/// How often the end of a wait looks for a signal.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// A device that completes nothing for so long does not answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// The kernel wakes a thread later than asked by about so long: the rest is spent polling.
const WAKE_SLACK: Duration = Duration::from_micros(200);

/// A difference between the recording and the replay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Difference {
    /// When the request had arrived in the recording, in nanoseconds since the start.
    pub(super) arrival_ns: u64,
    pub(super) kind: &'static str,
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
    /// Recorded, in words.
    pub(super) recorded: String,
    /// Replayed, in words.
    pub(super) replayed: String,
}

/// The results of a replay.
#[derive(Debug, Default)]
pub(super) struct Results {
    /// Nanoseconds of the requests, from submission to completion.
    pub(super) latencies_ns: Vec<u64>,
    /// Nanoseconds by which requests were submitted after their times.
    pub(super) lateness_ns: Vec<u64>,
    pub(super) elapsed: Duration,
    /// Writes whose data the recording has not.
    pub(super) made_up: u64,
    pub(super) compared: u64,
    pub(super) data_differences: u64,
    pub(super) result_differences: u64,
    /// The first differences.
    pub(super) shown: Vec<Difference>,
}

/// A request in flight.
#[derive(Clone, Copy)]
struct InFlight {
    step: Step,
    submitted: Instant,
}

/// A replay.
pub(super) struct Runner<'a> {
    queue: BlkQueue,
    file: &'a File,
    interrupt: &'a Interrupt,
    /// How many differences are kept.
    show: usize,
    /// By slot.
    in_flight: Vec<Option<InFlight>>,
    completed: Vec<Completion>,
    data: Vec<u8>,
    /// Requests were submitted that are not published.
    is_quiet: bool,
    results: Results,
}

impl<'a> Runner<'a> {
    pub(super) fn new(
        queue: BlkQueue,
        file: &'a File,
        interrupt: &'a Interrupt,
        show: usize,
    ) -> Self {
        let in_flight = vec![None; usize::from(queue.slots())];
        let (completed, data, results) = (Vec::new(), Vec::new(), Results::default());
        Self { queue, file, interrupt, show, in_flight, completed, data, is_quiet: false, results }
    }

    /// Replays the requests, at their times if there is a pace.
    pub(super) fn run(mut self, steps: &Steps, pace: Option<f64>) -> Result<Results> {
        let begun = Instant::now();
        let first_ns = steps.steps.first().map_or(0, |step| step.request.arrival_ns);
        for (index, step) in steps.steps.iter().enumerate().filter(|(_, step)| step.replays) {
            let due = pace.map(|speed| {
                let after = step.request.arrival_ns.saturating_sub(first_ns) as f64 / speed;
                begun + Duration::from_nanos(after as u64)
            });
            if let Some(due) = due {
                self.rest_until(due)?;
            }
            while !self.may_start(step) {
                self.wait()?;
            }
            let slot = loop {
                match self.queue.take_slot() {
                    Some(slot) => break slot,
                    None => self.wait()?,
                }
            };
            self.submit(slot, step, index)?;
            if let Some(due) = due {
                self.publish()?;
                let late = Instant::now().saturating_duration_since(due);
                self.results.lateness_ns.push(nanos(late));
            }
        }
        while self.queue.in_flight() > 0 {
            self.wait()?;
        }
        self.results.elapsed = begun.elapsed();
        Ok(self.results)
    }

    /// Whether nothing is in flight that has to end first.
    fn may_start(&self, step: &Step) -> bool {
        !self.in_flight.iter().flatten().any(|it| step.waits_for(&it.step))
    }

    fn submit(&mut self, slot: Slot, step: &Step, index: usize) -> Result<()> {
        let request = &step.request;
        let sector = Sector(request.offset_bytes / SECTOR_BYTES);
        let len_bytes = u32::try_from(request.len_bytes).unwrap_or(u32::MAX);
        let sectors = u32::try_from(request.len_bytes / SECTOR_BYTES).unwrap_or(u32::MAX);
        match request.kind {
            RequestKind::Read => self.queue.submit_read(slot, sector, len_bytes),
            RequestKind::Write => {
                self.load(step, index)?;
                self.queue.write_data(slot, 0, &self.data);
                self.queue.submit_write(slot, sector, len_bytes)
            }
            RequestKind::Flush => self.queue.submit_flush(slot),
            RequestKind::Discard => self.queue.submit_discard(slot, sector, sectors),
            RequestKind::WriteZeroes => {
                self.queue.submit_write_zeroes(slot, sector, sectors, false)
            }
            RequestKind::WriteZeroesUnmap => {
                self.queue.submit_write_zeroes(slot, sector, sectors, true)
            }
        }?;
        self.is_quiet = true;
        let submitted = Instant::now();
        self.in_flight[slot.index()] = Some(InFlight { step: *step, submitted });
        Ok(())
    }

    /// Fills the data of a write: as recorded, or made up.
    fn load(&mut self, step: &Step, index: usize) -> Result<()> {
        self.data.resize(usize::try_from(step.request.len_bytes)?, 0);
        let Some(at) = step.data_at else {
            let word = (index as u64).wrapping_add(1).to_le_bytes();
            self.data.chunks_mut(8).for_each(|part| part.copy_from_slice(&word[..part.len()]));
            self.results.made_up += 1;
            return Ok(());
        };
        self.file.read_exact_at(&mut self.data, at).context("cannot read the recording again")?;
        if step.request.checksum != Some(checksum(&self.data)) {
            bail!("the recording has been changed while it is replayed: replay a copy");
        }
        Ok(())
    }

    fn publish(&mut self) -> Result<(), ClientError> {
        if std::mem::take(&mut self.is_quiet) { self.queue.publish() } else { Ok(()) }
    }

    fn check_interrupt(&self) -> Result<()> {
        let stopped = || anyhow!("interrupted: a part of the requests was not replayed");
        self.interrupt.check().map_err(|_| stopped())
    }

    /// Handles completions until that time.
    fn rest_until(&mut self, due: Instant) -> Result<()> {
        loop {
            self.take_completed()?;
            let rest = due.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Ok(());
            }
            self.check_interrupt()?;
            let Some(sleep) = rest.checked_sub(WAKE_SLACK).map(|rest| rest.min(SIGNAL_INTERVAL))
            else {
                std::hint::spin_loop();
                continue;
            };
            if self.queue.in_flight() > 0 {
                self.queue.wait(sleep)?;
            } else {
                std::thread::sleep(sleep);
            }
        }
    }

    /// Waits until at least one request has completed.
    fn wait(&mut self) -> Result<()> {
        self.publish()?;
        let asked = Instant::now();
        while self.take_completed()? == 0 {
            self.check_interrupt()?;
            if self.queue.is_broken() {
                bail!("the device has hung up, or broken its ring");
            }
            if !self.queue.wait(SIGNAL_INTERVAL)? && asked.elapsed() > PATIENCE {
                bail!("the device has completed nothing for {} s", PATIENCE.as_secs());
            }
        }
        Ok(())
    }

    fn take_completed(&mut self) -> Result<usize> {
        let count = self.queue.poll_completions(&mut self.completed)?;
        let now = Instant::now();
        for completion in std::mem::take(&mut self.completed) {
            if let Some(InFlight { step, submitted }) =
                self.in_flight[completion.slot.index()].take()
            {
                self.results.latencies_ns.push(nanos(now.saturating_duration_since(submitted)));
                self.compare(&step, completion);
            }
            self.queue.release_slot(completion.slot);
        }
        Ok(count)
    }

    /// Compares the end of a request with the recorded one.
    fn compare(&mut self, step: &Step, completion: Completion) {
        let request = &step.request;
        let expected = match request.outcome {
            Outcome::Ok => Status::Ok,
            Outcome::Unsupported => Status::Unsupported,
            _ => Status::IoError,
        };
        if completion.status != expected {
            self.results.result_differences += 1;
            let recorded = match request.errno {
                0 => outcome(request.outcome).to_owned(),
                errno => format!("{} (errno {errno})", outcome(request.outcome)),
            };
            self.show(step, recorded, status(completion.status));
        }
        let Some(sum) = request.checksum.filter(|_| step.compares) else { return };
        if completion.status != Status::Ok {
            return;
        }
        self.results.compared += 1;
        self.data.resize(usize::try_from(request.len_bytes).unwrap_or(0), 0);
        self.queue.read_data(completion.slot, 0, &mut self.data);
        let found = checksum(&self.data);
        if found != sum {
            self.results.data_differences += 1;
            self.show(step, format!("data {sum:016x}"), format!("data {found:016x}"));
        }
    }

    fn show(&mut self, step: &Step, recorded: String, replayed: String) {
        if self.results.shown.len() >= self.show {
            return;
        }
        let request = &step.request;
        self.results.shown.push(Difference {
            arrival_ns: request.arrival_ns,
            kind: request.kind.word(),
            offset_bytes: request.offset_bytes,
            len_bytes: request.len_bytes,
            recorded,
            replayed,
        });
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// An outcome in words.
fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Ok => "success",
        Outcome::Io => "I/O error",
        Outcome::NoSpace => "no space",
        Outcome::Short => "short transfer",
        Outcome::Unsupported => "unsupported",
        Outcome::ReadOnly => "read-only",
        Outcome::OutOfBounds => "out of bounds",
        Outcome::Other => "an error",
    }
}

/// A status in words.
fn status(status: Status) -> String {
    match status {
        Status::Ok => "success".to_owned(),
        Status::IoError => "I/O error".to_owned(),
        Status::Unsupported => "unsupported".to_owned(),
        Status::Other(other) => format!("status {other}"),
    }
}
