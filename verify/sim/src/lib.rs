//! A sidecore and its guests in one thread, under a simulated clock, all of it from one seed.
//!
//! # What is real and what is not
//!
//! The reactor, the block queues, the rings, the stores and the eventfds are the production code. Simulated are time, the
//! guests, and who runs when: the sidecore takes turns, and between its turns, or while it sleeps, guests take steps of a
//! random kind and number. A guest submits, kicks *if the ring says that a kick is wanted*, and looks for completions;
//! half of the guests do that only when they were called.
//!
//! # What can go wrong
//!
//! * A kick or a call that is not sent when it was needed: the sidecore sleeps with requests in the ring, or a guest sleeps
//!   with completions in it. The run then stands still, which is noticed.
//! * A completion that is lost, doubled, or of the wrong request; a status that no fault explains; data that is not what
//!   the guest last wrote there.
//! * A queue that is stopped in mid-flight and started again from the state it handed back, and loses something over it.
//!
//! Not simulated is the order in which two cores see each other's stores: the rings' fences are argued for in
//! `crates/ring` and exercised on real cores by the driver's tests.
//!
//! # Power cuts
//!
//! [`volumes`] is another simulation: the volume format on a disk whose power is cut after every write and flush. And
//! [`controller`] is the same for the whole controller, with guests on the queues of its virtual functions.
//!
//! # Shares
//!
//! [`fairness`] has two functions compete, on one sidecore or two, and says what each was served.
#![forbid(unsafe_code)]

pub mod controller;
pub mod fairness;
mod guest;
mod many;
mod random;
mod violation;
pub mod volumes;
mod world;

pub use many::{Total, run_many};
pub use random::Random;
pub use violation::Violation;
pub use world::{Outcome, run};
