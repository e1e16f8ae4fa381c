//! Requests allocate nothing on either side, once both are set up.

mod common;

use common::{HOST, Rig, request};
use sidecore_block::Operation;
use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_units::Nanos;
use sidecore_vrio::slices::{Arrived, Data, SlicePort, Transmit};
use sidecore_vrio::{ClientOptions, Event, Execute, Peer, Request, ServerOptions};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const DEPTH: u64 = 32;
const REQUESTS: u64 = 100_000;

/// Frames in memory that is allocated before.
struct Ring {
    frames: Vec<Vec<u8>>,
    used: usize,
}

impl Ring {
    fn new() -> Self {
        Self { frames: (0..512).map(|_| Vec::with_capacity(9_000)).collect(), used: 0 }
    }
}

impl Transmit for Ring {
    fn buffer(&mut self, len_bytes: usize) -> Option<&mut [u8]> {
        let frame = self.frames.get_mut(self.used)?;
        frame.resize(len_bytes, 0);
        Some(frame)
    }

    fn commit(&mut self, _to: Peer) {
        self.used += 1;
    }
}

/// Every request has the same data.
struct Same(Vec<u8>);

impl Data for Same {
    fn fill(&mut self, _request: u64, offset_bytes: u32, payload: &mut [u8]) {
        payload.copy_from_slice(&self.0[offset_bytes as usize..][..payload.len()]);
    }

    fn store(&mut self, _request: u64, offset_bytes: u32, payload: &[u8]) {
        self.0[offset_bytes as usize..][..payload.len()].copy_from_slice(payload);
    }

    fn clear(&mut self, _request: u64, len_bytes: u32) {
        self.0[..len_bytes as usize].fill(0);
    }
}

fn next(count: u64) -> Request {
    let offset_bytes = count % 100 * 4096;
    match count % 16 {
        0 => Request::FLUSH,
        1 => request(Operation::Discard, offset_bytes, 4096),
        2 => request(Operation::Read, 0, 65_536),
        3 => request(Operation::Write, 0, 65_536),
        odd if odd % 2 == 1 => request(Operation::Write, offset_bytes, 4096),
        _ => request(Operation::Read, offset_bytes, 4096),
    }
}

#[test]
fn requests_allocate_nothing() {
    let options =
        ClientOptions { depth: DEPTH as u16, replay_bytes: 96 << 10, ..ClientOptions::default() };
    let mut rig = Rig::connected(options, ServerOptions::default());
    let (mut to_host, mut to_client) = (Ring::new(), Ring::new());
    let (mut guest, mut buffers) = (Same(vec![1; 65_536]), Same(vec![2; 65_536]));
    let (mut submitted, mut done, mut before) = (0, 0, 0);
    while done < REQUESTS {
        while submitted - done < DEPTH {
            rig.client.submit(submitted, 0, next(submitted)).unwrap();
            submitted += 1;
        }
        let mut client_port = SlicePort { wire: &mut to_host, data: &mut guest };
        let mut host_port = SlicePort { wire: &mut to_client, data: &mut buffers };
        rig.client.poll(rig.now, &mut client_port);
        rig.host.poll(rig.now, &mut host_port);
        rig.now = rig.now.after(Nanos::from_micros(10));
        for index in 0..std::mem::take(&mut client_port.wire.used) {
            let mut arrived = Arrived::new(std::mem::take(&mut client_port.wire.frames[index]));
            host_port.to_host(&mut rig.host, (rig.now, Peer(9)), &mut arrived);
            client_port.wire.frames[index] = arrived.into_frame();
        }
        for index in 0..std::mem::take(&mut host_port.wire.used) {
            let mut arrived = Arrived::new(std::mem::take(&mut host_port.wire.frames[index]));
            client_port.to_client(&mut rig.client, (rig.now, HOST), &mut arrived);
            host_port.wire.frames[index] = arrived.into_frame();
        }
        while let Some(Execute { ticket, .. }) = rig.host.next_execute() {
            rig.host.complete(ticket, Ok(()));
        }
        while let Some(event) = rig.client.next_event() {
            if let Event::Completed { result, .. } = event {
                assert_eq!(result, Ok(()));
                done += 1;
            }
        }
        if before == 0 && done > REQUESTS / 10 {
            before = allocations();
        }
    }
    assert!(before > 0);
    assert_eq!(allocations() - before, 0);
    let counts = rig.client_counts();
    assert!(counts.own_flushes > 0 && counts.held_back > 0, "{counts:?}");
}
