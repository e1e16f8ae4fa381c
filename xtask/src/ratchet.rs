//! Ratchets: rules of style that old code breaks and new code must keep.
//!
//! `xtask/ratchets.txt` has the number of violations for each rule and file. `make lint` fails if a
//! file has more than its number, and also if it has fewer, until `cargo xtask ratchet` has written
//! the smaller number. That command never writes a larger sum for a rule, so code may move between
//! files with its old violations, and no new ones come in.
//!
//! Each number is on a line of its own and git merges the file as a union (`.gitattributes`): two
//! branches never conflict in it. Where a merge leaves two lines for one file, the smaller one
//! holds.

mod duplicates;
mod rules;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::tidy;
use crate::workspace::Workspace;

const LIST: &str = "xtask/ratchets.txt";

const HEADER: &str = "# Violations of each rule by file; written by `cargo xtask ratchet`, which \
                      never adds any.\n\
                      # The rules are in xtask/src/ratchet/rules.rs.\n";

/// At most this many violations of a file are shown.
const SHOWN: usize = 8;

/// The violations of a rule in a file.
struct Found {
    count: usize,
    /// Line numbers of violations, with the start of each line.
    examples: Vec<(usize, String)>,
}

type Key = (String, PathBuf);

/// Fails unless every file has the number of violations that the list says.
pub fn check(workspace: &Workspace) -> Result<()> {
    let found = measure(workspace)?;
    let complaints = compare(&read(workspace)?.context("xtask/ratchets.txt is missing")?, &found);
    if !complaints.is_empty() {
        bail!("{}", complaints.join("\n  "));
    }
    Ok(())
}

/// Writes the list as the tree is now, unless the sum of a rule has grown.
pub fn tighten(workspace: &Workspace) -> Result<()> {
    let found = measure(workspace)?;
    if let Some(listed) = read(workspace)? {
        let grown = grown(&listed, &found);
        if !grown.is_empty() {
            let complaints = compare(&listed, &found);
            bail!("the list would grow:\n  {}\n  {}", grown.join("\n  "), complaints.join("\n  "));
        }
    }
    let mut text = HEADER.to_owned();
    for ((rule, file), Found { count, .. }) in &found {
        let _ = writeln!(text, "{rule} {} {count}", file.display());
    }
    let path = workspace.root.join(LIST);
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    for (rule, sum) in sums(found.iter().map(|((rule, _), found)| (rule, found.count))) {
        println!("{rule:<12} {sum:>7}");
    }
    Ok(())
}

fn measure(workspace: &Workspace) -> Result<BTreeMap<Key, Found>> {
    let mut files = Vec::new();
    for file in tidy::tracked_files()? {
        let is_checked =
            file.extension().is_some_and(|extension| extension == "rs" || extension == "md");
        // A deleted file stays in the list until the deletion is committed.
        if let (true, Ok(text)) = (is_checked, std::fs::read_to_string(workspace.root.join(&file)))
        {
            files.push((file, text));
        }
    }
    let mut all = BTreeMap::new();
    for (file, text) in &files {
        for (rule, violations) in rules::check(file, text) {
            insert(&mut all, rule, file, violations);
        }
    }
    let rust = files
        .iter()
        .filter(|(file, _)| file.extension().is_some_and(|extension| extension == "rs"));
    for (file, violations) in duplicates::find(rust) {
        insert(&mut all, duplicates::RULE, file, violations);
    }
    Ok(all)
}

fn insert(
    all: &mut BTreeMap<Key, Found>,
    rule: &str,
    file: &Path,
    violations: Vec<(usize, String)>,
) {
    if !violations.is_empty() {
        let found = Found { count: violations.len(), examples: violations };
        all.insert((rule.to_owned(), file.to_owned()), found);
    }
}

/// The committed numbers; `None` if the file does not exist.
fn read(workspace: &Workspace) -> Result<Option<BTreeMap<Key, usize>>> {
    let path = workspace.root.join(LIST);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(parse(&text)?)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn parse(text: &str) -> Result<BTreeMap<Key, usize>> {
    let mut listed: BTreeMap<Key, usize> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        let [rule, file, count] = words[..] else {
            bail!("{LIST}: not a rule, a file and a number: {line}")
        };
        let count =
            count.parse().with_context(|| format!("{LIST}: no number at the end: {line}"))?;
        let number = listed.entry((rule.to_owned(), file.into())).or_insert(count);
        *number = count.min(*number);
    }
    Ok(listed)
}

