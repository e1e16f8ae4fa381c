//! Names of stations for the engines: a link's address as a word, and back.

use std::collections::HashMap;
use std::hash::BuildHasher as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};

use sidecore_link::{EthernetAddress, LinkAddress};
use sidecore_vrio::Peer;

/// Addresses that do not fit into a word and are known at the same time. The addresses of frames
/// are not proved, so that any number of them can come.
const TABLE_ENTRIES: usize = 4096;

/// The uppermost byte of a [`Peer`] says how the others are to be read.
const KIND_SHIFT: u32 = 56;
const KIND_NUMBER: u64 = 1;
const KIND_ETHERNET: u64 = 2;
const KIND_IPV4: u64 = 3;
const KIND_TABLE: u64 = 4;
const KIND_KEPT: u64 = 5;
/// A name in the table has a hash of the network above the entry's number, which wraps.
const NUMBER_BITS: u32 = 40;
const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;

/// The names of stations.
///
/// A number, an Ethernet address, and an address and port of IPv4, are a [`Peer`] themselves. Those
/// of IPv6 are in a table of a fixed size, in which a new one takes the place of the oldest: the
/// name of that is then invalid, until its station is heard again. One address can be
/// [kept](Self::keep) outside of the table: that of a client's IOhost.
#[derive(Debug, Default)]
pub struct Peers {
    kept: Option<SocketAddrV6>,
    entries: Vec<SocketAddrV6>,
    places: HashMap<SocketAddrV6, u32>,
    /// How often a new entry has taken the place of an older one.
    replaced: u64,
}

impl Peers {
    /// The name of a station that stays valid, however many others are heard. There is one: another
    /// one takes its place.
    pub fn keep(&mut self, address: LinkAddress) -> Peer {
        if let LinkAddress::Udp(SocketAddr::V6(address)) = address {
            self.kept = Some(address);
        }
        self.name(address)
    }

    /// The machine, or the IPv6 network, that a peer is at: see
    /// [`HostOptions::station`](sidecore_vrio::HostOptions::station).
    #[must_use]
    pub const fn station(peer: Peer) -> u64 {
        match peer.0 >> KIND_SHIFT {
            KIND_IPV4 => peer.0 >> 16,
            KIND_TABLE => peer.0 >> NUMBER_BITS,
            _ => peer.0,
        }
    }

    /// Whether a name is its station's address, and so never invalid.
    #[inline]
    pub(crate) const fn is_lasting(peer: Peer) -> bool {
        matches!(peer.0 >> KIND_SHIFT, KIND_NUMBER | KIND_ETHERNET | KIND_IPV4)
    }

    /// The name of a station.
    #[inline]
    pub fn name(&mut self, address: LinkAddress) -> Peer {
        let (kind, rest) = match address {
            LinkAddress::Peer(number) => (KIND_NUMBER, number.into()),
            LinkAddress::Ethernet(EthernetAddress(bytes)) => (KIND_ETHERNET, word(&bytes)),
            LinkAddress::Udp(SocketAddr::V4(address)) => {
                let host = u64::from(u32::from(*address.ip()));
                (KIND_IPV4, (host << 16) | u64::from(address.port()))
            }
            LinkAddress::Udp(SocketAddr::V6(address)) if self.kept == Some(address) => {
                (KIND_KEPT, 0)
            }
            LinkAddress::Udp(SocketAddr::V6(address)) => {
                (KIND_TABLE, self.network(&address) << NUMBER_BITS | self.place(address))
            }
        };
        Peer((kind << KIND_SHIFT) | rest)
    }

