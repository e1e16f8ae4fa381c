//! Code that the demo, the bench and the integration tests share.
#![forbid(unsafe_code)]

pub mod headers;
pub mod interrupt;
pub mod pages;
pub mod process;
pub mod wait;
