//! The parts that all experiments share: options, programs, cores, and the publication of results.

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

/// The options that all experiments have.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Common {
    /// Run everything with fewer and shorter rounds, within some minutes at most.
    #[arg(long)]
    pub quick: bool,
    /// Run everything for a few milliseconds and without peers, to see that it works.
    #[arg(long, conflicts_with = "quick")]
    pub tiny: bool,
    /// Append the records to this file, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Fail if one of the bounds does not hold.
    #[arg(long)]
    pub enforce: bool,
    /// Append the result of each bound to this file, for `sidecore-bench verdicts`.
    #[arg(long, value_name = "FILE")]
    pub verdicts: Option<PathBuf>,
    /// Write the table into docs/bench.md, its main rows into README.md, and plots to docs/bench.
    #[arg(long)]
    pub update_readme: bool,
    /// Compare with another build instead of peers and floors: the path of its `sidecored`, beside
    /// which is its `sidecore-bench`. Each case runs in 20 pairs, 10 with `--quick`; the bound is
    /// 0.98.
    #[arg(long, value_name = "BINARY", conflicts_with = "update_readme")]
    pub against: Option<PathBuf>,
}

/// The options of experiments that measure programs.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Programs {
    /// The options that all experiments have.
    #[command(flatten)]
    pub common: Common,
    /// Do not measure the peer.
    #[arg(long)]
    pub no_peer: bool,
    /// The daemon to measure; by default the one that was built with this program.
    #[arg(long, value_name = "PROGRAM")]
    pub daemon: Option<PathBuf>,
}

/// The options of experiments whose cases have names, and can be measured in parts.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct CaseOptions {
    /// The options of experiments that measure programs.
    #[command(flatten)]
    pub programs: Programs,
    /// Measure only cases whose names have one of these texts in them.
    #[arg(long, value_delimiter = ',', value_name = "TEXT")]
    pub only: Vec<String>,
    /// Report the records that runs of the same revision wrote by `--json`, instead of measuring.
    #[arg(long, value_delimiter = ',', value_name = "FILE")]
    #[arg(conflicts_with_all = ["json", "against"])]
    pub from: Vec<PathBuf>,
}

impl CaseOptions {
    /// Whether the options select the case of this name.
    #[must_use]
    pub fn wants(&self, case: &str) -> bool {
        is_named(&self.only, case)
    }

    /// Reports the records of the files that `--from` names. Returns `None` if it names none, and
    /// false if a bound that is to be enforced does not hold.
    ///
    /// # Errors
    /// As [`Records::read`] and [`Common::conclude`].
    pub fn report_files(
        &self,
        experiment: &str,
        report: impl FnOnce(&Records) -> Report<'static>,
    ) -> Result<Option<bool>> {
        if self.from.is_empty() {
            return Ok(None);
        }
        let records = &Records::read(experiment, &self.from)?;
        let disturbed = "all of it is from files".to_owned();
        let outcome = Outcome { records, report: report(records), disturbed };
        self.programs.common.conclude(Instant::now(), &outcome).map(Some)
    }
}

/// Whether an option that limits an experiment to `only` these includes `this`. An empty list
/// includes all.
#[must_use]
pub fn wants<T: PartialEq>(only: &[T], this: &T) -> bool {
    only.is_empty() || only.contains(this)
}

/// Whether `case` is to be measured, if `only` names parts of the names of cases.
#[must_use]
pub fn is_named(only: &[String], case: &str) -> bool {
    only.is_empty() || only.iter().any(|text| case.contains(text.as_str()))
}

/// The length of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// All rounds at their full length.
    Full,
    /// Some minutes at most.
    Quick,
    /// The shortest runs that show that the experiment works.
    Tiny,
}

impl Scale {
    /// The scale's name in records.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Quick => "quick",
            Self::Tiny => "tiny",
        }
    }
}

