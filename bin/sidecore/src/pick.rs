//! Which controller is meant.

use anyhow::{Result, bail};
use sidecore_control::Client;
use sidecore_control::report::ControllerReport;

/// The controller of this name; without a name, the only one that there is.
pub(crate) fn controller(client: &Client, name: Option<&str>) -> Result<ControllerReport> {
    if let Some(name) = name {
        return Ok(client.controller(name)?);
    }
    let mut controllers = client.controllers()?;
    match controllers.len() {
        1 => Ok(controllers.swap_remove(0)),
        0 => bail!("this sidecored has no controller; docs/config.md says how to add a section [[controller]]"),
        _ => {
            let names: Vec<String> = controllers.into_iter().map(|controller| controller.name).collect();
            bail!("there are several controllers; name one with --controller: {}", names.join(", "))
        }
    }
}
