//! A header as it is used: checked, and unlocked by a passphrase.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use argon2::Algorithm;
use base64ct::{Base64, Encoding as _};
use zeroize::Zeroizing;

use crate::binary;
use crate::error::{LuksError, excerpt};
use crate::kdf::{Derivation, MAX_HEADER_WORK};
use crate::metadata::{Digest, KdfEntry, Keyslot, KeyslotEntry, Metadata, SegmentEntry};
use crate::split::{Hash, merge};
use crate::xts::{KEY_BYTES, SectorSize, Tweaks, Xts};

/// The one cipher that is supported, by its name in headers.
pub(crate) const CIPHER: &str = "aes-xts-plain64";
/// Slots at most (specification, 3.2).
const MAX_SLOTS: usize = 32;
/// Stripes of a key at most, which is what every program writes.
pub(crate) const MAX_STRIPES: u32 = 4000;
/// Bytes of a salt or a digest at most.
const MAX_TEXT_BYTES: usize = 1024;

/// The bytes of a header.
pub trait Source {
    /// Fills `to` with the bytes at `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` if the header ends before, or the kernel's.
    fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<()>;
}

impl Source for File {
    fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(to, offset)
    }
}

impl Source for &[u8] {
    fn read_at(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|at| self.get(at..)?.get(..to.len()));
        let from = from.ok_or(io::ErrorKind::UnexpectedEof)?;
        to.copy_from_slice(from);
        Ok(())
    }
}

/// The encrypted part of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte on the device, a multiple of a sector.
    pub offset_bytes: u64,
    /// Size, or `None` for all bytes to the end of the device.
    pub len_bytes: Option<u64>,
    /// Sectors are encrypted one by one.
    pub sector: SectorSize,
    /// Number of the first sector for the cipher, in units of 512 bytes.
    pub first_unit: u64,
}

/// The key of the data.
pub struct VolumeKey(Zeroizing<[u8; KEY_BYTES]>);

impl VolumeKey {
    /// Expands the key.
    #[must_use]
    pub fn cipher(&self) -> Xts {
        Xts::new(&self.0)
    }
}

impl std::fmt::Debug for VolumeKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("VolumeKey(..)")
    }
}

/// A key slot within the limits.
struct Slot {
    name: String,
    priority: u32,
    derivation: Derivation,
    salt: Vec<u8>,
    hash: Hash,
    stripes: u32,
    offset_bytes: u64,
}

/// The check of a volume key.
struct Check {
    slots: Vec<String>,
    derivation: Derivation,
    salt: Vec<u8>,
    digest: Vec<u8>,
}

/// The metadata of a header.
pub struct Header {
    uuid: String,
    is_damaged: bool,
    segment: Segment,
    slots: Vec<Slot>,
    /// Slots of kinds that are not supported, with the reasons.
    unsupported: Vec<(String, LuksError)>,
    check: Check,
}

impl Header {
    /// Reads the newer undamaged copy of a header. Writes nothing: `cryptsetup repair` does.
    ///
    /// # Errors
    /// There is no header, or it is damaged, or needs a feature that is not supported.
    pub fn read(source: &impl Source) -> Result<Self, LuksError> {
        let (copy, is_damaged) = binary::read(source)?;
        let malformed =
            |error: serde_json::Error| LuksError::Malformed(excerpt(&error.to_string()));
        let metadata: Metadata = serde_json::from_slice(&copy.json).map_err(malformed)?;
        if let Some(name) = metadata.config.requirements.mandatory.first() {
            return Err(LuksError::Unsupported {
                what: "the requirement",
                value: excerpt(name),
                rule: "none is supported; finish the re-encryption that has set it with \
                       `cryptsetup reencrypt`",
            });
        }
        let mut segments = metadata.segments.iter();
        let (Some((number, entry)), None) = (segments.next(), segments.next()) else {
            return Err(LuksError::Unsupported {
                what: "a number of segments of",
                value: metadata.segments.len().to_string(),
                rule: "exactly one is supported; finish its re-encryption with `cryptsetup \
                       reencrypt`",
            });
        };
        let segment = segment(entry)?;
        let has_it = |digest: &&Digest| digest.segments.contains(number);
        let digest = metadata.digests.values().find(has_it);
        let digest =
            digest.ok_or_else(|| LuksError::Malformed("no digest has the segment".to_owned()))?;
        let (slots, unsupported) = slots(&metadata, copy.size_bytes);
        Ok(Self { uuid: copy.uuid, is_damaged, segment, slots, unsupported, check: check(digest)? })
    }

