//! The parts of the time of one request: client, link and IOhost in one process and on one core,
//! with readings of the time stamp counter between the stages.
//!
//! All data are in that core's caches, so the stages are the work alone: a request between two
//! cores takes longer by the time in which cache lines move from one to the other. A reading costs
//! some nanoseconds, which are in the numbers of a single request in flight.

use std::fmt::Write as _;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use quanta::Clock;
use sidecore_block::{Batch, BlockChannel, BlockDevice, Geometry, NullStore, Operation, Readiness};
use sidecore_link::{LinkAddress, LinkOptions, MemoryLink};
use sidecore_linux::peer_event;
use sidecore_reactor::{CoreContext, IdleMode, Pollable as _};
use sidecore_remote::client::{Iohost, Opening, RemoteStore, Session, SessionOptions};
use sidecore_remote::export::{ClientShare, ClientSpec, Export, ExportedDevice, Load};
use sidecore_units::Nanos;
use sidecore_vrio::wire::DATA_HEADER_BYTES;
use sidecore_vrio::{ClientOptions, HostOptions, Plain};

use super::Bench;
use super::client::BUDGET;
use crate::load::{BLOCK_BYTES, Places};
use crate::process::watched;
use crate::record::{OURS, Record, Records, params};
use crate::rounds::Rounds;
use crate::{cores, requests, stop};

const DISK_BYTES: u64 = 64 << 20;
const PATIENCE: Duration = Duration::from_secs(10);

/// The stages of a request, in their order.
const STAGES: [&str; 4] =
    ["client_submits", "iohost_receives", "iohost_answers", "client_receives"];
const PREFIX: &str = "breakdown/memory/null/";
const DEPTHS: [u64; 2] = [1, 32];

