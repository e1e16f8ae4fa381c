//! Switches, their ports, and their keys.

use std::net::Ipv4Addr;

use sidecore_keys::{Key, Kind, Value, Values, keys};
use sidecore_net::{Guard, Ipv6Network, MacAddress, PortConfig, Vlans};
use sidecore_reactor::IdleMode;
use sidecore_stage_firewall::{CONNECTIONS_MAX, CONNECTIONS_MIN, Rules};
use sidecore_stage_limit::PortLimits;
use sidecore_stage_wire::Wire;
use sidecore_units::Nanos;

use super::REMOTE_DEVICE_NAME_MAX;
use super::device::{DEFAULT_SPIN_US, MINUTE_US, is_power_of_two};
use super::rules::NAME;
use crate::switches::StagesSpec;

/// The most queue pairs of a NIC.
pub const QUEUE_PAIRS_MAX: u16 = 16;

/// The largest number of a VLAN (IEEE 802.1Q, 9.6).
const VLAN_MAX: u64 = 4094;

/// The least MTU of a device (virtio 1.2, 5.1.4.1), and the largest of Ethernet in use.
const MTU: (u64, u64) = (68, 9_216);

/// The keys of every switch that are more than a field.
pub const SWITCH: &[Key] = &[
    NAME,
    Key::new(
        "sidecore",
        Kind::Text,
        "the first sidecore",
        "the sidecore that serves the switch with all of its ports",
    ),
    Key::new(
        "idle",
        Kind::Word(&["poll", "adaptive", "interrupt"]),
        "`\"adaptive\"`",
        "what it does without frames: `poll` never sleeps, `adaptive` spins for a while and then \
         sleeps until a guest kicks, `interrupt` sleeps at once",
    ),
    Key::new(
        "spin_us",
        Kind::Number(0, MINUTE_US),
        "that of its sidecore",
        "how long it spins, with `idle = \"adaptive\"`; 0 to 60000000",
    ),
];

keys! {
    /// A switch between NICs of guests.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct SwitchSpec {
        plain {
            /// Unique among the switches.
            name: String = String::new();
            /// The sidecore that serves it.
            sidecore: String = String::new();
            /// How it spends idle time.
            idle: IdleMode = IdleMode::Adaptive { spin: Nanos::from_micros(DEFAULT_SPIN_US) };
        }
        keys {
            "stations" => stations: u32 = 8_192, Kind::Number(16, 1 << 20), "8192",
                "the most addresses that it remembers, 16 to 1048576; frames for others go to all \
                 ports";
            "age_s" => age_s: u32 = 300, Kind::Number(1, 1_000_000), "300",
                "after how many seconds of silence it forgets an address, 1 to 1000000";
        }
    }
}

