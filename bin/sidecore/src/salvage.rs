//! `sidecore volume export --path`: a volume of a store that no daemon has open.

use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use sidecore_control::config::size;
use sidecore_control::offline::{EncryptedImage, OfflineVolume, ReadOptions, Unlock};
use sidecore_control::report::LossReport;
use sidecore_luks::{Header, open_header};

use crate::export::{self, check_target};
use crate::image::{self, Segment, Workplace};
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::units::bytes;
use crate::{FAULTS, print, print_json, qemu};

/// The bytes that are copied at a time: a multiple of all sizes of blocks.
const CHUNK_BYTES: u64 = 1 << 20;

/// Parts are decrypted in multiples of this: the largest sector of LUKS2.
const SECTOR_BYTES: u64 = 4096;

/// The most losses that are printed; the JSON has all.
const MOST: usize = 100;

/// Where the store is, and how it is opened.
#[derive(Args)]
pub(crate) struct Offline {
    /// Read the volume from this file or block device, which no daemon has open.
    #[arg(long, value_name = "POOL", conflicts_with = "controller")]
    pub(crate) path: Option<PathBuf>,
    /// The LUKS2 header of the pool, if the stage `encrypt` is in front of its store.
    #[arg(long, value_name = "FILE", requires_all = ["path", "key_file"])]
    header: Option<PathBuf>,
    /// The key file of that header.
    #[arg(long, value_name = "FILE", requires = "header")]
    key_file: Option<PathBuf>,
    /// The LUKS2 header of the disk, if the stage `encrypt` is in front of the volume.
    #[arg(long, value_name = "FILE", requires_all = ["path", "disk_key_file"])]
    disk_header: Option<PathBuf>,
    /// The key file of that header.
    #[arg(long, value_name = "FILE", requires = "disk_header")]
    disk_key_file: Option<PathBuf>,
    /// Export what can be read of a damaged volume, and list what is lost: it reads as zeros.
    #[arg(long, requires = "path")]
    partial: bool,
    /// Read the store of a killed daemon whose log of answered changes has not been replayed, too.
    #[arg(long, requires = "path")]
    accept_loss: bool,
}

fn unlock(header: Option<&PathBuf>, key_file: Option<&PathBuf>) -> Option<Unlock> {
    Some(Unlock { header: header?.clone(), key_file: key_file?.clone() })
}

impl Offline {
    /// The files that the export reads.
    fn sources<'a>(&'a self, pool: &'a Path) -> Vec<&'a Path> {
        let files = [&self.header, &self.key_file, &self.disk_header, &self.disk_key_file];
        let files = files.into_iter().flatten().map(PathBuf::as_path);
        [pool].into_iter().chain(files).collect()
    }
}

/// Refuses an image that would replace one of its sources, or another file without `--force`.
fn check(image: &Path, force: bool, sources: &[&Path]) -> Result<()> {
    if let Ok(target) = std::fs::symlink_metadata(image) {
        let is_image = |source: &&&Path| {
            let found = std::fs::metadata(source);
            found.is_ok_and(|found| (found.dev(), found.ino()) == (target.dev(), target.ino()))
        };
        if let Some(source) = sources.iter().find(is_image) {
            let (image, source) = (image.display(), source.display());
            bail!("{image} is the file {source}, which the export reads; choose another image");
        }
    }
    check_target(image, force)
}

/// The work of one export.
struct Salvage<'a> {
    interrupt: &'a Interrupt,
    partial: bool,
    skip_zeroes: bool,
    copied: u64,
    losses: Vec<LossReport>,
    is_unreplayed: bool,
}

pub(crate) fn run(path: &Path, arguments: &export::Arguments, json: bool) -> Result<ExitCode> {
    let interrupt = Interrupt::listen()?;
    let started = Instant::now();
    let (offline, image) = (&arguments.offline, &arguments.image);
    let sources = offline.sources(path);
    check(image, arguments.force, &sources)?;
    let options = ReadOptions {
        unlock: unlock(offline.header.as_ref(), offline.key_file.as_ref()),
        partial: offline.partial,
        accept_loss: offline.accept_loss,
    };
    let mut volume = OfflineVolume::open(path, &arguments.volume, &options)?;
    let beside = match image.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let place = Workplace::new(beside)?;
    let elsewhere = image::temporary_directory(arguments.temporary.as_deref(), image);
    let elsewhere = (arguments.format != "raw").then(|| Workplace::new(&elsewhere)).transpose()?;
    let raw_place = elsewhere.as_ref().unwrap_or(&place);
    let mut salvage = Salvage {
        interrupt: &interrupt,
        partial: offline.partial,
        skip_zeroes: arguments.skip_zeroes,
        copied: 0,
        losses: volume.losses().to_vec(),
        is_unreplayed: volume.is_unreplayed(),
    };
    let mut raw = raw_place.file("image.raw");
    salvage.copy(&mut volume, &raw)?;
    let mut size_bytes = volume.size_bytes();
    if let Some(unlock) = unlock(offline.disk_header.as_ref(), offline.disk_key_file.as_ref()) {
        let plain = raw_place.file("plain.raw");
        size_bytes = salvage.decrypt(&raw, &unlock, &volume.parts(), &plain)?;
        std::fs::remove_file(&raw)?;
        raw = plain;
    }
    let mut made = raw.clone();
    if arguments.format != "raw" {
        made = place.file("image");
        let options = ["-f", "raw", "-O", &arguments.format].map(AsRef::as_ref);
        let words = options.into_iter().chain([raw.as_os_str(), made.as_os_str()]);
        qemu::convert(words, "converting", size_bytes, &interrupt)?;
    }
    if offline.header.is_some() || offline.disk_header.is_some() {
        // It was encrypted: others have not read it so far.
        std::fs::set_permissions(&made, Permissions::from_mode(0o600))?;
    }
    File::open(&made)?.sync_all()?;
    // Another process may have made the file meanwhile.
    check(image, arguments.force, &sources)?;
    std::fs::rename(&made, image)
        .with_context(|| format!("{} cannot be put in its place", image.display()))?;
    let seconds = started.elapsed().as_secs_f64();
    report(path, arguments, &salvage, (size_bytes, seconds), json)
}

