//! Rings in shared memory: the virtqueues of virtio 1.2, split (2.7) and
//! packed (2.8), and the queues of NVMe (base 2.0, 3.3), each from both sides.
//!
//! * [`DeviceRing`] is the device's side, which a sidecore polls. It trusts
//!   nothing it reads there: every walk is bounded by the queue size, every
//!   word is read once, and what makes no sense is a [`RingError`] with a name.
//! * [`nvme`] is the same for a controller's queues and doorbells.
//! * [`driver`] is the guest's side in user space, for tests, benches and
//!   applications that reach a device with no kernel.
//! * [`spsc()`] is a ring between two threads of this process.
//!
//! Unsafe code is here because ring words are read and written through raw pointers into shared
//! memory; a ring's [`Window`](sidecore_memory::Window)s keep that memory mapped. The slots of a
//! ring between threads change hands without a lock.
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

mod cell;
mod chain;
mod device;
pub mod driver;
mod error;
mod history;
mod indirect;
mod layout;
mod log;
pub mod nvme;
mod packed;
mod split;
mod spsc;

pub use chain::{Chain, Descriptor, Token};
pub use device::DeviceRing;
pub use error::RingError;
pub use history::was_used;
pub use layout::{RingFormat, RingLayout, RingState};
pub use spsc::{Consumer, Producer, spsc};
