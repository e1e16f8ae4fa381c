//! Sessions, queues and an IOhost on sidecores that sleep, over a link through shared memory.

mod vmhost;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, Geometry, Next, Operation, Tag, dropped_tags,
};
use sidecore_block_contract::{Options, check, guest_memory, pattern, request};
use sidecore_link::{LinkAddress, MemoryLink};
use sidecore_linux::Clock;
use sidecore_memory::{GuestAddress, RegionHint};
use sidecore_reactor::{Arm, CoreContext, EventFd, IdleMode, Pollable, Polled};
use sidecore_remote::client::{Iohost, Opening, RemoteStore, Session, SessionOptions};
use sidecore_sidecore::{Handle, Sidecore, SidecoreThread, Stopped};
use sidecore_telemetry::CounterSet as _;
use sidecore_units::Nanos;
use sidecore_vrio::port::Plain;
use vmhost::{SCRATCH, TestHost, entry, link_options, session_options};

/// A hang, and no measure of speed.
const PATIENCE: Duration = Duration::from_secs(60);

/// A store whose session and IOhost run on two sidecores, until it is dropped.
struct Served {
    store: Option<RemoteStore>,
    iohost: Iohost,
    session: Option<Handle<Session<Plain>>>,
    host: Option<Handle<TestHost>>,
    threads: [SidecoreThread; 2],
}

impl Served {
    fn new(idle: IdleMode) -> Self {
        let clock = Clock::new();
        let threads = ["vm", "io"].map(|name| SidecoreThread::start(name, None, &clock).unwrap());
        let (link, client_link) = MemoryLink::pair(&link_options(), EventFd::peer_signal).unwrap();
        let host = threads[1]
            .sidecore()
            .start(move |_| Ok::<_, ()>(TestHost::new(Box::new(link), 1, &[entry(0, "disk1")])));
        let iohost = Iohost::new("io1").unwrap();
        let opening = Opening::new(&iohost, "disk1").unwrap();
        let session = {
            let iohost = iohost.clone();
            let options = SessionOptions { idle, ..session_options(LinkAddress::Peer(0)) };
            threads[0].sidecore().start(move |core| {
                Session::new(core, &iohost, Box::new(client_link), Plain, &options)
            })
        };
        let (Ok(session), Ok(host)) = (session, host) else { panic!("a unit was not started") };
        let Ok(Ok(store)) = opening.wait(Some(PATIENCE)) else { panic!("it was not attached") };
        Self { store: Some(store), iohost, session: Some(session), host: Some(host), threads }
    }

    fn sidecore(&self) -> &Sidecore {
        self.threads[0].sidecore()
    }

    fn store(&self) -> &RemoteStore {
        self.store.as_ref().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.store.take());
        let stopped = self.session.take().unwrap().stop().wait(PATIENCE);
        let host = self.host.take().unwrap().stop().wait(PATIENCE);
        if !std::thread::panicking() {
            assert_eq!((stopped, host), (Stopped::Stopped(()), Stopped::Stopped(())));
        }
    }
}

impl BlockDevice for Served {
    fn geometry(&self) -> Geometry {
        self.store().geometry()
    }

    fn open_channel(
        &self,
        core: &CoreContext,
        depth: usize,
    ) -> std::io::Result<Box<dyn BlockChannel>> {
        self.store().open_channel(core, depth)
    }
}

const ADAPTIVE: IdleMode = IdleMode::Adaptive { spin: Nanos::from_micros(20) };

#[test]
fn queues_of_other_threads_keep_the_contract() {
    for idle in [IdleMode::Interrupt, ADAPTIVE] {
        // A session stops when its queues are gone, and a test drops its queue last.
        let all = std::cell::RefCell::new(Vec::new());
        let open = || {
            let served = Arc::new(Served::new(idle));
            all.borrow_mut().push(Arc::clone(&served));
            served as Arc<dyn BlockDevice>
        };
        check(&open, &Options { depth: 8, ..Options::default() });
    }
    assert_eq!(dropped_tags(), 0);
}

/// A queue that writes and reads blocks, one after the other, and sleeps meanwhile.
struct Guest {
    channel: Box<dyn BlockChannel>,
    batch: Batch,
    completed: Batch,
    memory: sidecore_memory::GuestMemory,
    base: u64,
    left: u64,
    done: Option<Sender<bool>>,
}

