//! Sidecores, and the one way to run a unit on one.
//!
//! A [`SidecoreThread`] is pinned to its core and turns its reactor until it is dropped. Other
//! threads share a [`Sidecore`]: they send it messages and start units there ([`Sidecore::start`]).
//! A [`Handle`] names one running unit of a known type: a task changes it ([`Handle::tell`],
//! [`Handle::ask`]), and [`Handle::stop`] stops it, which gives its state back once nothing is in
//! flight. Units of one sidecore reach each other through the state that they share
//! ([`CoreContext`](sidecore_reactor::CoreContext)), not by messages between threads.
#![forbid(unsafe_code)]

mod handle;
mod sidecore;
mod thread;
mod warning;

pub use handle::{Handle, Stopped, Stopping};
pub use sidecore::{NotStarted, Sidecore};
pub use sidecore_reactor::Closed;
pub use thread::{SidecoreThread, ThreadError};
pub use warning::CoreWarning;

/// The loop of a sidecore.
pub type Reactor = sidecore_reactor::Reactor<sidecore_linux::EpollSleeper>;
