//! `sidecore-bench`: runs an experiment, or measures the disk of one socket.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use quanta::Clock;
use sidecore_bench::fill::{self, Order};
use sidecore_bench::load::{self, BLOCK_BYTES, Sample, Work};
use sidecore_bench::{
    cores, fresh_writes, guest_cost, local_block, nested, net_switch, nvme_vf, plot, remote_block,
    remote_figures, shares, stages, stop, translation, verdicts,
};
use sidecore_driver::{BlkClient, ClientOptions, Notify, NvmeClient, NvmeOptions};
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
    /// The cost of stages of disks.
    Stages(stages::Options),
    /// Remote devices beside local ones and beside the bare exchange of their bytes.
    RemoteBlock(remote_block::Options),
    /// The figures of vRIO's evaluation, counted, simulated and timed.
    RemoteFigures(remote_figures::Options),
    /// Frames from guest to guest, beside Open vSwitch with DPDK and dpdk-testpmd.
    NetSwitch(net_switch::Options),
    /// Put the verdicts of several experiments into docs/bench.md; fails unless every bound holds.
    Verdicts(verdicts::Options),
    /// Drive one disk and print its speed.
    Socket(Socket),
}

/// The size of the requests that fill an NVMe function: less than each controller's MDTS.
const NVME_FILL_BYTES: u32 = 128 << 10;

#[derive(clap::Args)]
struct Socket {
    /// The disk's socket.
    path: PathBuf,
    /// The disk is an NVMe function (vfio-user), and not a virtio disk (vhost-user).
    #[arg(long, conflicts_with_all = ["packed", "indirect", "no_event_idx"])]
    nvme: bool,
    /// Queue pairs of the NVMe function.
    #[arg(long, default_value_t = 1, requires = "nvme")]
    queues: u16,
    /// Write instead of read: destroys what is on the disk.
    #[arg(long)]
    write: bool,
    /// Requests in flight in each queue.
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
        Command::Stages(options) => stages::run(&options),
        Command::RemoteBlock(options) => remote_block::run(&options),
        Command::RemoteFigures(options) => remote_figures::run(&options),
        Command::NetSwitch(options) => net_switch::run(&options),
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
    let sample = if options.nvme { drive_nvme(options)? } else { drive_virtio(options)? };
    println!("{}, {:.0} ns mean", plot::per_second(sample.iops), sample.latency_mean_ns);
    if sample.latency_p50_ns > 0.0 {
        println!("{:.0} ns median, {:.0} ns at 99 %", sample.latency_p50_ns, sample.latency_p99_ns);
    }
    println!(
        "{:.4} kicks and {:.4} interrupts for each request",
        sample.kicks_per_request, sample.interrupts_per_request
    );
    Ok(())
}

fn drive_virtio(options: &Socket) -> Result<Sample> {
    let client_options = ClientOptions {
        slots: options.depth,
        slot_bytes: options.bytes,
        packed: options.packed,
        indirect: options.indirect,
        event_idx: !options.no_event_idx,
        notify: options.notify(),
        ..ClientOptions::default()
    };
    let mut client = BlkClient::connect(&options.path, &client_options)?;
    let disk_bytes = client.config().capacity_sectors * SECTOR_BYTES;
    if options.fill {
        drop(client);
        fill::fill(&options.path, disk_bytes, 1 << 20, Order::Sequential)?;
        client = BlkClient::connect(&options.path, &client_options)?;
    }
    println!("features {:#x}, {:?}", client.features(), client.config());
    let work = options.work(disk_bytes)?;
    load::run(client.queue(0).context("no queue")?, &work, &Clock::new())
}

fn drive_nvme(options: &Socket) -> Result<Sample> {
    let connect = |slots, slot_bytes| {
        let (queues, notify) = (options.queues, options.notify());
        let nvme = NvmeOptions { queues, slots, slot_bytes, notify, ..NvmeOptions::default() };
        NvmeClient::connect(&options.path, &nvme)
    };
    if options.fill {
        let mut client = connect(1, NVME_FILL_BYTES)?;
        let namespace = client.namespace();
        let bytes = namespace.blocks * u64::from(namespace.block_bytes);
        fill::fill_queue(client.queue(0).context("no queue")?, bytes, NVME_FILL_BYTES)?;
    }
    let mut client = connect(options.depth, options.bytes)?;
    let namespace = client.namespace();
    println!("{namespace:?}");
    let work = options.work(namespace.blocks * u64::from(namespace.block_bytes))?;
    let mut queues: Vec<_> = (0..options.queues).map_while(|at| client.take_queue(at)).collect();
    load::run_all(&mut queues, &work, &Clock::new())
}

impl Socket {
    fn notify(&self) -> Notify {
        if self.interrupt { Notify::Interrupt } else { Notify::Polled }
    }

    /// The load on a disk of this size.
    fn work(&self, disk_bytes: u64) -> Result<Work> {
        Ok(Work {
            write: self.write,
            depth: self.depth,
            bytes: self.bytes,
            blocks: disk_bytes / u64::from(self.bytes),
            touch: self.touch,
            duration: Duration::try_from_secs_f64(self.seconds).context("not a time")?,
            ..Work::default()
        })
    }
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
