//! A session that moves between two links to one IOhost, which lives.

mod common;
mod vmhost;

use std::sync::Arc;
use std::time::Duration;

use common::{TestStore, exported, iohost_on};
use sidecore_block::{Operation, Tag};
use sidecore_block_contract::pattern;
use sidecore_link::{EthernetAddress, Faults, LinkAddress, Network};
use sidecore_reactor::Pollable as _;
use sidecore_remote::client::{MoveError, Moved};
use sidecore_remote::export::{ClientShare, ClientSpec, Export, ExportedDevice};
use sidecore_units::Nanos;
use sidecore_vrio::{Plain, ServerOptions};
use vmhost::{CLIENT, IOHOST, Rig, VMHOST, link_options, session_options};

/// The IOhost's address on the second link.
const SECOND: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 3]);
const BLOCK: u64 = 4096;
/// Blocks that are written and read, each by one request at a time.
const BLOCKS: usize = 16;
const INCARNATION: u64 = 100;

/// A session, and the IOhost's units at both links.
struct Pair {
    rig: Rig,
    second: Network,
    units: Vec<Export<Plain>>,
    store: TestStore,
}

impl Pair {
    fn new(seed: u64, faults: Faults) -> Self {
        let mut rig = Rig::new(seed, faults, &[]);
        // Its address is for a unit below.
        rig.host = None;
        let second = Network::new(seed ^ 0xff, faults);
        let store = TestStore::new();
        // Both units have one tenure.
        let device = exported("disk1", Arc::new(store.clone()));
        let units = [(&rig.network, IOHOST), (&second, SECOND)];
        let units = units.map(|(network, address)| unit(network, address, &device)).into();
        let link = Box::new(second.link(VMHOST, &link_options()).unwrap());
        let options = session_options(LinkAddress::Ethernet(IOHOST));
        rig.session.add_second(link, LinkAddress::Ethernet(SECOND), &options).unwrap();
        Self { rig, second, units, store }
    }

    fn step(&mut self) {
        for unit in &mut self.units {
            unit.poll(self.rig.now, 32);
        }
        self.rig.step();
    }

    fn run_until(&mut self, what: &str, mut until: impl FnMut(&mut Self) -> bool) {
        let end = self.rig.now.after(Nanos::from_millis(20_000));
        while !until(self) {
            assert!(self.rig.now < end, "{what}: not within 20 s");
            self.step();
        }
    }

    fn open(&mut self) {
        let opening = sidecore_remote::client::Opening::new(&self.rig.iohost, "disk1").unwrap();
        self.run_until("open", |_| {
            let status = opening.status();
            status.entry.is_some() && status.waiting.is_none()
        });
        let Ok(Ok(store)) = opening.wait(Some(Duration::ZERO)) else { panic!("not opened") };
        self.rig.stores.push(store);
        self.rig.add_queue(0, true, 32);
    }

    fn move_to(&mut self, to_second: bool) -> Moved {
        let moved = self.rig.iohost.begin_move(to_second);
        let mut outcome = None;
        self.run_until("a move", |_| {
            outcome = moved.try_recv().ok();
            outcome.is_some()
        });
        outcome.unwrap()
    }

    fn submit(&mut self, block: usize, operation: Operation) {
        let (offset, at) = (block as u64 * BLOCK, block as u64 * BLOCK);
        let request = self.rig.request(0, block as u64, operation, (offset, BLOCK), at);
        self.rig.queues[0].batch.push(request);
    }

    /// The blocks whose requests have ended.
    fn ended(&mut self) -> Vec<(usize, Operation)> {
        let completed = std::mem::take(&mut self.rig.queues[0].completed);
        let end = |mut request: Box<sidecore_block::BlockRequest>| {
            assert_eq!(request.result, Ok(()));
            let block = request.tag.take().map(Tag::into_bits).unwrap() as usize;
            (block, request.operation)
        };
        completed.into_iter().map(end).collect()
    }

    fn write(&mut self, block: usize, seed: u64) {
        self.rig.poke(0, block as u64 * BLOCK, &pattern(seed, BLOCK as usize));
        self.submit(block, Operation::Write);
        self.run_until("a write", |pair| !pair.ended().is_empty());
    }
}

/// A unit of the IOhost.
fn unit(network: &Network, address: EthernetAddress, device: &ExportedDevice) -> Export<Plain> {
    let link = Box::new(network.link(address, &link_options()).unwrap());
    let (mut export, _) = iohost_on(link, INCARNATION, 0, ServerOptions::default());
    let share = ClientShare::default();
    let spec = ClientSpec { name: "client".into(), id: CLIENT, queues: 1, share };
    let client = export.add_client(&spec).unwrap();
    export.add_device(client, device).unwrap();
    *export
}

