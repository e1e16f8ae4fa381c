//! Teams of uplinks: one port carries the frames of a team, and the others stand by for it.
//!
//! The frames of guests that the network floods come back through ports that stand by, and its own
//! come twice: what such a port receives is dropped.

use sidecore_memory::Segments;
use sidecore_units::Nanos;

use super::turn::LOOK;
use super::{Switch, SwitchEvent};
use crate::announcement::rarp;
use crate::head::Head;
use crate::ports::Port;

/// Stations that are announced in one look, which comes once in a millisecond: the rings of an
/// interface have room for so many.
const STATIONS_PER_LOOK: usize = 32;

/// The stations of other ports are being announced on a port that carries a team's frames now.
#[derive(Clone, Copy, Debug)]
pub(super) struct TakingOver {
    port: u16,
    /// How many of the table's stations have had their turn.
    done: usize,
}

impl TakingOver {
    pub(super) const fn is_on(&self, port: u16) -> bool {
        self.port == port
    }
}

impl Switch {
    /// When the next stations are announced on a port that has taken over.
    pub(super) fn next_taken_over(&self) -> Option<Nanos> {
        (!self.taking_over.is_empty()).then(|| self.looked_at.after(LOOK))
    }

    /// Chooses the port that carries the frames of a team: one that is up, if there is one, whose
    /// network answers; among several the one that does so already, or else the oldest.
    pub(super) fn elect(&mut self, team: &str) {
        let members = || {
            let ports = (0_u16..).zip(&self.ports);
            let ports = ports.filter_map(|(index, port)| Some((index, port.as_ref()?)));
            ports.filter(|(_, port)| port.config.team.as_deref() == Some(team))
        };
        let chosen = members().min_by_key(|(_, port)| {
            (port.up.is_empty(), port.is_lost(), port.is_standby, port.generation)
        });
        let Some((chosen, _)) = chosen else { return };
        let leaving: Vec<u16> = members()
            .filter(|(index, port)| *index != chosen && !port.is_standby)
            .map(|(index, _)| index)
            .collect();
        for index in leaving {
            self.stand_by(index, true);
            self.drop_waiting(index);
            self.drop_held(index);
            self.table.forget(index, false);
            self.taking_over.retain(|taking| !taking.is_on(index));
        }
        let Some(port) = self.port_at(chosen).filter(|port| port.is_standby) else { return };
        let event = SwitchEvent::TakenOver { team: team.to_owned(), port: port.name.clone() };
        self.stand_by(chosen, false);
        self.event(event);
        self.taking_over.push(TakingOver { port: chosen, done: 0 });
    }

    /// A port has joined its team, if it has one: it stands by if another one carries the frames.
    pub(super) fn join(&mut self, port: u16) {
        let team = self.port_at(port).and_then(|port| port.config.team.clone());
        let carries = |(index, other): (u16, &Option<Port>)| {
            let other = other.as_ref().filter(|other| index != port && !other.is_standby);
            other.is_some_and(|other| other.config.team == team)
        };
        let has_other = team.is_some() && (0_u16..).zip(&self.ports).any(carries);
        self.stand_by(port, has_other);
        self.elect_for(port);
    }

    /// A port has left a team, perhaps the one that carried the frames.
    pub(super) fn leave(&mut self, team: Option<&str>) {
        if let Some(team) = team {
            self.elect(team);
        }
    }

    /// As [`elect`](Self::elect), for the team of this port, if it has one.
    pub(super) fn elect_for(&mut self, port: u16) {
        if let Some(team) = self.port_at(port).and_then(|port| port.config.team.clone()) {
            self.elect(&team);
        }
    }

    /// Has a port stand by, or carry frames.
    pub(super) fn stand_by(&mut self, index: u16, is_standby: bool) {
        // Queues have noted where frames may go.
        self.table.touch();
        if let Some(port) = self.ports.get_mut(usize::from(index)).and_then(Option::as_mut) {
            port.stand_by(is_standby);
        }
    }

    /// Announces some stations by RARPs on ports that have taken over, so that the network sends
    /// their frames there.
    #[cold]
    pub(super) fn announce_taken_over(&mut self) {
        let mut taking_over = std::mem::take(&mut self.taking_over);
        taking_over.retain_mut(|TakingOver { port, done }| {
            let next: Vec<_> = self.stations().skip(*done).take(STATIONS_PER_LOOK).collect();
            *done = done.saturating_add(next.len());
            for station in &next {
                let from = station.port.index;
                if self.check_way(from, *port, station.vlan).is_ok() {
                    self.send_own(from, *port, station.vlan, rarp(station.mac));
                }
            }
            next.len() == STATIONS_PER_LOOK
        });
        self.publish_all();
        self.taking_over = taking_over;
    }

    /// Sends a frame in the name of a port's station to another port.
    fn send_own(&mut self, from: u16, to: u16, vlan: u16, mut head: Head) {
        let none = Segments::with_capacity(0);
        self.count_own(from, &head);
        self.copy_own(from, to, vlan, (&mut head, &none));
    }
}
