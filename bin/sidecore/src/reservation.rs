//! `sidecore reservation`: shows and ends the persistent reservations of a disk, after an owner
//! that no record names any more.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use sidecore_linux::{DiskReservation, ReservedDisk};

use crate::own::random;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Show the keys that are registered at a disk, and the holder of its reservation. Needs Linux
    /// 6.19.
    Show {
        /// A whole SCSI or NVMe disk.
        disk: PathBuf,
    },
    /// End the reservation and all registrations of a disk. Each host can write to it then: only
    /// when no daemon serves the store, no host with one is paused, and no other program has
    /// reserved the disk.
    Clear {
        /// A whole SCSI or NVMe disk.
        disk: PathBuf,
    },
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.action {
        Action::Show { disk } => {
            let found = ReservedDisk::open(disk)?.read()?;
            let found = found.with_context(|| {
                format!(
                    "this kernel does not show reservations: ask {} with `sg_persist --in -k` or \
                     `nvme resv-report`, or use Linux 6.19 or later",
                    disk.display()
                )
            })?;
            io::stdout().write_all(lines(&found).as_bytes())?;
        }
        Action::Clear { disk } => {
            let (reserved, key) = (ReservedDisk::open(disk)?, random()?);
            // Only a host that is registered can end the reservation.
            reserved.register_in_place_of_any(key)?;
            reserved.clear(key)?;
        }
    }
    Ok(())
}

fn lines(found: &DiskReservation) -> String {
    let mut text = String::new();
    for key in &found.keys {
        let _ = writeln!(text, "registered: {key:#018x}");
    }
    let _ = match (found.holder, found.is_write_exclusive) {
        (None, _) => writeln!(text, "not reserved"),
        (Some(key), true) => {
            writeln!(text, "reserved by {key:#018x}: write exclusive, registrants only")
        }
        (Some(key), false) => writeln!(text, "reserved by {key:#018x} with another type"),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_the_holder_are_shown() {
        let mut found =
            DiskReservation { keys: vec![5, 7], holder: None, is_write_exclusive: false };
        assert!(lines(&found).ends_with("registered: 0x0000000000000007\nnot reserved\n"));
        (found.holder, found.is_write_exclusive) = (Some(5), true);
        assert!(lines(&found).contains("reserved by 0x0000000000000005: write exclusive"));
        found.is_write_exclusive = false;
        assert!(lines(&found).contains("another type"));
    }
}
