//! The session against a function that records its calls, without a socket.

#[path = "../common/mod.rs"]
mod common;
mod device;
mod fixture;
mod interrupts;
mod later;
mod memory;
mod negotiation;
