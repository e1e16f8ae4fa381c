//! The metrics of switches.

use sidecore_assembly::report::{RuleCounts, SwitchReport};

use super::Page;

impl Page {
    pub(super) fn switches(&mut self, switches: &[SwitchReport]) {
        let ports = switches.iter().flat_map(|switch| {
            switch.ports.iter().map(|port| {
                let labels = vec![("switch", switch.name.as_str()), ("port", port.name.as_str())];
                (labels, &port.counters)
            })
        });
        self.counts("sidecore_port_", ports);
        self.firewalls(switches);
        let wires = switches.iter().flat_map(|switch| {
            switch.ports.iter().filter_map(|port| {
                let labels = vec![("switch", switch.name.as_str()), ("port", port.name.as_str())];
                Some((labels, &port.wire.as_ref()?.counters))
            })
        });
        self.counts("sidecore_wire_", wires);
    }

    fn firewalls(&mut self, switches: &[SwitchReport]) {
        let firewalls = switches.iter().flat_map(|switch| {
            let ports = switch.ports.iter();
            ports.filter_map(|port| Some((switch.name.as_str(), port, port.firewall.as_ref()?)))
        });
        let mut rules: Vec<(&str, &str, String, &str, &RuleCounts)> = Vec::new();
        for (switch, port, firewall) in firewalls.clone() {
            for (number, rule) in (1_usize..).zip(&firewall.rules) {
                rules.push((switch, &port.name, number.to_string(), &rule.text, &rule.counters));
            }
            rules.push((switch, &port.name, "none".to_owned(), "", &firewall.unmatched));
        }
        let rules = rules.iter().map(|(switch, port, number, text, counts)| {
            let labels =
                vec![("switch", *switch), ("port", port), ("rule", number), ("text", text)];
            (labels, *counts)
        });
        self.counts("sidecore_firewall_", rules);
        let tables = firewalls.map(|(switch, port, firewall)| {
            (vec![("switch", switch), ("port", port.name.as_str())], &firewall.table)
        });
        self.counts("sidecore_firewall_", tables);
    }
}
