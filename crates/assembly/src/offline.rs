//! Work on a controller's store without a daemon: on the file or block device itself, with the same
//! claim as a store's, so that no other program uses it meanwhile.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sidecore_block::BlockDevice;
use sidecore_controller::PhysicalDisk;
use sidecore_linux::{FileError, FileOptions, FileStore};
use sidecore_volume::{FormatError, OpenError, OpenOptions, Volumes};

use crate::controllers::format_options;
use crate::convert;
use crate::report::{CheckReport, RepairReport};

pub use crate::spec::FormatSpec;

/// Why a store could not be formatted, checked or repaired.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OfflineError {
    /// The file cannot be opened or claimed.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file cannot be read or written.
    #[error("{}: {error}", path.display())]
    Disk {
        /// The path of the file.
        path: PathBuf,
        /// The error of the kernel.
        error: std::io::Error,
    },
    /// The file cannot be formatted.
    #[error("{}: {error}{}", path.display(), remedy(error))]
    Format {
        /// The path of the file.
        path: PathBuf,
        /// The reason for the refusal.
        error: FormatError,
    },
    /// The store cannot be repaired.
    #[error("{}: {error}", path.display())]
    Repair {
        /// The path of the file.
        path: PathBuf,
        /// The reason for the refusal.
        error: sidecore_volume::RepairError,
    },
    /// A repair would lose changes that only the log of a dead daemon has.
    #[error(
        "{}: its daemon has not ended in order, so its last answered changes may be in its log \
         alone, which a repair invalidates: start the daemon, which replays the log if possible, \
         end it in order, and repair then; or give these changes up with --accept-loss",
        path.display()
    )]
    Unreplayed {
        /// The path of the file.
        path: PathBuf,
    },
    /// Formatting would lose changes that only the log of a dead daemon has.
    #[error(
        "{}: its daemon has not ended in order, so its last answered changes may be in its log \
         alone: start the daemon, which replays the log, and end it in order; or give these \
         changes up too with --accept-loss",
        path.display()
    )]
    UnreplayedFormat {
        /// The path of the file.
        path: PathBuf,
    },
    /// The file holds no volumes that could be checked.
    #[error("{}: {error}", path.display())]
    Open {
        /// The path of the file.
        path: PathBuf,
        /// The reason for the refusal.
        error: OpenError,
    },
}

fn remedy(error: &FormatError) -> &'static str {
    match error {
        FormatError::NotBlank(_) => " (--force overwrites its contents)",
        _ => "",
    }
}

/// Losses that the operator accepts when formatting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GiveUp {
    /// None: only a blank store is formatted.
    #[default]
    Nothing,
    /// The store's contents, unless a daemon of this boot has died and its log has not been
    /// replayed.
    Contents,
    /// The store's contents and a log that has not been replayed.
    Unreplayed,
}

/// Formats a file or block device as an empty controller's store.
///
/// # Errors
/// The file is in use, holds contents that are not given up, or cannot be formatted with these
/// settings.
pub fn format(path: &Path, spec: &FormatSpec, give_up: GiveUp) -> Result<(), OfflineError> {
    let mut disk = claim(path, false)?;
    if give_up == GiveUp::Contents {
        let boot = sidecore_volume::in_use_under(&mut disk);
        if has_log(boot.map_err(|error| OfflineError::Disk { path: path.to_owned(), error })?) {
            return Err(OfflineError::UnreplayedFormat { path: path.to_owned() });
        }
    }
    let force = give_up != GiveUp::Nothing;
    sidecore_volume::format(&mut disk, &format_options(spec, force))
        .map_err(|error| OfflineError::Format { path: path.to_owned(), error })
}

/// Reads all metadata in a controller's store and accounts for every block. Writes nothing.
///
/// # Errors
/// The file is in use, or is no controller's store.
pub fn check(path: &Path) -> Result<CheckReport, OfflineError> {
    let mut disk = claim(path, true)?;
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let volumes = Volumes::open_with(&mut disk, &options)
        .map_err(|error| OfflineError::Open { path: path.to_owned(), error })?;
    let mut report = convert::check(volumes.check(&mut disk));
    let known: Vec<String> = volumes.damage().iter().map(ToString::to_string).collect();
    // A damaged copy of the superblock is reported, though no contents are lost.
    for damage in known {
        if !report.problems.contains(&damage) {
            report.problems.push(damage);
        }
    }
    report.clean = report.problems.is_empty();
    Ok(report)
}

/// The permissions of a repair.
#[derive(Clone, Debug, Default)]
pub struct RepairOptions {
    /// Volumes that lose blocks which other volumes claim too.
    pub losers: Vec<String>,
    /// Write the repair, if each block is claimed by one volume at most.
    pub carry_out: bool,
    /// Write the repair also if a daemon of this boot has died and its log has not been replayed.
    pub accept_loss: bool,
}

/// Plans the repair of a controller's store, and carries the plan out if `options` permit.
///
/// # Errors
/// The file is in use, is no controller's store, cannot be repaired, or has a log to be replayed.
/// Then the file is unchanged, unless writing failed.
pub fn repair(path: &Path, options: &RepairOptions) -> Result<RepairReport, OfflineError> {
    let mut disk = claim(path, !options.carry_out)?;
    let repair = sidecore_volume::plan_repair(&mut disk, &options.losers)
        .map_err(|error| OfflineError::Repair { path: path.to_owned(), error })?;
    let mut report = convert::repair(&repair);
    if options.carry_out && report.needed && report.decided {
        if has_log(repair.in_use_under()) && !options.accept_loss {
            return Err(OfflineError::Unreplayed { path: path.to_owned() });
        }
        let written = repair.write(&mut disk);
        report.generation =
            written.map_err(|error| OfflineError::Disk { path: path.to_owned(), error })?;
        report.done = true;
    }
    Ok(report)
}

/// Whether the daemon that used the store `under` this boot may have kept a log. A boot whose id
/// cannot be read has none.
fn has_log(under: Option<[u8; 16]>) -> bool {
    under.is_some_and(|boot| sidecore_linux::boot_id().is_ok_and(|id| id == boot))
}

fn claim(path: &Path, read_only: bool) -> Result<PhysicalDisk, OfflineError> {
    let store: Arc<dyn BlockDevice> =
        Arc::new(FileStore::open(&FileOptions { read_only, ..FileOptions::new(path) })?);
    PhysicalDisk::open(&store).map_err(|error| OfflineError::Disk { path: path.to_owned(), error })
}
