//! The sidecore's loop.
//!
//! A [`Reactor`] owns everything that one sidecore polls. [`Reactor::turn`]
//! is one round of it: deliver mail, give every awake [`Pollable`] a budget of
//! work in rotation, put to sleep what has been idle for long enough, and, when
//! nothing is awake any more, block in the one call there is to sleep in
//! ([`Sleeper::wait`]).
//!
//! Time is an argument and sleeping is a trait, so that the whole loop runs
//! under a simulated clock in tests. Nothing here allocates, locks or makes a
//! system call while a pollable is busy, except for a look at the armed ones'
//! wake-ups every [`GLANCE_INTERVAL`].
#![forbid(unsafe_code)]

mod contention;
mod context;
mod eventfd;
mod idle;
mod mailbox;
mod pollable;
mod port;
mod reactor;
mod signal;
mod sleeper;
mod stats;
mod wake_set;

pub use contention::{Contention, CoreChange, CoreSample};
pub use context::CoreContext;
pub use eventfd::EventFd;
pub use idle::IdleMode;
pub use mailbox::{Closed, Mail, Mailbox, Post, mailbox};
pub use pollable::{Arm, Pollable, PollableId, Polled, Unit};
pub use port::{NotSent, Port, PortId, PortSender};
pub use reactor::{GLANCE_INTERVAL, PATIENCE, Reactor, Turn, YIELD};
pub use signal::{MakeSignal, Signal};
pub use sleeper::{Sleeper, WakeKey};
pub use stats::{ReactorCounts, ReactorStats};
pub use wake_set::WakeSet;
