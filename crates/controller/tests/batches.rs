//! Batches that do not fit: into the function's own depth, or into a store that accepts fewer
//! requests than it should. Each request is translated once, wherever it is queued.

mod common;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use sidecore_block::{
    Batch, BlockChannel, BlockDevice, Geometry, Operation, RamStore, Readiness, Tag,
};
use sidecore_block_contract::Harness;
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

const MIB: u64 = 1 << 20;
const BLOCK_BYTES: u64 = 1024;
const ADDRESS: u64 = 0x1_0000_0000;

/// A store that accepts one request of each batch.
struct Narrow(RamStore);

struct NarrowChannel(Box<dyn BlockChannel>);

impl BlockDevice for Narrow {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        Ok(Box::new(NarrowChannel(self.0.open_channel(core, depth)?)))
    }
}

impl BlockChannel for NarrowChannel {
    fn submit(&mut self, now: Nanos, batch: &mut Batch) {
        let mut one: Batch = batch.drain(..batch.len().min(1)).collect();
        self.0.submit(now, &mut one);
    }

    fn poll(&mut self, now: Nanos, completed: &mut Batch) {
        self.0.poll(now, completed);
    }

    fn readiness(&self) -> Readiness {
        self.0.readiness()
    }

    fn waits_since(&self) -> Option<Nanos> {
        self.0.waits_since()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.wake_fd()
    }
}

/// Reads `count` blocks in one batch from a volume that does not begin where its store does.
fn check(store: Arc<dyn BlockDevice>, count: u64) {
    let controller = common::over(&store, BLOCK_BYTES as u32);
    for name in ["other", "volume"] {
        controller.create_volume(name, MIB, None).unwrap();
        let (mut guest, _device) = common::guest(&controller, name);
        for block in 0..count {
            let byte = if name == "volume" { block as u8 + 1 } else { 0xff };
            guest.store(block * BLOCK_BYTES, &[byte; BLOCK_BYTES as usize]);
        }
    }
    let (mut guest, _device) = common::guest(&controller, "volume");
    // The first read finds the extent of all the others.
    assert_eq!(guest.load(0, 1024), [1; 1024]);
    let address = |block: u64| ADDRESS + block * BLOCK_BYTES;
    for _ in 0..2 {
        let read = |block| (block * BLOCK_BYTES, [(address(block), BLOCK_BYTES)]);
        let requests = (0..count)
            .map(read)
            .map(|(offset, piece)| guest.request(Operation::Read, offset, &piece));
        let requests: Vec<_> = requests.collect();
        assert_eq!(guest.run(requests), vec![Ok(()); count as usize]);
        for block in 0..count {
            assert_eq!(
                guest.peek(address(block), 1024),
                vec![block as u8 + 1; 1024],
                "block {block}"
            );
            guest.poke(address(block), &[0; 1024]);
        }
    }
}

fn ram() -> RamStore {
    RamStore::new(Geometry::new(16 * MIB, 512)).unwrap()
}

#[test]
fn a_store_that_takes_less_than_a_batch_gets_each_request_translated_once() {
    check(Arc::new(Narrow(ram())), 8);
}

/// Only the exchanges are watched: they take the path of requests in the last extent.
#[test]
fn an_exchange_follows_the_last_extent_when_a_snapshot_shares_it() {
    let store: Arc<dyn BlockDevice> = Arc::new(ram());
    let controller = common::over(&store, BLOCK_BYTES as u32);
    controller.create_volume("v", MIB, None).unwrap();
    let (mut guest, _device) = common::guest(&controller, "v");
    let write = |guest: &mut Harness, byte: u8| {
        guest.poke(ADDRESS, &[byte; 1024]);
        let request = guest.request(Operation::Write, 5 * BLOCK_BYTES, &[(ADDRESS, BLOCK_BYTES)]);
        let (mut batch, mut completed) = (vec![request], Batch::new());
        let mut polls = 0;
        while completed.is_empty() {
            guest.channel.exchange(Nanos(1), &mut batch, &mut completed);
            polls += 1;
            if completed.is_empty() {
                guest.wait(Duration::from_millis(100));
            }
        }
        let mut request = completed.pop().unwrap();
        assert_eq!((request.result, request.offset_bytes), (Ok(()), 5 * BLOCK_BYTES));
        request.tag.take().map(Tag::into_bits);
        polls
    };
    guest.store(0, &[1; 16 << 10]);
    write(&mut guest, 2);
    assert_eq!(write(&mut guest, 3), 1, "a write in the last extent completes at once");
    controller.snapshot_volume("v", "s").unwrap();
    write(&mut guest, 4);
    assert_eq!(write(&mut guest, 5), 1, "and in the new one");
    assert_eq!(guest.load(5 * BLOCK_BYTES, 1024), [5; 1024]);
    let (mut other, _device) = common::guest(&controller, "s");
    assert_eq!(other.load(5 * BLOCK_BYTES, 1024), [3; 1024], "the snapshot's block");
    assert_eq!(other.load(0, 1024), [1; 1024]);
}

#[test]
fn what_is_beyond_the_depth_is_translated_when_it_is_taken() {
    check(Arc::new(ram()), 40);
}
