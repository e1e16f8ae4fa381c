//! The configuration of a switch and of its ports.

use std::net::{Ipv4Addr, Ipv6Addr};

use sidecore_units::Nanos;

use crate::{MacAddress, TRACES_MAX};

/// The most ports of a switch.
pub const PORTS_MAX: usize = 256;
/// The most queues of all ports of a switch.
pub const QUEUES_MAX: usize = 1024;
/// The most queues of a port.
pub const PORT_QUEUES_MAX: usize = 16;
/// The largest number of a VLAN.
pub const VLAN_MAX: u16 = 4094;
/// The VLAN of ports without a configuration.
pub const DEFAULT_VLAN: u16 = 1;

/// The options of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchOptions {
    /// The most stations that the switch remembers.
    pub stations: usize,
    /// A station that was silent for so long is forgotten.
    pub age: Nanos,
    /// A port that was blocked because of a loop is tried again after this time.
    pub block: Nanos,
    /// Makes the places of stations in the table unpredictable: a random number.
    pub seed: u64,
}

impl SwitchOptions {
    /// The defaults, with this random number: 8192 stations, five minutes, half a minute.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self {
            stations: 8192,
            age: Nanos::from_millis(300_000),
            block: Nanos::from_millis(30_000),
            seed,
        }
    }
}

/// A set of VLANs.
#[derive(Clone, PartialEq, Eq)]
pub struct VlanSet(Box<[u64; 64]>);

impl VlanSet {
    /// All VLANs.
    #[must_use]
    pub fn all() -> Self {
        (1..=VLAN_MAX).collect()
    }

    /// Whether this VLAN is in the set.
    #[must_use]
    #[inline]
    pub fn has(&self, vlan: u16) -> bool {
        let word = self.0.get(usize::from(vlan >> 6));
        word.is_some_and(|word| word >> (vlan & 63) & 1 != 0)
    }

    fn add(&mut self, vlan: u16) {
        if let Some(word) = self.0.get_mut(usize::from(vlan >> 6)).filter(|_| vlan <= VLAN_MAX) {
            *word |= 1 << (vlan & 63);
        }
    }
}

impl FromIterator<u16> for VlanSet {
    /// Numbers that no VLAN can have are left out.
    fn from_iter<T: IntoIterator<Item = u16>>(vlans: T) -> Self {
        let mut set = Self(Box::new([0; 64]));
        vlans.into_iter().filter(|vlan| *vlan > 0).for_each(|vlan| set.add(vlan));
        set
    }
}

impl std::fmt::Debug for VlanSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries((1..=VLAN_MAX).filter(|vlan| self.has(*vlan))).finish()
    }
}

/// The VLANs of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vlans {
    /// Frames of this VLAN, without a tag.
    Access(u16),
    /// Frames of several VLANs, with tags.
    Trunk {
        /// The VLAN whose frames have no tag.
        native: Option<u16>,
        /// The VLANs of the port; the native one need not be among them.
        allowed: VlanSet,
    },
}

impl Vlans {
    /// The VLAN of frames without a tag.
    #[must_use]
    #[inline]
    pub const fn untagged(&self) -> Option<u16> {
        match self {
            Self::Access(vlan) => Some(*vlan),
            Self::Trunk { native, .. } => *native,
        }
    }

    /// Whether the port has frames of this VLAN.
    #[must_use]
    #[inline]
    pub fn have(&self, vlan: u16) -> bool {
        match self {
            Self::Access(access) => *access == vlan,
            Self::Trunk { native, allowed } => *native == Some(vlan) || allowed.has(vlan),
        }
    }

    fn check(&self) -> Result<(), SwitchError> {
        match self.untagged() {
            Some(vlan) if vlan == 0 || vlan > VLAN_MAX => Err(SwitchError::Vlan { vlan }),
            _ => Ok(()),
        }
    }
}

/// An IPv6 network: its first address, and the number of leading bits that count.
pub type Ipv6Network = (Ipv6Addr, u8);

/// The addresses that a station may claim: frames with others are dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    /// Its Ethernet address.
    pub mac: MacAddress,
    /// Its IPv4 addresses; `None` for any.
    pub ipv4: Option<Vec<Ipv4Addr>>,
    /// Its IPv6 networks; `None` for any. The link-local address that follows from the Ethernet
    /// address (RFC 4291, appendix A) is its own in any case.
    pub ipv6: Option<Vec<Ipv6Network>>,
    /// Whether it may send the messages of a router (RFC 6105).
    pub router: bool,
}

