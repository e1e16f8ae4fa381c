//! The simple stores keep the contract.

use std::sync::Arc;

use sidecore_block::{BlockDevice, Geometry, NullStore, RamStore, Readiness, Tag};
use sidecore_block_contract::{self as contract, check_at_each_depth};
use sidecore_reactor::CoreContext;
use sidecore_units::Nanos;

const GEOMETRY: Geometry = Geometry::new(4 << 20, 512);

fn ram() -> Arc<dyn BlockDevice> {
    Arc::new(RamStore::new(GEOMETRY).unwrap())
}

#[test]
fn ram_keeps_the_contract() {
    check_at_each_depth(&ram);
}

#[test]
fn ram_in_large_blocks_keeps_the_contract() {
    check_at_each_depth(&|| Arc::new(RamStore::new(Geometry::new(4 << 20, 4096)).unwrap()));
}

#[test]
fn read_only_ram_keeps_the_contract() {
    check_at_each_depth(&|| {
        Arc::new(RamStore::new(Geometry { read_only: true, ..GEOMETRY }).unwrap())
    });
}

/// A request of many slices is carried on from poll to poll, in pieces that do not end where slices
/// do, and small ones overtake it.
#[test]
fn ram_serves_small_requests_while_a_large_one_is_under_way() {
    let device = ram();
    let mut harness = contract::Harness::new(&device, 8);
    let bytes = contract::pattern(1, 1 << 20);
    let (at, cut) = (0x10_0000, 699_900);
    harness.poke(at, &bytes);
    let pieces = [(at, cut), (at + cut, (1 << 20) - cut)];
    let mut channel = device.open_channel(&CoreContext::default(), 8).unwrap();
    let mut large = harness.request(sidecore_block::Operation::Write, 4096, &pieces);
    large.taken_at = Nanos(1);
    let mut small = harness.range_request(sidecore_block::Operation::Discard, 0, 4096);
    small.taken_at = Nanos(2);
    channel.submit(Nanos::ZERO, &mut vec![large, small]);
    let (mut order, mut polls) = (Vec::new(), 0);
    while channel.readiness().in_flight > 0 {
        assert!(polls < 100);
        polls += 1;
        let mut completed = Vec::new();
        channel.poll(Nanos(polls), &mut completed);
        for mut request in completed {
            assert_eq!(request.result, Ok(()));
            order.push((request.taken_at, polls));
            request.tag.take().map(Tag::into_bits);
        }
        assert_eq!(channel.readiness(), Readiness::polled(channel.readiness().in_flight));
    }
    assert_eq!(order, [(Nanos(2), 1), (Nanos(1), 4)], "a slice is 256 KiB");
    assert_eq!(harness.load(4096, 1 << 20), bytes);
    let mut zero = harness.range_request(
        sidecore_block::Operation::WriteZeroes { may_unmap: false },
        4096,
        1 << 20,
    );
    zero.taken_at = Nanos(3);
    assert_eq!(harness.run(vec![zero]), [Ok(())]);
    assert!(harness.load(4096, 1 << 20).iter().all(|byte| *byte == 0));
}

#[test]
fn null_keeps_what_applies_to_it() {
    let open = || Arc::new(NullStore::new(GEOMETRY)) as Arc<dyn BlockDevice>;
    contract::check(
        &open,
        &contract::Options { keeps_data: false, ..contract::Options::default() },
    );
}
