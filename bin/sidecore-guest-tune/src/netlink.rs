//! Generic netlink: messages as bytes (`linux/netlink.h`, `linux/genetlink.h`). Pure code.

/// The message is a request.
pub(crate) const REQUEST: u16 = 0x1;
/// The kernel confirms the request.
pub(crate) const ACK: u16 = 0x4;
/// The kernel lists all objects.
pub(crate) const DUMP: u16 = 0x300;

/// A message with an error number, which is 0 in a confirmation.
const ERROR: u16 = 2;
/// The end of a list.
const DONE: u16 = 3;
/// The length of a netlink header.
const HEADER: usize = 16;
/// The length of a generic netlink header.
const GENERIC: usize = 4;
/// The bits of an attribute's type that are flags (nested, byte order).
const TYPE_FLAGS: u16 = 0xc000;

/// A request: a command of a family, with attributes.
pub(crate) struct Request {
    /// The number of the family.
    pub(crate) family: u16,
    pub(crate) flags: u16,
    pub(crate) sequence: u32,
    pub(crate) command: u8,
    pub(crate) attributes: Vec<(u16, Vec<u8>)>,
}

impl Request {
    /// The bytes of the request, in the byte order of this machine.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = vec![self.command, 1, 0, 0];
        for (kind, value) in &self.attributes {
            let length = u16::try_from(value.len().saturating_add(4)).unwrap_or(u16::MAX);
            body.extend(length.to_ne_bytes());
            body.extend(kind.to_ne_bytes());
            body.extend(value);
            body.resize(aligned(body.len()), 0);
        }
        let length = u32::try_from(body.len().saturating_add(HEADER)).unwrap_or(u32::MAX);
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(self.family.to_ne_bytes());
        bytes.extend(self.flags.to_ne_bytes());
        bytes.extend(self.sequence.to_ne_bytes());
        // The kernel fills the number of the socket in.
        bytes.extend([0; 4]);
        bytes.extend(body);
        bytes
    }
}

/// A message of the kernel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The request was carried out.
    Confirmed,
    /// The request was refused, with this error number.
    Refused(i32),
    /// The list has ended.
    Done,
    /// An object.
    Object(Attributes),
}

/// Attributes, by their types.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes(Vec<(u16, Vec<u8>)>);

impl Attributes {
    fn parse(mut bytes: &[u8]) -> Option<Attributes> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            let length = usize::from(u16_at(bytes, 0)?);
            let kind = u16_at(bytes, 2)? & !TYPE_FLAGS;
            found.push((kind, bytes.get(4..length)?.to_vec()));
            // The last attribute may lack its padding.
            bytes = bytes.get(aligned(length)..).unwrap_or_default();
        }
        Some(Attributes(found))
    }

    /// An unsigned number of 2, 4 or 8 bytes.
    pub(crate) fn number(&self, kind: u16) -> Option<u64> {
        let (_, value) = self.0.iter().find(|(found, _)| *found == kind)?;
        match *value.as_slice() {
            [a, b] => Some(u16::from_ne_bytes([a, b]).into()),
            [a, b, c, d] => Some(u32::from_ne_bytes([a, b, c, d]).into()),
            [a, b, c, d, e, f, g, h] => Some(u64::from_ne_bytes([a, b, c, d, e, f, g, h])),
            _ => None,
        }
    }
}

/// The messages of a datagram that answer the request with this sequence number. `None` if the
/// datagram is malformed.
pub(crate) fn replies(mut bytes: &[u8], sequence: u32) -> Option<Vec<Reply>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let length = usize::try_from(u32_at(bytes, 0)?).ok()?;
        let body = bytes.get(HEADER..length)?;
        if u32_at(bytes, 8)? == sequence {
            found.push(match u16_at(bytes, 4)? {
                DONE => Reply::Done,
                ERROR => match i32::from_ne_bytes(u32_at(body, 0)?.to_ne_bytes()) {
                    0 => Reply::Confirmed,
                    number => Reply::Refused(number.checked_neg()?),
                },
                _ => Reply::Object(Attributes::parse(body.get(GENERIC..)?)?),
            });
        }
        bytes = bytes.get(aligned(length)..).unwrap_or_default();
    }
    Some(found)
}

/// The length with padding: messages and attributes begin at multiples of four.
fn aligned(length: usize) -> usize {
    length.checked_next_multiple_of(4).unwrap_or(usize::MAX)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().copied().map(u16::from_ne_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(attributes: Vec<(u16, Vec<u8>)>) -> Request {
        Request { family: 0x10, flags: REQUEST | ACK, sequence: 7, command: 3, attributes }
    }

    #[test]
    fn a_request_has_the_lengths_and_the_padding_of_the_kernel() {
        let bytes = request(vec![(2, b"netdev\0".to_vec()), (1, vec![5, 0, 0, 0])]).encode();
        assert_eq!(bytes.len(), 40);
        assert_eq!(u32_at(&bytes, 0), Some(40));
        assert_eq!((u16_at(&bytes, 4), u16_at(&bytes, 6)), (Some(0x10), Some(5)));
        assert_eq!(u32_at(&bytes, 8), Some(7));
        assert_eq!(bytes[16..20], [3, 1, 0, 0]);
        assert_eq!((u16_at(&bytes, 20), u16_at(&bytes, 22)), (Some(11), Some(2)));
        assert_eq!(&bytes[24..32], b"netdev\0\0");
        assert_eq!((u16_at(&bytes, 32), u16_at(&bytes, 34)), (Some(8), Some(1)));
    }

    #[test]
    fn objects_confirmations_errors_and_ends_are_told_apart() {
        let object = request(vec![(2, vec![1, 0, 0, 0]), (0x8003, vec![2; 8])]).encode();
        let with = |kind: u16, number: i32| {
            let mut bytes = request(Vec::new()).encode();
            bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
            bytes[16..20].copy_from_slice(&number.to_ne_bytes());
            bytes
        };
        let bytes = [object, with(ERROR, 0), with(ERROR, -95), with(DONE, 0)].concat();
        let found = replies(&bytes, 7).unwrap();
        let Reply::Object(attributes) = &found[0] else { panic!("{found:?}") };
        assert_eq!(attributes.number(2), Some(1));
        assert_eq!(attributes.number(3), Some(0x0202_0202_0202_0202));
        assert_eq!(attributes.number(4), None);
        assert_eq!(found[1..], [Reply::Confirmed, Reply::Refused(95), Reply::Done]);
        assert_eq!(replies(&bytes, 8), Some(Vec::new()), "an answer to another request");
    }

    #[test]
    fn a_malformed_datagram_is_refused_wherever_it_ends() {
        let bytes = request(vec![(2, vec![1, 0, 0, 0])]).encode();
        for length in 1..bytes.len() {
            assert_eq!(replies(&bytes[..length], 7), None, "{length} bytes");
        }
        for (at, value) in [(0, 3), (20, 3), (20, 200)] {
            let mut bad = bytes.clone();
            bad[at] = value;
            assert_eq!(replies(&bad, 7), None, "{value} at {at}");
        }
    }
}