    /// Its UUID, as text.
    #[must_use]
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Whether the other copy is damaged or missing.
    #[must_use]
    pub fn is_damaged(&self) -> bool {
        self.is_damaged
    }

    /// The encrypted part of the device.
    #[must_use]
    pub fn segment(&self) -> Segment {
        self.segment
    }

    /// The volume key, from the first slot that opens with the passphrase. Takes seconds.
    ///
    /// # Errors
    /// No slot opens, those that are tried before cost too much, or the header cannot be read.
    pub fn unlock(self, source: &impl Source, passphrase: &[u8]) -> Result<VolumeKey, LuksError> {
        let (slots, too_much) = self.affordable();
        for slot in slots {
            let key = slot.open(source, passphrase)?;
            if self.check.accepts(&key)? {
                return Ok(VolumeKey(key));
            }
        }
        if let Some(too_much) = too_much {
            return Err(too_much);
        }
        // The passphrase may be that of a slot which is not supported.
        Err(self.unsupported.into_iter().next().map_or(LuksError::WrongKey, |(_, error)| error))
    }

    /// The slots to be tried, in their order, as far as their work together is within the limit;
    /// and the error if there are more.
    fn affordable(&self) -> (Vec<&Slot>, Option<LuksError>) {
        let mut slots: Vec<&Slot> = self.slots.iter().filter(|slot| slot.priority > 0).collect();
        slots.sort_by_key(|slot| std::cmp::Reverse(slot.priority));
        slots.retain(|slot| self.check.slots.contains(&slot.name));
        // The key of each slot is checked.
        let check = self.check.derivation.work(self.check.digest.len());
        let mut work = 0_u64;
        let within = slots.iter().position(|slot| {
            work = work.saturating_add(slot.derivation.work(KEY_BYTES)).saturating_add(check);
            work > MAX_HEADER_WORK
        });
        let Some(within) = within else { return (slots, None) };
        slots.truncate(within);
        (slots, Some(LuksError::Work { slots: within }))
    }
}

impl Slot {
    /// The key in the slot, if the passphrase is that of the slot, and otherwise any bytes.
    fn open(
        &self,
        source: &impl Source,
        passphrase: &[u8],
    ) -> Result<Zeroizing<[u8; KEY_BYTES]>, LuksError> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        self.derivation.derive(passphrase, &self.salt, &mut *key)?;
        let mut stripes = Zeroizing::new(vec![0; stripes_bytes(self.stripes)]);
        source.read_at(self.offset_bytes, &mut stripes)?;
        let (sector, mut tweaks) = (SLOT_SECTOR, Tweaks::default());
        let malformed = |error: crate::RaggedData| LuksError::Malformed(error.to_string());
        Xts::new(&key).decrypt(0, sector, &mut stripes, &mut tweaks).map_err(malformed)?;
        stripes.truncate((self.stripes as usize).saturating_mul(KEY_BYTES));
        Ok(merge(&stripes, self.hash))
    }
}

/// Slots are encrypted in sectors of this size.
pub(crate) const SLOT_SECTOR: SectorSize = SectorSize::SMALLEST;

/// Bytes of the stripes of a key, in whole sectors.
pub(crate) fn stripes_bytes(stripes: u32) -> usize {
    (stripes as usize).saturating_mul(KEY_BYTES).next_multiple_of(SLOT_SECTOR.bytes() as usize)
}

