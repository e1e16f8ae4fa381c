//! The configurations of the demo's daemons, as a user would write them.

use crate::guest::ENCRYPTED;
use crate::report::Mode;
use crate::text;
use anyhow::Result;
use std::path::{Path, PathBuf};

/// The measured disks, by the names of their volumes; the guest and the report use the same names.
pub(crate) const DISKS: [&str; 2] = [FILE, RAM];
/// The volume on a file, with split rings.
pub(crate) const FILE: &str = "file";
/// The volume in memory. It has packed rings, so that the guest's driver uses both ring formats.
pub(crate) const RAM: &str = "ram";
/// One queue with interrupts and one that the guest may poll.
pub(crate) const QUEUES: u16 = 2;

pub(crate) const POOL: &str = "pool";
/// The size of the controller's store, a sparse file.
pub(crate) const POOL_MIB: u64 = 512;
/// The size of the controller's volumes, larger than its store.
pub(crate) const VOLUME_MIB: u64 = 1024;
/// The volume whose snapshot is taken.
pub(crate) const ORIGIN: &str = "first";

/// The volume behind the NVMe function that the guest boots with.
pub(crate) const VF: &str = "vf";
/// The volume behind the function that is plugged while the guest runs.
pub(crate) const PLUGGED: &str = "plugged";
/// The physical function, and its store.
pub(crate) const MANAGER: &str = "manager";
/// The size of both volumes before they grow.
pub(crate) const FUNCTION_MIB: u64 = 256;

const RAM_MIB: u64 = 256;
const RAM_VOLUME_MIB: u64 = 512;

const MEMORY: &str = "memory";

/// The controller of one of the measured disks.
pub(crate) fn controller_of(disk: &str) -> &'static str {
    if disk == RAM { MEMORY } else { POOL }
}

/// The socket of a device, within the daemon's directory.
pub(crate) fn socket(directory: &Path, device: &str) -> PathBuf {
    directory.join(format!("{device}.sock"))
}

/// The paths of a daemon's files.
pub(crate) struct Places<'a> {
    /// The directory of the sockets.
    pub(crate) directory: &'a Path,
    /// The pool's store.
    pub(crate) pool: &'a Path,
    pub(crate) control: &'a Path,
    pub(crate) sidecore_cpu: Option<usize>,
}

impl Places<'_> {
    /// Two disks for the measurement, each a thin volume of its own controller: one on a file, one
    /// in memory.
    pub(crate) fn measured(&self, mode: Mode) -> Result<String> {
        let idle = match mode {
            Mode::Interrupt => "interrupt",
            Mode::Polled => "poll",
        };
        let memory = format!("type = \"ram\"\nsize = \"{RAM_MIB}MiB\"");
        Ok([
            self.head()?,
            self.pool()?,
            self.device(POOL, FILE, VOLUME_MIB, &format!("idle = \"{idle}\""))?,
            controller(MEMORY, &memory, "4KiB"),
            self.device(MEMORY, RAM, RAM_VOLUME_MIB, &format!("idle = \"{idle}\"\npacked = true"))?,
        ]
        .concat())
    }

    /// A disk on a thin volume larger than its store; the rest is configured at run time.
    pub(crate) fn volumes(&self) -> Result<String> {
        Ok([
            self.head()?,
            self.pool()?,
            self.device(POOL, ORIGIN, VOLUME_MIB, "idle = \"adaptive\"")?,
        ]
        .concat())
    }

    /// Two NVMe functions, each of a thin volume of a controller on a file, and the physical
    /// function, which manages both. One function is polled, so that its guest writes doorbells to
    /// memory. The other function's sidecore may sleep, so that the guest's driver has shadow
    /// doorbells; this function has MSI, so that every QEMU can unplug it.
    pub(crate) fn nvme(&self) -> Result<String> {
        let socket = quoted(&socket(self.directory, MANAGER))?;
        let manager = format!(
            "\n[[store]]\nname = \"{MANAGER}\"\ntype = \"pf\"\ncontroller = \"{POOL}\"\n\n\
             [[device]]\n\
             name = \"{MANAGER}\"\nstore = \"{MANAGER}\"\nsocket = {socket}\nfront_end = \"nvme\"\n\
             idle = \"adaptive\"\n"
        );
        let functions =
            [self.function(VF, "poll", "msi-x")?, self.function(PLUGGED, "adaptive", "msi")?]
                .concat();
        Ok([
            self.head()?,
            self.pool()?,
            "physical_function = true\n".to_owned(),
            functions,
            manager,
        ]
        .concat())
    }

    /// A disk on the pool's file, behind the stage `encrypt` with this header and key.
    pub(crate) fn encrypted(&self, header: &Path, key_file: &Path) -> Result<String> {
        let socket = quoted(&socket(self.directory, ENCRYPTED))?;
        let (pool, header, key_file) = (quoted(self.pool)?, quoted(header)?, quoted(key_file)?);
        let store = format!(
            "\n[[store]]\nname = \"disk\"\ntype = \"file\"\npath = {pool}\n\n\
             [[store.stage]]\ntype = \"encrypt\"\nheader = {header}\nkey_file = {key_file}\n\n\
             [[device]]\nname = \"{ENCRYPTED}\"\nstore = \"disk\"\nsocket = {socket}\n\
             queues = {QUEUES}\n"
        );
        Ok([self.head()?, store].concat())
    }

    /// The control socket and the sidecore.
    pub(crate) fn head(&self) -> Result<String> {
        let mut head =
            format!("control_socket = {}\n\n[[sidecore]]\nname = \"sc0\"\n", quoted(self.control)?);
        if let Some(cpu) = self.sidecore_cpu {
            head.push_str(&format!("cpu = {cpu}\n"));
        }
        Ok(head)
    }

    fn pool(&self) -> Result<String> {
        Ok(controller(POOL, &format!("type = \"file\"\npath = {}", quoted(self.pool)?), "1KiB"))
    }

    /// A volume with the virtio device that serves it; both have the same name.
    fn device(&self, controller: &str, name: &str, size_mib: u64, rest: &str) -> Result<String> {
        self.volume(controller, name, size_mib, &format!("queues = {QUEUES}\n{rest}"))
    }

    /// A volume with the NVMe function that serves it; both have the same name.
    fn function(&self, name: &str, idle: &str, interrupts: &str) -> Result<String> {
        let device =
            format!("front_end = \"nvme\"\nidle = \"{idle}\"\ninterrupts = \"{interrupts}\"");
        self.volume(POOL, name, FUNCTION_MIB, &device)
    }

    fn volume(&self, controller: &str, name: &str, size_mib: u64, device: &str) -> Result<String> {
        let socket = quoted(&socket(self.directory, name))?;
        Ok(format!(
            "\n[[store]]\nname = \"{name}\"\ntype = \"volume\"\ncontroller = \"{controller}\"\n\
             volume = \"{name}\"\n\
             size = \"{size_mib}MiB\"\n\n\
             [[device]]\nname = \"{name}\"\nstore = \"{name}\"\nsocket = {socket}\n{device}\n"
        ))
    }
}

