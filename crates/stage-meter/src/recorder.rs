//! Records.

use std::io;
use std::path::PathBuf;
use std::time::SystemTime;

use jiff::Timestamp;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::Serialize;
use sidecore_block::{Meter, MeterCounts};

use crate::file::RecordFile;

/// The names in a record.
#[derive(Clone, Debug)]
pub struct Names {
    /// The store that the stage belongs to.
    pub store: String,
    /// The meter.
    pub name: String,
}

/// A line of the file.
#[derive(Serialize)]
struct Record<'a> {
    /// RFC 3339, in UTC.
    start: String,
    end: String,
    store: &'a str,
    name: &'a str,
    incarnation: &'a str,
    sequence: u64,
    #[serde(flatten)]
    counts: MeterCounts,
}

/// Writes the counts of a meter as records: each has the counts since the one before.
#[derive(Debug)]
pub struct Recorder {
    file: RecordFile,
    names: Names,
    /// A random number in hexadecimal digits, another one each time that the stage is opened.
    incarnation: String,
    /// The number of the next record.
    sequence: u64,
    /// The end of the last record.
    start: SystemTime,
    /// The counts as of then.
    recorded: MeterCounts,
}

impl Recorder {
    /// A recorder of a meter that has counted nothing at `start`.
    ///
    /// # Errors
    /// The kernel has no random number.
    pub fn new(path: PathBuf, names: Names, start: SystemTime) -> io::Result<Self> {
        Ok(Self {
            file: RecordFile::new(path),
            names,
            incarnation: incarnation()?,
            sequence: 1,
            start,
            recorded: MeterCounts::default(),
        })
    }

    /// Opens the file, so that the meter has a problem from the start if that fails.
    pub(crate) fn prepare(&mut self, meter: &Meter) {
        let opened = self.file.follow().map(drop);
        self.report(meter, opened);
    }

    /// Writes the record of the time since the last one. If that fails, the meter has a problem,
    /// and the next record covers this time, too.
    pub fn record(&mut self, now: SystemTime, meter: &Meter) {
        let written = self.write(now, meter.counts());
        self.report(meter, written);
    }

    fn write(&mut self, now: SystemTime, counts: MeterCounts) -> io::Result<()> {
        if self.file.follow()? {
            let (meter, records) = (&self.names.name, self.file.path().display());
            tracing::warn!(meter, %records, "the file of its records was replaced: they go on");
        }
        let record = Record {
            start: rfc3339(self.start),
            end: rfc3339(now),
            store: &self.names.store,
            name: &self.names.name,
            incarnation: &self.incarnation,
            sequence: self.sequence,
            counts: since(&counts, &self.recorded),
        };
        let mut line = serde_json::to_vec(&record)?;
        line.push(b'\n');
        self.file.append(&line)?;
        (self.start, self.recorded) = (now, counts);
        self.sequence = self.sequence.saturating_add(1);
        // The record is in the file whatever this answers, and must not be written again.
        self.file.sync()
    }

    /// Logs when records begin to fail, and when they no longer do.
    fn report(&self, meter: &Meter, written: io::Result<()>) {
        let (name, path) = (&self.names.name, self.file.path().display());
        let Err(error) = written else {
            if meter.set_problem(None).is_some() {
                tracing::info!(meter = name, records = %path, "its records are written again");
            }
            return;
        };
        let problem = format!(
            "the usage records of meter \"{name}\" are not written to {path}: {error}; requests \
             are counted, and the next record has them"
        );
        if meter.set_problem(Some(problem.clone())).is_none() {
            tracing::error!("{problem}");
        }
    }
}

fn incarnation() -> io::Result<String> {
    let mut bytes = [0; 8];
    // A read of up to 256 bytes is whole (getrandom(2)).
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(format!("{:016x}", u64::from_ne_bytes(bytes)))
}

/// A time that no calendar has is the beginning of 1970.
fn rfc3339(time: SystemTime) -> String {
    Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}

/// The counts between two moments.
fn since(now: &MeterCounts, before: &MeterCounts) -> MeterCounts {
    let of = |count: fn(&MeterCounts) -> u64| count(now).saturating_sub(count(before));
    MeterCounts {
        reads: of(|counts| counts.reads),
        writes: of(|counts| counts.writes),
        flushes: of(|counts| counts.flushes),
        discards: of(|counts| counts.discards),
        write_zeroes: of(|counts| counts.write_zeroes),
        bytes_read: of(|counts| counts.bytes_read),
        bytes_written: of(|counts| counts.bytes_written),
        bytes_discarded: of(|counts| counts.bytes_discarded),
        bytes_zeroed: of(|counts| counts.bytes_zeroed),
        errors: of(|counts| counts.errors),
    }
}
