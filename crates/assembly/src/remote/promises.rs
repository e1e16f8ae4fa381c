//! The devices of IOhosts as guests know them, in a file that outlives the daemon.
//!
//! A guest lives on while its daemon is started again, and its VMM connects to the next one. If the
//! IOhost is away then, nothing else says what the guest's disk is like.
//!
//! # Format
//!
//! Little-endian: the magic number and the version, 4 bytes each; the number of devices, 4 bytes;
//! for each device the length of its IOhost's name, 1 byte, the name, and the device's entry as in
//! docs/vrio.md, without what is of one session; the CRC-32 of all before, 4 bytes.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use sidecore_vrio::wire::DeviceEntry;

const MAGIC: [u8; 4] = *b"SCRD";
const VERSION: u32 = 1;
/// Devices of a file.
const MAX_DEVICES: usize = 4096;
/// Bytes of an IOhost's name.
const MAX_NAME_BYTES: usize = 64;
const MAX_FILE_BYTES: usize = 16 + MAX_DEVICES * (1 + MAX_NAME_BYTES + DeviceEntry::BYTES);

/// The names of the IOhost and of its device.
pub(super) type Key = (String, String);
type Devices = BTreeMap<Key, DeviceEntry>;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Promises(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// `None` keeps nothing.
    path: Option<PathBuf>,
    devices: Devices,
    /// All devices of the configuration have been made, and none is closed by the daemon's end.
    forgets: bool,
    has_failed: bool,
}

impl Promises {
    /// Reads the file. One that is missing has no devices; a damaged one is named in the log.
    pub(super) fn load(path: Option<PathBuf>) -> Self {
        let devices = path.as_deref().map(read).transpose().unwrap_or_else(|error| {
            tracing::warn!(
                path = %path.as_deref().unwrap_or(Path::new("")).display(),
                "the sizes of remote disks are not known before their IOhosts answer, because the \
                 file that keeps them cannot be read: {error}; it is replaced"
            );
            None
        });
        let devices = devices.unwrap_or_default();
        Self(Mutex::new(State { path, devices, ..State::default() }))
    }

    /// The device as guests know it.
    pub(super) fn get(&self, key: &Key) -> Option<DeviceEntry> {
        self.lock().devices.get(key).copied()
    }

    /// The names of all devices.
    pub(super) fn keys(&self) -> Vec<Key> {
        self.lock().devices.keys().cloned().collect()
    }

    /// A guest is about to see the device, or has seen it grow. Writes the file if that is news.
    pub(super) fn note(&self, iohost: &str, device: &str, entry: &DeviceEntry) {
        let mut state = self.lock();
        let key = (iohost.to_owned(), device.to_owned());
        let entry = lasting(entry);
        let is_known = state.devices.get(&key) == Some(&entry);
        let has_room = state.devices.len() < MAX_DEVICES || state.devices.contains_key(&key);
        if is_known || !has_room || iohost.len() > MAX_NAME_BYTES || !entry.is_sound() {
            return;
        }
        state.devices.insert(key, entry);
        state.write();
    }

    /// Forgets the devices that no store uses, from [`forget`](Self::forget) on.
    pub(super) fn retain(&self, is_used: impl Fn(&Key) -> bool) {
        let mut state = self.lock();
        let before = state.devices.len();
        if state.forgets {
            state.devices.retain(|key, _| is_used(key));
        }
        if state.devices.len() != before {
            state.write();
        }
    }

