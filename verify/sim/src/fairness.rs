//! Two virtual functions whose guests saturate them, and the service that each gets.
//!
//! # Real and simulated parts
//!
//! The controller, its functions, the reactors, the queues and the rings are the production code.
//! One sidecore at a time takes a turn, the one whose clock is behind the others', so that a seed
//! gives the same history again. Simulated are time, the guests, which keep their queues full, and
//! the [store](Store).
//!
//! # Time
//!
//! A turn takes the time of its requests, give or take a tenth, and some time for the turn itself.

mod guest;
mod sidecore;
mod store;

use std::sync::Arc;

use sidecore_block::{BlockDevice, Geometry, RamStore};
use sidecore_controller::{
    Controller, ControllerOptions, FunctionOptions, PhysicalDisk, VirtualFunction,
};
use sidecore_units::Nanos;
use sidecore_volume::{Disk, FormatOptions};

use crate::Random;
use guest::VOLUME_BYTES;
use sidecore::Sidecore;
use store::SlotStore;

/// The store below the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// Memory: a request costs its sidecore 250 ns, and no other resource is scarce.
    Ram,
    /// A device that executes so many requests at a time, each in a millisecond, in the order of
    /// submission.
    Slots(usize),
}

/// The sidecores that serve a function's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// One sidecore serves all.
    Together,
    /// Each function has a sidecore.
    Apart,
    /// Two sidecores each serve queues of both functions.
    Spread,
}

/// Two functions and the resources that they share.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Without a second weight the first function is alone.
    pub weights: (u32, Option<u32>),
    /// By function.
    pub queues: (usize, usize),
    /// Requests in flight in each queue, by function.
    pub depths: (u16, u16),
    /// The store below the controller.
    pub store: Store,
    /// The sidecores of the queues.
    pub placement: Placement,
}

/// The result of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Served {
    /// Requests per second, by function.
    pub per_s: [f64; 2],
    /// Requests of the least and the most served queue of the first function, in the same time.
    pub first_queues: (u64, u64),
    /// The times that a queue of any function began to wait for the store, from the start.
    pub store_waits: u64,
}

impl Served {
    /// The requests per second of both functions.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.per_s[0] + self.per_s[1]
    }

    /// The first function's requests for each request of the second.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.per_s[0] / self.per_s[1]
    }
}

/// The time that a case takes. Requests during the warm-up do not count.
struct Span {
    warm_up: Nanos,
    measured: Nanos,
}

impl Store {
    fn span(self) -> Span {
        match self {
            Self::Ram => Span { warm_up: Nanos::from_millis(1), measured: Nanos::from_millis(8) },
            Self::Slots(_) => {
                Span { warm_up: Nanos::from_millis(120), measured: Nanos::from_millis(240) }
            }
        }
    }
}

/// Runs `case` with the random numbers of `seed`.
///
/// # Panics
/// A broken invariant.
#[must_use]
pub fn run(case: &Case, seed: u64) -> Served {
    let mut random = Random::new(seed);
    let ram = Arc::new(RamStore::new(Geometry::new(8 << 20, 512)).expect("8 MiB"));
    let slots = if let Store::Slots(slots) = case.store { slots } else { 0 };
    let store = Arc::new(SlotStore::new(ram, slots));
    let controller = controller(&store);
    let functions = functions(case, &controller);
    // From here on, new channels wait for slots.
    store.begin();
    let sidecore_count = if case.placement == Placement::Together { 1 } else { 2 };
    let mut sidecores: Vec<Sidecore> =
        (0..sidecore_count).map(|_| Sidecore::start(case.store)).collect();
    for (index, function) in functions.iter().enumerate() {
        let (queues, depth) = if index == 0 {
            (case.queues.0, case.depths.0)
        } else {
            (case.queues.1, case.depths.1)
        };
        for queue in 0..queues {
            let sidecore = match case.placement {
                Placement::Together => 0,
                Placement::Apart => index,
                Placement::Spread => (queue + index) % 2,
            };
            sidecores[sidecore].serve(index, &**function, depth);
        }
    }
    let Span { warm_up, measured } = case.store.span();
    let mut start = None;
    loop {
        let (now, next) = sidecores
            .iter_mut()
            .map(|sidecore| (sidecore.now, sidecore))
            .min_by_key(|(now, _)| *now)
            .expect("one");
        if start.is_none() && now >= warm_up {
            start = Some(sidecores.iter().map(Sidecore::served).collect::<Vec<_>>());
            continue;
        }
        if now >= warm_up.after(measured) {
            break;
        }
        next.turn(&mut random);
    }
    let mut queues: Vec<(usize, u64)> = Vec::new();
    for (sidecore, before) in sidecores.iter().zip(start.expect("it has begun")) {
        let served = sidecore.served().into_iter().zip(before);
        queues.extend(served.map(|((function, after), (_, before))| (function, after - before)));
    }
    let seconds = measured.0 as f64 / 1e9;
    let of =
        |function| queues.iter().filter(move |(of, _)| *of == function).map(|(_, served)| *served);
    Served {
        per_s: [of(0).sum::<u64>() as f64 / seconds, of(1).sum::<u64>() as f64 / seconds],
        first_queues: (of(0).min().unwrap_or(0), of(0).max().unwrap_or(0)),
        store_waits: controller.report().functions.iter().map(|f| f.stats.store_waits).sum(),
    }
}

fn controller(store: &Arc<SlotStore>) -> Arc<Controller> {
    let format =
        FormatOptions { block_bytes: 1024, label: "fair".to_owned(), uuid: [3; 16], force: false };
    let options = ControllerOptions { format: Some(format), ..ControllerOptions::default() };
    Controller::open("fair", Arc::clone(store) as _, &options, None).expect("a controller")
}

/// The functions, on volumes whose blocks are all written.
fn functions(case: &Case, controller: &Arc<Controller>) -> Vec<Arc<VirtualFunction>> {
    let weights = std::iter::once(case.weights.0).chain(case.weights.1);
    let named = weights.zip(["first", "second"]);
    let make = |(weight, name): (u32, &str)| {
        controller.create_volume(name, VOLUME_BYTES, None).expect("room for a volume");
        let options = FunctionOptions { weight, ..FunctionOptions::new(name) };
        let function = controller.open_function(&options).expect("a function");
        let device: Arc<dyn BlockDevice> = Arc::clone(&function) as _;
        let mut disk = PhysicalDisk::open(&device).expect("a channel");
        disk.write(0, &vec![1; VOLUME_BYTES as usize]).expect("a write");
        disk.flush().expect("a flush");
        function
    };
    named.map(make).collect()
}
