//! The owners of a queue's requests in flight.

use sidecore_block::InFlight;

/// The requests of a completion queue between its submission queues and the store.
pub(super) type Engine = InFlight<Origin>;

/// A command that is one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Whole {
    /// The place of its submission queue in the queue's list.
    pub(super) slot: u16,
    pub(super) command_id: u16,
    pub(super) opcode: u8,
}

/// The owner of a request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Whole(Whole),
    /// A command in steps: the number of its stepper.
    Step(usize),
    /// The write of the fused pair.
    FusedWrite,
}
