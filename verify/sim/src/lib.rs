//! Simulations of a sidecore, its guests and its volumes, each from one seed. The first one has a
//! sidecore and its guests in one thread, under a simulated clock.
//!
//! # Real and simulated parts
//!
//! The reactor, the block queues, the rings, the stores and the eventfds are the production code.
//! Simulated are time, the guests, and the scheduling: the sidecore takes turns, and between its
//! turns, or while it sleeps, guests take steps of a random kind and number. A guest submits,
//! notifies the device *if the ring asks for that*, and looks for completions; half of the guests
//! look only after an interrupt.
//!
//! # The faults that a run detects
//!
//! * A notification or an interrupt that is needed and not sent: the sidecore sleeps with requests
//!   in the ring, or a guest sleeps with completions in it. The run then makes no progress, which
//!   fails it.
//! * A completion that is lost, doubled, or of the wrong request; a status that no fault explains;
//!   data other than the guest last wrote.
//! * A queue that is stopped with requests in flight and started again from its exported state, and
//!   loses a request.
//!
//! The order in which two cores see each other's stores is not simulated: `crates/ring` argues for
//! the rings' fences, and the driver's tests exercise them on real cores.
//!
//! # Power cuts
//!
//! [`volumes`] simulates the volume format on a disk whose power is cut after every write and
//! flush. [`controller`] does the same for the whole controller, with guests on the queues of its
//! virtual functions.
//!
//! # Shares
//!
//! [`fairness`] has two functions compete, on one sidecore or two, and says what each was served.
//!
//! # Remote devices
//!
//! [`remote`] has a client and an IOhost on a network that does its worst, both of which may die.
//! [`fairness`] lets two functions compete, on one sidecore or two, and measures the service of
//! each.
//!
//! # Failovers
//!
//! [`remote::failover`] has two IOhosts that may own the stores of a client, one after the other.
//!
//! # Ownership
//!
//! [`ownership`] has several daemons that may own one store, and an etcd that fails them.
//!
//! # Mirrors
//!
//! [`mirror`] has legs that fail, and power cuts that leave each leg as it likes.
//!
//! # Checksums
//!
//! [`integrity`] has a store with checksums, power cuts that tear blocks, and a store that has lost
//! writes.
#![forbid(unsafe_code)]

pub mod controller;
pub mod fairness;
mod guest;
mod history;
pub mod integrity;
mod many;
pub mod mirror;
mod options;
pub mod ownership;
mod random;
pub mod remote;
mod violation;
pub mod volumes;
mod world;

pub use many::{Total, run_many};
pub use options::Options;
pub use random::Random;
pub use violation::Violation;
pub use world::{Outcome, run};
