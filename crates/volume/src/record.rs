//! A volume's record: an entry of the catalogue's leaves.

use crate::bytes::{put, put_u64, u8_at, u64_at};
use crate::geometry::Geometry;
use crate::limits::{MAX_LEVELS, MAX_NAME_BYTES, MAX_VOLUME_BYTES};
use crate::node::{Pointer, Root};

/// Bytes of a record.
pub(crate) const RECORD_BYTES: usize = 192;
/// The bit of the flags that a snapshot has.
const READ_ONLY: u8 = 1;
/// Stands for "no quota".
const NO_QUOTA: u64 = u64::MAX;

/// The durable state of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) blocks: u64,
    pub(crate) quota_blocks: Option<u64>,
    pub(crate) allocated_blocks: u64,
    pub(crate) extents: u64,
    pub(crate) root: Option<Root>,
    /// 0 for none.
    pub(crate) origin: u64,
    pub(crate) created_at_unix_s: u64,
    pub(crate) read_only: bool,
}

/// Whether a volume may be called so.
pub(crate) fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(allowed)
        && !name.starts_with(['.', '-'])
}

/// The most blocks that a volume can have.
pub(crate) fn max_volume_blocks(block_bytes: u32) -> u64 {
    MAX_VOLUME_BYTES.checked_div(u64::from(block_bytes)).unwrap_or(0)
}

impl Record {
    /// Into `RECORD_BYTES` zeros.
    pub(crate) fn encode(&self, bytes: &mut [u8]) {
        put_u64(bytes, 0, self.id);
        put_u64(bytes, 8, self.blocks);
        put_u64(bytes, 16, self.quota_blocks.unwrap_or(NO_QUOTA));
        put_u64(bytes, 24, self.allocated_blocks);
        put_u64(bytes, 32, self.extents);
        let (pointer, level) =
            self.root.map_or((Pointer::default(), 0), |root| (root.pointer, root.level));
        put_u64(bytes, 40, pointer.address);
        put_u64(bytes, 48, pointer.checksum);
        put_u64(bytes, 56, self.origin);
        put_u64(bytes, 64, self.created_at_unix_s);
        let name_bytes = u8::try_from(self.name.len()).unwrap_or(0);
        put(bytes, 72, &[level, if self.read_only { READ_ONLY } else { 0 }, name_bytes]);
        put(bytes, 128, self.name.as_bytes());
    }

    pub(crate) fn decode(bytes: &[u8], geometry: &Geometry) -> Result<Self, String> {
        let (flags, name_bytes) = (u8_at(bytes, 73), usize::from(u8_at(bytes, 74)));
        let name = bytes.get(128..).and_then(|rest| rest.get(..name_bytes)).unwrap_or_default();
        let name = std::str::from_utf8(name).unwrap_or_default().to_owned();
        let quota_blocks = u64_at(bytes, 16);
        let record = Self {
            id: u64_at(bytes, 0),
            name,
            blocks: u64_at(bytes, 8),
            quota_blocks: (quota_blocks != NO_QUOTA).then_some(quota_blocks),
            allocated_blocks: u64_at(bytes, 24),
            extents: u64_at(bytes, 32),
            root: Root::read(u64_at(bytes, 40), u64_at(bytes, 48), u8_at(bytes, 72)),
            origin: u64_at(bytes, 56),
            created_at_unix_s: u64_at(bytes, 64),
            read_only: flags & READ_ONLY != 0,
        };
        let id = record.id;
        if id == 0 {
            return Err("a volume without a number".to_owned());
        }
        if !is_name(&record.name) {
            return Err(format!("volume {id} has a name that cannot be"));
        }
        if flags & !READ_ONLY != 0 {
            return Err(format!("volume {id} has unknown flags {flags:#x}"));
        }
        if record.blocks == 0 || record.blocks > max_volume_blocks(geometry.block_bytes) {
            return Err(format!("volume {id} has {} blocks", record.blocks));
        }
        if let Some(root) = record.root
            && (root.level > MAX_LEVELS || !geometry.node_fits(root.pointer.address))
        {
            return Err(format!(
                "volume {id} has its tree at block {}, level {}",
                root.pointer.address, root.level
            ));
        }
        Ok(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { block_bytes: 1024, total_blocks: 4096, tag: 0 };

    fn example() -> Record {
        Record {
            id: 3,
            name: "a.b-c_D9".to_owned(),
            blocks: 1000,
            quota_blocks: Some(50),
            allocated_blocks: 20,
            extents: 2,
            root: Some(Root { pointer: Pointer { address: 64, checksum: 7 }, level: 0 }),
            origin: 1,
            created_at_unix_s: 1_700_000_000,
            read_only: true,
        }
    }

    fn round(record: &Record) -> Result<Record, String> {
        let mut bytes = [0; RECORD_BYTES];
        record.encode(&mut bytes);
        Record::decode(&bytes, &GEOMETRY)
    }

    #[test]
    fn what_is_written_is_read() {
        let longest = Record {
            name: "x".repeat(64),
            quota_blocks: None,
            root: None,
            read_only: false,
            ..example()
        };
        for record in [example(), longest] {
            assert_eq!(round(&record), Ok(record));
        }
    }

    #[test]
    fn names() {
        for good in ["a", "0", "_", "a.", "root-2026.img", &"x".repeat(64)] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", ".", "..", "-a", ".a", "a b", "a/b", "ü", "a\0", &"x".repeat(65)] {
            assert!(!is_name(bad), "{bad}");
        }
    }

    #[test]
    fn records_that_cannot_be_are_refused() {
        let root = |address, level| Some(Root { pointer: Pointer { address, checksum: 1 }, level });
        let wrong = [
            Record { id: 0, ..example() },
            Record { name: "a/b".to_owned(), ..example() },
            Record { blocks: 0, ..example() },
            Record { blocks: (1 << 38) + 1, ..example() },
            Record { root: root(63, 0), ..example() },
            Record { root: root(4096, 0), ..example() },
            Record { root: root(64, 99), ..example() },
        ];
        for record in wrong {
            assert!(round(&record).is_err(), "{record:?}");
        }
        let mut bytes = [0; RECORD_BYTES];
        example().encode(&mut bytes);
        bytes[73] = 2;
        assert!(Record::decode(&bytes, &GEOMETRY).unwrap_err().contains("flags"));
    }
}
