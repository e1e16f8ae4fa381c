//! The events of a client, for its caller.

use super::{Client, Event, Untold};
use crate::handshake::ClientHandshake;

impl<H: ClientHandshake> Client<H> {
    /// Whether [`next_event`](Self::next_event) has something to say.
    #[must_use]
    #[inline]
    pub fn has_events(&self) -> bool {
        let Untold { connected, disconnected, listed, devices } = self.core.untold;
        connected | disconnected | listed | devices || !self.core.completed.is_empty()
    }

    /// The next thing that the caller has not been told.
    #[inline]
    pub fn next_event(&mut self) -> Option<Event> {
        let Untold { connected, disconnected, listed, devices } = self.core.untold;
        if connected | disconnected | listed | devices
            && let Some(event) = self.next_change()
        {
            return Some(event);
        }
        let completed = self.core.completed.pop_front();
        completed.map(|(tag, result)| Event::Completed { tag, result })
    }

    #[cold]
    fn next_change(&mut self) -> Option<Event> {
        let core = &mut self.core;
        let untold = &mut core.untold;
        if std::mem::take(&mut untold.disconnected) {
            return Some(Event::Disconnected);
        }
        if std::mem::take(&mut untold.connected) {
            return Some(Event::Connected);
        }
        if std::mem::take(&mut untold.listed) {
            return Some(Event::Listed);
        }
        if untold.devices {
            let mut numbers = (0_u16..).zip(&mut core.devices);
            if let Some((number, device)) = numbers.find(|(_, device)| device.is_untold) {
                device.is_untold = false;
                return Some(Event::Device(number));
            }
            untold.devices = false;
        }
        None
    }
}
