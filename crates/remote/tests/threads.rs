//! Units on threads that sleep: a frame wakes the IOhost, a batch its helper, a result the IOhost.

mod common;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{TestClient, TestStore, client_id, device_name, exported, pattern, request};
use sidecore_block::{Batch, BlockChannel, BlockDevice, Geometry, Next, Operation, Readiness};
use sidecore_link::{LinkAddress, LinkOptions, MemoryLink};
use sidecore_linux::{Clock, peer_event};
use sidecore_reactor::{CoreContext, EventFd, IdleMode};
use sidecore_remote::export::{ClientShare, ClientSpec, Export, Helper, Load, helper};
use sidecore_sidecore::{SidecoreThread, Stopped};
use sidecore_units::Nanos;
use sidecore_vrio::wire::DATA_HEADER_BYTES;
use sidecore_vrio::{ClientOptions, HostOptions, Plain, Timing};

const PATIENCE: Duration = Duration::from_secs(60);

/// The timers of a session that lasts however long the machine keeps a thread from running: the
/// next one would begin when the store has nothing of it.
fn lasting() -> Timing {
    Timing { dead_after: Nanos::from_millis(600_000), ..Timing::default() }
}

/// Completes requests when it is told to, and sleeps until then.
struct Patient(Arc<EventFd>);

impl BlockDevice for Patient {
    fn geometry(&self) -> Geometry {
        Geometry::new(1 << 20, 512)
    }

    fn open_channel(
        &self,
        _core: &CoreContext,
        _depth: usize,
    ) -> io::Result<Box<dyn BlockChannel>> {
        Ok(Box::new(PatientChannel { event: Arc::clone(&self.0), held: Batch::new() }))
    }
}

struct PatientChannel {
    event: Arc<EventFd>,
    held: Batch,
}

impl BlockChannel for PatientChannel {
    fn submit(&mut self, _now: Nanos, batch: &mut Batch) {
        self.held.append(batch);
    }

    fn poll(&mut self, _now: Nanos, completed: &mut Batch) {
        if !self.held.is_empty() && self.event.drain() > 0 {
            completed.append(&mut self.held);
        }
    }

    fn readiness(&self) -> Readiness {
        Readiness { in_flight: self.held.len(), next: Next::OnWake }
    }

    fn waits_since(&self) -> Option<Nanos> {
        None
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }
}

fn run(client: &mut TestClient, clock: &Clock, until: impl Fn(&TestClient) -> bool) {
    let begin = Instant::now();
    while !until(client) {
        assert!(begin.elapsed() < PATIENCE, "it does not happen");
        client.poll(clock.now());
        std::thread::yield_now();
    }
}

#[test]
fn sleeping_sidecores_are_woken_by_requests_and_by_results() {
    let clock = Clock::new();
    let threads = ["here", "there"].map(|name| SidecoreThread::start(name, None, &clock).unwrap());
    let options = LinkOptions {
        receive_frames: 64,
        transmit_frames: 64,
        ..LinkOptions::new(DATA_HEADER_BYTES)
    };
    let (host, client) = MemoryLink::pair(&options, peer_event).unwrap();
    let (end, seed) = helper(&Arc::default()).unwrap();
    let mode = IdleMode::Interrupt;
    let started = threads[1].sidecore().start(move |core| Helper::new(core, seed, mode));
    let helper = started.unwrap_or_else(|_| panic!("the helper starts"));
    let load = Arc::new(Load::default());
    let started = threads[0].sidecore().start(move |core| {
        let link = Box::new(host);
        let mut export = Export::new(core, link, (HostOptions::default(), Plain), &load, mode)?;
        export.add_helper(end)?;
        Ok::<_, sidecore_remote::export::ExportError>(export)
    });
    let export = started.unwrap_or_else(|_| panic!("the unit starts"));
    let event = Arc::new(EventFd::new().unwrap());
    let slow = exported("slow", Arc::new(Patient(Arc::clone(&event))));
    let store = TestStore::new();
    let quick = exported("quick", Arc::new(store.clone()));
    let added = export.ask(move |export| {
        let share = ClientShare::default();
        let spec = ClientSpec { name: "client".into(), id: client_id(1), queues: 1, share };
        let id = export.add_client(&spec).unwrap();
        (export.add_device(id, &slow).unwrap(), export.add_device(id, &quick).unwrap())
    });
    assert_eq!(added.unwrap(), Some((0, 1)));
    let options =
        ClientOptions { receive_frames: 64, timing: lasting(), ..ClientOptions::default() };
    let mut client = TestClient::on(Box::new(client), LinkAddress::Peer(0), 1, options);
    let slow = client.client.open(&device_name("slow")).unwrap();
    let quick = client.client.open(&device_name("quick")).unwrap();
    run(&mut client, &clock, |client| {
        client.client.is_ready(slow) && client.client.is_ready(quick)
    });
    for round in 0..50_u8 {
        // A request that does not end loads the sidecore that polls the link.
        event.drain();
        client.client.submit(0, slow, request(Operation::Read, 0, 4096)).unwrap();
        let bytes = pattern(round, 4096);
        client.fill(1, &bytes);
        client.client.submit(1, quick, request(Operation::Write, 0, 4096)).unwrap();
        run(&mut client, &clock, |client| client.completed.len() == 1);
        assert_eq!(client.take(1), Some(Ok(())));
        assert!(store.get(|disk| disk.bytes[..4096] == bytes));
        // A read that the client has asked for again is executed again, and ends like the first.
        run(&mut client, &clock, |client| {
            event.signal();
            client.completed.len() == 1
        });
        assert_eq!(client.take(0), Some(Ok(())));
    }
    let status = export.ask(|export| export.status()).unwrap().unwrap();
    assert!(status.steering.executed_here >= 50, "{:?}", status.steering);
    assert!(status.steering.handed_over >= 50, "{:?}", status.steering);
    // A repeated read may be with the store still.
    event.signal();
    assert_eq!(export.stop().wait(PATIENCE), Stopped::Stopped(()));
    let begin = Instant::now();
    while helper.ask(|_| ()).unwrap().is_some() {
        assert!(begin.elapsed() < PATIENCE, "the helper ends with its unit");
        std::thread::yield_now();
    }
    assert_eq!(store.get(|disk| disk.channels), 0);
}
