//! The addresses that a station claims in its frames, checked against its own.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::bytes::{array, be16, byte};
use crate::head::{Head, TYPE_ARP, TYPE_IPV4, TYPE_IPV6, TYPE_RARP};
use crate::{DropReason, Guard, MacAddress};

/// IPv6 extension headers that a chain may have before the last one.
const EXTENSIONS_MAX: usize = 6;
const IPV6_BYTES: usize = 40;

const PROTOCOL_UDP: u8 = 17;
const NEXT_HOP_BY_HOP: u8 = 0;
const NEXT_ROUTING: u8 = 43;
const NEXT_FRAGMENT: u8 = 44;
const NEXT_AUTHENTICATION: u8 = 51;
const NEXT_ICMPV6: u8 = 58;
const NEXT_DESTINATION: u8 = 60;

const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;

/// Options of neighbour discovery that name the sender's Ethernet address (RFC 4861, 4.6.1).
const SOURCE_ADDRESS: u8 = 1;
const TARGET_ADDRESS: u8 = 2;

/// Checks the addresses that the frame claims.
///
/// # Errors
/// One of them is not the station's.
pub(crate) fn check(guard: &Guard, head: &Head) -> Result<(), DropReason> {
    if head.from != guard.mac {
        return Err(DropReason::SpoofedMac);
    }
    check_payload(guard, head.ether_type, head.payload())
}

/// As [`check`], for a frame whose source address is known to be the station's.
///
/// # Errors
/// As [`check`].
#[inline]
pub(crate) fn check_payload(
    guard: &Guard,
    ether_type: u16,
    payload: &[u8],
) -> Result<(), DropReason> {
    match ether_type {
        TYPE_IPV4 => check_ipv4(guard, payload).ok_or(DropReason::SpoofedIpv4),
        TYPE_ARP | TYPE_RARP => check_arp(guard, payload).ok_or(DropReason::SpoofedArp),
        TYPE_IPV6 => check_ipv6(guard, payload),
        _ => Ok(()),
    }
}

/// Whether the station may use this address.
fn has_ipv4(guard: &Guard, address: Ipv4Addr) -> bool {
    guard.ipv4.as_ref().is_none_or(|own| own.contains(&address))
}

/// Whether the station may use this address.
fn has_ipv6(guard: &Guard, address: Ipv6Addr) -> bool {
    guard.ipv6.as_ref().is_none_or(|own| {
        address == guard.mac.link_local()
            || own.iter().any(|(network, bits)| {
                let shift = 128_u32.saturating_sub((*bits).into());
                let differ = u128::from(address) ^ u128::from(*network);
                differ.checked_shr(shift).unwrap_or(0) == 0
            })
    })
}

fn check_ipv4(guard: &Guard, payload: &[u8]) -> Option<()> {
    if guard.ipv4.is_none() {
        return Some(());
    }
    if byte(payload, 0)? >> 4 != 4 {
        return None;
    }
    let source = Ipv4Addr::from(array::<4>(payload, 12)?);
    if has_ipv4(guard, source) {
        return Some(());
    }
    // A DHCP client without an address yet (RFC 2131, 4.1).
    let header_bytes = usize::from(byte(payload, 0)? & 15).saturating_mul(4);
    let is_first = be16(payload, 6)? & 0x1fff == 0;
    let is_dhcp = byte(payload, 9)? == PROTOCOL_UDP
        && is_first
        && be16(payload, header_bytes)? == 68
        && be16(payload, header_bytes.saturating_add(2))? == 67;
    (source.is_unspecified() && is_dhcp).then_some(())
}

/// ARP for IPv4 over Ethernet, and RARP, which have one format (RFC 826, RFC 903).
fn check_arp(guard: &Guard, payload: &[u8]) -> Option<()> {
    let is_ethernet = array::<6>(payload, 0)? == [0, 1, 8, 0, 6, 4];
    let sender = MacAddress(array(payload, 8)?);
    let address = Ipv4Addr::from(array::<4>(payload, 14)?);
    // A probe for an address that is not the station's yet has none (RFC 5227).
    let has_address = address.is_unspecified() || has_ipv4(guard, address);
    (is_ethernet && sender == guard.mac && has_address).then_some(())
}

