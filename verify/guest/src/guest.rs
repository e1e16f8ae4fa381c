//! A guest that executes orders (`guest/orders.sh` is the other end), so that a run with several
//! guests is one sequence of steps.

use crate::config;
use crate::console::{self, Message};
use crate::emulator::Emulator;
use crate::process::Running;
use crate::qemu::{Backend, Disk, Equipment, Nic, Port};
use crate::qmp::Qmp;
use crate::session::Session;
use crate::text;
use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// The guest of the measurement.
pub(crate) const MEASURED: &str = "measured";
/// The guest whose disk is cloned.
pub(crate) const FIRST: &str = "first";
/// The guest on the clone.
pub(crate) const SECOND: &str = "second";
/// The guest with NVMe functions.
pub(crate) const NVME: &str = "nvme";
/// The guest with virtio disks of another host.
pub(crate) const VIRTIO: &str = "virtio";
/// The guest of the comparison with dm-crypt.
pub(crate) const ENCRYPTED: &str = "encrypted";
/// The guest that serves block devices of its own kernel.
pub(crate) const UBLK: &str = "ublk";
/// The guest that is two hosts with one disk.
pub(crate) const RESERVATION: &str = "reservation";
/// The guest that is a client of an IOhost itself.
pub(crate) const CLIENT: &str = "client";
/// The guest that migrates, before it does.
pub(crate) const MOVING: &str = "moving";
/// The destination of a migration that is cancelled.
pub(crate) const CANCELLED: &str = "cancelled";
/// The guest that migrates, afterwards.
pub(crate) const MOVED: &str = "moved";
/// The guests on a network.
pub(crate) const NET_A: &str = "net-a";
pub(crate) const NET_B: &str = "net-b";
pub(crate) const NAMES: [&str; 14] = [
    MEASURED,
    FIRST,
    SECOND,
    NVME,
    VIRTIO,
    ENCRYPTED,
    UBLK,
    RESERVATION,
    CLIENT,
    MOVING,
    CANCELLED,
    MOVED,
    NET_A,
    NET_B,
];

/// The slot of the first disk of every guest.
pub(crate) const FIRST_SLOT: u8 = 5;
/// The longest time for an order.
const PATIENCE: Duration = Duration::from_secs(180);

pub(crate) struct Guest {
    name: &'static str,
    qemu: Running,
}

/// The values in a guest's answer, by key.
#[derive(Debug)]
pub(crate) struct Answer {
    order: String,
    values: BTreeMap<String, String>,
}

impl Guest {
    /// Starts a guest with the device of the same name as its disk. [`booted`](Self::booted) waits
    /// until the guest is up.
    pub(crate) fn boot(session: &mut Session<'_>, name: &'static str) -> Result<Guest> {
        let socket = config::socket(session.directory, name);
        let backend = Backend::Daemon(&socket);
        let disks = [Disk { name, backend, slot: FIRST_SLOT, packed: false }];
        Guest::boot_with(
            session,
            name,
            &Equipment { polled: false, disks: &disks, ports: &[], nics: &[] },
        )
    }

    /// Starts a guest with virtio disks; its orders are about the first one.
    pub(crate) fn boot_with(
        session: &mut Session<'_>,
        name: &'static str,
        equipment: &Equipment<'_>,
    ) -> Result<Guest> {
        Guest::start(session, name, session.stage.qemu, equipment)
    }

    /// Starts a QEMU that waits at a socket for a guest that migrates. It has to have the same
    /// equipment as the guest's first one, with other sockets.
    pub(crate) fn incoming(
        session: &mut Session<'_>,
        name: &'static str,
        equipment: &Equipment<'_>,
        socket: &Path,
    ) -> Result<Guest> {
        let mut command = session.stage.qemu.command.clone();
        command.extend(["-incoming".to_owned(), format!("unix:{}", text(socket)?)]);
        Guest::start(session, name, &Emulator { command }, equipment)
    }

    fn start(
        session: &mut Session<'_>,
        name: &'static str,
        emulator: &Emulator,
        equipment: &Equipment<'_>,
    ) -> Result<Guest> {
        let settings = format!("SIDECORE_PART=orders SIDECORE_SLOT={FIRST_SLOT:02x}");
        let qemu = session.boot(name, emulator, equipment, &settings)?;
        Ok(Guest { name, qemu })
    }

    /// Starts a guest with ports for NVMe functions, and with queues that its driver polls or not.
    pub(crate) fn boot_nvme(
        session: &mut Session<'_>,
        emulator: &Emulator,
        ports: &[Port],
        polled: bool,
    ) -> Result<Guest> {
        let equipment = Equipment { polled, disks: &[], ports, nics: &[] };
        let qemu = session.boot(NVME, emulator, &equipment, "SIDECORE_PART=nvme")?;
        Ok(Guest { name: NVME, qemu })
    }

    /// Starts a guest with NICs, which executes orders about them.
    pub(crate) fn boot_net(
        session: &mut Session<'_>,
        name: &'static str,
        equipment: &Equipment<'_>,
    ) -> Result<Guest> {
        let qemu = session.boot(name, session.stage.qemu, equipment, "SIDECORE_PART=net")?;
        Ok(Guest { name, qemu })
    }

