//! The binary header (specification, 2.1): 4096 bytes, the JSON area behind them, and a checksum
//! over both. There are two copies.

use sha2::Sha256;
use sha2::digest::Digest;

use crate::error::{LuksError, excerpt};
use crate::header::Source;

pub(crate) const BINARY_BYTES: usize = 4096;
/// The sizes that a copy may have, which are the possible offsets of the second one.
const SIZES: [u64; 9] =
    [0x4000, 0x8000, 0x1_0000, 0x2_0000, 0x4_0000, 0x8_0000, 0x10_0000, 0x20_0000, 0x40_0000];
const FIRST: &[u8; 6] = b"LUKS\xba\xbe";
const SECOND: &[u8; 6] = b"SKUL\xba\xbe";
const CHECKSUM_BYTES: usize = 64;

// Offsets of the fields.
const VERSION: usize = 6;
const SIZE: usize = 8;
const SEQUENCE: usize = 16;
const CHECKSUM_NAME: usize = 72;
const SALT: usize = 104;
const UUID: usize = 168;
const OFFSET: usize = 256;
const CHECKSUM: usize = 448;

/// An undamaged copy.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) size_bytes: u64,
    pub(crate) sequence: u64,
    pub(crate) uuid: String,
    /// The text in the JSON area.
    pub(crate) json: Vec<u8>,
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.iter_mut().zip(bytes.iter().skip(at)).for_each(|(to, from)| *to = *from);
    field
}

fn text<const N: usize>(bytes: &[u8], at: usize) -> String {
    let field: [u8; N] = field(bytes, at);
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(N);
    String::from_utf8_lossy(field.get(..end).unwrap_or_default()).into_owned()
}

fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes.iter_mut().skip(at).zip(field).for_each(|(to, from)| *to = *from);
}

/// Reads the newer undamaged copy; the flag says whether the other one is damaged or missing.
pub(crate) fn read(source: &impl Source) -> Result<(Copy, bool), LuksError> {
    let first = read_copy(source, 0, FIRST);
    let offsets = match &first {
        Ok(copy) => vec![copy.size_bytes],
        Err(_) => SIZES.to_vec(),
    };
    let mut damage = first.as_ref().err().and_then(|error| match error {
        LuksError::Damaged(why) => Some(*why),
        _ => None,
    });
    let mut second = None;
    for offset in offsets {
        match read_copy(source, offset, SECOND) {
            Ok(copy) => {
                second = Some(copy);
                break;
            }
            Err(LuksError::Damaged(why)) => damage = Some(why),
            Err(_) => {}
        }
    }
    match (first, second) {
        (Ok(first), Some(second)) if second.sequence > first.sequence => Ok((second, false)),
        (Ok(first), second) => Ok((first, second.is_none())),
        (Err(_), Some(second)) => Ok((second, true)),
        (Err(error @ (LuksError::Io(_) | LuksError::Version { .. })), None) => Err(error),
        (Err(_), None) => Err(damage.map_or(LuksError::NoHeader, LuksError::Damaged)),
    }
}

fn read_copy(source: &impl Source, offset: u64, magic: &[u8; 6]) -> Result<Copy, LuksError> {
    let mut bytes = vec![0; BINARY_BYTES];
    match source.read_at(offset, &mut bytes) {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            return Err(LuksError::NoHeader);
        }
        read => read?,
    }
    if field::<6>(&bytes, 0) != *magic {
        return Err(LuksError::NoHeader);
    }
    let version = u16::from_be_bytes(field(&bytes, VERSION));
    if version != 2 {
        return Err(LuksError::Version { version });
    }
    let size_bytes = u64::from_be_bytes(field(&bytes, SIZE));
    if !SIZES.contains(&size_bytes) || ![0, size_bytes].contains(&offset) {
        return Err(LuksError::Damaged("its size is none of the possible ones"));
    }
    if u64::from_be_bytes(field(&bytes, OFFSET)) != offset {
        return Err(LuksError::Damaged("it is not at the offset that it names"));
    }
    if text::<32>(&bytes, CHECKSUM_NAME) != "sha256" {
        return Err(LuksError::Damaged("its checksum is not SHA-256"));
    }
    bytes.resize(usize::try_from(size_bytes).unwrap_or(BINARY_BYTES), 0);
    let json_offset = offset.saturating_add(BINARY_BYTES as u64);
    let cut = |_| LuksError::Damaged("its file ends before it");
    source.read_at(json_offset, bytes.get_mut(BINARY_BYTES..).unwrap_or_default()).map_err(cut)?;
    let expected: [u8; 32] = field(&bytes, CHECKSUM);
    if checksum(&mut bytes) != expected {
        return Err(LuksError::Damaged("its checksum is wrong"));
    }
    let json = bytes.get(BINARY_BYTES..).unwrap_or_default();
    let json = json.split(|byte| *byte == 0).next().unwrap_or_default().to_vec();
    Ok(Copy {
        size_bytes,
        sequence: u64::from_be_bytes(field(&bytes, SEQUENCE)),
        uuid: excerpt(&text::<40>(&bytes, UUID)),
        json,
    })
}

/// The checksum of a copy, whose own field counts as zeros, and is left so.
fn checksum(bytes: &mut [u8]) -> [u8; 32] {
    put(bytes, CHECKSUM, &[0; CHECKSUM_BYTES]);
    Sha256::digest(bytes).into()
}

/// Both copies, one behind the other, of a header with this text; `None` if it is too long.
pub(crate) fn encode(
    size_bytes: usize,
    uuid: &str,
    salts: [[u8; 64]; 2],
    json: &[u8],
) -> Option<Vec<u8>> {
    let room = size_bytes.checked_sub(BINARY_BYTES)?;
    // The text ends with a zero byte.
    if json.len() >= room {
        return None;
    }
    let mut both = Vec::new();
    for ((magic, offset), salt) in [(FIRST, 0), (SECOND, size_bytes as u64)].into_iter().zip(salts)
    {
        let mut bytes = vec![0; size_bytes];
        put(&mut bytes, 0, magic);
        put(&mut bytes, VERSION, &2_u16.to_be_bytes());
        put(&mut bytes, SIZE, &(size_bytes as u64).to_be_bytes());
        put(&mut bytes, SEQUENCE, &1_u64.to_be_bytes());
        put(&mut bytes, CHECKSUM_NAME, b"sha256");
        put(&mut bytes, SALT, &salt);
        put(&mut bytes, UUID, uuid.as_bytes());
        put(&mut bytes, OFFSET, &offset.to_be_bytes());
        put(&mut bytes, BINARY_BYTES, json);
        let sum = checksum(&mut bytes);
        put(&mut bytes, CHECKSUM, &sum);
        both.append(&mut bytes);
    }
    Some(both)
}
