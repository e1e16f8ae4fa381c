//! What all experiments have in common: what they can be told, where they run, and what becomes of
//! their results.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use quanta::Clock;

use crate::against;
use crate::bounds::{self, Bound};
use crate::cores::{self, Gate, Gated, Partner};
use crate::load::{Sample, Work};
use crate::peer::{Disk, Program, StorageDaemon};
use crate::process::{Process, Watch};
use crate::publish::{self, Headline};
use crate::record::{Params, Records, params};
use crate::sidecored::{self, Controller, Device, Sidecored};
use crate::{stop, verdicts, workers};

/// What every experiment can be told.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Common {
    /// All of it, within some minutes at most.
    #[arg(long)]
    pub quick: bool,
    /// Only a few milliseconds each, without peers: does it work at all?
    #[arg(long, conflicts_with = "quick")]
    pub tiny: bool,
    /// Append the records to this file, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Fail if one of the bounds does not hold.
    #[arg(long)]
    pub enforce: bool,
    /// Append how each bound fared to this file, for `sidecore-bench verdicts`.
    #[arg(long, value_name = "FILE")]
    pub verdicts: Option<PathBuf>,
    /// Write the table into docs/bench.md, its main rows into README.md, and plots to docs/bench.
    #[arg(long)]
    pub update_readme: bool,
    /// Instead of peers and floors, compare with another build: its `sidecored`, beside which its
    /// `sidecore-bench` is. 20 pairs for each case, 10 with `--quick`; the bound is 0.98.
    #[arg(long, value_name = "BINARY", conflicts_with = "update_readme")]
    pub against: Option<PathBuf>,
}

/// What those can be told that measure programs.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Programs {
    /// Without the peer.
    #[arg(long)]
    pub no_peer: bool,
    /// The daemon to measure; by default the one that was built with this program.
    #[arg(long, value_name = "PROGRAM")]
    pub daemon: Option<PathBuf>,
}

/// How long an experiment takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// As long as it has to.
    Full,
    /// Some minutes at most.
    Quick,
    /// No longer than it takes to see that it works.
    Tiny,
}

impl Scale {
    /// Its name in records.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Quick => "quick",
            Self::Tiny => "tiny",
        }
    }
}

