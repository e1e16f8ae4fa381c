//! Stores, operations, depths and queues: the systems in turn, between near cores.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use quanta::Clock;
use sidecore_driver::{
    BlkClient, BlkQueue, ClientOptions, Notify, NvmeClient, NvmeOptions, NvmeQueue, Queue,
};
use tempfile::TempDir;

use super::{Bench, Medium, NVME, VIRTIO};
use crate::against::{Kept, Part};
use crate::experiment::wants;
use crate::fill::{allocated_file, directory_in_memory, fill_queue};
use crate::load::{self, BLOCK_BYTES, Sample, Work};
use crate::peer::{self, Disk, Program, StorageDaemon};
use crate::process::Process;
use crate::record::Params;
use crate::runs::{
    INTERRUPTS, IOPS, KICKS, LATENCY_MEAN, LATENCY_P50, LATENCY_P99, Metric, Runs, record_ratios,
};
use crate::sidecored::{Controller, Device, FrontEnd, Sidecored, Store};
use crate::{against, stop};

const DEPTHS: [u16; 3] = [1, 32, 128];
const QUEUES: [u16; 3] = [1, 2, 4];
const MAX_QUEUES: u16 = 4;
/// The depth of the cases whose client sleeps until interrupts.
const INTERRUPT_DEPTH: u16 = 32;
/// The size of a request that fills a volume.
const FILL_BYTES: u32 = 128 << 10;

const POOL: &str = "pool";

/// The size of the store of a controller with two volumes, with room for metadata and the reserve.
pub(super) fn controller_bytes(volume_bytes: u64) -> u64 {
    2 * volume_bytes + volume_bytes / 4 + (32 << 20)
}

const METRICS: [Metric; 6] = [IOPS, LATENCY_P50, LATENCY_P99, LATENCY_MEAN, KICKS, INTERRUPTS];

/// The load of one case.
#[derive(Clone, Copy, Debug)]
struct Case {
    medium: Medium,
    work: Work,
    queues: u16,
    notify: Notify,
}

const FRONT_ENDS: [(&str, FrontEnd); 2] = [(NVME, FrontEnd::Nvme), (VIRTIO, FrontEnd::VirtioBlk)];

/// The index of this build's daemon among the programs.
const OURS: usize = 0;
/// The index of the peer, or of the other build's daemon.
const THEIRS: usize = 1;

/// One system in the comparison.
struct System {
    name: String,
    /// The index of the program that serves the system.
    program: usize,
    front_end: FrontEnd,
    socket: PathBuf,
    params: Params,
    runs: Runs,
    /// Whether the system failed in this case, which is not measured any further then.
    is_silent: bool,
}

/// The running programs.
struct Servers {
    daemon: Sidecored,
    /// The other build's.
    before: Option<Sidecored>,
    theirs: Option<StorageDaemon>,
    /// Has the peer's disk.
    _tmpfs: TempDir,
}

impl Servers {
    fn process(&mut self, program: usize) -> Option<&mut Process> {
        if program == OURS {
            return Some(&mut self.daemon.process);
        }
        let before = self.before.as_mut().map(|before| &mut before.process);
        before.or_else(|| self.theirs.as_mut().map(|theirs| &mut theirs.process))
    }

    fn end(self) -> Result<()> {
        if let Some(before) = self.before {
            before.process.end()?;
        }
        self.daemon.process.end()
    }
}

/// A connection with its queues taken out. The client must live as long as the queues are used.
enum Client {
    Blk(BlkClient, Vec<BlkQueue>),
    Nvme(Box<NvmeClient>, Vec<NvmeQueue>),
}

