//! Files of headers and keys.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use zeroize::Zeroizing;

use crate::error::FileFault;
use crate::format::NewHeader;

/// The largest key file, as for cryptsetup.
const MAX_KEY_FILE_BYTES: u64 = 8 << 20;
/// Others may not read or change a key; a group may read it, as that of a credential which systemd
/// passes on.
const EXPOSED: u32 = 0o027;

fn fault(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> FileFault {
    let path = path.to_owned();
    move |source| FileFault::Io { path, action, source }
}

/// Opens without waiting for the writer of a FIFO.
fn open(path: &Path) -> Result<(File, std::fs::Metadata), FileFault> {
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(fault(path, "open it"))?;
    let metadata = file.metadata().map_err(fault(path, "look at it"))?;
    Ok((file, metadata))
}

/// Opens the file or block device of a header, for reading.
///
/// # Errors
/// The kernel refuses, or it is something else.
pub fn open_header(path: &Path) -> Result<File, FileFault> {
    let (file, metadata) = open(path)?;
    if metadata.is_file() || metadata.file_type().is_block_device() {
        return Ok(file);
    }
    Err(FileFault::Kind { path: path.to_owned(), expected: "file and no block device" })
}

/// Reads the bytes of a passphrase: all of the file, as `cryptsetup --key-file` does.
///
/// # Errors
/// The file cannot be read, is empty or large, or others may read or change it.
pub fn read_key_file(path: &Path) -> Result<Zeroizing<Vec<u8>>, FileFault> {
    let (file, metadata) = open(path)?;
    if !metadata.is_file() {
        return Err(FileFault::Kind { path: path.to_owned(), expected: "regular file" });
    }
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    if ![0, user].contains(&owner) {
        return Err(FileFault::Owner { path: path.to_owned(), owner, user });
    }
    let mode = metadata.mode() & 0o7777;
    if mode & EXPOSED != 0 {
        return Err(FileFault::Exposed { path: path.to_owned(), mode });
    }
    let size = |len_bytes| FileFault::Size {
        path: path.to_owned(),
        len_bytes,
        max_bytes: MAX_KEY_FILE_BYTES,
    };
    if metadata.len() > MAX_KEY_FILE_BYTES {
        return Err(size(metadata.len()));
    }
    // As large as it can become, so that no copy is left behind.
    let room = usize::try_from(metadata.len()).unwrap_or(0).saturating_add(64);
    let mut bytes = Zeroizing::new(Vec::with_capacity(room));
    let mut limited = file.take(metadata.len());
    limited.read_to_end(&mut bytes).map_err(fault(path, "read it"))?;
    if bytes.is_empty() {
        return Err(size(0));
    }
    Ok(bytes)
}

/// Writes the file of a header, whole or not at all, and durably. Its owner alone may read it.
///
/// # Errors
/// The kernel refuses, or the file exists and is not to be overwritten.
pub fn write_header(path: &Path, start: &[u8], overwrites: bool) -> Result<(), FileFault> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let failed = || fault(path, "write it");
    let mut file = tempfile::Builder::new()
        .prefix(".luks-")
        .tempfile_in(directory)
        .map_err(fault(directory, "make a file in it"))?;
    file.write_all(start).map_err(failed())?;
    file.as_file().set_len(NewHeader::FILE_BYTES).map_err(failed())?;
    file.as_file().sync_all().map_err(failed())?;
    let persisted = if overwrites { file.persist(path) } else { file.persist_noclobber(path) };
    persisted.map_err(|error| match error.error.kind() {
        io::ErrorKind::AlreadyExists => FileFault::Exists { path: path.to_owned() },
        _ => failed()(error.error),
    })?;
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed())
}
