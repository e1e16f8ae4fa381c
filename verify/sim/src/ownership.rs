//! Daemons that are candidates for one store, their etcd, and a client of the store.
//!
//! # Real and simulated parts
//!
//! The state machine of `sidecore-ownership` is the production code. Simulated are time, etcd with
//! its network, the processes with their clocks, the fences, the store, and a client that looks for
//! the owner.
//!
//! # A history
//!
//! A seed gives the number of candidates, the rates of their clocks (up to 10 % from etcd's), the
//! kind of fence, and how often things break. Processes are paused at any point, also between a
//! check of the lease and the request or answer that depends on it; they are killed, and start
//! again. Requests to etcd and its answers are lost and delayed; etcd is away, its leaders change
//! and a deposed one renews leases, it revokes leases early, it is restored from a backup, or a
//! daemon reaches another cluster with a copy of the keys. Fences fail and hang, writes of the
//! record hang. Two daemons have one name; a candidate has a store that is not shared. Owners hand
//! over. At the end everything heals, and the client has to get answers.
//!
//! # Properties
//!
//! * Never do two daemons serve.
//! * No write of a daemon takes effect after its successor has opened the store.
//! * Epochs of openings increase.
//! * A read returns the newest answered write.
//!
//! In a third of the histories fences lie: they succeed without effect. Then the leases alone keep
//! two daemons from serving, and only that is checked.

pub(crate) mod candidate;
pub(crate) mod etcd;
mod history;
mod store;
mod world;

pub use history::{Options, Outcome, run};
