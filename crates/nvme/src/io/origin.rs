//! The owners of a queue's requests in flight.

use sidecore_block::{Context, InFlight};

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

/// The kind in the first word, its data in the second.
impl Context for Origin {
    #[inline]
    fn into_words(self) -> [u64; 2] {
        match self {
            Self::Whole(Whole { slot, command_id, opcode }) => {
                [0, u64::from(slot) | u64::from(command_id) << 16 | u64::from(opcode) << 32]
            }
            Self::Step(stepper) => [1, stepper as u64],
            Self::FusedWrite => [2, 0],
        }
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // taking the word apart
    fn from_words([kind, data]: [u64; 2]) -> Self {
        match kind {
            0 => Self::Whole(Whole {
                slot: data as u16,
                command_id: (data >> 16) as u16,
                opcode: (data >> 32) as u8,
            }),
            1 => Self::Step(data as usize),
            _ => Self::FusedWrite,
        }
    }
}