impl Salvage<'_> {
    /// Copies the volume into a sparse file.
    fn copy(&mut self, volume: &mut OfflineVolume, raw: &Path) -> Result<()> {
        let parts = volume.parts();
        let block_bytes = u64::from(volume.block_bytes());
        let file = new_file(raw, volume.size_bytes())?;
        let mut progress = Progress::new("exporting", image::total(&parts));
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        for (at, count) in chunks(&parts) {
            self.interrupt.check()?;
            let chunk = &mut buffer[..count as usize];
            match volume.read(at, chunk) {
                Ok(()) => self.write(&file, at, chunk)?,
                Err(error) if !self.partial => {
                    let (count, at) = (size::show(count), size::show(at));
                    bail!(
                        "{count} of the volume from {at} on cannot be read: {error}; say --partial \
                         to export the rest"
                    );
                }
                // Block by block: a bad sector costs one.
                Err(_) => {
                    for block in chunk.chunks_mut(block_bytes as usize).zip(0..) {
                        let (data, index): (&mut [u8], u64) = block;
                        let at = at + index * block_bytes;
                        // A bad sector may take seconds.
                        self.interrupt.check()?;
                        match volume.read(at, data) {
                            Ok(()) => self.write(&file, at, data)?,
                            Err(error) => self.lose(at, block_bytes, &error.to_string()),
                        }
                    }
                }
            }
            progress.add(count);
        }
        progress.finish();
        Ok(file.sync_all()?)
    }

    fn write(&mut self, file: &File, at: u64, data: &[u8]) -> Result<()> {
        if !(self.skip_zeroes && image::is_zero(data)) {
            file.write_all_at(data, at).context("the image cannot be written")?;
            self.copied += data.len() as u64;
        }
        Ok(())
    }

    /// Adds a loss, to the one before if it follows that.
    fn lose(&mut self, at: u64, size_bytes: u64, why: &str) {
        match self.losses.last_mut() {
            Some(last) if last.offset_bytes + last.size_bytes == at && last.why == why => {
                last.size_bytes += size_bytes;
            }
            _ => self.losses.push(LossReport {
                volume: String::new(),
                offset_bytes: at,
                size_bytes,
                why: why.to_owned(),
            }),
        }
    }

    /// Decrypts the parts of an image that have data into another one. Returns its size. Parts that
    /// were never written stay holes, and lost ones are zeros.
    fn decrypt(
        &mut self,
        raw: &Path,
        unlock: &Unlock,
        parts: &[Segment],
        plain: &Path,
    ) -> Result<u64> {
        let mut image = EncryptedImage::open(raw, unlock)?;
        let size_bytes = image.size_bytes();
        let shown = || format!("{} cannot be read", unlock.header.display());
        let header = Header::read(&open_header(&unlock.header)?).with_context(shown)?;
        let disk = (header.segment().offset_bytes, size_bytes);
        let parts: Vec<Segment> = parts.iter().filter_map(|part| inside(*part, disk)).collect();
        let parts = image::widened(&parts, SECTOR_BYTES, size_bytes);
        self.losses.retain_mut(|loss| {
            let within = inside((loss.offset_bytes, loss.size_bytes), disk);
            (loss.offset_bytes, loss.size_bytes) = within.unwrap_or_default();
            within.is_some()
        });
        self.losses.sort_by_key(|loss| loss.offset_bytes);
        let file = new_file(plain, size_bytes)?;
        let mut progress = Progress::new("decrypting", image::total(&parts));
        let mut buffer = vec![0; CHUNK_BYTES as usize];
        self.copied = 0;
        for (at, count) in chunks(&parts) {
            self.interrupt.check()?;
            let chunk = &mut buffer[..count as usize];
            image.read(at, chunk).with_context(|| format!("{} cannot be read", raw.display()))?;
            blank(chunk, at, &self.losses);
            self.write(&file, at, chunk)?;
            progress.add(count);
        }
        progress.finish();
        file.sync_all()?;
        Ok(size_bytes)
    }
}

