//! Packets of a NIC, and its entry in the list of devices.

use sidecore_spec_virtio::net::{MAC_BYTES, MTU_MIN};
use sidecore_units::layout;

use super::control::{DEVICE_NAME_BYTES, DeviceEntry, SERIAL_BYTES, device_flag};

/// Most bytes of a packet with its virtio header: the paper's largest message (4.3).
pub const MAX_PACKET_BYTES: u32 = 64 << 10;

layout! {
    /// The body of a PACKET. All frames of a packet have the same one, but for the offset: the
    /// receiver can begin with any.
    pub struct PacketBody: 52 {
        /// The NIC's number in the list of devices.
        pub device: u16 = 0,
        /// The NIC's epoch.
        pub epoch: u64 = 4,
        /// The number of the packet among those of its NIC and direction in the session, from 1.
        pub sequence: u64 = 12,
        /// Where in the packet the payload belongs.
        pub offset_bytes: u32 = 20,
        /// Size of the packet with its virtio header.
        pub len_bytes: u32 = 24,
    }
}

layout! {
    /// The [`DeviceEntry`] of a NIC, with other fields in the place of those that disks have.
    pub struct NicEntry: 136 {
        /// As of each entry, and so are the others up to the epoch.
        pub device: u16 = 0,
        /// See [`DeviceEntry::index`].
        pub index: u16 = 2,
        /// See [`DeviceEntry::count`].
        pub count: u16 = 4,
        /// See [`DeviceEntry::version`].
        pub version: u32 = 8,
        /// See [`device_flag`].
        pub flags: u32 = 12,
        /// The epoch of the port's owner.
        pub epoch: u64 = 16,
        /// The NIC's hardware address.
        pub mac: [u8; MAC_BYTES] = 24,
        /// The largest packet in bytes without Ethernet header.
        pub mtu: u16 = 30,
        /// UTF-8, padded with zeros.
        pub name: [u8; DEVICE_NAME_BYTES] = 40,
        /// Zeros.
        pub serial: [u8; SERIAL_BYTES] = 104,
    }
}

impl NicEntry {
    /// The entry as the list has it.
    #[must_use]
    pub fn to_device(&self) -> DeviceEntry {
        let flags = self.flags | device_flag::PRESENT | device_flag::NIC;
        DeviceEntry::decode(&Self { flags, ..*self }.encode())
    }

    /// Whether frames may pass.
    #[must_use]
    pub const fn is_up(&self) -> bool {
        self.flags & device_flag::LINK_UP != 0
    }
}

impl DeviceEntry {
    /// The NIC of this entry, if a client can use it: with the address of a station and an MTU that
    /// a device may have (virtio 1.2, 5.1.4.1). A hostile IOhost may claim anything.
    #[must_use]
    pub fn nic(&self) -> Option<NicEntry> {
        if !self.has(device_flag::PRESENT | device_flag::NIC) {
            return None;
        }
        let nic = NicEntry::decode(&self.encode());
        let [first, ..] = nic.mac;
        let is_station = first & 1 == 0 && nic.mac != [0; MAC_BYTES];
        (is_station && nic.mtu >= MTU_MIN).then_some(nic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_is_at_its_offsets() {
        let body = PacketBody {
            device: 0x0201,
            epoch: 0x0c0b_0a09_0807_0605,
            sequence: 0x1413_1211_100f_0e0d,
            offset_bytes: 0x1817_1615,
            len_bytes: 0x1c1b_1a19,
        };
        let mut expected: Vec<u8> = (1..=0x1c).collect();
        expected[2..4].fill(0);
        expected.resize(52, 0);
        assert_eq!(body.encode().as_slice(), expected);
        assert_eq!(PacketBody::decode(&body.encode()), body);
    }

    #[test]
    fn a_nic_is_an_entry_that_no_disk_is() {
        let nic = NicEntry {
            device: 3,
            epoch: 5,
            mac: [2, 0, 0, 0, 0, 9],
            mtu: 1500,
            ..NicEntry::default()
        };
        let entry = nic.to_device();
        assert_eq!(
            entry.nic().map(|nic| (nic.device, nic.epoch, nic.mac, nic.mtu)),
            Some((3, 5, nic.mac, 1500))
        );
        assert!(!entry.is_sound(), "no block size is 0");
        assert!(!nic.is_up());
        let changed = |change: fn(&mut NicEntry)| {
            let mut nic = nic;
            change(&mut nic);
            nic.to_device().nic()
        };
        assert_eq!(changed(|nic| nic.mac = [0; 6]), None);
        assert_eq!(changed(|nic| nic.mac = [3, 0, 0, 0, 0, 9]), None, "a group");
        assert_eq!(changed(|nic| nic.mtu = 67), None);
        assert!(changed(|nic| nic.flags = device_flag::LINK_UP).is_some_and(|nic| nic.is_up()));
        let disk = DeviceEntry { flags: device_flag::PRESENT, ..entry };
        assert_eq!(disk.nic(), None);
    }
}