    /// Starts the guest that serves its own kernel, on both of its CPUs.
    pub(crate) fn boot_ublk(session: &mut Session<'_>) -> Result<Guest> {
        Guest::boot_alone(session, UBLK, "")
    }

    /// Starts the guest that is two hosts with one disk, on both of its CPUs.
    pub(crate) fn boot_reservation(session: &mut Session<'_>) -> Result<Guest> {
        // Both paths would be one disk.
        Guest::boot_alone(session, RESERVATION, "nvme_core.multipath=N")
    }

    /// Starts a guest without devices, whose script has its name, with more settings.
    fn boot_alone(session: &mut Session<'_>, name: &'static str, more: &str) -> Result<Guest> {
        let equipment = Equipment { polled: false, disks: &[], ports: &[], nics: &[] };
        // The last one of several settings holds.
        let settings = format!("SIDECORE_PART={name} maxcpus=2 {more}");
        let qemu = session.boot(name, session.stage.qemu, &equipment, &settings)?;
        Ok(Guest { name, qemu })
    }

    /// Starts a guest with a NIC whose own daemon is a client of an IOhost, on both of its CPUs.
    pub(crate) fn boot_client(
        session: &mut Session<'_>,
        emulator: &Emulator,
        nic: Nic<'_>,
    ) -> Result<Guest> {
        let equipment = Equipment { polled: false, disks: &[], ports: &[], nics: &[nic] };
        let settings = "SIDECORE_PART=client maxcpus=2";
        let qemu = session.boot(CLIENT, emulator, &equipment, settings)?;
        Ok(Guest { name: CLIENT, qemu })
    }

    /// Waits until the guest accepts orders.
    pub(crate) fn booted(&mut self, session: &mut Session<'_>) -> Result<Answer> {
        self.answer(session, "boot")
    }

    /// Sends the guest an order, and waits for the end of its answer.
    pub(crate) fn order(&mut self, session: &mut Session<'_>, order: &str) -> Result<Answer> {
        self.send(order)?;
        self.answer(session, order)
    }

    /// Sends the guest an order. [`answer`](Self::answer) waits for the end of its answer.
    pub(crate) fn send(&mut self, order: &str) -> Result<()> {
        self.qemu.write(&format!("{order}\n"))
    }

    /// The number of QEMU's process.
    pub(crate) fn process(&self) -> u32 {
        self.qemu.id()
    }

    /// Waits until the load has finished so many rounds, and returns the number of finished rounds.
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

    /// Lets the guest power off, and waits for QEMU's end.
    pub(crate) fn off(mut self, session: &mut Session<'_>) -> Result<()> {
        self.qemu.write("off\n")?;
        let deadline = Instant::now() + Duration::from_secs(60);
        ensure!(
            session.wait_for_power_off(self.name, deadline)?,
            "the {} guest did not power off",
            self.name
        );
        self.qemu.reap()?;
        Ok(())
    }

    /// Ends the QEMU that a guest has left by a migration.
    pub(crate) fn leave(self, session: &mut Session<'_>, qmp: &mut Qmp) -> Result<()> {
        qmp.execute("quit", json!({}))?;
        self.ended(session)
    }

    /// Kills QEMU.
    pub(crate) fn kill(self, session: &mut Session<'_>) -> Result<()> {
        self.qemu.kill()?;
        self.ended(session)
    }

    fn ended(self, session: &mut Session<'_>) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let is_gone = session.wait_for_power_off(self.name, deadline)?;
        ensure!(is_gone, "QEMU of the {} guest did not end", self.name);
        self.qemu.reap().map(drop)
    }

    /// Waits for the end of the answer to an order that was sent.
    pub(crate) fn answer(&self, session: &mut Session<'_>, order: &str) -> Result<Answer> {
        let deadline = Instant::now() + PATIENCE;
        let mut answer = Answer::to(order);
        let name = self.name;
        while let Some(line) = session.next_message(name, deadline)? {
            match console::parse(&line)? {
                Some(Message::Value { key, text }) => {
                    answer.add(key, text);
                }
                Some(Message::Finished { order: finished }) => {
                    ensure!(
                        order.split(' ').next() == Some(finished),
                        "the {name} guest did {finished}, not {order}"
                    );
                    return Ok(answer);
                }
                Some(Message::Failed { why }) => {
                    bail!("in the {name} guest: {why} (during: {order})")
                }
                _ => {}
            }
        }
        bail!("the {name} guest has not finished in time: {order}")
    }
}

impl Answer {
    /// An answer without values.
    pub(crate) fn to(order: &str) -> Answer {
        Answer { order: order.to_owned(), values: BTreeMap::new() }
    }

    pub(crate) fn add(&mut self, key: &str, text: &str) {
        self.values.insert(key.to_owned(), text.to_owned());
    }

    /// The text under a key.
    pub(crate) fn text(&self, key: &str) -> Result<&str> {
        let text = self
            .values
            .get(key)
            .with_context(|| format!("the guest gave no {key} for: {}", self.order))?;
        Ok(text)
    }

    /// The number under a key.
    pub(crate) fn number<T: FromStr>(&self, key: &str) -> Result<T> {
        let text = self.text(key)?;
        text.parse().ok().with_context(|| {
            format!("the guest's {key} is '{text}', no number, for: {}", self.order)
        })
    }
}
