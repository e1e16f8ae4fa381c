//! The metrics of switches.

use sidecore_assembly::report::SwitchReport;

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
    }
}
