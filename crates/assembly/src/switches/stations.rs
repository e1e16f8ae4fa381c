//! The stations that a switch has learnt on a port, from one process to the next.

use sidecore_net::{MacAddress, PortId};
use sidecore_units::Nanos;

use super::{NANOS_PER_S, RunningSwitch};
use crate::left::LearntStation;

impl RunningSwitch {
    /// The stations that the switch has learnt on a port.
    pub(crate) fn learnt(&self, port: PortId) -> Vec<LearntStation> {
        let now = self.now();
        let learnt = self.ask(move |unit| {
            let stations = unit.switch_mut().stations();
            let learnt = stations.filter(|station| station.port == port && !station.is_fixed);
            let learnt = learnt.map(|station| LearntStation {
                mac: station.mac.to_string(),
                vlan: station.vlan,
                silent_s: now.since(station.seen_at).0 / NANOS_PER_S,
            });
            learnt.collect()
        });
        learnt.unwrap_or_default()
    }

    /// Notes stations that the switch of an earlier process has learnt on this port. Those that it
    /// would not learn now, or knows by now, are left out.
    pub(crate) fn resume_stations(&self, name: &str, port: PortId, stations: Vec<LearntStation>) {
        if stations.is_empty() {
            return;
        }
        let (now, all) = (self.now(), stations.len());
        let known = self.ask(move |unit| {
            let switch = unit.switch_mut();
            let known = stations.iter().filter(|station| {
                let silent = Nanos(station.silent_s.saturating_mul(NANOS_PER_S));
                let mac: Option<MacAddress> = station.mac.parse().ok();
                mac.is_some_and(|mac| {
                    switch.restore_station(now, port, (mac, station.vlan), silent)
                })
            });
            known.count()
        });
        let known = known.unwrap_or(0);
        tracing::info!(port = name, known, all, "addresses of the earlier daemon's switch");
    }
}
