//! Abort (NVMe base 2.0, 5.1), which is best effort.

use crate::controller::{Controller, Outcome, Waiting};
use crate::{Command, Status};

/// Abort Command Limit (figure 275, ACL), a 0's based value: how many may be outstanding.
pub(crate) const ABORT_LIMIT: u8 = 3;

/// Dword 0, bit 0: the command was not aborted.
const NOT_ABORTED: u32 = 1;

impl Controller {
    /// Aborts a request for an asynchronous event at once. A command of an I/O queue's is aborted
    /// where the queue is, if the store has not got it yet: what the store has, it carries out.
    pub(crate) fn abort(&mut self, command: &Command) -> Result<Outcome, Status> {
        let queue = (command.dword10() & 0xFFFF) as u16;
        let command_id = (command.dword10() >> 16) as u16;
        if queue == 0 {
            return Ok(Outcome::Now(if self.abort_event_request(command_id) {
                0
            } else {
                NOT_ABORTED
            }));
        }
        if !self.queues.has_submission_queue(queue) {
            return Err(Status::INVALID_FIELD);
        }
        if self.count_waiting(|waiting| matches!(waiting, Waiting::Abort { .. }))
            > usize::from(ABORT_LIMIT)
        {
            return Err(Status::ABORT_LIMIT_EXCEEDED);
        }
        let reply = self.wait_for_result(Waiting::Abort { command_id: command.id() });
        let answer = move |aborted| reply.ok(if aborted { 0 } else { NOT_ABORTED });
        self.host.abort(queue, command_id, Box::new(answer));
        Ok(Outcome::Later)
    }

    fn abort_event_request(&mut self, command_id: u16) -> bool {
        let aborted = self.events.abort(command_id);
        if let Some(admin) = self.admin.as_mut().filter(|_| aborted) {
            admin.complete(command_id, 0, Status::ABORT_REQUESTED);
        }
        aborted
    }
}
