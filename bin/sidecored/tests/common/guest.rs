//! A guest's driver that has one request in flight at a time.

use std::path::Path;
use std::time::Duration;

use sidecore_driver::{BlkClient, ClientOptions, Status};
use sidecore_units::Sector;

/// The size of each request in bytes.
pub const PAGE: u32 = 4096;

/// Longer than any request takes that is answered at all.
const PATIENCE: Duration = Duration::from_secs(20);

pub fn connect(socket: &Path) -> BlkClient {
    BlkClient::connect(socket, &ClientOptions { huge_pages: false, ..ClientOptions::default() }).unwrap()
}

/// Submits a write of a page of one byte, and does not wait for it.
pub fn submit_write(client: &mut BlkClient, sector: u64, byte: u8) {
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    queue.write_data(slot, 0, &[byte; PAGE as usize]);
    queue.submit_write(slot, Sector(sector), PAGE).unwrap();
    queue.publish().unwrap();
}

/// Writes a page of one byte, and waits for the completion.
pub fn write(client: &mut BlkClient, sector: u64, byte: u8) -> Status {
    submit_write(client, sector, byte);
    complete(client).0
}

/// Reads a page. Returns its first byte.
pub fn read(client: &mut BlkClient, sector: u64) -> (Status, u8) {
    let queue = client.queue(0).unwrap();
    let slot = queue.take_slot().unwrap();
    queue.submit_read(slot, Sector(sector), PAGE).unwrap();
    queue.publish().unwrap();
    complete(client)
}

fn complete(client: &mut BlkClient) -> (Status, u8) {
    let queue = client.queue(0).unwrap();
    let mut completions = Vec::new();
    while queue.poll_completions(&mut completions).unwrap() == 0 {
        assert!(queue.wait(PATIENCE).unwrap(), "no answer");
    }
    let mut data = [0];
    queue.read_data(completions[0].slot, 0, &mut data);
    queue.release_slot(completions[0].slot);
    (completions[0].status, data[0])
}
