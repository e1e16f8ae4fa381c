//! Figure 14: a local disk that becomes a remote one.

use anyhow::Result;

use super::timed::{Place, Rack, Setting};
use super::{BYTES, Bench, Model, SIMULATED, STORE_DELAY_US};
use crate::plot::per_second;
use crate::record::OURS;
use sidecore_plan::simulation::Client;
use sidecore_plan::work::Work;

/// The most VMs of the paper's VMhost.
const MOST_CLIENTS: usize = 7;
/// The VMs in the tables.
const SHOWN: [usize; 4] = [1, 2, 4, 7];
/// The latency of a remote disk beside that of a local one in the paper, with one reader.
const PAPERS_LATENCY: f64 = 2.2;
/// The delays of the stores, which are in memory.
const DELAYS_US: [u64; 2] = [0, STORE_DELAY_US];
/// The name of local disks in records.
const LOCAL: &str = "local";
/// The ratios of a slow store from which the network hides behind it.
const HIDDEN: f64 = 0.9;

/// The threads of each VM.
const LOADS: [(&str, usize, usize); 3] = [("reader", 1, 0), ("pair", 1, 1), ("2-pairs", 2, 2)];

/// The name of a store in records.
const fn store(delay_us: u64) -> &'static str {
    if delay_us > 0 { "slow" } else { "ram" }
}

impl Bench {
    /// Figure 14.
    pub(super) fn storage(&mut self, model: &Model) -> Result<()> {
        let mut ratios = [[0.0; LOADS.len()]; 2];
        for (index, delay_us) in DELAYS_US.into_iter().enumerate() {
            let rows = LOADS
                .iter()
                .zip(&mut ratios[index])
                .map(|(load, ratio)| self.simulated(model, delay_us, *load, ratio))
                .collect::<Vec<_>>();
            let store = if delay_us == 0 {
                "in memory".to_owned()
            } else {
                format!("in memory, behind {delay_us} us")
            };
            let mut head = vec!["simulated: threads of each VM".to_owned()];
            head.extend(SHOWN.map(|clients| format!("{clients} VMs")));
            let head: Vec<&str> = head.iter().map(String::as_str).collect();
            let caption = format!(
                "**Figure 14**, store {store}: requests a second of remote disks : of local ones, \
                 one sidecore for all VMs."
            );
            self.page.table(&caption, &head, &rows);
        }
        self.timed_storage()?;
        let [ram, slow] = ratios;
        self.page.shape(
            "14, reader",
            "a remote ramdisk's latency is at most 2.2 times a local one's",
            format!("simulated: {:.2} times", 1.0 / ram[0]),
            1.0 / ram[0] <= PAPERS_LATENCY,
        );
        self.page.shape(
            "14, pairs",
            "improves with a pair; with two pairs remote is faster, because guests of local disks \
             switch between threads more often",
            format!(
                "simulated: {:.2}, {:.2} and {:.2} of the local throughput with a reader, a pair \
                 and two pairs; no guest switches threads here",
                ram[0], ram[1], ram[2]
            ),
            ram[1] > ram[0] && ram[2] > 1.0,
        );
        self.page.shape(
            "14, slower store",
            "83 to 95 % on SATA SSDs",
            format!(
                "simulated, {STORE_DELAY_US} us: {:.0}, {:.0} and {:.0} %",
                slow[0] * 100.0,
                slow[1] * 100.0,
                slow[2] * 100.0
            ),
            slow.iter().all(|ratio| *ratio >= HIDDEN),
        );
        Ok(())
    }

    /// Simulates a load for all numbers of VMs; `ratio` becomes that of one VM.
    fn simulated(
        &mut self,
        model: &Model,
        delay_us: u64,
        (name, readers, writers): (&str, usize, usize),
        ratio: &mut f64,
    ) -> Vec<String> {
        let mut row = vec![name.to_owned()];
        for clients in 1..=MOST_CLIENTS {
            let [remote, local] = [true, false].map(|is_remote| {
                let mut system = if is_remote {
                    model.remote(model.ram.remote, 1)
                } else {
                    model.local(model.ram.local)
                };
                let mut threads = vec![Work::Read(BYTES); readers];
                threads.resize(readers + writers, Work::Write(BYTES));
                system.clients =
                    vec![Client { home: 0, threads, guest_ns: 0.0, every_ns: 0.0 }; clients];
                if delay_us > 0 {
                    system.store_ns = delay_us as f64 * 1e3;
                }
                let place = if is_remote { "remote" } else { LOCAL };
                let case = format!("figure14/{}/{name}/{place}/c{clients}", store(delay_us));
                self.simulate(&case, &system, 1.0).requests_per_s
            });
            if clients == 1 {
                *ratio = remote / local;
            }
            if SHOWN.contains(&clients) {
                row.push(format!(
                    "{} : {} = {:.2}",
                    per_second(remote),
                    per_second(local),
                    remote / local
                ));
            }
        }
        row
    }

    /// The simulated throughput of remote disks beside that of local ones.
    fn simulated_ratio(&self, delay_us: u64, load: &str, clients: usize) -> f64 {
        let [remote, local] = ["remote", LOCAL].map(|place| {
            let case = format!("figure14/{}/{load}/{place}/c{clients}", store(delay_us));
            let found = self.experiment.records.find(&case, SIMULATED, "iops");
            found.map_or(f64::NAN, |measure| measure.value)
        });
        remote / local
    }

    /// Times so many VMs, if each thread has a core of its own.
    fn timed_at(&mut self, clients: usize, delay_us: u64) -> Result<Vec<Vec<String>>> {
        let setting = |place| Setting { place, clients, sidecores: 1, delay_us };
        if !setting(Place::Remote).fits(self.cores) {
            return Ok(Vec::new());
        }
        let (experiment, bytes) = (&self.experiment, self.plan.disk_bytes);
        let mut remote = Rack::start(experiment, setting(Place::Remote), bytes)?;
        let mut local = Rack::start(experiment, setting(Place::Local), bytes)?;
        let mut rows = Vec::new();
        for (name, readers, writers) in LOADS {
            let work = self.work((readers + writers) as u16, writers > 0);
            let timed = self.time(&mut [&mut remote, &mut local], &work)?;
            let [ours, peer] = timed.as_slice() else { continue };
            let case = format!("figure14/{}/{name}/c{clients}", store(delay_us));
            self.record_timed(&case, &work, &[(OURS, ours), (LOCAL, peer)]);
            let [ours, peer] = [ours, peer].map(|runs| runs.rounds(|sample| sample.iops).median());
            let simulated = self.simulated_ratio(delay_us, name, clients);
            rows.push(vec![
                clients.to_string(),
                store(delay_us).to_owned(),
                name.to_owned(),
                format!("{} : {} = {:.2}", per_second(ours), per_second(peer), ours / peer),
                format!("{simulated:.2}"),
            ]);
        }
        [remote, local].into_iter().try_for_each(Rack::end)?;
        Ok(rows)
    }

    /// Times as many VMs as this machine has cores for, beside a sidecore.
    fn timed_storage(&mut self) -> Result<()> {
        let mut rows = Vec::new();
        for clients in 1..=MOST_CLIENTS {
            for delay_us in DELAYS_US {
                rows.extend(self.timed_at(clients, delay_us)?);
            }
        }
        self.page.table(
            "**Figure 14, timed**: as many VMs as this machine has cores for, beside the \
             simulation. With pairs, every other place is written.",
            &["VMs", "store", "threads", "remote : local", "simulated"],
            &rows,
        );
        Ok(())
    }
}
