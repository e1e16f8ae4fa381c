//! A guest's driver with one request at a time.

use std::path::Path;

use sidecore_driver::{BlkClient, ClientOptions, Slot, Status};

use crate::common::PATIENCE;
use sidecore_assembly::spec::Sector;

/// The size of each request in bytes.
pub const PAGE: usize = 4096;

/// Connects to a disk.
pub fn connect(socket: &Path) -> BlkClient {
    BlkClient::connect(socket, &ClientOptions { huge_pages: false, ..ClientOptions::default() }).unwrap()
}

/// Writes one page of equal bytes.
pub fn write(client: &mut BlkClient, sector: u64, byte: u8) -> Status {
    run(client, |client, slot| {
        let queue = client.queue(0).unwrap();
        queue.write_data(slot, 0, &[byte; PAGE]);
        queue.submit_write(slot, Sector(sector), PAGE as u32).unwrap();
    })
    .1
}

/// Reads one page of equal bytes.
pub fn read(client: &mut BlkClient, sector: u64) -> u8 {
    let (data, status) =
        run(client, |client, slot| client.queue(0).unwrap().submit_read(slot, Sector(sector), PAGE as u32).unwrap());
    assert_eq!(status, Status::Ok);
    assert!(data.iter().all(|byte| *byte == data[0]), "a page of several bytes");
    data[0]
}

/// Flushes the disk.
#[allow(dead_code)]
pub fn flush(client: &mut BlkClient) {
    assert_eq!(run(client, |client, slot| client.queue(0).unwrap().submit_flush(slot).unwrap()).1, Status::Ok);
}

/// Discards one page.
#[allow(dead_code)]
pub fn discard(client: &mut BlkClient, sector: u64) {
    let discard = |client: &mut BlkClient, slot| {
        client.queue(0).unwrap().submit_discard(slot, Sector(sector), PAGE as u32 / 512).unwrap();
    };
    assert_eq!(run(client, discard).1, Status::Ok);
}

fn run(client: &mut BlkClient, submit: impl FnOnce(&mut BlkClient, Slot)) -> (Vec<u8>, Status) {
    let slot = client.queue(0).unwrap().take_slot().unwrap();
    submit(client, slot);
    let queue = client.queue(0).unwrap();
    queue.publish().unwrap();
    let mut completions = Vec::new();
    while queue.poll_completions(&mut completions).unwrap() == 0 {
        assert!(queue.wait(PATIENCE).unwrap(), "no answer");
    }
    let mut data = vec![0; PAGE];
    queue.read_data(slot, 0, &mut data);
    queue.release_slot(slot);
    (data, completions[0].status)
}
