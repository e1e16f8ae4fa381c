//! Figures 5, 8 and 13: clients that ask one sidecore or several.

use anyhow::Result;

use super::timed::{Place, Rack, Setting};
use super::{BYTES, Bench, Model, STREAM_DEPTH};
use crate::plot::per_second;
use crate::record::OURS;
use crate::runs::{self, Metric, Runs};
use sidecore_plan::simulation::{Client, Outcome};
use sidecore_plan::work::Work;

/// The paper's: four VMhosts with one to seven VMs each.
const CLIENTS: [usize; 9] = [1, 2, 4, 8, 12, 16, 20, 24, 28];
const SIDECORES: [usize; 3] = [1, 2, 4];
/// The guest's work between two requests of figures 8 and 13a: the paper's optimum (figure 7), of
/// which nearly all is at the guest and its load generator.
const THOUGHT_NS: f64 = 30e3;
/// The clients that saturate a sidecore in the paper.
const PAPERS_KNEE: f64 = 13.0;
/// The share of the greatest throughput from which a sidecore counts as saturated.
const SATURATED: f64 = 0.95;
/// The greatest deviation from a straight line below the knee, and of sidecores from each other.
const TOLERANCE: f64 = 0.15;
const METRICS: [Metric; 2] = [runs::IOPS, runs::LATENCY_P50];

/// The outcomes of a load, for all numbers of sidecores and clients.
type Grid = Vec<Vec<Outcome>>;

impl Bench {
    /// Figure 5: an IOhost that polls beside one that sleeps, timed with one request in flight.
    pub(super) fn events(&mut self) -> Result<()> {
        let setting = |place| Setting { place, clients: 1, sidecores: 1, delay_us: 0 };
        let (experiment, bytes) = (&self.experiment, self.plan.disk_bytes);
        let mut polled = Rack::start(experiment, setting(Place::Remote), bytes)?;
        let mut slept = Rack::start(experiment, setting(Place::RemoteInterrupts), bytes)?;
        let work = self.work(1, false);
        let timed = self.time(&mut [&mut polled, &mut slept], &work)?;
        [polled, slept].into_iter().try_for_each(Rack::end)?;
        let case = "figure5/c1/s1";
        let [ours, peer] = timed.as_slice() else { anyhow::bail!("a system was not timed") };
        self.record_timed(case, &work, &[(OURS, ours), ("without-polling", peer)]);
        let [fast, slow] = [ours, peer].map(|runs| runs.rounds(|sample| sample.iops).median());
        self.page.shape(
            "5, Table 3",
            "throughput falls as events rise: 2 with polling, 6 without",
            format!(
                "timed: {} with polling, {} without, {:.1} times as much; the events are in the \
                 [demo's table](remote.md#seeing-it)",
                per_second(fast),
                per_second(slow),
                fast / slow
            ),
            fast > slow,
        );
        Ok(())
    }

    /// Figures 8 and 13.
    pub(super) fn scaling(&mut self, model: &Model) -> Result<()> {
        let asking = self.grid(model, "figure8", 1, THOUGHT_NS);
        let back_to_back = self.grid(model, "figure8/back-to-back", 1, 0.0);
        let stream = self.grid(model, "figure13/stream", STREAM_DEPTH, self.guest_ns);
        let stream_alone = self.grid(model, "figure13/stream/back-to-back", STREAM_DEPTH, 0.0);
        self.figure8(&asking, &back_to_back);
        self.figure13a(&asking);
        self.figure13b(model, &stream, &stream_alone);
        self.timed_scaling(&back_to_back, &stream_alone)
    }

    /// Simulates clients with `depth` requests in flight each.
    fn grid(&mut self, model: &Model, name: &str, depth: u16, guest_ns: f64) -> Grid {
        let mut grid = Vec::new();
        for sidecores in SIDECORES {
            let mut row = Vec::new();
            for clients in CLIENTS {
                let mut system = model.remote(model.ram.remote, sidecores);
                let threads = vec![Work::Read(BYTES); depth.into()];
                let client = |index| Client {
                    home: index % sidecores,
                    threads: threads.clone(),
                    guest_ns,
                    every_ns: 0.0,
                };
                system.clients = (0..clients).map(client).collect();
                row.push(self.simulate(&format!("{name}/c{clients}/s{sidecores}"), &system, 1.0));
            }
            grid.push(row);
        }
        grid
    }

    /// Adds a table with a row for each number of sidecores.
    fn grid_table(&mut self, caption: &str, grid: &Grid, cell: impl Fn(&Outcome) -> String) {
        let mut head = vec!["simulated: sidecores".to_owned()];
        head.extend(CLIENTS.map(|clients| format!("{clients} clients")));
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        let rows: Vec<Vec<String>> = SIDECORES
            .iter()
            .zip(grid)
            .map(|(sidecores, row)| {
                std::iter::once(sidecores.to_string()).chain(row.iter().map(&cell)).collect()
            })
            .collect();
        self.page.table(caption, &head, &rows);
    }

