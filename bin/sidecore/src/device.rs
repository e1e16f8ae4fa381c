//! `sidecore device`.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use serde_json::Value;
use sidecore_control::config::size;
use sidecore_control::report::DeviceState;
use sidecore_control::{Client, NewDevice};

use crate::flags::{DeviceFlags, VolumeFlags};
use crate::{pick, print, print_json};

/// The arguments of `sidecore device`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print the control API's JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve another disk or NIC, until it is removed or the daemon ends.
    Add(Box<AddArguments>),
    /// Stop serving a disk. Its guest sees the disk go away.
    Remove {
        /// The device.
        device: String,
    },
    /// Serve clients that are refused because writes that were answered to them may be missing.
    ///
    /// If the daemon was killed and its log of answered changes is gone, a guest that continues
    /// would find zeroes or old data where it wrote. Restart the guest, which is always served, or
    /// accept the loss with this command.
    AcceptLoss {
        /// The device.
        device: String,
    },
}

#[derive(Args)]
struct AddArguments {
    /// The name of the device.
    device: String,
    /// The socket to serve it on: of vhost-user, or of vfio-user for NVMe. A device that is
    /// exported to a client has none, nor have ports of a switch but for NICs of this host's
    /// guests.
    #[arg(required_unless_present_any = ["client", "switch"])]
    path: Option<PathBuf>,
    /// The volume to serve, through a virtual function of its own.
    #[arg(
        long,
        value_name = "NAME",
        required_unless_present_any = ["store", "iohost", "switch"],
        conflicts_with_all = ["store", "iohost", "switch"]
    )]
    volume: Option<String>,
    /// The volume's controller; not needed if there is only one.
    #[arg(long, short, value_name = "NAME", conflicts_with = "store")]
    controller: Option<String>,
    /// A store of the configuration, instead of a volume.
    #[arg(long, value_name = "NAME", conflicts_with = "iohost")]
    store: Option<String>,
    /// An IOhost that has the disk, instead of a volume; or that has the other end of a remote-net.
    #[arg(long, value_name = "NAME")]
    iohost: Option<String>,
    /// The name of the disk, or of the NIC, at the IOhost, if it is another one.
    #[arg(long, value_name = "NAME", requires = "iohost")]
    remote_device: Option<String>,
    /// A sidecore that serves the device; repeat the option for several.
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
            let size = match report.state {
                DeviceState::Opening => String::new(),
                _ if report.switch.is_some() => String::new(),
                _ => format!(" of {}", size::show(report.capacity_bytes)),
            };
            let on = match report.socket.as_str() {
                "" => String::new(),
                socket => format!(" on {socket}"),
            };
            let note = report.reason.map(|reason| format!("{reason}\n")).unwrap_or_default();
            Ok(print(&format!("added: \"{}\"{size}{on}\n{note}", report.name))?)
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
            Ok(print(&format!(
                "\"{device}\" serves clients that may miss what they have written\n"
            ))?)
        }
    }
}

fn device(client: &Client, add: AddArguments) -> Result<NewDevice> {
    let mut device = match add.path {
        // The daemon has another working directory, so it gets an absolute path.
        Some(path) => NewDevice::new(&add.device, &std::path::absolute(path)?),
        None => NewDevice::default().with("name", add.device.as_str()),
    };
    device.0.extend(add.keys.0);
    let device = device.with("sidecores", add.sidecores);
    if let Some(iohost) = &add.iohost
        && device.0.contains_key("switch")
    {
        let device = device.with("iohost", iohost.as_str());
        return Ok(match add.remote_device {
            Some(nic) => device.with("device", nic),
            None => device,
        });
    }
    if let Some(iohost) = add.iohost {
        let mut device = device.of_iohost(&iohost, &add.remote_device.unwrap_or(add.device));
        if let Some(Value::Object(remote)) = device.0.get_mut("remote") {
            // The stages: an IOhost conflicts with the other flags of a volume.
            remote.extend(add.volume_keys.0);
        }
        return Ok(device);
    }
    let Some(volume) = add.volume else {
        return Ok(if add.store.is_some() { device.with("store", add.store) } else { device });
    };
    let controller = pick::controller(client, add.controller.as_deref())?.name;
    let mut function = add.volume_keys.0;
    function.extend([
        ("controller".to_owned(), controller.into()),
        ("volume".to_owned(), volume.into()),
    ]);
    if let Some(read_only) = device.0.get("read_only") {
        function.insert("read_only".to_owned(), read_only.clone());
    }
    Ok(device.with("volume", function))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::FromArgMatches as _;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_remote_nic_has_an_iohost_and_no_socket() {
        let command = AddArguments::augment_args(clap::Command::new("add"));
        let given = "add far --front-end remote-net --switch one --iohost io1 --remote-device nic1";
        let matches = command.try_get_matches_from(given.split(' ')).unwrap();
        let add = AddArguments::from_arg_matches(&matches).unwrap();
        let made = device(&Client::new(Path::new("/nowhere")).unwrap(), add).unwrap();
        let expected = [("iohost", "io1"), ("device", "nic1"), ("switch", "one"), ("name", "far")];
        for (key, value) in expected {
            assert_eq!(made.0[key], value, "{key}");
        }
        assert!(!made.0.contains_key("remote") && !made.0.contains_key("socket"));
    }

    #[test]
    fn a_disk_of_an_iohost_may_have_stages_and_no_other_flag_of_a_volume() {
        let add = |arguments: &[&str]| {
            let command = AddArguments::augment_args(clap::Command::new("add"));
            let first = ["add", "vd0", "/vd0.sock", "--iohost", "io1", "--front-end", "nvme"];
            let matches = command.try_get_matches_from([&first, arguments].concat())?;
            AddArguments::from_arg_matches(&matches)
        };
        let stage = ["--stage", "encrypt,header=/h,key_file=/k", "--stage", "delay,delay_us=1"];
        let nowhere = Client::new(Path::new("/nowhere")).unwrap();
        let made = device(&nowhere, add(&stage).unwrap()).unwrap();
        assert_eq!(made.0["front_end"], "nvme");
        let stages = json!([
            { "type": "encrypt", "header": "/h", "key_file": "/k" },
            { "type": "delay", "delay_us": 1 }
        ]);
        assert_eq!(made.0["remote"], json!({ "iohost": "io1", "device": "vd0", "stage": stages }));
        assert!(add(&["--iops", "5"]).is_err());
        assert!(add(&["--store", "mem"]).is_err());
    }
}
