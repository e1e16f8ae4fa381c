//! Unique texts that a guest writes and that the other guest must not find, and the search for them
//! on the host.

use crate::install;
use anyhow::{Context, Result, ensure};
use std::io::Read;
use std::path::Path;
use std::process::Command;

/// A new random text.
pub(crate) fn make(name: &str) -> Result<String> {
    let mut bytes = [0; 16];
    let mut random = std::fs::File::open("/dev/urandom").context("cannot open /dev/urandom")?;
    random.read_exact(&mut bytes).context("cannot read /dev/urandom")?;
    Ok(format!("{name}-{:032x}", u128::from_ne_bytes(bytes)))
}

/// The number of occurrences of a text in a file. The search uses the same program as the guests,
/// so that the results are comparable.
pub(crate) fn count(file: &Path, text: &str) -> Result<usize> {
    let grep = install::require("grep")?;
    let output = Command::new(grep)
        .env("LC_ALL", "C")
        .args(["-o", "-a", "-z", "-F", "-e", text])
        .arg(file)
        .output();
    let output = output.context("cannot run grep")?;
    // Status 1 means no match.
    ensure!(
        matches!(output.status.code(), Some(0 | 1)),
        "grep could not search {}",
        file.display()
    );
    Ok(output.stdout.iter().filter(|byte| **byte == 0).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_differ_and_are_found_across_zeros() {
        let (one, other) = (make("x").unwrap(), make("x").unwrap());
        assert_ne!(one, other);
        assert_eq!(one.len(), 34);
        let file = tempfile::NamedTempFile::new().unwrap();
        let content = [
            vec![0; 5000],
            format!("{one}\n{one}\n").into_bytes(),
            vec![0; 70_000],
            one.clone().into_bytes(),
        ];
        std::fs::write(file.path(), content.concat()).unwrap();
        assert_eq!(count(file.path(), &one).unwrap(), 3);
        assert_eq!(count(file.path(), &other).unwrap(), 0);
    }
}
