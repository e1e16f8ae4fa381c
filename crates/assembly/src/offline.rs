//! What is done to a controller's store while no daemon has it: on the file or block device itself, claimed as a store
//! claims it, so that nothing else can use it meanwhile.

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

/// Why it could not be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OfflineError {
    /// The file cannot be had.
    #[error(transparent)]
    File(#[from] FileError),
    /// It cannot be read or written.
    #[error("{}: {error}", path.display())]
    Disk {
        /// The file.
        path: PathBuf,
        /// What the kernel says.
        error: std::io::Error,
    },
    /// It cannot be formatted.
    #[error("{}: {error}{}", path.display(), remedy(error))]
    Format {
        /// The file.
        path: PathBuf,
        /// Why.
        error: FormatError,
    },
    /// It cannot be repaired.
    #[error("{}: {error}", path.display())]
    Repair {
        /// The file.
        path: PathBuf,
        /// Why.
        error: sidecore_volume::RepairError,
    },
    /// A repair would lose what only the log of a dead daemon has.
    #[error(
        "{}: its daemon has not ended in order, and what it answered last may be in its log alone, which a repair makes \
         useless: start the daemon, which replays the log if that can be done, end it in order, and repair then; or give \
         it up with --accept-loss",
        path.display()
    )]
    Unreplayed {
        /// The file.
        path: PathBuf,
    },
    /// Formatting would lose what only the log of a dead daemon has.
    #[error(
        "{}: its daemon has not ended in order, and formatting it gives up what the daemon answered last, which may be in \
         its log alone: start the daemon, which replays the log, and end it in order; or give that up too with \
         --accept-loss",
        path.display()
    )]
    UnreplayedFormat {
        /// The file.
        path: PathBuf,
    },
    /// There are no volumes that could be checked.
    #[error("{}: {error}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        error: OpenError,
    },
}

fn remedy(error: &FormatError) -> &'static str {
    match error {
        FormatError::NotBlank(_) => " (--force, if nothing on it is needed any more)",
        _ => "",
    }
}

/// Losses that the operator accepts when formatting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GiveUp {
    /// Nothing: only a blank store is formatted.
    #[default]
    Nothing,
    /// What is on the store, unless a daemon of this boot has died and its log has not been replayed.
    Contents,
    /// That as well.
    Unreplayed,
}

/// Makes an empty controller's store of a file or block device.
///
/// # Errors
/// It is in use, holds something that is not given up, or cannot be formatted like that.
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
/// It is in use, or no controller's store.
pub fn check(path: &Path) -> Result<CheckReport, OfflineError> {
    let mut disk = claim(path, true)?;
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let volumes =
        Volumes::open_with(&mut disk, &options).map_err(|error| OfflineError::Open { path: path.to_owned(), error })?;
    let mut report = convert::check(volumes.check(&mut disk));
    let known: Vec<String> = volumes.damage().iter().map(ToString::to_string).collect();
    // A superblock's copy that is damaged is worth a word, though all is whole without it.
    for damage in known {
        if !report.problems.contains(&damage) {
            report.problems.push(damage);
        }
    }
    report.clean = report.problems.is_empty();
    Ok(report)
}

/// What a repair may do.
#[derive(Clone, Debug, Default)]
pub struct RepairOptions {
    /// Volumes that give up what others claim too.
    pub losers: Vec<String>,
    /// Write it, if no two volumes claim the same blocks.
    pub carry_out: bool,
    /// Also if a daemon of this boot has died, and its log has not been replayed.
    pub accept_loss: bool,
}

/// Works out how to repair a controller's store, and carries that out if `options` say so.
///
/// # Errors
/// It is in use, no controller's store, cannot be repaired, or has a log to be replayed; then nothing was written,
/// unless writing failed.
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
        report.generation = written.map_err(|error| OfflineError::Disk { path: path.to_owned(), error })?;
        report.done = true;
    }
    Ok(report)
}

/// Whether there may be a log of the daemon that had a store in use `under` this boot. A boot without a name keeps none.
fn has_log(under: Option<[u8; 16]>) -> bool {
    under.is_some_and(|boot| sidecore_linux::boot_id().is_ok_and(|id| id == boot))
}

fn claim(path: &Path, read_only: bool) -> Result<PhysicalDisk, OfflineError> {
    let store: Arc<dyn BlockDevice> = Arc::new(FileStore::open(&FileOptions { read_only, ..FileOptions::new(path) })?);
    PhysicalDisk::open(&store).map_err(|error| OfflineError::Disk { path: path.to_owned(), error })
}
