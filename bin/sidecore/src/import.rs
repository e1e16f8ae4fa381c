//! `sidecore volume import`.

use std::fs::{File, FileType};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use rustix::fs::OFlags;
use sidecore_control::config::size;
use sidecore_control::report::{ControllerReport, VolumeReport};
use sidecore_control::{Client, CreateVolume};

use crate::disk::{Disk, REQUEST_BYTES, TemporaryDevice};
use crate::image::{self, Workplace};
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::units::bytes;
use crate::{print, print_json, qemu, worker};

/// The arguments of `sidecore volume import`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The image: a file or a block device.
    image: PathBuf,
    /// The name of the new volume.
    volume: String,
    /// The image's format, by qemu-img's name for it (raw, qcow2, vmdk, vdi, ...); detected by
    /// default.
    #[arg(long, value_name = "FORMAT")]
    format: Option<String>,
    /// The volume's size, at least the image's, which is the default.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Option<u64>,
    /// The most space of the store that the volume may take.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    quota: Option<u64>,
    /// Also detect zeros in the image that are no holes, and leave them out.
    #[arg(long)]
    skip_zeroes: bool,
    /// The directory of a temporary converted image; by default $TMPDIR, or the image's directory.
    #[arg(long, value_name = "DIRECTORY")]
    temporary: Option<PathBuf>,
}

/// A new volume. Dropping it deletes the volume unless it is kept.
struct NewVolume<'a> {
    client: &'a Client,
    report: VolumeReport,
    kept: bool,
}

impl Drop for NewVolume<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if let Err(error) = self.client.delete_volume(&self.report.controller, &self.report.name) {
            eprintln!(
                "sidecore: the unfinished volume \"{}\" is still there: {error}",
                self.report.name
            );
        }
    }
}

pub(crate) fn run(
    socket: &Path,
    client: &Client,
    controller: &ControllerReport,
    arguments: &Arguments,
    json: bool,
) -> Result<()> {
    if !worker::is_worker()? {
        return worker::run(client, &controller.name, &arguments.image);
    }
    let interrupt = Interrupt::listen()?;
    let started = Instant::now();
    let shown = arguments.image.display();
    let mut workplace = None;
    let (format, raw) = raw_image(arguments, &mut workplace, &interrupt)?;
    let image_bytes = image::size(&raw)?;
    let size_bytes = volume_bytes(controller, arguments, image_bytes)?;
    let data = image::data(&raw, image_bytes)?;
    check_space(controller, arguments, image::total(&data))?;
    let new =
        CreateVolume { name: arguments.volume.clone(), size_bytes, quota_bytes: arguments.quota };
    let report = client.create_volume(&controller.name, &new)?;
    let mut volume = NewVolume { client, report, kept: false };
    worker::announce_volume(&arguments.volume)?;

    let device =
        TemporaryDevice::serve(client, socket, (&controller.name, &arguments.volume), false)?;
    let copied = {
        let mut disk = device.connect(&interrupt)?;
        // Filesystems report holes by pages; a block that is partly data is data.
        let unit = device.block_bytes().max(4096);
        let segments = image::widened(&data, unit, size_bytes);
        let copied = copy(&raw, &segments, &mut disk, arguments.skip_zeroes, &interrupt)?;
        disk.flush()?;
        copied
    };
    device.remove()?;
    volume.kept = true;
    let report = client.volume(&controller.name, &arguments.volume)?;
    let seconds = started.elapsed().as_secs_f64();
    if json {
        return print_json(&serde_json::json!({
            "volume": report,
            "image": arguments.image,
            "format": format,
            "image_bytes": image_bytes,
            "copied_bytes": copied,
            "skipped_bytes": image_bytes.saturating_sub(copied),
            "seconds": seconds,
        }));
    }
    Ok(print(&format!(
        "imported: {shown} ({format}) as \"{}\" of {} on controller \"{}\": {} of data in \
         {seconds:.1} s\n",
        report.name,
        size::show(report.size_bytes),
        report.controller,
        bytes(copied)
    ))?)
}