impl Client {
    fn connect(
        system: &System,
        queues: u16,
        slots: u16,
        slot_bytes: u32,
        notify: Notify,
    ) -> Result<Self> {
        let why = || format!("cannot use {}", system.name);
        match system.front_end {
            FrontEnd::VirtioBlk => {
                let options =
                    ClientOptions { queues, slots, slot_bytes, notify, ..ClientOptions::default() };
                let mut client = BlkClient::connect(&system.socket, &options).with_context(why)?;
                let taken = (0..queues).map_while(|index| client.take_queue(index)).collect();
                Ok(Self::Blk(client, taken))
            }
            FrontEnd::Nvme => {
                let options =
                    NvmeOptions { queues, slots, slot_bytes, notify, ..NvmeOptions::default() };
                let mut client = NvmeClient::connect(&system.socket, &options).with_context(why)?;
                let taken: Vec<NvmeQueue> =
                    (0..queues).map_while(|index| client.take_queue(index)).collect();
                ensure!(
                    taken.iter().all(NvmeQueue::has_mapped_doorbells),
                    "the doorbells are messages"
                );
                Ok(Self::Nvme(Box::new(client), taken))
            }
        }
    }

    fn run(&mut self, work: &Work, clock: &Clock) -> Result<Sample> {
        match self {
            Self::Blk(_, queues) => load::run_all(queues, work, clock),
            Self::Nvme(_, queues) => load::run_all(queues, work, clock),
        }
    }

    fn fill(&mut self, bytes: u64) -> Result<()> {
        match self {
            Self::Blk(_, queues) => fill(queues, bytes),
            Self::Nvme(_, queues) => fill(queues, bytes),
        }
    }

    fn on_huge_pages(&self) -> bool {
        match self {
            Self::Blk(client, _) => client.on_huge_pages(),
            Self::Nvme(client, _) => client.on_huge_pages(),
        }
    }
}

/// Writes the whole disk, so that each block is mapped.
fn fill<Q: Queue>(queues: &mut [Q], bytes: u64) -> Result<()> {
    fill_queue(queues.first_mut().context("no queue")?, bytes, FILL_BYTES)
}

impl System {
    fn new(
        name: &str,
        program: usize,
        front_end: FrontEnd,
        socket: PathBuf,
        params: Params,
    ) -> Self {
        Self {
            name: name.to_owned(),
            program,
            front_end,
            socket,
            params,
            runs: Runs::default(),
            is_silent: false,
        }
    }
}

impl Bench {
    pub(super) fn measure(&mut self) -> Result<()> {
        let peer = self.experiment.find_peer();
        let only = self.options.only.clone();
        for medium in Medium::ALL.into_iter().filter(|medium| wants(&only, medium)) {
            self.measure_on(medium, peer.as_ref())?;
        }
        Ok(())
    }

    /// Measures all cases on one medium. Two builds are started again after some pairs.
    fn measure_on(&mut self, medium: Medium, peer: Option<&Program>) -> Result<()> {
        let cases = self.cases(medium);
        let mut kept = Kept::default();
        for part in against::parts(&self.options.programs.common, self.plan.rounds) {
            let (mut servers, mut systems) = self.start(medium, peer, part.start)?;
            for case in &cases {
                let runs = kept.take(&case.name(), systems.len());
                for (system, runs) in systems.iter_mut().zip(runs) {
                    (system.runs, system.is_silent) = (runs, false);
                }
                self.rounds(case, &part, &mut systems, &mut servers)?;
                if part.is_last {
                    self.record_case(case, &systems);
                }
                if systems.iter().any(|system| system.is_silent)
                    && let Some(theirs) = &mut servers.theirs
                {
                    theirs.restart()?;
                }
                let runs = systems.iter_mut().map(|system| std::mem::take(&mut system.runs));
                kept.keep(&case.name(), runs);
            }
            servers.end()?;
        }
        Ok(())
    }

    fn builds(&self) -> bool {
        self.options.programs.common.against.is_some()
    }

