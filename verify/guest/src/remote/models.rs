//! The events per request of the models of virtual I/O in Table 3 of vRIO: kicks and interrupts of
//! the guest, and wake-ups of the host's threads that carry its requests.

use super::config;
use super::host::Host;
use super::net::{Net, STATIONS};
use crate::checks::Checks;
use crate::config::socket;
use crate::guest::{Answer, FIRST_SLOT, Guest, VIRTIO};
use crate::measure;
use crate::qemu::{Backend, Disk, Equipment, KICK, TRACE};
use crate::session::{Session, Stage};
use crate::sidecore::{Counters, Sleeps};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

const DISK: &str = "disk";
const DISK_MIB: u64 = 64;
/// More events than this per request, which the model must not have, fail the demo: pings of an
/// idle session are events too.
const STRAY: f64 = 0.02;

/// A row of the table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Qemu,
    LocalInterrupts,
    LocalPolled,
    RemoteInterrupts,
    RemotePolled,
}

const KINDS: [Kind; 5] = [
    Kind::Qemu,
    Kind::LocalInterrupts,
    Kind::LocalPolled,
    Kind::RemoteInterrupts,
    Kind::RemotePolled,
];

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Kind::Qemu => "QEMU's virtio-blk",
            Kind::LocalInterrupts => "local, interrupts",
            Kind::LocalPolled => "local sidecore",
            Kind::RemoteInterrupts => "vRIO without polling",
            Kind::RemotePolled => "vRIO",
        }
    }

    /// The model's name in the paper, and its sum of events there, for a request and a response.
    const fn paper(self) -> &'static str {
        match self {
            Kind::Qemu | Kind::LocalInterrupts => "baseline: 9",
            Kind::LocalPolled => "elvis: 4",
            Kind::RemoteInterrupts => "vrio w/o poll: 6",
            Kind::RemotePolled => "vrio: 2",
        }
    }

    const fn is_polled(self) -> bool {
        matches!(self, Kind::LocalPolled | Kind::RemotePolled)
    }

    const fn is_remote(self) -> bool {
        matches!(self, Kind::RemoteInterrupts | Kind::RemotePolled)
    }

    /// The word for `idle`.
    const fn idle(self) -> &'static str {
        if self.is_polled() { "poll" } else { "interrupt" }
    }
}

/// The events of a model, per request.
#[derive(Debug, Clone, Serialize)]
pub struct Model {
    /// The name of the model.
    pub model: String,
    /// The model in the paper's table, with its sum of events there.
    pub paper: String,
    /// Requests of the guest in the window.
    pub requests: u64,
    /// Kicks of the guest, each of which is an exit.
    pub kicks: f64,
    /// Interrupts in the guest.
    pub interrupts: f64,
    /// Wake-ups at the VMhost: of sidecores by a notification, or of QEMU's main loop.
    pub vmhost_wakeups: f64,
    /// Wake-ups of sidecores at the IOhost; `None` without one.
    pub iohost_wakeups: Option<f64>,
    /// Sleeps of sidecores for any reason: a polling sidecore pauses if others take its core.
    pub sleeps: f64,
}

/// Counts all models, and checks them.
pub(super) fn count(
    stage: &Stage<'_>,
    window: Duration,
    checks: &mut Checks,
) -> Result<Vec<Model>> {
    Session::hold(stage, "models", |session| {
        session.share_cores();
        let net = Net::plain()?;
        let mut models = Vec::new();
        for kind in KINDS {
            let model = one(session, &net, kind, window)?;
            let (ok, found) = verdict(kind, &model);
            checks.note(session, &format!("events per request, {}", kind.name()), ok, found);
            models.push(model);
        }
        Ok(models)
    })
}

/// The counters at an edge of the window.
#[derive(Default)]
struct Edge {
    served: Counters,
    vmhost: Sleeps,
    iohost: Sleeps,
}

/// The daemons of a model.
struct Daemons {
    vmhost: Option<Host>,
    iohost: Option<Host>,
}

