//! Finds out whether a QEMU can unplug a vfio-user device with MSI-X. Versions up to 11.1 at least
//! cannot: they delete a region of the device that is already deleted (`vfio_user_msix_teardown`),
//! and an assertion aborts QEMU. A device with MSI has no such region.

use crate::config::{self, MANAGER};
use crate::emulator::Emulator;
use crate::install;
use crate::process::{Running, Source};
use crate::qemu::{self, Port};
use crate::qmp::Qmp;
use crate::session::Session;
use crate::text;
use anyhow::{Context, Result};
use std::ffi::OsStr;
use std::time::{Duration, Instant};

/// The name of the QEMU of this test, which has no guest.
pub(super) const PROBE: &str = "probe";
const SLOT: u8 = 1;
const PATIENCE: Duration = Duration::from_secs(10);

/// Plugs and unplugs a function with MSI-X in a QEMU of its own.
pub(super) fn can_unplug(session: &mut Session<'_>, emulator: &Emulator) -> Result<bool> {
    let control = session.directory.join("probe.qmp");
    let mut words = Vec::new();
    // An abort is an expected result here, so it must leave no core dump.
    if let Some(prlimit) = install::find("prlimit") {
        words.extend([text(&prlimit)?.to_owned(), "--core=0".to_owned()]);
    }
    words.extend(emulator.command.iter().cloned());
    // The function's server maps the memory. Without ACPI, and with the port switched off because
    // no guest runs, QEMU unplugs without asking a guest.
    let options = "-object memory-backend-memfd,id=memory,size=64M,share=on -machine \
                   q35,memory-backend=memory -m 64M -accel tcg -global \
                   ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off -S -display none -nodefaults \
                   -no-user-config";
    words.extend(options.split_whitespace().map(str::to_owned));
    words.extend(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", text(&control)?)]);
    words.extend(["-device".to_owned(), Port::description(SLOT)]);
    let (program, arguments) = words.split_first().context("an empty command")?;
    let (stdout, stderr) = (Source::Guest(PROBE), Source::Qemu(PROBE));
    let running = Running::start(&session.inbox, OsStr::new(program), arguments, stdout, stderr)?;
    let mut qmp = Qmp::connect(&control)?;
    let socket = config::socket(session.directory, MANAGER);
    qmp.plug(qemu::function(MANAGER, &socket, SLOT)?)?;
    let deadline = Instant::now() + PATIENCE;
    // If QEMU ends, the commands fail, and the answer is no.
    let unplugged =
        qmp.unplug(MANAGER).and_then(|()| qmp.unplugged(MANAGER, deadline)).unwrap_or(false);
    drop(running);
    session.wait_for_power_off(PROBE, Instant::now() + PATIENCE)?;
    Ok(unplugged)
}
