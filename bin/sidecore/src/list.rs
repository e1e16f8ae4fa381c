//! `sidecore list`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use serde::Serialize;
use sidecore_control::Client;
use sidecore_control::config::size;
use sidecore_control::report::{DeviceReport, SidecoreReport};

use crate::print;
use crate::table::Table;
use crate::units::count;

#[derive(Serialize)]
struct Listed {
    devices: Vec<DeviceReport>,
    sidecores: Vec<SidecoreReport>,
}

pub(crate) fn run(client: &Client, json: bool) -> Result<()> {
    let (devices, sidecores) = (client.devices()?, client.sidecores()?);
    if json {
        let text = serde_json::to_string_pretty(&Listed { devices, sidecores })?;
        return Ok(print(&(text + "\n"))?);
    }
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
    Ok(print(&(table.render() + &reasons))?)
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
