//! Which controller is meant.

use anyhow::{Result, bail};
use sidecore_control::report::ControllerReport;
use sidecore_control::{Client, Controllers};

/// The controller of this name; without a name, the only one that there is.
pub(crate) fn controller(client: &Client, name: Option<&str>) -> Result<ControllerReport> {
    if let Some(name) = name {
        return Ok(client.controller(name)?);
    }
    let Controllers { mut controllers, closed } = client.all_controllers()?;
    match (controllers.len(), closed.first()) {
        (1, None) => Ok(controllers.swap_remove(0)),
        (0, Some(closed)) => bail!("{closed}"),
        (0, None) => bail!("this sidecored has no controller; docs/config.md says how to add a section [[controller]]"),
        _ => {
            let open = controllers.into_iter().map(|controller| controller.name);
            let names: Vec<String> = open.chain(closed.into_iter().map(|controller| controller.name)).collect();
            bail!("there are several controllers; name one with --controller: {}", names.join(", "))
        }
    }
}
