//! Where a frame comes from and goes to.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

/// The address of a station of an Ethernet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EthernetAddress(pub [u8; 6]);

impl EthernetAddress {
    /// All stations.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// Whether it names several stations.
    #[must_use]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }
}

impl fmt::Display for EthernetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The text is no Ethernet address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no Ethernet address: write six pairs of hexadecimal digits, as in 02:00:00:00:00:01"
)]
pub struct NotAnAddress(String);

impl FromStr for EthernetAddress {
    type Err = NotAnAddress;

    fn from_str(text: &str) -> Result<Self, NotAnAddress> {
        let wrong = || NotAnAddress(text.to_owned());
        let mut address = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut address {
            let part = parts.next().filter(|part| {
                part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit())
            });
            *byte = u8::from_str_radix(part.ok_or_else(wrong)?, 16).map_err(|_| wrong())?;
        }
        if parts.next().is_some() {
            return Err(wrong());
        }
        Ok(Self(address))
    }
}

/// The other end of a frame's way, in the terms of the link's medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkAddress {
    /// A station of the Ethernet that the link is attached to.
    Ethernet(EthernetAddress),
    /// A UDP port of a host.
    Udp(SocketAddr),
    /// A peer of a link through memory, by a number of the link's choice; 0 for the IOhost. A peer
    /// that comes back has another number.
    Peer(u32),
}

impl fmt::Display for LinkAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ethernet(address) => address.fmt(f),
            Self::Udp(address) => address.fmt(f),
            Self::Peer(number) => write!(f, "peer {number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ethernet_address_is_six_pairs_of_digits() {
        let address: EthernetAddress = "02:00:5e:10:00:ff".parse().unwrap();
        assert_eq!(address, EthernetAddress([2, 0, 0x5e, 0x10, 0, 0xff]));
        assert_eq!(LinkAddress::Ethernet(address).to_string(), "02:00:5e:10:00:ff");
        for wrong in [
            "",
            "02:00:5e:10:00",
            "02:00:5e:10:00:ff:00",
            "2:0:5e:10:0:ff",
            "02-00-5e-10-00-ff",
            "+2:00:5e:10:00:ff",
        ] {
            let error = wrong.parse::<EthernetAddress>().unwrap_err();
            assert!(error.to_string().contains("six pairs"), "{wrong}");
        }
        assert!(EthernetAddress::BROADCAST.is_multicast() && !address.is_multicast());
    }
}
