//! The data of admin commands, to the host and from it.

use crate::controller::{Controller, Outcome};
use crate::pointer::{self, Direction};
use crate::{Command, Status};

/// Bytes of every data structure of Identify, and of those that hosts send.
pub(crate) const STRUCTURE_BYTES: usize = 4096;

impl Controller {
    /// Sends `len_bytes` to the host: `data` as far as it goes, and then zeros.
    pub(crate) fn send(
        &mut self,
        command: &Command,
        data: &[u8],
        len_bytes: u64,
    ) -> Result<(), Status> {
        self.translate(command, len_bytes, Direction::ToGuest)?;
        let part = usize::try_from(len_bytes)
            .map_or(data, |len_bytes| data.get(..len_bytes).unwrap_or(data));
        let sent = self.segments.copy_from_slice(0, part) as u64;
        self.segments.zero(sent, len_bytes.saturating_sub(sent));
        self.segments.release();
        Ok(())
    }

    /// Sends a data structure of Identify.
    pub(crate) fn send_structure(
        &mut self,
        command: &Command,
        data: &[u8],
    ) -> Result<Outcome, Status> {
        self.send(command, data, STRUCTURE_BYTES as u64)?;
        Ok(Outcome::Now(0))
    }

    /// Receives a data structure from the host, read once.
    pub(crate) fn receive_structure(&mut self, command: &Command) -> Result<Vec<u8>, Status> {
        self.translate(command, STRUCTURE_BYTES as u64, Direction::FromGuest)?;
        let mut data = vec![0; STRUCTURE_BYTES];
        let received = self.segments.copy_to_slice(0, &mut data);
        self.segments.release();
        if received == data.len() { Ok(data) } else { Err(Status::DATA_TRANSFER_ERROR) }
    }

    fn translate(
        &mut self,
        command: &Command,
        len_bytes: u64,
        direction: Direction,
    ) -> Result<(), Status> {
        let Self { memory, hint, segments, .. } = self;
        // A list that has bit buckets cannot be: admin commands have PRPs.
        let gathered = pointer::gather(command, len_bytes, direction, memory, hint, segments);
        if gathered.is_err() {
            segments.release();
        }
        gathered.map(|_| ())
    }
}
