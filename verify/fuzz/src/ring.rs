//! The device's side of both ring formats over memory that is the input, and that changes in use.

#![no_main]

use libfuzzer_sys::fuzz_target;
use sidecore_fuzz::{Poker, guest_memory, ring_layout};
use sidecore_memory::RegionHint;
use sidecore_ring::{Chain, DeviceRing, RingState};

fuzz_target!(|input: &[u8]| {
    let Some((&setup, input)) = input.split_first() else { return };
    let layout = ring_layout(setup);
    let memory = guest_memory();
    let mut poker = Poker::new(&memory, input);
    let Ok(mut ring) = DeviceRing::new(&memory, &layout, RingState::fresh(layout.format)) else {
        return;
    };
    let mut chain = Chain::with_limit(12);
    let mut tokens = Vec::new();
    loop {
        match ring.pop(&memory, &mut chain) {
            Ok(Some(token)) => {
                assert!(chain.readable().len() + chain.writable().len() <= 12);
                assert!(
                    chain.readable().iter().chain(chain.writable()).all(|part| part.len_bytes > 0)
                );
                tokens.push(token);
            }
            Ok(None) => {
                for token in tokens.drain(..) {
                    ring.complete(token, 1);
                }
                ring.publish();
                ring.take_call();
                if ring.arm_kicks(&memory).is_err() {
                    return;
                }
                ring.suppress_kicks();
                if !poker.poke(&mut RegionHint::default()) {
                    return;
                }
            }
            Err(_) => return,
        }
        assert!(usize::from(ring.in_flight()) == tokens.len());
        assert!(tokens.len() <= usize::from(layout.size));
    }
});
