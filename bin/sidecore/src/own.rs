//! `sidecore own`: runs a daemon on the one host of several that owns its stores.
//!
//! The command is the store's server: it is started when this host owns the store and has fenced
//! all others, and it is killed before the lease ends if etcd does not renew it.

mod guard;
mod shown;
mod supervisor;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::rand::{GetRandomFlags, getrandom};
use sidecore_cluster::{
    Access, CommandFence, Endpoint, Fence, Gateway, HostLock, Identity, LateAttempt, LockFence,
    NotesFile, ProbedDisk, RecordFile, ReservationFence, Runner, User, this_host,
};
use sidecore_ownership::{Daemon, Member, Options};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

pub(crate) use shown::Candidacy;
use shown::Shown;
use supervisor::{Ended, Supervisor};

/// The time between two looks at the disks' first answers, and at signals.
const TICK: Duration = Duration::from_millis(5);

/// A call to etcd fails after this part of the lease's time.
const CALLS_PER_LEASE: u32 = 6;

/// Runs COMMAND while this host owns STORE, by a lease of etcd.
///
/// All candidates run the same command line with names of their own. One of them gets the lease,
/// fences the last owner, and starts COMMAND; if its lease ends, COMMAND is killed before that, and
/// another candidate continues.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
#[command(group(clap::ArgGroup::new("fence").required(true)))]
pub(crate) struct Arguments {
    /// The store, or the set of stores, that COMMAND serves: the same at all candidates.
    #[arg(value_parser = name)]
    store: String,
    /// This candidate's name, which the fence command is given: different at all candidates.
    /// Without it, the host's name.
    #[arg(long, value_parser = name)]
    name: Option<String>,
    /// The members of etcd.
    #[arg(long, required = true, value_name = "http[s]://HOST:PORT", value_delimiter = ',')]
    etcd: Vec<Endpoint>,
    #[command(flatten)]
    access: AccessArguments,
    /// The beginning of the keys in etcd, after `/sidecore/`.
    #[arg(long, default_value = "default", value_parser = name)]
    cluster: String,
    /// The file with the newest epoch, on storage that all candidates share, beside the store.
    #[arg(long, value_name = "FILE")]
    record: PathBuf,
    /// A file or block device that COMMAND serves. It is not served while another process of this
    /// host has it open, or has requests in flight to it.
    #[arg(long, required = true, value_name = "FILE")]
    path: Vec<PathBuf>,
    /// Fence by the locks on `--path`. All candidates run on this host.
    #[arg(long, group = "fence")]
    fence_lock: bool,
    /// Fence by persistent reservations of the disks at `--path`, each a whole SCSI or NVMe disk:
    /// they refuse the writes of all hosts but the owner's. An orderly end keeps the reservation.
    #[arg(long, group = "fence")]
    fence_reservation: bool,
    /// Fence by this program, which gets the name of a candidate as its argument, and succeeds
    /// when that candidate's host can neither write nor answer any more.
    #[arg(long, value_name = "PROGRAM", group = "fence")]
    fence_command: Option<PathBuf>,
    /// Seconds after which the fence command, or one order to a disk, has failed.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    fence_limit: u64,
    /// The time of the lease in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    #[arg(value_parser = clap::value_parser!(u64).range(2..=600))]
    lease: u64,
    /// Write a page of metrics into this file, for a collector of text files: a candidate that
    /// waits has no daemon to ask.
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// The daemon and its arguments. It serves on until SIGTERM, and ends in order then.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Arguments {
    const fn limit(&self) -> Duration {
        Duration::from_secs(self.fence_limit)
    }

    fn options(&self) -> Options {
        let mut options = Options::of_lease(self.lease);
        options.fence_admits = self.fence_reservation;
        if self.fence_lock {
            // The other candidates see the same locks.
            options.fence_attempts = u32::MAX;
        }
        options
    }
}

