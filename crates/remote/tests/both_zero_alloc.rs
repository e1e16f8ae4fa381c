//! Requests allocate nothing at the client and at the IOhost, sealed or not, changes of keys
//! included, once the session is set up.

mod common;
mod vmhost;

use std::rc::Rc;
use std::sync::Arc;

use sidecore_block::{Batch, BlockDevice as _, Geometry, Operation, RamStore, Tag};
use sidecore_block_contract::{guest_memory, request};
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_link::{Faults, LinkAddress, Network};
use sidecore_reactor::{CoreContext, IdleMode, Pollable as _};
use sidecore_remote::client::{Iohost, Opening, RemoteStore, Session};
use sidecore_remote::export::{ClientShare, ClientSpec, Export, Load};
use sidecore_trust::{Admission, ClientTrust, HostTrust, Invitation, PrivateKey};
use sidecore_units::Nanos;
use sidecore_vrio::handshake::{ClientHandshake, HostHandshake};
use sidecore_vrio::{HostOptions, Plain};
use vmhost::{IOHOST, SCRATCH, STEP, VMHOST};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const REQUESTS: usize = 100_000;
/// Rings, tables and keys have their sizes afterwards.
const WARM_UP: usize = 20_000;
const DEPTH: usize = 16;
/// So that keys change often while requests are counted.
const FRAMES_PER_KEY: u64 = 5_000;

/// A client and an IOhost. tests/steering.rs has the same for requests that helpers execute.
struct Both<C: ClientHandshake, H: HostHandshake> {
    now: Nanos,
    core: CoreContext,
    iohost: Iohost,
    session: Session<C>,
    export: Export<H>,
}

impl<C: ClientHandshake + 'static, H: HostHandshake + 'static> Both<C, H> {
    fn new(id: [u8; 16], client: C, host: H) -> Self {
        let network = Network::new(7, Faults::default());
        let link = || network.link(IOHOST, &common::link_options()).unwrap();
        let options = HostOptions { incarnation: 5, secret: [5, 6], ..HostOptions::default() };
        let load = Arc::new(Load::default());
        let (link, handshake) = (Box::new(link()), (options, host));
        let mut export =
            Export::new(&Rc::default(), link, handshake, &load, IdleMode::Poll).unwrap();
        let spec = ClientSpec { name: "a".into(), id, queues: 1, share: ClientShare::default() };
        let name = export.add_client(&spec).unwrap();
        for disk in ["disk1", "disk2"] {
            let store = RamStore::new(Geometry::new(4 << 20, 512)).unwrap();
            export.add_device(name, &common::exported(disk, Arc::new(store))).unwrap();
        }
        let (core, iohost) = (CoreContext::default(), Iohost::new("io1").unwrap());
        let mut options = vmhost::session_options(LinkAddress::Ethernet(IOHOST));
        options.client.client = id;
        let link = Box::new(network.link(VMHOST, &vmhost::link_options()).unwrap());
        let session = Session::new(&core, &iohost, link, client, &options).unwrap();
        Self { now: Nanos::from_millis(1), core, iohost, session, export }
    }

    /// Polls all units. Returns their allocations.
    fn step(&mut self) -> u64 {
        let before = allocations();
        self.session.poll(self.now, 32);
        self.export.poll(self.now, 32);
        self.now = self.now.after(STEP);
        allocations() - before
    }

    fn open(&mut self, name: &str) -> RemoteStore {
        let opening = Opening::new(&self.iohost, name).unwrap();
        let end = self.now.after(Nanos::from_millis(10_000));
        while opening.status().entry.is_none() || opening.status().waiting.is_some() {
            assert!(self.now < end, "{name} is not opened");
            self.step();
        }
        let Ok(Ok(store)) = opening.wait(Some(std::time::Duration::ZERO)) else {
            panic!("{name} is not opened");
        };
        store
    }

    /// Runs requests, and returns the allocations of those after the warm-up.
    fn run(mut self) -> u64 {
        let memory = guest_memory();
        let stores = ["disk1", "disk2"].map(|name| self.open(name));
        let mut channels: Vec<_> =
            stores.iter().map(|store| store.open_channel(&self.core, DEPTH).unwrap()).collect();
        let mut batches: [Batch; 2] = [0, 1].map(|_| {
            let made = (0..DEPTH as u64).map(|index| {
                let at = index * 65_536;
                let data = [(SCRATCH, if index % 8 == 3 { 65_536 } else { 4_096 })];
                let mut made = match index % 4 {
                    0 => request(&memory, Operation::Write, at, &data),
                    1 if index == 5 => request(&memory, Operation::Flush, 0, &[]),
                    _ => request(&memory, Operation::Read, at, &data),
                };
                made.tag = Some(Tag::from_bits(index));
                made
            });
            made.collect()
        });
        let mut completed = Batch::with_capacity(DEPTH);
        let (mut done, mut counted) = (0, 0);
        while done < WARM_UP + REQUESTS {
            let is_counted = done >= WARM_UP;
            let before = allocations();
            for (channel, batch) in channels.iter_mut().zip(&mut batches) {
                channel.exchange(self.now, batch, &mut completed);
                assert!(completed.iter().all(|request| request.result == Ok(())));
                done += completed.len();
                batch.append(&mut completed);
            }
            let own = allocations() - before + self.step();
            counted += if is_counted { own } else { 0 };
        }
        let executed = self.export.status().steering.executed_here;
        assert!(executed >= (WARM_UP + REQUESTS) as u64, "{executed} requests were executed");
        for (channel, batch) in channels.iter_mut().zip(&mut batches) {
            while channel.readiness().in_flight > 0 {
                channel.poll(self.now, batch);
                self.step();
            }
            for mut request in batch.drain(..) {
                request.tag.take().map(Tag::into_bits);
            }
        }
        counted
    }
}

#[test]
fn requests_without_a_seal() {
    assert_eq!(Both::new(vmhost::CLIENT, Plain, Plain).run(), 0);
}

#[test]
fn sealed_requests() {
    let (iohost, key) = (PrivateKey::generate().unwrap(), PrivateKey::generate().unwrap());
    let client = "a".parse().unwrap();
    let admission = Admission::Key(key.public());
    let invitation = Invitation { client, iohost: iohost.public(), key };
    let trust = ClientTrust::invited(&invitation).frames_per_key(FRAMES_PER_KEY);
    let host = HostTrust::new(Some(iohost), vec![(client, admission)]);
    let host = host.frames_per_key(FRAMES_PER_KEY);
    assert_eq!(Both::new(client.to_wire(), trust, host).run(), 0);
}
