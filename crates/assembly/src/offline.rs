//! Work on a controller's store without a daemon: on the file or block device itself, with the same
//! claim as a store's, so that no other program uses it meanwhile.

mod export;
mod mirror;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use sidecore_block::{BlockDevice, StageError};
use sidecore_controller::PhysicalDisk;
use sidecore_linux::{FileError, FileOptions, FileStore};
use sidecore_volume::{FormatError, OpenError, OpenOptions, VolumeError, Volumes};

use crate::controllers::format_options;
use crate::convert;
use crate::report::{CheckReport, LossReport, RepairReport};

pub use crate::spec::FormatSpec;
pub use export::{EncryptedImage, OfflineVolume, ReadOptions, Unlock};
pub use mirror::{MirrorOptions, NewMirror, create_mirror};

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
    /// An export would lack changes that only the log of a dead daemon has.
    #[error(
        "{}: its daemon has not ended in order, so its last answered changes may be in its log \
         alone: start the daemon, which replays the log, and end it in order; or export without \
         these changes with --accept-loss",
        path.display()
    )]
    UnreplayedExport {
        /// The path of the file.
        path: PathBuf,
    },
    /// The stage that decrypts the file cannot be opened.
    #[error("{}: {error}", path.display())]
    Stage {
        /// The path of the file.
        path: PathBuf,
        /// The reason of the stage.
        error: StageError,
    },
    /// The file holds no volumes, unless it is encrypted.
    #[error("{}: {error}; say --header and --key-file if it is encrypted", path.display())]
    Encrypted {
        /// The path of the file.
        path: PathBuf,
        /// The reason for the refusal.
        error: OpenError,
    },
    /// There is no such volume.
    #[error("{}: there is no volume \"{volume}\"; there are {}", path.display(), quoted(there))]
    NoVolume {
        /// The path of the file.
        path: PathBuf,
        /// The name that was asked for.
        volume: String,
        /// The names that there are.
        there: Vec<String>,
    },
    /// The volume is damaged.
    #[error(
        "{}: volume \"{volume}\" is damaged: {}; say --partial to export the rest",
        path.display(),
        lost(losses)
    )]
    Damaged {
        /// The path of the file.
        path: PathBuf,
        /// The name of the volume.
        volume: String,
        /// The parts whose place is unknown.
        losses: Vec<LossReport>,
    },
    /// Two volumes claim the same blocks.
    #[error(
        "{}: volume \"{volume}\" is damaged, and two volumes claim the same blocks: `sidecore \
         volume repair` of a copy says which, and lets you choose",
        path.display()
    )]
    Rivals {
        /// The path of the file.
        path: PathBuf,
        /// The name of the volume.
        volume: String,
    },
    /// The mapping of the volume cannot be read.
    #[error("{}: volume \"{volume}\": {error}", path.display())]
    Volume {
        /// The path of the file.
        path: PathBuf,
        /// The name of the volume.
        volume: String,
        /// The reason.
        error: VolumeError,
    },
    /// A mirror cannot be made.
    #[error("store \"{name}\": {why}")]
    Mirror {
        /// The name of the mirror.
        name: String,
        /// The reason and the remedy.
        why: String,
    },
    /// The file holds no volumes that could be checked or exported.
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

/// The most names or losses of a message.
const LISTED: usize = 10;

fn quoted(names: &[String]) -> String {
    let mut list: Vec<String> =
        names.iter().take(LISTED).map(|name| format!("\"{name}\"")).collect();
    if names.len() > LISTED {
        list.push("others".to_owned());
    }
    if list.is_empty() { "none".to_owned() } else { list.join(", ") }
}

fn lost(losses: &[LossReport]) -> String {
    let show = |loss: &LossReport| {
        let [length, offset] = [loss.size_bytes, loss.offset_bytes].map(sidecore_keys::size::show);
        format!("{length} from {offset} on ({})", loss.why)
    };
    let list: Vec<String> = losses.iter().take(LISTED).map(show).collect();
    let more = losses.len().saturating_sub(list.len());
    let more = if more > 0 { format!(", and {more} more") } else { String::new() };
    match list.is_empty() {
        true => "its record cannot be read, or nothing of it is lost".to_owned(),
        false => format!("what was written in {}{more} is lost", list.join(", ")),
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
