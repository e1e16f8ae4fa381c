//! Which requests a poll gives to the stores.

use sidecore_block::{BlockError, Budget};
use sidecore_units::Nanos;
use sidecore_vrio::handshake::HostHandshake;
use sidecore_vrio::{Execute, Server};

use super::super::executor::Job;
use super::super::sharing::Sharing;
use super::super::slots::DataAt;
use super::super::tenure::Hold;
use super::{Export, is_over};

impl<H: HostHandshake> Export<H> {
    /// Whether a session has no limits and no request waits for its turn: then it needs none, as
    /// long as the budget lasts. The rest of a flood waits, so that there are turns afterwards.
    #[inline]
    fn needs_no_turn(&self, session: u16) -> bool {
        let is_free = !matches!(self.limits.get(usize::from(session)), Some(Some(_)));
        is_free && self.turns.is_unused()
    }

    /// Gives requests to the stores, as far as the budget reaches. Returns the number of those that
    /// have come.
    #[inline]
    pub(super) fn execute_all(&mut self, now: Nanos, mut budget: Budget) -> usize {
        let mut count = 0_usize;
        while let Some(execute) = self.host.next_execute() {
            count = count.saturating_add(1);
            self.port.data.claim(execute.place);
            let session = (execute.place >> 16) as u16;
            let len_bytes = execute.request.len_bytes;
            let in_flight = self.host.session(session).map_or(0, Server::executing);
            self.sharing.request_of(now, session, in_flight);
            if !self.sharing.is_shared(now) && self.needs_no_turn(session) && budget.take() {
                budget.spend_bytes(len_bytes);
                self.execute(now, execute);
            } else {
                self.turns.push(session, len_bytes, execute);
            }
        }
        self.turns.set_short(self.sharing.is_shared(now));
        let host = &self.host;
        self.turns.resume(now, |place| is_over(host, place));
        if let Some(bytes) = self.sharing.poll_bytes(now, self.turns.waiting()) {
            budget.limit_bytes(bytes);
        }
        while !self.turns.is_empty() && budget.take() {
            let (limits, host) = (&self.limits, &self.host);
            let next =
                self.turns.pop(|place, len_bytes, execute| match limits.get(usize::from(place)) {
                    Some(Some(limits)) if !is_over(host, place) => {
                        limits.pass(now, execute.request.operation, len_bytes)
                    }
                    _ => Ok(()),
                });
            let Some((len_bytes, execute)) = next else { break };
            budget.spend_bytes(Sharing::cost(len_bytes));
            self.execute(now, execute);
        }
        count
    }

    /// Gives a request to the store of its device.
    #[inline]
    pub(super) fn execute(&mut self, now: Nanos, execute: Execute) {
        let Execute { ticket, place, device: number, attachment, request } = execute;
        let device = self.devices.get_mut(usize::from(number)).and_then(Option::as_mut);
        let data = self.port.data.at(place);
        let (Some(device), Some((memory, data))) =
            (device.filter(|device| device.removed.is_none()), data)
        else {
            self.end(ticket, Err(BlockError::EIO));
            return;
        };
        let session = (place >> 16) as u16;
        // The client's next session waits for this request, and sends it again.
        let is_owners = device.tenure.serves(attachment, request.operation);
        if is_over(&self.host, session) || !is_owners {
            self.end(ticket, Err(BlockError::EIO));
            return;
        }
        let is_first = device.assigned.in_flight == 0;
        if !device.held.is_empty() || (!is_first && device.place != session) {
            device.held.push(execute);
            return;
        }
        if is_first {
            match device.tenure.take(self.holder, attachment, request.operation) {
                Hold::Taken => {}
                Hold::Waits => {
                    device.held.push(execute);
                    self.waiting.push(number);
                    return;
                }
                Hold::Late => {
                    self.end(ticket, Err(BlockError::EIO));
                    return;
                }
            }
        }
        device.place = session;
        let (memory, data, is_lent) = match data {
            DataAt::Buffer(data) => (memory, data, false),
            DataAt::Frame(data) => (self.port.memory(), data, true),
        };
        let job = Job {
            ticket,
            data,
            is_lent,
            operation: request.operation,
            offset_bytes: request.offset_bytes,
            len_bytes: request.len_bytes,
            fua: request.fua || device.writes_through,
        };
        let device = (number, &mut device.assigned);
        self.executors.take(now, device, (memory, job), &mut self.done);
    }
}
