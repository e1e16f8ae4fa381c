//! The sidecore's loop.
//!
//! A [`Reactor`] owns everything that one sidecore polls. [`Reactor::turn`] is one round of its
//! loop: deliver mail, give every awake [`Pollable`] a budget of work in rotation, arm those that
//! have been idle for long enough, and, when none is awake, block in the only call that sleeps
//! ([`Sleeper::wait`]).
//!
//! Time is an argument and sleeping is a trait, so that the whole loop runs under a simulated clock
//! in tests. While a pollable is busy, the loop does not allocate, lock or make a system call,
//! except for a look at the armed pollables' wake-ups every [`GLANCE_INTERVAL`].
#![forbid(unsafe_code)]

mod bell;
mod caught;
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
mod surroundings;
mod wake_set;

pub use bell::{Bell, Listener};
pub use caught::{caught, panic_message};
pub use contention::{Contention, CoreChange, CoreSample};
pub use context::{CoreClock, CoreContext};
pub use eventfd::EventFd;
pub use idle::IdleMode;
pub use mailbox::{Closed, Mail, Mailbox, Post, mailbox};
pub use pollable::{Arm, Pollable, PollableId, Polled, Unit};
pub use port::{NotSent, Port, PortId, PortSender};
pub use reactor::{GLANCE_INTERVAL, PATIENCE, Reactor, Turn, YIELD};
pub use signal::{MakeSignal, Signal};
pub use sleeper::{Sleeper, WakeKey};
pub use stats::{ReactorCounts, ReactorStats};
pub use surroundings::Surroundings;
pub use wake_set::WakeSet;
