//! Chooses the QEMU that runs a guest: the installed one, or a newer one if the guest needs
//! vfio-user.

use crate::install;
use crate::progress::Progress;
use crate::root::Root;
use crate::text;
use anyhow::{Context, Result, ensure};
use sidecore_kit::process::output_of;
use std::path::Path;

const NAME: &str = "qemu-system-x86_64";
/// The device that is a vfio-user client, in QEMU since 10.1.
pub(crate) const VFIO_USER: &str = "vfio-user-pci";

#[derive(Debug, Clone)]
pub(crate) struct Emulator {
    /// The words of the command before the options.
    pub(crate) command: Vec<String>,
}

impl Emulator {
    /// The installed QEMU.
    pub(crate) fn installed() -> Result<Emulator> {
        Ok(Emulator { command: vec![text(&install::require(NAME)?)?.to_owned()] })
    }

    /// A QEMU with vfio-user: the installed one if it has it, else one from the root of a newer
    /// release in `roots`.
    pub(crate) fn with_vfio_user(roots: &Path, progress: &Progress) -> Result<Emulator> {
        let installed = Emulator::installed()?;
        if installed.has(VFIO_USER) {
            return Ok(installed);
        }
        let fetched = Root::find_or_fetch(roots, |what| progress.say(what)).with_context(|| {
            format!(
                "the installed QEMU ({}) has no {VFIO_USER}, which came with 10.1",
                installed.version()
            )
        })?;
        let emulator = Emulator::in_root(&fetched)?;
        ensure!(emulator.has(VFIO_USER), "QEMU {} has no {VFIO_USER} either", emulator.version());
        Ok(emulator)
    }

    fn in_root(root: &Root) -> Result<Emulator> {
        let modules = root.libraries().join("qemu");
        let mut command = vec!["env".to_owned(), format!("QEMU_MODULE_DIR={}", text(&modules)?)];
        command.extend(root.command(NAME)?);
        // The packages install firmware here, which QEMU cannot derive from its own path.
        for firmware in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
            command.extend(["-L".to_owned(), text(&root.path(firmware))?.to_owned()]);
        }
        Ok(Emulator { command })
    }

    /// Whether QEMU has a kind of device. A request for the list of all devices would load modules,
    /// also some of the installed QEMU.
    fn has(&self, device: &str) -> bool {
        self.ask(&["-device", &format!("{device},help")]).is_ok_and(|help| help.contains(device))
    }

    /// The version, for instance `10.1.2`.
    pub(crate) fn version(&self) -> String {
        let said = self.ask(&["--version"]).unwrap_or_default();
        version(&said).unwrap_or("of an unknown version").to_owned()
    }

    fn ask(&self, arguments: &[&str]) -> Result<String> {
        let (program, words) = self.command.split_first().context("an empty command")?;
        let words: Vec<&str> =
            words.iter().map(String::as_str).chain(arguments.iter().copied()).collect();
        Ok(output_of(program, &words)?)
    }
}

fn version(said: &str) -> Option<&str> {
    said.split_whitespace().skip_while(|word| *word != "version").nth(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_known_if_there_is_help_on_it() {
        let qemu =
            |script: &str| Emulator { command: ["sh", "-c", script].map(str::to_owned).to_vec() };
        // The shell takes `-device` for its own name, and the next word for its first argument.
        assert!(qemu("echo \"$1\" options:").has("vfio-user-pci"));
        assert!(!qemu("echo \"$1\" is not known >&2; exit 1").has("vfio-user-pci"));
    }

    #[test]
    fn the_version_is_found_in_the_output() {
        assert_eq!(
            version("QEMU emulator version 10.1.2 (Debian 1:10.1.2+ds-1)\nCopyright"),
            Some("10.1.2")
        );
        assert_eq!(version("nothing"), None);
    }
}
