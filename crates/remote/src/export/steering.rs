//! The choice of the sidecore that executes a device's requests (vRIO, 4.1).

use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use sidecore_telemetry::counters;

/// The requests of exports that a sidecore has, from all links. Shared by those that hand it
/// requests.
#[derive(Debug, Default)]
pub struct Load {
    /// From the links that other sidecores poll.
    given: AtomicU32,
    /// From those that it polls itself. It alone changes the number.
    own: AtomicU32,
}

impl Load {
    /// Adds requests that another sidecore gives it.
    #[inline]
    pub fn add(&self, requests: u32) {
        self.given.fetch_add(requests, Ordering::Relaxed);
    }

    /// Takes off requests of other sidecores that have ended.
    #[inline]
    pub fn sub(&self, requests: u32) {
        self.given.fetch_sub(requests, Ordering::Relaxed);
    }

    /// The number of its requests.
    #[must_use]
    #[inline]
    pub fn get(&self) -> u32 {
        let own = self.own.load(Ordering::Relaxed);
        self.given.load(Ordering::Relaxed).wrapping_add(own)
    }

    /// Changes the number of its own requests, on this sidecore.
    #[inline]
    fn change_own(&self, from: u32, to: u32) {
        let own = self.own.load(Ordering::Relaxed);
        self.own.store(own.wrapping_sub(from).wrapping_add(to), Ordering::Relaxed);
    }
}

/// The requests that a sidecore executes from a link that it polls itself.
///
/// Its load shows those of the last poll until the next one: the requests that a store carries out
/// in the call that submits them keep the sidecore as busy as others, and are in flight at no time
/// at which a poll begins or ends.
#[derive(Debug)]
pub struct OwnLoad {
    load: Arc<Load>,
    in_flight: u32,
    /// Those that the load has.
    published: u32,
    /// It stays on its sidecore.
    _here: PhantomData<Rc<()>>,
}

impl OwnLoad {
    /// No requests, of a sidecore that has this load.
    #[must_use]
    pub fn new(load: &Arc<Load>) -> Self {
        Self { load: Arc::clone(load), in_flight: 0, published: 0, _here: PhantomData }
    }

    /// Adds a request.
    #[inline]
    pub const fn add(&mut self) {
        self.in_flight = self.in_flight.saturating_add(1);
    }

    /// Whether there is no request, and the load has none.
    #[inline]
    pub const fn is_published_empty(&self) -> bool {
        self.in_flight == 0 && self.published == 0
    }

    /// Takes off requests that have ended.
    #[inline]
    pub const fn sub(&mut self, requests: u32) {
        self.in_flight = self.in_flight.saturating_sub(requests);
    }

    /// Makes the sidecore's load that of this poll: to be called once all of its requests have been
    /// added, and before they are executed.
    #[inline]
    pub fn publish(&mut self) {
        if self.in_flight != self.published {
            self.load.change_own(self.published, self.in_flight);
            self.published = self.in_flight;
        }
    }

    /// Requests in flight.
    #[must_use]
    #[inline]
    pub const fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// The sidecore's load of this moment.
    #[inline]
    fn get(&self) -> u32 {
        self.load.get().wrapping_sub(self.published).wrapping_add(self.in_flight)
    }
}

impl Drop for OwnLoad {
    fn drop(&mut self) {
        self.load.change_own(self.published, 0);
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
    #[inline]
    pub fn next(&mut self, own: &OwnLoad, others: &[Arc<Load>]) -> usize {
        if self.in_flight == 0 && !others.is_empty() {
            self.choose(own, others);
        }
        self.in_flight = self.in_flight.saturating_add(1);
        self.sidecore
    }

    /// Assigns the device to the least loaded sidecore.
    #[inline]
    pub fn choose(&mut self, own: &OwnLoad, others: &[Arc<Load>]) {
        let loads = std::iter::once(own.get()).chain(others.iter().map(|load| load.get()));
        let least = loads.enumerate().min_by_key(|(_, load)| *load);
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

    fn loads(count: usize) -> (OwnLoad, Vec<Arc<Load>>) {
        (OwnLoad::new(&Arc::default()), (1..count).map(|_| Arc::default()).collect())
    }

    #[test]
    fn a_device_stays_where_it_has_unfinished_requests() {
        let (mut own, others) = loads(2);
        let mut device = Assigned::default();
        assert_eq!(device.next(&own, &others), 0);
        (0..100).for_each(|_| own.add());
        assert_eq!(device.next(&own, &others), 0);
        device.ended();
        assert_eq!(device.next(&own, &others), 0);
        device.ended();
        device.ended();
        assert_eq!(device.next(&own, &others), 1);
        others[0].add(200);
        assert_eq!(device.next(&own, &others), 1);
        let mut other = Assigned::default();
        others[0].sub(99);
        assert_eq!(Assigned::default().next(&own, &others), 0);
        own.add();
        own.add();
        assert_eq!(other.next(&own, &others), 1);
    }

    /// A store that carries requests out at once leaves none in flight, and the sidecore is busy
    /// all the same.
    #[test]
    fn a_sidecore_shows_the_requests_of_its_last_poll() {
        let load: Arc<Load> = Arc::default();
        let mut own = OwnLoad::new(&load);
        let mut poll = |requests: u32| {
            (0..requests).for_each(|_| own.add());
            let before = (own.get(), load.get());
            own.publish();
            own.sub(requests);
            (before, own.get(), load.get())
        };
        // Its load of this moment has no requests of the last poll, the others see those alone.
        assert_eq!(poll(7), ((7, 0), 0, 7));
        assert_eq!(poll(3), ((3, 7), 0, 3));
        assert_eq!(poll(0), ((0, 3), 0, 0));
        assert_eq!(poll(5).2, 5);
        // Beside those of another link of the sidecore, and those that others have given it.
        let mut second = OwnLoad::new(&load);
        second.add();
        second.publish();
        load.add(10);
        assert_eq!((load.get(), own.get(), second.get()), (16, 11, 16));
        drop(own);
        assert_eq!(load.get(), 11);
        drop(second);
        load.sub(10);
        assert_eq!(load.get(), 0);
    }

    /// Devices with different numbers of requests at a time, in rounds: each round, each device
    /// has all of its requests executed.
    #[test]
    fn devices_spread_over_the_sidecores_by_their_load() {
        let (mut own, others) = loads(4);
        let mut devices = [Assigned::default(); 16];
        let mut executed = [0_u32; 4];
        for round in 0..1000_u32 {
            let mut given = Vec::new();
            for (number, device) in devices.iter_mut().enumerate() {
                for _ in 0..(number as u32 * 7 + round) % 13 + 1 {
                    let sidecore = device.next(&own, &others);
                    match sidecore {
                        0 => own.add(),
                        other => others[other - 1].add(1),
                    }
                    given.push((number, sidecore));
                }
            }
            for (number, sidecore) in given {
                devices[number].ended();
                match sidecore {
                    0 => own.sub(1),
                    other => others[other - 1].sub(1),
                }
                executed[sidecore] += 1;
            }
        }
        let (least, most) = (executed.iter().min().unwrap(), executed.iter().max().unwrap());
        assert!(f64::from(*least) / f64::from(*most) > 0.8, "{executed:?}");
        assert_eq!(own.get(), 0);
        assert!(others.iter().all(|load| load.get() == 0));
    }
}
