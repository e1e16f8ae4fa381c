//! The state of an ownership as operators see it: on the standard error, in `sidecore list`, and
//! in metrics.
//!
//! The state lies in a file beside the control socket of the daemon that is served, because a
//! candidate that waits has no daemon to ask.
//!
//! The thread that ends the command with its lease never waits for a file or a terminal: other
//! threads write.

use std::fmt::Write as _;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sidecore_cluster::{Report, boot_time};
use sidecore_ownership::{State, Status};
use sidecore_units::Nanos;

use super::say;
use crate::units::time;

/// The file is written again after this time, also without a change.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// A file that is older is that of a process that was stopped or killed.
const FRESH: Nanos = Nanos::from_millis(5_000);
/// The newest events that are kept.
const EVENTS: usize = 16;
/// Lines that wait for a terminal; more are lost.
const LINES: usize = 64;
/// The longest wait for the files and the terminal at the end.
const END_PATIENCE: Duration = Duration::from_secs(1);
/// Larger than any state.
const MAX_BYTES: u64 = 1 << 20;

/// A change of the state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Event {
    pub(crate) at_unix_s: u64,
    pub(crate) text: String,
}

/// The state of a candidate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Candidacy {
    pub(crate) store: String,
    pub(crate) name: String,
    pub(crate) process: u32,
    /// The word of the state.
    pub(crate) state: String,
    /// The epoch in which this candidate has the key.
    pub(crate) epoch: Option<u64>,
    /// The daemon that has the key, if another has it.
    pub(crate) holder: Option<String>,
    /// The newest error, or the reason of a refusal with its remedy.
    pub(crate) detail: Option<String>,
    /// The begin of the state.
    pub(crate) since_unix_s: u64,
    /// The first of the calls to etcd that failed since the last answer.
    pub(crate) etcd_fails_since_unix_s: Option<u64>,
    /// On the boot time clock.
    lease_ends_at_ns: Option<u64>,
    /// On the boot time clock.
    written_at_ns: u64,
    /// The newest events, from old to new.
    pub(crate) events: Vec<Event>,
}

impl Candidacy {
    /// The file of the candidate whose daemon has this control socket.
    pub(crate) fn path(socket: &Path) -> PathBuf {
        let mut path = socket.as_os_str().to_owned();
        path.push(".own");
        path.into()
    }

