//! A guest's driver: completions of both front ends, and single requests of virtio-blk, which are
//! pages of one byte.

use std::path::Path;
use std::time::{Duration, Instant};

use sidecore_driver::{
    BlkClient, BlkQueue, ClientError, ClientOptions, Completion, Notify, Queue, Slot, Status,
};
use sidecore_units::Sector;

/// The size of a request in bytes.
pub const PAGE: usize = 4096;

/// Longer than any request takes that is completed at all.
const PATIENCE: Duration = Duration::from_secs(60);

/// Connects to a disk, with buffers on ordinary pages, of which every machine has enough.
///
/// # Panics
/// The connection fails.
#[must_use]
pub fn connect(socket: &Path) -> BlkClient {
    BlkClient::connect(socket, &ClientOptions { huge_pages: false, ..ClientOptions::default() })
        .expect("a connection")
}

/// Shows the device the one request that was submitted, and waits for its completion.
///
/// # Panics
/// As [`complete_all`].
#[track_caller]
pub fn complete<Q: Queue>(queue: &mut Q) -> Q::Completion {
    complete_all(queue, 1)[0]
}

/// Shows the device what was submitted, and waits for so many completions.
///
/// # Panics
/// Fewer requests are completed within a minute, or more.
#[track_caller]
pub fn complete_all<Q: Queue>(queue: &mut Q, count: usize) -> Vec<Q::Completion> {
    queue.publish().expect("a ring");
    let (mut completions, deadline) = (Vec::new(), Instant::now() + PATIENCE);
    while completions.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} completions", completions.len());
        if queue.notify() == Notify::Interrupt {
            queue.wait(PATIENCE).expect("an eventfd");
        } else {
            // The sidecore may need this core.
            std::thread::yield_now();
        }
        queue.poll_completions(&mut completions).expect("a ring");
    }
    assert_eq!(completions.len(), count, "{completions:?}");
    completions
}

/// Submits a write, and does not wait for its completion.
///
/// # Panics
/// No slot is free.
pub fn submit_write(client: &mut BlkClient, sector: u64, byte: u8) {
    submit(client, |queue, slot| {
        queue.write_data(slot, 0, &[byte; PAGE]);
        queue.submit_write(slot, Sector(sector), PAGE as u32)
    });
}

/// Writes a page.
///
/// # Panics
/// The write is not completed.
#[track_caller]
pub fn write(client: &mut BlkClient, sector: u64, byte: u8) -> Status {
    submit_write(client, sector, byte);
    finish(client).0
}

/// Reads a page; its byte.
///
/// # Panics
/// The read fails, or the bytes of the page differ.
#[track_caller]
pub fn read(client: &mut BlkClient, sector: u64) -> u8 {
    submit(client, |queue, slot| queue.submit_read(slot, Sector(sector), PAGE as u32));
    let (status, data) = finish(client);
    assert_eq!(status, Status::Ok);
    assert!(data.iter().all(|byte| *byte == data[0]), "a page of several bytes");
    data[0]
}

/// Makes all completed writes durable.
///
/// # Panics
/// The flush fails.
#[track_caller]
pub fn flush(client: &mut BlkClient) {
    submit(client, BlkQueue::submit_flush);
    assert_eq!(finish(client).0, Status::Ok);
}

/// Discards a page.
///
/// # Panics
/// The request fails.
#[track_caller]
pub fn discard(client: &mut BlkClient, sector: u64) {
    submit(client, |queue, slot| queue.submit_discard(slot, Sector(sector), PAGE as u32 / 512));
    assert_eq!(finish(client).0, Status::Ok);
}

fn submit(
    client: &mut BlkClient,
    request: impl FnOnce(&mut BlkQueue, Slot) -> Result<(), ClientError>,
) {
    let queue = client.queue(0).expect("a queue");
    let slot = queue.take_slot().expect("a free slot");
    request(queue, slot).expect("a request that fits");
    queue.publish().expect("a ring");
}

/// Waits for the request; its status, and the data in its slot.
#[track_caller]
fn finish(client: &mut BlkClient) -> (Status, Vec<u8>) {
    let queue = client.queue(0).expect("a queue");
    let Completion { slot, status, .. } = complete(queue);
    let mut data = vec![0; PAGE];
    queue.read_data(slot, 0, &mut data);
    queue.release_slot(slot);
    (status, data)
}
