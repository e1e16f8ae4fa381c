//! Writes results into pages of the documentation, between two marker comments.

use std::io;
use std::path::Path;

/// Puts `text` between the lines `<!-- NAME -->` and `<!-- end of NAME -->` of a page.
///
/// # Errors
/// The page cannot be read or written, or has no such lines.
pub fn update(page: &Path, name: &str, text: &str) -> io::Result<()> {
    let failed =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", page.display()));
    let old = std::fs::read_to_string(page).map_err(failed)?;
    let new = replace(&old, name, text).ok_or_else(|| {
        let markers = format!("there are no lines `{}` and `{}`", start(name), end(name));
        failed(io::Error::new(io::ErrorKind::InvalidData, markers))
    })?;
    std::fs::write(page, new).map_err(failed)
}

/// The text between the markers of a page.
#[must_use]
pub fn between<'a>(page: &'a str, name: &str) -> Option<&'a str> {
    Some(page.split_once(&start(name))?.1.split_once(&end(name))?.0)
}

/// The page with another text between its markers.
#[must_use]
pub fn replace(page: &str, name: &str, text: &str) -> Option<String> {
    let (before, rest) = page.split_once(&start(name))?;
    let (_, after) = rest.split_once(&end(name))?;
    Some(format!("{before}{}\n{}\n{}{after}", start(name), text.trim_end(), end(name)))
}

fn start(name: &str) -> String {
    format!("<!-- {name} -->")
}

fn end(name: &str) -> String {
    format!("<!-- end of {name} -->")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_text_between_the_markers_changes() {
        let page = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n";
        assert_eq!(between(page, "x"), Some("\nold\n"));
        assert_eq!(
            replace(page, "x", "new\n").unwrap(),
            "a\n<!-- x -->\nnew\n<!-- end of x -->\nb\n"
        );
        assert_eq!((replace(page, "y", "new"), between(page, "y")), (None, None));
    }
}