    /// The station of a name; `None` if the name has become invalid.
    #[inline]
    #[must_use]
    pub fn address(&self, peer: Peer) -> Option<LinkAddress> {
        let rest = peer.0 & ((1 << KIND_SHIFT) - 1);
        match peer.0 >> KIND_SHIFT {
            KIND_NUMBER => u32::try_from(rest).ok().map(LinkAddress::Peer),
            KIND_ETHERNET => {
                let [_, _, bytes @ ..] = rest.to_be_bytes();
                Some(LinkAddress::Ethernet(EthernetAddress(bytes)))
            }
            KIND_IPV4 => {
                let [_, _, a, b, c, d, high, low] = rest.to_be_bytes();
                let host = IpAddr::V4(Ipv4Addr::new(a, b, c, d));
                let port = u16::from_be_bytes([high, low]);
                Some(LinkAddress::Udp(SocketAddr::new(host, port)))
            }
            KIND_TABLE => {
                self.entry(rest & NUMBER_MASK).map(|entry| LinkAddress::Udp(SocketAddr::V6(entry)))
            }
            KIND_KEPT if rest == 0 => self.kept.map(|kept| LinkAddress::Udp(SocketAddr::V6(kept))),
            _ => None,
        }
    }

    /// An entry by its number: those before the last [`TABLE_ENTRIES`] are gone.
    fn entry(&self, number: u64) -> Option<SocketAddrV6> {
        let age = number.wrapping_sub(self.replaced) & NUMBER_MASK;
        if age >= self.entries.len() as u64 {
            return None;
        }
        self.entries.get(usize::try_from(number.checked_rem(TABLE_ENTRIES as u64)?).ok()?).copied()
    }

    /// A hash of the first half of an address, which is a network's: any station of that can have
    /// the other half. Its key is random, so that no station can choose the hash of another.
    fn network(&self, address: &SocketAddrV6) -> u64 {
        let network = u128::from(*address.ip()) >> 64;
        self.places.hasher().hash_one(network) & 0xffff
    }

    /// The number of an address in the table: its place, and how often the table was filled.
    #[cold]
    fn place(&mut self, address: SocketAddrV6) -> u64 {
        if let Some(place) = self.places.get(&address) {
            return self.number_at(*place) & NUMBER_MASK;
        }
        if self.entries.capacity() == 0 {
            // Twice the size, so that removed entries never make it grow.
            self.entries.reserve_exact(TABLE_ENTRIES);
            self.places.reserve(2 * TABLE_ENTRIES);
        }
        let number = self.replaced.saturating_add(self.entries.len() as u64);
        if self.entries.len() < TABLE_ENTRIES {
            self.entries.push(address);
        } else {
            let place = self.replaced.checked_rem(TABLE_ENTRIES as u64).unwrap_or(0);
            if let Some(entry) = usize::try_from(place).ok().and_then(|at| self.entries.get_mut(at))
            {
                self.places.remove(entry);
                *entry = address;
            }
            self.replaced = self.replaced.saturating_add(1);
        }
        let place = number.checked_rem(TABLE_ENTRIES as u64).unwrap_or(0);
        self.places.insert(address, u32::try_from(place).unwrap_or(0));
        number & NUMBER_MASK
    }

    fn number_at(&self, place: u32) -> u64 {
        let (place, size) = (u64::from(place), TABLE_ENTRIES as u64);
        let base = self.replaced.saturating_sub(self.replaced.checked_rem(size).unwrap_or(0));
        let number = base.saturating_add(place);
        if number < self.replaced { number.saturating_add(size) } else { number }
    }
}

