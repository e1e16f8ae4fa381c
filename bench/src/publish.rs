//! Tables of results in README.md and docs/bench.md, between two marker comments.

use anyhow::{Context, Result};

use crate::record::Records;

const PAGE: &str = "README.md";

/// Puts `table` between the lines `<!-- bench: NAME -->` and `<!-- end of bench: NAME -->` of README.md.
///
/// # Errors
/// The page cannot be read or written, or has no such lines.
pub fn update(name: &str, table: &str) -> Result<()> {
    update_in(PAGE, name, table)
}

/// The same for another page.
///
/// # Errors
/// As [`update`].
pub fn update_in(page: &str, name: &str, table: &str) -> Result<()> {
    let text = std::fs::read_to_string(page).with_context(|| format!("cannot read {page}"))?;
    let updated = replace(&text, name, table).with_context(|| {
        format!("{page} has no lines `{}` and `{}` to put the table between", start(name), end(name))
    })?;
    std::fs::write(page, updated).with_context(|| format!("cannot write {page}"))
}

/// How one gets such a table.
#[must_use]
pub fn source(name: &str, records: &Records) -> String {
    format!("Measured by `cargo xtask bench {name}` at revision {}", records.revision())
}

fn replace(text: &str, name: &str, table: &str) -> Option<String> {
    let (before, rest) = text.split_once(&start(name))?;
    let (_, after) = rest.split_once(&end(name))?;
    Some(format!("{before}{}\n{}\n{}{after}", start(name), table.trim_end(), end(name)))
}

fn start(name: &str) -> String {
    format!("<!-- bench: {name} -->")
}

fn end(name: &str) -> String {
    format!("<!-- end of bench: {name} -->")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let page = "a\n<!-- bench: x -->\nold\n<!-- end of bench: x -->\nb\n";
        assert_eq!(replace(page, "x", "new\n").unwrap(), "a\n<!-- bench: x -->\nnew\n<!-- end of bench: x -->\nb\n");
        assert_eq!(replace(page, "y", "new"), None);
    }
}
