//! `sidecore volume export`.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use sidecore_control::Client;
use sidecore_control::report::VolumeReport;

use crate::disk::{Disk, REQUEST_BYTES, TemporaryDevice};
use crate::image::{self, Segment};
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::salvage::Offline;
use crate::units::bytes;
use crate::{print, print_json, qemu, volume, worker};

/// The arguments of `sidecore volume export`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The volume or snapshot. A volume is exported as it is at this moment; guests may continue to
    /// write.
    pub(crate) volume: String,
    /// The image to make.
    pub(crate) image: PathBuf,
    /// The image's format, by qemu-img's name for it (qcow2, vmdk, vdi, ...).
    #[arg(long, value_name = "FORMAT", default_value = "raw")]
    pub(crate) format: String,
    /// Replace an existing image.
    #[arg(long)]
    pub(crate) force: bool,
    /// Also detect zeros in the volume, and leave holes for them.
    #[arg(long)]
    pub(crate) skip_zeroes: bool,
    /// The directory of a temporary raw image; by default $TMPDIR, or the image's directory.
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) temporary: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) offline: Offline,
}

/// The snapshot to export. An export of a volume makes a temporary one, so that the image shows one
/// moment.
struct Source<'a> {
    client: &'a Client,
    report: VolumeReport,
    temporary: bool,
}

impl<'a> Source<'a> {
    fn of(client: &'a Client, controller: &str, name: &str) -> Result<Self> {
        let report = client.volume(controller, name)?;
        if report.read_only {
            return Ok(Self { client, report, temporary: false });
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let snapshot = format!("export-{}-{now}", std::process::id());
        // The name is unique, so it may be announced before the snapshot exists.
        worker::announce_volume(&snapshot)?;
        let report = client.snapshot_volume(controller, name, &snapshot)?;
        Ok(Self { client, report, temporary: true })
    }
}

impl Drop for Source<'_> {
    fn drop(&mut self) {
        if self.temporary
            && let Err(error) =
                self.client.delete_volume(&self.report.controller, &self.report.name)
        {
            eprintln!("sidecore: the snapshot \"{}\" is still there: {error}", self.report.name);
        }
    }
}

pub(crate) fn run(
    socket: &Path,
    client: &Client,
    controller: &str,
    arguments: &Arguments,
    json: bool,
) -> Result<()> {
    if !worker::is_worker()? {
        return worker::run(client, controller, &arguments.image);
    }
    let interrupt = Interrupt::listen()?;
    let started = Instant::now();
    let shown = arguments.image.display();
    check_target(&arguments.image, arguments.force)?;
    let beside = match arguments.image.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    // The image is made in the directory of its place, so that a rename moves it there at once, and
    // whole.
    let place = worker::workplace(beside)?;
    let made = place.file("image");
    let (raw_place, raw) = if arguments.format == "raw" {
        (None, made.clone())
    } else {
        let elsewhere = worker::workplace(&image::temporary_directory(
            arguments.temporary.as_deref(),
            &arguments.image,
        ))?;
        let raw = elsewhere.file("image.raw");
        (Some(elsewhere), raw)
    };

    let (size_bytes, copied) =
        copy_volume(socket, client, controller, arguments, &raw, &interrupt)?;
    if let Some(place) = raw_place {
        let options = ["-f", "raw", "-O", &arguments.format].map(AsRef::as_ref);
        let arguments = options.into_iter().chain([raw.as_os_str(), made.as_os_str()]);
        qemu::convert(arguments, "converting", size_bytes, &interrupt)?;
        // The raw image is removed first: the other image's filesystem may not answer.
        drop(place);
        File::open(&made)?.sync_all()?;
    }
    // Another process may have made the file meanwhile.
    check_target(&arguments.image, arguments.force)?;
    std::fs::rename(&made, &arguments.image)
        .with_context(|| format!("{shown} cannot be put in its place"))?;

    let seconds = started.elapsed().as_secs_f64();
    if json {
        return print_json(&serde_json::json!({
            "volume": arguments.volume,
            "controller": controller,
            "image": arguments.image,
            "format": arguments.format,
            "size_bytes": size_bytes,
            "copied_bytes": copied,
            "skipped_bytes": size_bytes.saturating_sub(copied),
            "seconds": seconds,
        }));
    }
    Ok(print(&format!(
        "exported: \"{}\" as {shown} ({}), {} of data in {seconds:.1} s\n",
        arguments.volume,
        arguments.format,
        bytes(copied)
    ))?)
}

/// Copies the volume, as it is now, into a raw image. Returns the volume's size and the number of
/// bytes copied.
fn copy_volume(
    socket: &Path,
    client: &Client,
    controller: &str,
    arguments: &Arguments,
    raw: &Path,
    interrupt: &Interrupt,
) -> Result<(u64, u64)> {
    let source = Source::of(client, controller, &arguments.volume)?;
    let report = &source.report;
    let extents = volume::all_extents(client, controller, &report.name)?;
    let block_bytes = u64::from(report.block_bytes);
    let mapped: Vec<Segment> = extents
        .iter()
        .map(|extent| (extent.first * block_bytes, extent.count * block_bytes))
        .collect();
    let device = TemporaryDevice::serve(client, socket, (controller, &report.name), true)?;
    let file = File::options().read(true).write(true).create_new(true).open(raw)?;
    file.set_len(report.size_bytes).with_context(|| format!("{} cannot be made", raw.display()))?;
    let copied = {
        let mut disk = device.connect(interrupt)?;
        let segments = image::widened(&mapped, device.block_bytes(), report.size_bytes);
        copy(&mut disk, &segments, &file, arguments.skip_zeroes)?
    };
    device.remove()?;
    file.sync_all()?;
    Ok((report.size_bytes, copied))
}

pub(crate) fn check_target(path: &Path, force: bool) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("{} cannot be looked at", path.display())),
        Ok(metadata) if !metadata.is_file() => {
            bail!("{} is there and is no regular file", path.display())
        }
        Ok(_) if !force => bail!("{} is there already; say --force to replace it", path.display()),
        Ok(_) => Ok(()),
    }
}

/// Reads the segments into the file. Returns the number of bytes written there.
fn copy(disk: &mut Disk<'_>, segments: &[Segment], file: &File, skip_zeroes: bool) -> Result<u64> {
    let mut progress = Progress::new("exporting", image::total(segments));
    let mut copied = 0;
    let mut take = |offset: u64, data: &[u8]| -> Result<()> {
        if !(skip_zeroes && image::is_zero(data)) {
            file.write_all_at(data, offset).context("the image cannot be written")?;
            copied += data.len() as u64;
        }
        progress.add(data.len() as u64);
        Ok(())
    };
    for (first, len) in segments {
        let (mut at, end) = (*first, first + len);
        while at < end {
            let count = (end - at).min(u64::from(REQUEST_BYTES)) as u32;
            disk.read(at, count, &mut take)?;
            at += u64::from(count);
        }
    }
    disk.finish(&mut take)?;
    progress.finish();
    Ok(copied)
}
