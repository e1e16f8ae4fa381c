//! The pages of a block device that the kernel has cached.

use std::fs::File;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

/// The program of each Linux system that writes a file's cached pages and waits for that.
const PROGRAM: &str = "sync";

/// Writes the pages that the kernel has cached of a block device, and waits for that.
///
/// A program does so, because the wait cannot be killed. A thread of this process would wait for
/// the daemon that takes over the device after a kill, with this process's files open; and the
/// kernel lets no daemon take over a device before those are closed.
///
/// # Errors
/// Some pages were not written.
pub(super) fn write_cached(path: &Path) -> io::Result<()> {
    write_by(PROGRAM, path)
}

fn write_by(program: &str, path: &Path) -> io::Result<()> {
    let mut command = Command::new(program);
    command.arg(path).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
        }
        // Without the program, writes are worth more than a kill that ends the process.
        Err(_) => File::open(path)?.sync_all(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_writes_and_tells_errors() {
        let directory = tempfile::tempdir().unwrap();
        let (file, missing) = (directory.path().join("file"), directory.path().join("missing"));
        std::fs::write(&file, "pages").unwrap();
        for program in [PROGRAM, "/no/such/program"] {
            write_by(program, &file).unwrap();
        }
        let error = write_cached(&missing).unwrap_err().to_string();
        assert!(error.contains("missing"), "{error}");
        let error = write_by("/no/such/program", &missing).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
