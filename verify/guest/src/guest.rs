//! A guest that does what it is ordered (`guest/orders.sh` is the other end), so that a run with several of them reads
//! from top to bottom in one place.

use crate::config;
use crate::console::{self, Word};
use crate::emulator::Emulator;
use crate::process::Running;
use crate::qemu::{Disk, Equipment, Port};
use crate::session::Session;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// The guest whose disks are measured.
pub(crate) const MEASURED: &str = "measured";
/// The guest whose disk is copied.
pub(crate) const FIRST: &str = "first";
/// The guest that gets the copy.
pub(crate) const SECOND: &str = "second";
/// The guest that has NVMe.
pub(crate) const NVME: &str = "nvme";
/// All that there are.
pub(crate) const NAMES: [&str; 4] = [MEASURED, FIRST, SECOND, NVME];

/// The slot of the first disk of every guest.
pub(crate) const FIRST_SLOT: u8 = 5;
/// The longest that an order may take.
const PATIENCE: Duration = Duration::from_secs(180);

pub(crate) struct Guest {
    name: &'static str,
    qemu: Running,
}

/// What a guest answered: texts by their keys.
#[derive(Debug)]
pub(crate) struct Answer {
    order: String,
    values: BTreeMap<String, String>,
}

impl Guest {
    /// Starts a guest with the device of the same name as its disk. It is up when [`booted`](Self::booted) says so.
    pub(crate) fn boot(session: &mut Session<'_>, name: &'static str) -> Result<Guest> {
        let socket = config::socket(session.directory, name);
        let disks = [Disk { name, socket: &socket, slot: FIRST_SLOT, packed: false }];
        let settings = format!("SIDECORE_PART=orders SIDECORE_SLOT={FIRST_SLOT:02x}");
        let equipment = Equipment { polled: false, disks: &disks, ports: &[] };
        let qemu = session.boot(name, session.stage.qemu, &equipment, &settings)?;
        Ok(Guest { name, qemu })
    }

    /// Starts a guest that has ports for NVMe functions, and queues that it may poll.
    pub(crate) fn boot_nvme(session: &mut Session<'_>, emulator: &Emulator, ports: &[Port]) -> Result<Guest> {
        let equipment = Equipment { polled: true, disks: &[], ports };
        let qemu = session.boot(NVME, emulator, &equipment, "SIDECORE_PART=nvme")?;
        Ok(Guest { name: NVME, qemu })
    }

    /// Waits until the guest takes orders.
    pub(crate) fn booted(&mut self, session: &mut Session<'_>) -> Result<Answer> {
        self.answer(session, "boot")
    }

    /// Has the guest do something, and waits until it is done.
    pub(crate) fn order(&mut self, session: &mut Session<'_>, order: &str) -> Result<Answer> {
        self.qemu.write(&format!("{order}\n"))?;
        self.answer(session, order)
    }

    /// Waits until the load that was ordered has finished so many rounds; how many it has.
    pub(crate) fn rounds_done(&mut self, session: &mut Session<'_>, rounds: u64) -> Result<u64> {
        let end = Instant::now() + PATIENCE;
        loop {
            let done = self.order(session, "rounds")?.number("rounds")?;
            if done >= rounds {
                return Ok(done);
            }
            ensure!(Instant::now() < end, "the load finished {done} rounds in time, not {rounds}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Has the guest power off, and waits until it is gone.
    pub(crate) fn off(mut self, session: &mut Session<'_>) -> Result<()> {
        self.qemu.write("off\n")?;
        let deadline = Instant::now() + Duration::from_secs(60);
        ensure!(session.farewell(self.name, deadline)?, "the {} guest did not power off", self.name);
        self.qemu.reap()?;
        Ok(())
    }

    fn answer(&self, session: &mut Session<'_>, order: &str) -> Result<Answer> {
        let deadline = Instant::now() + PATIENCE;
        let mut answer = Answer::to(order);
        let name = self.name;
        while let Some(line) = session.hear(name, deadline)? {
            match console::parse(&line)? {
                Some(Word::Value { key, text }) => {
                    answer.add(key, text);
                }
                Some(Word::Finished { order: finished }) => {
                    ensure!(order.split(' ').next() == Some(finished), "the {name} guest did {finished}, not {order}");
                    return Ok(answer);
                }
                Some(Word::Failed { why }) => bail!("in the {name} guest: {why} (during: {order})"),
                _ => {}
            }
        }
        bail!("the {name} guest has not finished in time: {order}")
    }
}

impl Answer {
    /// One in which nothing is yet.
    pub(crate) fn to(order: &str) -> Answer {
        Answer { order: order.to_owned(), values: BTreeMap::new() }
    }

    /// Adds a text.
    pub(crate) fn add(&mut self, key: &str, text: &str) {
        self.values.insert(key.to_owned(), text.to_owned());
    }

    /// A text of the answer.
    pub(crate) fn text(&self, key: &str) -> Result<&str> {
        let text = self.values.get(key).with_context(|| format!("the guest gave no {key} for: {}", self.order))?;
        Ok(text)
    }

    /// A number of the answer.
    pub(crate) fn number<T: FromStr>(&self, key: &str) -> Result<T> {
        let text = self.text(key)?;
        text.parse().ok().with_context(|| format!("the guest's {key} is '{text}', no number, for: {}", self.order))
    }
}
