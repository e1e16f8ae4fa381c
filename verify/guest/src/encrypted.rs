//! The stage `encrypt` beside dm-crypt of a real kernel: a guest has the same data twice, as a disk
//! behind the stage and as the ciphertext, which its kernel opens with the same header.

use crate::checks::Checks;
use crate::config;
use crate::guest::{ENCRYPTED, FIRST_SLOT, Guest};
use crate::progress::Progress;
use crate::qemu::{self, Backend, Disk, Equipment};
use crate::session::Session;
use crate::{DemoOptions, Prepared, listen, secret, text};
use anyhow::{Context, Result, bail};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

const CIPHERTEXT_SLOT: u8 = FIRST_SLOT + 1;
const HEADER_SLOT: u8 = FIRST_SLOT + 2;

/// Runs the guest, and prints what was found.
///
/// # Errors
/// A program or file is not available; the two ciphers differ.
pub fn run(options: &DemoOptions) -> Result<()> {
    listen()?;
    let progress = Progress::start();
    let prepared = Prepared::new(options, &["sidecored", "sidecore"], &progress)?;
    let stage = prepared.stage(qemu::Accelerator::choose(), &progress);
    let mut checks = Checks::default();
    Session::hold(&stage, ENCRYPTED, |session| compare(session, &mut checks))?;
    print!("\n{}", checks.text("The stage `encrypt` and dm-crypt of a guest's kernel"));
    let faults = checks.faults();
    if !faults.is_empty() {
        bail!("the run failed:\n  {}", faults.join("\n  "));
    }
    Ok(())
}

fn compare(session: &mut Session<'_>, checks: &mut Checks) -> Result<()> {
    let (header, key_file) = (session.directory.join("luks"), session.directory.join("key"));
    let key = secret::make("key")?;
    write_key(&key_file, &key)?;
    let (header_text, key_text) = (text(&header)?, text(&key_file)?);
    session.sidecore().run(&["luks", "format", header_text, "--key-file", key_text])?;
    let daemon = session.daemon(|places| places.encrypted(&header, &key_file))?;

    let socket = config::socket(session.directory, ENCRYPTED);
    let disk = |name, backend, slot| Disk { name, backend, slot, packed: false };
    let disks = [
        disk(ENCRYPTED, Backend::Daemon(&socket), FIRST_SLOT),
        disk("ciphertext", Backend::Shared(session.pool), CIPHERTEXT_SLOT),
        disk("header", Backend::Shared(&header), HEADER_SLOT),
    ];
    let equipment = Equipment { polled: false, disks: &disks, ports: &[], nics: &[] };
    let mut guest = Guest::boot_with(session, ENCRYPTED, &equipment)?;
    guest.booted(session)?;
    let order = format!("dm_crypt {CIPHERTEXT_SLOT:02x} {HEADER_SLOT:02x} {key}");
    let answer = guest.order(session, &order)?;
    for (key, what) in [
        ("reads", "dm-crypt reads what was written through the stage"),
        ("writes", "the stage reads what dm-crypt has written"),
        ("hidden", "the store has other bytes than the guest wrote"),
    ] {
        let found = answer.text(key)?.to_owned();
        let found = format!("{found}, {}", answer.text("cipher")?);
        checks.note(session, what, answer.text(key)? == "true", found);
    }
    guest.off(session)?;
    daemon.stop(&mut session.inbox)
}

/// Writes a key to a file that its owner alone may read.
fn write_key(path: &Path, key: &str) -> Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(key.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}
