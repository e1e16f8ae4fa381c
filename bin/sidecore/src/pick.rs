//! The controller of a command.

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use sidecore_control::report::ControllerReport;
use sidecore_control::{Client, Controllers};

/// The arguments of commands on a controller.
#[derive(Args)]
pub(crate) struct OnController<C: Subcommand> {
    /// The controller; not needed if there is only one.
    #[arg(long, short, value_name = "NAME", global = true)]
    pub(crate) controller: Option<String>,
    /// Print the control API's JSON instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: C,
}

/// Finds the controller of this name; without a name, the only controller.
pub(crate) fn controller(client: &Client, name: Option<&str>) -> Result<ControllerReport> {
    if let Some(name) = name {
        return Ok(client.controller(name)?);
    }
    let Controllers { mut controllers, closed } = client.all_controllers()?;
    match (controllers.len(), closed.first()) {
        (1, None) => Ok(controllers.swap_remove(0)),
        (0, Some(closed)) => bail!("{closed}"),
        (0, None) => bail!(
            "this sidecored has no controller; docs/config.md says how to add a section \
             [[controller]]"
        ),
        _ => {
            let open = controllers.into_iter().map(|controller| controller.name);
            let names: Vec<String> =
                open.chain(closed.into_iter().map(|controller| controller.name)).collect();
            bail!("there are several controllers; name one with --controller: {}", names.join(", "))
        }
    }
}