/// The results of an experiment, for people.
pub struct Report<'a> {
    /// All results, in Markdown.
    pub table: String,
    /// Sentences below the table in docs/bench.md.
    pub note: String,
    /// What must hold of the system of this name.
    pub bounds: (&'a str, &'a [Bound<'a>]),
    /// The experiment's rows in README.md.
    pub headlines: &'a [Headline],
    /// Draws the pictures, if there are any.
    pub draw: fn(&Records) -> Result<()>,
}

impl<'a> Report<'a> {
    /// A report without notes and pictures.
    #[must_use]
    pub fn new(table: String, bounds: (&'a str, &'a [Bound<'a>]), headlines: &'a [Headline]) -> Self {
        Self { table, note: String::new(), bounds, headlines, draw: |_| Ok(()) }
    }
}

/// The end of an experiment.
pub struct Outcome<'a> {
    /// All that was measured.
    pub records: &'a Records,
    /// The results, for people.
    pub report: Report<'a>,
    /// How much did not count, in words.
    pub disturbed: String,
}

impl Common {
    /// How long the experiment takes.
    #[must_use]
    pub fn scale(&self) -> Scale {
        match self {
            Self { tiny: true, .. } => Scale::Tiny,
            Self { quick: true, .. } => Scale::Quick,
            _ => Scale::Full,
        }
    }

    /// Prints what came of an experiment that began at `begin`, and keeps it where that was asked
    /// for; false if a bound was to be enforced and does not hold.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn conclude(&self, begin: Instant, outcome: &Outcome<'_>) -> Result<bool> {
        let Outcome { records, report, disturbed } = outcome;
        let (ours, bounds) = report.bounds;
        // A tiny run is over before anything has settled.
        let bounds = if self.tiny { &[] } else { bounds };
        println!("\n{}", report.table);
        let checked = bounds::check(bounds, records, ours);
        let hold = bounds::print(&checked);
        if let Some(file) = &self.verdicts {
            verdicts::append(file, (records.experiment(), self.scale().name(), records.revision()), &checked)?;
        }
        println!("took {:.0} s; {disturbed}", begin.elapsed().as_secs_f64());
        if let Some(file) = &self.json {
            records.append_to(file)?;
        }
        if self.update_readme {
            publish::publish(records, report, &checked)?;
        }
        Ok(!self.enforce || hold)
    }
}

/// An experiment with a client on one core and programs on the other.
pub struct Experiment {
    /// When it began.
    pub begin: Instant,
    /// What it was told.
    pub options: Common,
    daemon: PathBuf,
    /// The client's clock.
    pub clock: Clock,
    /// Lets runs through that count.
    pub gate: Gate,
    /// What it has measured.
    pub records: Records,
    directory: tempfile::TempDir,
    run: tempfile::TempDir,
    no_peer: bool,
}

impl Experiment {
    /// Takes the client's core for this thread and the server's for a partner; `patience` is how
    /// long to wait, in all, for these to be near and free.
    ///
    /// # Errors
    /// There are no two cores, or there is nowhere to put files.
    pub fn start(name: &str, options: &Common, programs: &Programs, patience: Duration) -> Result<Self> {
        let begin = Instant::now();
        stop::listen()?;
        // Ahead of whatever else the machine does; what we start inherits it, all of it alike. It
        // is a privilege.
        let _ = rustix::process::nice(workers::AHEAD);
        cores::pin(cores::CLIENT).context("the experiment needs two cores")?;
        let partner = Partner::start(cores::SERVER).context("the experiment needs two cores")?;
        let scale = options.scale().name();
        eprintln!("{name}, {scale}: client on core {}, server on core {}", cores::CLIENT, cores::SERVER);
        Ok(Self {
            begin,
            options: options.clone(),
            daemon: programs.daemon.clone().map_or_else(sidecored::beside_us, Ok)?,
            clock: Clock::new(),
            gate: Gate::new(partner, patience),
            records: Records::new(name),
            directory: tempfile::Builder::new().prefix("sidecore-bench").tempdir()?,
            // On tmpfs, as `/run` is: a controller's log is beside the control socket.
            run: tempfile::Builder::new().prefix("sidecore-bench").tempdir_in("/dev/shm").context("no tmpfs")?,
            no_peer: programs.no_peer,
        })
    }

    /// Where its files are.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Starts our daemon; its files are in a new directory `name` of the experiment's.
    ///
    /// # Errors
    /// As [`Sidecored::start`].
    pub fn start_ours(&self, name: &str, controllers: &[Controller], devices: &[Device]) -> Result<Sidecored> {
        Sidecored::start(&self.daemon, self.run.path(), name, controllers, devices)
    }

    /// Starts the same with the daemon of `--against`, if there is one.
    ///
    /// # Errors
    /// As [`Sidecored::start`].
    pub fn start_before(
        &self,
        name: &str,
        controllers: &[Controller],
        devices: &[Device],
    ) -> Result<Option<Sidecored>> {
        let start = |program: &PathBuf| {
            Sidecored::start(program, self.run.path(), &against::before(name), controllers, devices)
        };
        self.options.against.as_ref().map(start).transpose()
    }

    /// Starts the peer with its best settings, each tried out for as long as `trial`.
    ///
    /// # Errors
    /// As [`StorageDaemon::start_best`].
    pub fn start_peer(
        &self,
        program: &Program,
        name: &str,
        disk: &Disk,
        queues: u16,
        trial: Duration,
    ) -> Result<StorageDaemon> {
        StorageDaemon::start_best(program, self.directory(), name, disk, queues, trial)
    }

    /// The peer's program, if it is wanted and there is one.
    #[must_use]
    pub fn find_peer(&self) -> Option<Program> {
        let without = self.options.tiny || self.no_peer || self.options.against.is_some();
        if without { None } else { Program::find_beside(&self.daemon, !self.options.quick) }
    }

    /// Parameters that all measurements have.
    #[must_use]
    pub fn params(&self) -> Params {
        params([
            ("plan", self.options.scale().name().into()),
            ("client_core", cores::CLIENT.0.into()),
            ("server_core", cores::SERVER.0.into()),
        ])
    }

    /// Has `load` do `work`, after the same for as long as `warm_up`, on a program that is frozen
    /// before and after.
    ///
    /// # Errors
    /// What `load` says; the program has ended; an interrupt.
    pub fn round(
        &mut self,
        process: &mut Process,
        warm_up: Duration,
        work: &Work,
        mut load: impl FnMut(&Work, &Clock) -> Result<Sample>,
    ) -> Result<Gated<Sample>> {
        let warm_up = Work { duration: warm_up, ..*work };
        let clock = &self.clock;
        self.gate.run(|_| {
            let start = if work.yields { Watch::start_with_workers } else { Watch::start };
            let watch = start(Some(process))?;
            process.thaw()?;
            load(&warm_up, clock)?;
            let sample = load(work, clock)?;
            process.freeze()?;
            Ok((sample, watch.share(Some(process))?))
        })
    }

    /// Prints, checks and keeps what was measured; false if a bound was to be enforced and does not
    /// hold.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn conclude(&self, report: Report<'_>) -> Result<bool> {
        let disturbed = format!("{} runs waited for near and free cores or were repeated", self.gate.retries());
        let of_builds = against::bounds(&self.records);
        let report = match self.options.against {
            Some(_) => Report::new(against::table(&self.records), (against::THIS, &of_builds), &[]),
            None => report,
        };
        self.options.conclude(self.begin, &Outcome { records: &self.records, report, disturbed })
    }
}
