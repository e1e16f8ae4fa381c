//! To come with the crates below.
#![forbid(unsafe_code)]
fn main() {}
