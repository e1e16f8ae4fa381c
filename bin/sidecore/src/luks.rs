//! `sidecore luks`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand};
use sidecore_luks::{Header, Kdf, NewHeader, SectorSize, open_header, read_key_file, write_header};

use crate::print;

/// The arguments of `sidecore luks`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make a LUKS2 header with a new random key, in a file of its own, for the stage `encrypt`.
    ///
    /// `cryptsetup` reads and changes it: luksAddKey, luksKillSlot, luksDump, luksHeaderBackup.
    Format {
        /// The file of the header, 16 MiB, sparse.
        header: PathBuf,
        /// The file whose bytes are the passphrase, all of them, as for `cryptsetup --key-file`.
        #[arg(long, value_name = "FILE")]
        key_file: PathBuf,
        /// The size of encrypted sectors in bytes. With 4096 the guest's disk has blocks of that
        /// size, which not every firmware boots from.
        #[arg(long, value_name = "BYTES", default_value = "512", value_parser = sector)]
        sector_bytes: SectorSize,
        /// The derivation of a key from the passphrase: argon2id with 64 MiB, or pbkdf2, which
        /// takes no memory.
        #[arg(long, value_name = "NAME", default_value = "argon2id",
              value_parser = ["argon2id", "pbkdf2"])]
        pbkdf: String,
        /// Overwrite a file. The data that the keys in it encrypt is lost then.
        #[arg(long)]
        force: bool,
    },
    /// Check a header: both copies, the features that are needed, and that the key file opens it.
    Check {
        /// The file of the header, or a device that begins with one.
        header: PathBuf,
        /// The file whose bytes are the passphrase.
        #[arg(long, value_name = "FILE")]
        key_file: PathBuf,
    },
}

/// Repetitions of PBKDF2, about a second of a CPU without instructions for hashes.
const ITERATIONS: u32 = 1_000_000;

fn sector(text: &str) -> Result<SectorSize, String> {
    let bytes = text.parse().ok().and_then(SectorSize::new);
    bytes.ok_or_else(|| "expected 512, 1024, 2048 or 4096".to_owned())
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.command {
        Command::Format { header, key_file, sector_bytes, pbkdf, force } => {
            let kdf = match pbkdf.as_str() {
                "pbkdf2" => Kdf::Pbkdf2 { iterations: ITERATIONS },
                _ => Kdf::default(),
            };
            let passphrase = read_key_file(key_file)?;
            let start = NewHeader { sector: *sector_bytes, kdf }.make(&passphrase)?;
            write_header(header, &start, *force)?;
            let path = header.display();
            Ok(print(&format!("formatted: {path}; without it the data is lost: keep a copy\n"))?)
        }
        Command::Check { header, key_file } => check(header, key_file),
    }
}

fn check(path: &Path, key_file: &Path) -> Result<()> {
    let of_header = || path.display().to_string();
    let file = open_header(path)?;
    let header = Header::read(&file).with_context(of_header)?;
    let (segment, uuid) = (header.segment(), header.uuid().to_owned());
    let copies = if header.is_damaged() {
        "one copy is damaged: `cryptsetup repair` it"
    } else {
        "both copies are fine"
    };
    header.unlock(&file, &read_key_file(key_file)?).with_context(of_header)?;
    let end = match segment.len_bytes {
        Some(len_bytes) => format!("{len_bytes} bytes from byte {}", segment.offset_bytes),
        None => format!("from byte {} to the end of the store", segment.offset_bytes),
    };
    Ok(print(&format!(
        "{}: the key file opens it\n  UUID    {uuid}\n  header  {copies}\n  data    {end}, in \
         sectors of {} bytes\n",
        path.display(),
        segment.sector.bytes()
    ))?)
}
