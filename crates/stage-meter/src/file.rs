//! The file of records.

use std::fs::{File, Metadata, OpenOptions, metadata};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// Permissions of a new file: usage is the business of its owner and of a group of readers.
const MODE: u32 = 0o640;

/// Behind a line that was cut off, so that even a whole record without its newline is no JSON.
const CUT_OFF: &[u8] = b"~\n";

/// A file that lines are appended to.
///
/// Other meters and other processes may append to the same file: each line is one write to a file
/// opened with `O_APPEND`, under the file's lock (flock(2)), because the end of the file is looked
/// at before.
#[derive(Debug)]
pub(crate) struct RecordFile {
    path: PathBuf,
    file: Option<File>,
}

impl RecordFile {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, file: None }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file, unless the open file is still the one of this path. True if another file has
    /// been opened in place of one that was removed or renamed.
    pub(crate) fn follow(&mut self) -> io::Result<bool> {
        let is_same = |file: &File| {
            let identity = |of: io::Result<Metadata>| of.ok().map(|of| (of.dev(), of.ino()));
            let there = identity(metadata(&self.path));
            there.is_some() && there == identity(file.metadata())
        };
        if self.file.as_ref().is_some_and(is_same) {
            return Ok(false);
        }
        let file = open(&self.path)?;
        Ok(self.file.replace(file).is_some())
    }

    /// Appends a line, which ends with a newline, whole or not at all: of a line that does not fit,
    /// a beginning stays that no reader takes for a line.
    pub(crate) fn append(&mut self, line: &[u8]) -> io::Result<()> {
        let Some(file) = &mut self.file else { return Err(io::ErrorKind::NotFound.into()) };
        // A filesystem without locks has whole writes all the same.
        let is_locked = flock(&*file, FlockOperation::LockExclusive).is_ok();
        let appended = append(file, line);
        if is_locked {
            let _ = flock(&*file, FlockOperation::Unlock);
        }
        appended
    }

    /// Makes the lines survive a power cut.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), File::sync_data)
    }
}

fn open(path: &Path) -> io::Result<File> {
    let no_file = || io::Error::other("it is no regular file");
    // To open a pipe waits for its reader.
    if metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return Err(no_file());
    }
    let mut options = OpenOptions::new();
    let file = options.read(true).append(true).create(true).mode(MODE).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(no_file()) }
}

fn append(file: &mut File, line: &[u8]) -> io::Result<()> {
    let mut bytes = Vec::new();
    if is_cut_off(file)? {
        bytes.extend_from_slice(CUT_OFF);
    }
    bytes.extend_from_slice(line);
    let written = loop {
        match file.write(&bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            written => break written?,
        }
    };
    if written == bytes.len() {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::StorageFull,
        format!("{written} of {} bytes were written", bytes.len()),
    ))
}

/// Whether the file does not end with a newline.
fn is_cut_off(file: &File) -> io::Result<bool> {
    let Some(last) = file.metadata()?.len().checked_sub(1) else { return Ok(false) };
    let mut byte = [0];
    let read = file.read_at(&mut byte, last)?;
    Ok(read == 1 && byte != *b"\n")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn file() -> (tempfile::TempDir, RecordFile) {
        let directory = tempfile::tempdir().unwrap();
        let mut file = RecordFile::new(directory.path().join("usage.jsonl"));
        assert!(!file.follow().unwrap(), "the first file replaces none");
        (directory, file)
    }

    #[test]
    fn lines_are_behind_those_of_others() {
        let (_directory, mut file) = file();
        file.append(b"{\"a\":1}\n").unwrap();
        let mut other = RecordFile::new(file.path().to_owned());
        other.follow().unwrap();
        other.append(b"{\"b\":2}\n").unwrap();
        file.append(b"{\"c\":3}\n").unwrap();
        file.sync().unwrap();
        let text = fs::read_to_string(file.path()).unwrap();
        assert_eq!(text, "{\"a\":1}\n{\"b\":2}\n{\"c\":3}\n");
        assert_eq!(fs::metadata(file.path()).unwrap().mode() & 0o137, 0);
    }

    #[test]
    fn a_line_that_was_cut_off_is_no_line() {
        for cut_off in ["{\"a\":", "{\"a\":1}"] {
            let (_directory, mut file) = file();
            fs::write(file.path(), cut_off).unwrap();
            file.append(b"{\"b\":2}\n").unwrap();
            let text = fs::read_to_string(file.path()).unwrap();
            let lines: Vec<&str> = text.lines().collect();
            assert!(serde_json::from_str::<serde_json::Value>(lines[0]).is_err(), "{text}");
            assert_eq!(lines[1..], ["{\"b\":2}"], "{text}");
        }
    }

    #[test]
    fn a_file_that_was_removed_or_renamed_is_made_again() {
        let (directory, mut file) = file();
        file.append(b"1\n").unwrap();
        fs::rename(file.path(), directory.path().join("rotated")).unwrap();
        assert!(file.follow().unwrap());
        assert!(!file.follow().unwrap());
        file.append(b"2\n").unwrap();
        fs::remove_file(file.path()).unwrap();
        assert!(file.follow().unwrap());
        file.append(b"3\n").unwrap();
        assert_eq!(fs::read_to_string(file.path()).unwrap(), "3\n");
        assert_eq!(fs::read_to_string(directory.path().join("rotated")).unwrap(), "1\n");
    }

    #[test]
    fn what_is_no_regular_file_is_refused_without_waiting() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("pipe");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        for path in [pipe, directory.path().to_owned(), "/dev/null".into()] {
            let error = RecordFile::new(path).follow().unwrap_err().to_string();
            assert!(error.contains("no regular file"), "{error}");
        }
        let mut missing = RecordFile::new(directory.path().join("no/such"));
        assert_eq!(missing.follow().unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(missing.append(b"1\n").is_err());
    }
}
