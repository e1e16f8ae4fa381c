//! Code that the demo, the bench and the integration tests share.
#![forbid(unsafe_code)]

pub mod headers;
pub mod pages;
