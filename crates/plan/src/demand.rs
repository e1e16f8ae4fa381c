//! The number of sidecores that a rack needs for a p99, by simulation.

use serde::Serialize;

use crate::file::{Load, Pair, Plan, Requests, Stages};
use crate::simulation::{self, BATCH, Client, Costs, Outcome, Path, Stage, System};
use crate::work::Work;

/// Measured requests of a run: a thousand are slower than the p99.
const REQUESTS: f64 = 100_000.0;
/// The most sidecores that are tried.
const MOST: usize = 512;
const SEED: u64 = 1;

/// The sidecores of a rack.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Demand {
    /// The number of servers.
    pub servers: u64,
    /// The VMs of the rack that ask at one time.
    pub active_vms: u64,
    /// The p99 that is wanted.
    pub p99_us: f64,
    /// The sidecores of one server, all of whose VMs ask.
    pub of_server: Sidecores,
    /// The sidecores at the IOhosts, for the VMs that ask at one time.
    pub of_iohosts: Sidecores,
    /// The second number beside that of all servers: `rack.consolidation` of the prices.
    pub consolidation: Option<f64>,
}

/// The fewest sidecores that meet the p99.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sidecores {
    /// `None` if no number up to the most that is tried meets it.
    pub count: Option<usize>,
    /// The p99 with that many, or else the least that was seen.
    pub p99_us: Option<f64>,
    /// The useful share of their time.
    pub useful: Option<f64>,
}

/// Counts the sidecores for each rack of a plan. `None` without a load.
#[must_use]
pub fn demands(plan: &Plan) -> Option<Vec<Demand>> {
    let (load, requests) = plan.load.as_ref().zip(plan.requests.as_ref())?;
    let sought = Sought { load, requests };
    let of_server = sought.of_server();
    let demand = |servers: &u64| {
        let vms = (*servers * load.vms) as f64 * load.active;
        let active_vms = (vms.ceil() as u64).max(1);
        let of_iohosts = sought.of_iohosts(active_vms);
        let all = of_server.count.map(|count| count as f64 * *servers as f64);
        let consolidation = of_iohosts.count.zip(all).map(|(count, all)| count as f64 / all);
        let of_server = of_server.clone();
        let (servers, p99_us) = (*servers, load.p99_us);
        Demand { servers, active_vms, p99_us, of_server, of_iohosts, consolidation }
    };
    Some(plan.rack.servers.iter().map(demand).collect())
}

struct Sought<'a> {
    load: &'a Load,
    requests: &'a Requests,
}

impl Sought<'_> {
    /// A server's sidecores divide its VMs among them; the one with most of them decides.
    fn of_server(&self) -> Sidecores {
        let vms = self.load.vms as usize;
        let costs = self.costs(|stages| Path {
            client: stage(stages.local_guest),
            here: stage(stages.local_sidecore),
            ..Path::default()
        });
        let system = |sidecores: usize| {
            let wire_ns = self.requests.local_wire_ns;
            let clients = self.clients(vms.div_ceil(sidecores), 1);
            System { wire_ns, clients, ..System::new(costs, 1) }
        };
        self.fewest(&costs, vms, MOST.min(vms), system)
    }

    /// All sidecores of the IOhosts share the VMs by the product's own rule.
    fn of_iohosts(&self, vms: u64) -> Sidecores {
        let costs = self.costs(|stages| Path {
            client: stage(stages.client),
            here: stage(stages.iohost),
            forward: stage(stages.hands_over),
            helper: stage(stages.helper),
            answer: stage(stages.answers),
        });
        let vms = usize::try_from(vms).unwrap_or(usize::MAX);
        let system = |sidecores: usize| System {
            wire_ns: self.requests.wire_ns,
            crossing_ns: self.requests.crossing_ns,
            clients: self.clients(vms, sidecores),
            ..System::new(costs, sidecores)
        };
        self.fewest(&costs, vms, MOST, system)
    }

    fn costs(&self, path: impl Fn(&Stages) -> Path) -> Costs {
        Costs { read: path(&self.requests.read), write: path(&self.requests.write) }
    }

    fn clients(&self, vms: usize, sidecores: usize) -> Vec<Client> {
        let bytes = u32::try_from(self.requests.bytes).unwrap_or(u32::MAX);
        let client = |index| Client {
            home: index % sidecores,
            threads: vec![Work::Mixed(bytes, self.load.reads)],
            guest_ns: 0.0,
            every_ns: 1e9 / self.load.requests_per_s,
        };
        (0..vms).map(client).collect()
    }

    /// The fewest sidecores, up to `most`, whose system meets the p99.
    ///
    /// A search that doubles its steps and then halves the interval makes at most 20 runs.
    fn fewest(
        &self,
        costs: &Costs,
        vms: usize,
        most: usize,
        system: impl Fn(usize) -> System,
    ) -> Sidecores {
        let none = Sidecores { count: None, p99_us: None, useful: None };
        // Fewer are too slow even when all requests come in full batches.
        let bytes = u32::try_from(self.requests.bytes).unwrap_or(u32::MAX);
        let [read, write] =
            [costs.read, costs.write].map(|path| path.here.in_batch(bytes, BATCH as f64));
        let request_ns = read * self.load.reads + write * (1.0 - self.load.reads);
        let least = vms as f64 * self.load.requests_per_s * request_ns / 1e9;
        if least > most as f64 {
            return none;
        }
        let run = |sidecores: usize| {
            let outcome = self.run(system(sidecores));
            (outcome.latency_p99_ns / 1e3, outcome)
        };
        let meets = |p99_us: f64| p99_us > 0.0 && p99_us <= self.load.p99_us;
        let (mut low, mut high, mut step) = (0, (least.ceil() as usize).clamp(1, most), 1);
        let mut found = run(high);
        let mut best_us = found.0;
        while !meets(found.0) {
            if high == most {
                return Sidecores { p99_us: Some(best_us), ..none };
            }
            low = high;
            high = (high + step).min(most);
            step *= 2;
            found = run(high);
            best_us = best_us.min(found.0);
        }
        // The first one tried is the fewest that can be enough.
        while low > 0 && high - low > 1 {
            let middle = low.midpoint(high);
            let tried = run(middle);
            if meets(tried.0) {
                (high, found) = (middle, tried);
            } else {
                low = middle;
            }
        }
        let useful = found.1.useful.iter().sum::<f64>() / found.1.useful.len().max(1) as f64;
        Sidecores { count: Some(high), p99_us: Some(found.0), useful: Some(useful) }
    }

    fn run(&self, system: System) -> Outcome {
        let system = System { store_ns: self.requests.store_ns, ..system };
        let per_s = system.clients.len() as f64 * self.load.requests_per_s;
        let measured_ns = REQUESTS / per_s * 1e9;
        let around_ns = system.store_ns + 2.0 * system.wire_ns;
        simulation::run(&system, measured_ns / 10.0 + 2.0 * around_ns, measured_ns, SEED)
    }
}

fn stage(pair: Pair) -> Stage {
    Stage::of_batches(pair, BATCH as f64)
}

#[cfg(test)]
mod tests;
