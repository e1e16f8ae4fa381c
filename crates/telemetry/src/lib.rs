//! Counters and latency histograms: numbers that one thread writes and any thread reads.
#![forbid(unsafe_code)]

mod counter;
mod histogram;
mod latency;

pub use counter::Counter;
pub use histogram::Histogram;
pub use latency::{Latency, LatencyCounts};