impl Bench {
    /// Measures the stages of requests.
    pub(super) fn breakdown(&mut self) -> Result<()> {
        for (operation, name) in [(Operation::Read, "randread"), (Operation::Write, "randwrite")] {
            for (bytes, size) in [(512, "512"), (BLOCK_BYTES, "")] {
                for depth in DEPTHS {
                    let case = format!("{PREFIX}{name}{size}/qd{depth}");
                    if self.options.wants(&case) {
                        self.stages(&case, (operation, bytes.into(), depth))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn stages(&mut self, case: &str, work: (Operation, u64, u64)) -> Result<()> {
        let clock = self.experiment.clock.clone();
        let mut rig = Rig::new(&clock)?;
        let mut stages: Vec<Rounds> = STAGES.iter().map(|_| Rounds::new()).collect();
        let mut whole = Rounds::new();
        rig.run(work, self.plan.stages / 10)?;
        for _ in 0..self.plan.rounds {
            let (ns, waited_share) = watched(|| rig.run(work, self.plan.stages))?;
            let counts = waited_share < cores::UNDISTURBED_SHARE;
            stages.iter_mut().zip(ns).for_each(|(rounds, ns)| rounds.add(ns, counts));
            whole.add(ns.iter().sum(), counts);
        }
        let mut line = format!("  {case:<44}");
        for (metric, rounds) in STAGES.iter().copied().zip(&stages).chain([("whole", &whole)]) {
            let how = params([("how", "stamps on one core".into()), ("depth", work.2.into())]);
            let (median, params) = rounds.settle(how);
            line.push_str(&format!("  {metric} {median:.0} ns"));
            self.experiment.records.measure(case, OURS, metric, median, "ns", params);
        }
        eprintln!("{line}");
        Ok(())
    }
}

/// A client and an IOhost on this thread.
struct Rig {
    clock: Clock,
    stored_at: Arc<AtomicU64>,
    channel: Box<dyn BlockChannel>,
    _store: RemoteStore,
    session: Session<Plain>,
    export: Export<Plain>,
    origin: u64,
}

impl Rig {
    fn new(clock: &Clock) -> Result<Self> {
        let (hosts_core, clients_core) = (Rc::new(CoreContext::default()), CoreContext::default());
        let (host, client) = MemoryLink::pair(&LinkOptions::new(DATA_HEADER_BYTES), peer_event)?;
        let load = Arc::new(Load::default());
        let options = (HostOptions::default(), Plain);
        let mut export = Export::new(&hosts_core, Box::new(host), options, &load, IdleMode::Poll)?;
        let stored_at = Arc::new(AtomicU64::new(0));
        let store = Arc::new(StampedStore {
            store: NullStore::new(Geometry::new(DISK_BYTES, 512)),
            clock: clock.clone(),
            stored_at: Arc::clone(&stored_at),
        });
        let client_options = ClientOptions::default();
        let share = ClientShare::default();
        let id = client_options.client;
        let id = export.add_client(&ClientSpec { name: "client".into(), id, queues: 1, share })?;
        export.add_device(
            id,
            &ExportedDevice {
                name: "disk".into(),
                serial: "disk".to_owned(),
                store,
                read_only: false,
                write_cache: true,
                epoch: 1,
                tenure: Arc::default(),
            },
        )?;
        let iohost = Iohost::new("iohost")?;
        let mut opening = Opening::new(&iohost, "disk")?;
        let options = SessionOptions {
            client: client_options,
            address: LinkAddress::Peer(0),
            idle: IdleMode::Poll,
        };
        let mut session = Session::new(&clients_core, &iohost, Box::new(client), Plain, &options)?;
        let (begin, origin) = (Instant::now(), clock.raw());
        let store = loop {
            match opening.wait(Some(Duration::ZERO))? {
                Ok(store) => break store,
                Err(again) => opening = again,
            }
            ensure!(begin.elapsed() < PATIENCE, "the client does not get its device");
            let now = Nanos(clock.delta_as_nanos(origin, clock.raw()));
            session.poll(now, BUDGET);
            export.poll(now, BUDGET);
        };
        let channel = store.open_channel(&clients_core, DEPTHS.len() * 64)?;
        let clock = clock.clone();
        Ok(Self { clock, stored_at, channel, _store: store, session, export, origin })
    }

    /// Carries out so many requests of an operation and a size, in batches of `depth`. Returns the
    /// nanoseconds of each stage for a request.
    fn run(
        &mut self,
        (operation, bytes, depth): (Operation, u64, u64),
        count: usize,
    ) -> Result<[f64; 4]> {
        let memory = requests::memory(depth * bytes)?;
        let request = |index| requests::request(&memory, operation, index, bytes);
        let mut batch = (0..depth).map(request).collect::<Result<Batch>>()?;
        let mut completed = Batch::with_capacity(batch.len());
        let mut places = Places::new(DISK_BYTES / bytes);
        let (mut ticks, mut done) = ([0_u64; 4], 0);
        while done < count {
            stop::check()?;
            for request in &mut batch {
                request.offset_bytes = places.next_block() * bytes;
            }
            let start = self.clock.raw();
            let now = Nanos(self.clock.delta_as_nanos(self.origin, start));
            self.channel.submit(now, &mut batch);
            let submitted = self.clock.raw();
            self.export.poll(now, BUDGET);
            let answered = self.clock.raw();
            self.session.poll(now, BUDGET);
            self.channel.poll(now, &mut completed);
            let received = self.clock.raw();
            let stored = self.stored_at.load(Ordering::Relaxed);
            let stages =
                [submitted - start, stored - submitted, answered - stored, received - answered];
            ticks.iter_mut().zip(stages).for_each(|(sum, stage)| *sum += stage);
            // A control message was among the frames of the turn.
            while (completed.len() as u64) < depth {
                self.export.poll(now, BUDGET);
                self.session.poll(now, BUDGET);
                self.channel.poll(now, &mut completed);
                stop::check()?;
            }
            for request in &completed {
                request.result.context("a request failed")?;
            }
            done += completed.len();
            batch.append(&mut completed);
        }
        Ok(ticks.map(|ticks| self.clock.delta_as_nanos(0, ticks) as f64 / done as f64))
    }
}

/// The null store, with a stamp of the time when it carries requests out.
struct StampedStore {
    store: NullStore,
    clock: Clock,
    stored_at: Arc<AtomicU64>,
}

struct StampedChannel {
    channel: Box<dyn BlockChannel>,
    clock: Clock,
    stored_at: Arc<AtomicU64>,
}

impl BlockDevice for StampedStore {
    fn geometry(&self) -> Geometry {
        self.store.geometry()
    }

    fn open_channel(
        &self,
        core: &CoreContext,
        depth: usize,
    ) -> std::io::Result<Box<dyn BlockChannel>> {
        Ok(Box::new(StampedChannel {
            channel: self.store.open_channel(core, depth)?,
            clock: self.clock.clone(),
            stored_at: Arc::clone(&self.stored_at),
        }))
    }
}

impl BlockChannel for StampedChannel {
    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        self.channel.submit(now, batch);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        self.channel.poll(now, completed);
    }

    fn exchange(&mut self, now: Nanos, batch: &mut Batch, completed: &mut Batch) {
        self.channel.exchange(now, batch, completed);
        self.stored_at.store(self.clock.raw(), Ordering::Relaxed);
    }

    fn readiness(&self) -> Readiness {
        self.channel.readiness()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.channel.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.channel.wake_fd()
    }
}

/// The stages, in Markdown.
pub(super) fn table(records: &Records) -> String {
    let mut page = String::from("| ns of one request, on one core |");
    STAGES.iter().for_each(|stage| page.push_str(&format!(" {} |", stage.replace('_', " "))));
    page.push_str(" whole |\n| --- | --- | --- | --- | --- | --- |\n");
    for record in records.all() {
        let Record::Measure(measure) = record else { continue };
        if measure.metric != "whole" || !measure.case.starts_with(PREFIX) {
            continue;
        }
        let _ = write!(page, "| {} |", measure.case.trim_start_matches(PREFIX));
        for metric in STAGES.iter().copied().chain(["whole"]) {
            let found = records.find(&measure.case, OURS, metric);
            let _ = write!(page, " {:.0} |", found.map_or(0.0, |measure| measure.value));
        }
        page.push('\n');
    }
    page
}
