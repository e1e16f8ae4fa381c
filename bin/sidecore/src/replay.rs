//! `sidecore replay`: gives the requests of a recording to a device again, and compares.

mod ranges;
mod report;
mod runner;
mod steps;

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use sidecore_driver::{BlkClient, ClientOptions, Notify, features};

use crate::interrupt::Interrupt;
use crate::{FAULTS, print, print_json};
use report::{Device, Report};
use runner::Runner;
use steps::{Limits, Steps};

/// The most memory for the data of requests in flight.
const DATA_BYTES: u64 = 1 << 30;

/// The arguments of `sidecore replay`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The recording.
    recording: PathBuf,
    /// The vhost-user socket of the device: any virtio-blk device, of any daemon.
    #[arg(value_name = "DEVICE_SOCKET", required_unless_present = "dry_run")]
    device: Option<PathBuf>,
    /// Also replay writes, discards and writes of zeros: they destroy what the device holds.
    #[arg(long)]
    write: bool,
    /// Submit each request at its time in the recording. By default, all at full speed.
    #[arg(long)]
    in_time: bool,
    /// How many times as fast as the recording, 0.01 to 1000.
    #[arg(long, value_name = "FACTOR", default_value = "1", requires = "in_time",
          value_parser = speed)]
    speed: f64,
    /// The most requests in flight, 1 to 1024.
    #[arg(long, value_name = "COUNT", default_value_t = 32,
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    depth: u16,
    /// How many differences to show.
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    show: usize,
    /// Read the recording and print its summary. No device is needed.
    #[arg(long, conflicts_with_all = ["write", "in_time", "device"])]
    dry_run: bool,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

fn speed(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if (0.01..=1000.0).contains(&factor) => Ok(factor),
        _ => Err("expected a factor, from 0.01 to 1000".to_owned()),
    }
}

/// Replays a recording. The exit code says whether there was a difference, or a fault in the file.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let shown = arguments.recording.display();
    let file = File::open(&arguments.recording).with_context(|| format!("cannot open {shown}"))?;
    let steps = Steps::read(&file).with_context(|| format!("{shown}"))?;
    let mut report = Report::of(&arguments.recording, &steps);
    if let Some(socket) = &arguments.device {
        report.replay = Some(replay(arguments, socket, &file, steps)?);
    }
    if arguments.json {
        print_json(&report)?;
    } else {
        print(&report.text())?;
    }
    if let Some(fault) = &report.fault {
        eprintln!("sidecore: {shown}: {fault}; the records before count");
    }
    Ok(if report.has_faults() { ExitCode::from(FAULTS) } else { ExitCode::SUCCESS })
}

fn replay(
    arguments: &Arguments,
    socket: &PathBuf,
    file: &File,
    mut steps: Steps,
) -> Result<report::Replay> {
    let slot_bytes = steps.largest_transfer(arguments.write);
    let room = u16::try_from(DATA_BYTES / u64::from(slot_bytes)).unwrap_or(u16::MAX).max(1);
    let options = ClientOptions {
        slots: arguments.depth.min(room),
        slot_bytes,
        indirect: true,
        notify: Notify::Interrupt,
        huge_pages: false,
        ..ClientOptions::default()
    };
    let mut client = BlkClient::connect(socket, &options)
        .with_context(|| format!("cannot use {}", socket.display()))?;
    let offers = |feature: u64| client.features() & feature != 0;
    if arguments.write && offers(features::RO) {
        bail!("{} is a read-only device: replay without --write", socket.display());
    }
    let config = client.config();
    let limits = Limits {
        writes: arguments.write,
        capacity_bytes: config.capacity_sectors.saturating_mul(512),
        block_bytes: u64::from(config.block_bytes).max(512),
        flush: offers(features::FLUSH),
        discard_bytes: offers(features::DISCARD)
            .then_some(u64::from(config.max_discard_sectors) * 512),
        zero_bytes: offers(features::WRITE_ZEROES)
            .then_some(u64::from(config.max_write_zeroes_sectors) * 512),
    };
    let skipped = steps.prepare(&limits)?;
    let queue = client.take_queue(0).context("the device has no queue")?;
    let interrupt = Interrupt::listen()?;
    let pace = arguments.in_time.then_some(arguments.speed);
    let runner = Runner::new(queue, file, &interrupt, arguments.show);
    let outcome = runner.run(&steps, pace)?;
    let device = Device {
        socket: socket.display().to_string(),
        depth: options.slots,
        speed: pace,
        writes: arguments.write,
    };
    Ok(report::Replay::of(device, &steps, skipped, outcome))
}