impl Daemons {
    fn start(session: &mut Session<'_>, net: &Net, kind: Kind) -> Result<Daemons> {
        if kind == Kind::Qemu {
            return Ok(Daemons { vmhost: None, iohost: None });
        }
        let (directory, station) = (session.directory, &STATIONS[0]);
        let idle = format!("idle = \"{}\"\n", kind.idle());
        let mut iohost = None;
        let mut text = config::head(directory, station.client)? + &config::sidecore("vm0");
        if kind.is_remote() {
            let invitation = directory.join(format!("{}.invitation", kind.idle()));
            let host = Host::start(session, &net.iohost, "iohost", &exporting(directory, kind)?)?;
            let words = ["remote", "invite", station.client, crate::text(&invitation)?];
            host.sidecore.run(&words)?;
            iohost = Some(host);
            text += &config::link(station, &idle, &invitation)?;
            text +=
                &format!("\n[[store]]\nname = \"{DISK}\"\ntype = \"remote\"\niohost = \"io\"\n");
        } else {
            text += &ram();
        }
        text += &config::device(directory, DISK, &format!("queues = 2\n{idle}"))?;
        let vmhost = Host::start(session, &net.vmhosts[0], station.client, &text)?;
        if iohost.is_some() {
            super::run::wait_for("the remote disk", || super::run::is_attached(&vmhost))?;
        }
        Ok(Daemons { vmhost: Some(vmhost), iohost })
    }

    fn edge(&self) -> Result<Edge> {
        let sleeps = |host: &Option<Host>| {
            host.as_ref().map_or_else(|| Ok(Sleeps::default()), |host| host.sidecore.sleeps())
        };
        let served = self.vmhost.as_ref().map(|host| host.sidecore.served(DISK)).transpose()?;
        Ok(Edge {
            served: served.unwrap_or_default(),
            vmhost: sleeps(&self.vmhost)?,
            iohost: sleeps(&self.iohost)?,
        })
    }

    fn stop(self, session: &mut Session<'_>) -> Result<()> {
        let hosts = self.vmhost.into_iter().chain(self.iohost);
        hosts.into_iter().try_for_each(|mut host| host.stop(session))
    }
}

/// The IOhost's configuration: a disk in memory for the first VMhost.
fn exporting(directory: &Path, kind: Kind) -> Result<String> {
    let (station, keys) = (&STATIONS[0], directory.join(format!("{}-keys", kind.idle())));
    Ok(format!(
        "{}key_directory = {}\n{}{}\n[[link]]\nname = \"wire\"\ntype = \"packet\"\n\
         interface = \"{}\"\nidle = \"{}\"\n\n[[client]]\nname = \"{client}\"\n\
         links = [\"wire\"]\n\n[[device]]\nname = \"{DISK}\"\nfront_end = \"vrio\"\n\
         client = \"{client}\"\nstore = \"{DISK}\"\n",
        config::head(directory, "iohost")?,
        crate::config::quoted(&keys)?,
        config::sidecore("io0"),
        ram(),
        station.iohost.interface,
        kind.idle(),
        client = station.client,
    ))
}

fn ram() -> String {
    format!("\n[[store]]\nname = \"{DISK}\"\ntype = \"ram\"\nsize = \"{DISK_MIB}MiB\"\n")
}

fn one(session: &mut Session<'_>, net: &Net, kind: Kind, window: Duration) -> Result<Model> {
    let daemons = Daemons::start(session, net, kind)?;
    let (socket, file) = (socket(session.directory, DISK), session.directory.join("own.img"));
    let backend = match kind {
        Kind::Qemu => {
            std::fs::File::create(&file)?.set_len(DISK_MIB << 20)?;
            Backend::Qemu(&file)
        }
        _ => Backend::Daemon(&socket),
    };
    let disks = [Disk { name: DISK, backend, slot: FIRST_SLOT, packed: false }];
    let equipment = Equipment { polled: kind.is_polled(), disks: &disks, ports: &[], nics: &[] };
    let mut guest = Guest::boot_with(session, VIRTIO, &equipment)?;
    guest.booted(session)?;
    let order = format!("count {}", window.as_secs());
    let own = |guest: &Guest| if kind == Kind::Qemu { qemu(guest, &file) } else { Ok((0, 0)) };
    let (before, own_before) = (daemons.edge()?, own(&guest)?);
    let answer = guest.order(session, &order)?;
    let (after, own_after) = (daemons.edge()?, own(&guest)?);
    guest.off(session)?;
    daemons.stop(session)?;
    let own = (own_after.0 - own_before.0, own_after.1 - own_before.1);
    model(kind, &answer, (&before, &after), own)
}

