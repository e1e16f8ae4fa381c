//! Files that hold keys: read with a look at their permissions, written whole or not at all.

use std::fs::{DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use zeroize::Zeroizing;

use super::text::MAX_BYTES;
use crate::crypto::fill_random;
use crate::error::{KeyError, TextError};

/// Permissions that no file of keys has: reading or writing by others, writing by the group. A
/// group may read, as that of a credential which systemd passes on.
const EXPOSED: u32 = 0o027;
/// Permissions that no directory of keys has: writing by the group or by others.
const OPEN: u32 = 0o022;

pub(super) fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> KeyError {
    let path = path.to_owned();
    move |source| KeyError::Io { path, action, source }
}

pub(super) fn text_error(path: &Path) -> impl FnOnce(TextError) -> KeyError {
    let path = path.to_owned();
    move |problem| KeyError::File { path, problem }
}

/// Whether a file or directory belongs to this process's user, or to root: another owner can
/// change it, and its mode.
fn check_owner(path: &Path, metadata: &Metadata) -> Result<(), KeyError> {
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    if owner == user || owner == 0 {
        return Ok(());
    }
    Err(KeyError::Owner { path: path.to_owned(), owner, user })
}

/// Whether others than its owner can put files into a directory, or take them out.
pub(super) fn check_directory(path: &Path) -> Result<(), KeyError> {
    let metadata = std::fs::metadata(path).map_err(io_error(path, "look at it"))?;
    check_owner(path, &metadata)?;
    let mode = metadata.mode() & 0o7777;
    if mode & OPEN != 0 {
        return Err(KeyError::Open { path: path.to_owned(), mode });
    }
    Ok(())
}

/// Reads a file of keys.
pub(super) fn read(path: &Path) -> Result<Zeroizing<String>, KeyError> {
    // Opening a FIFO would wait for a writer.
    let flags = rustix::fs::OFlags::NONBLOCK.bits();
    let opened = OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(path);
    let file = opened.map_err(io_error(path, "open it"))?;
    let metadata = file.metadata().map_err(io_error(path, "look at it"))?;
    if !metadata.is_file() {
        return Err(text_error(path)(TextError::NoFile));
    }
    check_owner(path, &metadata)?;
    let mode = metadata.mode() & 0o7777;
    if mode & EXPOSED != 0 {
        return Err(KeyError::Exposed { path: path.to_owned(), mode });
    }
    // As large as it can become, so that no copy is left behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_BYTES.saturating_add(64)));
    let limit = MAX_BYTES.saturating_add(1);
    let limited = file.take(u64::try_from(limit).unwrap_or(u64::MAX));
    { limited }.read_to_end(&mut bytes).map_err(io_error(path, "read it"))?;
    if bytes.len() > MAX_BYTES {
        return Err(text_error(path)(TextError::TooLong { max: MAX_BYTES }));
    }
    match str::from_utf8(&bytes) {
        Ok(text) => Ok(Zeroizing::new(text.to_owned())),
        Err(_) => Err(text_error(path)(TextError::NoText)),
    }
}

/// Writes a new file that its owner alone may read. A file of this name is an error of kind
/// `AlreadyExists`, and stays.
pub(super) fn write_new(path: &Path, text: &str) -> io::Result<()> {
    let mut random = [0; 8];
    if !fill_random(&mut random) {
        return Err(io::Error::other("no random bytes for the name of a temporary file"));
    }
    let name = format!(".{:016x}.new", u64::from_le_bytes(random));
    let directory = directory_of(path);
    let temporary = directory.join(name);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    let written = file
        .write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| Ok(renameat_with(CWD, &temporary, CWD, path, RenameFlags::NOREPLACE)?));
    if let Err(error) = written {
        // The error that matters is the first one.
        _ = std::fs::remove_file(&temporary);
        return Err(error);
    }
    sync_directory(directory)
}

/// Makes the names of a directory durable.
pub(super) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Makes a directory that its owner alone may enter, with those above it that are missing. `sync`
/// makes the names in a directory durable: it is called for each directory that has a new name.
pub(super) fn create_directory(
    path: &Path,
    sync: impl FnMut(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let missing: Vec<&Path> = path.ancestors().take_while(is_missing).collect();
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    // A directory is found after a crash only if those above it are.
    missing.into_iter().rev().map(directory_of).try_for_each(sync)
}

/// The directory that has the name of a file.
fn directory_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}