    /// Starts the programs for the `start`-th time, frozen, with filled volumes.
    fn start(
        &self,
        medium: Medium,
        peer: Option<&Program>,
        start: usize,
    ) -> Result<(Servers, Vec<System>)> {
        let (mut daemon, mut before) = self.start_ours(medium, start)?;
        let mut systems = Vec::new();
        let wanted = |(_, front_end): &_| wants(&self.options.front_ends, front_end);
        for (name, front_end) in FRONT_ENDS.into_iter().filter(wanted) {
            let socket = daemon.socket(name);
            systems.push(System::new(name, OURS, front_end, socket, self.common_params()));
            if let Some(before) = &before {
                let (name, socket) = (against::before(name), before.socket(name));
                systems.push(System::new(&name, THEIRS, front_end, socket, self.common_params()));
            }
        }
        if medium == Medium::Volume {
            for system in &systems {
                Client::connect(system, 1, 1, FILL_BYTES, Notify::Polled)?
                    .fill(self.plan.disk_bytes)?;
            }
        }
        daemon.process.freeze()?;
        if let Some(before) = &mut before {
            before.process.freeze()?;
        }
        // The peer has no store in memory; its fastest store that keeps data is a file on tmpfs.
        let tmpfs = directory_in_memory()?;
        let mut theirs = None;
        if let Some(program) = peer {
            let started = self.start_peer(program, medium, tmpfs.path())?;
            let mut params = self.common_params();
            params.extend(started.params(program));
            let socket = started.socket.clone();
            let front_end = FrontEnd::VirtioBlk;
            systems.push(System::new(peer::NAME, THEIRS, front_end, socket, params));
            theirs = Some(started);
        }
        Ok((Servers { daemon, before, theirs, _tmpfs: tmpfs }, systems))
    }

    /// Starts this build's daemon, and the daemon of `--against` if the option is set.
    fn start_ours(&self, medium: Medium, start: usize) -> Result<(Sidecored, Option<Sidecored>)> {
        let bytes = self.plan.disk_bytes;
        let volume = |volume| Store::Volume { controller: POOL, volume, bytes };
        let stores = match medium {
            Medium::Null => [Store::Null { bytes }, Store::Shared { with: NVME }],
            Medium::Ram => [Store::Ram { bytes }, Store::Shared { with: NVME }],
            // A volume has at most one device that writes.
            Medium::Volume => [volume(NVME), volume(VIRTIO)],
        };
        let devices: Vec<Device> = FRONT_ENDS
            .into_iter()
            .zip(stores)
            .map(|((name, front_end), store)| Device {
                front_end,
                queues: MAX_QUEUES,
                ..Device::new(name, store)
            })
            .collect();
        let store = Store::Ram { bytes: controller_bytes(bytes).next_multiple_of(1 << 20) };
        let pool = [Controller { name: POOL, store, block_bytes: 1024 }];
        let controllers: &[Controller] = if medium == Medium::Volume { &pool } else { &[] };
        self.experiment.start_builds(medium.name(), start, controllers, [&devices, &devices])
    }

    fn start_peer(&self, program: &Program, medium: Medium, tmpfs: &Path) -> Result<StorageDaemon> {
        let bytes = self.plan.disk_bytes;
        let disk = if medium == Medium::Null {
            Disk::Null { bytes }
        } else {
            Disk::File { path: allocated_file(&tmpfs.join("theirs"), bytes)?, cached: true }
        };
        let name = format!("{}-{}", peer::NAME, medium.name());
        self.experiment.start_peer(program, &name, &disk, MAX_QUEUES, self.plan.trial)
    }

    fn cases(&self, medium: Medium) -> Vec<Case> {
        let blocks = self.plan.disk_bytes / u64::from(BLOCK_BYTES);
        let mut cases = Vec::new();
        for queues in QUEUES.into_iter().filter(|queues| wants(&self.options.queues, queues)) {
            for write in [false, true] {
                for depth in DEPTHS.into_iter().filter(|depth| wants(&self.options.depths, depth)) {
                    let work =
                        Work { write, depth, blocks, duration: self.plan.run, ..Work::default() };
                    cases.push(Case { medium, work, queues, notify: Notify::Polled });
                    if depth == INTERRUPT_DEPTH && queues == 1 {
                        cases.push(Case { medium, work, queues, notify: Notify::Interrupt });
                    }
                }
            }
        }
        cases
    }

    /// Runs rounds of a case, each system in turn.
    fn rounds(
        &mut self,
        case: &Case,
        part: &Part,
        systems: &mut [System],
        servers: &mut Servers,
    ) -> Result<()> {
        let (name, builds) = (case.name(), self.builds());
        for round in part.rounds.clone() {
            for turn in 0..systems.len() {
                let index = if builds { against::index(turn, round) } else { turn };
                let system = systems.get_mut(index).context("no such system")?;
                if system.is_silent {
                    continue;
                }
                let process = servers.process(system.program).context("no program")?;
                let result = self.round(case, system, process);
                stop::check()?;
                match result.with_context(|| format!("measuring {}, {name}", system.name)) {
                    // A peer that fails at some load has no number for this load.
                    Err(error) if system.program != OURS && !builds => {
                        eprintln!("  {error:#}");
                        system.is_silent = true;
                    }
                    result => result?,
                }
            }
        }
        Ok(())
    }

