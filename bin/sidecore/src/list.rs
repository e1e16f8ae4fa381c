//! `sidecore list`.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use serde::Serialize;
use sidecore_control::config::size;
use sidecore_control::report::{DeviceReport, SidecoreReport};
use sidecore_control::{Client, ClientError};

use crate::own::Candidacy;
use crate::print;
use crate::table::Table;
use crate::units::count;

#[derive(Serialize)]
struct Listed {
    devices: Vec<DeviceReport>,
    sidecores: Vec<SidecoreReport>,
    /// The state of the `sidecore own` that runs the daemon, or will.
    #[serde(skip_serializing_if = "Option::is_none")]
    own: Option<Candidacy>,
}

pub(crate) fn run(socket: &Path, json: bool) -> Result<()> {
    let own = Candidacy::read(socket);
    let client = Client::new(socket)?;
    let reports = client.devices().and_then(|devices| Ok((devices, client.sidecores()?)));
    let listed = match reports {
        Ok((devices, sidecores)) => Listed { devices, sidecores, own },
        // A candidate that waits has no daemon.
        Err(ClientError::NoDaemon(_)) if own.is_some() => {
            Listed { devices: Vec::new(), sidecores: Vec::new(), own }
        }
        Err(error) => return Err(error.into()),
    };
    if json {
        return crate::print_json(&listed);
    }
    let own = listed.own.map(|own| own.lines());
    let is_candidate = own.is_some() && listed.sidecores.is_empty();
    let devices =
        if is_candidate { String::new() } else { table(listed.devices, listed.sidecores) };
    Ok(print(&(devices + &own.unwrap_or_default()))?)
}

/// The table of the devices, and the warnings below it.
fn table(devices: Vec<DeviceReport>, sidecores: Vec<SidecoreReport>) -> String {
    let mut table = Table::new(&[
        "NAME",
        "STATE",
        "FRONT-END",
        "STORE",
        "TYPE",
        ">SIZE",
        ">QUEUES",
        "IDLE",
        "SIDECORES",
        "SOCKET",
    ]);
    let mut reasons = String::new();
    for device in devices {
        if let Some(reason) = &device.reason {
            let remedy = if device.needs_reset {
                " (reset it from the guest, or restart the guest)"
            } else {
                ""
            };
            reasons.push_str(&format!(
                "{} is {}: {reason}{remedy}\n",
                device.name,
                device.state.word()
            ));
        }
        for warning in &device.warnings {
            reasons.push_str(&format!("{}: {warning}\n", device.name));
        }
        if let Some(disconnect) = &device.disconnect {
            let at = UNIX_EPOCH
                .checked_add(Duration::from_secs(disconnect.at_unix_s))
                .unwrap_or(UNIX_EPOCH);
            let ago = SystemTime::now().duration_since(at).unwrap_or_default().as_secs();
            reasons.push_str(&format!(
                "{}: its last client was disconnected {} ago: {}\n",
                device.name,
                count(usize::try_from(ago).unwrap_or(usize::MAX), "second"),
                disconnect.reason
            ));
        }
        let [store, store_type, size] = behind(&device);
        table.row([
            device.name,
            device.state.word().to_owned(),
            device.front_end,
            store,
            store_type,
            size,
            format!("{}/{}", device.queues_running, device.queues),
            device.idle,
            device.sidecores.join(","),
            device.socket,
        ]);
    }
    for warning in sidecores.into_iter().filter_map(|sidecore| sidecore.warning) {
        reasons.push_str(&format!("{warning}\n"));
    }
    table.render() + &reasons
}

/// The store or the switch behind a device, its type, and the size.
fn behind(device: &DeviceReport) -> [String; 3] {
    if let Some(switch) = &device.switch {
        return [switch.clone(), "switch".to_owned(), String::new()];
    }
    let read_only = if device.read_only { " ro" } else { "" };
    let size = size::show(device.capacity_bytes);
    [device.store.clone(), device.store_type.clone(), format!("{size}{read_only}")]
}
