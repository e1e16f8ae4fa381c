//! A client and an IOhost that share memory, whose frames are few.

mod common;

use std::sync::Arc;

use common::request;
use common::{STEP, TestClient, TestStore, client_id, device_name, exported, iohost_on, pattern};
use sidecore_block::Operation;
use sidecore_link::{LinkAddress, LinkOptions, MemoryLink, dropped_frames};
use sidecore_reactor::{Arm, EventFd, Pollable};
use sidecore_remote::export::{ClientShare, ClientSpec};
use sidecore_units::Nanos;
use sidecore_vrio::wire::DATA_HEADER_BYTES;
use sidecore_vrio::{ClientOptions, ServerOptions};

#[test]
fn requests_pass_through_shared_memory_whole_and_both_sides_can_sleep() {
    let options = LinkOptions {
        receive_frames: 32,
        transmit_frames: 32,
        ..LinkOptions::new(DATA_HEADER_BYTES)
    };
    let (host, client) = MemoryLink::pair(&options, EventFd::peer_signal).unwrap();
    let (mut export, _) = iohost_on(Box::new(host), 1, 0, ServerOptions::default());
    let spec = ClientSpec {
        name: "client".into(),
        id: client_id(3),
        queues: 1,
        share: ClientShare::default(),
    };
    let id = export.add_client(&spec).unwrap();
    let store = TestStore::new();
    export.add_device(id, &exported("disk", Arc::new(store.clone()))).unwrap();
    let options = ClientOptions { receive_frames: 32, ..ClientOptions::default() };
    let mut client = TestClient::on(Box::new(client), LinkAddress::Peer(0), 3, options);
    let disk = client.client.open(&device_name("disk")).unwrap();
    let mut now = Nanos::from_millis(1);
    let mut slept = 0;
    let mut run = |client: &mut TestClient, until: &dyn Fn(&TestClient) -> bool| {
        let end = now.after(Nanos::from_millis(5_000));
        while !until(client) {
            assert!(now < end, "it does not happen");
            client.poll(now);
            if export.arm() == Arm::Armed {
                slept += 1;
                export.disarm();
            }
            export.poll(now, 32);
            now = now.after(STEP);
        }
    };
    run(&mut client, &|client| client.client.is_ready(disk));
    for round in 0..50_u8 {
        let len = 512 * (1 + usize::from(round) * 5 % 128);
        let bytes = pattern(round, len);
        for tag in 0..8 {
            client.fill(tag, &bytes);
            let write = request(Operation::Write, tag * 65_536, len as u64);
            client.client.submit(tag, disk, write).unwrap();
        }
        run(&mut client, &|client| client.completed.len() == 8);
        assert!(client.completed.drain(..).all(|(_, result)| result.is_ok()));
        for tag in 0..8 {
            client.fill(tag, &vec![0xcc; len]);
            let read = request(Operation::Read, tag * 65_536, len as u64);
            client.client.submit(tag, disk, read).unwrap();
        }
        run(&mut client, &|client| client.completed.len() == 8);
        for (tag, result) in client.completed.drain(..).collect::<Vec<_>>() {
            assert_eq!(result, Ok(()));
            assert!(client.bytes(tag, len) == bytes, "{len} bytes");
        }
    }
    assert!(slept > 0);
    drop((export, client));
    assert_eq!(dropped_frames(), 0);
}
