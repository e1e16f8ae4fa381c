//! A new header.

use std::collections::BTreeMap;

use argon2::Algorithm;
use base64ct::{Base64, Encoding as _};
use zeroize::Zeroizing;

use crate::binary;
use crate::error::LuksError;
use crate::header::{CIPHER, MAX_STRIPES, SLOT_SECTOR, stripes_bytes};
use crate::kdf::{Derivation, Kdf};
use crate::metadata::{
    Area, Config, Digest, KdfEntry, Keyslot, KeyslotEntry, Metadata, Requirements, SegmentEntry,
    Splitter,
};
use crate::split::{Hash, split};
use crate::xts::{KEY_BYTES, SectorSize, Tweaks, Xts};

/// A copy of the metadata, as cryptsetup makes it.
const COPY_BYTES: usize = 0x4000;
/// The JSON area of a copy.
const JSON_BYTES: usize = COPY_BYTES - binary::BINARY_BYTES;
/// The first key slot, behind both copies.
const SLOT_OFFSET: usize = 2 * COPY_BYTES;
/// The slot's stripes, in whole pages.
const SLOT_BYTES: usize = (MAX_STRIPES as usize * KEY_BYTES).next_multiple_of(4096);
/// The file of a header, as cryptsetup makes it: with room for more slots.
const HEADER_BYTES: usize = 16 << 20;
/// The area of all key slots.
const SLOTS_BYTES: usize = HEADER_BYTES - SLOT_OFFSET;
const SALT_BYTES: usize = 32;
/// Repetitions of the hash of the digest. The volume key is random, so more would protect nothing.
const DIGEST_ITERATIONS: u32 = 1000;

/// A header with one key slot, for data on another device.
#[derive(Clone, Copy, Debug)]
pub struct NewHeader {
    /// Sectors are encrypted one by one.
    pub sector: SectorSize,
    /// The derivation of the slot's key from the passphrase.
    pub kdf: Kdf,
}

impl NewHeader {
    /// Size of a header's file.
    pub const FILE_BYTES: u64 = HEADER_BYTES as u64;

    /// Makes a volume key and the start of a header's file that holds it; the rest of the file is
    /// zeros. Takes seconds.
    ///
    /// # Errors
    /// The costs of the derivation are impossible, or the kernel gives no random bytes.
    pub fn make(&self, passphrase: &[u8]) -> Result<Vec<u8>, LuksError> {
        let key = volume_key()?;
        let slot_salt = random::<SALT_BYTES>()?;
        let (derivation, kdf) = self.derivation(&Base64::encode_string(&slot_salt))?;
        let mut slot_key = Zeroizing::new([0; KEY_BYTES]);
        derivation.derive(passphrase, &slot_salt, &mut *slot_key)?;

        let mut stripes = Zeroizing::new(vec![0; stripes_bytes(MAX_STRIPES)]);
        fill_random(&mut stripes)?;
        split(&key, &mut stripes, Hash::Sha256);
        let malformed = |error: crate::RaggedData| LuksError::Malformed(error.to_string());
        Xts::new(&slot_key)
            .encrypt(0, SLOT_SECTOR, &mut stripes, &mut Tweaks::default())
            .map_err(malformed)?;

        let metadata = self.metadata(kdf, digest(&key)?);
        let json = serde_json::to_vec(&metadata)
            .map_err(|error| LuksError::Malformed(error.to_string()))?;
        let salts = [random()?, random()?];
        let mut header = binary::encode(COPY_BYTES, &uuid()?, salts, &json)
            .ok_or_else(|| LuksError::Malformed("it is longer than its area".to_owned()))?;
        header.extend_from_slice(&stripes);
        Ok(header)
    }