impl Guard {
    /// The IPv6 addresses that are known to be the station's, where not any may be: its networks
    /// of one address, and the link-local one.
    pub fn ipv6_addresses(&self) -> impl Iterator<Item = Ipv6Addr> {
        let own = self.ipv6.as_deref();
        let single = own.unwrap_or_default().iter().filter(|(_, bits)| *bits == 128);
        single.map(|(address, _)| *address).chain(own.map(|_| self.mac.link_local()))
    }
}

/// The side of the switch that a port is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortKind {
    /// A station, or several behind one another: a guest's NIC.
    Station,
    /// The rest of the network. Frames never go from an uplink to another one.
    Uplink,
}

/// A limit for frames that go to all ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloodLimit {
    /// Frames per second.
    pub per_second: u32,
    /// Frames at once, after a pause.
    pub burst: u32,
}

/// The configuration of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// Its side.
    pub kind: PortKind,
    /// Its VLANs.
    pub vlans: Vlans,
    /// The addresses that its station may claim; `None` for any.
    pub guard: Option<Guard>,
    /// Isolated ports exchange no frames with each other.
    pub is_isolated: bool,
    /// The most stations that the switch learns on the port.
    pub stations: usize,
    /// The limit for its frames to all ports; `None` for no limit.
    pub floods: Option<FloodLimit>,
    /// The station that is [announced](crate::Switch::announce) to the rest of the network each
    /// time that the port has come up, because its frames have come another way before.
    pub announces: Option<MacAddress>,
    /// Of the ports of a team, which lead to the same network, one carries frames, and the others
    /// stand by for it.
    pub team: Option<String>,
    /// A station of the network behind the team, which answers to ARP: a member that it does not
    /// answer to, one way or the other, is replaced.
    pub probe: Option<Ipv4Addr>,
}

impl PortConfig {
    /// A port for a station in the default VLAN, that may claim any address.
    #[must_use]
    pub fn station() -> Self {
        Self {
            kind: PortKind::Station,
            vlans: Vlans::Access(DEFAULT_VLAN),
            guard: None,
            is_isolated: false,
            stations: 1024,
            floods: Some(FloodLimit { per_second: 10_000, burst: 1_000 }),
            announces: None,
            team: None,
            probe: None,
        }
    }

    /// A port for the rest of the network, in the default VLAN.
    #[must_use]
    pub fn uplink() -> Self {
        Self { kind: PortKind::Uplink, stations: 8192, ..Self::station() }
    }

    pub(crate) fn check(&self) -> Result<(), SwitchError> {
        self.vlans.check()?;
        let mut macs = self.guard.iter().map(|guard| guard.mac).chain(self.announces);
        let wrong = macs.find(|mac| !mac.is_station());
        wrong.map_or(Ok(()), |mac| Err(SwitchError::Mac { mac }))
    }
}

/// Why a switch cannot do what it was asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SwitchError {
    /// There is no such port, or no longer.
    #[error("the switch has no such port")]
    NoSuchPort,
    /// There is no room for another port.
    #[error("a switch has {PORTS_MAX} ports at most: use a second switch")]
    TooManyPorts,
    /// There is no room for another queue.
    #[error(
        "a switch has {QUEUES_MAX} queues and a port {PORT_QUEUES_MAX} at most: use fewer queues"
    )]
    TooManyQueues,
    /// There is no room for another trace.
    #[error("the switch has {TRACES_MAX} traces already: end one of them first")]
    TooManyTraces,
    /// The number is not that of a VLAN.
    #[error("vlan {vlan}: use a number from 1 to {VLAN_MAX}")]
    Vlan {
        /// The number.
        vlan: u16,
    },
    /// The address is not that of a station.
    #[error("{mac} is not the address of a station: use one whose first byte is even")]
    Mac {
        /// The address.
        mac: MacAddress,
    },
    /// Another port has the address already.
    #[error("{mac} is the address of another port in VLAN {vlan}: give each port its own")]
    DoubleMac {
        /// The address.
        mac: MacAddress,
        /// The VLAN.
        vlan: u16,
    },
    /// A queue describes itself in a way that makes no sense.
    #[error("a queue with headers of {header_bytes} bytes: use 0, 10 or 12")]
    Properties {
        /// The size of its headers.
        header_bytes: usize,
    },
}
