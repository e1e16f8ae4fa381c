//! The kept descriptors.

use std::io;
use std::os::fd::OwnedFd;

/// The name of a descriptor that was sent without one, as in systemd.
const UNNAMED: &str = "stored";

/// The limit for all names together: they must fit into one variable of the environment, which
/// takes 128 KiB.
const NAMES_BYTES: usize = 120 << 10;

/// Descriptors with names, in the order of their arrival. Several may have the same name.
#[derive(Debug)]
pub(super) struct Kept {
    max: usize,
    list: Vec<(String, OwnedFd)>,
}

impl Kept {
    pub(super) fn new(max: usize) -> Self {
        Self { max, list: Vec::new() }
    }

    /// Keeps a descriptor, or closes it and returns the reason.
    pub(super) fn add(&mut self, name: Option<&str>, fd: OwnedFd) -> Result<(), &'static str> {
        let name = name.unwrap_or(UNNAMED).to_owned();
        if self.list.len() >= self.max {
            return Err("the limit of --max is reached");
        }
        if self.names().len() + 1 + name.len() > NAMES_BYTES {
            return Err("all names together are too long");
        }
        self.list.push((name, fd));
        Ok(())
    }

    /// Closes all descriptors of this name.
    pub(super) fn remove(&mut self, name: &str) {
        self.list.retain(|(other, _)| other != name);
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn max(&self) -> usize {
        self.max
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The value of `$LISTEN_FDNAMES`.
    pub(super) fn names(&self) -> String {
        self.list.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(":")
    }

    /// Copies all descriptors, in the order of the names, to the lowest free numbers.
    pub(super) fn copies(&self) -> io::Result<Vec<OwnedFd>> {
        self.list.iter().map(|(_, fd)| fd.try_clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fd() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    #[test]
    fn a_name_may_stand_for_several_descriptors_and_removes_all() {
        let mut kept = Kept::new(10);
        for name in [Some("a"), Some("b"), None, Some("a")] {
            kept.add(name, fd()).unwrap();
        }
        assert_eq!((kept.names().as_str(), kept.copies().unwrap().len()), ("a:b:stored:a", 4));
        kept.remove("a");
        kept.remove("c");
        assert_eq!(kept.names(), "b:stored");
    }

    #[test]
    fn more_than_the_limit_is_refused_until_there_is_room() {
        let mut kept = Kept::new(2);
        kept.add(Some("a"), fd()).unwrap();
        kept.add(Some("b"), fd()).unwrap();
        assert!(kept.add(Some("c"), fd()).is_err());
        kept.remove("a");
        kept.add(Some("c"), fd()).unwrap();
        assert_eq!((kept.names().as_str(), kept.len()), ("b:c", 2));
    }

    #[test]
    fn names_fit_into_a_variable() {
        let (mut kept, name) = (Kept::new(1024), "x".repeat(255));
        let taken = (0..1024).take_while(|_| kept.add(Some(&name), fd()).is_ok()).count();
        assert!(taken < 1024 && kept.names().len() <= NAMES_BYTES, "{taken}");
    }
}
