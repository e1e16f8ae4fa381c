//! The problems of a configuration: message, place and remedy.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// One fault of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Line and column in the file, counted from 1; `None` for the file as a whole.
    pub place: Option<(usize, usize)>,
    /// The section's heading and name, as in `[[device]] "vd0"`; may be empty.
    pub subject: String,
    /// The fault, and its remedy.
    pub message: String,
}

/// All faults of a configuration. Each check runs to the end, so that one round of corrections is
/// enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    /// The path of the configuration file.
    pub file: PathBuf,
    /// In the order of the file; never empty, and at most the first hundred.
    pub list: Vec<Problem>,
}

impl fmt::Display for Problems {
    /// Writes one line per problem, in the form that editors and compilers use.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.list.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{}:", self.file.display())?;
            if let Some((line, column)) = problem.place {
                write!(f, "{line}:{column}:")?;
            }
            if !problem.subject.is_empty() {
                write!(f, " {}:", problem.subject)?;
            }
            write!(f, " {}", problem.message)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// A list with more problems than this would not be read.
const LISTED_MAX: usize = 100;

/// Collects problems while the file is read and checked.
pub(super) struct Collector<'a> {
    file: &'a Path,
    text: &'a str,
    /// The start of relative paths; `None` if all paths are absolute.
    pub(super) base: Option<PathBuf>,
    /// Whether bare names are paths, too: of files in a directory that the daemon has.
    pub(super) takes_names: bool,
    found: Vec<(usize, Problem)>,
}

impl<'a> Collector<'a> {
    /// Makes a collector for a file, whose directory is the start of relative paths.
    pub(super) fn of_file(file: &'a Path, text: &'a str) -> Self {
        let absolute = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        let base = absolute.parent().unwrap_or(Path::new("/")).to_owned();
        Self { file, text, base: Some(base), takes_names: false, found: Vec::new() }
    }

    /// Makes a collector for a text that is no file, in which paths are absolute.
    pub(super) fn of_text(text: &'a str) -> Self {
        Self { file: Path::new(""), text, base: None, takes_names: false, found: Vec::new() }
    }

    /// Makes a problem of the whole file.
    pub(super) fn whole_file(file: &Path, message: String) -> Problems {
        Problems {
            file: file.to_owned(),
            list: vec![Problem { place: None, subject: String::new(), message }],
        }
    }

    /// Adds a problem of the text at `span`.
    pub(super) fn add(&mut self, span: Range<usize>, subject: &str, message: impl Into<String>) {
        if self.is_full() {
            return;
        }
        let message = one_line(message.into());
        let problem =
            Problem { place: Some(self.place(span.start)), subject: subject.to_owned(), message };
        self.found.push((span.start, problem));
    }

    /// Whether further problems are not listed.
    pub(super) fn is_full(&self) -> bool {
        self.found.len() >= LISTED_MAX
    }

    /// Returns the collected problems as an error, if there are any.
    pub(super) fn finish(mut self) -> Result<(), Problems> {
        if self.found.is_empty() {
            return Ok(());
        }
        self.found.sort_by_key(|(at, _)| *at);
        Err(Problems {
            file: self.file.to_owned(),
            list: self.found.into_iter().map(|(_, problem)| problem).collect(),
        })
    }

    /// Returns the line and the column, in characters, of a byte of the text.
    fn place(&self, at: usize) -> (usize, usize) {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line = before.matches('\n').count().saturating_add(1);
        let column = before.rsplit('\n').next().unwrap_or("").chars().count().saturating_add(1);
        (line, column)
    }
}

/// A message that quotes the file is one line all the same.
fn one_line(message: String) -> String {
    if !message.contains(char::is_control) {
        return message;
    }
    let shown =
        |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    message.chars().map(shown).collect()
}
