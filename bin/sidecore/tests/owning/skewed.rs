//! Owners within the test's process, on clocks whose rates differ from etcd's.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use sidecore_cluster::{Claim, Closed, Endpoint, Gateway, Host, Others, Runner, Served};
use sidecore_kit::etcd::Etcd;
use sidecore_ownership::{Daemon, Member, Options, Record};
use sidecore_units::Nanos;

use super::Site;

const TTL_S: u64 = 3;

/// The answers of all owners, and their record.
#[derive(Default)]
pub struct Answers {
    /// The epoch of each answer, in their order.
    epochs: Mutex<Vec<u64>>,
    record: Mutex<Option<Record>>,
}

impl Answers {
    /// The newest epoch with an answer, and its owner.
    pub fn newest(&self) -> Option<(u64, String)> {
        let epoch = *self.epochs.lock().unwrap().last()?;
        let record = self.record.lock().unwrap();
        let owner = record.as_ref().filter(|record| record.epoch == epoch)?;
        Some((epoch, owner.owner.name.clone()))
    }

    pub fn epochs(&self) -> Vec<u64> {
        self.epochs.lock().unwrap().clone()
    }
}

/// A store without any fence: nothing but leases keeps two from serving it.
struct Unfenced {
    clock: fn() -> Nanos,
    answers: Arc<Answers>,
    /// The epoch, and the time until which it is served.
    serving: Mutex<Option<(u64, Nanos)>>,
    ends: AtomicBool,
}

impl Host for Unfenced {
    fn fence(&self, _: &str, _: &Claim, _: Others<'_>) -> Result<(), String> {
        Ok(())
    }

    fn read_record(&self, _: &str) -> Result<Option<Record>, String> {
        Ok(self.answers.record.lock().unwrap().clone())
    }

    fn write_record(&self, _: &str, record: &Record) -> Result<(), String> {
        *self.answers.record.lock().unwrap() = Some(record.clone());
        Ok(())
    }

    fn open(&self, _: &str, served: Served, until: Nanos) -> Result<(), String> {
        *self.serving.lock().unwrap() = Some((served.epoch, until));
        Ok(())
    }

    fn close(&self, _: &str) -> Result<Closed, String> {
        *self.serving.lock().unwrap() = None;
        Ok(Closed::Idle)
    }

    fn serve_until(&self, _: &str, until: Option<Nanos>) {
        if let (Some((_, served)), Some(until)) = (&mut *self.serving.lock().unwrap(), until) {
            *served = until;
        }
    }
}

impl Unfenced {
    /// Answers until the end.
    fn serve(&self) {
        while !self.ends.load(Ordering::Relaxed) {
            {
                let mut epochs = self.answers.epochs.lock().unwrap();
                let serving = *self.serving.lock().unwrap();
                if let Some((epoch, until)) = serving
                    && (self.clock)() < until
                {
                    epochs.push(epoch);
                }
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A running candidate. Its drop ends it.
pub struct Skewed {
    host: Arc<Unfenced>,
    /// Taken by the drop.
    threads: Option<(Runner, JoinHandle<()>)>,
}

impl Skewed {
    /// A candidate with this clock, which has etcd at this address.
    pub fn start(
        site: &Site,
        (name, address): (&str, &str),
        clock: fn() -> Nanos,
        answers: &Arc<Answers>,
    ) -> Self {
        let me = Member { name: name.into(), host: format!("{name}/1"), incarnation: 1 };
        let endpoints: Vec<Endpoint> =
            Etcd::endpoints_at(address).split(',').map(|text| text.parse().unwrap()).collect();
        let patience = Duration::from_secs(TTL_S) / 6;
        let gateway = Gateway::new(endpoints, "skewed", patience);
        let mut daemon = Daemon::new(me, Options::of_lease(TTL_S), address.len() as u64);
        daemon.add("disk");
        let host = Arc::new(Unfenced {
            clock,
            answers: Arc::clone(answers),
            serving: Mutex::default(),
            ends: AtomicBool::new(false),
        });
        let run = Arc::clone(&host);
        let start = || Runner::with_clock(daemon, gateway, run, clock);
        let runner = site.namespace.within(start).unwrap().unwrap();
        let serving = Arc::clone(&host);
        let thread = std::thread::spawn(move || serving.serve());
        Self { host, threads: Some((runner, thread)) }
    }
}

impl Drop for Skewed {
    fn drop(&mut self) {
        self.host.ends.store(true, Ordering::Relaxed);
        if let Some((runner, thread)) = self.threads.take() {
            runner.end();
            let _ = thread.join();
        }
    }
}
