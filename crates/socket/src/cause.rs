//! The kind of an error, for the limits of the log.

use std::fmt::{self, Write as _};

/// Longer than any chain of names.
const MAX_BYTES: usize = 96;

/// Returns the kind of an error: the names of its variants, outermost first, for instance
/// `Message.Oversized`. Numbers and text are left out, so that a peer cannot create an unlimited
/// number of kinds.
#[must_use]
pub fn cause(error: &impl fmt::Debug) -> String {
    let mut names = Names(String::new());
    // The first character that is not part of a name ends the output with an error.
    let _ = write!(names, "{error:?}");
    names.0.truncate(names.0.trim_end_matches('.').len());
    names.0
}

struct Names(String);

impl fmt::Write for Names {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            match character {
                _ if self.0.len() >= MAX_BYTES => return Err(fmt::Error),
                '(' => self.0.push('.'),
                'A'..='Z' | 'a'..='z' => self.0.push(character),
                _ => return Err(fmt::Error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    #[allow(dead_code)]
    enum Inner {
        Closed,
        Oversized { bytes: u32 },
        Version(u32),
        Said(String),
    }

    #[derive(Debug)]
    #[allow(dead_code)]
    enum Outer {
        Message(Inner),
        Kernel(std::io::Error),
    }

    #[test]
    fn a_cause_is_the_names_of_the_variants_alone() {
        assert_eq!(cause(&Outer::Message(Inner::Closed)), "Message.Closed");
        assert_eq!(cause(&Outer::Message(Inner::Oversized { bytes: 7 })), "Message.Oversized");
        assert_eq!(cause(&Outer::Message(Inner::Version(7))), "Message.Version");
        assert_eq!(cause(&Outer::Message(Inner::Said("Names".to_owned()))), "Message.Said");
        assert_eq!(cause(&Outer::Kernel(std::io::Error::from_raw_os_error(5))), "Kernel.Os");
        assert!(cause(&"x".repeat(1000)).is_empty());
    }
}
