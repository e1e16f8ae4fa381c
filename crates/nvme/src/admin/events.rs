//! Asynchronous events (NVMe base 2.0, 5.2): requests of the host's that complete when something
//! happens.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::Status;
use crate::controller::{Controller, Outcome};

/// Asynchronous Event Request Limit (figure 275, AERL), a 0's based value.
pub(crate) const REQUEST_LIMIT: u8 = 3;

/// An event to report to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Event {
    /// Error status: a doorbell that does not exist was written (figure 147, 00h).
    InvalidDoorbellRegister,
    /// Error status: a doorbell was written with a value that its queue cannot have (01h).
    InvalidDoorbellValue,
    /// SMART / health status: the temperature crossed a threshold (figure 148, 01h).
    TemperatureThreshold,
    /// Notice: an attached namespace came, went or changed (figure 149, 00h).
    NamespaceAttributeChanged,
}

/// The kind of an event. After one event of a kind, the kind is masked until the host has read the
/// log page that clears it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum EventKind {
    Error,
    Health,
    Notice,
}

impl Event {
    pub(crate) const fn kind(self) -> EventKind {
        match self {
            Self::InvalidDoorbellRegister | Self::InvalidDoorbellValue => EventKind::Error,
            Self::TemperatureThreshold => EventKind::Health,
            Self::NamespaceAttributeChanged => EventKind::Notice,
        }
    }

    /// The identifier of the log page that has more about it.
    const fn log_page(self) -> u32 {
        match self.kind() {
            EventKind::Error => 0x01,
            EventKind::Health => 0x02,
            EventKind::Notice => 0x04,
        }
    }

    /// Dword 0 of the completion (figure 146): type in bits 2:0, information in 15:8, log page in
    /// 23:16.
    const fn result(self) -> u32 {
        let kind = match self.kind() {
            EventKind::Error => 0,
            EventKind::Health => 1,
            EventKind::Notice => 2,
        };
        let information = match self {
            Self::InvalidDoorbellRegister | Self::NamespaceAttributeChanged => 0,
            Self::InvalidDoorbellValue | Self::TemperatureThreshold => 1,
        };
        kind | information << 8 | self.log_page() << 16
    }
}

/// Requests that wait for events, and events that wait for requests.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Events {
    /// The requests' command identifiers, the oldest first; at most the limit.
    requests: VecDeque<u16>,
    /// Events not yet reported, each at most once.
    unreported: Vec<Event>,
    /// The kinds that are reported and not cleared.
    masked: Vec<EventKind>,
}

impl Events {
    /// Queues an event.
    pub(crate) fn raise(&mut self, event: Event) {
        if !self.unreported.contains(&event) {
            self.unreported.push(event);
        }
    }

    /// The host has read the log page of this kind of event.
    pub(crate) fn clear(&mut self, kind: EventKind) {
        self.masked.retain(|masked| *masked != kind);
        // The log page has shown these events already.
        self.unreported.retain(|event| event.kind() != kind);
    }

    /// The number of queued requests; `None` if there are more than the limit.
    pub(crate) fn request_count(&self) -> Option<usize> {
        Some(self.requests.len())
            .filter(|count| *count <= usize::from(REQUEST_LIMIT).saturating_add(1))
    }

    /// Takes a request.
    fn wait(&mut self, command_id: u16) -> Result<(), Status> {
        if self.requests.len() > usize::from(REQUEST_LIMIT) {
            return Err(Status::ASYNC_EVENT_LIMIT_EXCEEDED);
        }
        self.requests.push_back(command_id);
        Ok(())
    }

    /// Pairs a request with an event: the completion's command identifier and dword 0.
    fn pair(&mut self) -> Option<(u16, u32)> {
        let at = self.unreported.iter().position(|event| !self.masked.contains(&event.kind()))?;
        let request = self.requests.pop_front()?;
        let event = self.unreported.remove(at);
        self.masked.push(event.kind());
        Some((request, event.result()))
    }

    /// Takes back a request; whether there was one.
    pub(crate) fn abort(&mut self, command_id: u16) -> bool {
        let at = self.requests.iter().position(|request| *request == command_id);
        at.and_then(|at| self.requests.remove(at)).is_some()
    }
}

impl Controller {
    /// Asynchronous Event Request (5.2).
    pub(crate) fn asynchronous_event_request(
        &mut self,
        command_id: u16,
    ) -> Result<Outcome, Status> {
        self.events.wait(command_id)?;
        Ok(Outcome::Later)
    }

    /// Completes the requests for which there are events.
    pub(crate) fn complete_events(&mut self) {
        if let Some(admin) = &mut self.admin {
            while let Some((command_id, result)) = self.events.pair() {
                admin.complete(command_id, result, Status::SUCCESS);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_each_kind_one_is_told_until_it_is_cleared() {
        let mut events = Events::default();
        for id in 0..4 {
            events.wait(id).unwrap();
        }
        assert_eq!(events.wait(4), Err(Status::ASYNC_EVENT_LIMIT_EXCEEDED));
        events.raise(Event::NamespaceAttributeChanged);
        assert_eq!(events.pair(), Some((0, 0x04_0002)));
        events.raise(Event::NamespaceAttributeChanged);
        assert_eq!(events.pair(), None, "masked until the log is read");
        events.raise(Event::InvalidDoorbellValue);
        assert_eq!(events.pair(), Some((1, 0x01_0100)));
        // Reading the log page clears both changes.
        events.clear(EventKind::Notice);
        assert_eq!(events.pair(), None);
        events.raise(Event::NamespaceAttributeChanged);
        assert_eq!(events.pair(), Some((2, 0x04_0002)));
    }

    #[test]
    fn events_wait_for_requests_and_do_not_pile_up() {
        let mut events = Events::default();
        for _ in 0..1000 {
            events.raise(Event::InvalidDoorbellValue);
            events.raise(Event::InvalidDoorbellRegister);
        }
        assert_eq!(events.unreported.len(), 2);
        events.wait(9).unwrap();
        assert_eq!(events.pair(), Some((9, 0x01_0100)));
        events.wait(9).unwrap();
        assert_eq!(events.pair(), None, "the other error is of the same kind");
        assert!(events.abort(9) && !events.abort(9));
    }
}
