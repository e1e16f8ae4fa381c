//! Access to a socket: users and groups, from names to numbers.

use std::io;

use sidecore_linux::{group_id, user_id};
use sidecore_peer::Access;

use crate::spec::SocketAccess;

/// Why the owner or group of a socket cannot be determined.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccountError {
    /// The machine has no such user or group.
    #[error(
        "there is no {kind} \"{name}\" on this machine; make it, or give another name or a number"
    )]
    Unknown {
        /// `user` or `group`.
        kind: &'static str,
        /// The name or number from the configuration.
        name: String,
    },
    /// The name service cannot be reached.
    #[error("the {kind} \"{name}\" cannot be looked up: {error}; give its number instead")]
    Unavailable {
        /// `user` or `group`.
        kind: &'static str,
        /// The name from the configuration.
        name: String,
        /// The error of the name service.
        error: io::Error,
    },
}

impl SocketAccess {
    /// Looks the names up on this machine. The name service may take a while to answer.
    ///
    /// # Errors
    /// See [`AccountError`].
    pub fn resolve(&self) -> Result<Access, AccountError> {
        let owner = self.owner.as_deref().map(|name| number("user", name, user_id)).transpose()?;
        let group =
            self.group.as_deref().map(|name| number("group", name, group_id)).transpose()?;
        let usual = if group.is_some() { Access::WITH_GROUP } else { Access::OWNER_ONLY };
        Ok(Access { owner, group, mode: self.mode.unwrap_or(usual) })
    }
}

/// Looks a name up; digits are a number, as in chown(1). The largest number is refused: in chown(2)
/// it means no change.
fn number(
    kind: &'static str,
    name: &str,
    look_up: impl Fn(&str) -> io::Result<Option<u32>>,
) -> Result<u32, AccountError> {
    let unknown = || AccountError::Unknown { kind, name: name.to_owned() };
    if name.starts_with(|c: char| c.is_ascii_digit()) {
        return name.parse().ok().filter(|number| *number != u32::MAX).ok_or_else(unknown);
    }
    match look_up(name) {
        Ok(number) => number.ok_or_else(unknown),
        Err(error) => Err(AccountError::Unavailable { kind, name: name.to_owned(), error }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(owner: Option<&str>, group: Option<&str>, mode: Option<u32>) -> SocketAccess {
        SocketAccess { owner: owner.map(str::to_owned), group: group.map(str::to_owned), mode }
    }

    #[test]
    fn names_and_numbers_are_understood_and_a_group_may_connect() {
        assert_eq!(SocketAccess::default().resolve().unwrap(), Access::default());
        let named = access(Some("root"), Some("root"), None).resolve().unwrap();
        assert_eq!(named, Access { owner: Some(0), group: Some(0), mode: 0o660 });
        let numbered = access(Some("64055"), None, None).resolve().unwrap();
        assert_eq!(numbered, Access { owner: Some(64055), group: None, mode: 0o600 });
        assert_eq!(access(None, Some("0"), Some(0o666)).resolve().unwrap().mode, 0o666);
    }

    #[test]
    fn an_unknown_account_is_named() {
        for (access, words) in [
            (access(Some("no-such-account"), None, None), "no user \"no-such-account\""),
            (access(None, Some("no-such-account"), None), "no group \"no-such-account\""),
            (access(Some("4294967295"), None, None), "no user \"4294967295\""),
            (access(Some("1x"), None, None), "no user \"1x\""),
            (access(Some(""), None, None), "no user \"\""),
        ] {
            let error = access.resolve().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
