//! The thread that drives the ownership of a daemon.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use rustix::time::{ClockId, clock_gettime};
use sidecore_ownership::{Answer, Daemon, Member, Outcome, Record, Status, Task};
use sidecore_units::Nanos;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::{Claim, Gateway, Others};

/// The work of an owner on its host. All calls but [`serve_until`](Host::serve_until) may take
/// long, and each is on a thread of its own; a store has one at a time.
pub trait Host: Send + Sync + 'static {
    /// Makes sure that none of the suspects writes to the store any more, and that this daemon can.
    ///
    /// # Errors
    /// The reason why one may.
    fn fence(&self, store: &str, claim: &Claim, others: Others<'_>) -> Result<(), String>;

    /// Reads the store's record.
    ///
    /// # Errors
    /// The reason why it cannot be read.
    fn read_record(&self, store: &str) -> Result<Option<Record>, String>;

    /// Replaces the store's record, durably.
    ///
    /// # Errors
    /// The reason why it cannot be written.
    fn write_record(&self, store: &str, record: &Record) -> Result<(), String>;

    /// Opens the store, which may be served until a time on the [boot time clock](boot_time).
    ///
    /// # Errors
    /// The reason why it is not open.
    fn open(&self, store: &str, served: Served, until: Nanos) -> Result<(), String>;

    /// Closes the store, and returns when no request to it is in flight, or the lease is over.
    ///
    /// # Errors
    /// The reason why the store may be open. It is tried again.
    fn close(&self, store: &str) -> Result<Closed, String>;

    /// A store may be open until this time on the [boot time clock](boot_time), or not at all.
    /// Called with each change, on the runner's thread: it must not wait.
    fn serve_until(&self, store: &str, until: Option<Nanos>);
}

/// The ownership in which a store is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// This daemon, as it owns the store.
    pub by: Member,
    /// The epoch.
    pub epoch: u64,
    /// The store's number in its record: another one if epochs have begun anew.
    pub number: u64,
}

/// The end of a [`Host::close`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// No request is in flight.
    Idle,
    /// Requests may be in flight. The lease was over, so that the locks may be a successor's.
    Left,
}

/// The state of a runner's stores.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The stores, by their names.
    pub stores: Vec<StoreReport>,
    /// The end of the lease on the boot time clock.
    pub lease_ends_at: Option<Nanos>,
    /// Whether the last call to etcd failed.
    pub fails: bool,
}

/// A store of a runner.
#[derive(Clone, Debug)]
pub struct StoreReport {
    /// The store's name.
    pub name: String,
    /// Its state.
    pub status: Status,
}

enum Event {
    HandOver(String),
    Retry(String),
    End,
    Ended { store: String, outcome: Outcome },
}

/// A running thread.
#[derive(Debug)]
pub struct Runner {
    events: UnboundedSender<Event>,
    report: Arc<Mutex<Report>>,
    thread: Option<JoinHandle<()>>,
}

impl Runner {
    /// Starts the thread for a daemon and its candidacies.
    ///
    /// # Errors
    /// The kernel gives no thread, or none of what a runtime needs.
    pub fn start(daemon: Daemon, gateway: Gateway, host: Arc<dyn Host>) -> io::Result<Self> {
        Self::with_clock(daemon, gateway, host, boot_time)
    }