/// Declares the keys of a port of a switch: its own, and those that all ports have.
macro_rules! port_keys {
    ($(#[$attribute:meta])* $name:ident { $($own:tt)* }) => {
        keys! {
            $(#[$attribute])*
            #[derive(Clone, Debug, PartialEq, Eq)]
            pub struct $name {
                plain {}
                keys {
                    $($own)*
                    "rules" => rules: Vec<String> = Vec::new(), Kind::Lines, "none",
                        "the [rules](network.md#rules) of its firewall, the first of which that \
                         matches a frame decides; without any, all frames pass. `sidecore net \
                         rules` replaces them",
                        are_rules;
                    "connections" => connections: u32 = 16_384,
                        Kind::Number(CONNECTIONS_MIN as u64, CONNECTIONS_MAX as u64), "16384",
                        "about how many connections the firewall tracks, 64 to 1048576, each in 72 \
                         bytes, if a rule asks for their states";
                    "limits" => limits: Vec<String> = Vec::new(), Kind::Lines, "none",
                        "[rate limits](network.md#limits) of frames and of bytes from the station \
                         and to it, as `[\"from 5000 frames/s\", \"to 10MiB/s burst 1MiB\"]`. \
                         `sidecore net limits` changes them",
                        are_limits;
                    "faults" => faults: String = String::new(), Kind::Text, "none",
                        "for tests: makes the wire to the port a [bad one](network.md#a-bad-wire), \
                         as in `\"loss 0.1% delay 5ms\"`. `sidecore net faults` changes it",
                        are_faults;
                }
            }
        }

        impl $name {
            /// The keys of its stages.
            pub(crate) fn stages(&self) -> StagesSpec<'_> {
                StagesSpec {
                    rules: &self.rules,
                    connections: self.connections,
                    limits: &self.limits,
                    faults: &self.faults,
                }
            }
        }
    };
}

/// Declares the keys of a NIC of a guest, of this host or of a client's: those that all have, and
/// its own.
macro_rules! nic_keys {
    ($(#[$attribute:meta])* $name:ident { $($own:tt)* }) => {
        port_keys! {
            $(#[$attribute])*
            $name {
                #[required = "\"the name of a [[switch]]\""]
                "switch" => switch: String = String::new(), Kind::Text, "required",
                    "the switch that it is a port of";
                #[required = "\"52:54:00:00:00:01\""]
                "mac" => mac: String = String::new(), Kind::Text, "required",
                    "its address, which the VMM must give the guest as well: frames with another \
                     source are dropped",
                    is_mac;
                "ipv4" => ipv4: Option<Vec<String>> = None, Kind::Texts, "any",
                    "the IPv4 addresses that the guest may use, in ARP as well; others are dropped",
                    are_ipv4;
                "ipv6" => ipv6: Option<Vec<String>> = None, Kind::Texts, "any",
                    "the IPv6 addresses that the guest may use, and networks as `ADDRESS/BITS`, in \
                     neighbor discovery as well; others are dropped. The link-local address that \
                     follows from `mac` is its own in any case", are_ipv6;
                "any_source" => any_source: bool = false, Kind::Flag(false), "`false`",
                    "the guest may send from any address, for instance as a bridge or a router; \
                     with `true`, `ipv4` and `ipv6` have no meaning";
                "vlan" => vlan: u16 = 1, Kind::Number(1, VLAN_MAX), "1",
                    "the VLAN of its frames, which have no tag on the NIC, 1 to 4094; with \
                     `trunk`, of those without a tag";
                "trunk" => trunk: Option<Vec<(u64, u64)>> = None, Kind::Ranges, "none",
                    "the VLANs of its tagged frames, as `[[10, 19], [30, 30]]`",
                    are_vlans;
                "isolated" => is_isolated: bool = false, Kind::Flag(false), "`false`",
                    "isolated NICs of a switch exchange no frames with each other";
                "mtu" => mtu: u16 = 1_500, Kind::Number(MTU.0, MTU.1), "1500",
                    "the largest packet in bytes, 68 to 9216; a frame that is too large for its \
                     receiver is dropped";
                $($own)*
            }
        }

        impl $name {
            /// The address. The key was checked.
            #[must_use]
            pub fn mac(&self) -> MacAddress {
                self.mac.parse().unwrap_or_default()
            }

            /// The IPv4 addresses of the guest; `None` for any.
            #[must_use]
            pub fn ipv4(&self) -> Option<Vec<Ipv4Addr>> {
                let addresses = self.ipv4.as_ref()?;
                Some(addresses.iter().filter_map(|address| address.parse().ok()).collect())
            }

            /// Its IPv6 addresses and networks; `None` for any.
            pub fn ipv6(&self) -> Option<Vec<Ipv6Network>> {
                let networks = self.ipv6.as_ref()?;
                Some(networks.iter().filter_map(|network| ipv6_network(network)).collect())
            }

            /// The VLANs of tagged frames; `None` without a trunk.
            pub fn trunk(&self) -> Option<impl Iterator<Item = u16> + '_> {
                self.trunk.as_deref().map(numbers)
            }

            /// The settings of its port.
            pub(crate) fn port(&self) -> PortConfig {
                let (ipv4, ipv6) = (self.ipv4(), self.ipv6());
                let guard = Guard { mac: self.mac(), ipv4, ipv6, router: false };
                let vlans = match self.trunk() {
                    None => Vlans::Access(self.vlan),
                    Some(allowed) => {
                        Vlans::Trunk { native: Some(self.vlan), allowed: allowed.collect() }
                    }
                };
                PortConfig {
                    vlans,
                    guard: (!self.any_source).then_some(guard),
                    is_isolated: self.is_isolated,
                    ..PortConfig::station()
                }
            }
        }
    };
}

nic_keys! {
    /// A NIC of a guest, on a switch.
    VirtioNetSpec {
        "offloads" => offloads: bool = true, Kind::Flag(true), "`true`",
            "offer checksum and segmentation offloads, both ways";
        "queue_size_max" => queue_size_max: u16 = 1_024, Kind::Number(1, 32_768), "1024",
            "the largest ring that it accepts, in entries; a power of two up to \
             32768", is_power_of_two;
        "packed" => packed: bool = false, Kind::Flag(false), "`false`",
            "offer packed rings (VIRTIO_F_RING_PACKED) as well";
    }
}

nic_keys! {
    /// A NIC of a guest of a client's, on a switch of this IOhost.
    VrioNetSpec {
        #[required = "\"the name of a [[client]]\""]
        "client" => client: String = String::new(), Kind::Text, "required",
            "the client that may use it: there, it is a device with `front_end = \"remote-net\"`";
    }
}

/// Declares the keys of an interface of this host that is a port of a switch: its own, and those
/// that all interfaces have.
macro_rules! interface_keys {
    ($(#[$attribute:meta])* $name:ident { $($own:tt)* }) => {
        port_keys! {
            $(#[$attribute])*
            $name {
                #[required = "\"the name of a [[switch]]\""]
                "switch" => switch: String = String::new(), Kind::Text, "required",
                    "the switch that it is a port of";
                $($own)*
                "uplink" => is_uplink: bool = true, Kind::Flag(true), "`true`",
                    "other networks may lie behind it: frames never go from an uplink to another \
                     one. With `false` it is a station as guests are";
                "team" => team: Option<String> = None, Kind::Text, "none",
                    "of the interfaces of a switch with the same name here, at most 32 bytes, one \
                     carries frames, and the others stand by for it", is_team;
                "probe" => probe: Option<String> = None, Kind::Text, "none",
                    "with `team`: the IPv4 address of a station that is always there, the router \
                     for instance. A member that it does not answer, three times within 0.4 s, is \
                     replaced",
                    is_ipv4;
                "vlan" => vlan: u16 = 1, Kind::Number(1, VLAN_MAX), "1",
                    "the VLAN of frames without a tag, 1 to 4094";
                "trunk" => trunk: Option<Vec<(u64, u64)>> = None, Kind::Ranges, "none",
                    "the VLANs of tagged frames, as `[[10, 19], [30, 30]]`", are_vlans;
                "isolated" => is_isolated: bool = false, Kind::Flag(false), "`false`",
                    "exchanges no frames with isolated NICs";
            }
        }

        impl $name {
            /// The VLANs of tagged frames; `None` without a trunk.
            pub fn trunk(&self) -> Option<impl Iterator<Item = u16> + '_> {
                self.trunk.as_deref().map(numbers)
            }

            /// The settings of its port.
            pub(crate) fn port(&self) -> PortConfig {
                let base =
                    if self.is_uplink { PortConfig::uplink() } else { PortConfig::station() };
                let vlans = match self.trunk() {
                    None => Vlans::Access(self.vlan),
                    Some(allowed) => {
                        Vlans::Trunk { native: Some(self.vlan), allowed: allowed.collect() }
                    }
                };
                let probe = self.probe.as_ref().and_then(|address| address.parse().ok());
                let (is_isolated, team) = (self.is_isolated, self.team.clone());
                PortConfig { vlans, is_isolated, team, probe, ..base }
            }
        }
    };
}

interface_keys! {
    /// An interface of this host's kernel, on a switch.
    TapSpec {
        #[required = "\"tap0\""]
        "interface" => interface: String = String::new(), Kind::Text, "required",
            "the name of the interface, at most 15 bytes; the daemon makes it unless it is \
             there. It stays with its addresses when the daemon ends; `ip link del` removes it",
            is_interface;
        "mtu" => mtu: Option<u16> = None, Kind::Number(MTU.0, MTU.1), "the interface's",
            "its MTU in bytes, 68 to 9216";
        "offloads" => offloads: bool = true, Kind::Flag(true), "`true`",
            "leave checksums and segmentation to each other, both ways";
    }
}

interface_keys! {
    /// An Ethernet interface of this host, on a switch.
    EthernetSpec {
        #[required = "\"eth1\""]
        "interface" => interface: String = String::new(), Kind::Text, "required",
            "the name of the interface, at most 15 bytes, which should have no addresses of the \
             host: all that arrives there goes to the switch",
            is_interface;
    }
}

interface_keys! {
    /// A NIC of this client at an IOhost, on a switch of this host.
    RemoteNetSpec {
        #[required = "\"the name of an [[iohost]]\""]
        "iohost" => iohost: String = String::new(), Kind::Text, "required",
            "the IOhost that has the NIC's other end, a device with `front_end = \"vrio-net\"`";
        "device" => device: Option<String> = None, Kind::Text, "the device's name",
            "the name of the NIC at the IOhost, at most 64 bytes", is_remote_device;
        "mtu" => mtu: u16 = 1_500, Kind::Number(MTU.0, MTU.1), "1500",
            "the largest packet in bytes, 68 to 9216, as at the IOhost";
    }
}

/// The VLANs in these ranges.
fn numbers(ranges: &[(u64, u64)]) -> impl Iterator<Item = u16> + '_ {
    let all = ranges.iter().flat_map(|(first, last)| *first..=(*last).min(VLAN_MAX));
    all.filter_map(|vlan| u16::try_from(vlan).ok())
}

/// The rules of the kernel (dev_valid_name), which has room for 15 bytes. It would complete a name
/// with a `%`.
fn is_interface(key: &str, value: &Value) -> Result<(), String> {
    let text = value.text();
    let is_strange = |c: char| c.is_whitespace() || c.is_control() || "/:%".contains(c);
    if (1..=15).contains(&text.len()) && !text.contains(is_strange) && text != "." && text != ".." {
        return Ok(());
    }
    Err(format!(
        "{key} = \"{text}\" is no name of an interface: write 1 to 15 bytes without spaces, `/`, \
         `:` and `%`, for instance \"tap0\""
    ))
}

fn is_team(key: &str, value: &Value) -> Result<(), String> {
    let text = value.text();
    if (1..=32).contains(&text.len()) && !text.contains(char::is_control) {
        return Ok(());
    }
    Err(format!("`{key}` is no name for a team: write 1 to 32 bytes, for instance \"wan\""))
}

fn is_remote_device(key: &str, value: &Value) -> Result<(), String> {
    let bytes = value.text().len();
    if (1..=REMOTE_DEVICE_NAME_MAX).contains(&bytes) {
        return Ok(());
    }
    Err(format!(
        "`{key}` has {bytes} bytes, and the name of a device 1 to {REMOTE_DEVICE_NAME_MAX}"
    ))
}

fn is_mac(key: &str, value: &Value) -> Result<(), String> {
    let text = value.text();
    match text.parse::<MacAddress>() {
        Ok(mac) if mac.is_station() => Ok(()),
        _ => Err(format!(
            "{key} = \"{text}\" is not the address of a NIC; write for instance \
             \"52:54:00:00:00:01\""
        )),
    }
}

fn is_ipv4(key: &str, value: &Value) -> Result<(), String> {
    let text = value.text();
    match text.parse::<Ipv4Addr>() {
        Ok(_) => Ok(()),
        Err(_) => Err(format!(
            "\"{text}\" in `{key}` is no IPv4 address; write for instance \"10.0.0.2\""
        )),
    }
}

fn are_ipv4(key: &str, value: &Value) -> Result<(), String> {
    let Value::Texts(texts) = value else { return Ok(()) };
    texts.iter().try_for_each(|text| is_ipv4(key, &Value::Text(text.clone())))
}

/// An IPv6 address, or a network as `ADDRESS/BITS`.
fn ipv6_network(text: &str) -> Option<Ipv6Network> {
    let (address, bits) = text.split_once('/').unwrap_or((text, "128"));
    Some((address.parse().ok()?, bits.parse().ok().filter(|bits| *bits <= 128)?))
}

fn are_ipv6(key: &str, value: &Value) -> Result<(), String> {
    let Value::Texts(texts) = value else { return Ok(()) };
    match texts.iter().find(|text| ipv6_network(text).is_none()) {
        Some(text) => Err(format!(
            "\"{text}\" in `{key}` is no IPv6 address or network; write for instance \
             \"2001:db8::2\" or \"2001:db8::/64\""
        )),
        None => Ok(()),
    }
}

fn are_rules(key: &str, value: &Value) -> Result<(), String> {
    let Value::Texts(texts) = value else { return Ok(()) };
    Rules::parse(texts).map(drop).map_err(|error| format!("`{key}`: {error}"))
}

fn are_limits(key: &str, value: &Value) -> Result<(), String> {
    let Value::Texts(texts) = value else { return Ok(()) };
    PortLimits::parse(texts).map(drop).map_err(|error| format!("`{key}`: {error}"))
}

fn are_faults(key: &str, value: &Value) -> Result<(), String> {
    Wire::parse(value.text()).map(drop).map_err(|error| format!("`{key}`: {error}"))
}

fn are_vlans(key: &str, value: &Value) -> Result<(), String> {
    let Value::Ranges(ranges) = value else { return Ok(()) };
    let is_wrong = |(first, last): &&(u64, u64)| *first == 0 || *last > VLAN_MAX || first > last;
    match ranges.iter().find(is_wrong) {
        Some((first, last)) => Err(format!(
            "[{first}, {last}] in `{key}` is no range of VLANs, which are 1 to {VLAN_MAX}"
        )),
        None => Ok(()),
    }
}

impl SwitchSpec {
    /// The name, the sidecore and the fields with these values of their keys.
    #[must_use]
    pub fn from_section(values: &Values) -> Self {
        let mut spec = Self {
            name: values.get("name").unwrap_or_default(),
            sidecore: values.get("sidecore").unwrap_or_default(),
            ..Self::default()
        };
        spec.set(values);
        spec
    }
}
