//! Addresses of stations.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// An Ethernet address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// The address of all stations.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// Whether it is the address of a group of stations.
    #[must_use]
    #[inline]
    pub const fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether a station can have it: it is neither zero nor that of a group.
    #[must_use]
    #[inline]
    pub const fn is_station(self) -> bool {
        !self.is_group() && self.to_bits() != 0
    }

    /// Whether it is one of the addresses that bridges never forward (IEEE 802.1Q, table 8-1).
    #[must_use]
    #[inline]
    pub const fn is_reserved(self) -> bool {
        self.to_bits() & !0xf == 0x0180_c200_0000
    }

    /// The link-local address that follows from it (RFC 4291, appendix A).
    #[must_use]
    pub fn link_local(self) -> Ipv6Addr {
        let [a, b, c, d, e, f] = self.0;
        Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
    }

    /// The address as a number.
    #[must_use]
    #[inline]
    pub const fn to_bits(self) -> u64 {
        let [a, b, c, d, e, f] = self.0;
        u64::from_be_bytes([0, 0, a, b, c, d, e, f])
    }

    /// The address that these low 48 bits are.
    #[must_use]
    #[inline]
    pub const fn from_bits(bits: u64) -> Self {
        let [_, _, a, b, c, d, e, f] = bits.to_be_bytes();
        Self([a, b, c, d, e, f])
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The text is no Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an Ethernet address is six bytes like 52:54:00:12:34:56")]
pub struct NotAMacAddress;

impl FromStr for MacAddress {
    type Err = NotAMacAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split(':');
        let mut address = [0; 6];
        for byte in &mut address {
            let part = parts.next().filter(|part| part.len() == 2).ok_or(NotAMacAddress)?;
            if !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(NotAMacAddress);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| NotAMacAddress)?;
        }
        if parts.next().is_some() { Err(NotAMacAddress) } else { Ok(Self(address)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_text_and_a_number() {
        let address: MacAddress = "52:54:00:Ab:0c:ff".parse().unwrap();
        assert_eq!(address, MacAddress([0x52, 0x54, 0, 0xab, 0x0c, 0xff]));
        assert_eq!(address.to_string(), "52:54:00:ab:0c:ff");
        assert_eq!(address.to_bits(), 0x5254_00ab_0cff);
        assert_eq!(MacAddress::from_bits(0x5254_00ab_0cff), address);
        for text in
            ["", "52:54:00:ab:0c", "52:54:00:ab:0c:ff:0", "52:54:00:ab:0c:+f", "5:4:0:a:0:f"]
        {
            assert!(text.parse::<MacAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn groups_and_reserved_addresses_are_told_apart() {
        let is_reserved = |text: &str| text.parse::<MacAddress>().unwrap().is_reserved();
        assert!(is_reserved("01:80:c2:00:00:00") && is_reserved("01:80:c2:00:00:0f"));
        assert!(!is_reserved("01:80:c2:00:00:10") && !is_reserved("01:80:c2:00:01:00"));
        assert!(MacAddress::BROADCAST.is_group() && !MacAddress([2, 0, 0, 0, 0, 1]).is_group());
        assert!(!MacAddress::default().is_station() && MacAddress([2, 0, 0, 0, 0, 1]).is_station());
    }
}
