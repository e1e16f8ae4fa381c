//! The log: to the standard error, and only so much of it about one thing.
//!
//! A client that connects again and again has a few lines written each time. So there is a limit for each device, each
//! line of the program and each kind of error in it: at most [`BURST`] at once, and one a minute in the long run. How many
//! lines were left out is said later.

use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, IsTerminal as _};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sidecore_linux::HeldSignals;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// Lines about one thing that are written one after the other.
const BURST: u32 = 20;
/// How long it takes until there is room for one more.
const REFILL: Duration = Duration::from_secs(60);
/// How long after the first line that was left out their number is said.
const TELL_AFTER: Duration = Duration::from_secs(60);
/// Things that are told apart. More of them than a daemon has are a flood by themselves, and share one limit.
const THINGS_MAX: usize = 1 << 16;

/// The fields that say what a line is about: names that the operator has given, and the kind of an error
/// ([`sidecore_socket::cause`]). What a client says is never among them, or it could make as many limits as it likes.
const ABOUT: [&str; 7] = ["device", "function", "store", "controller", "volume", "path", "cause"];

/// What is limited, and what was left out.
#[derive(Clone)]
pub struct Log {
    limits: Arc<Mutex<HashMap<u64, Limit>>>,
    /// Told of the first line that is left out.
    alarm: SyncSender<()>,
}

/// The lines about one thing.
#[derive(Debug)]
struct Limit {
    /// Lines that may be written now.
    room: u32,
    /// When the room was last made.
    since: Instant,
    left_out: u64,
    /// What the lines say, for the line about them.
    what: String,
}

impl Limit {
    fn new(now: Instant, what: String) -> Self {
        Self { room: BURST, since: now, left_out: 0, what }
    }

    /// Whether one more line may be written.
    fn admits(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.since);
        let refills = u32::try_from(passed.as_secs() / REFILL.as_secs()).unwrap_or(u32::MAX);
        if refills > 0 {
            self.room = self.room.saturating_add(refills).min(BURST);
            self.since = now;
        }
        let admitted = self.room > 0;
        if admitted {
            self.room -= 1;
        } else {
            self.left_out += 1;
        }
        admitted
    }
}

impl Log {
    /// Starts it. Lines that are less important than `info` are there because somebody asked for them, and not limited.
    pub fn start() -> Self {
        let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
        let (alarm, alarmed) = sync_channel(1);
        let log = Self { limits: Arc::default(), alarm };
        let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
        // A line that cannot be written (a full disk, a closed pipe) would be complained of on the same standard error, by
        // a macro that panics when it cannot: in a sidecore, for instance.
        let builder = builder.with_ansi(io::stderr().is_terminal()).log_internal_errors(false);
        builder.event_format(Limited { log: log.clone(), inner: Format::default() }).init();
        let teller = log.clone();
        // The thread inherits that signals to end wait: they are for threads that know what to do then.
        let held = HeldSignals::hold();
        let thread = std::thread::Builder::new().name("log".to_owned()).spawn(move || teller.tell_later(&alarmed));
        if let Err(error) = thread {
            tracing::warn!("how many lines of the log are left out will be said at the end only: {error}");
        }
        drop(held);
        log
    }

    /// Says how many lines were left out since it was last said.
    pub fn tell(&self) {
        // Without the lock, because each of these is a line of the log.
        for (count, what) in self.take_left_out() {
            tracing::warn!("{count} lines were left out: {what}");
        }
    }

    fn tell_later(&self, alarmed: &Receiver<()>) {
        while alarmed.recv().is_ok() {
            std::thread::sleep(TELL_AFTER);
            self.tell();
        }
    }

    fn take_left_out(&self) -> Vec<(u64, String)> {
        let mut limits = self.limits();
        let left_out = limits.values_mut().filter(|limit| limit.left_out > 0);
        left_out.map(|limit| (std::mem::take(&mut limit.left_out), limit.what.clone())).collect()
    }

    fn admits(&self, thing: u64, now: Instant, what: impl FnOnce() -> String) -> bool {
        let mut limits = self.limits();
        let thing = if limits.len() < THINGS_MAX || limits.contains_key(&thing) { thing } else { 0 };
        let limit = limits.entry(thing).or_insert_with(|| Limit::new(now, what()));
        let admitted = limit.admits(now);
        if !admitted && limit.left_out == 1 {
            // Full: it will be said with the others.
            let _ = self.alarm.try_send(());
        }
        admitted
    }

    fn limits(&self) -> MutexGuard<'_, HashMap<u64, Limit>> {
        // A limit is whole whoever panicked.
        self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lines as usual, but for those over the limit.
struct Limited {
    log: Log,
    inner: Format,
}

impl<S, N> FormatEvent<S, N> for Limited
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let metadata = event.metadata();
        let is_limited = *metadata.level() <= Level::INFO && !metadata.target().ends_with("sidecored::log");
        if is_limited {
            let mut hasher = DefaultHasher::new();
            metadata.callsite().hash(&mut hasher);
            let mut about = About::default();
            for span in context.event_scope().into_iter().flatten() {
                if let Some(fields) = span.extensions().get::<FormattedFields<N>>() {
                    about.add(fields.fields.as_str());
                }
            }
            event.record(&mut about);
            about.names.hash(&mut hasher);
            let what = || format!("{}: {} {}", metadata.target(), about.message, about.names);
            if !self.log.admits(hasher.finish(), Instant::now(), what) {
                return Ok(());
            }
        }
        self.inner.format_event(context, writer, event)
    }
}

/// What a line is about, by the names in it.
#[derive(Default)]
struct About {
    names: String,
    message: String,
}

impl About {
    fn add(&mut self, text: &str) {
        if !self.names.is_empty() {
            self.names.push(' ');
        }
        self.names.push_str(text);
    }
}

impl Visit for About {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else if ABOUT.contains(&field.name()) {
            self.add(&format!("{}={value:?}", field.name()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_off_and_counted_and_others_are_heard() {
        let log = Log { limits: Arc::default(), alarm: sync_channel(1).0 };
        let start = Instant::now();
        let admitted = |thing, at: Duration| log.admits(thing, start + at, || format!("thing {thing}"));
        let flood = (0..1000).filter(|_| admitted(1, Duration::ZERO)).count();
        assert_eq!(flood, 20);
        assert!(admitted(2, Duration::ZERO), "another thing has its own limit");
        assert_eq!(log.take_left_out(), [(980, "thing 1".to_owned())]);
        assert_eq!(log.take_left_out(), []);
        assert!(!admitted(1, REFILL - Duration::from_millis(1)));
        assert!(admitted(1, REFILL) && !admitted(1, REFILL));
        // Rest is not saved up for a longer flood.
        let later = REFILL * 1000;
        assert_eq!((0..1000).filter(|_| admitted(1, later)).count(), 20);
    }

    #[test]
    fn there_is_an_end_to_the_things_that_are_told_apart() {
        let log = Log { limits: Arc::default(), alarm: sync_channel(1).0 };
        let now = Instant::now();
        for thing in 1..=2 * THINGS_MAX as u64 {
            log.admits(thing, now, String::new);
        }
        assert!(log.limits().len() <= THINGS_MAX + 1);
    }
}