    fn figure8(&mut self, asking: &Grid, back_to_back: &Grid) {
        let share = |outcome: &Outcome| format!("{:.1} %", outcome.waited * 100.0);
        self.grid_table(
            "**Figure 8**: requests that found their sidecore busy; one in flight for each client, \
             and 30 us of the guest's work between two, exponential.",
            asking,
            share,
        );
        self.grid_table("The same without the guest's work.", back_to_back, share);
        let handed = |outcome: &Outcome| format!("{:.1} %", outcome.handed_over * 100.0);
        self.grid_table(
            "Requests that steering gave to another sidecore than the one that polls the client's \
             link, without the guest's work.",
            back_to_back,
            handed,
        );
        let rises = |row: &Vec<Outcome>| {
            row.windows(2).all(|pair| pair[1].waited >= pair[0].waited - 0.005)
        };
        let falls = asking.windows(2).all(|rows| {
            rows[0].iter().zip(&rows[1]).all(|(few, more)| more.waited <= few.waited + 0.005)
        });
        let at = |index: usize| asking[0].get(index).map_or(0.0, |outcome| outcome.waited * 100.0);
        let last = CLIENTS.len() - 1;
        self.page.shape(
            "8",
            "the fraction that waits rises with the number of clients",
            format!(
                "simulated: {:.1}, {:.1} and {:.1} % of {}, {} and {} clients wait for one \
                 sidecore; fewer for two and four",
                at(0),
                at(3),
                at(last),
                CLIENTS[0],
                CLIENTS[3],
                CLIENTS[last]
            ),
            asking.iter().all(rises) && falls,
        );
    }

    fn figure13a(&mut self, asking: &Grid) {
        self.grid_table(
            "**Figure 13a**: mean latency with one request in flight and the guest's work of \
             figure 8.",
            asking,
            |outcome| format!("{:.2} us", outcome.latency_ns / 1e3),
        );
        let latency = |row: usize| asking[row].last().map_or(0.0, |outcome| outcome.latency_ns);
        let [one, two, four] = [0, 1, 2].map(latency);
        self.page.shape(
            "13a",
            "more sidecores reduce the latency of many clients",
            format!(
                "simulated: {:.2}, {:.2} and {:.2} us for 28 clients of 1, 2 and 4 sidecores",
                one / 1e3,
                two / 1e3,
                four / 1e3
            ),
            one > two && two >= four * 0.99,
        );
    }

    fn figure13b(&mut self, model: &Model, stream: &Grid, alone: &Grid) {
        let rate = |outcome: &Outcome| per_second(outcome.requests_per_s);
        let caption = format!(
            "**Figure 13b**: requests a second with {STREAM_DEPTH} in flight for each client, and \
             {:.0} us of the guest's work for each request, exponential.",
            self.guest_ns / 1e3
        );
        self.grid_table(&caption, stream, rate);
        self.grid_table("The same without the guest's work.", alone, rate);
        let useful = |outcome: &Outcome| {
            let mean = outcome.useful.iter().sum::<f64>() / outcome.useful.len() as f64;
            format!("{:.0} %", mean * 100.0)
        };
        self.grid_table("The useful share of the sidecores' time, with that work.", stream, useful);
        let knees: Vec<Knee> = stream.iter().map(|row| Knee::of(row)).collect();
        let one = &knees[0];
        // The guest's work with which the paper's number of clients saturates a sidecore.
        let client_ns = model.ram.remote.read.client.in_batch(BYTES, 1.0);
        let sidecore_ns = 1e9 / one.most_per_s;
        let guest_ns = PAPERS_KNEE * sidecore_ns - client_ns;
        let mut ours = format!(
            "simulated: linear within {:.0} % up to {} clients; a sidecore serves {:.1} clients, ",
            one.bend * 100.0,
            one.linear_to,
            one.clients
        );
        let scaled: Vec<f64> = knees.iter().map(|knee| knee.most_per_s / one.most_per_s).collect();
        ours += &format!(
            "2 and 4 carry {:.1} and {:.1} times as much; 13 clients would saturate one if their \
             guests worked {:.1} us for a request",
            scaled[1],
            scaled[2],
            guest_ns / 1e3
        );
        // Sidecores that no number of clients saturates say nothing.
        let mut alike = knees.iter().zip(SIDECORES).filter(|(knee, _)| knee.is_saturated);
        let alike = alike.all(|(knee, sidecores)| {
            (knee.clients / sidecores as f64 / one.clients - 1.0).abs() < TOLERANCE
        });
        self.page.shape(
            "13b",
            "linear until a sidecore is saturated, at about 13 VMs each; only their number matters",
            ours,
            one.is_saturated && one.bend < TOLERANCE && alike,
        );
    }

