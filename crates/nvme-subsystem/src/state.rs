//! The state of a subsystem beyond its configuration, which outlives the process.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use sidecore_nvme::ManageError;

use crate::{Function, VolumeService};

/// The state that a function's host, or its physical function's, relies on.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct SubsystemState {
    /// Present if the function is a physical one that manages volumes.
    pub numbers: Option<Numbers>,
    /// By device: of a virtual function its own, of a physical one those that it manages.
    #[serde(rename = "standings")]
    pub functions: BTreeMap<String, FunctionState>,
}

/// The numbers that a physical function's host knows.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Numbers {
    /// Of volumes, by the store's numbers.
    pub(crate) namespaces: HashMap<u64, u32>,
    /// Of devices, by their names.
    pub(crate) controllers: HashMap<String, u16>,
}

/// A virtual function as its physical function's host has set it up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FunctionState {
    /// The volume that the function was configured to serve, by the store's number.
    pub configured: u64,
    /// The volume that it serves.
    pub volume: Option<u64>,
    /// Whether its controller can be enabled.
    pub is_online: bool,
}

/// Gives the functions of a store the state that they had in another process. No client is
/// connected to them yet. A function that is configured to serve another volume by now serves that.
pub fn restore(service: &dyn VolumeService, states: &BTreeMap<String, FunctionState>) {
    let refused = |device: &str, error: ManageError| {
        tracing::warn!(
            device,
            %error,
            "its state is not restored"
        )
    };
    let mut to_attach = Vec::new();
    let mut to_take_offline = Vec::new();
    for Function { device, state: is } in service.functions() {
        let Some(was) = states.get(&device) else { continue };
        if was.configured == is.configured && was.volume != is.volume {
            match service.detach(&device) {
                Ok(()) => to_attach.extend(was.volume.map(|volume| (device.clone(), volume))),
                Err(error) => refused(&device, error),
            }
        }
        if !was.is_online {
            to_take_offline.push(device);
        }
    }
    // A volume is free for a function once the one that was configured to serve it is detached.
    for (device, volume) in to_attach {
        service.attach(&device, volume).unwrap_or_else(|error| refused(&device, error));
    }
    for device in to_take_offline {
        service.set_online(&device, false).unwrap_or_else(|error| refused(&device, error));
    }
}
