//! Duplicated code: runs of lines that occur in the tree more than once.
//!
//! The finder compares lines, so that a file's number depends on the tree alone: see
//! docs/decisions/0029-style-by-ratchets.md.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::rules::Violations;

pub(super) const RULE: &str = "duplicates";

/// The number of consecutive equal lines that make a duplicate.
const WINDOW: usize = 8;

/// The lines of each file that are in a run which occurs elsewhere, too. Blank lines, comments,
/// imports, lints of the panic law and lines of brackets alone neither count nor interrupt a run.
pub(super) fn find<'a>(
    files: impl Iterator<Item = &'a (PathBuf, String)>,
) -> Vec<(&'a Path, Violations)> {
    let files: Vec<(&Path, Vec<(usize, &str)>)> =
        files.map(|(file, text)| (file.as_path(), code(text))).collect();
    let mut windows: HashMap<Vec<&str>, usize> = HashMap::new();
    for (_, lines) in &files {
        for window in lines.windows(WINDOW) {
            *windows.entry(texts(window)).or_insert(0) += 1;
        }
    }
    let of_file = |(file, lines): &(&'a Path, Vec<(usize, &str)>)| {
        let mut is_duplicate = vec![false; lines.len()];
        for (start, window) in lines.windows(WINDOW).enumerate() {
            if windows.get(&texts(window)).is_some_and(|count| *count > 1) {
                is_duplicate[start..start + WINDOW].fill(true);
            }
        }
        let lines = lines.iter().zip(is_duplicate).filter(|(_, is_duplicate)| *is_duplicate);
        (*file, lines.map(|((number, line), _)| (*number, (*line).to_owned())).collect())
    };
    files.iter().map(of_file).collect()
}

fn texts<'a>(window: &[(usize, &'a str)]) -> Vec<&'a str> {
    window.iter().map(|(_, line)| *line).collect()
}

/// The lines of code with their numbers.
fn code(text: &str) -> Vec<(usize, &str)> {
    let lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
    lines.filter(|(_, line)| is_code(line)).collect()
}

fn is_code(line: &str) -> bool {
    line.contains(char::is_alphanumeric)
        && !["//", "use ", "pub use ", "mod ", "clippy::"]
            .iter()
            .any(|start| line.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(names: std::ops::Range<usize>) -> String {
        names.map(|name| format!("let a{name} = b;\n")).collect()
    }

    fn counts(files: &[&str]) -> Vec<usize> {
        let files: Vec<(PathBuf, String)> =
            files.iter().map(|text| ("x.rs".into(), (*text).to_owned())).collect();
        find(files.iter()).into_iter().map(|(_, lines)| lines.len()).collect()
    }

    #[test]
    fn a_long_run_in_two_places_counts_in_both() {
        assert_eq!(counts(&[&block(0..12), &format!("fn f() {{\n{}}}\n", block(0..12))]), [12, 12]);
        assert_eq!(counts(&[&block(0..7), &block(0..7)]), [0, 0]);
        assert_eq!(counts(&[&block(0..8), &block(0..8)]), [8, 8]);
        assert_eq!(counts(&[&format!("{}{}", block(0..12), block(0..12))]), [24]);
    }

    #[test]
    fn comments_and_brackets_do_not_hide_a_duplicate_and_imports_are_none() {
        let other = block(0..12).replace("a5 = b;\n", "a5 = b;\n// A word.\n}\n\n");
        assert_eq!(counts(&[&block(0..12), &other]), [12, 12]);
        let imports = "use a::b;\n".repeat(30);
        assert_eq!(counts(&[&imports]), [0]);
    }
}
