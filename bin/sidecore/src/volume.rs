//! `sidecore volume`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Subcommand;
use sidecore_control::config::size;
use sidecore_control::report::{CheckReport, DeviceReport, ExtentReport, VolumeReport};
use sidecore_control::{Client, CreateVolume, ExtentsQuery, Volumes, offline};

use crate::pick::{self, OnController};
use crate::table::Table;
use crate::units::{bytes, count, percent, time};
use crate::{FAULTS, dedup, export, import, print, print_json, repair, salvage};

/// The arguments of `sidecore volume`.
pub(crate) type Arguments = OnController<Command>;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Make a volume. It takes no space until it is written.
    Create {
        /// The volume's name: letters, digits, `-`, `_` and `.`.
        name: String,
        /// The size that the guest sees, for instance 20GiB.
        #[arg(value_parser = size::parse)]
        size: u64,
        /// The most space of the store that the volume may take.
        #[arg(long, value_name = "SIZE", value_parser = size::parse)]
        quota: Option<u64>,
    },
    /// List the volumes and snapshots.
    List,
    /// Show a volume.
    Show {
        /// The volume.
        volume: String,
        /// Also list all extents that map the volume.
        #[arg(long)]
        extents: bool,
    },
    /// Make a read-only copy of a volume as it is now, at once and without copying.
    Snapshot {
        /// The volume.
        volume: String,
        /// The snapshot's name.
        name: String,
    },
    /// Make a writable copy of a volume or snapshot as it is now, at once and without copying.
    Clone {
        /// The volume or snapshot.
        origin: String,
        /// The clone's name.
        name: String,
    },
    /// Change a volume's size. A running guest sees it at once if its VMM passes it on (QEMU does).
    Resize {
        /// The volume.
        volume: String,
        /// The new size.
        #[arg(value_parser = size::parse)]
        size: u64,
        /// Allow a smaller size: data behind the new end is lost.
        #[arg(long)]
        shrink: bool,
    },
    /// Change a volume's name.
    Rename {
        /// The volume.
        volume: String,
        /// The new name.
        name: String,
    },
    /// Change the most space of the store that a volume may take.
    Quota {
        /// The volume.
        volume: String,
        /// A size, or `none`.
        #[arg(value_parser = quota)]
        quota: Quota,
    },
    /// Delete volumes or snapshots that no device uses. Their data is lost.
    Delete {
        /// The volumes.
        #[arg(required = true)]
        volumes: Vec<String>,
    },
    /// Read all metadata and account for every block.
    ///
    /// Checks a controller of the running daemon or, with --path, a store that no daemon has open.
    Check {
        /// A file or block device that no daemon has open.
        #[arg(long, value_name = "PATH", conflicts_with = "controller")]
        path: Option<PathBuf>,
    },
    /// Find equal blocks, compare them, and keep one of each: in the background, under guests.
    ///
    /// Within a volume with its snapshots and clones, unless --across is given.
    Dedup(dedup::Arguments),
    /// Repair the metadata of a store that no daemon has open: damaged parts are left out, and the
    /// losses are listed.
    ///
    /// Without --yes nothing is written.
    Repair(repair::Arguments),
    /// Make a volume from an image.
    Import(import::Arguments),
    /// Write a volume to an image.
    Export(export::Arguments),
}

/// A quota argument: a size or `none`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quota(Option<u64>);

fn quota(text: &str) -> Result<Quota, String> {
    if text == "none" { Ok(Quota(None)) } else { size::parse(text).map(|bytes| Quota(Some(bytes))) }
}

