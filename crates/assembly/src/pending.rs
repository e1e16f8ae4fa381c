//! Devices whose stores are not open: they are shown with the reason, and served when they can be.

use crate::disk::idle_word;
use crate::left::LeftDevice;
use crate::opening::Subject;
use crate::report::{DeviceReport, DeviceState, QueueCounters};
use crate::spec::DeviceSpec;

/// A device that is not served yet, or cannot be.
pub(crate) struct PendingDisk {
    pub(crate) spec: DeviceSpec,
    pub(crate) store_type: &'static str,
    pub(crate) waits_for: Subject,
    /// Why it will not be served; `None` while its store is being opened.
    pub(crate) refusal: Option<String>,
    /// What an earlier daemon left of it.
    pub(crate) left: Option<LeftDevice>,
}

impl PendingDisk {
    /// The device is not going to be served, and its VMM not to wait.
    pub(crate) fn refuse(&mut self, reason: &str) {
        tracing::error!(device = self.spec.name, "not served: {reason}");
        self.refusal = Some(reason.to_owned());
        if let Some(left) = self.left.take() {
            left.disconnect();
        }
    }

    pub(crate) fn report(&self) -> DeviceReport {
        let spec = &self.spec;
        let reason = self.refusal.clone().unwrap_or_else(|| match &self.waits_for {
            Subject::Store(name) => format!("store \"{name}\" does not answer yet; the device is served when it does"),
            Subject::Controller(name) => {
                format!("controller \"{name}\" is not open yet; the device is served when it is")
            }
        });
        DeviceReport {
            name: spec.name.clone(),
            front_end: spec.front_end.word().to_owned(),
            store: spec.store.clone(),
            store_type: self.store_type.to_owned(),
            controller: None,
            volume: None,
            socket: spec.socket.display().to_string(),
            capacity_bytes: 0,
            block_bytes: 0,
            read_only: spec.read_only,
            queues: spec.queues,
            queues_running: 0,
            sidecores: spec.sidecores.clone(),
            idle: idle_word(spec.idle).to_owned(),
            state: if self.refusal.is_some() { DeviceState::Refused } else { DeviceState::Opening },
            reason: Some(reason),
            warnings: Vec::new(),
            needs_reset: false,
            disconnect: None,
            counters: QueueCounters::default(),
        }
    }
}
