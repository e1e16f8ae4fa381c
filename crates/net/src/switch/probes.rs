//! Probes of teams: whether the network behind a port answers, in both directions.
//!
//! A link can be up and lose all frames one way. So each member of a team, the ones in reserve too,
//! asks for the Ethernet address of a station of the network, in a request that changes no tables
//! there (RFC 5227, 2.1.1), and expects an answer.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::net::Ipv4Addr;

use sidecore_memory::Segments;
use sidecore_units::Nanos;

use super::Switch;
use crate::announcement::{probe, probe_answer};
use crate::head::Head;
use crate::{DropReason, MacAddress, PortConfig};

/// The time between two probes of a port.
const INTERVAL: Nanos = Nanos::from_millis(100);
/// A port is taken for lost when so many probes in a row have no answer by the time of the next.
/// They are counted instead of the time, in which the sidecore may not have run.
const LOST_AFTER: u8 = 3;

/// The probes of a port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Probes {
    /// Their source: an address of their own, so that answers are known from other frames.
    mac: MacAddress,
    /// The station that answers.
    target: Ipv4Addr,
    vlan: u16,
    /// When the next one is sent.
    due: Nanos,
    /// How many have been sent since the last answer, up to [`LOST_AFTER`].
    unanswered: u8,
    is_lost: bool,
}

impl Probes {
    /// Those that a port is configured for. Their source cannot be guessed: a guest that knew it
    /// could answer in the place of the network.
    pub fn new(config: &PortConfig) -> Option<Self> {
        /// The bit of addresses that no manufacturer gives (IEEE 802, 8.4), and that of groups.
        const LOCAL: u64 = 0x0200_0000_0000;
        const GROUP: u64 = 0x0100_0000_0000;
        let (target, vlan) = (config.probe?, config.vlans.untagged()?);
        config.team.as_ref()?;
        let random = RandomState::new().hash_one(target);
        let mac = MacAddress::from_bits((random | LOCAL) & !GROUP);
        Some(Self { mac, target, vlan, due: Nanos::ZERO, unanswered: 0, is_lost: false })
    }

    /// The link has come up, or gone down: it has some time for its first answer.
    pub fn begin(&mut self) {
        (self.due, self.unanswered, self.is_lost) = (Nanos::ZERO, 0, false);
    }

    /// Whether this is their source, which answers go to.
    pub fn are_from(&self, mac: MacAddress) -> bool {
        self.mac == mac
    }

    /// Whether the last answers did not come.
    pub const fn is_lost(&self) -> bool {
        self.is_lost
    }
}

impl Switch {
    /// The link of a port has come up or gone down, or its probes are others now.
    pub(super) fn begin_probes(&mut self, port: u16) {
        let port = self.ports.get_mut(usize::from(port)).and_then(Option::as_mut);
        if let Some(probes) = port.and_then(|port| port.probes.as_mut()) {
            probes.begin();
            self.next_probe = Some(Nanos::ZERO);
        }
    }

    /// Sends the probes that are due, and elects anew where answers stay away.
    #[cold]
    pub(super) fn send_probes(&mut self, now: Nanos) {
        self.next_probe = None;
        for index in 0..u16::try_from(self.ports.len()).unwrap_or(u16::MAX) {
            let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
            let Some(port) = port.filter(|port| !port.up.is_empty()) else { continue };
            let Some(probes) = &mut port.probes else { continue };
            let (is_due, vlan) = (probes.due <= now, probes.vlan);
            let mut head = probe(probes.mac, probes.target);
            let none = Segments::with_capacity(0);
            // Guests may have filled all buffers: then it was not sent, and is tried again.
            let is_sent = is_due && self.copy_through_stages(index, vlan, &mut head, &none, false);
            if is_sent {
                self.count_probe(now, index);
            }
            let port = self.port_at(index).and_then(|port| port.probes);
            let due = port.map_or(now, |probes| probes.due);
            self.next_probe = Some(self.next_probe.map_or(due, |next| next.min(due)));
        }
        self.publish_all();
    }

    /// A probe was sent: the port is lost if those before have no answer.
    fn count_probe(&mut self, now: Nanos, index: u16) {
        let port = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut);
        let Some(probes) = port.and_then(|port| port.probes.as_mut()) else { return };
        probes.due = now.after(INTERVAL);
        let is_lost = probes.unanswered >= LOST_AFTER;
        let was_lost = std::mem::replace(&mut probes.is_lost, is_lost);
        probes.unanswered = probes.unanswered.saturating_add(1).min(LOST_AFTER);
        if is_lost && !was_lost {
            self.elect_for(index);
        }
    }

    /// Whether a station has the source of some probe. A probe of a member in reserve comes back by
    /// the member that carries frames, since the network floods it, and is not for guests.
    pub(super) fn is_probe_source(&self, mac: MacAddress) -> bool {
        let are_from = |probes: Probes| probes.are_from(mac);
        self.next_probe.is_some()
            && self.ports.iter().flatten().any(|port| port.probes.is_some_and(are_from))
    }

    /// Notes a frame that a port has received, if it answers a probe of the port.
    ///
    /// # Errors
    /// The frame is for the source of the probes: it ends here.
    #[cold]
    pub(super) fn note_answer(&mut self, from: u16, head: &Head) -> Result<(), DropReason> {
        let port = self.ports.get_mut(usize::from(from)).and_then(Option::as_mut);
        let Some(probes) = port.and_then(|port| port.probes.as_mut()) else { return Ok(()) };
        if !probes.are_from(head.to) {
            return Ok(());
        }
        if probe_answer(head) == Some(probes.target) {
            probes.unanswered = 0;
            if std::mem::take(&mut probes.is_lost) {
                self.elect_for(from);
            }
        }
        Err(DropReason::Probe)
    }
}
