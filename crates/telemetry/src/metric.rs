//! Rows of the Prometheus page: a name, a kind, a help text, and how to read the value.

use std::fmt;

use crate::Latency;

/// The Prometheus type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Never goes back while the daemon runs.
    Counter,
    /// Goes up and down.
    Gauge,
}

impl Kind {
    /// The word for it on the page.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }
}

/// The value of a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A count.
    Whole(u64),
    /// A time in seconds, or a share.
    Real(f64),
}

impl Value {
    /// Nanoseconds as seconds.
    #[must_use]
    pub fn seconds(ns: u64) -> Self {
        Self::Real(ns as f64 / 1e9)
    }

    /// The value of a field, whose name ends in its unit: Prometheus wants times in seconds.
    #[must_use]
    pub fn of(field: &str, number: u64) -> Self {
        if field.ends_with("_ns") { Self::seconds(number) } else { Self::Whole(number) }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole(number) => number.fmt(f),
            Self::Real(number) => number.fmt(f),
        }
    }
}

/// A number of a `T`.
#[derive(Debug)]
pub struct Metric<T> {
    /// The field of `T`, which is also its name in JSON.
    pub field: &'static str,
    /// The name on the Prometheus page, without the prefix; none if the number is not there.
    pub name: Option<&'static str>,
    /// Counter or gauge.
    pub kind: Kind,
    /// The meaning, in a sentence or two.
    pub help: &'static str,
    /// Reads the number.
    pub value: fn(&T) -> Value,
}

/// A histogram of a `T`.
#[derive(Debug)]
pub struct HistogramMetric<T> {
    /// The name on the Prometheus page, without the prefix and the unit: `_seconds` is the
    /// histogram, `_max_seconds` the longest latency.
    pub name: &'static str,
    /// The meaning, in a sentence or two.
    pub help: &'static str,
    /// Reads the histogram.
    pub latency: fn(&T) -> &Latency,
}
