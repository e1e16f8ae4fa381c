//! The choice of the sidecore that executes a device's requests (vRIO, 4.1).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use sidecore_telemetry::counters;

/// The requests of exports that a sidecore has, from all links. Shared by those that hand it
/// requests.
#[derive(Debug, Default)]
pub struct Load(AtomicU32);

impl Load {
    /// Adds requests that the sidecore was given.
    #[inline]
    pub fn add(&self, requests: u32) {
        self.0.fetch_add(requests, Ordering::Relaxed);
    }

    /// Takes off requests that have ended.
    #[inline]
    pub fn sub(&self, requests: u32) {
        self.0.fetch_sub(requests, Ordering::Relaxed);
    }

    /// The number of its requests.
    #[must_use]
    #[inline]
    pub fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

counters! {
    /// The counters of one of a link's executors. The sidecore that polls the link alone writes
    /// them, any thread may read them.
    pub struct ExecutorStats;

    /// The counters at one moment, or the sum over the link's queues.
    pub struct ExecutorCounts;

    /// Requests from the link that the sidecore was given.
    pub requests: Counter = "requests_total",
    /// Sub-batches in which it was given them: the requests of a poll for the sidecore that polls
    /// the link, up to eight requests of a device for another one.
    pub sub_batches: Counter = "sub_batches_total",
}

/// The sidecore that has a device's unfinished requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Assigned {
    /// Index of the sidecore; 0 is the one that polls the link.
    pub sidecore: usize,
    /// Requests that have not ended.
    pub in_flight: u32,
}

impl Assigned {
    /// The sidecore for the device's next request: while some are unfinished, the one that has
    /// them, which keeps their order; otherwise the least loaded, and of equals the first, which
    /// is the one that polls the link.
    ///
    /// `here` are requests that the first load does not have yet.
    #[inline]
    pub fn next(&mut self, loads: &[Arc<Load>], here: u32) -> usize {
        if self.in_flight == 0 && loads.len() > 1 {
            self.choose(loads, here);
        }
        self.in_flight = self.in_flight.saturating_add(1);
        self.sidecore
    }

    /// Assigns the device to the least loaded sidecore.
    #[inline]
    pub fn choose(&mut self, loads: &[Arc<Load>], here: u32) {
        let load = |(index, load): &(usize, &Arc<Load>)| {
            load.get().saturating_add(if *index == 0 { here } else { 0 })
        };
        let least = loads.iter().enumerate().min_by_key(load);
        self.sidecore = least.map_or(0, |(index, _)| index);
    }

    /// A request has ended.
    #[inline]
    pub const fn ended(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(count: usize) -> Vec<Arc<Load>> {
        (0..count).map(|_| Arc::default()).collect()
    }

    #[test]
    fn a_device_stays_where_it_has_unfinished_requests() {
        let loads = loads(2);
        let mut device = Assigned::default();
        assert_eq!(device.next(&loads, 0), 0);
        loads[0].add(100);
        assert_eq!(device.next(&loads, 0), 0);
        device.ended();
        assert_eq!(device.next(&loads, 0), 0);
        device.ended();
        device.ended();
        assert_eq!(device.next(&loads, 0), 1);
        loads[1].add(200);
        assert_eq!(device.next(&loads, 0), 1);
        let mut other = Assigned::default();
        assert_eq!(Assigned::default().next(&loads, 99), 0);
        assert_eq!(other.next(&loads, 101), 1);
    }

    /// Devices with different numbers of requests at a time, in rounds: each round, each device
    /// has all of its requests executed.
    #[test]
    fn devices_spread_over_the_sidecores_by_their_load() {
        let loads = loads(4);
        let mut devices = [Assigned::default(); 16];
        let mut executed = [0_u32; 4];
        for round in 0..1000_u32 {
            let mut given = Vec::new();
            for (number, device) in devices.iter_mut().enumerate() {
                for _ in 0..(number as u32 * 7 + round) % 13 + 1 {
                    let sidecore = device.next(&loads, 0);
                    loads[sidecore].add(1);
                    given.push((number, sidecore));
                }
            }
            for (number, sidecore) in given {
                devices[number].ended();
                loads[sidecore].sub(1);
                executed[sidecore] += 1;
            }
        }
        let (least, most) = (executed.iter().min().unwrap(), executed.iter().max().unwrap());
        assert!(f64::from(*least) / f64::from(*most) > 0.8, "{executed:?}");
        assert!(loads.iter().all(|load| load.get() == 0));
    }
}