    /// Whether unused devices are forgotten: not while the daemon begins or ends.
    pub(super) fn forget(&self, forgets: bool) {
        self.lock().forgets = forgets;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn write(&mut self) {
        let Some(path) = &self.path else { return };
        let written = sidecore_linux::replace_file(path, &encode(&self.devices), 0o600);
        if let Err(error) = &written
            && !self.has_failed
        {
            tracing::warn!(
                path = %path.display(),
                "cannot be written: {error}; after a restart of the daemon, remote disks wait for \
                 the first answers of their IOhosts"
            );
        }
        self.has_failed = written.is_err();
    }
}

/// An entry without what is of one session, or of one start of the IOhost.
fn lasting(entry: &DeviceEntry) -> DeviceEntry {
    DeviceEntry { device: 0, index: 0, count: 0, version: 0, epoch: 0, ..*entry }
}

fn read(path: &Path) -> io::Result<Devices> {
    // A pipe would not answer.
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
        .open(path);
    let mut file = match opened {
        Ok(file) if !file.metadata()?.is_file() => {
            return Err(io::Error::other("it is no regular file"));
        }
        Ok(file) => file.take(MAX_FILE_BYTES as u64 + 1),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Devices::new()),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    decode(&bytes).map_err(io::Error::other)
}

fn encode(devices: &Devices) -> Vec<u8> {
    let mut bytes = Vec::from(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    let count = u32::try_from(devices.len()).unwrap_or(u32::MAX);
    bytes.extend_from_slice(&count.to_le_bytes());
    for ((iohost, _), entry) in devices {
        bytes.push(u8::try_from(iohost.len()).unwrap_or(u8::MAX));
        bytes.extend_from_slice(iohost.as_bytes());
        bytes.extend_from_slice(&entry.encode());
    }
    bytes.extend_from_slice(&crc32(&bytes).to_le_bytes());
    bytes
}

/// The devices of a file, or what is wrong with it.
fn decode(bytes: &[u8]) -> Result<Devices, String> {
    let Some(rest) = bytes.strip_prefix(&MAGIC) else {
        return Err("it is no file of remote disks".to_owned());
    };
    let short = || "it is damaged: it ends too early".to_owned();
    let (version, rest) = rest.split_first_chunk().ok_or_else(short)?;
    let version = u32::from_le_bytes(*version);
    if version != VERSION {
        return Err(format!("it has version {version}, and this daemon reads version {VERSION}"));
    }
    let (count, rest) = rest.split_first_chunk().ok_or_else(short)?;
    let (mut rest, sum) = rest.split_last_chunk().ok_or_else(short)?;
    let checked = bytes.split_last_chunk::<4>().map(|(checked, _)| crc32(checked));
    if checked != Some(u32::from_le_bytes(*sum)) {
        return Err("it is damaged: its checksum is wrong".to_owned());
    }
    let count = u32::from_le_bytes(*count);
    if count as usize > MAX_DEVICES {
        return Err(format!("it has {count} devices, and {MAX_DEVICES} are allowed"));
    }
    let mut devices = Devices::new();
    for _ in 0..count {
        let (len, behind) = rest.split_first().ok_or_else(short)?;
        let (iohost, behind) = behind.split_at_checked((*len).into()).ok_or_else(short)?;
        let (entry, behind) = behind.split_first_chunk().ok_or_else(short)?;
        rest = behind;
        let entry = lasting(&DeviceEntry::decode(entry));
        let end = entry.name.iter().position(|byte| *byte == 0).unwrap_or(entry.name.len());
        let text = |bytes: &[u8]| std::str::from_utf8(bytes).ok().map(str::to_owned);
        let key = text(iohost).zip(entry.name.get(..end).and_then(text));
        let key = key.filter(|_| entry.is_sound());
        devices.insert(key.ok_or("it is damaged: a device makes no sense")?, entry);
    }
    if !rest.is_empty() {
        return Err("it is damaged: there is something behind its devices".to_owned());
    }
    Ok(devices)
}

/// The CRC-32 of Ethernet (IEEE 802.3, 3.2.9).
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| {
            (sum >> 1) ^ if sum & 1 == 1 { 0xedb8_8320 } else { 0 }
        })
    })
}

#[cfg(test)]
mod tests {
    use sidecore_vrio::wire::device_flag;

    use super::*;

    fn entry(name: &str, capacity_bytes: u64) -> DeviceEntry {
        let mut padded = [0; 64];
        padded[..name.len()].copy_from_slice(name.as_bytes());
        DeviceEntry {
            device: 3,
            version: 9,
            epoch: 77,
            flags: device_flag::PRESENT | device_flag::VOLATILE_CACHE,
            capacity_bytes,
            block_bytes: 512,
            physical_block_bytes: 4096,
            name: padded,
            serial: [b'x'; 20],
            ..DeviceEntry::default()
        }
    }