/// The image's format and its contents: of an image that is not raw, those of a temporary file in
/// `workplace`.
fn raw_image(
    arguments: &Arguments,
    workplace: &mut Option<Workplace>,
    interrupt: &Interrupt,
) -> Result<(String, File)> {
    let source = open(&arguments.image)?;
    let format = match &arguments.format {
        Some(format) => format.clone(),
        None => image::format(&source)?.to_owned(),
    };
    if format == "raw" {
        return Ok((format, source));
    }
    let directory = image::temporary_directory(arguments.temporary.as_deref(), &arguments.image);
    let place = workplace.insert(worker::workplace(&directory)?);
    let raw = convert(&arguments.image, &format, &place.file("image.raw"), interrupt)?;
    Ok((format, raw))
}

/// The size of the volume for an image of `image_bytes`.
fn volume_bytes(
    controller: &ControllerReport,
    arguments: &Arguments,
    image_bytes: u64,
) -> Result<u64> {
    if image_bytes == 0 {
        bail!("{} is empty", arguments.image.display());
    }
    let block_bytes = u64::from(controller.block_bytes).max(1);
    let least =
        image_bytes.checked_next_multiple_of(block_bytes).context("the image is too large")?;
    let size_bytes = arguments.size.unwrap_or(least);
    if size_bytes < image_bytes {
        bail!("{} is less than the image has: {}", size::show(size_bytes), size::show(image_bytes));
    }
    Ok(size_bytes)
}

/// Fails if the controller has not enough space for the image's data. Without holes for zeros, that
/// is known in advance.
fn check_space(controller: &ControllerReport, arguments: &Arguments, needed: u64) -> Result<()> {
    let free = controller.space.free_bytes;
    if needed > free && !arguments.skip_zeroes {
        let (shown, needed, free) = (arguments.image.display(), bytes(needed), bytes(free));
        bail!(
            "{shown} has {needed} of data, and {free} are free on controller \"{}\"",
            controller.name
        );
    }
    Ok(())
}

/// Opens an image, which must have a size and random access: opening a FIFO would block until it
/// has a writer.
fn open(image: &Path) -> Result<File> {
    let shown = image.display();
    let check = |kind: FileType| {
        let what =
            if kind.is_dir() { "a directory" } else { "neither a regular file nor a block device" };
        if kind.is_file() || kind.is_block_device() {
            Ok(())
        } else {
            Err(anyhow!("{shown} is {what}"))
        }
    };
    // Opening has effects, so the kind is checked before, and again after in case another file has
    // this name by now.
    let metadata = std::fs::metadata(image).with_context(|| format!("{shown} cannot be opened"))?;
    check(metadata.file_type())?;
    let mut options = File::options();
    options.read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    let source = options.open(image).with_context(|| format!("{shown} cannot be opened"))?;
    check(source.metadata()?.file_type())?;
    Ok(source)
}

/// Converts an image of another format to a raw one with the same holes.
fn convert(image: &Path, format: &str, raw: &Path, interrupt: &Interrupt) -> Result<File> {
    let arguments = [
        "-f".as_ref(),
        format.as_ref(),
        "-O".as_ref(),
        "raw".as_ref(),
        image.as_os_str(),
        raw.as_os_str(),
    ];
    let size_bytes = std::fs::metadata(image)?.len();
    qemu::convert(arguments, "converting", size_bytes, interrupt)?;
    Ok(File::open(raw)?)
}

/// Writes the segments to the disk. Returns the number of bytes written.
fn copy(
    raw: &File,
    segments: &[image::Segment],
    disk: &mut Disk<'_>,
    skip_zeroes: bool,
    interrupt: &Interrupt,
) -> Result<u64> {
    let mut progress = Progress::new("importing", image::total(segments));
    let mut buffer = vec![0; REQUEST_BYTES as usize];
    let mut copied = 0;
    for (first, len) in segments {
        let (mut at, end) = (*first, first + len);
        while at < end {
            let count = (end - at).min(u64::from(REQUEST_BYTES)) as usize;
            let piece = &mut buffer[..count];
            interrupt.check()?;
            image::read(raw, at, piece)?;
            if !(skip_zeroes && image::is_zero(piece)) {
                disk.write(at, piece)?;
                copied += count as u64;
            }
            at += count as u64;
            progress.add(count as u64);
        }
    }
    progress.finish();
    Ok(copied)
}
