//! Guests beside each other, and after each other.

mod common;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_block::{Batch, BlockChannel, BlockDevice, Geometry, Operation};
use sidecore_block_contract::{Harness, pattern};
use sidecore_reactor::CoreContext;

use common::{formatted, made, open, ram};

const BLOCK: u64 = 4096;
const STORE_BYTES: u64 = 5 << 20;
/// The guest's memory in one piece.
const SCRATCH: u64 = 0x1_0000_0000;

/// A store that may miss writes of a guest that is gone, as a remote one.
struct Lossy {
    below: Arc<dyn BlockDevice>,
    is_lossy: AtomicBool,
}

impl BlockDevice for Lossy {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn open_channel(&self, core: &CoreContext, depth: usize) -> io::Result<Box<dyn BlockChannel>> {
        self.is_lossy.store(false, Ordering::Relaxed);
        self.below.open_channel(core, depth)
    }

    fn loss(&self) -> Option<String> {
        self.is_lossy.load(Ordering::Relaxed).then(|| "1 write".to_owned())
    }
}

#[test]
fn writes_that_a_store_has_lost_with_their_guest_leave_good_blocks() {
    let below = ram(STORE_BYTES, |it| Geometry { volatile_cache: true, ..it });
    let data_at = formatted(&below, BLOCK as u32, None).data_at();
    let lossy = Arc::new(Lossy { below: Arc::clone(&below), is_lossy: AtomicBool::new(false) });
    let device = open(&(Arc::clone(&lossy) as Arc<dyn BlockDevice>));
    let mut guest = Harness::new(&device, 8);
    guest.store(7 * BLOCK, &pattern(7, BLOCK as usize));
    let flush = guest.range_request(Operation::Flush, 0, 0);
    assert_eq!(guest.run_one(flush), Ok(()));
    guest.store(7 * BLOCK, &pattern(100, BLOCK as usize));
    drop(guest);
    Harness::new(&below, 8).store(data_at + 7 * BLOCK, &pattern(7, BLOCK as usize));
    lossy.is_lossy.store(true, Ordering::Relaxed);
    device.user_gone();
    let mut guest = Harness::new(&device, 8);
    assert!(guest.load(7 * BLOCK, BLOCK as usize) == pattern(7, BLOCK as usize));
}

#[test]
fn overlapping_writes_of_two_queues_and_zeroes_leave_good_blocks() {
    let device = made(&ram(STORE_BYTES, |it| it), 512);
    let (mut one, mut other) = (Harness::new(&device, 8), Harness::new(&device, 8));
    for round in 0..200_u64 {
        let at = round % 7 * 512;
        let long = pattern(round, 40 * 512);
        one.poke(SCRATCH, &long);
        let write = one.request(Operation::Write, at, &[(SCRATCH, long.len() as u64)]);
        one.submit(&mut vec![write]);
        if round % 3 == 0 {
            let zeroes = Operation::WriteZeroes { may_unmap: true };
            let request = other.range_request(zeroes, at + 512, 16 * 512);
            other.submit(&mut vec![request]);
        } else {
            other.poke(SCRATCH, &long);
            let write = other.request(Operation::Write, at + 1024, &[(SCRATCH, 8 * 512)]);
            other.submit(&mut vec![write]);
        }
        let mut completed = Batch::new();
        while completed.len() < 2 {
            for guest in [&mut one, &mut other] {
                let now = guest.now();
                guest.channel.poll(now, &mut completed);
            }
        }
        for mut request in completed {
            assert_eq!(request.result, Ok(()));
            request.tag.take().unwrap().into_bits();
        }
        assert_eq!(one.load(0, 64 * 512), other.load(0, 64 * 512));
    }
}
