//! A complete block queue over memory that is the input: rings, request parser, a RAM disk, and
//! completions.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use sidecore_block::{BlockDevice, Geometry, RamStore, dropped_tags};
use sidecore_fuzz::{Poker, guest_memory, ring_layout};
use sidecore_memory::RegionHint;
use sidecore_reactor::{CoreContext, EventFd, IdleMode, Pollable, Polled, Unit};
use sidecore_ring::RingState;
use sidecore_units::Nanos;
use sidecore_virtio::QueueResources;
use sidecore_virtio::blk::{BlkDevice, BlkOptions, BlkQueue};

fuzz_target!(|input: &[u8]| {
    let Some((&setup, input)) = input.split_first() else { return };
    let layout = ring_layout(setup);
    let memory = guest_memory();
    let mut poker = Poker::new(&memory, input);
    let block_bytes = if setup & 8 == 0 { 512 } else { 4096 };
    let Ok(store) =
        RamStore::new(Geometry { volatile_cache: true, ..Geometry::new(32 << 10, block_bytes) })
    else {
        return;
    };
    let options = BlkOptions {
        size_max_bytes: (setup & 16 != 0).then_some(4096),
        read_only: setup & 32 != 0,
        seg_max: 4,
        ..BlkOptions::default()
    };
    let device = Arc::new(BlkDevice::new("fuzz", options, store.geometry()));
    // The driver's choice of the cache mode.
    let _ = device.write_config(32, &[setup >> 7]);
    let resources = QueueResources {
        memory: memory.clone(),
        layout,
        features: device.features(),
        kick: None,
        call: None,
        err: None,
        log: None,
        is_enabled: true,
    };
    let Ok(channel) = store.open_channel(&CoreContext::default(), layout.size.into()) else {
        return;
    };
    let state = RingState::fresh(layout.format);
    let Ok(mut queue) =
        BlkQueue::new(&device, 0, resources, state, channel, IdleMode::Poll, EventFd::peer_signal)
    else {
        return;
    };
    let mut now = 0;
    loop {
        now += 1;
        let busy = queue.poll(Nanos(now), 64) != Polled::Idle;
        if device.broken().is_some() {
            break;
        }
        if !busy && !poker.poke(&mut RegionHint::default()) {
            break;
        }
    }
    // Broken or not, the queue stops and returns its state.
    let (reply, answer) = std::sync::mpsc::channel();
    queue.stop(Box::new(move |state| {
        let _ = reply.send(state);
    }));
    for _ in 0..4 {
        now += 1;
        if queue.poll(Nanos(now), 64) == Polled::Finished {
            Box::new(queue).finish();
            break;
        }
    }
    assert!(answer.try_recv().is_ok());
    assert_eq!(dropped_tags(), 0);
});
