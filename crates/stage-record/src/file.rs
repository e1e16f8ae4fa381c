//! The file of a recording.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use sidecore_recording::{EndReason, FRAME_BYTES, Header, Record};

/// Permissions of a new file: a recording may have all that a guest wrote.
const MODE: u32 = 0o600;

/// The end of the names of all recordings.
pub(crate) const SUFFIX: &str = "recording";

/// The most files of one name.
const FILES_MAX: u32 = 100;

/// Bytes that are written at once.
const WRITE_BYTES: usize = 256 << 10;

/// The size of the record at the end.
const END_BYTES: u64 = 24 + FRAME_BYTES as u64;

/// Makes a new file: the one of this path, or if that exists, `NAME.1.recording` and so on. Never
/// opens a file that exists, or follows a link.
pub(crate) fn create(path: &Path) -> io::Result<(File, PathBuf)> {
    for number in 0..FILES_MAX {
        let path = numbered(path, number);
        match OpenOptions::new().write(true).create_new(true).mode(MODE).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|file| (file, path)),
        }
    }
    Err(io::Error::new(
        io::ErrorKind::AlreadyExists,
        format!("{FILES_MAX} recordings of that name exist: move some away, or choose another"),
    ))
}

/// The directory that has the name of a file.
pub(crate) fn directory_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

fn numbered(path: &Path, number: u32) -> PathBuf {
    if number == 0 {
        return path.to_owned();
    }
    let mut name = path.file_stem().map_or_else(OsString::new, OsString::from);
    name.push(format!(".{number}.{SUFFIX}"));
    path.with_file_name(name)
}

/// Why no more is written.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The file has its largest size.
    Limit,
    /// A write has failed.
    Failed(io::Error),
}

/// A file, with the bytes that are not written yet.
pub(crate) struct Output {
    file: File,
    buffer: Vec<u8>,
    written_bytes: u64,
    max_bytes: u64,
    /// The requests that are in the file.
    written_requests: u64,
    /// The requests that are in the buffer.
    buffered_requests: u64,
}

impl Output {
    /// Begins a file of at most `max_bytes`.
    pub(crate) fn new(file: File, header: &Header, max_bytes: u64) -> Result<Self, Stop> {
        let buffer = header.encode().to_vec();
        let (written_bytes, written_requests, buffered_requests) = (0, 0, 0);
        let mut output =
            Self { file, buffer, written_bytes, max_bytes, written_requests, buffered_requests };
        output.flush()?;
        Ok(output)
    }

    /// The bytes in the file.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// The requests in the file.
    pub(crate) fn written_requests(&self) -> u64 {
        self.written_requests
    }

    /// Appends a record, unless that would leave no room for the end.
    pub(crate) fn append(&mut self, record: &Record, data: &[u8]) -> Result<(), Stop> {
        let before = self.buffer.len();
        record.append_to(&mut self.buffer, data);
        let end = self.written_bytes.saturating_add(self.buffer.len() as u64);
        if end.saturating_add(END_BYTES) > self.max_bytes {
            self.buffer.truncate(before);
            return Err(Stop::Limit);
        }
        if matches!(record, Record::Request(_)) {
            self.buffered_requests = self.buffered_requests.saturating_add(1);
        }
        if self.buffer.len() >= WRITE_BYTES { self.flush() } else { Ok(()) }
    }

    /// Writes the buffer. If that fails, the file keeps the whole records of earlier writes.
    pub(crate) fn flush(&mut self) -> Result<(), Stop> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let requests = std::mem::take(&mut self.buffered_requests);
        let len_bytes = self.buffer.len() as u64;
        // At its place: a write that has failed in part leaves no hole in front of the end.
        let written = self.file.write_all_at(&self.buffer, self.written_bytes);
        self.buffer.clear();
        if let Err(error) = written {
            // Only cuts off: without it, a reader finds a record that is cut off.
            let _ = self.file.set_len(self.written_bytes);
            return Err(Stop::Failed(error));
        }
        self.written_bytes = self.written_bytes.saturating_add(len_bytes);
        self.written_requests = self.written_requests.saturating_add(requests);
        Ok(())
    }

    /// Ends the file, and makes it durable, with its name in this directory.
    pub(crate) fn end(
        &mut self,
        directory: &Path,
        reason: EndReason,
        dropped: u64,
    ) -> Result<(), Stop> {
        let requests = self.written_requests.saturating_add(self.buffered_requests);
        Record::End { reason, requests, dropped }.append_to(&mut self.buffer, &[]);
        self.flush()?;
        let synced = self.file.sync_data().and_then(|()| File::open(directory)?.sync_all());
        synced.map_err(Stop::Failed)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn files_are_new_and_numbered() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vd0.recording");
        fs::write(&path, "of another program").unwrap();
        let link = directory.path().join("vd0.1.recording");
        std::os::unix::fs::symlink("/etc/passwd", link).unwrap();
        fs::create_dir(directory.path().join("vd0.2.recording")).unwrap();
        let pipe = directory.path().join("vd0.3.recording");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, pipe, mode).unwrap();
        let (file, made) = create(&path).unwrap();
        assert_eq!(made, directory.path().join("vd0.4.recording"));
        assert_eq!(file.metadata().unwrap().mode() & 0o177, 0);
        assert_eq!(fs::read_to_string(&path).unwrap(), "of another program");
        for number in 5..FILES_MAX {
            let (_, made) = create(&path).unwrap();
            assert_eq!(made, numbered(&path, number));
        }
        assert!(create(&path).unwrap_err().to_string().contains("100 recordings"));
        let missing = create(&directory.path().join("no/vd0.recording")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