impl Guest {
    const BLOCKS: u64 = 300;

    fn new(store: &dyn BlockDevice, core: &CoreContext, base: u64, done: Sender<bool>) -> Self {
        Self {
            channel: store.open_channel(core, 4).unwrap(),
            batch: Batch::new(),
            completed: Batch::new(),
            memory: guest_memory(),
            base,
            left: 2 * Self::BLOCKS,
            done: Some(done),
        }
    }

    /// The next request: a write of a block, then the read of it.
    fn submit(&mut self) {
        let block = self.left / 2;
        let writes = self.left.is_multiple_of(2);
        let bytes = if writes { pattern(self.base + block, 4096) } else { vec![0; 4096] };
        self.memory.write_slice(GuestAddress(SCRATCH), &bytes, &mut RegionHint::default()).unwrap();
        let operation = if writes { Operation::Write } else { Operation::Read };
        let offset = self.base + (block + u64::from(!writes)) * 4096;
        let mut request = request(&self.memory, operation, offset, &[(SCRATCH, 4096)]);
        request.tag = Some(Tag::from_bits(1));
        self.batch.push(request);
    }
}

impl Pollable for Guest {
    fn poll(&mut self, now: Nanos, _budget: usize) -> Polled {
        self.channel.exchange(now, &mut self.batch, &mut self.completed);
        if let Some(mut request) = self.completed.pop() {
            request.tag.take().map(Tag::into_bits);
            let mut bytes = [0; 4096];
            self.memory
                .read_slice(GuestAddress(SCRATCH), &mut bytes, &mut RegionHint::default())
                .unwrap();
            let block = (request.offset_bytes - self.base) / 4096;
            let is_good =
                request.result.is_ok() && bytes[..] == pattern(self.base + block, 4096)[..];
            self.left -= 1;
            if !is_good || self.left == 0 {
                let _ = self.done.take().unwrap().send(is_good);
                return Polled::Finished;
            }
        } else if self.channel.readiness().in_flight > 0 {
            return Polled::Idle;
        }
        self.submit();
        self.channel.submit(now, &mut self.batch);
        Polled::Busy(1)
    }

    fn idle_mode(&self) -> IdleMode {
        IdleMode::Interrupt
    }

    fn arm(&mut self) -> Arm {
        match self.channel.readiness().next {
            Next::Now => Arm::CannotSleep,
            _ => Arm::Armed,
        }
    }

    fn disarm(&mut self) {}

    fn wake_fds(&self, watch: &mut dyn FnMut(BorrowedFd<'_>)) {
        if let Some(fd) = self.channel.wake_fd() {
            watch(fd);
        }
    }

    fn on_wake(&mut self) {}

    fn deadline(&self) -> Option<Nanos> {
        self.channel.readiness().next.deadline()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.channel.waits_since()
    }

    fn finish(self: Box<Self>) {}
}

#[test]
fn guests_on_both_sidecores_sleep_until_their_requests_come_back() {
    for idle in [IdleMode::Interrupt, ADAPTIVE, IdleMode::Poll] {
        let served = Arc::new(Served::new(idle));
        let other = SidecoreThread::start("vm2", None, &Clock::new()).unwrap();
        let (done, over) = channel();
        for (index, sidecore) in
            [served.sidecore(), served.sidecore(), other.sidecore()].into_iter().enumerate()
        {
            let (store, done) = (Arc::clone(&served), done.clone());
            let base = index as u64 * (1_300 << 10);
            let guest =
                sidecore.start(move |core| Ok::<_, ()>(Guest::new(&*store, core, base, done)));
            assert!(guest.is_ok());
        }
        for _ in 0..3 {
            assert_eq!(over.recv_timeout(PATIENCE), Ok(true), "{idle:?}");
        }
        // Units are gone when their sidecores have answered once more.
        other.sidecore().ask(|_| ()).unwrap();
        served.sidecore().ask(|_| ()).unwrap();
        let counts = served.iohost.stats().counts();
        assert_eq!(counts.local_requests, 4 * Guest::BLOCKS, "{counts:?}");
        assert_eq!(counts.handed_over, 2 * Guest::BLOCKS, "{counts:?}");
        assert!(counts.wakes > 0);
        drop(other);
    }
    assert_eq!(dropped_tags(), 0);
}
