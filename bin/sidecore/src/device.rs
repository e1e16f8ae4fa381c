//! `sidecore device`.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use sidecore_control::config::size;
use sidecore_control::{Client, NewDevice};

use crate::flags::{DeviceFlags, VolumeFlags};
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
    /// The volume that it shows, through a virtual function of its own.
    #[arg(long, value_name = "NAME", required_unless_present = "store", conflicts_with = "store")]
    volume: Option<String>,
    /// The volume's controller; it need not be named if there is only one.
    #[arg(long, short, value_name = "NAME", conflicts_with = "store")]
    controller: Option<String>,
    /// A store of the configuration, instead of a volume.
    #[arg(long, value_name = "NAME")]
    store: Option<String>,
    /// A sidecore that serves it; several times for several.
    #[arg(long = "sidecore", value_name = "NAME")]
    sidecores: Vec<String>,
    #[command(flatten)]
    keys: DeviceFlags,
    #[command(flatten)]
    volume_keys: VolumeFlags,
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
    // The daemon has another working directory.
    let mut device = NewDevice::new(&add.device, &std::path::absolute(add.path)?);
    device.0.extend(add.keys.0);
    let device = device.with("sidecores", add.sidecores);
    let Some(volume) = add.volume else { return Ok(device.with("store", add.store)) };
    let controller = pick::controller(client, add.controller.as_deref())?.name;
    let mut function = add.volume_keys.0;
    function.extend([("controller".to_owned(), controller.into()), ("volume".to_owned(), volume.into())]);
    if let Some(read_only) = device.0.get("read_only") {
        function.insert("read_only".to_owned(), read_only.clone());
    }
    Ok(device.with("volume", function))
}
