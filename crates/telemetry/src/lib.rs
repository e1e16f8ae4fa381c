//! Counters and latency histograms, and the one place where each of them is declared.
//!
//! [`counters!`] makes two structs of one list: the counters that a sidecore writes
//! ([`CounterSet`]), and their values at one moment ([`Counts`]), which can be summed over queues
//! and are the JSON of the control API. The same list has the Prometheus name and the help text of
//! each counter, and so the rows of docs/metrics.md.
#![forbid(unsafe_code)]

// The expansion of `counters!` names this crate by its full name, also in its own tests.
extern crate self as sidecore_telemetry;

mod counter;
mod declare;
mod histogram;
mod latency;
mod metric;

pub use counter::{Counter, Gauge, SharedCounter};
pub use declare::{CounterSet, Counts};
pub use histogram::Histogram;
pub use latency::{Latency, LatencyCounts};
pub use metric::{HistogramMetric, Kind, Metric, Value};

#[doc(hidden)]
pub use schemars;
#[doc(hidden)]
pub use serde;