/// A message for each file and rule in which the tree differs from the list.
fn compare(listed: &BTreeMap<Key, usize>, found: &BTreeMap<Key, Found>) -> Vec<String> {
    let mut complaints = Vec::new();
    for ((rule, file), Found { count, examples }) in found {
        let allowed = listed.get(&(rule.clone(), file.clone())).copied().unwrap_or(0);
        if *count > allowed {
            let mut message =
                format!("{}: {rule}: {count}, and {allowed} are allowed", file.display());
            for (line, text) in examples.iter().take(SHOWN) {
                let _ = write!(message, "\n    {}:{line}: {text}", file.display());
            }
            complaints.push(message);
        }
    }
    for ((rule, file), allowed) in listed {
        let count = found.get(&(rule.clone(), file.clone())).map_or(0, |found| found.count);
        if count < *allowed {
            let file = file.display();
            complaints.push(format!(
                "{file}: {rule}: {count}, and the list says {allowed}: run `cargo xtask ratchet`"
            ));
        }
    }
    complaints
}

/// The rules whose sum is larger than the list's.
fn grown(listed: &BTreeMap<Key, usize>, found: &BTreeMap<Key, Found>) -> Vec<String> {
    let before = sums(listed.iter().map(|((rule, _), count)| (rule, *count)));
    let now = sums(found.iter().map(|((rule, _), found)| (rule, found.count)));
    let mut grown = Vec::new();
    for (rule, now) in now {
        let before = before.get(&rule).copied().unwrap_or(0);
        if now > before {
            grown.push(format!("{rule}: {now} in all files, and {before} are allowed"));
        }
    }
    grown
}

fn sums<'a>(counts: impl Iterator<Item = (&'a String, usize)>) -> BTreeMap<String, usize> {
    let mut sums = BTreeMap::new();
    for (rule, count) in counts {
        *sums.entry(rule.clone()).or_insert(0) += count;
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(counts: &[(&str, &str, usize)]) -> BTreeMap<Key, Found> {
        let entry = |(rule, file, count): &(&str, &str, usize)| {
            let examples = vec![(7, "text".to_owned()); *count];
            (((*rule).to_owned(), PathBuf::from(*file)), Found { count: *count, examples })
        };
        counts.iter().map(entry).collect()
    }

    #[test]
    fn more_violations_than_listed_are_shown_and_fewer_ask_for_the_command() {
        let listed =
            parse("# comment\ncolumns a.rs 2\ncolumns b.rs 5\ncolumns gone.rs 1\n").unwrap();
        let complaints = compare(
            &listed,
            &found(&[("columns", "a.rs", 3), ("columns", "b.rs", 5), ("lines", "c.rs", 1)]),
        );
        assert_eq!(complaints.len(), 3, "{complaints:?}");
        assert!(
            complaints[0].starts_with("a.rs: columns: 3, and 2 are allowed\n    a.rs:7: text"),
            "{complaints:?}"
        );
        assert!(complaints[1].starts_with("c.rs: lines: 1, and 0 are allowed"), "{complaints:?}");
        assert!(
            complaints[2]
                .contains("gone.rs: columns: 0, and the list says 1: run `cargo xtask ratchet`")
        );
        assert!(
            compare(
                &listed,
                &found(&[
                    ("columns", "a.rs", 2),
                    ("columns", "b.rs", 5),
                    ("columns", "gone.rs", 1)
                ])
            )
            .is_empty()
        );
    }

    #[test]
    fn violations_may_move_between_files_and_their_sum_may_not_grow() {
        let listed = parse("columns a.rs 2\ncolumns b.rs 5\n").unwrap();
        assert!(grown(&listed, &found(&[("columns", "new.rs", 7)])).is_empty());
        assert_eq!(grown(&listed, &found(&[("columns", "new.rs", 8)])).len(), 1);
        assert_eq!(
            grown(&listed, &found(&[("columns", "a.rs", 1), ("lines", "a.rs", 1)])).len(),
            1
        );
    }

    #[test]
    fn the_smaller_of_two_lines_for_one_file_holds() {
        let listed = parse("columns a.rs 4\ncolumns a.rs 3\ncolumns a.rs 5\n").unwrap();
        assert_eq!(listed.into_values().collect::<Vec<_>>(), [3]);
        assert!(parse("columns a.rs\n").is_err() && parse("columns a.rs many\n").is_err());
    }
}
