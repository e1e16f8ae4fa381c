//! Two IOhosts that may own one set of stores, and clients that find the owner.
//!
//! # Real and simulated
//!
//! Production code are both engines of `sidecore-vrio`, and the state machine of
//! `sidecore-ownership` in each IOhost's supervisor, which starts and kills the IOhost's daemon as
//! `sidecore own` does. Simulated are the processes with their clocks (up to 10 % from etcd's),
//! etcd, the fences, the paths, and the stores, whose requests the kernel carries on whatever their
//! daemon does.
//!
//! # A history
//!
//! Two IOhosts are on two links, or have one address on one link, where frames go to the one that
//! was heard last. A supervisor and its daemon are stopped, together or one alone, at any point:
//! with requests that the kernel does not have yet, with requests in a slow store, with answers
//! that were not sent. They go on later. Daemons and IOhosts die, IOhosts and stores lose their
//! power, etcd is away, fences fail and hang, owners hand over, paths are cut.
//!
//! A fence is that of one host's processes, which succeeds when the former owner has ended with all
//! of its requests, or one that switches an IOhost off. What that IOhost had in its cache is lost
//! then, in half of the histories.
//!
//! # Properties
//!
//! The guests' [`model`](super::model): a read returns each answered write whatever owner answered
//! it, an answered flush covers them, and no error is seen. No write of a daemon takes effect after
//! its successor has opened the stores. A daemon does not outlive its lease while its supervisor
//! runs. At the end everything heals, and all requests have to end.
//!
//! Each [`Rule`] can be turned off; tests assert that a history then fails.

mod faults;
mod history;
mod kernel;
mod machine;
mod process;
mod rule;
mod work;
mod world;

pub use history::{Options, Outcome, run};
pub use rule::Rule;
