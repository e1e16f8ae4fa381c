//! The latency of a polled disk while other work uses both cores.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sidecore_driver::{BlkClient, BlkQueue, ClientOptions, Notify};
use sidecore_units::Sector;

use super::Bench;
use crate::load::{self, BLOCK_BYTES, Sample, Work};
use crate::record::OURS;
use crate::rounds::{Pairs, Rounds};
use crate::sidecored::{Device, Sidecored, Store};
use crate::{against, control, cores, stop};

/// The cases: the client sleeps between requests and until completions, sleeps until completions,
/// or polls.
pub(super) const CASES: [&str; 3] = ["contended/paced", "contended/sleeping", "contended/polling"];

/// The pause of the paced client between two requests.
const PACE: Duration = Duration::from_millis(1);

/// The same daemon with `idle = "interrupt"`.
pub(super) const INTERRUPT: &str = "interrupt";

const DISK_BYTES: u64 = 64 << 20;
const DISK: &str = "disk";

/// The longest time in which a sidecore may notice that its core is lost.
const NOTICE_LIMIT: Duration = Duration::from_secs(30);

type Metric = (&'static str, fn(&Sample) -> f64);
const METRICS: [Metric; 3] = [
    ("latency_p50", |sample| sample.latency_p50_ns),
    ("latency_p99", |sample| sample.latency_p99_ns),
    ("latency_mean", |sample| sample.latency_mean_ns),
];

/// A thread on each core that is always ready to run, until dropped.
struct Burners {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Burners {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let burn = |core| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                cores::pin(core)?;
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                Ok(())
            })
        };
        let threads = [cores::CLIENT, cores::SERVER].map(burn).into();
        Self { stop, threads }
    }
}

