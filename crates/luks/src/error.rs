//! The reasons for which a header or a key cannot be used.

use std::io;
use std::path::PathBuf;

/// Characters of a header's texts that a message shows.
const EXCERPT_CHARS: usize = 120;

/// The beginning of a text from a header, for a message: a terminal or a log shows it, so control
/// characters are escaped.
pub(crate) fn excerpt(text: &str) -> String {
    let mut shown = String::new();
    for character in text.chars().take(EXCERPT_CHARS) {
        match character {
            '"' | '\'' => shown.push(character),
            other => shown.extend(other.escape_debug()),
        }
    }
    if text.chars().nth(EXCERPT_CHARS).is_some() {
        shown.push_str("...");
    }
    shown
}

/// Why a header gives no key. The message follows the name of the header's file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LuksError {
    /// The file cannot be read.
    #[error("the header cannot be read: {0}")]
    Io(#[from] io::Error),
    /// Neither copy of the header is there.
    #[error(
        "neither copy of a LUKS2 header is here; make one with `sidecore luks format`, or name the \
         file that `cryptsetup luksFormat --type luks2 --header` made"
    )]
    NoHeader,
    /// The header is of LUKS1.
    #[error(
        "the header is of LUKS version {version}, and only 2 is supported; convert it with \
             `cryptsetup convert --type luks2`"
    )]
    Version {
        /// Its version.
        version: u16,
    },
    /// Both copies are damaged.
    #[error(
        "both copies of the header are damaged: {0}; restore it from a backup with \
             `cryptsetup luksHeaderRestore`"
    )]
    Damaged(&'static str),
    /// The metadata breaks the format.
    #[error(
        "the header's metadata is malformed: {0}; restore it from a backup with \
             `cryptsetup luksHeaderRestore`"
    )]
    Malformed(String),
    /// The header needs a feature that is not here.
    #[error("the header has {what} \"{value}\", and {rule}")]
    Unsupported {
        /// The thing.
        what: &'static str,
        /// Its value.
        value: String,
        /// The supported values, and the remedy.
        rule: &'static str,
    },
    /// A key slot asks for more than a limit.
    #[error(
        "a key slot has a cost of {value} ({cost}), and at most {max} is supported; lower it \
             with `cryptsetup luksConvertKey`"
    )]
    Cost {
        /// The kind of the cost.
        cost: &'static str,
        /// The value.
        value: u64,
        /// The limit.
        max: u64,
    },
    /// The key slots cost too much together.
    #[error(
        "the passphrase is that of none of the first {slots} key slots, and to try the next one \
             would take more than four minutes in all; lower their costs with `cryptsetup \
             luksConvertKey`, or remove some with `cryptsetup luksKillSlot`"
    )]
    Work {
        /// The number of key slots that were tried.
        slots: usize,
    },
    /// The derivation of a key fails.
    #[error("no key can be derived from the passphrase: {0}")]
    Derivation(String),
    /// No slot has a key for the passphrase.
    #[error(
        "no key slot opens with this key file; name the file with the passphrase's bytes, without \
         a line end that is not part of it"
    )]
    WrongKey,
}

/// Why a file of a key or a header cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileFault {
    /// The kernel's error.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The call that failed.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// No regular file, or block device for a header.
    #[error("{} is no {expected}; name a file", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
        /// The kinds that are possible.
        expected: &'static str,
    },
    /// Others may read or change the key.
    #[error(
        "{} has mode {mode:04o}, and a key file is closed to others: `chmod 0600` it",
        path.display()
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// Another user can change the key.
    #[error(
        "{} belongs to user {owner}, and a key file belongs to root or to user {user}, who reads \
         it: `chown` it",
        path.display()
    )]
    Owner {
        /// The file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The user of this process.
        user: u32,
    },
    /// Not as many bytes as a passphrase may have.
    #[error(
        "{} has {len_bytes} bytes, and a key file has 1 to {max_bytes}; make one with `head -c 64 \
         /dev/urandom`",
        path.display()
    )]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size, or more than the limit.
        len_bytes: u64,
        /// The limit.
        max_bytes: u64,
    },
    /// A header is not overwritten.
    #[error(
        "{} exists, and without the keys in it what they encrypt is lost; choose another name, or \
         overwrite it with --force",
        path.display()
    )]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The header of the file is of no use.
    #[error("{}: {error}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: LuksError,
    },
}
