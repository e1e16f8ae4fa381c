//! A client, its IOhost and the link between them in one process and on one core, with readings of
//! the time stamp counter between the stages of their requests.

use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use quanta::Clock;
use sidecore_block::{Batch, BlockChannel, BlockDevice, Geometry, Operation, Readiness};
use sidecore_link::{Link, LinkAddress, LinkOptions, MemoryLink};
use sidecore_linux::peer_event;
use sidecore_reactor::{CoreContext, IdleMode, Pollable as _};
use sidecore_remote::client::{Iohost, Opening, RemoteStore, Session, SessionOptions};
use sidecore_remote::export::{
    ClientShare, ClientSpec, Export, ExportedDevice, Helper, Load, helper,
};
use sidecore_units::Nanos;
use sidecore_vrio::wire::DATA_HEADER_BYTES;
use sidecore_vrio::{ClientOptions, HostOptions, Plain};

use super::client::BUDGET;
use crate::load::Places;
use crate::{requests, stop};

const PATIENCE: Duration = Duration::from_secs(10);
/// The most requests in flight.
const DEPTH: usize = 128;
/// A load at which the IOhost's first sidecore gives all requests to the helper.
const OVERLOAD: u32 = 1 << 20;

/// The sidecore of the IOhost that executes the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Execution {
    /// The one that polls the link.
    Here,
    /// Another one.
    OnHelper,
}

/// The nanoseconds that a request takes in each stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Stages {
    /// The client sends the request.
    pub(crate) client_submits: f64,
    /// The IOhost takes its frames, and the store or the helper gets it.
    pub(crate) iohost_receives: f64,
    /// The helper executes it.
    pub(crate) helper: f64,
    /// The IOhost sends the answer.
    pub(crate) iohost_answers: f64,
    /// The client takes the answer.
    pub(crate) client_receives: f64,
}

/// A client and an IOhost on this thread.
pub(crate) struct Rig {
    clock: Clock,
    stored_at: Arc<AtomicU64>,
    capacity_bytes: u64,
    channel: Box<dyn BlockChannel>,
    _store: RemoteStore,
    session: Session<Plain>,
    export: Export<Plain>,
    helper: Option<Helper>,
    origin: u64,
}

impl Rig {
    /// Connects a client to an IOhost that serves `below`.
    ///
    /// # Errors
    /// The client does not get its device; the kernel refuses what the parts need.
    pub(crate) fn new(
        clock: &Clock,
        below: Arc<dyn BlockDevice>,
        execution: Execution,
    ) -> Result<Self> {
        let (host, client) = MemoryLink::pair(&LinkOptions::new(DATA_HEADER_BYTES), peer_event)?;
        let stored_at = Arc::new(AtomicU64::new(0));
        let capacity_bytes = below.geometry().capacity_bytes;
        let store = Arc::new(StampedStore {
            store: below,
            clock: clock.clone(),
            stored_at: Arc::clone(&stored_at),
        });
        let client_options = ClientOptions::default();
        let (mut export, helper) = serve(Box::new(host), client_options.client, store, execution)?;
        let iohost = Iohost::new("iohost")?;
        let mut opening = Opening::new(&iohost, "disk")?;
        let options = SessionOptions {
            client: client_options,
            address: LinkAddress::Peer(0),
            idle: IdleMode::Poll,
        };
        let core = CoreContext::default();
        let mut session = Session::new(&core, &iohost, Box::new(client), Plain, &options)?;
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
        let channel = store.open_channel(&core, DEPTH)?;
        let clock = clock.clone();
        let _store = store;
        Ok(Self {
            clock,
            stored_at,
            capacity_bytes,
            channel,
            _store,
            session,
            export,
            helper,
            origin,
        })
    }

