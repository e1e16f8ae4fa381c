//! Work on the host of a store, and its end.

use crate::{Member, Record};

/// Work on this host for a store, of which there is one at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// Read the record.
    ReadRecord,
    /// Make sure that no request of these daemons is in flight, and that none can follow. It comes
    /// before each opening, also without suspects: a fence that the store itself has must let this
    /// daemon in.
    Fence {
        /// The daemons, without this one.
        suspects: Vec<Member>,
        /// The last owner, if it has closed the store in order. It needs no fence.
        former: Option<Member>,
        /// The suspect that may have opened the store. All others never have.
        owner: Option<Member>,
    },
    /// Replace the record durably.
    WriteRecord {
        /// The new record.
        record: Record,
    },
    /// Open the store, so that it can be served. The host takes the store's locks first, and fails
    /// if the lease has ended by then: a fence by locks does not see a process that has none yet.
    Open {
        /// The epoch in which it is served.
        epoch: u64,
        /// The store's number, which its record has. It is another one if epochs begin anew.
        number: u64,
    },
    /// Close the store, and wait until it has no request in flight.
    Close,
}

/// The end of a [`Task`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Of [`Task::ReadRecord`]: the record, if there is one.
    Recorded(Option<Record>),
    /// The task succeeded.
    Done,
    /// Of [`Task::Close`]: the store is closed, and requests to it may be in flight. The lease was
    /// over by the host's clock, when a successor may have the store's locks, and the host did not
    /// look at them. The key is not released after this.
    Left,
    /// The task failed, with the reason. A store is not open then.
    Failed(String),
    /// Of [`Task::Fence`]: the same, and more is known.
    Unfenced {
        /// The reason.
        why: String,
        /// Whether an attempt hangs. Another host may have another path: the key is released at
        /// once.
        hangs: bool,
        /// Whether the attempt may have let this daemon's host in.
        admits: bool,
    },
}