    fn derivation(&self, salt: &str) -> Result<(Derivation, KdfEntry), LuksError> {
        let salt = salt.to_owned();
        Ok(match self.kdf {
            Kdf::Argon2id { passes, memory_kib, lanes } => (
                Derivation::argon2(Algorithm::Argon2id, (passes, memory_kib, lanes))?,
                KdfEntry::Argon2id { time: passes, memory: memory_kib, cpus: lanes, salt },
            ),
            Kdf::Pbkdf2 { iterations } => (
                Derivation::pbkdf2(Hash::Sha256, iterations)?,
                KdfEntry::Pbkdf2 { hash: "sha256".to_owned(), iterations, salt },
            ),
        })
    }

    fn metadata(&self, kdf: KdfEntry, digest: Digest) -> Metadata {
        let slot = KeyslotEntry {
            key_size: KEY_BYTES as u32,
            priority: None,
            af: Splitter {
                kind: "luks1".to_owned(),
                stripes: MAX_STRIPES,
                hash: "sha256".to_owned(),
            },
            area: Area {
                kind: "raw".to_owned(),
                offset: SLOT_OFFSET as u64,
                size: SLOT_BYTES as u64,
                encryption: CIPHER.to_owned(),
                key_size: KEY_BYTES as u32,
            },
            kdf,
        };
        let segment = SegmentEntry {
            kind: "crypt".to_owned(),
            offset: 0,
            size: "dynamic".to_owned(),
            iv_tweak: Some("0".to_owned()),
            encryption: Some(CIPHER.to_owned()),
            sector_size: Some(self.sector.bytes()),
            integrity: None,
            flags: Vec::new(),
        };
        let first = || "0".to_owned();
        Metadata {
            keyslots: BTreeMap::from([(first(), Keyslot::Luks2(slot))]),
            tokens: BTreeMap::new(),
            segments: BTreeMap::from([(first(), segment)]),
            digests: BTreeMap::from([(first(), digest)]),
            config: Config {
                json_size: JSON_BYTES as u64,
                keyslots_size: SLOTS_BYTES as u64,
                requirements: Requirements::default(),
            },
        }
    }
}

/// A random key with two different halves, as XTS needs them.
fn volume_key() -> Result<Zeroizing<[u8; KEY_BYTES]>, LuksError> {
    let mut key = Zeroizing::new([0; KEY_BYTES]);
    loop {
        fill_random(&mut *key)?;
        let (data, tweak) = key.split_at(KEY_BYTES / 2);
        if data != tweak {
            return Ok(key);
        }
    }
}

fn digest(key: &[u8; KEY_BYTES]) -> Result<Digest, LuksError> {
    let salt = random::<SALT_BYTES>()?;
    let mut digest = [0; 32];
    Derivation::pbkdf2(Hash::Sha256, DIGEST_ITERATIONS)?.derive(key, &salt, &mut digest)?;
    Ok(Digest {
        kind: "pbkdf2".to_owned(),
        keyslots: vec!["0".to_owned()],
        segments: vec!["0".to_owned()],
        hash: "sha256".to_owned(),
        iterations: DIGEST_ITERATIONS,
        salt: Base64::encode_string(&salt),
        digest: Base64::encode_string(&digest),
    })
}

/// A random UUID (RFC 9562, version 4).
fn uuid() -> Result<String, LuksError> {
    let random = u128::from_be_bytes(random()?);
    let version = 4 << 76;
    let variant = 2 << 62;
    let bits = (random & !(0xf << 76) & !(3 << 62)) | version | variant;
    let hex = format!("{bits:032x}");
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
    let parts = [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)];
    Ok(parts.join("-"))
}

fn random<const N: usize>() -> Result<[u8; N], LuksError> {
    let mut bytes = [0; N];
    fill_random(&mut bytes)?;
    Ok(bytes)
}

fn fill_random(bytes: &mut [u8]) -> Result<(), LuksError> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let flags = rustix::rand::GetRandomFlags::empty();
        let count = match rustix::rand::getrandom(&mut *rest, flags) {
            Err(rustix::io::Errno::INTR) => 0,
            filled => filled.map_err(|error| LuksError::Io(error.into()))?,
        };
        rest = rest.get_mut(count..).unwrap_or_default();
    }
    Ok(())
}
