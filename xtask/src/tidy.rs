//! House rules for the text of the tree: no work is left for later.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::shell;
use crate::workspace::Workspace;

/// Words that mark postponed work. Spelt in halves, so that this file passes its own check.
const POSTPONED: &[&str] =
    &[concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X:"), concat!("to", "do!(")];

/// Fails on a mark of postponed work.
pub fn check(workspace: &Workspace) -> Result<()> {
    let mut broken = Vec::new();
    for file in tracked_files()? {
        // The file is not text (a seed of a fuzz target, say), or deleted and not yet committed so.
        let Ok(text) = std::fs::read_to_string(workspace.root.join(&file)) else {
            continue;
        };
        for (line, word) in postponed(&text) {
            broken.push(format!(
                "{}:{line}: {word}: do it now, or describe it under docs/decisions",
                file.display()
            ));
        }
    }
    if !broken.is_empty() {
        bail!("{}", broken.join("\n  "));
    }
    Ok(())
}

/// The Rust files below this directory.
pub fn rust_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(directory) = left.pop() {
        let entries = std::fs::read_dir(&directory)
            .with_context(|| format!("cannot list {}", directory.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() && !path.ends_with("target") {
                left.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// The path relative to the root.
pub fn show(path: &Path, workspace: &Workspace) -> String {
    path.strip_prefix(&workspace.root).unwrap_or(path).display().to_string()
}

/// The files that git has, or would have after the next commit.
pub fn tracked_files() -> Result<Vec<PathBuf>> {
    let list = shell::read(Command::new("git").args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))
    .context("the house rules are checked on the files that git lists: run this in a git clone")?;
    Ok(list.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect())
}

/// The lines, counted from 1, that hold a mark of postponed work.
fn postponed(text: &str) -> Vec<(usize, &'static str)> {
    let lines = text.lines().enumerate();
    lines
        .filter_map(|(index, line)| {
            Some((index + 1, *POSTPONED.iter().find(|word| line.contains(**word))?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn postponed_work_is_found_by_its_line() {
        let text = format!("fine\n// {}: later\n", POSTPONED[0]);
        assert_eq!(postponed(&text), [(2, POSTPONED[0])]);
        assert!(postponed("nothing to do here").is_empty());
    }

    #[test]
    fn rust_files_are_found_at_any_depth_outside_target() {
        let directory = tempfile::tempdir().unwrap();
        for path in ["src/lib.rs", "tests/common/mod.rs", "target/debug/out.rs", "src/notes.txt"] {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let found = rust_files(directory.path()).unwrap();
        let found: Vec<_> =
            found.iter().map(|path| path.strip_prefix(directory.path()).unwrap()).collect();
        assert_eq!(found, [Path::new("src/lib.rs"), Path::new("tests/common/mod.rs")]);
    }
}