fn check_ipv6(guard: &Guard, payload: &[u8]) -> Result<(), DropReason> {
    let spoofed = DropReason::SpoofedIpv6;
    if byte(payload, 0).ok_or(spoofed)? >> 4 != 6 {
        return Err(spoofed);
    }
    let source = Ipv6Addr::from(array::<16>(payload, 8).ok_or(spoofed)?);
    let Some((next, at)) = last_header(payload) else {
        return Err(spoofed);
    };
    let icmp = (next == NEXT_ICMPV6).then(|| payload.get(at..).unwrap_or(&[]));
    let kind = icmp.map(|icmp| byte(icmp, 0).ok_or(spoofed)).transpose()?;
    if let (Some(icmp), Some(kind)) = (icmp, kind) {
        check_discovery(guard, source, kind, icmp).ok_or(DropReason::SpoofedNd)?;
    }
    // Without an address yet: duplicate address detection, and the report of its group.
    if source.is_unspecified() && kind.is_some() || has_ipv6(guard, source) {
        Ok(())
    } else {
        Err(spoofed)
    }
}

/// The last header's type and place, behind the extension headers; `None` if the frame's head does
/// not show it. Of a later fragment, that is the fragment header, whose receiver ignores neighbour
/// discovery in it (RFC 6980).
pub(crate) fn last_header(payload: &[u8]) -> Option<(u8, usize)> {
    let (mut next, mut at) = (byte(payload, 6)?, IPV6_BYTES);
    for _ in 0..EXTENSIONS_MAX {
        let units = byte(payload, at.saturating_add(1));
        let len_bytes = match next {
            NEXT_HOP_BY_HOP | NEXT_ROUTING | NEXT_DESTINATION => {
                usize::from(units?).saturating_add(1).saturating_mul(8)
            }
            NEXT_AUTHENTICATION => usize::from(units?).saturating_add(2).saturating_mul(4),
            NEXT_FRAGMENT => {
                let is_first = be16(payload, at.saturating_add(2))? >> 3 == 0;
                if !is_first {
                    return Some((next, at));
                }
                8
            }
            _ => return Some((next, at)),
        };
        next = byte(payload, at)?;
        at = at.saturating_add(len_bytes);
    }
    None
}

/// The claims of a message of neighbour discovery (RFC 4861, 4).
fn check_discovery(guard: &Guard, source: Ipv6Addr, kind: u8, icmp: &[u8]) -> Option<()> {
    let options_at = match kind {
        ROUTER_SOLICITATION => 8,
        ROUTER_ADVERTISEMENT => 16,
        NEIGHBOUR_SOLICITATION => 24,
        NEIGHBOUR_ADVERTISEMENT => {
            let target = Ipv6Addr::from(array::<16>(icmp, 8)?);
            if !has_ipv6(guard, target) {
                return None;
            }
            24
        }
        REDIRECT => 40,
        _ => return Some(()),
    };
    let is_router = matches!(kind, ROUTER_ADVERTISEMENT | REDIRECT);
    if is_router && !guard.router {
        return None;
    }
    let mut at = options_at;
    // Every option has 8 bytes or more, and the head fewer than 256.
    while at < icmp.len() {
        let len_bytes = usize::from(byte(icmp, at.saturating_add(1))?).saturating_mul(8);
        if len_bytes == 0 {
            return None;
        }
        let names_sender = match byte(icmp, at)? {
            // A message without a source has no such option.
            SOURCE_ADDRESS => !source.is_unspecified(),
            TARGET_ADDRESS => kind == NEIGHBOUR_ADVERTISEMENT,
            _ => false,
        };
        let is_own = MacAddress(array(icmp, at.saturating_add(2))?) == guard.mac;
        if names_sender && !is_own {
            return None;
        }
        at = at.saturating_add(len_bytes);
    }
    Some(())
}
