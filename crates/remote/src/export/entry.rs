//! The entries of devices in their clients' lists.

use std::sync::Arc;

use sidecore_vrio::wire::{DEVICE_NAME_BYTES, DeviceEntry, device_flag};

use super::{ExportError, ExportedDevice};

/// The entry of a device in its client's list.
pub(super) fn entry(number: u16, device: &ExportedDevice) -> Result<DeviceEntry, ExportError> {
    let geometry = device.store.geometry();
    let mut name = [0; DEVICE_NAME_BYTES];
    let text = device.name.as_bytes();
    let place = name.get_mut(..text.len()).filter(|place| !place.is_empty());
    place
        .ok_or_else(|| ExportError::Name { name: Arc::clone(&device.name) })?
        .copy_from_slice(text);
    let mut serial = [0; 20];
    for (to, from) in serial.iter_mut().zip(device.serial.bytes()) {
        *to = from;
    }
    let read_only = device.read_only || geometry.read_only;
    let flags = [
        (true, device_flag::PRESENT),
        (read_only, device_flag::READ_ONLY),
        (geometry.volatile_cache && device.write_cache, device_flag::VOLATILE_CACHE),
        (geometry.discard && !read_only, device_flag::DISCARD),
        (geometry.discard && geometry.discard_zeroes && !read_only, device_flag::DISCARD_ZEROES),
        (geometry.write_zeroes && !read_only, device_flag::WRITE_ZEROES),
    ];
    let flags = flags.into_iter().filter(|(is_set, _)| *is_set);
    Ok(DeviceEntry {
        device: number,
        flags: flags.fold(0, |flags, (_, flag)| flags | flag),
        epoch: device.epoch,
        capacity_bytes: geometry.capacity_bytes,
        block_bytes: geometry.block_bytes,
        physical_block_bytes: geometry.physical_block_bytes,
        name,
        serial,
        ..DeviceEntry::default()
    })
}