/// For an etcd that asks who its clients are.
#[derive(clap::Args)]
struct AccessArguments {
    /// The certificates of the CA that has issued those of etcd's members, in PEM: for https.
    #[arg(long, value_name = "FILE")]
    etcd_ca: Option<PathBuf>,
    /// This host's certificate, in PEM, if etcd asks for one.
    #[arg(long, value_name = "FILE", requires = "etcd_key")]
    etcd_certificate: Option<PathBuf>,
    /// Its key, in PEM, in a file of mode 0600.
    #[arg(long, value_name = "FILE", requires = "etcd_certificate")]
    etcd_key: Option<PathBuf>,
    /// The user of etcd, if it has users.
    #[arg(long, value_name = "NAME", requires = "etcd_password")]
    etcd_user: Option<String>,
    /// The user's password, in a file of mode 0600.
    #[arg(long, value_name = "FILE", requires = "etcd_user")]
    etcd_password: Option<PathBuf>,
}

impl AccessArguments {
    fn access(&self) -> Access {
        let Self { etcd_ca, etcd_certificate, etcd_key, etcd_user, etcd_password } = self;
        let pair = etcd_certificate.clone().zip(etcd_key.clone());
        let user = etcd_user.clone().zip(etcd_password.clone());
        Access {
            ca: etcd_ca.clone(),
            identity: pair.map(|(certificate, key)| Identity { certificate, key }),
            user: user.map(|(name, password)| User { name, password }),
        }
    }
}

const AFTER_HELP: &str = "\
Signals:
  SIGUSR1          hand over: end COMMAND with SIGTERM, and let another candidate start it
  SIGTERM, SIGINT  the end: the same, and end this program

Environment of COMMAND:
  SIDECORE_EPOCH         the number of this ownership, larger than all before of its series
  SIDECORE_EPOCH_SERIES  the number of the store in its record, in hexadecimal
  SIDECORE_FENCE         `reservation` with --fence-reservation: a disk that refuses a request by a
                         reservation has fenced COMMAND; otherwise not set

Exit codes:
  that of COMMAND if it ends by itself; 0 after SIGTERM; 1 on an error

Example:
  sidecore own disks --etcd http://10.0.0.1:2379,http://10.0.0.2:2379 --record /shared/disks.owner
    --path /shared/disk.img --fence-command /etc/sidecore/power-off -- sidecored --config disks.toml
";

/// Names are parts of keys in etcd, and arguments of programs.
fn name(text: &str) -> Result<String, String> {
    let is_valid = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if text.is_empty() || text.len() > 64 || text.starts_with('-') || !text.chars().all(is_valid) {
        return Err("a name has 1 to 64 letters, digits, '-', '_' or '.'".to_owned());
    }
    Ok(text.to_owned())
}

/// Signals that have come and were not handled yet.
struct Signals {
    ends: Arc<AtomicBool>,
    hands_over: Arc<AtomicBool>,
}

impl Signals {
    fn listen() -> Result<Self> {
        let signals = Self { ends: Arc::default(), hands_over: Arc::default() };
        let on = |signal, flag: &Arc<AtomicBool>| {
            signal_hook::flag::register(signal, Arc::clone(flag)).context("cannot handle signals")
        };
        on(SIGTERM, &signals.ends)?;
        on(SIGINT, &signals.ends)?;
        on(SIGUSR1, &signals.hands_over)?;
        Ok(signals)
    }

    fn ends(&self) -> bool {
        self.ends.load(Ordering::Relaxed)
    }

    fn hands_over(&self) -> bool {
        self.hands_over.swap(false, Ordering::Relaxed)
    }
}

/// `socket` is the control socket of the daemon, beside which `sidecore list` finds the state.
pub(crate) fn run(arguments: &Arguments, socket: &Path) -> Result<ExitCode> {
    let access = arguments.access.access();
    access.check(&arguments.etcd).map_err(anyhow::Error::msg)?;
    let signals = Signals::listen()?;
    let Some(disks) = probe(arguments, &signals)? else { return Ok(ExitCode::SUCCESS) };
    let host = this_host().context("cannot read the identity of this host")?;
    let name = match &arguments.name {
        Some(given) => given.clone(),
        None => name(host.split('/').next().unwrap_or_default())
            .map_err(|error| anyhow::anyhow!("the host's name is no --name: {error}"))?,
    };
    let mut shown = Shown::new(socket, (&arguments.store, &name), arguments.metrics.as_deref())
        .context("cannot start a thread")?;
    loop {
        let me = Member { name: name.clone(), host: host.clone(), incarnation: random()? };
        match candidacy((arguments, &disks), me, (&signals, &mut shown))? {
            // The next start has another incarnation, as a process that was killed.
            Ended::Lease => shown.note("the lease has ended: the command was killed"),
            Ended::Fenced(why) => shown.note(&format!("{why}: the command was killed")),
            Ended::Command(code) => return Ok(ExitCode::from(code)),
            Ended::Signal => return Ok(ExitCode::SUCCESS),
        }
    }
}