    /// Times what this machine has cores for, beside the simulation.
    fn timed_scaling(&mut self, asking: &Grid, stream: &Grid) -> Result<()> {
        let mut rows = Vec::new();
        for (row, sidecores) in SIDECORES.into_iter().enumerate() {
            for (column, clients) in CLIENTS.into_iter().enumerate() {
                let setting = Setting { place: Place::Remote, clients, sidecores, delay_us: 0 };
                if !setting.fits(self.cores) {
                    continue;
                }
                let mut rack = Rack::start(&self.experiment, setting, self.plan.disk_bytes)?;
                for (name, depth, grid) in
                    [("figure8/back-to-back", 1, asking), ("figure13/stream", STREAM_DEPTH, stream)]
                {
                    let work = self.work(depth, false);
                    let timed = self.time(&mut [&mut rack], &work)?;
                    let Some(runs) = timed.first() else { continue };
                    let case = format!("{name}/c{clients}/s{sidecores}");
                    self.record_timed(&case, &work, &[(OURS, runs)]);
                    let iops = runs.rounds(|sample| sample.iops).median();
                    let simulated = grid[row][column].requests_per_s;
                    rows.push(vec![
                        clients.to_string(),
                        sidecores.to_string(),
                        depth.to_string(),
                        per_second(iops),
                        per_second(simulated),
                        format!("{:.2}", simulated / iops),
                    ]);
                }
                rack.end()?;
            }
        }
        self.page.table(
            "**Timed**: reads without the guest's work, as many clients and sidecores as this \
             machine has cores for, beside the simulation.",
            &["clients", "sidecores", "in flight", "timed", "simulated", "simulated / timed"],
            &rows,
        );
        Ok(())
    }

    /// Records the timed runs of systems.
    pub(super) fn record_timed(
        &mut self,
        case: &str,
        work: &crate::load::Work,
        systems: &[(&str, &Runs)],
    ) {
        let is_alone = work.depth == 1;
        for (system, runs) in systems {
            for metric in METRICS.iter().filter(|metric| is_alone || !metric.alone) {
                let mut params = self.experiment.params();
                params.insert("how".to_owned(), "timed".into());
                params.insert("depth".to_owned(), work.depth.into());
                let rounds = runs.rounds(|sample| (metric.value)(sample, work));
                let (median, params) = rounds.settle(params);
                let records = &mut self.experiment.records;
                records.measure(case, system, metric.name, median, metric.unit, params);
            }
        }
        if let Some((ours, peers)) = systems.split_first() {
            for peer in peers {
                let records = &mut self.experiment.records;
                runs::record_ratios(records, case, work, is_alone, *ours, *peer);
            }
        }
    }
}

/// The bend of a curve of throughput by the number of clients.
struct Knee {
    most_per_s: f64,
    /// The clients whose throughput, each as alone, is the greatest throughput.
    clients: f64,
    /// Whether the greatest number of clients adds nothing.
    is_saturated: bool,
    /// The greatest number of clients below three quarters of the knee.
    linear_to: usize,
    /// The greatest deviation of those from a straight line.
    bend: f64,
}

impl Knee {
    fn of(row: &[Outcome]) -> Self {
        let rates: Vec<f64> = row.iter().map(|outcome| outcome.requests_per_s).collect();
        let alone = rates.first().copied().unwrap_or(1.0);
        let most_per_s = rates.iter().copied().fold(0.0, f64::max);
        let clients = most_per_s / alone;
        let before_last = rates.iter().rev().nth(1).copied().unwrap_or(0.0);
        let mut knee = Self {
            most_per_s,
            clients,
            is_saturated: before_last > SATURATED * most_per_s,
            linear_to: 1,
            bend: 0.0,
        };
        for (rate, count) in rates.iter().zip(CLIENTS) {
            if count as f64 <= 0.75 * clients {
                knee.linear_to = count;
                knee.bend = knee.bend.max((rate / (alone * count as f64) - 1.0).abs());
            }
        }
        knee
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(rate: impl Fn(f64) -> f64) -> Vec<Outcome> {
        let outcome = |clients| Outcome { requests_per_s: rate(clients), ..Outcome::default() };
        CLIENTS.iter().map(|clients| outcome(*clients as f64)).collect()
    }

    #[test]
    fn a_knee_is_where_a_line_meets_its_ceiling() {
        let knee = Knee::of(&row(|clients| (1e5 * clients).min(13e5)));
        assert!((knee.clients - 13.0).abs() < 1e-9 && knee.is_saturated && knee.bend < 1e-9);
        assert_eq!(knee.linear_to, 8);
        let knee = Knee::of(&row(|clients| 1e5 * clients));
        assert!(!knee.is_saturated && (knee.clients - 28.0).abs() < 1e-9);
        // A curve without a straight part.
        let knee = Knee::of(&row(|clients| 1e6 * clients / (clients + 10.0)));
        assert!(knee.bend > TOLERANCE, "{}", knee.bend);
    }
}