/// The kicks that a guest's QEMU has handled itself, and the times that its main loop was woken.
fn qemu(guest: &Guest, file: &Path) -> Result<(u64, u64)> {
    let trace = PathBuf::from(format!("{}{TRACE}", crate::text(file)?));
    let kicks = std::fs::read_to_string(&trace)
        .with_context(|| format!("cannot read {}", trace.display()))?
        .lines()
        .filter(|line| line.contains(KICK))
        .count();
    let (process, field) = (guest.process(), "voluntary_ctxt_switches:");
    // QEMU's first thread is its main loop.
    let status = std::fs::read_to_string(format!("/proc/{process}/task/{process}/status"))?;
    let switches = status.lines().find_map(|line| line.strip_prefix(field));
    let switches = switches.context("the kernel counts no context switches")?.trim().parse()?;
    Ok((kicks as u64, switches))
}

fn model(
    kind: Kind,
    answer: &Answer,
    (before, after): (&Edge, &Edge),
    (own_kicks, own_wakeups): (u64, u64),
) -> Result<Model> {
    let edge = |key| answer.text(key);
    let requests = measure::completed_requests(edge("stat-end")?)?
        - measure::completed_requests(edge("stat-begin")?)?;
    let fio = measure::fio_ios(answer.text("fio")?)?;
    ensure!(
        requests == fio.total,
        "the window was not quiet: fio read {} times, but there were {requests} requests",
        fio.total
    );
    let virtio = answer.text("virtio")?;
    let interrupts = |key| -> Result<u64> {
        edge(key)?.split('|').map(|line| measure::request_interrupts(line, virtio)).sum()
    };
    let interrupts = interrupts("interrupts-end")? - interrupts("interrupts-begin")?;
    let served = after.served.requests - before.served.requests;
    // Outside of the window, the guest only synchronizes its disk.
    ensure!(
        kind == Kind::Qemu || (requests..=requests + 2).contains(&served),
        "the window was not quiet: the guest counted {requests} requests, the daemon {served}"
    );
    let wakeups = |of: fn(&Edge) -> Sleeps| of(after).wakeups - of(before).wakeups;
    let slept = |of: fn(&Edge) -> Sleeps| of(after).sleeps - of(before).sleeps;
    let each = |count: u64| count as f64 / requests as f64;
    let (vmhost, iohost) = (|edge: &Edge| edge.vmhost, |edge: &Edge| edge.iohost);
    Ok(Model {
        model: kind.name().to_owned(),
        paper: kind.paper().to_owned(),
        requests,
        kicks: each(after.served.kicks - before.served.kicks + own_kicks),
        interrupts: each(interrupts),
        vmhost_wakeups: each(wakeups(vmhost) + own_wakeups),
        iohost_wakeups: kind.is_remote().then(|| each(wakeups(iohost))),
        sleeps: each(slept(vmhost) + slept(iohost)),
    })
}

/// Whether a model's events are those that it must have, and the counts.
///
/// With one request at a time and nothing polled, each step of a request ends a sleep: a kick, the
/// guest's interrupt, the kick and the answer at the VMhost, the request at the IOhost. A step that
/// comes before its receiver has gone to sleep again ends none, and needs no kick. On a busy
/// machine the guest's next request can come before the VMhost's sidecore sleeps, so that half of
/// the kicks and of its wake-ups must be there. The IOhost's has the round trip to go to sleep.
fn verdict(kind: Kind, model: &Model) -> (bool, String) {
    let Model { requests, kicks, interrupts, vmhost_wakeups, iohost_wakeups, .. } = model;
    let iohost = iohost_wakeups.unwrap_or_default();
    let is = |count: f64, wanted: f64| (count - wanted).abs() <= STRAY;
    let ok = if kind.is_polled() {
        is(*kicks, 0.0) && is(*interrupts, 0.0) && is(*vmhost_wakeups, 0.0) && is(iohost, 0.0)
    } else {
        let at_vmhost = if kind == Kind::RemoteInterrupts { 2.0 } else { 1.0 };
        (0.5..=1.0 + STRAY).contains(kicks)
            && is(*interrupts, 1.0)
            && (*vmhost_wakeups > 0.5 * at_vmhost)
            && (!kind.is_remote() || iohost > 0.9)
    };
    let found = format!(
        "{requests} requests: {kicks:.3} kicks, {interrupts:.3} interrupts, {vmhost_wakeups:.3} \
         and {iohost:.3} wake-ups"
    );
    (ok, found)
}

