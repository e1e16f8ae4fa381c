//! Simulations by hand, longer than in the tests.
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::process::ExitCode;
use std::time::Instant;

use clap::{Args, Parser, Subcommand};
use sidecore_sim::remote::failover;
use sidecore_sim::{
    Options, Total, Violation, controller, integrity, mirror, ownership, remote, run_many, volumes,
};

/// Runs simulations from seeds. The same seed and options give the same run.
#[derive(Parser)]
#[command(name = "sidecore-sim", after_help = AFTER_HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Exit codes:
  0  nothing was wrong
  1  something was; the message says what, and the seed that shows it again
  2  the command line is wrong

Examples:
  sidecore-sim volumes --endless                until something is wrong, or Ctrl-C
  sidecore-sim controller --seed 17 --count 1   one history again
";

/// How often progress is printed.
const HISTORIES_PER_LINE: u64 = 50;

#[derive(Subcommand)]
enum Command {
    /// Power cuts at every write and flush of random histories of volumes.
    Volumes(Histories),
    /// The same for a whole controller, with guests on its virtual functions.
    Controller(Histories),
    /// A client and an IOhost of the remote channel; steps are requests.
    Remote(Histories),
    /// Power cuts at every write and flush of a mirror's legs, which also fail.
    Mirror(Histories),
    /// Power cuts at every write and flush of a store with checksums, which loses writes.
    Integrity(Histories),
    /// Two IOhosts that may own a client's stores; steps are seconds.
    Failover(Histories),
    /// Candidates for a store, with an etcd and fences that fail; steps are seconds.
    Ownership(Histories),
}

#[derive(Args)]
struct Histories {
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How many seeds.
    #[arg(long, default_value_t = 100, conflicts_with = "endless")]
    count: u64,
    /// All seeds from the first one on.
    #[arg(long)]
    endless: bool,
    /// Runs in a history, each on what a power cut left of the one before.
    #[arg(long)]
    runs: Option<u64>,
    /// Steps in a run.
    #[arg(long)]
    steps: Option<u64>,
}

impl Histories {
    fn options<R>(&self) -> Options<R> {
        let default = Options::<R>::default();
        let (runs, steps) = (self.runs.unwrap_or(default.runs), self.steps);
        Options { runs, steps: steps.unwrap_or(default.steps), neglect: None }
    }
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Volumes(histories) => {
            let default = volumes::Options::default();
            let runs = histories.runs.unwrap_or(default.runs);
            let options = volumes::Options {
                runs,
                steps: histories.steps.unwrap_or(default.steps),
                bug: None,
            };
            run("volumes", &histories, &|seed| volumes::run(seed, &options))
        }
        Command::Controller(histories) => {
            let default = controller::Options::default();
            let runs = histories.runs.unwrap_or(default.runs);
            let options = controller::Options {
                runs,
                steps: histories.steps.unwrap_or(default.steps),
                bug: None,
            };
            run("controller", &histories, &|seed| controller::run(seed, &options))
        }
        Command::Remote(histories) => {
            let default = remote::Options::default();
            let options = remote::Options {
                requests: histories.steps.unwrap_or(default.requests),
                neglect: None,
            };
            run("remote", &histories, &|seed| remote::run(seed, &options))
        }
        Command::Mirror(histories) => {
            let options = histories.options();
            run("mirror", &histories, &|seed| mirror::run(seed, &options))
        }
        Command::Integrity(histories) => {
            let options = histories.options();
            run("integrity", &histories, &|seed| integrity::run(seed, &options))
        }
        Command::Failover(histories) => {
            let default = failover::Options::default();
            let seconds = histories.steps.unwrap_or(default.seconds);
            let options = failover::Options { seconds, neglect: None };
            run("failover", &histories, &|seed| failover::run(seed, &options))
        }
        Command::Ownership(histories) => {
            let default = ownership::Options::default();
            let seconds = histories.steps.unwrap_or(default.seconds);
            let options = ownership::Options { seconds, neglect: None };
            run("ownership", &histories, &|seed| ownership::run(seed, &options))
        }
    }
}

fn run<T: Total + Debug>(
    command: &str,
    histories: &Histories,
    one: &(dyn Fn(u64) -> Result<T, Box<Violation>> + Sync),
) -> ExitCode {
    let &Histories { seed, count, endless, runs, steps } = histories;
    let begin = Instant::now();
    let tell = |histories: u64, total: &T| {
        println!("{histories} histories in {} s: {total:?}", begin.elapsed().as_secs());
    };
    let seeds = seed..if endless { u64::MAX } else { seed.saturating_add(count) };
    let progress = |histories: u64, total: &T| {
        if histories.is_multiple_of(HISTORIES_PER_LINE) {
            tell(histories, total);
        }
    };
    match run_many(seeds, one, &progress) {
        Ok(total) => {
            tell(count, &total);
            ExitCode::SUCCESS
        }
        Err(violation) => {
            let option =
                |name: &str, value: Option<u64>| value.map(|value| format!(" --{name} {value}"));
            let options: String =
                [option("runs", runs), option("steps", steps)].into_iter().flatten().collect();
            eprintln!("{violation}");
            eprintln!(
                "or with: sidecore-sim {command} --seed {} --count 1{options}",
                violation.seed
            );
            ExitCode::FAILURE
        }
    }
}
