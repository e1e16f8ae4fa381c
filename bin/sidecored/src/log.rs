//! The log, on the standard error, with a limit for lines on the same topic.
//!
//! A client that connects again and again causes a few lines each time. So there is a limit for
//! each device, each line of the program and each kind of error in it: at most [`BURST`] lines at
//! once, and one a minute in the long run. The number of lines that were left out is logged later.

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
use tracing_subscriber::filter::{LevelFilter, ParseError, Targets};
use tracing_subscriber::fmt::format::{Format, FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The most lines on one topic that are written one after the other.
const BURST: u32 = 20;
/// The time after which another line is allowed.
const REFILL: Duration = Duration::from_secs(60);
/// The time from the first line that is left out to the report of their number.
const REPORT_AFTER: Duration = Duration::from_secs(60);
/// The most topics with limits of their own. More topics than a daemon has are a flood by
/// themselves, and share one limit.
const TOPICS_MAX: usize = 1 << 16;

/// The fields that make the topic of a line: names that the operator has given, and the kind of an
/// error ([`sidecore_socket::cause`]). Words of a client are never among them, or the client could
/// make as many limits as it likes.
const ABOUT: [&str; 7] = ["device", "function", "store", "controller", "volume", "path", "cause"];

/// The limits of all topics, with the numbers of lines that were left out.
#[derive(Clone)]
pub struct Log {
    limits: Arc<Mutex<HashMap<u64, Limit>>>,
    /// Wakes the reporting thread for the first line that is left out.
    alarm: SyncSender<()>,
}

/// The limit of one topic.
#[derive(Debug)]
struct Limit {
    /// The number of lines that may be written now.
    room: u32,
    /// The time of the last refill.
    since: Instant,
    left_out: u64,
    /// The content of the lines, for the report.
    what: String,
}

impl Limit {
    fn new(now: Instant, what: String) -> Self {
        Self { room: BURST, since: now, left_out: 0, what }
    }

    /// Whether another line may be written.
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
    /// Starts the log, with the levels in `RUST_LOG`. Lines below `info` appear only on the
    /// operator's request, and are not limited.
    pub fn start() -> Self {
        let (levels, refused) = levels(&std::env::var("RUST_LOG").unwrap_or_default());
        let (alarm, alarmed) = sync_channel(1);
        let log = Self { limits: Arc::default(), alarm };
        let builder = tracing_subscriber::fmt().with_writer(io::stderr);
        let builder = builder.with_max_level(LevelFilter::TRACE);
        // A line that cannot be written (a full disk, a closed pipe) would cause a complaint on the
        // same standard error, by a macro that panics if it cannot write: in a sidecore, for
        // instance.
        let builder = builder.with_ansi(io::stderr().is_terminal()).log_internal_errors(false);
        let limited = Limited { log: log.clone(), inner: Format::default() };
        builder.event_format(limited).finish().with(levels).init();
        if let Some(refused) = refused {
            tracing::warn!("RUST_LOG is left out, the level is info: {refused}");
        }
        let reporter = log.clone();
        // The new thread inherits the held signals: signals to end are for threads that handle
        // them.
        let held = HeldSignals::hold();
        let thread = std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || reporter.report_later(&alarmed));
        if let Err(error) = thread {
            tracing::warn!(
                "the number of lines that are left out is logged only at the end: {error}"
            );
        }
        drop(held);
        log
    }

    /// Logs the numbers of lines that were left out since the last report.
    pub fn report(&self) {
        // Without the lock, because each report is a line of the log.
        for (count, what) in self.take_left_out() {
            tracing::warn!("{count} lines were left out: {what}");
        }
    }

    fn report_later(&self, alarmed: &Receiver<()>) {
        while alarmed.recv().is_ok() {
            std::thread::sleep(REPORT_AFTER);
            self.report();
        }
    }

    fn take_left_out(&self) -> Vec<(u64, String)> {
        let mut limits = self.limits();
        let left_out = limits.values_mut().filter(|limit| limit.left_out > 0);
        left_out.map(|limit| (std::mem::take(&mut limit.left_out), limit.what.clone())).collect()
    }

    fn admits(&self, topic: u64, now: Instant, what: impl FnOnce() -> String) -> bool {
        let mut limits = self.limits();
        let topic =
            if limits.len() < TOPICS_MAX || limits.contains_key(&topic) { topic } else { 0 };
        let limit = limits.entry(topic).or_insert_with(|| Limit::new(now, what()));
        let admitted = limit.admits(now);
        if !admitted && limit.left_out == 1 {
            // If the channel is full, a report is due already, which will contain this line.
            let _ = self.alarm.try_send(());
        }
        admitted
    }

    fn limits(&self) -> MutexGuard<'_, HashMap<u64, Limit>> {
        // A limit is consistent at each panic.
        self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The levels that this value of `RUST_LOG` asks for; `info`, with the reason, if the value cannot
/// be read.
fn levels(wanted: &str) -> (Targets, Option<ParseError>) {
    let usual = Targets::new().with_default(LevelFilter::INFO);
    if wanted.trim().is_empty() {
        return (usual, None);
    }
    match wanted.trim().parse() {
        Ok(levels) => (levels, None),
        Err(error) => (usual, Some(error)),
    }
}

/// Formats lines as usual, and leaves out lines over the limit.
struct Limited {
    log: Log,
    inner: Format,
}

impl<S, N> FormatEvent<S, N> for Limited
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let is_limited =
            *metadata.level() <= Level::INFO && !metadata.target().ends_with("sidecored::log");
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

/// The topic of a line, by the names in the line.
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
    fn a_flood_is_cut_off_and_counted_and_other_topics_are_logged() {
        let log = Log { limits: Arc::default(), alarm: sync_channel(1).0 };
        let start = Instant::now();
        let admitted =
            |topic, at: Duration| log.admits(topic, start + at, || format!("topic {topic}"));
        let flood = (0..1000).filter(|_| admitted(1, Duration::ZERO)).count();
        assert_eq!(flood, 20);
        assert!(admitted(2, Duration::ZERO), "another topic has its own limit");
        assert_eq!(log.take_left_out(), [(980, "topic 1".to_owned())]);
        assert_eq!(log.take_left_out(), []);
        assert!(!admitted(1, REFILL - Duration::from_millis(1)));
        assert!(admitted(1, REFILL) && !admitted(1, REFILL));
        // A quiet time does not allow a longer flood later.
        let later = REFILL * 1000;
        assert_eq!((0..1000).filter(|_| admitted(1, later)).count(), 20);
    }

    #[test]
    fn the_number_of_topics_is_limited() {
        let log = Log { limits: Arc::default(), alarm: sync_channel(1).0 };
        let now = Instant::now();
        for topic in 1..=2 * TOPICS_MAX as u64 {
            log.admits(topic, now, String::new);
        }
        assert!(log.limits().len() <= TOPICS_MAX + 1);
    }
    #[test]
    fn levels_are_by_part_and_usual_ones_stand_in_for_nonsense() {
        let enables = |wanted, target: &str, level| levels(wanted).0.would_enable(target, &level);
        for wanted in ["", " ", "part=warn=info", "warn,part=loud"] {
            assert!(enables(wanted, "part", Level::INFO), "{wanted:?}");
            assert!(!enables(wanted, "part", Level::DEBUG), "{wanted:?}");
            assert_eq!(levels(wanted).1.is_some(), !wanted.trim().is_empty(), "{wanted:?}");
        }
        let wanted = "warn,sidecore_vhost_user=debug";
        assert!(enables(wanted, "sidecore_vhost_user::server", Level::DEBUG));
        assert!(enables(wanted, "sidecored", Level::WARN));
        assert!(!enables(wanted, "sidecored", Level::INFO));
    }
}
