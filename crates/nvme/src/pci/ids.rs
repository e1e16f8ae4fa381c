//! The numbers that a function is known by.
//!
//! Drivers of NVMe controllers bind by class. The vendor and device identifiers are ones that
//! PCI-SIG has not assigned, so that no driver with workarounds for a certain product takes this
//! for it.

/// Vendor ID, and Subsystem Vendor ID.
pub(crate) const VENDOR: u16 = 0x1234;
/// Device ID, and Subsystem ID.
pub(crate) const DEVICE: u16 = 0x5EC0;
/// Revision ID.
pub(crate) const REVISION: u8 = 1;