    fn key(iohost: &str, device: &str) -> Key {
        (iohost.to_owned(), device.to_owned())
    }

    #[test]
    fn the_next_process_knows_the_devices_of_the_last_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock.remote");
        let promises = Promises::load(Some(path.clone()));
        assert!(promises.keys().is_empty() && !path.exists());
        promises.note("io1", "db-1", &entry("db-1", 1 << 20));
        promises.note("io2", "db-1", &entry("db-1", 1 << 21));
        promises.note("io2", "none", &DeviceEntry::default());
        promises.note(&"x".repeat(65), "db-1", &entry("db-1", 1 << 21));
        let written = std::fs::metadata(&path).unwrap().modified().unwrap();
        // Of another session, it is the same device.
        promises.note("io1", "db-1", &DeviceEntry { epoch: 78, ..entry("db-1", 1 << 20) });
        assert_eq!(std::fs::metadata(&path).unwrap().modified().unwrap(), written);
        // Nothing is forgotten while a daemon begins or ends.
        promises.retain(|_| false);
        let next = Promises::load(Some(path.clone()));
        assert_eq!(next.keys(), [key("io1", "db-1"), key("io2", "db-1")]);
        let found = next.get(&key("io2", "db-1")).unwrap();
        assert_eq!(found, lasting(&entry("db-1", 1 << 21)));
        next.forget(true);
        next.retain(|(iohost, _)| iohost == "io1");
        let last = Promises::load(Some(path));
        assert_eq!(last.keys(), [key("io1", "db-1")]);
        let names = std::fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(names, 1, "no other file is left");
    }

    #[test]
    fn a_file_that_cannot_be_written_delays_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let promises = Promises::load(Some(directory.path().join("missing/file")));
        promises.note("io1", "db-1", &entry("db-1", 1 << 20));
        assert!(promises.get(&key("io1", "db-1")).is_some());
        let none = Promises::load(None);
        none.note("io1", "db-1", &entry("db-1", 1 << 20));
        assert!(none.get(&key("io1", "db-1")).is_some());
    }

    /// The bytes with the right checksum.
    fn summed(mut bytes: Vec<u8>) -> Vec<u8> {
        bytes.truncate(bytes.len() - 4);
        bytes.extend_from_slice(&crc32(&bytes).to_le_bytes());
        bytes
    }

    #[test]
    fn a_damaged_file_is_refused_with_its_reason() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        let device = (key("io1", "db-1"), lasting(&entry("db-1", 1 << 20)));
        let bytes = encode(&Devices::from([device]));
        assert!(decode(&bytes).is_ok());
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << (at % 8);
            assert!(decode(&flipped).is_err(), "{at}");
            // A right checksum proves nothing.
            if let Ok(devices) = decode(&summed(flipped)) {
                assert!(devices.values().all(DeviceEntry::is_sound));
            }
            assert!(decode(&bytes[..at]).is_err(), "{at}");
        }
        let reason = |change: fn(&mut Vec<u8>)| {
            let mut changed = bytes.clone();
            change(&mut changed);
            decode(&summed(changed)).unwrap_err()
        };
        assert!(reason(|bytes| bytes[0] = 0).contains("no file of remote disks"));
        assert!(reason(|bytes| bytes[4] = 2).contains("version 2"));
        assert!(reason(|bytes| bytes[8] = 2).contains("ends too early"));
        assert!(reason(|bytes| bytes[11] = 1).contains("4096 are allowed"));
        assert!(reason(|bytes| bytes[12] = 255).contains("ends too early"));
        assert!(reason(|bytes| bytes[13] = 0xff).contains("makes no sense"));
        assert!(reason(|bytes| bytes.push(0)).contains("behind its devices"));
        assert!(reason(|bytes| bytes[8] = 0).contains("behind its devices"));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, vec![0; MAX_FILE_BYTES + 100]).unwrap();
        assert!(Promises::load(Some(path)).keys().is_empty());
        assert!(read(directory.path()).unwrap_err().to_string().contains("no regular file"));
    }
}
