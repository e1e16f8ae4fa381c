//! Buffers that a port keeps ready.

use sidecore_link::{LinkOptions, MemoryLink};
use sidecore_reactor::EventFd;
use sidecore_vrio::Plain;

use super::*;

struct NoData;

impl RequestData for NoData {
    fn segments(&self, _request: u64) -> Option<&Segments> {
        None
    }
}

#[test]
fn a_buffer_is_ready_for_the_next_frame_for_a_limited_time() {
    let options = LinkOptions::new(DATA_HEADER_BYTES);
    let (_host, client) = MemoryLink::pair(&options, EventFd::peer_signal).unwrap();
    let mut port = LinkPort::new(Box::new(client), NoData);
    let to = port.peers().name(LinkAddress::Peer(0));
    let send = |port: &mut LinkPort<NoData>| {
        assert!(port.send(to, &[1; 8], Payload::NONE, (1, &mut Plain)));
        port.flush(Nanos::ZERO);
        assert!(port.empty.is_empty());
        port.receive(Nanos::ZERO, 8);
        assert_eq!(port.empty.len(), 1);
    };
    assert_eq!((port.receive(Nanos::ZERO, 8), port.empty.len()), (0, 0));
    send(&mut port);
    for _ in 1..READY_POLLS {
        port.receive(Nanos::ZERO, 8);
        assert_eq!(port.empty.len(), 1);
    }
    port.receive(Nanos::ZERO, 8);
    assert!(port.empty.is_empty());
    send(&mut port);
    let _ = port.arm();
    assert!(port.empty.is_empty());
}
