//! Checks that links between pages of the tree lead to a file, and to a heading in it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use anyhow::{Result, bail};

use crate::tidy;
use crate::workspace::Workspace;

/// Fails on a link of a tracked page to a file or heading that is not there.
pub fn check(workspace: &Workspace) -> Result<()> {
    check_pages(&workspace.root, &tidy::tracked_files()?)
}

/// Fails on a link of a page below `root` to a file or heading that is not there.
pub fn check_tree(root: &Path) -> Result<()> {
    let (mut files, mut directories) = (Vec::new(), vec![root.to_owned()]);
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory)? {
            let path = entry?.path();
            if path.is_dir() {
                directories.push(path);
            } else {
                files.push(path.strip_prefix(root)?.to_owned());
            }
        }
    }
    check_pages(root, &files)
}

fn check_pages(root: &Path, files: &[PathBuf]) -> Result<()> {
    let pages =
        files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "md"));
    let text =
        |file: &PathBuf| Some((file.clone(), std::fs::read_to_string(root.join(file)).ok()?));
    let broken = broken(&pages.filter_map(text).collect(), |file| root.join(file).exists());
    if !broken.is_empty() {
        bail!("{}", broken.join("\n  "));
    }
    Ok(())
}

/// The links that lead nowhere. `exists` answers for files that are no pages.
fn broken(pages: &BTreeMap<PathBuf, String>, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let headings: BTreeMap<&PathBuf, BTreeSet<String>> =
        pages.iter().map(|(file, text)| (file, headings(text))).collect();
    let mut broken = Vec::new();
    for (file, text) in pages {
        for (line, link) in links(text) {
            let (path, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() { file.clone() } else { resolve(file, path) };
            let place = format!("{}:{line}: {link}", file.display());
            if !pages.contains_key(&target) && !exists(&target) {
                broken.push(format!("{place}: there is no such file"));
            } else if !heading.is_empty()
                && headings.get(&target).is_some_and(|all| !all.contains(heading))
            {
                broken.push(format!("{place}: that page has no such heading"));
            }
        }
    }
    broken
}

/// The relative links of a page, with the numbers of their lines.
fn links(text: &str) -> Vec<(usize, &str)> {
    let mut links = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for rest in line.split("](").skip(1) {
            let Some((link, _)) = rest.split_once(')') else { continue };
            if !link.contains("://") && !link.contains(' ') {
                links.push((index + 1, link));
            }
        }
    }
    links
}

/// The anchors of a page's headings, as GitHub makes them.
fn headings(text: &str) -> BTreeSet<String> {
    let mut is_code = false;
    let mut headings = BTreeSet::new();
    for line in text.lines() {
        is_code ^= line.starts_with("```");
        let title = line.trim_start_matches('#');
        if is_code || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let kept =
            |character: &char| character.is_alphanumeric() || [' ', '-', '_'].contains(character);
        headings.insert(
            title.trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-"),
        );
    }
    headings
}

/// Resolves the path of a link in `page`, relative to the root of the tree.
fn resolve(page: &Path, path: &str) -> PathBuf {
    let mut target = page.parent().map(Path::to_owned).unwrap_or_default();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => drop(target.pop()),
            Component::CurDir => {}
            part => target.push(part),
        }
    }
    target
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_lead_nowhere_are_named_with_their_line() {
        let readme = "# A\n[b](docs/b.md), [h](docs/b.md#type--file), [own](#a), [code](src/x.rs)\n\
                      [web](https://example.org/none.md)\n[bad](docs/none.md)\n\
                      [worse](docs/b.md#none)\n";
        let page =
            "## type = \"file\"\n```sh\n# none\n```\n[up](../README.md#a) [gone](../gone.rs)\n";
        let pages = [("README.md", readme), ("docs/b.md", page)];
        let pages = pages.map(|(file, text)| (PathBuf::from(file), text.to_owned())).into();
        let broken = broken(&pages, |file| file == Path::new("src/x.rs"));
        assert_eq!(
            broken,
            [
                "README.md:4: docs/none.md: there is no such file",
                "README.md:5: docs/b.md#none: that page has no such heading",
                "docs/b.md:5: ../gone.rs: there is no such file",
            ]
        );
    }
}