pub(crate) fn run(socket: &std::path::Path, arguments: Arguments) -> Result<ExitCode> {
    let OnController { controller, json, command } = arguments;
    if let Command::Check { path: Some(path) } = &command {
        return checked(&offline::check(path)?, json);
    }
    if let Command::Repair(arguments) = &command {
        return repair::run(arguments, json);
    }
    if let Command::Export(arguments) = &command
        && let Some(path) = &arguments.offline.path
    {
        return salvage::run(path, arguments, json);
    }
    let client = Client::new(socket)?;
    let controller = pick::controller(&client, controller.as_deref())?;
    let on = controller.name.as_str();
    let one = |volume: VolumeReport, done: &str| {
        if json { print_json(&volume) } else { say(&volume, done) }
    };
    match command {
        Command::Create { name, size, quota } => {
            let new = CreateVolume { name, size_bytes: size, quota_bytes: quota };
            one(client.create_volume(on, &new)?, "made")?;
        }
        Command::List => list(&client, on, json)?,
        Command::Show { volume, extents } => show(&client, on, &volume, extents, json)?,
        Command::Snapshot { volume, name } => {
            one(client.snapshot_volume(on, &volume, &name)?, "made")?
        }
        Command::Clone { origin, name } => one(client.clone_volume(on, &origin, &name)?, "made")?,
        Command::Resize { volume, size, shrink } => {
            let now = client.volume(on, &volume)?.size_bytes;
            if size < now && !shrink {
                bail!(
                    "volume \"{volume}\" has {}; what is behind {} would be lost: say --shrink if \
                     that is meant",
                    size::show(now),
                    size::show(size)
                );
            }
            one(client.resize_volume(on, &volume, size)?, "changed")?;
        }
        Command::Rename { volume, name } => {
            one(client.rename_volume(on, &volume, &name)?, "renamed")?
        }
        Command::Quota { volume, quota } => {
            one(client.set_quota(on, &volume, quota.0)?, "changed")?
        }
        Command::Delete { volumes } => return delete(&client, on, &volumes, json),
        Command::Dedup(arguments) => return dedup::run(&client, on, arguments, json),
        Command::Check { .. } => return checked(&client.check_controller(on)?, json),
        // Handled above, because no daemon has that store.
        Command::Repair(arguments) => return repair::run(&arguments, json),
        Command::Import(arguments) => import::run(socket, &client, &controller, &arguments, json)?,
        Command::Export(arguments) => export::run(socket, &client, on, &arguments, json)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn say(volume: &VolumeReport, done: &str) -> Result<()> {
    let what = if volume.read_only { "snapshot" } else { "volume" };
    let quota = volume
        .quota_bytes
        .map(|quota| format!(", quota {}", size::show(quota)))
        .unwrap_or_default();
    let (name, size) = (&volume.name, size::show(volume.size_bytes));
    Ok(print(&format!(
        "{done}: {what} \"{name}\" of {size}{quota} on controller \"{}\"\n",
        volume.controller
    ))?)
}

/// Deletes all volumes that can be deleted, and reports the result of each.
fn delete(client: &Client, controller: &str, volumes: &[String], json: bool) -> Result<ExitCode> {
    let (mut deleted, mut kept) = (Vec::new(), Vec::new());
    for (index, volume) in volumes.iter().enumerate() {
        if volumes.iter().take(index).any(|before| before == volume) {
            continue;
        }
        match client.delete_volume(controller, volume) {
            Ok(()) => {
                if !json {
                    print(&format!("deleted: \"{volume}\" on controller \"{controller}\"\n"))?;
                }
                deleted.push(volume);
            }
            Err(error) => {
                eprintln!("sidecore: not deleted: \"{volume}\": {error:#}");
                kept.push(serde_json::json!({ "volume": volume, "error": format!("{error:#}") }));
            }
        }
    }
    if json {
        print_json(&serde_json::json!({ "deleted": deleted, "not_deleted": kept }))?;
    }
    Ok(if kept.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The names of the devices that show this volume.
fn devices_of(devices: &[DeviceReport], volume: &VolumeReport) -> Vec<String> {
    let shows = |device: &&DeviceReport| {
        device.controller.as_ref() == Some(&volume.controller)
            && device.volume.as_ref() == Some(&volume.name)
    };
    devices.iter().filter(shows).map(|device| device.name.clone()).collect()
}

fn list(client: &Client, controller: &str, json: bool) -> Result<()> {
    let volumes = client.volumes(controller)?;
    if json {
        return print_json(&Volumes { volumes });
    }
    let devices = client.devices()?;
    let mut table = Table::new(&[
        "NAME",
        ">SIZE",
        ">ALLOCATED",
        ">OF SIZE",
        ">EXCLUSIVE",
        ">SHARED",
        ">QUOTA",
        ">EXTENTS",
        "KIND",
        "FROM",
        "CREATED",
        "DEVICES",
    ]);
    for volume in volumes {
        let devices = devices_of(&devices, &volume);
        table.row([
            volume.name.clone(),
            size::show(volume.size_bytes),
            bytes(volume.allocated_bytes),
            percent(volume.allocated_bytes, volume.size_bytes),
            volume.exclusive_bytes.map_or_else(|| "?".to_owned(), bytes),
            volume.shared_bytes.map_or_else(|| "?".to_owned(), bytes),
            volume.quota_bytes.map_or_else(|| "-".to_owned(), size::show),
            volume.extents.to_string(),
            kind(&volume).to_owned(),
            origin(&volume),
            time(volume.created_at_unix_s),
            if devices.is_empty() { "-".to_owned() } else { devices.join(",") },
        ]);
    }
    Ok(print(&table.render())?)
}

fn kind(volume: &VolumeReport) -> &'static str {
    match (volume.damaged, volume.read_only) {
        (true, _) => "damaged",
        (false, true) => "snapshot",
        (false, false) => "volume",
    }
}

fn origin(volume: &VolumeReport) -> String {
    match (&volume.origin_name, volume.origin) {
        (Some(name), _) => name.clone(),
        (None, Some(id)) => format!("(deleted, {id})"),
        (None, None) => "-".to_owned(),
    }
}

fn show(client: &Client, controller: &str, volume: &str, extents: bool, json: bool) -> Result<()> {
    let report = client.volume(controller, volume)?;
    let extents = if extents { Some(all_extents(client, controller, volume)?) } else { None };
    if json {
        return match extents {
            Some(extents) => {
                print_json(&serde_json::json!({ "volume": report, "extents": extents }))
            }
            None => print_json(&report),
        };
    }
    let devices = devices_of(&client.devices()?, &report);
    let mut table = Table::new(&["volume", &report.name]);
    let mut line = |name: &str, value: String| table.row([name.to_owned(), value]);
    line("controller", report.controller.clone());
    line("number", report.id.to_string());
    line("kind", kind(&report).to_owned());
    line("made from", origin(&report));
    line("created", time(report.created_at_unix_s));
    line("size", size::show(report.size_bytes));
    let share = percent(report.allocated_bytes, report.size_bytes);
    line("allocated", format!("{} ({share} of its size)", bytes(report.allocated_bytes)));
    let exclusive = |own| format!("{}, which deleting it frees", bytes(own));
    line("exclusive", report.exclusive_bytes.map_or_else(|| "unknown".to_owned(), exclusive));
    line("shared", report.shared_bytes.map_or_else(|| "unknown".to_owned(), bytes));
    line("quota", report.quota_bytes.map_or_else(|| "none".to_owned(), size::show));
    line("extents", report.extents.to_string());
    line("fragmentation", fragmentation(report.extents, report.allocated_bytes));
    line("devices", if devices.is_empty() { "none".to_owned() } else { devices.join(", ") });
    let mut text = table.render();
    if let Some(extents) = extents {
        let mut table = Table::new(&[">BLOCK", ">BLOCKS", ">ON STORE", "SHARED"]);
        for extent in extents {
            let shared = if extent.shared { "shared" } else { "" };
            let numbers =
                [extent.first, extent.count, extent.physical].map(|number| number.to_string());
            table.row(numbers.into_iter().chain([shared.to_owned()]));
        }
        text.push('\n');
        text.push_str(&table.render());
    }
    Ok(print(&text)?)
}

/// Reads the whole mapping of a volume.
pub(crate) fn all_extents(
    client: &Client,
    controller: &str,
    volume: &str,
) -> Result<Vec<ExtentReport>> {
    let mut all = Vec::new();
    let mut next = Some(0);
    while let Some(from) = next {
        let query = ExtentsQuery { from, max: ExtentsQuery::MAX };
        let answer = client.extents(controller, volume, query)?;
        all.extend(answer.extents);
        // A daemon that makes no progress would be asked forever.
        next = answer.next.filter(|next| *next > from);
    }
    Ok(all)
}

/// Formats the fragmentation: extents for each GiB, and their mean size.
pub(crate) fn fragmentation(extents: u64, allocated_bytes: u64) -> String {
    if extents == 0 || allocated_bytes == 0 {
        return "-".to_owned();
    }
    let per_gib = extents as f64 / (allocated_bytes as f64 / (1_u64 << 30) as f64);
    format!(
        "{} extents a GiB, {} on average",
        crate::units::short(per_gib),
        bytes(allocated_bytes / extents)
    )
}

/// Prints the report of a check. Returns the exit code for faults if there are any.
fn checked(report: &CheckReport, json: bool) -> Result<ExitCode> {
    let code = if report.clean { ExitCode::SUCCESS } else { ExitCode::from(FAULTS) };
    if json {
        print_json(report)?;
        return Ok(code);
    }
    let mut text = format!(
        "{}, {}, {}; of {} blocks {} hold data ({} of them shared), {} metadata, {} are free, {} \
         in between\n",
        count(report.volumes as usize, "volume"),
        count(report.extents as usize, "extent"),
        count(report.nodes as usize, "metadata node"),
        report.total_blocks,
        report.data_blocks,
        report.shared_data_blocks,
        report.metadata_blocks,
        report.free_blocks,
        report.transient_blocks
    );
    for problem in &report.problems {
        text.push_str(&format!("{problem}\n"));
    }
    if report.more_problems > 0 {
        text.push_str(&format!("and {} more\n", report.more_problems));
    }
    let faults = report.problems.len() as u64 + report.more_problems;
    text.push_str(&if report.clean {
        "fine\n".to_owned()
    } else {
        count(faults as usize, "fault") + "\n"
    });
    print(&text)?;
    Ok(code)
}
