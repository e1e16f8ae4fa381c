//! The notes of a host about its disks' reservations, in a file beside the record.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use sidecore_ownership::{Ended, Member, Notes};

use crate::fence::{beside, files_beside};

const KIND: &str = "keys";
const REGISTERED: &str = "registered";
const ENDED: &str = "ended";

/// The file `RECORD.HOST.keys`. Each host writes its own, and reads those of all others.
#[derive(Clone, Debug)]
pub struct NotesFile {
    record: PathBuf,
    path: PathBuf,
}

impl NotesFile {
    /// The file of a daemon's host.
    #[must_use]
    pub fn beside(record: &Path, me: &Member) -> Self {
        Self { record: record.to_owned(), path: beside(record, me, KIND) }
    }

    /// Reads this host's notes; there are none without a file.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged.
    pub fn read(&self) -> Result<Notes, String> {
        read(&self.path)
    }

    /// Replaces this host's notes. They are durable when this returns.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, notes: &Notes) -> Result<(), String> {
        let keys = notes.keys.iter().map(|key| format!("{REGISTERED} {key:#018x}\n"));
        let ended = notes
            .ended
            .iter()
            .map(|Ended { disk, key, by }| format!("{ENDED} {key:#018x} {by:#018x} {disk}\n"));
        let text: String = keys.chain(ended).collect();
        sidecore_linux::replace_file(&self.path, text.as_bytes(), 0o644)
            .map_err(|error| format!("cannot write {}: {error}", self.path.display()))
    }

    /// Reads the registrations that other hosts have ended. A file that is not seen is no more than
    /// evidence that lacks. An old one can have a note that was taken back: the storage has to be
    /// coherent.
    ///
    /// # Errors
    /// A file cannot be read, or is damaged.
    pub fn recall(&self) -> Result<Vec<Ended>, String> {
        let mut ended = Vec::new();
        for path in files_beside(&self.record, KIND)? {
            if path != self.path {
                ended.extend(read(&path)?.ended);
            }
        }
        Ok(ended)
    }
}

fn read(path: &Path) -> Result<Notes, String> {
    let wrong = |error: io::Error| format!("cannot read {}: {error}", path.display());
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Notes::default()),
        opened => opened.map_err(wrong)?,
    };
    if file.metadata().map_err(wrong)?.nlink() == 0 {
        return Err(format!(
            "{} was replaced while it was opened; if it is so at each attempt, the storage shows \
             old files: keep the record on storage that shows all hosts the newest one",
            path.display()
        ));
    }
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(wrong)?;
    let mut notes = Notes::default();
    for line in text.lines() {
        match (registered(line), ended(line)) {
            (Some(key), _) => notes.keys.push(key),
            (_, Some(ended)) => notes.ended.push(ended),
            _ => return Err(format!("cannot understand {}: {line:?}", path.display())),
        }
    }
    Ok(notes)
}

fn registered(line: &str) -> Option<u64> {
    number(line.strip_prefix(REGISTERED)?.strip_prefix(' ')?)
}

/// The identity of a disk is the rest of the line: it can have spaces.
fn ended(line: &str) -> Option<Ended> {
    let mut words = line.strip_prefix(ENDED)?.strip_prefix(' ')?.splitn(3, ' ');
    let (key, by, disk) = (number(words.next()?)?, number(words.next()?)?, words.next()?);
    Some(Ended { disk: disk.to_owned(), key, by })
}

fn number(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_as_they_were_written_and_other_hosts_see_what_has_ended() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("disk.owner");
        let of = |host: &str| {
            NotesFile::beside(&record, &Member { host: host.to_owned(), ..Member::default() })
        };
        let (mine, other) = (of("io1/1"), of("io2/1"));
        assert_eq!(mine.read(), Ok(Notes::default()));
        let ended = Ended { disk: "t10.ATA  D 1".to_owned(), key: 7, by: u64::MAX };
        let notes = Notes { keys: vec![5, u64::MAX], ended: vec![ended.clone()] };
        mine.write(&notes).unwrap();
        assert_eq!(mine.read(), Ok(notes.clone()));
        assert_eq!(of("io1/2").read(), Ok(notes), "after a boot of the host");
        let [first, second] = ["localhost/1/77", "localhost/2/88"].map(of);
        assert_ne!(first.path, second.path, "two hosts of one name");
        assert_eq!(mine.recall(), Ok(vec![]), "its own is known");
        // Another store's, a lock, and what a crash in a write has left.
        for name in ["disk.owner2.io1.keys", "disk.owner.io1.lock", "disk.owner.io1.keys.new"] {
            std::fs::write(directory.path().join(name), "ended 0x9 0x8 d\n").unwrap();
        }
        assert_eq!(other.recall(), Ok(vec![ended]));
        for damaged in ["ended 9 8 d", "ended 0x9 0x8", "ended 0x9 d", "registered 5", "x"] {
            std::fs::write(directory.path().join("disk.owner.io3.keys"), damaged).unwrap();
            assert!(other.recall().unwrap_err().contains("disk.owner.io3.keys"), "{damaged}");
        }
    }

    #[test]
    fn a_file_that_was_replaced_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.owner.io1.keys");
        std::fs::write(&path, "registered 0x5\n").unwrap();
        let open = File::open(&path).unwrap();
        let same = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open));
        assert_eq!(read(same.as_ref()).unwrap().keys, [5]);
        std::fs::remove_file(&path).unwrap();
        let error = read(same.as_ref()).unwrap_err();
        assert!(error.contains("was replaced while it was opened"), "{error}");
        assert_eq!(read(&path), Ok(Notes::default()));
    }

    #[test]
    fn a_record_without_a_directory_has_its_notes_in_this_one() {
        let notes = NotesFile::beside("no-such.owner".as_ref(), &Member::default());
        assert_eq!(notes.recall(), Ok(vec![]));
    }
}
