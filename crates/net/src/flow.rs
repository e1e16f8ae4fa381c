//! The flow of a frame as a number, by which a port with several queues chooses one.

use crate::bytes::{array, be16, be32, byte};
use crate::head::{Head, TYPE_IPV4, TYPE_IPV6};

const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;

/// A number that all frames of a flow have in common.
pub(crate) fn flow(head: &Head) -> u32 {
    let payload = head.payload();
    let words = match head.ether_type {
        TYPE_IPV4 => ipv4(payload),
        TYPE_IPV6 => ipv6(payload),
        _ => None,
    };
    let mixed = words.unwrap_or_else(|| head.to.to_bits() ^ head.from.to_bits().rotate_left(17));
    (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

/// Addresses, and ports where every fragment has them.
fn ipv4(payload: &[u8]) -> Option<u64> {
    let addresses = u64::from(be32(payload, 12)?) << 32 | u64::from(be32(payload, 16)?);
    let is_whole = be16(payload, 6)? & 0x3fff == 0;
    let has_ports = matches!(byte(payload, 9)?, PROTOCOL_TCP | PROTOCOL_UDP);
    if !is_whole || !has_ports {
        return Some(addresses);
    }
    let header_bytes = usize::from(byte(payload, 0)? & 15).saturating_mul(4);
    Some(addresses ^ u64::from(be32(payload, header_bytes)?).rotate_left(16))
}

fn ipv6(payload: &[u8]) -> Option<u64> {
    let addresses: [u8; 32] = array(payload, 8)?;
    let (words, _) = addresses.as_chunks::<8>();
    let mixed = words.iter().fold(0_u64, |mixed, word| {
        (mixed ^ u64::from_be_bytes(*word)).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(31)
    });
    let has_ports = matches!(byte(payload, 6)?, PROTOCOL_TCP | PROTOCOL_UDP);
    let ports = if has_ports { be32(payload, 40)? } else { 0 };
    Some(mixed ^ u64::from(ports))
}
