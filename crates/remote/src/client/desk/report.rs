//! The requests in flight, for reports.

use sidecore_units::Nanos;
use sidecore_vrio::handshake::ClientHandshake;

use super::{Device, SessionDesk};
use crate::client::session::OpenedReport;

impl<H: ClientHandshake> SessionDesk<H> {
    /// Requests that are not answered.
    pub(in crate::client) fn in_flight(&self) -> usize {
        self.port.data.len()
    }

    /// Requests that are not answered, and that no drain holds.
    pub(in crate::client) fn unanswered(&self) -> usize {
        self.port.data.unanswered()
    }

    /// The devices that stores use. Allocates.
    pub(in crate::client) fn opened(&self) -> Vec<OpenedReport> {
        let in_flight = |number: u16| {
            let lines = self.lines.iter().flatten();
            let its = lines.filter(|line| line.device == Some(number));
            its.map(|line| line.in_flight).sum()
        };
        let report = |device: &Device| OpenedReport {
            device: device.shared.name.clone(),
            in_flight: in_flight(device.number),
            kept_writes: self.client.kept_writes(device.number),
        };
        self.devices.iter().map(report).collect()
    }

    /// When the oldest request was taken that is not answered.
    pub(in crate::client) fn oldest(&self) -> Option<Nanos> {
        self.port.data.oldest(None)
    }
}
