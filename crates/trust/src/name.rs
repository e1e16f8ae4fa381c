//! Names of clients.

use std::fmt;
use std::str::FromStr;

use crate::error::KeyError;

/// The name of a client: 1 to 16 letters, digits, `-`, `_` and `.`. On the wire zeros follow it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientName([u8; Self::MAX_BYTES]);

impl ClientName {
    /// The longest name.
    pub const MAX_BYTES: usize = 16;

    /// The name as it is on the wire.
    #[must_use]
    pub const fn to_wire(self) -> [u8; Self::MAX_BYTES] {
        self.0
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let name = self.0.split(|byte| *byte == 0).next().unwrap_or_default();
        str::from_utf8(name).unwrap_or_default()
    }
}

impl FromStr for ClientName {
    type Err = KeyError;

    fn from_str(name: &str) -> Result<Self, KeyError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        let mut wire = [0; Self::MAX_BYTES];
        if name.is_empty() || name.len() > Self::MAX_BYTES || !name.bytes().all(allowed) {
            return Err(KeyError::Name { name: name.escape_debug().take(64).collect() });
        }
        wire.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
        Ok(Self(wire))
    }
}

impl fmt::Display for ClientName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for ClientName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_padded_on_the_wire_and_text_elsewhere() {
        let name: ClientName = "vm-host_1.a".parse().unwrap();
        assert_eq!(name.to_wire(), *b"vm-host_1.a\0\0\0\0\0");
        assert_eq!(format!("{name} {name:?}"), "vm-host_1.a \"vm-host_1.a\"");
        let longest: ClientName = "0123456789abcdef".parse().unwrap();
        assert_eq!(longest.as_str(), "0123456789abcdef");
    }

    #[test]
    fn other_names_are_refused_with_the_rule() {
        for name in ["", "0123456789abcdefg", "a/b", "a b", "ü", "a\0"] {
            let error = ClientName::from_str(name).unwrap_err().to_string();
            assert!(error.contains("1 to 16 letters"), "{name:?}: {error}");
        }
    }
}
