//! The devices of a client, and those that its session uses.

use std::sync::atomic::{AtomicU64, Ordering};

use sidecore_units::Nanos;

use super::Server;
use crate::port::Seal;
use crate::wire::{DeviceEntry, device_flag, ending};

/// The number of the next attachment. Attachments to all hosts of the process are in one order,
/// because several hosts may have a device. The clock gives none: a host reads it once for many
/// frames.
static NEXT_ATTACHMENT: AtomicU64 = AtomicU64::new(1);

impl<S: Seal> Server<S> {
    /// See [`Host::set_devices`](super::Host::set_devices).
    pub(super) fn set_devices(&mut self, now: Nanos, devices: &[DeviceEntry]) {
        let changed = |old: &DeviceEntry| {
            let new = devices.iter().find(|new| new.device == old.device);
            let is_other = |new: &DeviceEntry| new.epoch != old.epoch || new.name != old.name;
            self.attachment(old.device).is_some() && new.is_some_and(is_other)
        };
        let is_over = self.devices.iter().any(changed);
        self.devices.clear();
        self.devices.extend_from_slice(devices);
        self.devices_version = self.devices_version.wrapping_add(1);
        let devices = &self.devices;
        self.attached.retain(|(number, _)| devices.iter().any(|entry| entry.device == *number));
        if is_over {
            self.dismiss(ending::EPOCH);
        } else {
            self.announce(now);
        }
    }

    pub(super) fn attach(&mut self, device: u16) {
        let attachment = NEXT_ATTACHMENT.fetch_add(1, Ordering::Relaxed);
        match self.attached.iter_mut().find(|(number, _)| *number == device) {
            Some((_, newest)) => *newest = attachment,
            None => self.attached.push((device, attachment)),
        }
    }

    /// The number of the newest attachment of a device; `None` if the client has not asked for it
    /// or may not use it.
    pub(super) fn attachment(&self, device: u16) -> Option<u64> {
        let mut attached = self.attached.iter();
        attached.find(|(number, _)| *number == device).map(|(_, attachment)| *attachment)
    }

    /// The entry of the list that `is_it` finds; one that says that there is none, otherwise.
    pub(super) fn entry(&self, is_it: impl Fn(u16, &DeviceEntry) -> bool) -> DeviceEntry {
        // Clients of earlier versions know no NICs.
        let is_known = |entry: &&DeviceEntry| self.has_packets || !entry.has(device_flag::NIC);
        let known = || self.devices.iter().filter(is_known);
        let count = u16::try_from(known().count()).unwrap_or(u16::MAX);
        let found = (0..count).zip(known()).find(|(index, entry)| is_it(*index, entry));
        let none = DeviceEntry { count, version: self.devices_version, ..DeviceEntry::default() };
        found.map_or(none, |(index, entry)| DeviceEntry {
            index,
            count,
            version: self.devices_version,
            ..*entry
        })
    }
}