/// The results of an experiment for its readers.
pub struct Report<'a> {
    /// All results, in Markdown.
    pub table: String,
    /// Sentences below the table in docs/bench.md.
    pub note: String,
    /// The bounds, with the name of the system that they are about.
    pub bounds: (&'a str, &'a [Bound<'a>]),
    /// The experiment's rows in README.md.
    pub headlines: &'a [Headline],
    /// Draws the experiment's pictures, if it has any.
    pub draw: fn(&Records) -> Result<()>,
}

impl<'a> Report<'a> {
    /// Makes a report without notes and pictures.
    #[must_use]
    pub fn new(
        table: String,
        bounds: (&'a str, &'a [Bound<'a>]),
        headlines: &'a [Headline],
    ) -> Self {
        Self { table, note: String::new(), bounds, headlines, draw: |_| Ok(()) }
    }
}

/// The results of an experiment that has ended.
pub struct Outcome<'a> {
    /// All measurements and ratios.
    pub records: &'a Records,
    /// The report on the records.
    pub report: Report<'a>,
    /// The number of disturbed or repeated runs, in words.
    pub disturbed: String,
}

impl Common {
    /// The scale that the options select.
    #[must_use]
    pub fn scale(&self) -> Scale {
        match self {
            Self { tiny: true, .. } => Scale::Tiny,
            Self { quick: true, .. } => Scale::Quick,
            _ => Scale::Full,
        }
    }

    /// Starts the clock of an experiment, listens for signals, and takes priority over other work
    /// on the machine, if the process has the privilege. Started processes inherit the priority,
    /// all of them alike.
    ///
    /// # Errors
    /// A signal handler cannot be registered.
    pub fn begin(&self) -> Result<Instant> {
        let begin = Instant::now();
        stop::listen()?;
        let _ = rustix::process::nice(workers::AHEAD);
        Ok(begin)
    }

    /// Prints the outcome of an experiment that began at `begin`, and writes it to the files that
    /// the options name. Returns false if a bound that is to be enforced does not hold.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn conclude(&self, begin: Instant, outcome: &Outcome<'_>) -> Result<bool> {
        let Outcome { records, report, disturbed } = outcome;
        let (ours, bounds) = report.bounds;
        // A tiny run ends before the system is in a steady state.
        let bounds = if self.tiny { &[] } else { bounds };
        println!("\n{}", report.table);
        let checked = bounds::check(bounds, records, ours);
        let hold = bounds::print(&checked);
        if let Some(file) = &self.verdicts {
            verdicts::append(
                file,
                (records.experiment(), self.scale().name(), records.revision()),
                &checked,
            )?;
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
    /// The start of the experiment.
    pub begin: Instant,
    /// The experiment's options.
    pub options: Common,
    daemon: PathBuf,
    /// The client's clock.
    pub clock: Clock,
    /// Repeats runs until they count.
    pub gate: Gate,
    /// The results so far.
    pub records: Records,
    directory: tempfile::TempDir,
    run: tempfile::TempDir,
    no_peer: bool,
}

impl Experiment {
    /// Pins this thread to the client's core and starts a partner on the server's. `patience` is
    /// the time, over all runs, to wait for these cores to be near and free.
    ///
    /// # Errors
    /// The machine has fewer than two cores, or no place for temporary files.
    pub fn start(name: &str, programs: &Programs, patience: Duration) -> Result<Self> {
        let begin = programs.common.begin()?;
        cores::pin(cores::CLIENT).context("the experiment needs two cores")?;
        let partner = Partner::start(cores::SERVER).context("the experiment needs two cores")?;
        let scale = programs.common.scale().name();
        eprintln!(
            "{name}, {scale}: client on core {}, server on core {}",
            cores::CLIENT,
            cores::SERVER
        );
        Ok(Self {
            begin,
            options: programs.common.clone(),
            daemon: programs.daemon.clone().map_or_else(sidecored::beside_this_program, Ok)?,
            clock: Clock::new(),
            gate: Gate::new(partner, patience),
            records: Records::new(name),
            directory: tempfile::Builder::new().prefix("sidecore-bench").tempdir()?,
            // On tmpfs, as `/run` is: a controller's log is beside the control socket.
            run: tempfile::Builder::new()
                .prefix("sidecore-bench")
                .tempdir_in("/dev/shm")
                .context("no tmpfs")?,
            no_peer: programs.no_peer,
        })
    }

    /// The directory of the experiment's files.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Starts this build's daemon with its files in a new directory `name` of the experiment.
    ///
    /// # Errors
    /// As [`Sidecored::start`].
    pub fn start_ours(
        &self,
        name: &str,
        controllers: &[Controller],
        devices: &[Device],
    ) -> Result<Sidecored> {
        Sidecored::start(&self.daemon, self.run.path(), name, controllers, devices)
    }

    /// Starts the daemon of `--against` in the same way, if the option is set.
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

    /// Starts both for the `start`-th time, in turn. Each build has devices of its own.
    ///
    /// # Errors
    /// As [`Sidecored::start`].
    pub fn start_builds(
        &self,
        name: &str,
        start: usize,
        controllers: &[Controller],
        [ours, before]: [&[Device]; 2],
    ) -> Result<(Sidecored, Option<Sidecored>)> {
        let name = format!("{name}-{start}");
        against::start_in_turn(
            start,
            || self.start_ours(&name, controllers, ours),
            || self.start_before(&name, controllers, before),
        )
    }

    /// Starts this build's daemon with a configuration that `configuration` makes for the directory
    /// of its files, by a command that `prefix` is in front of.
    ///
    /// # Errors
    /// As [`Sidecored::start`].
    pub fn start_configured(
        &self,
        name: &str,
        prefix: &[String],
        configuration: impl FnOnce(&Path) -> Result<String>,
    ) -> Result<Sidecored> {
        let programs = (prefix, self.daemon.as_path());
        Sidecored::start_configured(programs, self.run.path(), name, configuration)
    }

    /// Starts the daemon of `--against` in the same way, if the option is set.
    ///
    /// # Errors
    /// As [`Sidecored::start`].
    pub fn start_configured_before(
        &self,
        name: &str,
        prefix: &[String],
        configuration: impl FnOnce(&Path) -> Result<String>,
    ) -> Result<Option<Sidecored>> {
        let Some(program) = &self.options.against else { return Ok(None) };
        let name = against::before(name);
        let programs = (prefix, program.as_path());
        Sidecored::start_configured(programs, self.run.path(), &name, configuration).map(Some)
    }

    /// Starts the peer with its best settings, each of which is tried for `trial`.
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

    /// Whether the options leave peers in.
    #[must_use]
    pub fn measures_peers(&self) -> bool {
        !self.options.tiny && !self.no_peer && self.options.against.is_none()
    }

    /// Finds the peer's program, unless the options exclude the peer.
    #[must_use]
    pub fn find_peer(&self) -> Option<Program> {
        let find = || Program::find_beside(&self.daemon, !self.options.quick);
        self.measures_peers().then(find).flatten()
    }

    /// The parameters of every measurement.
    #[must_use]
    pub fn params(&self) -> Params {
        params([
            ("plan", self.options.scale().name().into()),
            ("client_core", cores::CLIENT.0.into()),
            ("server_core", cores::SERVER.0.into()),
        ])
    }

    /// Runs `load` with `work`, after a warm-up of the same kind, on a program that is frozen
    /// before and after.
    ///
    /// # Errors
    /// `load` fails; the program has ended; an interrupt.
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

    /// Prints, checks and writes the results. Returns false if a bound that is to be enforced does
    /// not hold.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn conclude(&self, report: Report<'_>) -> Result<bool> {
        let disturbed =
            format!("{} runs waited for near and free cores or were repeated", self.gate.retries());
        let of_builds = against::bounds(&self.records);
        let report = match self.options.against {
            Some(_) => Report::new(against::table(&self.records), (against::THIS, &of_builds), &[]),
            None => report,
        };
        self.options.conclude(self.begin, &Outcome { records: &self.records, report, disturbed })
    }
}