    /// Reads the file; `None` if there is none, or none that is sound.
    pub(crate) fn read(socket: &Path) -> Option<Self> {
        let file = std::fs::File::open(Self::path(socket)).ok()?;
        let mut text = String::new();
        file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// The rest of the lease, while there is one.
    pub(crate) fn lease_left(&self) -> Option<Duration> {
        let left = Nanos(self.lease_ends_at_ns?).since(boot_time());
        (left > Nanos::ZERO).then(|| left.into())
    }

    /// The time since the process wrote its state, if it does so no more.
    fn silence(&self) -> Option<Duration> {
        let age = boot_time().since(Nanos(self.written_at_ns));
        (age > FRESH).then(|| age.into())
    }

    /// The lines below `sidecore list`.
    pub(crate) fn lines(&self) -> String {
        let Self { store, name, process, state, .. } = self;
        let mut text = format!("store {store}, candidate {name}: {state}");
        if let Some(epoch) = self.epoch {
            let _ = write!(text, " in epoch {epoch}");
        }
        if let Some(holder) = &self.holder {
            let _ = write!(text, ", the owner is {holder}");
        }
        let _ = write!(text, ", since {}", time(self.since_unix_s));
        match self.lease_left() {
            Some(left) => {
                let _ = write!(text, "; its lease has {:.1} s left", left.as_secs_f64());
            }
            None => text.push_str("; it has no lease"),
        }
        text.push('\n');
        if let Some(age) = self.silence() {
            let _ = writeln!(
                text,
                "  `sidecore own` (process {process}) was stopped or killed {} s ago: this was its \
                 state then",
                age.as_secs()
            );
        }
        if let Some(since) = self.etcd_fails_since_unix_s {
            let _ = writeln!(text, "  etcd does not answer since {}", time(since));
        }
        if let Some(detail) = &self.detail {
            let _ = writeln!(text, "  {detail}");
        }
        text
    }

    /// The page for a collector of text files.
    fn metrics(&self) -> String {
        let Self { store, name, .. } = self;
        let labels = format!("store=\"{store}\",candidate=\"{name}\"");
        let mut page = String::new();
        let mut family = |metric: &str, help: &str, samples: &[(String, String)]| {
            let _ = writeln!(page, "# HELP sidecore_own_{metric} {help}");
            let _ = writeln!(page, "# TYPE sidecore_own_{metric} gauge");
            for (labels, value) in samples {
                let _ = writeln!(page, "sidecore_own_{metric}{{{labels}}} {value}");
            }
        };
        let states: Vec<(String, String)> = State::ALL
            .iter()
            .map(|state| {
                let value = u8::from(self.state == state.word());
                (format!("{labels},state=\"{}\"", state.word()), value.to_string())
            })
            .collect();
        family("state", "1 for the state that the candidate is in, 0 for the others.", &states);
        let mut gauge =
            |metric, help, value: String| family(metric, help, &[(labels.clone(), value)]);
        gauge(
            "epoch",
            "The epoch of this owner, 0 without ownership.",
            self.epoch.unwrap_or(0).to_string(),
        );
        gauge(
            "state_since_seconds",
            "The begin of the state, in seconds since 1970.",
            self.since_unix_s.to_string(),
        );
        let ends_at =
            self.lease_left().map_or(0.0, |left| unix().as_secs_f64() + left.as_secs_f64());
        gauge(
            "lease_end_seconds",
            "The end of the lease, in seconds since 1970; 0 without a lease.",
            format!("{ends_at:.3}"),
        );
        gauge(
            "etcd_fails_since_seconds",
            "The first failed call to etcd since its last answer, in seconds since 1970; 0 while \
             it answers.",
            self.etcd_fails_since_unix_s.unwrap_or(0).to_string(),
        );
        page
    }
}

fn unix() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Shows the state of a candidate to operators.
pub(super) struct Shown {
    candidacy: Candidacy,
    status: Option<Status>,
    /// When the files' writer took the state.
    written_at: Option<Instant>,
    files: Writer<Candidacy>,
    terminal: Writer<String>,
}

impl Shown {
    /// # Errors
    /// The kernel gives no thread.
    pub(super) fn new(
        socket: &Path,
        (store, name): (&str, &str),
        metrics: Option<&Path>,
    ) -> io::Result<Self> {
        let candidacy = Candidacy {
            store: store.to_owned(),
            name: name.to_owned(),
            process: std::process::id(),
            ..Candidacy::default()
        };
        let mut files = Files {
            path: Candidacy::path(socket),
            metrics: metrics.map(Path::to_owned),
            error: None,
        };
        Ok(Self {
            candidacy,
            status: None,
            written_at: None,
            files: Writer::start(1, move |candidacy| files.write(&candidacy))?,
            terminal: Writer::start(LINES, |line: String| say(&line))?,
        })
    }

    /// Shows the newest report if it differs from the last one, or the last one is old.
    pub(super) fn show(&mut self, report: Report) {
        let Some(store) = report.stores.into_iter().next() else { return };
        let candidacy = &mut self.candidacy;
        candidacy.lease_ends_at_ns = report.lease_ends_at.map(|at| at.0);
        let failed = report.fails.then_some(unix().as_secs());
        let has_failed = candidacy.etcd_fails_since_unix_s;
        candidacy.etcd_fails_since_unix_s = failed.map(|now| has_failed.unwrap_or(now));
        let is_new = self.status.as_ref() != Some(&store.status);
        if is_new {
            self.change(store.status);
        }
        if is_new || self.written_at.is_none_or(|at| at.elapsed() >= HEARTBEAT) {
            self.write();
        }
    }