fn word(bytes: &[u8; 6]) -> u64 {
    bytes.iter().fold(0, |word, byte| (word << 8) | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ipv6(host: u32) -> LinkAddress {
        LinkAddress::Udp(
            format!("[2001:db8::{:x}:{:x}]:7", host >> 16, host & 0xffff).parse().unwrap(),
        )
    }

    #[test]
    fn every_address_comes_back_from_its_name() {
        let mut peers = Peers::default();
        let scoped = SocketAddrV6::new("fe80::1".parse().unwrap(), 34997, 0, 3);
        let addresses = [
            LinkAddress::Peer(0),
            LinkAddress::Peer(u32::MAX),
            LinkAddress::Ethernet(EthernetAddress([0xff, 2, 3, 4, 5, 0xfe])),
            LinkAddress::Udp("255.1.2.3:34997".parse().unwrap()),
            ipv6(1),
            LinkAddress::Udp(SocketAddr::V6(scoped)),
        ];
        let names = addresses.map(|address| peers.name(address));
        assert_eq!(names.map(|name| peers.address(name)), addresses.map(Some));
        assert_eq!(addresses.map(|address| peers.name(address)), names, "a station has one name");
        let long = Peer((KIND_NUMBER << KIND_SHIFT) | 1 << 32);
        let unknown = [KIND_TABLE, KIND_KEPT].map(|kind| Peer((kind << KIND_SHIFT) | 2));
        for wrong in [Peer(0), Peer(u64::MAX), long, unknown[0], unknown[1]] {
            assert_eq!(peers.address(wrong), None);
        }
    }

    #[test]
    fn a_kept_name_outlives_any_flood() {
        let mut peers = Peers::default();
        let iohost = peers.keep(ipv6(0));
        for host in 1..3 * TABLE_ENTRIES as u32 {
            peers.name(ipv6(host));
        }
        assert_eq!((peers.address(iohost), peers.name(ipv6(0))), (Some(ipv6(0)), iohost));
        let other = Peers::default();
        assert_eq!(other.address(iohost), None);
        let ethernet = LinkAddress::Ethernet(EthernetAddress([2; 6]));
        let name = peers.keep(ethernet);
        assert_eq!((name, peers.address(name)), (peers.name(ethernet), Some(ethernet)));
        assert_eq!(peers.address(iohost), Some(ipv6(0)));
    }

    #[test]
    fn the_ports_of_a_machine_are_one_station() {
        let mut peers = Peers::default();
        let mut station =
            |text: &str| Peers::station(peers.name(LinkAddress::Udp(text.parse().unwrap())));
        assert_eq!(station("10.0.0.1:1"), station("10.0.0.1:65535"));
        assert_ne!(station("10.0.0.1:1"), station("10.0.0.2:1"));
        assert_eq!(station("[2001:db8::1]:1"), station("[2001:db8::2]:9"), "one network");
        let networks: Vec<u64> =
            (0..8).map(|network| station(&format!("[2001:db8:0:{network}::1]:1"))).collect();
        assert!(networks.iter().any(|other| *other != networks[0]));
        let ethernet = |last| LinkAddress::Ethernet(EthernetAddress([2, 0, 0, 0, 0, last]));
        let stations = [ethernet(1), ethernet(2), LinkAddress::Peer(1), LinkAddress::Peer(2)]
            .map(|address| Peers::station(peers.name(address)));
        assert!((0..4).all(|one| (0..one).all(|other| stations[one] != stations[other])));
    }

    #[test]
    fn a_flood_of_forged_addresses_takes_the_names_of_the_oldest_and_no_more_memory() {
        let mut peers = Peers::default();
        let first = peers.name(ipv6(0));
        let count = 3 * TABLE_ENTRIES as u32 + 5;
        let names: Vec<Peer> = (1..count).map(|host| peers.name(ipv6(host))).collect();
        assert_eq!(peers.address(first), None);
        let (capacity, table) = (peers.places.capacity(), peers.entries.capacity());
        assert_eq!((table, peers.places.len()), (TABLE_ENTRIES, TABLE_ENTRIES));
        for (host, name) in (1..count).zip(&names) {
            let is_kept = host > count - 1 - TABLE_ENTRIES as u32;
            assert_eq!(peers.address(*name), is_kept.then(|| ipv6(host)), "{host}");
            if is_kept {
                assert_eq!(peers.name(ipv6(host)), *name);
            }
        }
        let again = peers.name(ipv6(0));
        assert_ne!(again, first, "an invalid name is not given to another station");
        assert_eq!(peers.address(again), Some(ipv6(0)));
        assert_eq!(peers.places.capacity(), capacity);
    }
}