impl Check {
    fn accepts(&self, key: &[u8; KEY_BYTES]) -> Result<bool, LuksError> {
        let mut digest = vec![0; self.digest.len()];
        self.derivation.derive(key, &self.salt, &mut digest)?;
        let differences = digest.iter().zip(&self.digest).map(|(a, b)| a ^ b);
        Ok(differences.fold(0, |all, bits| all | bits) == 0)
    }
}

/// The bytes of a text in base64: at least one, and not many.
fn decode(name: &str, text: &str) -> Result<Vec<u8>, LuksError> {
    let bytes = Base64::decode_vec(text).ok();
    bytes.filter(|bytes| (1..=MAX_TEXT_BYTES).contains(&bytes.len())).ok_or_else(|| {
        LuksError::Malformed(format!("a {name} is no base64 of 1 to {MAX_TEXT_BYTES} bytes"))
    })
}

fn hash(name: &str) -> Result<Hash, LuksError> {
    Hash::from_name(name).ok_or_else(|| LuksError::Unsupported {
        what: "the hash",
        value: excerpt(name),
        rule: "sha256 and sha512 are supported; change it with `cryptsetup luksConvertKey`",
    })
}

fn check(digest: &Digest) -> Result<Check, LuksError> {
    if digest.kind != "pbkdf2" {
        return Err(LuksError::Unsupported {
            what: "the digest",
            value: excerpt(&digest.kind),
            rule: "only pbkdf2 is supported; make the header with cryptsetup 2",
        });
    }
    let (hash, bytes) = (hash(&digest.hash)?, decode("digest", &digest.digest)?);
    // PBKDF2 would repeat its iterations for each block of the hash.
    if bytes.len() > hash.bytes() {
        return Err(LuksError::Malformed("its digest is longer than a block of its hash".into()));
    }
    Ok(Check {
        slots: digest.keyslots.clone(),
        derivation: Derivation::pbkdf2(hash, digest.iterations)?,
        salt: decode("digest's salt", &digest.salt)?,
        digest: bytes,
    })
}

fn slots(metadata: &Metadata, header_bytes: u64) -> (Vec<Slot>, Vec<(String, LuksError)>) {
    let (mut slots, mut unsupported) = (Vec::new(), Vec::new());
    for (name, slot) in metadata.keyslots.iter().take(MAX_SLOTS) {
        let Keyslot::Luks2(entry) = slot else { continue };
        match slot_of(name, entry, header_bytes) {
            Ok(slot) => slots.push(slot),
            Err(error) => unsupported.push((name.clone(), error)),
        }
    }
    (slots, unsupported)
}

fn slot_of(name: &str, entry: &KeyslotEntry, header_bytes: u64) -> Result<Slot, LuksError> {
    is_supported(Some(&entry.area.encryption), entry.area.key_size)?;
    is_supported(Some(CIPHER), entry.key_size)?;
    let malformed =
        |why: &str| Err(LuksError::Malformed(format!("key slot {}: {why}", excerpt(name))));
    if entry.area.kind != "raw" || entry.af.kind != "luks1" {
        return malformed("its area is not raw, or its splitter not luks1");
    }
    if !(1..=MAX_STRIPES).contains(&entry.af.stripes) {
        return malformed("it has no stripes, or more than 4000");
    }
    if entry.area.size < stripes_bytes(entry.af.stripes) as u64 {
        return malformed("its area is smaller than its stripes");
    }
    // Both copies of the metadata are before the areas.
    if entry.area.offset < header_bytes.saturating_mul(2) {
        return malformed("its area lies in the metadata");
    }
    let (derivation, salt) = match &entry.kdf {
        KdfEntry::Argon2i { time, memory, cpus, salt } => {
            (Derivation::argon2(Algorithm::Argon2i, (*time, *memory, *cpus))?, salt)
        }
        KdfEntry::Argon2id { time, memory, cpus, salt } => {
            (Derivation::argon2(Algorithm::Argon2id, (*time, *memory, *cpus))?, salt)
        }
        KdfEntry::Pbkdf2 { hash: name, iterations, salt } => {
            (Derivation::pbkdf2(hash(name)?, *iterations)?, salt)
        }
    };
    Ok(Slot {
        name: name.to_owned(),
        priority: entry.priority.unwrap_or(1),
        derivation,
        salt: decode("key slot's salt", salt)?,
        hash: hash(&entry.af.hash)?,
        stripes: entry.af.stripes,
        offset_bytes: entry.area.offset,
    })
}

