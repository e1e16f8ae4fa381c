//! A store's record in a file beside its data.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sidecore_ownership::Record;

use crate::keys::{MemberText, hexadecimal};

/// Larger than any record.
const MAX_BYTES: u64 = 4096;

/// The record of a store, on the storage that all candidates share.
#[derive(Clone, Debug)]
pub struct RecordFile(PathBuf);

#[derive(Serialize, Deserialize)]
struct Text {
    etcd_cluster: String,
    store: String,
    epoch: u64,
    closed: bool,
    owner: MemberText,
}

impl RecordFile {
    /// The record in this file, which need not exist.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Reads the record; `None` if there is no file.
    ///
    /// # Errors
    /// The file cannot be read, or is no record.
    pub fn read(&self) -> Result<Option<Record>, String> {
        let file = match File::open(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|error| self.error("read", &error))?,
        };
        let mut text = String::new();
        let read = file.take(MAX_BYTES).read_to_string(&mut text);
        read.map_err(|error| self.error("read", &error))?;
        let wrong = |error: String| self.error("understand", &io::Error::other(error));
        let Text { etcd_cluster, store, epoch, closed, owner } =
            serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        Ok(Some(Record {
            cluster: hexadecimal(&etcd_cluster).map_err(wrong)?,
            store: hexadecimal(&store).map_err(wrong)?,
            epoch,
            owner: owner.parse().map_err(wrong)?,
            is_closed: closed,
        }))
    }

    /// Replaces the record. The new one is durable when this returns, and a reader finds the old
    /// one or the new one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, record: &Record) -> Result<(), String> {
        let text = Text {
            etcd_cluster: format!("{:016x}", record.cluster),
            store: format!("{:016x}", record.store),
            epoch: record.epoch,
            closed: record.is_closed,
            owner: MemberText::new(&record.owner),
        };
        let text = serde_json::to_string_pretty(&text).unwrap_or_default();
        sidecore_linux::replace_file(&self.0, text.as_bytes(), 0o644)
            .map_err(|error| self.error("write", &error))
    }

    fn error(&self, action: &str, error: &io::Error) -> String {
        format!("cannot {action} {}: {error}", self.0.display())
    }
}

#[cfg(test)]
mod tests {
    use sidecore_ownership::Member;

    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written_and_damage_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.owner");
        let file = RecordFile::new(&path);
        assert_eq!(file.read(), Ok(None));
        let owner = Member { name: "a".into(), host: "h".into(), incarnation: 3 };
        let record = Record { cluster: 1, store: u64::MAX, epoch: 9, owner, is_closed: false };
        file.write(&record).unwrap();
        assert_eq!(file.read(), Ok(Some(record.clone())));
        file.write(&Record { epoch: 10, ..record }).unwrap();
        assert_eq!(file.read().unwrap().unwrap().epoch, 10);
        std::fs::write(&path, "{}").unwrap();
        let error = file.read().unwrap_err();
        assert!(error.contains("disk.owner"), "{error}");
        RecordFile::new(directory.path().join("no/such")).write(&record_of(&error)).unwrap_err();
    }

    fn record_of(name: &str) -> Record {
        let owner = Member { name: name.into(), ..Member::default() };
        Record { cluster: 1, store: 1, epoch: 1, owner, is_closed: true }
    }
}
