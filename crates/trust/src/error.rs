//! Errors of keys and their files.

use std::io;
use std::path::PathBuf;

/// Why a key, an invitation or a client is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The kernel has no random bytes.
    #[error("a key cannot be made: the kernel gives no random bytes (getrandom)")]
    NoRandomBytes,
    /// This cannot be a client's name.
    #[error("\"{name}\" is no name for a client: it has 1 to 16 letters, digits, `-`, `_` and `.`")]
    Name {
        /// The name.
        name: String,
    },
    /// The client was invited before.
    #[error("client {name} is already invited: revoke it first, or take another name")]
    Exists {
        /// Its name.
        name: String,
    },
    /// The client was not invited.
    #[error("client {name} is not invited: `sidecore remote list` shows those that are")]
    Unknown {
        /// Its name.
        name: String,
    },
    /// An operation on a file failed.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The attempted operation, as in "cannot ...".
        action: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// Others than its owner and group may read a secret, or others than its owner may write it.
    #[error("{path}: others may read or change it (mode {mode:04o}): `chmod 600` it")]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// Another user owns a file or directory of keys, and can change it.
    #[error(
        "{path}: it belongs to user {owner}, who can change it: `chown` it to user {user}, whose \
         process reads it, or to root"
    )]
    Owner {
        /// The file or directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The user of this process.
        user: u32,
    },
    /// Others than its owner can replace the files of a directory of keys.
    #[error("{path}: others may replace its files (mode {mode:04o}): `chmod go-w` it")]
    Open {
        /// The directory.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// The file is none of a key.
    #[error("{path}: {problem}")]
    File {
        /// The file.
        path: PathBuf,
        /// The problem, as a sentence without a full stop.
        problem: TextError,
    },
}

/// Why a text is not that of a key, an invitation or a client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// It is no regular file.
    #[error("it is no regular file")]
    NoFile,
    /// It is no text.
    #[error("it is no text, so it is no file of this kind")]
    NoText,
    /// It is longer than any of its kind.
    #[error("it has more than {max} bytes, so it is no file of this kind")]
    TooLong {
        /// The most that one has.
        max: usize,
    },
    /// It is not of this kind.
    #[error("it is not a file of this kind: its first line is not `{kind} VERSION`")]
    Kind {
        /// The first word of the kind.
        kind: &'static str,
    },
    /// It is of another version.
    #[error(
        "it is of version {found}, and this program knows version {known}: make a new one, or use \
         the same version of Sidecore on both sides"
    )]
    Version {
        /// Its version.
        found: String,
        /// The known one.
        known: u32,
    },
    /// A line is missing or out of place.
    #[error(
        "line {line} is not `{field} VALUE`: the file is cut or was changed. Restore it, or make a \
         new one"
    )]
    Line {
        /// Its number.
        line: usize,
        /// The name of the value that belongs there.
        field: &'static str,
    },
    /// A value makes no sense.
    #[error(
        "`{field}` is wrong in line {line}: the file is cut or was changed. Restore it, or make a \
         new one"
    )]
    Value {
        /// The line's number.
        line: usize,
        /// The value's name.
        field: &'static str,
    },
    /// Something follows the checksum.
    #[error("line {line} is behind the checksum, which is the last line: delete it")]
    Trailing {
        /// The line's number.
        line: usize,
    },
    /// The checksum does not fit.
    #[error("its checksum is wrong: the file was changed. Restore it, or make a new one")]
    Checksum,
    /// A client's file has another name than the client.
    #[error("it is the file of client {found}: a file of this directory has its client's name")]
    OtherName {
        /// The name in it.
        found: String,
    },
}