/// Asks the disks for reservations, if they are the fence. `None` if a signal asks for the end.
fn probe(arguments: &Arguments, signals: &Signals) -> Result<Option<Vec<ProbedDisk>>> {
    if !arguments.fence_reservation {
        return Ok(Some(Vec::new()));
    }
    let (disks, unused, limit) = (arguments.path.clone(), random()?, arguments.limit());
    let (result, probed) = channel();
    std::thread::spawn(move || result.send(ReservationFence::probe(&disks, unused, limit)));
    let disks = loop {
        match probed.recv_timeout(TICK) {
            _ if signals.ends() => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("the look at the disks failed"),
            Ok(probed) => break probed.map_err(anyhow::Error::msg)?,
        }
    };
    for ProbedDisk { path, .. } in disks.iter().filter(|disk| !disk.shows_keys) {
        say(&format!(
            "this kernel does not show the keys of {}: the fence believes the disk's answers, and \
             does not look whether they are true (Linux 6.19 or later does)",
            path.display()
        ));
    }
    Ok(Some(disks))
}

/// Is a candidate until the command or the lease has ended.
fn candidacy(
    (arguments, disks): (&Arguments, &[ProbedDisk]),
    me: Member,
    (signals, shown): (&Signals, &mut Shown),
) -> Result<Ended> {
    let options = arguments.options();
    let patience = Duration::from_secs(arguments.lease) / CALLS_PER_LEASE;
    let gateway = Gateway::new(arguments.etcd.clone(), &arguments.cluster, patience)
        .with_access(arguments.access.access());
    let host_lock = HostLock::beside(&arguments.record, &me);
    let local = LockFence { paths: arguments.path.clone(), host_lock };
    let fence = fence((arguments, disks), &me, &local);
    let mut daemon = Daemon::new(me.clone(), options, random()?);
    daemon.add(&arguments.store);
    let record = RecordFile::new(&arguments.record);
    let supervisor = Arc::new(Supervisor::new(me, (fence, local), record, options.margin));
    let host: Arc<Supervisor> = Arc::clone(&supervisor);
    let runner = Runner::start(daemon, gateway, host).context("cannot start a thread")?;
    supervisor.run(&arguments.command, (runner, &arguments.store), (signals, shown))
}

fn fence(
    (arguments, disks): (&Arguments, &[ProbedDisk]),
    me: &Member,
    local: &LockFence,
) -> Box<dyn Fence> {
    let (time_limit, local) = (arguments.limit(), local.clone());
    if arguments.fence_reservation {
        let (disks, late) = (disks.to_vec(), LateAttempt::default());
        let notes = NotesFile::beside(&arguments.record, me);
        return Box::new(ReservationFence { disks, time_limit, local, notes, late });
    }
    match &arguments.fence_command {
        None => Box::new(local),
        Some(program) => {
            let (program, arguments) = (program.clone(), Vec::new());
            Box::new(CommandFence { program, arguments, time_limit, local })
        }
    }
}

pub(crate) fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    let filled = getrandom(&mut bytes, GetRandomFlags::empty()).context("no random numbers")?;
    ensure!(filled == bytes.len(), "the kernel gave too few random numbers");
    Ok(u64::from_le_bytes(bytes).max(1))
}

fn say(text: &str) {
    eprintln!("sidecore own: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_into_keys_and_command_lines() {
        for valid in ["io1", "rack-1.host_2", "A"] {
            assert_eq!(name(valid).unwrap(), valid);
        }
        for invalid in ["", "a/b", "-rf", "a b", "\u{e9}", &"a".repeat(65)] {
            assert!(name(invalid).is_err(), "{invalid}");
        }
    }
}
