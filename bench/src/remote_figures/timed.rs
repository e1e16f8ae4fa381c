//! Clients and sidecores that are timed: each on a core of its own.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use quanta::Clock;
use sidecore_driver::{BlkClient, ClientOptions};
use sidecore_link::LinkAddress;
use sidecore_trust::ClientTrust;
use sidecore_units::CoreId;

use super::{BYTES, Bench, MAX_DEPTH};
use crate::cores;
use crate::experiment::Experiment;
use crate::load::{self, Sample, Work};
use crate::remote_block::client::{Clients, Identity};
use crate::remote_block::iohost::{Disk, device_name};
use crate::remote_block::wire::{Cable, Wire};
use crate::runs::Runs;
use crate::sidecored::{self, Sidecored};

/// The store of each client.
const DISK: Disk = Disk::Ram;

/// Racks so far: each has a directory of its own.
static RACKS: AtomicUsize = AtomicUsize::new(0);

/// The place of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// On an IOhost.
    Remote,
    /// On an IOhost whose sidecores sleep until an interrupt.
    RemoteInterrupts,
    /// On the clients' own host.
    Local,
}

impl Place {
    const fn name(self) -> &'static str {
        match self {
            Self::Remote => "remote",
            Self::RemoteInterrupts => "remote-interrupts",
            Self::Local => "local",
        }
    }
}

/// Sidecores and their clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) place: Place,
    pub(super) clients: usize,
    pub(super) sidecores: usize,
    /// The delay of the stores, which are in memory.
    pub(super) delay_us: u64,
}

/// The number of cores that this thread may use.
pub(super) fn machine_cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

impl Setting {
    /// Whether each thread has a core of its own.
    pub(super) fn fits(&self, cores: usize) -> bool {
        self.clients + self.sidecores <= cores
    }

    /// The core of a client: the first one and those behind the sidecores'.
    fn client_core(&self, client: usize) -> CoreId {
        let index = if client == 0 { cores::CLIENT.0 as usize } else { self.sidecores + client };
        CoreId(index as u32)
    }
}

/// A client on a thread of its own.
struct Driver {
    jobs: Option<Sender<Work>>,
    samples: Receiver<Result<Sample>>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// A daemon that is frozen between runs, and its clients.
pub(super) struct Rack {
    /// Dropped first: the daemon sees its clients leave.
    drivers: Vec<Driver>,
    daemon: Sidecored,
}

impl Rack {
    /// Starts a daemon and connects its clients.
    ///
    /// # Errors
    /// The daemon does not start; a client does not get its devices.
    pub(super) fn start(experiment: &Experiment, setting: Setting, bytes: u64) -> Result<Self> {
        let Setting { place, clients, sidecores, delay_us } = setting;
        let number = RACKS.fetch_add(1, Ordering::Relaxed);
        let name = format!("{number}-{}-{clients}-{sidecores}-{delay_us}", place.name());
        let text = |directory: &Path| configuration(directory, setting, bytes);
        let mut daemon = experiment.start_configured(&name, &[], text)?;
        let directory = daemon.directory().to_owned();
        let start = |client| Driver::start(setting, client, directory.clone(), &experiment.clock);
        let drivers = (0..clients).map(start).collect::<Result<_>>()?;
        daemon.process.freeze()?;
        Ok(Self { drivers, daemon })
    }

    /// Ends the clients and the daemon.
    pub(super) fn end(self) -> Result<()> {
        let Self { drivers, daemon } = self;
        // A client says goodbye to a daemon that runs.
        let mut daemon = daemon;
        daemon.process.thaw()?;
        drivers.into_iter().try_for_each(Driver::end)?;
        daemon.process.end()
    }
}

/// Runs the work on all clients of a rack at the same time.
fn run(drivers: &[Driver], work: &Work) -> Result<Sample> {
    for driver in drivers {
        let jobs = driver.jobs.as_ref().context("a client has ended")?;
        jobs.send(*work).ok().context("a client died")?;
    }
    let mut sum = Sample::default();
    for driver in drivers {
        let sample = driver.samples.recv().context("a client died")??;
        let share = 1.0 / drivers.len() as f64;
        sum = Sample {
            iops: sum.iops + sample.iops,
            latency_p50_ns: sum.latency_p50_ns + sample.latency_p50_ns * share,
            latency_mean_ns: sum.latency_mean_ns + sample.latency_mean_ns * share,
            ..sum
        };
    }
    Ok(sum)
}

impl Driver {
    fn start(setting: Setting, client: usize, directory: PathBuf, clock: &Clock) -> Result<Self> {
        let (jobs, inbox) = channel::<Work>();
        let (sender, samples) = channel();
        let (core, clock) = (setting.client_core(client), clock.clone());
        let thread = std::thread::Builder::new().name(client_name(client)).spawn(move || {
            cores::pin(core)?;
            match setting.place {
                Place::Local => drive_local(&directory, client, &clock, &inbox, &sender),
                _ => drive_remote(&directory, client, &clock, &inbox, &sender),
            }
        })?;
        let driver = Self { jobs: Some(jobs), samples, thread: Some(thread) };
        // The first sample says that the client is connected.
        match driver.samples.recv() {
            Ok(connected) => {
                connected?;
                Ok(driver)
            }
            Err(_) => {
                driver.end()?;
                anyhow::bail!("a client ended before it was connected")
            }
        }
    }

