//! `sidecore reservation`: shows and ends the persistent reservations of a disk, after an owner
//! that no record names any more.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use sidecore_linux::{DiskReservation, FileError, FileOptions, FileStore, ReservedDisk};

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
    /// Show the reservation and all registrations of a disk, and with --yes end them. Each host
    /// can write to it then: only when no daemon serves the store, no host with one is paused, and
    /// no other program has reserved the disk.
    Clear {
        /// A whole SCSI or NVMe disk.
        disk: PathBuf,
        /// End them.
        #[arg(long)]
        yes: bool,
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
        Action::Clear { disk, yes } => clear(disk, *yes)?,
    }
    Ok(())
}

fn clear(disk: &Path, is_sure: bool) -> Result<()> {
    let reserved = ReservedDisk::open(disk)?;
    let text = match reserved.read()? {
        Some(found) => lines(&found),
        None => "this kernel does not show the keys (Linux 6.19 or later does)\n".to_owned(),
    };
    io::stdout().write_all(text.as_bytes())?;
    ensure!(
        is_sure,
        "nothing was ended: if no daemon serves the store, no host with one is paused, and no other \
         program uses {}, add --yes",
        disk.display()
    );
    // Kept until the end: no daemon of this host starts meanwhile.
    let _unused = unused(disk)?;
    let key = random()?;
    // Only a host that is registered can end the reservation.
    reserved.register_in_place_of_any(key)?;
    reserved.clear(key)?;
    Ok(())
}

/// Fails while a process of this host has the disk open to write, or a request in flight to it.
fn unused(disk: &Path) -> Result<FileStore> {
    let opened = FileStore::open(&FileOptions::new(disk));
    if let Err(FileError::Busy { .. } | FileError::Overlaps { .. }) = opened {
        bail!(
            "a live process of this host has {} open, which its reservation protects: end \
             `sidecore own` of the store on all hosts first",
            disk.display()
        );
    }
    Ok(opened?)
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

    #[test]
    fn a_disk_that_a_process_has_open_is_not_cleared() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let open = unused(file.path()).unwrap();
        let error = unused(file.path()).unwrap_err().to_string();
        assert!(error.contains("end `sidecore own`"), "{error}");
        drop(open);
        unused(file.path()).unwrap();
    }
}