    /// Notes something that is no change of the state.
    pub(super) fn note(&mut self, text: &str) {
        self.terminal.give(text.to_owned());
        let events = &mut self.candidacy.events;
        if events.len() >= EVENTS {
            events.remove(0);
        }
        events.push(Event { at_unix_s: unix().as_secs(), text: text.to_owned() });
    }

    fn change(&mut self, status: Status) {
        let Status { state, epoch, holder, detail } = &status;
        let mut text = format!("{}: {}", self.candidacy.store, state.word());
        if let Some(epoch) = epoch {
            let _ = write!(text, " in epoch {epoch}");
        }
        if let Some(holder) = holder {
            let _ = write!(text, ", daemon {holder} has it");
        }
        if let Some(detail) = detail {
            let _ = write!(text, ": {detail}");
        }
        self.note(&text);
        let candidacy = &mut self.candidacy;
        if candidacy.state != state.word() {
            candidacy.state = state.word().to_owned();
            candidacy.since_unix_s = unix().as_secs();
        }
        candidacy.epoch = *epoch;
        candidacy.holder = holder.as_ref().map(ToString::to_string);
        candidacy.detail.clone_from(detail);
        self.status = Some(status);
    }

    fn write(&mut self) {
        self.candidacy.written_at_ns = boot_time().0;
        // A writer that is busy gets the state with the next report.
        self.written_at = self.files.give(self.candidacy.clone()).then(Instant::now);
    }
}

/// The files of a state, which go when this is dropped.
struct Files {
    path: PathBuf,
    metrics: Option<PathBuf>,
    /// The last error, which is said once.
    error: Option<String>,
}

impl Files {
    fn write(&mut self, candidacy: &Candidacy) {
        let text = serde_json::to_string_pretty(candidacy).unwrap_or_default();
        let mut error = replace(&self.path, &text).err().map(|error| (&self.path, error));
        if let Some(path) = &self.metrics {
            let page = replace(path, &candidacy.metrics());
            error = error.or(page.err().map(|error| (path, error)));
        }
        let error = error.map(|(path, error)| {
            format!(
                "`sidecore list` and metrics have no state: cannot write {}: {error}",
                path.display()
            )
        });
        if self.error != error {
            error.iter().for_each(|error| say(error));
            self.error = error;
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for path in [Some(&self.path), self.metrics.as_ref()].into_iter().flatten() {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A thread that writes what it is given, and for which nothing waits but the end, and that not for
/// long.
struct Writer<T> {
    to: Option<SyncSender<T>>,
    /// Closed by the thread's end.
    end: Receiver<()>,
}

impl<T: Send + 'static> Writer<T> {
    /// `room` values may wait for it.
    fn start(room: usize, mut write: impl FnMut(T) + Send + 'static) -> io::Result<Self> {
        let (to, from) = sync_channel::<T>(room);
        let (ends, end) = channel::<()>();
        std::thread::Builder::new().name("shown".to_owned()).spawn(move || {
            for value in from {
                write(value);
            }
            drop((write, ends));
        })?;
        Ok(Self { to: Some(to), end })
    }

    /// Gives the thread a value; false if it has no room for it.
    fn give(&self, value: T) -> bool {
        self.to.as_ref().is_some_and(|to| to.try_send(value).is_ok())
    }
}

impl<T> Drop for Writer<T> {
    fn drop(&mut self) {
        self.to = None;
        let _ = self.end.recv_timeout(END_PATIENCE);
    }
}

/// Replaces a file, whose readers find the old text or the new one. It waits for no disk, unlike
/// [`sidecore_linux::replace_file`]: the next text is there half a second later.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    std::fs::write(&new, text)?;
    std::fs::rename(&new, path)
}
