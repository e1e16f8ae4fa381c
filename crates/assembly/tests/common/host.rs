//! An NVMe driver, and specifications of functions for it.

use std::path::Path;

use sidecore_assembly::spec::{DeviceSpec, FrontEndSpec, IdleMode, Nanos, Sector};
use sidecore_driver::{NvmeClient, NvmeOptions, NvmeQueue, NvmeStatus};
use sidecore_kit::guest::complete;

use crate::common::device;

/// The size of each request in bytes.
#[allow(dead_code)]
pub const PAGE: usize = 4096;

/// Spins for a while without work, then sleeps.
#[allow(dead_code)]
pub const ADAPTIVE: IdleMode = IdleMode::Adaptive { spin: Nanos::from_micros(50) };

/// An NVMe function in front of the store of the same name, with its socket in `directory`, on the
/// sidecore `sc0`.
#[allow(dead_code)]
pub fn function(directory: &Path, name: &str, idle: IdleMode) -> DeviceSpec {
    DeviceSpec { front_end: FrontEndSpec::from_word("nvme"), idle, ..device(directory, name) }
}

/// Connects to a function.
#[allow(dead_code)]
pub fn connect(socket: &Path) -> NvmeClient {
    connect_as(socket, &NvmeOptions::default())
}

/// Connects to a function, with memory on ordinary pages because huge pages may be scarce.
#[allow(dead_code)]
pub fn connect_as(socket: &Path, options: &NvmeOptions) -> NvmeClient {
    NvmeClient::connect(socket, &NvmeOptions { huge_pages: false, ..options.clone() }).unwrap()
}

/// Writes one page of equal bytes.
#[allow(dead_code)]
pub fn write(queue: &mut NvmeQueue, sector: u64, byte: u8) -> NvmeStatus {
    let slot = queue.take_slot().unwrap();
    queue.write_data(slot, 0, &[byte; PAGE]);
    queue.submit_write(slot, Sector(sector), PAGE as u32).unwrap();
    let status = complete(queue).status;
    queue.release_slot(slot);
    status
}

/// Reads one page of equal bytes.
#[allow(dead_code)]
pub fn read(queue: &mut NvmeQueue, sector: u64) -> u8 {
    let slot = queue.take_slot().unwrap();
    queue.submit_read(slot, Sector(sector), PAGE as u32).unwrap();
    assert_eq!(complete(queue).status, NvmeStatus::OK);
    let mut data = vec![0; PAGE];
    assert_eq!(queue.read_data(slot, 0, &mut data), PAGE);
    queue.release_slot(slot);
    assert!(data.iter().all(|byte| *byte == data[0]), "a page of several bytes");
    data[0]
}

/// Flushes the function.
#[allow(dead_code)]
pub fn flush(queue: &mut NvmeQueue) {
    let slot = queue.take_slot().unwrap();
    queue.submit_flush(slot).unwrap();
    assert_eq!(complete(queue).status, NvmeStatus::OK);
    queue.release_slot(slot);
}
