//! Clients and an IOhost of the remote channel, on a network that does its worst.
//!
//! # Real and simulated
//!
//! Both engines of `sidecore-vrio` are the production code. Simulated are time, the guests, the
//! links, the [network], and the IOhost's [store], which executes requests in any
//! order and keeps writes in a cache until they are flushed.
//!
//! In a quarter of the histories, the IOhost's engine is that of an
//! [`Export`](sidecore_remote::export::Export), with turns, steering, executors and up to three
//! [`Helper`](sidecore_remote::export::Helper)s. Each unit has a sidecore, which polls it, arms it,
//! sleeps and wakes at times of its own. A thread is simulated as far as polls: nothing happens
//! between the steps of one.
//!
//! # A history
//!
//! A seed gives the number of clients and of their devices, block and frame sizes, a kind of
//! network, and how often things break. The guest of each device writes, reads, flushes, discards,
//! with requests that overlap; its memory changes when a write is answered. Frames are lost (up to
//! 30 %), doubled, delayed, damaged; paths are cut in one direction or both. The IOhost's process
//! dies, or its machine loses power; the machines of clients die, too. At the end the network
//! heals, all requests have to end, and all devices are read; then the IOhost loses its power once
//! more, and the devices are read again.
//!
//! # Properties
//!
//! [`model`] says what a read may return: each write takes effect once, in the order of acceptance
//! where writes overlap, and is there when it was answered, whatever the IOhost did. After the
//! death of a client what it had flushed is there. A device's requests are with one sidecore at a
//! time.
//!
//! # A guest that is started elsewhere
//!
//! Histories of their own ([`moves`]) have one guest and two clients of the same device. The VMM of
//! the guest is killed, without a last flush, and another one starts the guest at either client.
//! Meanwhile IOhosts and paths fail as above.
//!
//! # Does it notice anything?
//!
//! Each rule of docs/decisions/0040-remote-sessions.md, and that of steering, can be turned off
//! ([`Rule`](sidecore_vrio::Rule)); tests assert that a history then fails.

mod disk;
pub mod failover;
mod guest;
mod history;
mod member;
pub mod model;
pub mod moves;
pub mod network;
mod seal;
pub mod store;
mod unit;
mod world;

pub use history::{Options, Outcome, run};
