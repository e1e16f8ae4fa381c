//! The state of a store, as operators see it.

use crate::Member;

/// The state of a store, as far as an operator sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The daemon has no lease, or no answer of etcd yet.
    Candidate,
    /// Another daemon has the owner key.
    WaitingForKey,
    /// This daemon has the key, and makes sure that no other writes.
    Fencing,
    /// The store is being opened.
    Opening,
    /// The store is served.
    Serving,
    /// The store is open, and the lease has ended without an answer of etcd: nothing is served.
    Stalled,
    /// The store is being closed, or given to another daemon.
    Closing,
    /// The store cannot be served until an operator has acted.
    Refused,
}

impl State {
    /// All states, in the order in which a store goes through them.
    pub const ALL: [Self; 8] = [
        Self::Candidate,
        Self::WaitingForKey,
        Self::Fencing,
        Self::Opening,
        Self::Serving,
        Self::Stalled,
        Self::Closing,
        Self::Refused,
    ];

    /// The word in lists and metrics.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Candidate => "candidate",
            Self::WaitingForKey => "waiting for key",
            Self::Fencing => "fencing",
            Self::Opening => "opening",
            Self::Serving => "serving",
            Self::Stalled => "stalled",
            Self::Closing => "closing",
            Self::Refused => "refused",
        }
    }
}

/// A store's state, with what it waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// The state.
    pub state: State,
    /// The epoch in which this daemon has the key.
    pub epoch: Option<u64>,
    /// The daemon that has the key, if another has it.
    pub holder: Option<Member>,
    /// The newest error, or the reason of a refusal with its remedy.
    pub detail: Option<String>,
}