/// The table.
pub(super) fn table(models: &[Model]) -> String {
    let mut text = String::from("Events per request:\n\n");
    let mut line = |cells: [&str; 8]| {
        let [model, exits, interrupts, vmhost, iohost, sum, requests, paper] = cells;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{model:<21} {exits:>12} {interrupts:>16} {vmhost:>15} {iohost:>15} {sum:>6} \
             {requests:>9}  {paper}"
        );
    };
    line([
        "model",
        "kicks (exits)",
        "guest interrupts",
        "VMhost wake-ups",
        "IOhost wake-ups",
        "sum",
        "requests",
        "Table 3, sum",
    ]);
    for model in models {
        let iohost = model.iohost_wakeups;
        let sum =
            model.kicks + model.interrupts + model.vmhost_wakeups + iohost.unwrap_or_default();
        line([
            &model.model,
            &format!("{:.3}", model.kicks),
            &format!("{:.3}", model.interrupts),
            &format!("{:.3}", model.vmhost_wakeups),
            &iohost.map_or_else(|| "-".to_owned(), |count| format!("{count:.3}")),
            &format!("{sum:.2}"),
            &model.requests.to_string(),
            &model.paper,
        ]);
    }
    text.push_str(
        "\nRandom reads of 4 KiB, one at a time, from memory; frames are sealed. A wake-up is a \
         sleep of a sidecore that a\n\
         notification of a ring or a link ended; at QEMU, a sleep of its main loop. The paper \
         counts a network request\n\
         and its response, which are two messages, and interrupts of devices; its baseline has \
         exits for the end of interrupts\n\
         and injections too, which need hardware virtualization to be counted.\n",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(kicks: f64, interrupts: f64, vmhost: f64, iohost: f64) -> Model {
        Model {
            model: "m".to_owned(),
            paper: "p".to_owned(),
            requests: 1000,
            kicks,
            interrupts,
            vmhost_wakeups: vmhost,
            iohost_wakeups: Some(iohost),
            sleeps: 0.0,
        }
    }

    #[test]
    fn a_polled_model_has_no_events_and_another_one_has_all() {
        let ok = |kind, model: Model| verdict(kind, &model).0;
        assert!(ok(Kind::RemotePolled, counted(0.0, 0.0, 0.01, 0.0)));
        for model in [
            counted(0.1, 0.0, 0.0, 0.0),
            counted(0.0, 0.1, 0.0, 0.0),
            counted(0.0, 0.0, 0.1, 0.0),
            counted(0.0, 0.0, 0.0, 0.1),
        ] {
            assert!(!ok(Kind::RemotePolled, model));
        }
        assert!(ok(Kind::RemoteInterrupts, counted(1.0, 1.0, 2.0, 1.0)));
        assert!(!ok(Kind::RemoteInterrupts, counted(0.4, 1.0, 2.0, 1.0)));
        assert!(!ok(Kind::RemoteInterrupts, counted(1.1, 1.0, 2.0, 1.0)));
        assert!(!ok(Kind::RemoteInterrupts, counted(1.0, 1.0, 1.0, 1.0)));
        assert!(!ok(Kind::RemoteInterrupts, counted(1.0, 1.0, 2.0, 0.0)));
        assert!(ok(Kind::Qemu, Model { iohost_wakeups: None, ..counted(1.0, 1.0, 1.1, 0.0) }));
    }

    #[test]
    fn the_table_has_a_line_for_each_model_and_their_sums() {
        let text = table(&[counted(1.0, 1.0, 2.0, 1.0)]);
        assert!(text.lines().any(|line| line.starts_with('m') && line.contains("5.00")), "{text}");
    }
}