impl Drop for Burners {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

struct System {
    name: String,
    daemon: Sidecored,
    samples: Vec<Sample>,
}

/// Runs the cases: on the polled disk of this daemon, on the same disk with interrupts, and on that
/// of `--against`.
pub(super) fn run(bench: &mut Bench) -> Result<()> {
    let mut systems = start(bench)?;
    let burners = Burners::start();
    for case in CASES {
        measure(bench, &mut systems, case)?;
        record(bench, case, &mut systems);
    }
    drop(burners);
    systems.into_iter().try_for_each(|system| system.daemon.process.end())
}

fn start(bench: &Bench) -> Result<Vec<System>> {
    let device = |idle| [Device { idle, ..Device::new(DISK, Store::Null { bytes: DISK_BYTES }) }];
    let experiment = &bench.experiment;
    let mut daemons = vec![
        (OURS.to_owned(), experiment.start_ours("contended", &[], &device("poll"))?),
        (
            INTERRUPT.to_owned(),
            experiment.start_ours("contended-interrupt", &[], &device("interrupt"))?,
        ),
    ];
    let before = experiment.start_before("contended", &[], &device("poll"))?;
    daemons.extend(before.map(|daemon| (against::before(OURS), daemon)));
    let freeze = |(name, mut daemon): (String, Sidecored)| {
        daemon.process.freeze()?;
        Ok(System { name, daemon, samples: Vec::new() })
    };
    daemons.into_iter().map(freeze).collect()
}

fn measure(bench: &Bench, systems: &mut [System], case: &str) -> Result<()> {
    let [paced, _, polling] = CASES;
    let notify = if case == polling { Notify::Polled } else { Notify::Interrupt };
    let options = ClientOptions { slots: 1, huge_pages: false, notify, ..ClientOptions::default() };
    let blocks = DISK_BYTES / u64::from(BLOCK_BYTES);
    let work = Work { blocks, duration: bench.plan.contended, ..Work::default() };
    let clock = &bench.experiment.clock;
    let mut clients = Vec::new();
    for System { name, daemon, .. } in systems.iter_mut() {
        daemon.process.thaw()?;
        let mut client = BlkClient::connect(daemon.socket(DISK), &options)?;
        let begin = Instant::now();
        while name == OURS && bench.plan.is_contention_noticed && !is_noticed(daemon)? {
            stop::check()?;
            ensure!(
                begin.elapsed() < NOTICE_LIMIT,
                "the sidecore does not notice that its core is lost"
            );
            load::run(client.queue(0).context("no queue")?, &work, clock)?;
        }
        daemon.process.freeze()?;
        clients.push(client);
    }
    for _ in 0..bench.plan.rounds {
        for (System { daemon, samples, .. }, client) in systems.iter_mut().zip(&mut clients) {
            daemon.process.thaw()?;
            let queue = client.queue(0).context("no queue")?;
            samples.push(if case == paced {
                run_paced(queue, &work)?
            } else {
                load::run(queue, &work, clock)?
            });
            daemon.process.freeze()?;
        }
    }
    for (System { daemon, .. }, client) in systems.iter_mut().zip(clients) {
        daemon.process.thaw()?;
        drop(client);
        daemon.process.freeze()?;
    }
    Ok(())
}

/// Runs one request at a time, with a sleep before each.
fn run_paced(queue: &mut BlkQueue, work: &Work) -> Result<Sample> {
    let slot = queue.take_slot().context("no slot")?;
    let (mut completions, mut latencies) = (Vec::new(), Vec::new());
    let begin = Instant::now();
    while begin.elapsed() < work.duration || latencies.is_empty() {
        stop::check()?;
        std::thread::sleep(PACE);
        let start = Instant::now();
        queue.submit_read(slot, Sector(0), work.bytes)?;
        queue.publish()?;
        completions.clear();
        while queue.poll_completions(&mut completions)? == 0 {
            ensure!(queue.wait(NOTICE_LIMIT)?, "the device does not answer");
        }
        latencies.push(start.elapsed().as_nanos() as f64);
    }
    queue.release_slot(slot);
    latencies.sort_by(f64::total_cmp);
    let quantile = |share: f64| {
        latencies.get((latencies.len() as f64 * share) as usize).copied().unwrap_or_default()
    };
    Ok(Sample {
        latency_p50_ns: quantile(0.5),
        latency_p99_ns: quantile(0.99),
        latency_mean_ns: latencies.iter().sum::<f64>() / latencies.len() as f64,
        ..Sample::default()
    })
}

/// Whether the daemon reports that its core is lost.
fn is_noticed(daemon: &Sidecored) -> Result<bool> {
    let answer = control::get(&daemon.control_socket(), "/v1/sidecores")?;
    Ok(answer["sidecores"][0]["warning"].is_string())
}

fn record(bench: &mut Bench, case: &str, systems: &mut [System]) {
    let params = bench.experiment.params();
    let records = &mut bench.experiment.records;
    let mut line = format!("  {case:<20}");
    for System { name, samples, .. } in systems.iter() {
        for (metric, value) in METRICS {
            let mut rounds = Rounds::new();
            samples.iter().for_each(|sample| rounds.add(value(sample), true));
            let (median, params) = rounds.settle(params.clone());
            records.measure(case, name, metric, median, "ns", params);
            line.push_str(&format!("  {name} {metric} {:.1} us", median / 1e3));
        }
    }
    let (ours, peers) = systems.split_at(1);
    for (ours, peer) in ours.iter().flat_map(|ours| peers.iter().map(move |peer| (ours, peer))) {
        for (metric, value) in METRICS {
            let mut pairs = Pairs::default();
            let both = ours.samples.iter().zip(&peer.samples);
            both.for_each(|(ours, peer)| pairs.add(value(ours), value(peer), true));
            let (median, params) = pairs.settle(params.clone());
            records.ratio(case, metric, OURS, &peer.name, median, params);
        }
    }
    eprintln!("{line}");
    systems.iter_mut().for_each(|system| system.samples.clear());
}
