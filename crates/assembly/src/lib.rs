//! placeholder
#![forbid(unsafe_code)]
pub mod machine;
pub mod report;
pub mod spec;