    /// Carries out so many requests of an operation and a size, in batches of `depth`. Returns the
    /// nanoseconds of each stage for a request.
    ///
    /// # Errors
    /// A request fails; an interrupt.
    pub(crate) fn run(
        &mut self,
        (operation, bytes, depth): (Operation, u64, u64),
        count: usize,
    ) -> Result<Stages> {
        let memory = requests::memory(depth * bytes)?;
        let request = |index| requests::request(&memory, operation, index, bytes);
        let mut batch = (0..depth).map(request).collect::<Result<Batch>>()?;
        let mut completed = Batch::with_capacity(batch.len());
        let mut places = Places::new(self.capacity_bytes / bytes);
        let (mut ticks, mut done) = ([0_u64; 5], 0);
        while done < count {
            stop::check()?;
            for request in &mut batch {
                request.offset_bytes = places.next_block() * bytes;
            }
            let start = self.clock.raw();
            let now = Nanos(self.clock.delta_as_nanos(self.origin, start));
            self.channel.submit(now, &mut batch);
            ticks[0] += self.clock.raw() - start;
            // More than one turn if the store needs several polls, or if a control message was
            // among the frames.
            while (completed.len() as u64) < depth {
                self.turn(now, &mut ticks, &mut completed);
                stop::check()?;
            }
            for request in &completed {
                request.result.context("a request failed")?;
            }
            done += completed.len();
            batch.append(&mut completed);
        }
        let ns = ticks.map(|ticks| self.clock.delta_as_nanos(0, ticks) as f64 / done as f64);
        let [client_submits, iohost_receives, helper, iohost_answers, client_receives] = ns;
        Ok(Stages { client_submits, iohost_receives, helper, iohost_answers, client_receives })
    }

    /// Polls the IOhost and then the client.
    fn turn(&mut self, now: Nanos, ticks: &mut [u64; 5], completed: &mut Batch) {
        let submitted = self.clock.raw();
        self.export.poll(now, BUDGET);
        let (mut received, mut executed) = (self.clock.raw(), 0);
        let mut answered = received;
        if let Some(helper) = &mut self.helper {
            helper.poll(now, BUDGET);
            let polled = self.clock.raw();
            executed = polled - received;
            self.export.poll(now, BUDGET);
            answered = self.clock.raw() - executed;
        } else {
            received = self.stored_at.load(Ordering::Relaxed).clamp(submitted, answered);
        }
        let answering = self.clock.raw();
        self.session.poll(now, BUDGET);
        self.channel.poll(now, completed);
        let stages =
            [received - submitted, executed, answered - received, self.clock.raw() - answering];
        ticks[1..].iter_mut().zip(stages).for_each(|(sum, stage)| *sum += stage);
    }
}

/// The IOhost of a client with one disk.
fn serve(
    link: Box<dyn Link>,
    client: [u8; 16],
    store: Arc<dyn BlockDevice>,
    execution: Execution,
) -> Result<(Export<Plain>, Option<Helper>)> {
    let (core, load) = (Rc::new(CoreContext::default()), Arc::new(Load::default()));
    let options = (HostOptions::default(), Plain);
    let mut export = Export::new(&core, link, options, &load, IdleMode::Poll)?;
    let mut helpers = None;
    if execution == Execution::OnHelper {
        load.add(OVERLOAD);
        let (end, seed) = helper(&Arc::new(Load::default()))?;
        export.add_helper(end)?;
        helpers = Some(Helper::new(&core, seed, IdleMode::Poll)?);
    }
    let share = ClientShare::default();
    let spec = ClientSpec { name: "client".into(), id: client, queues: 1, share };
    let id = export.add_client(&spec)?;
    let device = ExportedDevice {
        name: "disk".into(),
        serial: "disk".to_owned(),
        store,
        read_only: false,
        write_cache: true,
        epoch: 1,
        tenure: Arc::default(),
    };
    export.add_device(id, &device)?;
    Ok((export, helpers))
}

/// A store with a stamp of the time when it last carried requests out.
struct StampedStore {
    store: Arc<dyn BlockDevice>,
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