    /// Records the runs of all systems.
    fn record_case(&mut self, case: &Case, systems: &[System]) {
        let name = case.name();
        let mut line = format!("  {name:<26}");
        for system in systems.iter().filter(|system| !system.is_silent) {
            self.record(&name, case, system);
            line.push_str(&format!(
                "  {} {:.0} k/s",
                system.name,
                system.runs.rounds(|sample| sample.iops).median() / 1e3
            ));
        }
        eprintln!("{line}");
        if self.builds() {
            let named: Vec<_> =
                systems.iter().map(|system| (system.name.as_str(), &system.runs)).collect();
            against::record_pairs(&mut self.experiment.records, &name, &case.work, &named);
        } else if let Some((ours, others)) = systems.split_first() {
            for peer in others.iter().filter(|peer| !peer.is_silent) {
                let (ours, peer) =
                    ((ours.name.as_str(), &ours.runs), (peer.name.as_str(), &peer.runs));
                record_ratios(
                    &mut self.experiment.records,
                    &name,
                    &case.work,
                    case.is_alone(),
                    ours,
                    peer,
                );
            }
        }
    }

    fn round(&mut self, case: &Case, system: &mut System, process: &mut Process) -> Result<()> {
        process.thaw()?;
        let mut client =
            Client::connect(system, case.queues, case.work.depth, BLOCK_BYTES, case.notify)?;
        process.freeze()?;
        system.params.insert("client_huge_pages".to_owned(), client.on_huge_pages().into());
        let load = |work: &Work, clock: &Clock| client.run(work, clock);
        let run = self.experiment.round(process, self.plan.warm_up, &case.work, load)?;
        system.runs.add(run);
        process.thaw()?;
        drop(client);
        process.freeze()
    }

    fn record(&mut self, name: &str, case: &Case, system: &System) {
        for metric in METRICS.iter().filter(|metric| case.is_alone() || !metric.alone) {
            let mut params = system.runs.params(&case.work, system.params.clone());
            params.insert("block_bytes".to_owned(), case.work.bytes.into());
            params.insert("queues".to_owned(), case.queues.into());
            params.insert("interrupts".to_owned(), (case.notify == Notify::Interrupt).into());
            let (median, mut params) = system.runs.settle(metric, &case.work, params);
            // Counts of messages and interrupts do not depend on the distance of the cores; the
            // maximum shows the round that the median would hide.
            let value = if metric.unit == "1" {
                params.remove("counts");
                let all = system.runs.all().iter();
                all.map(|run| (metric.value)(&run.result, &case.work)).fold(0.0, f64::max)
            } else {
                median
            };
            self.experiment.records.measure(
                name,
                &system.name,
                metric.name,
                value,
                metric.unit,
                params,
            );
        }
        if case.notify == Notify::Interrupt {
            // A run without interrupts has no such number, and gets a huge one.
            let per_interrupt = |sample: &Sample| 1.0 / sample.interrupts_per_request.max(1e-9);
            let (median, params) = system.runs.rounds(per_interrupt).settle(system.params.clone());
            self.experiment.records.measure(
                name,
                &system.name,
                "completions_per_interrupt",
                median,
                "1",
                params,
            );
        }
    }
}

impl Case {
    fn name(&self) -> String {
        let Self { medium, work, queues, notify } = self;
        let operation = if work.write { "randwrite" } else { "randread" };
        let asleep = if *notify == Notify::Interrupt { "/interrupt" } else { "" };
        format!("{}/{operation}/qd{}/q{queues}{asleep}", medium.name(), work.depth)
    }

    /// Whether one request is in flight in all, so that a latency is measured.
    fn is_alone(&self) -> bool {
        self.work.depth == 1 && self.queues == 1
    }
}
