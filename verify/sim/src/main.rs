//! Simulations by hand: longer than the test command has time for.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Instant;

use clap::{Parser, Subcommand};
use sidecore_sim::volumes::{self, Options, Outcome};

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
  sidecore-sim volumes --endless             until something is wrong, or Ctrl-C
  sidecore-sim volumes --seed 17 --count 1   one history again
";

/// How often progress is printed.
const HISTORIES_PER_LINE: u64 = 50;

#[derive(Subcommand)]
enum Command {
    /// Power cuts at every write and flush of random histories of volumes.
    Volumes {
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
        #[arg(long, default_value_t = Options::default().runs)]
        runs: u64,
        /// Steps in a run.
        #[arg(long, default_value_t = Options::default().steps)]
        steps: u64,
    },
}

fn main() -> ExitCode {
    let Command::Volumes { seed, count, endless, runs, steps } = Arguments::parse().command;
    let begin = Instant::now();
    let options = Options { runs, steps, bug: None };
    let seeds = seed..if endless { u64::MAX } else { seed.saturating_add(count) };
    let progress = |histories: u64, total: &Outcome| {
        if histories.is_multiple_of(HISTORIES_PER_LINE) {
            tell(histories, total, begin);
        }
    };
    match volumes::run_many(seeds, &options, &progress) {
        Ok(total) => {
            tell(count, &total, begin);
            ExitCode::SUCCESS
        }
        Err(violation) => {
            eprintln!("{violation}");
            eprintln!(
                "or with: sidecore-sim volumes --seed {} --count 1 --runs {runs} --steps {steps}",
                violation.seed
            );
            ExitCode::FAILURE
        }
    }
}

fn tell(histories: u64, total: &Outcome, begin: Instant) {
    let Outcome { cut_points, disks, operations, .. } = total;
    let seconds = begin.elapsed().as_secs();
    println!("{histories} histories, {cut_points} cut points, {disks} disks, {operations} operations, {seconds} s");
}