/// Whether this is AES-256-XTS with plain 64-bit initial values.
fn is_supported(encryption: Option<&str>, key_bytes: u32) -> Result<(), LuksError> {
    if encryption == Some(CIPHER) && key_bytes as usize == KEY_BYTES {
        return Ok(());
    }
    Err(LuksError::Unsupported {
        what: "the encryption",
        value: format!(
            "{}, {} bits",
            excerpt(encryption.unwrap_or("none")),
            u64::from(key_bytes).saturating_mul(8)
        ),
        rule: "aes-xts-plain64 with 512 bits is supported, which is cryptsetup's default",
    })
}

fn segment(entry: &SegmentEntry) -> Result<Segment, LuksError> {
    if entry.kind != "crypt" || entry.integrity.is_some() {
        return Err(LuksError::Unsupported {
            what: "a segment of type",
            value: excerpt(&entry.kind),
            rule: "only crypt without integrity is supported",
        });
    }
    // The size of the key is that of the slots.
    is_supported(entry.encryption.as_deref(), KEY_BYTES as u32)?;
    let number = |name: &str, text: &str| -> Result<u64, LuksError> {
        text.parse().map_err(|_| {
            let text = excerpt(text);
            LuksError::Malformed(format!("the segment's {name} \"{text}\" is no number"))
        })
    };
    let sector = entry.sector_size.and_then(SectorSize::new).ok_or_else(|| {
        LuksError::Malformed("the segment's sector size is not 512, 1024, 2048 or 4096".to_owned())
    })?;
    let len_bytes = match entry.size.as_str() {
        "dynamic" => None,
        size => Some(number("size", size)?),
    };
    let mask = u64::from(sector.bytes()).wrapping_sub(1);
    if (entry.offset | len_bytes.unwrap_or(0)) & mask != 0 || len_bytes == Some(0) {
        return Err(LuksError::Malformed(
            "the segment's offset or size is no whole number of its sectors".to_owned(),
        ));
    }
    let first_unit = number("iv_tweak", entry.iv_tweak.as_deref().unwrap_or("0"))?;
    Ok(Segment { offset_bytes: entry.offset, len_bytes, sector, first_unit })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Kdf, NewHeader};

    /// A header with this many key slots, each with this work.
    fn header(count: usize, derivation: Derivation) -> Header {
        let kdf = Kdf::Argon2id { passes: 1, memory_kib: 64, lanes: 1 };
        let bytes = NewHeader { sector: SLOT_SECTOR, kdf }.make(b"secret").unwrap();
        let mut header = Header::read(&&*bytes).unwrap();
        let slot = |number: usize| Slot {
            name: number.to_string(),
            priority: 1,
            derivation,
            salt: vec![0; 32],
            hash: Hash::Sha256,
            stripes: 1,
            offset_bytes: 0,
        };
        header.slots = (0..count).map(slot).collect();
        header.check.slots = header.slots.iter().map(|slot| slot.name.clone()).collect();
        header
    }

    #[test]
    fn key_slots_are_tried_for_minutes_and_not_for_half_an_hour() {
        let argon2 =
            |passes| Derivation::argon2(Algorithm::Argon2id, (passes, 1 << 20, 4)).unwrap();
        let defaults = header(MAX_SLOTS, argon2(4));
        let (slots, too_much) = defaults.affordable();
        assert!(slots.len() == MAX_SLOTS && too_much.is_none(), "{too_much:?}");
        let hostile = header(MAX_SLOTS, argon2(64));
        let (slots, too_much) = hostile.affordable();
        assert!(matches!(too_much, Some(LuksError::Work { slots: 3 })), "{too_much:?}");
        assert_eq!(slots.len(), 3);
    }
}
