//! `sidecore-bench`: runs an experiment, or measures the disk of one socket.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use quanta::Clock;
use sidecore_bench::fill::{self, Order};
use sidecore_bench::load::{self, BLOCK_BYTES, Work};
use sidecore_bench::{
    cores, fresh_writes, guest_cost, local_block, nested, nvme_vf, plot, remote_block, shares,
    stop, translation, verdicts,
};
use sidecore_driver::{BlkClient, ClientOptions, Notify};
use sidecore_units::SECTOR_BYTES;

#[derive(Parser)]
#[command(about = "The experiments", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Disks for guests on this host, beside qemu-storage-daemon.
    LocalBlock(local_block::Options),
    /// Virtual functions beside the physical one, the same bytes as a file, and
    /// qemu-storage-daemon.
    Nested(nested::Options),
    /// NVMe functions beside virtio disks and qemu-storage-daemon.
    NvmeVf(nvme_vf::Options),
    /// The cost of a virtual function over the physical one.
    VfCost(nested::vf_cost::Options),
    /// The cost of translating an address.
    Translation(translation::Options),
    /// The cost of a disk for the client that uses it.
    GuestCost(guest_cost::Options),
    /// The cost of the log of answered changes to a write to fresh blocks.
    FreshWrites(fresh_writes::Options),
    /// The cost of weights where the store is no bottleneck.
    Shares(shares::Options),
    /// Remote devices beside local ones and beside the bare exchange of their bytes.
    RemoteBlock(remote_block::Options),
    /// Put the verdicts of several experiments into docs/bench.md; fails unless every bound holds.
    Verdicts(verdicts::Options),
    /// Drive one vhost-user disk and print its speed.
    Socket(Socket),
}

#[derive(clap::Args)]
struct Socket {
    /// The disk's socket.
    path: PathBuf,
    /// Write instead of read: destroys what is on the disk.
    #[arg(long)]
    write: bool,
    /// Requests in flight.
    #[arg(long, default_value_t = 32)]
    depth: u16,
    /// Length of the run in seconds.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Ask for packed rings.
    #[arg(long)]
    packed: bool,
    /// Ask for indirect descriptors.
    #[arg(long)]
    indirect: bool,
    /// Do without EVENT_IDX.
    #[arg(long)]
    no_event_idx: bool,
    /// Sleep until an interrupt, instead of polling.
    #[arg(long)]
    interrupt: bool,
    /// Write the whole disk first, from its start to its end: destroys what is on the disk.
    #[arg(long)]
    fill: bool,
    /// Size of each request in bytes.
    #[arg(long, default_value_t = BLOCK_BYTES)]
    bytes: u32,
    /// Touch the data: read each byte that was read and write each byte to be written.
    #[arg(long)]
    touch: bool,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::LocalBlock(options) => local_block::run(&options),
        Command::Nested(options) => nested::run(&options),
        Command::NvmeVf(options) => nvme_vf::run(&options),
        Command::VfCost(options) => nested::vf_cost::run(&options),
        Command::Translation(options) => translation::run(&options),
        Command::GuestCost(options) => guest_cost::run(&options),
        Command::FreshWrites(options) => fresh_writes::run(&options),
        Command::Shares(options) => shares::run(&options),
        Command::RemoteBlock(options) => remote_block::run(&options),
        Command::Verdicts(options) => verdicts::run(&options),
        Command::Socket(options) => socket(&options).map(|()| true),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(2),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn socket(options: &Socket) -> Result<()> {
    stop::listen()?;
    cores::pin(cores::CLIENT)?;
    let client_options = ClientOptions {
        slots: options.depth,
        slot_bytes: options.bytes,
        packed: options.packed,
        indirect: options.indirect,
        event_idx: !options.no_event_idx,
        notify: if options.interrupt { Notify::Interrupt } else { Notify::Polled },
        ..ClientOptions::default()
    };
    let mut client = BlkClient::connect(&options.path, &client_options)?;
    let sectors = client.config().capacity_sectors;
    if options.fill {
        drop(client);
        fill::fill(&options.path, sectors * SECTOR_BYTES, 1 << 20, Order::Sequential)?;
        client = BlkClient::connect(&options.path, &client_options)?;
    }
    println!("features {:#x}, {:?}", client.features(), client.config());
    let work = Work {
        write: options.write,
        depth: options.depth,
        bytes: options.bytes,
        blocks: sectors * SECTOR_BYTES / u64::from(options.bytes),
        touch: options.touch,
        duration: Duration::try_from_secs_f64(options.seconds).context("not a time")?,
        ..Work::default()
    };
    let sample = load::run(client.queue(0).context("no queue")?, &work, &Clock::new())?;
    println!("{}, {:.0} ns mean", plot::per_second(sample.iops), sample.latency_mean_ns);
    if options.depth == 1 {
        println!("{:.0} ns median, {:.0} ns at 99 %", sample.latency_p50_ns, sample.latency_p99_ns);
    }
    println!(
        "{:.4} kicks and {:.4} interrupts for each request",
        sample.kicks_per_request, sample.interrupts_per_request
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
    }
}
