//! `sidecore device`.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use sidecore_control::config::size;
use sidecore_control::{Client, NewDevice, NewFunction};

use crate::{pick, print, print_json};

/// What is done to devices.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The control API's JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve one more disk, until the daemon ends or it is removed.
    Add(Box<AddArguments>),
    /// Serve a disk no longer. Its guest sees it go away.
    Remove {
        /// The device.
        device: String,
    },
    /// Serve clients that are turned away because writes that were answered to them may be missing.
    ///
    /// After the daemon was killed and the log of what it had answered is gone, a guest that goes on would find zeroes
    /// or old data where it wrote. Let it start anew, which needs no word, or say with this that the loss is known.
    AcceptLoss {
        /// The device.
        device: String,
    },
}

#[derive(Args)]
struct AddArguments {
    /// The device's name.
    device: String,
    /// The socket to serve it on: of vhost-user, or of vfio-user for NVMe.
    path: PathBuf,
    /// The user that the socket belongs to, by name or number: the daemon's unless given.
    #[arg(long, value_name = "USER")]
    socket_owner: Option<String>,
    /// The group that the socket belongs to; its members may connect unless a mode says otherwise.
    #[arg(long, value_name = "GROUP")]
    socket_group: Option<String>,
    /// The socket's permissions: 0600 unless given, or 0660 with a group.
    #[arg(long, value_name = "OCTAL")]
    socket_mode: Option<String>,
    /// What its guest sees: virtio-blk or nvme.
    #[arg(long, value_name = "KIND")]
    front_end: Option<String>,
    /// The volume that it shows, through a virtual function of its own.
    #[arg(long, value_name = "NAME", required_unless_present = "store", conflicts_with = "store")]
    volume: Option<String>,
    /// The volume's controller; it need not be named if there is only one.
    #[arg(long, short, value_name = "NAME", conflicts_with = "store")]
    controller: Option<String>,
    /// A store of the configuration, instead of a volume.
    #[arg(long, value_name = "NAME")]
    store: Option<String>,
    /// Request queues, 1 to 64.
    #[arg(long, value_name = "COUNT")]
    queues: Option<u16>,
    /// The largest ring, in entries.
    #[arg(long, value_name = "ENTRIES")]
    queue_size_max: Option<u16>,
    /// A sidecore that serves it; several times for several.
    #[arg(long = "sidecore", value_name = "NAME")]
    sidecores: Vec<String>,
    /// What it does without work: poll, adaptive or interrupt.
    #[arg(long, value_name = "MODE")]
    idle: Option<String>,
    /// How long an adaptive one spins, in microseconds.
    #[arg(long, value_name = "US")]
    spin_us: Option<u64>,
    /// How an NVMe function interrupts its driver: msi-x or msi.
    #[arg(long, value_name = "KIND")]
    interrupts: Option<String>,
    /// Offer packed rings as well.
    #[arg(long)]
    packed: bool,
    /// Whether completed writes may wait for a flush, until the guest chooses by itself [default: true].
    #[arg(long, value_name = "BOOL")]
    write_cache: Option<bool>,
    /// The guest may only read.
    #[arg(long)]
    read_only: bool,
    /// The serial number that the guest sees.
    #[arg(long, value_name = "TEXT")]
    serial: Option<String>,
    /// The size of an NVMe namespace's blocks, 512 or 4096.
    #[arg(long, value_name = "BYTES")]
    block_size: Option<u32>,
    /// Its share among the volumes that want to be served, 1 to 1000.
    #[arg(long, value_name = "WEIGHT", conflicts_with = "store")]
    weight: Option<u32>,
    /// Reads a second.
    #[arg(long, value_name = "COUNT", conflicts_with = "store")]
    read_iops: Option<u64>,
    /// Reads at once after a rest.
    #[arg(long, value_name = "COUNT", requires = "read_iops")]
    read_iops_burst: Option<u64>,
    /// Writes a second.
    #[arg(long, value_name = "COUNT", conflicts_with = "store")]
    write_iops: Option<u64>,
    /// Writes at once after a rest.
    #[arg(long, value_name = "COUNT", requires = "write_iops")]
    write_iops_burst: Option<u64>,
    /// Bytes read a second.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, conflicts_with = "store")]
    read_bps: Option<u64>,
    /// Bytes read at once after a rest.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "read_bps")]
    read_bps_burst: Option<u64>,
    /// Bytes written a second.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, conflicts_with = "store")]
    write_bps: Option<u64>,
    /// Bytes written at once after a rest.
    #[arg(long, value_name = "SIZE", value_parser = size::parse, requires = "write_bps")]
    write_bps_burst: Option<u64>,
}

pub(crate) fn run(client: &Client, arguments: Arguments) -> Result<()> {
    match arguments.command {
        Command::Add(add) => {
            let report = client.add_device(&device(client, *add)?)?;
            if arguments.json {
                return print_json(&report);
            }
            let size = size::show(report.capacity_bytes);
            Ok(print(&format!("added: \"{}\" of {size} on {}\n", report.name, report.socket))?)
        }
        Command::Remove { device } => {
            client.remove_device(&device)?;
            if arguments.json {
                return print_json(&serde_json::json!({ "removed": device }));
            }
            Ok(print(&format!("removed: \"{device}\"\n"))?)
        }
        Command::AcceptLoss { device } => {
            client.accept_loss(&device)?;
            if arguments.json {
                return print_json(&serde_json::json!({ "loss_accepted": device }));
            }
            Ok(print(&format!("\"{device}\" serves clients that may miss what they have written\n"))?)
        }
    }
}

fn device(client: &Client, add: AddArguments) -> Result<NewDevice> {
    let volume = match add.volume {
        Some(volume) => Some(NewFunction {
            controller: pick::controller(client, add.controller.as_deref())?.name,
            volume,
            weight: add.weight,
            read_iops: add.read_iops,
            read_iops_burst: add.read_iops_burst,
            write_iops: add.write_iops,
            write_iops_burst: add.write_iops_burst,
            read_bps: add.read_bps,
            read_bps_burst: add.read_bps_burst,
            write_bps: add.write_bps,
            write_bps_burst: add.write_bps_burst,
            read_only: add.read_only,
        }),
        None => None,
    };
    Ok(NewDevice {
        name: add.device,
        // The daemon has another working directory.
        socket: std::path::absolute(add.path)?,
        socket_owner: add.socket_owner,
        socket_group: add.socket_group,
        socket_mode: add.socket_mode,
        front_end: add.front_end,
        store: add.store,
        volume,
        queues: add.queues,
        queue_size_max: add.queue_size_max,
        sidecores: add.sidecores,
        idle: add.idle,
        spin_us: add.spin_us,
        interrupts: add.interrupts,
        packed: add.packed,
        write_cache: add.write_cache,
        read_only: add.read_only,
        seg_max: None,
        size_max: None,
        serial: add.serial,
        block_size: add.block_size,
    })
}
