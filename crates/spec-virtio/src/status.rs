//! Bits of the device status (2.1).

/// The driver has noticed the device.
pub const ACKNOWLEDGE: u8 = 1;
/// The driver knows how to drive it.
pub const DRIVER: u8 = 2;
/// The driver is set up.
pub const DRIVER_OK: u8 = 4;
/// Feature negotiation is complete.
pub const FEATURES_OK: u8 = 8;
/// The device has met an error that it cannot recover from.
pub const DEVICE_NEEDS_RESET: u8 = 0x40;
