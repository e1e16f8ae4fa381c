//! What an NVMe function and its namespace are called: the same names after every restart.

use sidecore_nvme::Identity;
use twox_hash::XxHash3_64;

use crate::report::VolumeReport;
use crate::spec::{DeviceSpec, StoreSpec};

const VIRTUAL_FUNCTION: &str = "Sidecore virtual function";
const PHYSICAL_FUNCTION: &str = "Sidecore physical function";

/// The names that Identify tells of a controller that is a primary one, or not.
pub(super) fn identity(spec: &DeviceSpec, is_primary: bool) -> Identity {
    // Whoever sees one function shall not learn of another: each has a subsystem of its own.
    let id = hash(["subsystem", &spec.name, &spec.store]);
    let [a, b, c, d] =
        [(id >> 96) as u32, (id >> 80) as u16 as u32, (id >> 64) as u16 as u32, (id >> 48) as u16 as u32];
    let rest = id as u64 & 0xffff_ffff_ffff;
    Identity {
        serial: ascii(spec.serial.as_deref().unwrap_or(&spec.name), crate::spec::SERIAL_MAX_BYTES),
        model: if is_primary { PHYSICAL_FUNCTION } else { VIRTUAL_FUNCTION }.to_owned(),
        subsystem_name: format!("nqn.2014-08.org.nvmexpress:uuid:{a:08x}-{b:04x}-{c:04x}-{d:04x}-{rest:012x}"),
        controller_id: 0,
    }
}

/// A namespace's globally unique identifier: of its store's name, whichever device serves it.
pub(super) fn nguid(bottom: &StoreSpec) -> [u8; 16] {
    let kind = &bottom.kind;
    hash([kind.word(), kind.controller().unwrap_or_default(), &bottom.name]).to_be_bytes()
}

/// That of a volume, which stays when the volume is given another name, and is not that of another one which comes to have
/// its name (Identify Namespace says so, NSFEAT bit 3): its number is used once, and its age tells stores apart.
pub(super) fn volume_nguid(volume: &VolumeReport) -> [u8; 16] {
    let number = format!("{} of {}", volume.id, volume.created_at_unix_s);
    hash(["volume", &volume.controller, &number]).to_be_bytes()
}

/// The identifiers of a namespace.
#[derive(Clone, Copy, Debug)]
pub(super) struct NamespaceIds {
    pub(super) nguid: [u8; 16],
    pub(super) uuid: [u8; 16],
}

impl NamespaceIds {
    /// Those of a volume on the store of this number.
    pub(super) fn of_volume(volume: &VolumeReport, store_uuid: [u8; 16]) -> Self {
        Self { nguid: volume_nguid(volume), uuid: volume_uuid(volume.id, store_uuid) }
    }
}

/// A volume's UUID: of its number, which is used once, and of its store's, which stays whatever the controller is called.
fn volume_uuid(id: u64, store_uuid: [u8; 16]) -> [u8; 16] {
    custom_uuid(hash(["uuid", &format!("{:032x}", u128::from_be_bytes(store_uuid)), &id.to_string()]))
}

/// The UUID of a namespace that is no volume: of the store's number, if it has one, or of its name.
pub(super) fn uuid(bottom: &StoreSpec, store_uuid: Option<[u8; 16]>) -> [u8; 16] {
    custom_uuid(match store_uuid {
        Some(store_uuid) => hash(["uuid", &format!("{:032x}", u128::from_be_bytes(store_uuid)), "whole"]),
        None => hash(["uuid", bottom.kind.word(), &bottom.name]),
    })
}

/// A UUID of these bits (RFC 9562, version 8: made in a way of our own).
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

/// The characters that Identify can have, so many of them.
fn ascii(text: &str, max: usize) -> String {
    text.chars().map(|c| if (' '..='~').contains(&c) { c } else { '_' }).take(max).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_printable_and_as_long_as_there_is_room() {
        assert_eq!(ascii("größe\n", 20), "gr__e_");
        assert_eq!(ascii("a name that is longer than that", 20), "a name that is longe");
    }

    #[test]
    fn uuids_are_of_version_8_and_differ() {
        let uuids = [volume_uuid(1, [7; 16]), volume_uuid(2, [7; 16]), volume_uuid(1, [8; 16]), custom_uuid(u128::MAX)];
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
