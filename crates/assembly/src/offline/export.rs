//! Volumes read without a daemon.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sidecore_block::{BlockDevice, StageError};
use sidecore_controller::PhysicalDisk;
use sidecore_extent::BlockRange;
use sidecore_linux::{FileOptions, FileStore};
use sidecore_stage_encrypt::EncryptStage;
use sidecore_units::Vlba;
use sidecore_volume::{Disk, OpenError, OpenOptions, VolumeError, VolumeId, VolumeState, Volumes};

use super::{OfflineError, has_log};
use crate::convert;
use crate::report::LossReport;
use crate::spec::{StageKind, StageSpec};

/// Metadata is accessed in multiples of this.
const PAGE_BYTES: usize = 4096;

/// Extents that are asked for at a time.
const EXTENTS: usize = 1024;

/// The files that open an encrypted store or disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unlock {
    /// The file of the LUKS2 header.
    pub header: PathBuf,
    /// The file whose bytes are the passphrase.
    pub key_file: PathBuf,
}

/// How to read a volume without its daemon.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// Opens the controller's store, if that is encrypted.
    pub unlock: Option<Unlock>,
    /// Read the rest of a damaged volume.
    pub partial: bool,
    /// Read a store also if a daemon of this boot has died and its log has not been replayed.
    pub accept_loss: bool,
}

/// A volume of a store that no daemon has open. The store is claimed meanwhile, and not written.
pub struct OfflineVolume {
    disk: PhysicalDisk,
    size_bytes: u64,
    block_bytes: u32,
    /// Offsets in the volume, lengths, and offsets on the store.
    parts: Vec<(u64, u64, u64)>,
    losses: Vec<LossReport>,
    is_unreplayed: bool,
}

impl OfflineVolume {
    /// Finds a volume or snapshot on the store in this file.
    ///
    /// # Errors
    /// The file is in use, is no controller's store, cannot be decrypted or has a log to be
    /// replayed, there is no such volume, or it is damaged.
    pub fn open(path: &Path, name: &str, options: &ReadOptions) -> Result<Self, OfflineError> {
        let disk = opened(path, options.unlock.as_ref())?;
        let mut disk = Patched { below: disk, pages: BTreeMap::new() };
        let failed = |error| OfflineError::Disk { path: path.to_owned(), error };
        let is_unreplayed = match sidecore_volume::in_use_under(&mut disk) {
            Ok(mark) => has_log(mark),
            // Unknown.
            Err(_) if options.accept_loss => true,
            Err(error) => return Err(failed(error)),
        };
        if is_unreplayed && !options.accept_loss {
            return Err(OfflineError::UnreplayedExport { path: path.to_owned() });
        }
        let mut volumes = volumes(path, &mut disk).map_err(|error| match error {
            OfflineError::Open { path, error: error @ OpenError::NotFormatted(_) }
                if options.unlock.is_none() =>
            {
                OfflineError::Encrypted { path, error }
            }
            error => error,
        })?;
        let mut losses = Vec::new();
        let is_whole = volumes.find(name).is_some_and(|info| info.state == VolumeState::Healthy);
        if !is_whole && !volumes.damage().is_empty() {
            losses = mend(path, name, options.partial, &mut disk)?;
            volumes = self::volumes(path, &mut disk)?;
        }
        let names = || volumes.list().map(|info| info.name.clone()).collect();
        let Some(info) = volumes.find(name).cloned() else {
            let (path, volume, there) = (path.to_owned(), name.to_owned(), names());
            return Err(OfflineError::NoVolume { path, volume, there });
        };
        let block_bytes = volumes.block_bytes();
        let parts = parts(&mut volumes, &mut disk, info.id, info.blocks).map_err(|error| {
            OfflineError::Volume { path: path.to_owned(), volume: name.to_owned(), error }
        })?;
        let size_bytes = info.blocks.saturating_mul(block_bytes.into());
        Ok(Self { disk: disk.below, size_bytes, block_bytes, parts, losses, is_unreplayed })
    }

    /// The size in bytes that guests see.
    #[must_use]
    pub const fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The unit of all offsets and lengths, in bytes.
    #[must_use]
    pub const fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// The parts that have data, by offset and length in bytes. The others read as zeros.
    #[must_use]
    pub fn parts(&self) -> Vec<(u64, u64)> {
        self.parts.iter().map(|(offset, len, _)| (*offset, *len)).collect()
    }

    /// The parts whose place on the store is unknown, because metadata is damaged.
    #[must_use]
    pub fn losses(&self) -> &[LossReport] {
        &self.losses
    }

    /// Whether the last answered changes may be missing, because only a log has them that no
    /// daemon has replayed.
    #[must_use]
    pub const fn is_unreplayed(&self) -> bool {
        self.is_unreplayed
    }

    /// Reads whole blocks of one part.
    ///
    /// # Errors
    /// The store cannot be read there, or that is in no part.
    pub fn read(&mut self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        let end = offset_bytes.saturating_add(buffer.len() as u64);
        let after = self.parts.partition_point(|(offset, ..)| *offset <= offset_bytes);
        let part = after.checked_sub(1).and_then(|index| self.parts.get(index));
        let part = part.filter(|(offset, bytes, _)| end <= offset.saturating_add(*bytes));
        let outside = || io::Error::new(io::ErrorKind::UnexpectedEof, "outside of the data");
        let (offset, _, place) = part.ok_or_else(outside)?;
        let inside = offset_bytes.saturating_sub(*offset);
        self.disk.read(place.saturating_add(inside), buffer)
    }
}

