//! Messages of the command: lines of `KEY=value`, see `sd_notify(3)`.

/// The longest name of a descriptor, in bytes, as for systemd.
const NAME_MAX: usize = 255;

/// The known lines of a message.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Message {
    /// `READY=1`
    pub(super) ready: bool,
    /// `FDSTORE=1`
    pub(super) store: bool,
    /// `FDSTOREREMOVE=1`
    pub(super) remove: bool,
    /// The first `FDNAME=`; `None` if its value is no valid name.
    pub(super) name: Option<String>,
}

impl Message {
    /// Parses the known lines, and ignores all others.
    pub(super) fn parse(bytes: &[u8]) -> Self {
        let mut message = Self::default();
        let mut name = None;
        for line in bytes.split(|byte| *byte == b'\n') {
            match line {
                b"READY=1" => message.ready = true,
                b"FDSTORE=1" => message.store = true,
                b"FDSTOREREMOVE=1" => message.remove = true,
                _ => name = name.or_else(|| line.strip_prefix(b"FDNAME=")),
            }
        }
        message.name = name
            .filter(|name| is_name(name))
            .and_then(|name| String::from_utf8(name.to_vec()).ok());
        message
    }
}

/// Whether a descriptor can have this name. The colon separates names.
fn is_name(name: &[u8]) -> bool {
    let printable = name.iter().all(|byte| (b' '..=b'~').contains(byte) && *byte != b':');
    !name.is_empty() && name.len() <= NAME_MAX && printable
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(bytes: &[u8]) -> Option<String> {
        Message::parse(&[b"FDNAME=", bytes].concat()).name
    }

    #[test]
    fn known_lines_count_in_any_order_and_others_are_ignored() {
        let message = Message::parse(b"STATUS=fine\nFDNAME=nvme.disk0\nFDPOLL=0\nFDSTORE=1\n");
        assert_eq!(
            message,
            Message { store: true, name: Some("nvme.disk0".to_owned()), ..Message::default() }
        );
        assert!(Message::parse(b"READY=1").ready);
        assert!(Message::parse(b"FDSTOREREMOVE=1\nFDNAME=a").remove);
    }

    #[test]
    fn nonsense_is_ignored() {
        for bytes in [
            &b""[..],
            b"\n\n\n",
            b"READY=10",
            b"READY",
            b"xFDSTORE=1",
            b"FDSTORE=1\0",
            &[0xff; 4096],
        ] {
            assert_eq!(Message::parse(bytes), Message::default(), "{bytes:?}");
        }
    }

    #[test]
    fn names_are_printable_short_and_without_colons() {
        assert_eq!(name(&[b'x'; NAME_MAX]).unwrap().len(), NAME_MAX);
        assert_eq!(name(b"a b~!").unwrap(), "a b~!");
        for bytes in [&b""[..], b"a:b", b"a\tb", b"\x7f", "ä".as_bytes(), &[b'x'; NAME_MAX + 1]] {
            assert_eq!(name(bytes), None, "{bytes:?}");
        }
    }

    #[test]
    fn of_several_names_the_first_counts_even_if_it_is_invalid() {
        assert_eq!(name(b"a\nFDNAME=b").unwrap(), "a");
        assert_eq!(name(b"a:a\nFDNAME=b"), None);
    }
}