/// A store with the controller that divides it.
fn controller(name: &str, store: &str, block_size: &str) -> String {
    format!(
        "\n[[store]]\nname = \"{name}-store\"\n{store}\n\n\
         [[controller]]\nname = \"{name}\"\nstore = \"{name}-store\"\n\
         format = \"blank\"\nblock_size = \"{block_size}\"\n"
    )
}

/// A path as a TOML string, whose syntax JSON strings also have.
pub(crate) fn quoted(path: &Path) -> Result<String> {
    Ok(serde_json::to_string(text(path)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places() -> Places<'static> {
        Places {
            directory: Path::new("/t"),
            pool: Path::new("/t/d \"x\""),
            control: Path::new("/t/c"),
            sidecore_cpu: Some(3),
        }
    }

    #[test]
    fn both_disks_and_the_mode_are_configured() {
        let polled = places().measured(Mode::Polled).unwrap();
        assert_eq!(polled.matches("idle = \"poll\"").count(), 2);
        assert_eq!(polled.matches("[[device]]").count(), 2);
        assert_eq!(polled.matches("type = \"volume\"").count(), 2);
        assert_eq!(polled.matches("packed = true").count(), 1);
        assert!(polled.contains(r#"path = "/t/d \"x\"""#));
        assert!(polled.contains("cpu = 3\n"));
        assert!(polled.contains("socket = \"/t/ram.sock\""));
        assert!(places().measured(Mode::Interrupt).unwrap().contains("idle = \"interrupt\""));
    }

    #[test]
    fn all_functions_are_nvme_and_one_polls() {
        let nvme = places().nvme().unwrap();
        assert_eq!(nvme.matches("front_end = \"nvme\"\n").count(), 3);
        assert_eq!(nvme.matches("idle = \"adaptive\"").count(), 2);
        assert_eq!(nvme.matches("interrupts = \"msi\"").count(), 1);
        assert_eq!(nvme.matches("physical_function = true\n\n[[store]]").count(), 1);
        assert!(nvme.contains("socket = \"/t/vf.sock\"") && nvme.contains("volume = \"plugged\""));
    }

    #[test]
    fn the_volume_is_larger_than_its_store() {
        const { assert!(VOLUME_MIB > POOL_MIB) };
        let volumes = places().volumes().unwrap();
        assert_eq!(volumes.matches("[[controller]]").count(), 1);
        assert!(volumes.contains("format = \"blank\"") && volumes.contains("size = \"1024MiB\""));
    }
}
