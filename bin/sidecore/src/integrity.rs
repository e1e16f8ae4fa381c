//! `sidecore integrity`.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand};
use sidecore_linux::{FileOptions, FileStore};
use sidecore_stage_integrity::{FormatOptions, format, uuid_text};

use crate::print;

/// The arguments of `sidecore integrity`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make a file or a block device a store with checksums, for the stage `integrity`. All of it
    /// is overwritten.
    Format {
        /// The file or the block device.
        store: PathBuf,
        /// The size of a block in bytes: the unit of checksums, and that of the guest's disk. Not
        /// every firmware boots from one with blocks of 4096 bytes; with 512 the checksums take
        /// eight times the space and memory.
        #[arg(long, value_name = "BYTES", default_value = "4096", value_parser = block)]
        block_bytes: u32,
        /// Overwrite a store that is not blank. Its data is lost then.
        #[arg(long)]
        force: bool,
    },
}

fn block(text: &str) -> Result<u32, String> {
    let bytes = text.parse().ok().filter(|bytes| [512, 1024, 2048, 4096].contains(bytes));
    bytes.ok_or_else(|| "expected 512, 1024, 2048 or 4096".to_owned())
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let Command::Format { store, block_bytes, force } = &arguments.command;
    format_store(store, *block_bytes, *force).with_context(|| store.display().to_string())
}

fn format_store(path: &Path, block_bytes: u32, force: bool) -> Result<()> {
    let store = FileStore::open(&FileOptions::new(path))?;
    let mut uuid = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut uuid)?;
    let layout = format(&store, &FormatOptions { uuid, block_bytes, slots: None, force })?;
    Ok(print(&format!(
        "formatted: {}, UUID {}; the disk has {} bytes\n",
        path.display(),
        uuid_text(&uuid),
        layout.capacity_bytes()
    ))?)
}
