//! The format of key files: a line for each value, in a fixed order.
//!
//! ```text
//! # A comment. Empty lines and comments may be anywhere.
//! sidecore-invitation 1
//! client vmhost1
//! ...
//! checksum 0123456789abcdef
//! ```
//!
//! The checksum, the first bytes of the SHA-256 of the lines before it, finds damage. It is no
//! protection: everyone can compute it.

use ring::digest::{SHA256, digest};
use zeroize::Zeroizing;

use crate::error::TextError;

/// The version of all these files.
const VERSION: u32 = 1;
/// No file is longer.
pub(super) const MAX_BYTES: usize = 4096;

const CHECKSUM: &str = "checksum";
const CHECKSUM_BYTES: usize = 8;

/// Writes a file. Its text is wiped when it is dropped.
pub(super) struct Writer {
    text: Zeroizing<String>,
    /// The end of the comment.
    start: usize,
}

impl Writer {
    /// Begins a file of this kind. Its text never moves, so that no copy is left behind.
    pub(super) fn new(comment: &str, kind: &str) -> Self {
        let mut text = Zeroizing::new(String::with_capacity(MAX_BYTES));
        text.push_str("# ");
        text.push_str(comment);
        text.push('\n');
        let start = text.len();
        let mut writer = Self { text, start };
        writer.line(kind, &VERSION.to_string());
        writer
    }

    pub(super) fn line(&mut self, field: &str, value: &str) {
        for part in [field, " ", value, "\n"] {
            self.text.push_str(part);
        }
    }

    pub(super) fn hex(&mut self, field: &str, bytes: &[u8]) {
        self.line(field, &hex(bytes));
    }

    pub(super) fn finish(mut self) -> Zeroizing<String> {
        let lines = self.text.get(self.start..).unwrap_or_default();
        let checksum = checksum(lines.as_bytes());
        self.hex(CHECKSUM, &checksum);
        self.text
    }
}

/// The checksum of lines, each with its newline.
fn checksum(lines: &[u8]) -> [u8; CHECKSUM_BYTES] {
    digest(&SHA256, lines).as_ref().first_chunk().copied().unwrap_or_default()
}

fn hex(bytes: &[u8]) -> Zeroizing<String> {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('0');
    let mut text = Zeroizing::new(String::with_capacity(bytes.len().saturating_mul(2)));
    for byte in bytes {
        text.push(digit(byte >> 4));
        text.push(digit(byte & 0xf));
    }
    text
}

/// Reads a file's lines, in their order.
pub(super) struct Reader<'a> {
    lines: std::iter::Enumerate<std::str::Lines<'a>>,
    /// The lines so far, as their checksum has them.
    read: Zeroizing<String>,
    line: usize,
}

impl<'a> Reader<'a> {
    /// Begins to read a file of this kind.
    pub(super) fn new(text: &'a str, kind: &'static str) -> Result<Self, TextError> {
        if text.len() > MAX_BYTES {
            return Err(TextError::TooLong { max: MAX_BYTES });
        }
        // A line has a newline of one byte here and of two at most there.
        let read = Zeroizing::new(String::with_capacity(MAX_BYTES.saturating_add(1)));
        let mut reader = Self { lines: text.lines().enumerate(), read, line: 0 };
        let version = reader.line(kind).map_err(|_| TextError::Kind { kind })?;
        if version != VERSION.to_string() {
            let found = version.chars().take(16).collect();
            return Err(TextError::Version { found, known: VERSION });
        }
        Ok(reader)
    }

    /// The value of the next line, which has this name.
    pub(super) fn line(&mut self, field: &'static str) -> Result<&'a str, TextError> {
        let next = self.lines.find(|(_, line)| is_line(line));
        self.line = next.map_or(self.line, |(index, _)| index).saturating_add(1);
        let wrong = TextError::Line { line: self.line, field };
        let (name, value) = next.and_then(|(_, line)| line.split_once(' ')).ok_or(wrong.clone())?;
        if name != field || value.is_empty() {
            return Err(wrong);
        }
        for part in [name, " ", value, "\n"] {
            self.read.push_str(part);
        }
        Ok(value)
    }

    /// The value of the next line, as bytes.
    pub(super) fn hex<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<Zeroizing<[u8; N]>, TextError> {
        let value = self.line(field)?.as_bytes();
        let mut bytes = Zeroizing::new([0; N]);
        if value.len() != N.saturating_mul(2) {
            return Err(self.wrong(field));
        }
        for (to, pair) in bytes.iter_mut().zip(value.chunks_exact(2)) {
            let mut digits = pair.iter().map(|byte| char::from(*byte).to_digit(16));
            let byte = match (digits.next().flatten(), digits.next().flatten()) {
                (Some(high), Some(low)) => high << 4 | low,
                _ => return Err(self.wrong(field)),
            };
            *to = u8::try_from(byte).unwrap_or_default();
        }
        Ok(bytes)
    }

    /// The complaint about the value of the last line.
    pub(super) const fn wrong(&self, field: &'static str) -> TextError {
        TextError::Value { line: self.line, field }
    }

    /// Reads the checksum, behind which there is nothing.
    pub(super) fn finish(mut self) -> Result<(), TextError> {
        let wanted = checksum(self.read.as_bytes());
        // A fuzzer cannot compute it.
        if *self.hex::<CHECKSUM_BYTES>(CHECKSUM)? != wanted && !cfg!(fuzzing) {
            return Err(TextError::Checksum);
        }
        match self.lines.find(|(_, line)| is_line(line)) {
            Some((index, _)) => Err(TextError::Trailing { line: index.saturating_add(1) }),
            None => Ok(()),
        }
    }
}

/// Whether a line is neither empty nor a comment.
fn is_line(line: &str) -> bool {
    !line.is_empty() && !line.starts_with('#')
}

#[cfg(test)]
mod tests;