/// The part of the volume that is in the disk on it, which has an offset and a size: a header in
/// front of the data, and all that is behind the data, are no part of the disk. `None` if all of
/// the part is outside.
fn inside((at, len): Segment, (offset, size_bytes): Segment) -> Option<Segment> {
    let start = at.saturating_sub(offset);
    let end = (at + len).saturating_sub(offset).min(size_bytes);
    (end > start).then(|| (start, end - start))
}

/// Overwrites the lost parts of a chunk with zeros: decrypted, zeros are noise. The losses are in
/// order.
fn blank(chunk: &mut [u8], at: u64, losses: &[LossReport]) {
    let end = at + chunk.len() as u64;
    let of = |loss: &LossReport| (loss.offset_bytes, loss.offset_bytes + loss.size_bytes);
    let first = losses.partition_point(|loss| of(loss).1 <= at);
    for (from, to) in losses[first..].iter().map(of).take_while(|(from, _)| *from < end) {
        chunk[(from.max(at) - at) as usize..(to.min(end) - at) as usize].fill(0);
    }
}

fn new_file(path: &Path, size_bytes: u64) -> Result<File> {
    let file = File::options().read(true).write(true).create_new(true).open(path)?;
    file.set_len(size_bytes).with_context(|| format!("{} cannot be made", path.display()))?;
    Ok(file)
}

/// The parts, in pieces of the buffer's size.
fn chunks(parts: &[Segment]) -> impl Iterator<Item = Segment> {
    parts.iter().flat_map(|&(first, len)| {
        let starts = (0..len).step_by(CHUNK_BYTES as usize);
        starts.map(move |at| (first + at, (len - at).min(CHUNK_BYTES)))
    })
}

fn report(
    path: &Path,
    arguments: &export::Arguments,
    salvage: &Salvage<'_>,
    (size_bytes, seconds): (u64, f64),
    json: bool,
) -> Result<ExitCode> {
    let lost: u64 = salvage.losses.iter().map(|loss| loss.size_bytes).sum();
    let code = if salvage.losses.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FAULTS) };
    if json {
        let loss = |loss: &LossReport| {
            serde_json::json!({
                "offset_bytes": loss.offset_bytes,
                "size_bytes": loss.size_bytes,
                "why": loss.why,
            })
        };
        print_json(&serde_json::json!({
            "volume": arguments.volume,
            "path": path,
            "image": arguments.image,
            "format": arguments.format,
            "size_bytes": size_bytes,
            "copied_bytes": salvage.copied,
            "lost_bytes": lost,
            "losses": salvage.losses.iter().map(loss).collect::<Vec<_>>(),
            "may_lack_last_changes": salvage.is_unreplayed,
            "seconds": seconds,
        }))?;
        return Ok(code);
    }
    let exported = if salvage.losses.is_empty() { "exported" } else { "exported in part" };
    let mut text = format!(
        "{exported}: \"{}\" as {} ({}), {} of data in {seconds:.1} s\n",
        arguments.volume,
        arguments.image.display(),
        arguments.format,
        bytes(salvage.copied)
    );
    for LossReport { offset_bytes, size_bytes, why, .. } in salvage.losses.iter().take(MOST) {
        let (length, offset) = (size::show(*size_bytes), size::show(*offset_bytes));
        text.push_str(&format!("lost: what was written in {length} from {offset} on ({why})\n"));
    }
    if let Some(more) = salvage.losses.len().checked_sub(MOST).filter(|more| *more > 0) {
        text.push_str(&format!("and {more} more (--json lists them)\n"));
    }
    if salvage.is_unreplayed {
        text.push_str("its last answered changes may be missing: no daemon has replayed its log\n");
    }
    print(&text)?;
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_outside_of_the_disk_are_cut_off() {
        let disk = (16, 100);
        for (part, wanted) in [
            ((0, 16), None),
            ((0, 17), Some((0, 1))),
            ((20, 10), Some((4, 10))),
            ((8, 200), Some((0, 100))),
            ((115, 9), Some((99, 1))),
            ((116, 9), None),
        ] {
            assert_eq!(inside(part, disk), wanted, "{part:?}");
        }
    }

    #[test]
    fn lost_parts_of_each_chunk_become_zeros() {
        let loss = |offset_bytes, size_bytes| LossReport {
            volume: String::new(),
            offset_bytes,
            size_bytes,
            why: String::new(),
        };
        let losses = [loss(0, 2), loss(4, 1), loss(7, 10), loss(20, 3)];
        let mut disk = [1; 24];
        for (chunk, at) in disk.chunks_mut(5).zip((0..).step_by(5)) {
            blank(chunk, at, &losses);
        }
        let lost = |at: &u8| {
            losses.iter().any(|loss| {
                (loss.offset_bytes..loss.offset_bytes + loss.size_bytes).contains(&u64::from(*at))
            })
        };
        let wanted: Vec<u8> = (0..24).map(|at| u8::from(!lost(&at))).collect();
        assert_eq!(disk.as_slice(), wanted);
    }
}
