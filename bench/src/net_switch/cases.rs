//! The cases: kinds of traffic, sizes, ring formats, ports and flows.

use super::{NO_RULES, ONE_FLOW, OVS, TESTPMD};

/// The traffic of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Frames from one guest to another one, as many as the switch passes on.
    OneWay,
    /// The same, with frames larger than the MTU that the receiver takes uncut.
    Tso,
    /// One frame there and one back.
    RoundTrip,
}

/// The way in which a switch is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) ports: u16,
    /// Whether it passes on frames that are larger than the MTU.
    pub(super) large: bool,
    /// Whether each port has 100 rules.
    pub(super) rules: bool,
}

/// All settings, in the order in which they are measured.
pub(super) const SETTINGS: [Setting; 4] = [
    Setting { ports: 2, large: false, rules: false },
    Setting { ports: 2, large: true, rules: false },
    Setting { ports: MANY_PORTS, large: false, rules: false },
    Setting { ports: 2, large: false, rules: true },
];

const MANY_PORTS: u16 = 16;
const MANY_FLOWS: u32 = 100_000;
/// The size in the name of a case with frames that are larger than the MTU: `gso_max_size`.
const LARGE_NAME: u32 = 65_536;
/// Their size: the most whole segments of 1,448 bytes that fit in a buffer of DPDK, which counts
/// its own head room in 16 bits and drops a larger frame.
const LARGE_BYTES: u32 = 45 * 1448 + 54;

/// The load of one case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) kind: Kind,
    /// Size of a frame, without the virtio header.
    pub(super) bytes: u32,
    pub(super) packed: bool,
    /// Whether each ring has 4,096 buffers, which take turns, so that none is in a cache.
    pub(super) is_cold: bool,
    pub(super) ports: u16,
    pub(super) flows: u32,
    pub(super) rules: bool,
}

impl Case {
    pub(super) fn name(&self) -> String {
        let kind = match self.kind {
            Kind::OneWay => "oneway",
            Kind::Tso => "tso",
            Kind::RoundTrip => "rtt",
        };
        let format = if self.packed { "packed" } else { "split" };
        let bytes = if self.kind == Kind::Tso { LARGE_NAME } else { self.bytes };
        let mut name = format!("{kind}/{bytes}/{format}");
        if self.is_cold {
            name.push_str("/cold");
        }
        if self.ports > 2 {
            name.push_str(&format!("/p{}", self.ports));
        }
        if self.flows > 1 {
            name.push_str(&format!("/f{}", self.flows));
        }
        if self.rules {
            name.push_str("/rules");
        }
        name
    }

    pub(super) fn setting(&self) -> Setting {
        Setting { ports: self.ports, large: self.kind == Kind::Tso, rules: self.rules }
    }

    /// The switches that this one is compared with, and this one with a single flow.
    pub(super) fn peers(&self) -> &'static [&'static str] {
        match self {
            Self { rules: true, .. } => &[NO_RULES],
            Self { flows: 2.., .. } => &[OVS, TESTPMD, ONE_FLOW],
            // testpmd's forwarding leaves no offload in a frame.
            Self { kind: Kind::Tso, .. } => &[OVS],
            _ => &[OVS, TESTPMD],
        }
    }
}

/// All cases.
pub(super) fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for packed in [false, true] {
        let small = Case {
            kind: Kind::OneWay,
            bytes: 64,
            packed,
            is_cold: false,
            ports: 2,
            flows: 1,
            rules: false,
        };
        cases.extend([
            small,
            Case { flows: MANY_FLOWS, ..small },
            Case { ports: MANY_PORTS, ..small },
            Case { bytes: 512, ..small },
            Case { bytes: 1500, ..small },
            Case { bytes: 1500, is_cold: true, ..small },
            Case { kind: Kind::Tso, bytes: LARGE_BYTES, ..small },
            Case { kind: Kind::RoundTrip, ..small },
            Case { rules: true, ..small },
            // More flows than a port tracks: each frame begins a connection.
            Case { rules: true, flows: MANY_FLOWS, ..small },
        ]);
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::Of;
    use crate::net_switch::BOUNDS;

    #[test]
    fn names_are_unique_and_each_bound_has_a_case_with_its_peer() {
        let cases = all();
        for bound in &BOUNDS {
            let case = cases.iter().find(|case| case.name() == bound.case);
            let case = case.unwrap_or_else(|| panic!("no case {}", bound.case));
            assert!(SETTINGS.contains(&case.setting()));
            if let Of::Ratio(_, peer) = bound.of {
                assert!(case.peers().contains(&peer), "{bound:?}");
            }
        }
        let mut names: Vec<String> = cases.iter().map(Case::name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