    /// As [`start`](Self::start), with another clock than [`boot_time`], which all times of the
    /// [`Host`] are on: one whose rate differs from etcd's shows that leases bear it.
    ///
    /// # Errors
    /// As those of [`start`](Self::start).
    pub fn with_clock(
        daemon: Daemon,
        gateway: Gateway,
        host: Arc<dyn Host>,
        clock: fn() -> Nanos,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (events, inbox) = unbounded_channel();
        let report = Arc::default();
        let work = Work {
            daemon,
            host,
            clock,
            events: events.clone(),
            report: Arc::clone(&report),
            shown: Vec::new(),
            logged: Vec::new(),
            claims: Vec::new(),
        };
        let run = move || {
            runtime.block_on(work.run(gateway, inbox));
            // Without a wait for a thread that a file of etcd's access keeps.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("ownership".to_owned()).spawn(run)?;
        Ok(Self { events, report, thread: Some(thread) })
    }

    /// Gives a store to another candidate, if this daemon serves it.
    pub fn hand_over(&self, store: &str) {
        let _ = self.events.send(Event::HandOver(store.to_owned()));
    }

    /// Tries a refused store again.
    pub fn retry(&self, store: &str) {
        let _ = self.events.send(Event::Retry(store.to_owned()));
    }

    /// The newest report.
    #[must_use]
    pub fn report(&self) -> Report {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Releases all stores and the lease, and ends the thread. Without an answer of etcd, this
    /// takes until the end of the lease.
    pub fn end(mut self) {
        let _ = self.events.send(Event::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Work {
    daemon: Daemon,
    host: Arc<dyn Host>,
    clock: fn() -> Nanos,
    events: UnboundedSender<Event>,
    report: Arc<Mutex<Report>>,
    /// The lease time that the host knows, of each store.
    shown: Vec<(String, Option<Nanos>)>,
    /// The states in the log.
    logged: Vec<StoreReport>,
    /// The ownerships for which others are fenced.
    claims: Vec<(String, Claim)>,
}

impl Work {
    async fn run(mut self, gateway: Gateway, mut inbox: UnboundedReceiver<Event>) {
        // One call at a time: the gateway is away while it has one.
        let mut idle = Some(gateway);
        let (done, mut answers) = unbounded_channel::<(Gateway, u64, Answer)>();
        loop {
            let now = (self.clock)();
            if let Some(mut gateway) = idle.take() {
                match self.daemon.call(now) {
                    None => idle = Some(gateway),
                    Some(numbered) => {
                        let done = done.clone();
                        tokio::spawn(async move {
                            let answer = gateway.carry_out(&numbered.call).await;
                            let _ = done.send((gateway, numbered.number, answer));
                        });
                    }
                }
            }
            while let Some((store, task)) = self.daemon.task(now) {
                self.start(store, task);
            }
            self.show(now);
            if self.daemon.has_ended(now) {
                return;
            }
            let wake = Duration::from(self.daemon.wake_at().since(now));
            // The end of the lease is a state, too.
            let wake = wake.clamp(Duration::from_millis(1), Duration::from_millis(500));
            tokio::select! {
                Some((gateway, number, answer)) = answers.recv() => {
                    idle = Some(gateway);
                    self.daemon.answered((self.clock)(), number, answer);
                }
                event = inbox.recv() => match event {
                    Some(event) => self.take(event),
                    None => return,
                },
                () = tokio::time::sleep(wake) => {}
            }
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::HandOver(store) => {
                self.daemon.hand_over(&store);
            }
            Event::Retry(store) => self.daemon.retry(&store),
            Event::End => self.daemon.end(),
            Event::Ended { store, outcome } => self.daemon.ended((self.clock)(), &store, outcome),
        }
    }

    /// Starts a task on a thread of its own.
    fn start(&mut self, store: String, task: Task) {
        let until = self.daemon.lease_ends_at().unwrap_or(Nanos::ZERO);
        let claim = Claim::new(self.daemon.claimant(&store).clone());
        if matches!(task, Task::Fence { .. }) {
            self.claims.push((store.clone(), claim.clone()));
        }
        let (host, events, name) = (Arc::clone(&self.host), self.events.clone(), store.clone());
        let run = move || {
            let outcome = carry_out(host.as_ref(), (&store, &claim), &task, until);
            let _ = events.send(Event::Ended { store, outcome });
        };
        let thread = std::thread::Builder::new().name("ownership-task".to_owned());
        if let Err(error) = thread.spawn(run) {
            let outcome = Outcome::Failed(format!("no thread for it: {error}"));
            let _ = self.events.send(Event::Ended { store: name, outcome });
        }
    }

    /// Tells fences whose key is lost, or whose lease is over.
    fn end_claims(&mut self, now: Nanos, stores: &[StoreReport]) {
        let is_over = self.daemon.lease_ends_at().is_none_or(|end| now >= end);
        let has_key = |name: &str| {
            let has = |store: &StoreReport| store.name == name && store.status.epoch.is_some();
            !is_over && stores.iter().any(has)
        };
        let daemon = &self.daemon;
        self.claims.retain(|(store, claim)| {
            let lasts = has_key(store) && claim.me == *daemon.claimant(store);
            if !lasts {
                claim.end();
            }
            lasts && claim.is_used()
        });
    }

    /// Shows the host and operators what has changed.
    fn show(&mut self, now: Nanos) {
        let mut stores = Vec::new();
        for (name, status) in self.daemon.status(now) {
            stores.push(StoreReport { name: name.to_owned(), status });
        }
        self.end_claims(now, &stores);
        for StoreReport { name, .. } in &stores {
            let until = self.daemon.holds_until(name);
            let known = self.shown.iter_mut().find(|(known, _)| known == name);
            match known {
                Some((_, shown)) if *shown == until => continue,
                Some((_, shown)) => *shown = until,
                None => self.shown.push((name.clone(), until)),
            }
            self.host.serve_until(name, until);
        }
        let changed = |store: &&StoreReport| {
            let last = self.logged.iter().find(|last| last.name == store.name);
            last.is_none_or(|last| last.status != store.status)
        };
        for StoreReport { name, status } in stores.iter().filter(changed) {
            let Status { state, epoch, holder, detail } = status;
            let holder = holder.as_ref().map(ToString::to_string);
            tracing::info!(
                store = name,
                state = state.word(),
                epoch,
                holder,
                detail,
                "ownership changed"
            );
        }
        self.logged.clone_from(&stores);
        let lease_ends_at = self.daemon.lease_ends_at();
        let fails = self.daemon.fault().is_some();
        let report = Report { stores, lease_ends_at, fails };
        *self.report.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }
}

fn carry_out(
    host: &dyn Host,
    (store, claim): (&str, &Claim),
    task: &Task,
    until: Nanos,
) -> Outcome {
    let done = match task {
        Task::ReadRecord => {
            return host.read_record(store).map_or_else(Outcome::Failed, Outcome::Recorded);
        }
        Task::Fence { suspects, former, owner } => {
            let (former, owner) = (former.as_ref(), owner.as_ref());
            let fenced = host.fence(store, claim, Others { suspects, former, owner });
            return fenced.map_or_else(|why| unfenced(claim, why), |()| Outcome::Done);
        }
        Task::WriteRecord { record } => host.write_record(store, record),
        Task::Open { epoch, number } => {
            let served = Served { by: claim.me.clone(), epoch: *epoch, number: *number };
            host.open(store, served, until)
        }
        Task::Close => {
            return match host.close(store) {
                Ok(Closed::Idle) => Outcome::Done,
                Ok(Closed::Left) => Outcome::Left,
                Err(why) => Outcome::Failed(why),
            };
        }
    };
    match done {
        Ok(()) => Outcome::Done,
        Err(why) => Outcome::Failed(why),
    }
}

fn unfenced(claim: &Claim, why: String) -> Outcome {
    Outcome::Unfenced { why, hangs: claim.is_given_up(), admits: claim.admits() }
}

/// The time on `CLOCK_BOOTTIME`, which counts while the host is suspended.
#[must_use]
pub fn boot_time() -> Nanos {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
    let nanos = u64::try_from(time.tv_nsec).unwrap_or_default();
    Nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// The identity of this host: its name, the number of its boot, and that of the machine, which
/// tells hosts of one name apart. A host whose `/etc/machine-id` is missing or ends with the boot
/// has none.
///
/// # Errors
/// `/proc` is not mounted.
pub fn this_host() -> io::Result<String> {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/sys/kernel/{name}"));
    let stable = Path::new("/etc/machine-id");
    let machine = machine_id(stable, "/run/machine-id".as_ref(), is_mounted(stable));
    Ok(identity([&read("hostname")?, &read("random/boot_id")?, &machine]))
}

/// The machine's number, if it has the same one in its next boot: systemd makes one in /run for an
/// image that has none or cannot be written, and mounts it over the file (machine-id(5)).
fn machine_id(file: &Path, transient: &Path, is_mounted: bool) -> String {
    let [stable, transient] = [file, transient].map(|path| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.trim().to_owned()
    });
    if is_mounted || stable == transient { String::new() } else { stable }
}

/// Whether something is mounted at a path.
fn is_mounted(path: &Path) -> bool {
    let found = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS);
    found.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

fn identity(parts: [&str; 3]) -> String {
    let [name, boot, machine] = parts.map(|part| part.trim().replace('/', "-"));
    // Before a first boot has ended, the file has a word.
    let is_number = machine.len() == 32 && machine.chars().all(|digit| digit.is_ascii_hexdigit());
    if is_number { format!("{name}/{boot}/{machine}") } else { format!("{name}/{boot}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_one_name_are_told_apart() {
        let machine = "0123456789abcdef0123456789abcdef";
        let host = identity(["localhost\n", "b00t\n", &format!("{machine}\n")]);
        assert_eq!(host, format!("localhost/b00t/{machine}"));
        assert_eq!(identity(["a/b\n", "b00t\n", "uninitialized\n"]), "a-b/b00t");
        assert_eq!(identity(["io1\n", "b00t\n", ""]), "io1/b00t");
    }

    #[test]
    fn a_machine_id_that_ends_with_the_boot_is_not_taken() {
        let directory = tempfile::tempdir().unwrap();
        let [stable, transient] = ["etc", "run"].map(|name| directory.path().join(name));
        let found = || machine_id(&stable, &transient, false);
        assert_eq!(found(), "");
        std::fs::write(&stable, "01\n").unwrap();
        assert_eq!(found(), "01");
        // An image without one: systemd makes one at each boot.
        std::fs::write(&transient, "01\n").unwrap();
        assert_eq!(found(), "");
        std::fs::write(&transient, "02\n").unwrap();
        assert_eq!(found(), "01");
        // It is mounted over the file of an image that is read-only.
        assert!(is_mounted("/proc".as_ref()) && !is_mounted(&stable));
        assert_eq!(machine_id(&stable, &transient, true), "");
    }
}
