//! Code that the demo, the bench and the integration tests share.
#![forbid(unsafe_code)]

pub mod certificates;
pub mod etcd;
#[cfg(feature = "guest")]
pub mod guest;
pub mod headers;
pub mod interrupt;
pub mod loop_device;
pub mod mount;
pub mod namespace;
pub mod pages;
pub mod process;
pub mod wait;