/// An image of a disk that was encrypted by a stage in front of its volume.
pub struct EncryptedImage(PhysicalDisk);

impl EncryptedImage {
    /// Opens the image, which is not written.
    ///
    /// # Errors
    /// The file is in use, or cannot be decrypted.
    pub fn open(path: &Path, unlock: &Unlock) -> Result<Self, OfflineError> {
        opened(path, Some(unlock)).map(Self)
    }

    /// The size of the disk in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    /// Reads and decrypts multiples of 4096 bytes at multiples of 4096.
    ///
    /// # Errors
    /// The image cannot be read there.
    pub fn read(&mut self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read(offset_bytes, buffer)
    }
}

/// Claims a file for reading, behind the stage that decrypts it.
fn opened(path: &Path, unlock: Option<&Unlock>) -> Result<PhysicalDisk, OfflineError> {
    let options = FileOptions { read_only: true, ..FileOptions::new(path) };
    let mut store: Arc<dyn BlockDevice> = Arc::new(FileStore::open(&options)?);
    if let Some(Unlock { header, key_file }) = unlock {
        let (header, key_file) = (header.clone(), key_file.clone());
        let stage = EncryptStage { header, key_file, allow_discards: false };
        let stage = StageSpec::from(StageKind::Encrypt(stage));
        let open = stage.open(&path.display().to_string(), store);
        store =
            open.map_err(|error: StageError| OfflineError::Stage { path: path.to_owned(), error })?;
    }
    PhysicalDisk::open(&store).map_err(|error| OfflineError::Disk { path: path.to_owned(), error })
}

fn volumes(path: &Path, disk: &mut Patched) -> Result<Volumes, OfflineError> {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    Volumes::open_with(disk, &options)
        .map_err(|error| OfflineError::Open { path: path.to_owned(), error })
}

/// Repairs the metadata in memory. Returns the losses of the volume, which are permitted.
fn mend(
    path: &Path,
    name: &str,
    partial: bool,
    disk: &mut Patched,
) -> Result<Vec<LossReport>, OfflineError> {
    let repair = sidecore_volume::plan_repair(disk, &[])
        .map_err(|error| OfflineError::Repair { path: path.to_owned(), error })?;
    let report = convert::repair(&repair);
    let losses: Vec<_> = report.losses.into_iter().filter(|loss| loss.volume == name).collect();
    let (path, volume) = (path.to_owned(), name.to_owned());
    if !report.decided {
        return Err(OfflineError::Rivals { path, volume });
    }
    if !partial {
        return Err(OfflineError::Damaged { path, volume, losses });
    }
    repair.write(disk).map_err(|error| OfflineError::Disk { path, error })?;
    Ok(losses)
}

/// All mappings of a volume, in order: offset, length, and place on the store, in bytes. Those that
/// touch in the volume and on the store are one.
fn parts(
    volumes: &mut Volumes,
    disk: &mut dyn Disk,
    id: VolumeId,
    blocks: u64,
) -> Result<Vec<(u64, u64, u64)>, VolumeError> {
    let block_bytes = u64::from(volumes.block_bytes());
    let bytes = |blocks: u64| blocks.saturating_mul(block_bytes);
    let mut parts: Vec<(u64, u64, u64)> = Vec::new();
    let mut first = 0;
    while first < blocks {
        let range = BlockRange { first: Vlba(first), count: blocks.saturating_sub(first) };
        let mapped = volumes.map(disk, id, range, EXTENTS)?;
        for extent in &mapped.extents {
            let (offset, len) = (bytes(extent.first.0), bytes(extent.count));
            let place = bytes(extent.physical.0);
            match parts.last_mut() {
                Some((before, bytes, there))
                    if before.saturating_add(*bytes) == offset
                        && there.saturating_add(*bytes) == place =>
                {
                    *bytes = bytes.saturating_add(len);
                }
                _ => parts.push((offset, len, place)),
            }
        }
        if mapped.covered.count == 0 {
            let error = format!("the walk through the mappings stops at block {first}");
            return Err(io::Error::other(error).into());
        }
        first = first.saturating_add(mapped.covered.count);
    }
    Ok(parts)
}

/// A disk whose changes stay in memory.
struct Patched {
    below: PhysicalDisk,
    /// By their offsets.
    pages: BTreeMap<u64, Vec<u8>>,
}

impl Disk for Patched {
    fn size_bytes(&self) -> u64 {
        self.below.size_bytes()
    }

    fn read(&mut self, offset_bytes: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.below.read(offset_bytes, buffer)?;
        let mut at = offset_bytes;
        for page in buffer.chunks_mut(PAGE_BYTES) {
            if let Some(patch) = self.pages.get(&at).and_then(|patch| patch.get(..page.len())) {
                page.copy_from_slice(patch);
            }
            at = at.saturating_add(page.len() as u64);
        }
        Ok(())
    }

    fn write(&mut self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        let mut at = offset_bytes;
        for page in data.chunks(PAGE_BYTES) {
            self.pages.insert(at, page.to_vec());
            at = at.saturating_add(page.len() as u64);
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
