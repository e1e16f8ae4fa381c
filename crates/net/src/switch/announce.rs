//! Announcements: the rest of the network learns where a station is.

use sidecore_memory::Segments;
use sidecore_units::Nanos;

use super::Switch;
use crate::announcement::{arp, neighbor, rarp};
use crate::head::Head;
use crate::ports::Port;
use crate::table::Key;
use crate::{DropReason, MacAddress, PortId, SwitchError};

/// Announcements of a station whose port has come up: the first at once.
const REPEATS: u8 = 4;
/// The time between the first two, which doubles with each further one.
const INTERVAL: Nanos = Nanos::from_millis(100);

/// The announcements of a port's station that are still to be sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Announcements {
    left: u8,
    /// When the next one is sent.
    due: Nanos,
}

impl Switch {
    /// Announces a station on a port to all others, as if it had sent a RARP of its own, an ARP for
    /// each IPv4 address and a neighbor advertisement for each IPv6 address that its guard has:
    /// after a migration, the rest of the network learns where it is.
    ///
    /// # Errors
    /// There is no such port, or the address is not that of a station.
    pub fn announce(
        &mut self,
        now: Nanos,
        port: PortId,
        mac: MacAddress,
    ) -> Result<(), SwitchError> {
        let from = self.port(port).ok_or(SwitchError::NoSuchPort)?;
        let Some(vlan) = from.config.vlans.untagged() else {
            return Ok(());
        };
        let is_own = from.config.guard.as_ref().is_none_or(|guard| guard.mac == mac);
        if !mac.is_station() || !is_own {
            return Err(SwitchError::Mac { mac });
        }
        let limit = from.config.stations;
        self.now = now;
        self.table.learn(Key::new(mac, vlan), port.index, now, limit);
        self.flood_own(port.index, vlan, rarp(mac));
        for count in 0.. {
            let Some(frame) = self.address_frame(port.index, count) else { break };
            self.flood_own(port.index, vlan, frame);
        }
        self.publish_all();
        Ok(())
    }

    /// The frame that announces one of the addresses of a port's station; `None` behind the last.
    fn address_frame(&self, port: u16, index: usize) -> Option<Head> {
        let guard = self.port_at(port)?.config.guard.as_ref()?;
        let ipv4 = guard.ipv4.as_deref().unwrap_or_default();
        if let Some(address) = ipv4.get(index) {
            return Some(arp(guard.mac, *address));
        }
        let address = guard.ipv6_addresses().nth(index.checked_sub(ipv4.len())?)?;
        Some(neighbor(guard.mac, address, guard.router))
    }

    /// Sends a frame in the name of a port's station to all other ports of the VLAN.
    fn flood_own(&mut self, port: u16, vlan: u16, mut head: Head) {
        let none = Segments::with_capacity(0);
        self.count_own(port, &head);
        let targets = self.flood_targets(port, vlan);
        if targets.is_empty() {
            self.drop_frame(port, DropReason::NoDestination.into(), vlan, Some((&head, &none)));
        }
        for target in targets.iter() {
            self.copy_own(port, target, vlan, (&mut head, &none));
        }
    }

    /// Counts a frame in the name of a port's station as received from it.
    pub(super) fn count_own(&self, port: u16, head: &Head) {
        if let Some(Port { stats, .. }) = self.port_at(port) {
            stats.in_frames.add(1);
            stats.in_octets.add(head.len_bytes() as u64);
            stats.in_group.add(1);
        }
    }

    /// Sends a copy of such a frame. It waits for no buffers.
    pub(super) fn copy_own(
        &mut self,
        from: u16,
        to: u16,
        vlan: u16,
        (head, none): (&mut Head, &Segments),
    ) {
        if let Some(Port { stats, .. }) = self.port_at(from) {
            stats.in_copies.add(1);
        }
        self.copy_to(to, vlan, head, none, true);
    }

    /// A port has come up, or has gone down: has its station announced from now on, or no more.
    pub(super) fn note_station(&mut self, port: u16, is_up: bool) {
        let now = self.now;
        let Some(found) = self.ports.get_mut(usize::from(port)).and_then(Option::as_mut) else {
            return;
        };
        let left = if is_up && found.config.announces.is_some() { REPEATS } else { 0 };
        found.announcements = Announcements { left, due: now };
        if left > 0 {
            self.next_announcement = Some(now);
        }
    }

    /// Sends the announcements that are due.
    #[cold]
    pub(super) fn announce_due(&mut self, now: Nanos) {
        self.next_announcement = None;
        for index in 0..self.ports.len() {
            let Some(port) = self.ports.get_mut(index).and_then(Option::as_mut) else { continue };
            let Announcements { left, due } = &mut port.announcements;
            let Some(rest) = left.checked_sub(1) else { continue };
            let mut announced = None;
            if *due <= now {
                let sent = u32::from(REPEATS.saturating_sub(*left));
                (*left, *due) = (rest, now.after(Nanos(INTERVAL.0.wrapping_shl(sent))));
                announced = port.config.announces;
            }
            if *left > 0 {
                let next = self.next_announcement.unwrap_or(*due);
                self.next_announcement = Some(next.min(*due));
            }
            let index = u16::try_from(index).unwrap_or(u16::MAX);
            let id = PortId { index, generation: port.generation };
            if let Some(mac) = announced {
                // A station whose address is another's is not announced.
                let _ = self.announce(now, id, mac);
            }
        }
    }
}