    fn end(mut self) -> Result<()> {
        drop(self.jobs.take());
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))?
    }
}

fn drive_remote(
    directory: &Path,
    client: usize,
    clock: &Clock,
    inbox: &Receiver<Work>,
    samples: &Sender<Result<Sample>>,
) -> Result<()> {
    let link = Wire::Memory.client(&Cable::for_wire(Wire::Memory)?, directory)?;
    let identity = Identity { name: client_name(client).parse()?, trust: ClientTrust::off() };
    let iohost: LinkAddress = Wire::Memory.iohost()?;
    let mut clients = Clients::new(vec![(identity, link)], iohost, &[DISK])?;
    samples.send(Ok(Sample::default())).ok();
    for work in inbox {
        samples.send(clients.run(DISK, &work, clock)).ok();
    }
    Ok(())
}

fn drive_local(
    directory: &Path,
    client: usize,
    clock: &Clock,
    inbox: &Receiver<Work>,
    samples: &Sender<Result<Sample>>,
) -> Result<()> {
    let options = ClientOptions { slots: MAX_DEPTH, slot_bytes: BYTES, ..ClientOptions::default() };
    let name = device_name(DISK, &client_name(client));
    let mut client = BlkClient::connect(directory.join(format!("{name}.sock")), &options)?;
    samples.send(Ok(Sample::default())).ok();
    for work in inbox {
        let sample = load::run(client.queue(0).context("no queue")?, &work, clock);
        samples.send(sample).ok();
    }
    Ok(())
}

fn client_name(client: usize) -> String {
    format!("client{client}")
}

fn configuration(directory: &Path, setting: Setting, bytes: u64) -> Result<String> {
    let Setting { place, clients, sidecores, delay_us } = setting;
    let mut text = sidecored::head(directory);
    let names: Vec<String> = (0..sidecores).map(|index| format!("sc{index}")).collect();
    for (index, name) in names.iter().enumerate().skip(1) {
        writeln!(
            text,
            "[[sidecore]]\nname = {name:?}\ncpu = {}",
            cores::SERVER.0 as usize + index
        )?;
    }
    if place != Place::Local {
        let idle = if place == Place::Remote { "poll" } else { "interrupt" };
        text.push_str(&Wire::Memory.configuration(directory)?);
        writeln!(text, "sidecores = {names:?}\nidle = {idle:?}")?;
    }
    for client in (0..clients).map(client_name) {
        if place != Place::Local {
            writeln!(text, "[[client]]\nname = {client:?}\nlinks = [\"wire\"]")?;
            writeln!(text, "encryption = \"off\"")?;
        }
        let name = device_name(DISK, &client);
        sidecored::write_store(&mut text, &name, &DISK.store(bytes))?;
        if delay_us > 0 {
            writeln!(text, "[[store.stage]]\ntype = \"delay\"\ndelay_us = {delay_us}")?;
        }
        writeln!(text, "[[device]]\nname = {name:?}\nstore = {name:?}")?;
        if place == Place::Local {
            let socket = directory.join(format!("{name}.sock"));
            writeln!(text, "socket = {socket:?}\nidle = \"poll\"")?;
        } else {
            writeln!(text, "front_end = \"vrio\"\nclient = {client:?}")?;
        }
    }
    Ok(text)
}

impl Bench {
    /// Runs the work in rounds on each rack in turn. Returns the runs of each.
    pub(super) fn time(&mut self, racks: &mut [&mut Rack], work: &Work) -> Result<Vec<Runs>> {
        let mut runs: Vec<Runs> = racks.iter().map(|_| Runs::default()).collect();
        for _ in 0..self.plan.rounds {
            for (rack, runs) in racks.iter_mut().zip(&mut runs) {
                let Rack { drivers, daemon } = &mut **rack;
                let load = |work: &Work, _: &Clock| run(drivers, work);
                let warm_up = self.plan.warm_up;
                runs.add(self.experiment.round(&mut daemon.process, warm_up, work, load)?);
            }
        }
        Ok(runs)
    }

    /// The work of `depth` requests in flight; `is_mixed` if every other one is a write.
    pub(super) fn work(&self, depth: u16, is_mixed: bool) -> Work {
        let (bytes, duration) = (BYTES, self.plan.run);
        let blocks = self.plan.disk_bytes / u64::from(bytes);
        Work { depth, is_mixed, bytes, blocks, duration, ..Work::default() }
    }
}
