//! The declaration of counters.

use crate::{HistogramMetric, Metric};

/// Counters that are written by their owner and read by any thread: what [`counters!`] declares
/// first.
///
/// [`counters!`]: crate::counters
pub trait CounterSet {
    /// The values of these counters at one moment.
    type Counts: Counts;

    /// Adds the values of now to `sum`. They are not of the same instant.
    fn add_to(&self, sum: &mut Self::Counts);

    /// The values of now.
    fn counts(&self) -> Self::Counts {
        let mut counts = Self::Counts::default();
        self.add_to(&mut counts);
        counts
    }
}

/// The values of counters at one moment, or the sum over several of their kind.
pub trait Counts: Default + 'static {
    /// The counters and gauges, in the order of their declaration.
    const METRICS: &'static [Metric<Self>];
    /// The histograms.
    const HISTOGRAMS: &'static [HistogramMetric<Self>];

    /// Adds the values of another queue, device, function ...
    fn add(&mut self, other: &Self);
}

/// Declares counters: the struct that is written, the struct of their values, and their metrics.
///
/// Each line is a documented field of a type of this crate ([`Counter`], [`SharedCounter`],
/// [`Gauge`]), with the name that Prometheus shows, if it shows the number at all. The
/// documentation is the help text there and in docs/metrics.md. A field whose name ends in `_ns` is
/// in seconds on the Prometheus page. Names are without the prefix (`sidecore_device_`), which
/// belongs to the page. A histogram has two field names: the first in the struct that is written,
/// the second in the struct of values and in JSON.
///
/// ```
/// use sidecore_telemetry::{CounterSet, Counts, counters};
///
/// counters! {
///     /// The counters of a door.
///     pub struct DoorStats;
///
///     /// Their values at one moment.
///     pub struct DoorCounts;
///
///     /// Times that the door was opened.
///     pub openings: Counter = "openings_total",
///     /// Time that it was open.
///     pub open_ns: Counter = "open_seconds_total",
/// }
///
/// let door = DoorStats::default();
/// door.openings.add(1);
/// let mut both = door.counts();
/// door.add_to(&mut both);
/// assert_eq!(both.openings, 2);
/// assert_eq!(DoorCounts::METRICS[1].help, "Time that it was open.");
/// ```
///
/// [`Counter`]: crate::Counter
/// [`SharedCounter`]: crate::SharedCounter
/// [`Gauge`]: crate::Gauge
#[macro_export]
macro_rules! counters {
    (
        $(#[$live_meta:meta])*
        $live_vis:vis struct $Live:ident;

        $(#[$counts_meta:meta])*
        $counts_vis:vis struct $Counts:ident;

        $(
            $(#[doc = $doc:literal])+
            $vis:vis $name:ident: $Cell:ident $(= $metric:literal)?,
        )+
        $(histogram {
            $(#[doc = $about:literal])+
            $histogram_vis:vis $histogram:ident as $latency:ident = $family:literal,
        })?
    ) => {
        $(#[$live_meta])*
        #[derive(Debug, Default)]
        $live_vis struct $Live {
            $($(#[doc = $doc])+ $vis $name: $crate::$Cell,)+
            $($(#[doc = $about])+ $histogram_vis $histogram: $crate::Histogram,)?
        }

        $(#[$counts_meta])*
        #[derive(Clone, Debug, Default, PartialEq)]
        #[derive($crate::schemars::JsonSchema)]
        #[derive($crate::serde::Serialize, $crate::serde::Deserialize)]
        // A counter that an older daemon does not know is zero.
        #[serde(default, crate = "sidecore_telemetry::serde")]
        #[schemars(crate = "sidecore_telemetry::schemars")]
        $counts_vis struct $Counts {
            $($(#[doc = $doc])+ pub $name: u64,)+
            $($(#[doc = $about])+ pub $latency: $crate::Latency,)?
        }

        impl $crate::CounterSet for $Live {
            type Counts = $Counts;

            fn add_to(&self, sum: &mut $Counts) {
                $(sum.$name = sum.$name.saturating_add(self.$name.get());)+
                $(sum.$latency.add(&self.$histogram.counts());)?
            }
        }

        impl $crate::Counts for $Counts {
            const METRICS: &'static [$crate::Metric<Self>] = &[$($crate::Metric {
                field: stringify!($name),
                name: <[&'static str]>::first(&[$($metric)?]).copied(),
                kind: $crate::$Cell::KIND,
                help: concat!($($doc),+).trim_ascii(),
                value: |counts| $crate::Value::of(stringify!($name), counts.$name),
            }),+];

            const HISTOGRAMS: &'static [$crate::HistogramMetric<Self>] = &[
                $($crate::HistogramMetric {
                    name: $family,
                    help: concat!($($about),+).trim_ascii(),
                    latency: |counts| &counts.$latency,
                })?
            ];

            fn add(&mut self, other: &Self) {
                $(self.$name = self.$name.saturating_add(other.$name);)+
                $(self.$latency.add(&other.$latency.counts());)?
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use sidecore_units::Nanos;

    use crate::{CounterSet, Counts, Kind, Value};

    counters! {
        /// Written.
        struct Stats;

        /// Read.
        struct Values;

        /// Requests, of
        /// every kind.
        requests: Counter = "requests_total",
        /// Time.
        busy_ns: Counter = "busy_seconds_total",
        /// Not on the page.
        hidden: SharedCounter,
        /// Waiting right now.
        queued: Gauge = "queued",
        histogram {
            /// How long.
            latency as latency_ns = "latency",
        }
    }

    fn stats() -> Stats {
        let stats = Stats::default();
        stats.requests.add(3);
        stats.busy_ns.add(1_500_000_000);
        stats.hidden.add(5);
        stats.queued.set(8);
        stats.queued.set(7);
        stats.latency.record(Nanos(10), 2);
        stats
    }

    #[test]
    fn a_sum_adds_what_is_written_and_what_was_read() {
        let stats = stats();
        let mut sum = stats.counts();
        stats.add_to(&mut sum);
        sum.add(&stats.counts());
        assert_eq!((sum.requests, sum.busy_ns, sum.hidden, sum.queued), (9, 4_500_000_000, 15, 21));
        assert_eq!((sum.latency_ns.count, sum.latency_ns.sum, sum.latency_ns.max), (6, 60, 10));
        let mut most = Values { requests: u64::MAX, ..Values::default() };
        most.add(&sum);
        assert_eq!(most.requests, u64::MAX);
    }

    #[test]
    fn metrics_have_name_kind_help_and_value_of_their_field() {
        let counts = stats().counts();
        let row = |index: usize| {
            let metric = &Values::METRICS[index];
            (metric.field, metric.name, metric.kind, metric.help, (metric.value)(&counts))
        };
        assert_eq!(Values::METRICS.len(), 4);
        assert_eq!(
            row(0),
            (
                "requests",
                Some("requests_total"),
                Kind::Counter,
                "Requests, of every kind.",
                Value::Whole(3)
            )
        );
        assert_eq!(
            row(1),
            ("busy_ns", Some("busy_seconds_total"), Kind::Counter, "Time.", Value::Real(1.5))
        );
        assert_eq!(row(2), ("hidden", None, Kind::Counter, "Not on the page.", Value::Whole(5)));
        assert_eq!(
            row(3),
            ("queued", Some("queued"), Kind::Gauge, "Waiting right now.", Value::Whole(7))
        );
        let [histogram] = Values::HISTOGRAMS else { panic!("one histogram is declared") };
        assert_eq!((histogram.name, histogram.help), ("latency", "How long."));
        assert_eq!((histogram.latency)(&counts).count, 2);
    }

    #[test]
    fn values_are_json_by_their_field_names_and_absent_ones_are_zero() {
        let counts = stats().counts();
        let json = serde_json::to_value(&counts).unwrap();
        assert_eq!((&json["requests"], &json["busy_ns"]), (&3.into(), &1_500_000_000.into()));
        assert_eq!(json["latency_ns"]["max"], 10);
        assert_eq!(serde_json::from_value::<Values>(json).unwrap(), counts);
        let old: Values = serde_json::from_str("{\"requests\": 2, \"unknown\": 1}").unwrap();
        assert_eq!(old, Values { requests: 2, ..Values::default() });
    }
}