/// Moves at random times, with requests at the IOhost and on the way, against a model.
fn moves_under_load(seed: u64, faults: Faults, takes: Nanos) {
    let mut pair = Pair::new(seed, faults);
    pair.open();
    let mut random = seed;
    let mut draw = |below: u64| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (random >> 33) % below
    };
    // The last write of each block, and whether a request is on its way.
    let mut last = [0_u64; BLOCKS];
    let mut is_busy = [false; BLOCKS];
    let (mut written, mut checked, mut with_requests) = (0_u64, 0, 0);
    let mut pauses = Vec::new();
    let mut moving = None;
    for moves in 1..=30_u64 {
        let mut left = 200 + draw(2_000);
        while left > 0 || moving.is_some() {
            left = left.saturating_sub(1);
            // A slow request of the former session may end after later ones of the next session.
            if draw(100) == 0 {
                let takes = if draw(2) == 0 { Nanos::ZERO } else { takes };
                pair.store.set(|disk| disk.takes = takes);
            }
            let block = draw(BLOCKS as u64) as usize;
            if !std::mem::replace(&mut is_busy[block], true) {
                let at = block as u64 * BLOCK;
                if draw(2) == 0 {
                    written += 1;
                    last[block] = written;
                    pair.rig.poke(0, at, &pattern(written, BLOCK as usize));
                    pair.submit(block, Operation::Write);
                } else {
                    pair.rig.poke(0, at, &[0xa5; BLOCK as usize]);
                    pair.submit(block, Operation::Read);
                }
            }
            pair.step();
            for (block, operation) in pair.ended() {
                is_busy[block] = false;
                if operation == Operation::Read && last[block] > 0 {
                    let read = pair.rig.peek(0, block as u64 * BLOCK, BLOCK as usize);
                    let wanted = pattern(last[block], BLOCK as usize);
                    assert!(read == wanted, "seed {seed}, move {moves}, block {block}");
                    checked += 1;
                }
            }
            let answer = moving
                .as_ref()
                .and_then(|moving: &std::sync::mpsc::Receiver<Moved>| moving.try_recv().ok());
            if let Some(moved) = answer {
                pauses.push(moved.unwrap());
                moving = None;
            }
        }
        with_requests += u64::from(pair.rig.session.report().in_flight > 0);
        moving = Some(pair.rig.iohost.begin_move(moves % 2 == 1));
    }
    pauses.sort();
    let (median, longest) = (pauses[pauses.len() / 2], pauses[pauses.len() - 1]);
    println!(
        "seed {seed}: {written} writes, {checked} checked reads, {with_requests} moves of 30 with \
         requests; pause {median:?}, longest {longest:?}"
    );
    assert!(with_requests > 20 && checked > 200, "{with_requests} {checked}");
    pair.run_until("the last requests", |pair| {
        pair.ended();
        pair.rig.session.report().in_flight == 0
    });
}

#[test]
fn every_answered_write_is_read_on_the_link_that_a_session_moved_to() {
    let bad = Faults { lost: 20_000, doubled: 20_000, overtaken: 100_000, ..Faults::default() };
    for (seed, faults, takes_us) in [
        (61, Faults::default(), 0),
        (62, Faults::default(), 300),
        (63, bad, 0),
        (64, bad, 300),
        (65, bad, 2_000),
    ] {
        moves_under_load(seed, faults, Nanos::from_micros(takes_us));
    }
}

#[test]
fn a_session_goes_back_if_the_other_link_has_no_iohost() {
    let mut pair = Pair::new(66, Faults::default());
    pair.open();
    pair.write(0, 1);
    // Of the second link.
    pair.units.truncate(1);
    let begun = pair.rig.now;
    assert_eq!(pair.move_to(true), Err(MoveError::NoAnswer));
    let took = pair.rig.now.since(begun);
    assert!(took > Nanos::from_millis(1_900) && took < Nanos::from_millis(2_500), "{took:?}");
    assert!(!pair.rig.session.report().is_on_second);
    pair.write(0, 2);
    // And again: it was no state that remains.
    assert_eq!(pair.move_to(true), Err(MoveError::NoAnswer));
    pair.write(0, 3);
}

#[test]
fn a_move_is_refused_with_its_reason() {
    let mut pair = Pair::new(67, Faults::default());
    assert_eq!(pair.move_to(true), Err(MoveError::NoSession));
    pair.open();
    assert_eq!(pair.move_to(false), Ok(Duration::ZERO));
    let first = pair.rig.iohost.begin_move(true);
    assert_eq!(pair.move_to(false), Err(MoveError::Moves));
    pair.run_until("the first move", |_| matches!(first.try_recv(), Ok(Ok(_))));
    assert!(pair.rig.session.report().is_on_second);
    pair.write(1, 4);

    let mut rig = Rig::with_disk(68, Faults::default());
    let moved = rig.iohost.begin_move(true);
    rig.run_for(Nanos::from_millis(1));
    assert_eq!(moved.try_recv(), Ok(Err(MoveError::OneLink)));
}

#[test]
fn an_iohost_that_dies_in_a_move_is_looked_for_on_both_links() {
    let mut pair = Pair::new(69, Faults::default());
    pair.open();
    pair.write(0, 1);
    pair.units.clear();
    assert_eq!(pair.move_to(true), Err(MoveError::Away));
    // It comes back, on the first link.
    let device = exported("disk1", Arc::new(pair.store.clone()));
    pair.units.push(unit(&pair.rig.network, IOHOST, &device));
    pair.write(0, 2);
    let second = unit(&pair.second, SECOND, &device);
    pair.units.push(second);
    assert!(pair.move_to(true).is_ok());
}
