//! Files that are replaced as a whole.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Replaces a file, or makes it, with these permissions. A reader finds the old bytes or the new
/// ones, and the new ones are durable when this returns.
///
/// They are written beside it first, in a file whose name ends in `.new`. One process at a time may
/// replace a file.
///
/// # Errors
/// The file or its directory cannot be written. The old file is as it was.
pub fn replace_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    // A link in its place is not followed.
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    #[test]
    fn a_file_is_made_and_replaced_and_nothing_is_left_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record");
        for text in ["long enough", "short"] {
            replace_file(&path, text.as_bytes(), 0o600).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_beside_it_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("record"), directory.path().join("other"));
        std::fs::write(&other, "untouched").unwrap();
        symlink(&other, directory.path().join("record.new")).unwrap();
        replace_file(&path, b"new", 0o600).unwrap();
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "untouched");
        assert!(!std::fs::symlink_metadata(&path).unwrap().is_symlink());
    }

    #[test]
    fn a_file_that_cannot_be_written_stays_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("record");
        replace_file(&path, b"old", 0o600).unwrap();
        // A directory in the new one's place cannot be removed as a file.
        std::fs::create_dir(directory.path().join("record.new")).unwrap();
        replace_file(&path, b"new", 0o600).unwrap_err();
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
    }
}
