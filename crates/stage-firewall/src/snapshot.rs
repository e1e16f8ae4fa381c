//! Connections as text, from one process to the next.

use std::fmt::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::SplitWhitespace;

use sidecore_net::Way;

use crate::packet::{Packet, kind};

/// The most connections of a snapshot.
pub const SNAPSHOT_MAX: usize = 65_536;
/// The first line: what follows, and the version of its form.
const FIRST: &str = "connections 1";
/// The longest silence that a connection can have, in seconds: over for all of them.
const SILENCE_MAX_S: u32 = 1_000_000;

/// A snapshot that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct SnapshotError {
    /// The number of the line, counted from 1.
    pub line: usize,
    /// The reason.
    pub why: &'static str,
}

/// The connections of one firewall at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    pub(crate) connections: Vec<Known>,
}

/// A connection: the sides as in its first packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub protocol: u8,
    pub vlan: u16,
    pub way: Way,
    pub is_answered: bool,
    pub is_closing: bool,
    pub silent_s: u32,
    pub source: (IpAddr, u16),
    pub target: (IpAddr, u16),
}

impl Snapshot {
    /// Reads a snapshot.
    ///
    /// # Errors
    /// A line is not as [`Display`](fmt::Display) writes it, or there are too many.
    pub fn parse(text: &str) -> Result<Self, SnapshotError> {
        let mut lines = (1..).zip(text.lines());
        if lines.next().is_none_or(|(_, first)| first != FIRST) {
            return Err(SnapshotError { line: 1, why: "no version that is known here" });
        }
        let mut connections = Vec::new();
        for (line, text) in lines {
            if connections.len() >= SNAPSHOT_MAX {
                return Err(SnapshotError { line, why: "too many connections" });
            }
            connections.push(Known::parse(text).map_err(|why| SnapshotError { line, why })?);
        }
        Ok(Self { connections })
    }

    /// The number of connections.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether there are no connections.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(FIRST)?;
        self.connections.iter().try_for_each(|known| {
            f.write_char('\n')?;
            known.write(f)
        })
    }
}

impl Known {
    fn write(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = if self.way == Way::FromStation { "from" } else { "to" };
        let state = match (self.is_answered, self.is_closing) {
            (false, false) => "new",
            (false, true) => "new-closing",
            (true, false) => "answered",
            (true, true) => "closing",
        };
        let Self { protocol, vlan, silent_s, source, target, .. } = self;
        write!(f, "{protocol} {vlan} {way} {state} {silent_s}")?;
        write!(f, " {} {} {} {}", source.0, source.1, target.0, target.1)
    }

    fn parse(line: &str) -> Result<Self, &'static str> {
        let mut words = line.split_whitespace();
        let protocol = number(&mut words, u8::MAX.into())? as u8;
        let vlan = number(&mut words, sidecore_net::VLAN_MAX.into())? as u16;
        let way = match words.next() {
            Some("from") => Way::FromStation,
            Some("to") => Way::ToStation,
            _ => return Err("no way"),
        };
        let (is_answered, is_closing) = match words.next() {
            Some("new") => (false, false),
            Some("new-closing") => (false, true),
            Some("answered") => (true, false),
            Some("closing") => (true, true),
            _ => return Err("no state"),
        };
        let silent_s = number(&mut words, SILENCE_MAX_S)?;
        let (source, target) = (side(&mut words)?, side(&mut words)?);
        if source.0.is_ipv4() != target.0.is_ipv4() {
            return Err("addresses of two families");
        }
        if vlan == 0 || words.next().is_some() {
            return Err("no line of a connection");
        }
        Ok(Self { protocol, vlan, way, is_answered, is_closing, silent_s, source, target })
    }

    /// The facts of a packet of the side that began.
    pub fn packet(&self) -> Packet {
        let is_ipv4 = self.source.0.is_ipv4();
        let mut packet = Packet::of_kind(if is_ipv4 { kind::IPV4 } else { kind::IPV6 }, 0);
        packet.protocol = self.protocol;
        (packet.source, packet.source_port) = (bits(self.source.0), self.source.1);
        (packet.target, packet.target_port) = (bits(self.target.0), self.target.1);
        packet
    }
}

/// An address with these bits.
pub(crate) fn address(is_ipv6: bool, bits: u128) -> IpAddr {
    if is_ipv6 {
        IpAddr::V6(Ipv6Addr::from_bits(bits))
    } else {
        IpAddr::V4(Ipv4Addr::from_bits(bits as u32))
    }
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn number(words: &mut SplitWhitespace<'_>, most: u32) -> Result<u32, &'static str> {
    let number = words.next().and_then(|word| word.parse().ok());
    number.filter(|number| *number <= most).ok_or("no number, or one too large")
}

fn side(words: &mut SplitWhitespace<'_>) -> Result<(IpAddr, u16), &'static str> {
    let address = words.next().and_then(|word| word.parse().ok()).ok_or("no address")?;
    Ok((address, number(words, u16::MAX.into())? as u16))
}
