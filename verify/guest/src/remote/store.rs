//! The content of a store at the IOhost, beside what the guest saw on its disk.

use super::config;
use super::run::{LOAD, LOAD_SIZE};
use crate::checks::Checks;
use crate::guest::Answer;
use crate::session::Session;
use crate::{install, text};
use anyhow::{Context, Result, ensure};
use sidecore_kit::process::output_of;
use std::path::Path;

/// The checksums of a disk, as a guest computed them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Digest {
    /// Of the list of all files' checksums.
    files: String,
    /// The number of files.
    count: u64,
    /// Of the part behind the file system.
    blocks: String,
}

impl Digest {
    /// The number of files, for a reader.
    pub(super) fn words(&self) -> String {
        format!("{} files, list {}", self.count, short(&self.files))
    }

    pub(super) fn of(answer: &Answer) -> Result<Digest> {
        let text = |key| answer.text(key).map(str::to_owned);
        Ok(Digest {
            files: text("files")?,
            count: answer.number("count")?,
            blocks: text("blocks")?,
        })
    }
}

/// Compares a disk's checksums with those of its store, which no daemon has open.
pub(super) fn compare(
    session: &Session<'_>,
    stores: &Path,
    disk: &str,
    digest: &Digest,
    checks: &mut Checks,
) -> Result<()> {
    let store = config::store(stores, disk);
    let tree = tempfile::Builder::new().prefix("tree-").tempdir_in(stores)?;
    let debugfs = install::require("debugfs")?;
    let dump = format!("rdump / {}", text(tree.path())?);
    output_of(text(&debugfs)?, &["-R", &dump, text(&store)?])?;
    // The same words as in the guest, whose sort has no locale.
    let sum = "cd \"$0\" && find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum";
    let files = first_word(&output_of("sh", &["-c", sum, text(tree.path())?])?)?;
    let found = format!("{} files, list {}", digest.count, short(&files));
    let what = format!("every file of {disk} has the same checksum in the store at the IOhost");
    ensure!(digest.count > 100, "the guest has {} files only", digest.count);
    checks.note(session, &what, files == digest.files, found);
    let dump = "dd if=\"$0\" bs=1M skip=\"$1\" count=\"$2\" status=none | sha256sum";
    let arguments = [text(&store)?, &LOAD.to_string(), &LOAD_SIZE.to_string()];
    let blocks = output_of("sh", &[["-c", dump].as_slice(), &arguments].concat())?;
    let blocks = first_word(&blocks)?;
    let what = format!("the blocks of {disk} behind the file system, too");
    let found = format!("{LOAD_SIZE} MiB, {}", short(&blocks));
    checks.note(session, &what, blocks == digest.blocks, found);
    Ok(())
}

fn first_word(text: &str) -> Result<String> {
    text.split_whitespace().next().map(str::to_owned).context("no checksum")
}

fn short(checksum: &str) -> &str {
    checksum.get(..12).unwrap_or(checksum)
}
