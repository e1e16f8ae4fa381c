//! The identifiers of NVMe functions and namespaces: the same after every restart.

use sidecore_nvme::Identity;
use twox_hash::XxHash3_64;

const VIRTUAL_FUNCTION: &str = "Sidecore virtual function";
const PHYSICAL_FUNCTION: &str = "Sidecore physical function";
/// Longest serial number in Identify Controller (SN), in bytes.
const SERIAL_MAX_BYTES: usize = 20;

/// The identity of the controller of `device`, which was configured to serve `store`. The serial
/// number is cut to the characters and the length that Identify has room for.
#[must_use]
pub fn identity(device: &str, store: &str, serial: &str, is_primary: bool) -> Identity {
    // Each function has a subsystem of its own: its host must not learn of other functions.
    let id = hash(["subsystem", device, store]);
    let [a, b, c, d] = [
        (id >> 96) as u32,
        (id >> 80) as u16 as u32,
        (id >> 64) as u16 as u32,
        (id >> 48) as u16 as u32,
    ];
    let rest = id as u64 & 0xffff_ffff_ffff;
    Identity {
        serial: ascii(serial, SERIAL_MAX_BYTES),
        model: if is_primary { PHYSICAL_FUNCTION } else { VIRTUAL_FUNCTION }.to_owned(),
        subsystem_name: format!(
            "nqn.2014-08.org.nvmexpress:uuid:{a:08x}-{b:04x}-{c:04x}-{d:04x}-{rest:012x}"
        ),
        controller_id: 0,
    }
}

/// The identifiers of a namespace.
#[derive(Clone, Copy, Debug)]
pub struct NamespaceIds {
    /// Globally unique (NGUID).
    pub nguid: [u8; 16],
    /// As in RFC 9562.
    pub uuid: [u8; 16],
}

impl NamespaceIds {
    /// The identifiers of a volume. Both stay when the volume is renamed, and are not those of a
    /// later volume of its name (Identify Namespace says so, NSFEAT bit 3): its number is used
    /// once, and its creation time and the store's number tell stores apart.
    #[must_use]
    pub fn of_volume(
        controller: &str,
        id: u64,
        created_at_unix_s: u64,
        store_uuid: [u8; 16],
    ) -> Self {
        let number = format!("{id} of {created_at_unix_s}");
        let nguid = hash(["volume", controller, &number]).to_be_bytes();
        Self { nguid, uuid: custom_uuid(hash(["uuid", &hex(store_uuid), &id.to_string()])) }
    }

    /// The identifiers of a whole store, named by its type and its name and, if it is a physical
    /// function, by its controller and the number that the controller's store was formatted with.
    #[must_use]
    pub fn of_store(store_type: &str, name: &str, controller: Option<(&str, [u8; 16])>) -> Self {
        let nguid = hash([store_type, controller.map_or("", |(controller, _)| controller), name])
            .to_be_bytes();
        let uuid = custom_uuid(match controller {
            Some((_, store_uuid)) => hash(["uuid", &hex(store_uuid), "whole"]),
            None => hash(["uuid", store_type, name]),
        });
        Self { nguid, uuid }
    }
}

fn hex(uuid: [u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(uuid))
}

/// A UUID of these bits (RFC 9562, version 8: custom).
fn custom_uuid(bits: u128) -> [u8; 16] {
    const VERSION: u128 = 0xF << 76;
    const VARIANT: u128 = 0b11 << 62;
    (bits & !VERSION & !VARIANT | 8 << 76 | 0b10 << 62).to_be_bytes()
}

fn hash(parts: [&str; 3]) -> u128 {
    let text = parts.join("\0");
    let half = |seed| u128::from(XxHash3_64::oneshot_with_seed(seed, text.as_bytes()));
    half(0) << 64 | half(1)
}

/// Replaces the characters that Identify cannot have, and cuts the rest.
fn ascii(text: &str, max: usize) -> String {
    text.chars().map(|c| if (' '..='~').contains(&c) { c } else { '_' }).take(max).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn serials_are_printable_and_as_long_as_there_is_room() {
        assert_eq!(ascii("größe\n", 20), "gr__e_");
        assert_eq!(ascii("a name that is longer than that", 20), "a name that is longe");
    }

    #[test]
    fn uuids_are_of_version_8_and_differ() {
        let volume_uuid = |id, store| NamespaceIds::of_volume("pool", id, 0, store).uuid;
        let uuids = [
            volume_uuid(1, [7; 16]),
            volume_uuid(2, [7; 16]),
            volume_uuid(1, [8; 16]),
            custom_uuid(u128::MAX),
        ];
        for (index, uuid) in uuids.iter().enumerate() {
            assert_eq!((uuid[6] >> 4, uuid[8] >> 6), (8, 0b10));
            assert!(uuids[..index].iter().all(|other| other != uuid));
        }
        assert_eq!(volume_uuid(1, [7; 16]), volume_uuid(1, [7; 16]));
    }

    #[test]
    fn different_things_have_different_names() {
        assert_ne!(hash(["volume", "a", "b"]), hash(["ram", "a", "b"]));
        assert_ne!(hash(["volume", "ab", ""]), hash(["volume", "a", "b"]));
    }
}
