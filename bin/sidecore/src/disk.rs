//! A volume as a disk of this program: the daemon serves the volume on a temporary socket.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use sidecore_control::report::{DeviceReport, DeviceState};
use sidecore_control::{Client, NewDevice};
use sidecore_driver::{BlkClient, BlkQueue, ClientOptions, Completion, Notify, Slot, Status};
use sidecore_units::Sector;

use crate::interrupt::Interrupt;

/// The most requests in flight.
const DEPTH: u16 = 16;

/// The most that one request moves, in bytes.
pub(crate) const REQUEST_BYTES: u32 = 256 << 10;

/// The interval of checks for signals while no request completes.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(200);

/// After this time without a completion, the daemon is asked whether the device still works.
const PATIENCE: Duration = Duration::from_secs(5);

/// The name of the device that the daemon serves to a process.
pub(crate) fn temporary_name(pid: u32) -> String {
    format!("transfer-{pid}")
}

/// A device for one command. Dropping it removes the device.
pub(crate) struct TemporaryDevice<'a> {
    client: &'a Client,
    report: DeviceReport,
    served: bool,
}

impl<'a> TemporaryDevice<'a> {
    /// Serves a volume of a controller beside the control socket, where the daemon may make
    /// sockets.
    pub(crate) fn serve(
        client: &'a Client,
        control_socket: &Path,
        (controller, volume): (&str, &str),
        read_only: bool,
    ) -> Result<Self> {
        let control_socket = std::path::absolute(control_socket)?;
        let directory = control_socket.parent().unwrap_or(Path::new("/"));
        let name = temporary_name(std::process::id());
        let socket: PathBuf = directory.join(format!("{name}.sock"));
        // A user with access to the control socket may be neither the daemon's user nor root.
        let user = rustix::process::geteuid();
        let socket_owner = (!user.is_root()).then(|| user.as_raw().to_string());
        let device = NewDevice::new(&name, &socket)
            .of_volume(controller, volume)
            .with("read_only", read_only);
        let device = device.with("socket_owner", socket_owner);
        let report =
            client.add_device(&device).context("the volume cannot be served to this command")?;
        Ok(Self { client, report, served: true })
    }

    /// The unit of reads and writes, in bytes.
    pub(crate) fn block_bytes(&self) -> u64 {
        self.report.block_bytes.into()
    }

    pub(crate) fn connect(&self, interrupt: &Interrupt) -> Result<Disk<'_>> {
        let options = ClientOptions {
            slots: DEPTH,
            slot_bytes: REQUEST_BYTES,
            notify: Notify::Interrupt,
            huge_pages: false,
            ..ClientOptions::default()
        };
        let mut client = BlkClient::connect(&self.report.socket, &options).with_context(|| {
            format!("cannot use {}; run this as the user of sidecored", self.report.socket)
        })?;
        let queue = client.take_queue(0).context("the device has no queue")?;
        Ok(Disk {
            queue,
            _client: client,
            device: self,
            in_flight: vec![None; usize::from(DEPTH)],
            completed: Vec::new(),
            interrupt: interrupt.clone(),
        })
    }

    /// Removes the device, and returns an error of the removal.
    pub(crate) fn remove(mut self) -> Result<()> {
        self.served = false;
        Ok(self.client.remove_device(&self.report.name)?)
    }

    /// Fails if the device will never answer: it is gone or broken.
    fn check_device(&self) -> Result<()> {
        let devices = self.client.devices().context("the daemon stopped in mid-transfer")?;
        match devices.into_iter().find(|device| device.name == self.report.name) {
            None => bail!("the device \"{}\" was removed in mid-transfer", self.report.name),
            Some(device) if device.state == DeviceState::Broken => {
                bail!("the transfer broke: {}", device.reason.unwrap_or_default())
            }
            Some(_) => Ok(()),
        }
    }
}

impl Drop for TemporaryDevice<'_> {
    fn drop(&mut self) {
        if self.served
            && let Err(error) = self.client.remove_device(&self.report.name)
        {
            eprintln!("sidecore: the device \"{}\" is still there: {error}", self.report.name);
        }
    }
}

/// The range of a request: offset and length in bytes.
type Place = (u64, u32);

/// A connected disk with several requests in flight.
pub(crate) struct Disk<'a> {
    queue: BlkQueue,
    _client: BlkClient,
    device: &'a TemporaryDevice<'a>,
    /// Ranges of the requests in flight, by slot.
    in_flight: Vec<Option<Place>>,
    completed: Vec<Completion>,
    interrupt: Interrupt,
}

impl Disk<'_> {
    /// Submits a write, which is durable when [`flush`](Self::flush) has returned.
    pub(crate) fn write(&mut self, offset_bytes: u64, data: &[u8]) -> Result<()> {
        let slot = self.slot(&mut |_, _| Ok(()))?;
        let len_bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
        self.queue.write_data(slot, 0, data);
        self.queue.submit_write(slot, sector(offset_bytes), len_bytes)?;
        self.sent(slot, (offset_bytes, len_bytes))
    }

    /// Submits a read. Completed reads go to `take` in any order, with their offsets.
    pub(crate) fn read(
        &mut self,
        offset_bytes: u64,
        len_bytes: u32,
        take: &mut impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let slot = self.slot(take)?;
        self.queue.submit_read(slot, sector(offset_bytes), len_bytes)?;
        self.sent(slot, (offset_bytes, len_bytes))
    }

    /// Waits for all requests in flight.
    pub(crate) fn finish(&mut self, take: &mut impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        while self.queue.in_flight() > 0 {
            self.wait(take)?;
        }
        Ok(())
    }

    /// Waits for all writes, and makes them durable.
    pub(crate) fn flush(&mut self) -> Result<()> {
        let take = &mut |_, _: &[u8]| Ok(());
        self.finish(take)?;
        let slot = self.slot(take)?;
        self.queue.submit_flush(slot)?;
        self.sent(slot, (0, 0))?;
        self.finish(take)
    }

    fn sent(&mut self, slot: Slot, place: Place) -> Result<()> {
        self.in_flight[slot.index()] = Some(place);
        Ok(self.queue.publish()?)
    }

    fn slot(&mut self, take: &mut impl FnMut(u64, &[u8]) -> Result<()>) -> Result<Slot> {
        loop {
            if let Some(slot) = self.queue.take_slot() {
                return Ok(slot);
            }
            self.wait(take)?;
        }
    }

    /// Waits until at least one request has completed.
    fn wait(&mut self, take: &mut impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        let mut asked = Instant::now();
        while self.queue.poll_completions(&mut self.completed)? == 0 {
            self.interrupt.check()?;
            if !self.queue.wait(SIGNAL_INTERVAL)? && asked.elapsed() > PATIENCE {
                self.device.check_device()?;
                asked = Instant::now();
            }
        }
        self.interrupt.check()?;
        for completion in std::mem::take(&mut self.completed) {
            let (offset_bytes, len_bytes) =
                self.in_flight[completion.slot.index()].take().unwrap_or((0, 0));
            if completion.status != Status::Ok {
                bail!(
                    "the volume refuses bytes {offset_bytes}+{len_bytes}: {}",
                    why(completion.status)
                );
            }
            if completion.written_bytes > 1 {
                let mut data = vec![0; len_bytes as usize];
                self.queue.read_data(completion.slot, 0, &mut data);
                take(offset_bytes, &data)?;
            }
            self.queue.release_slot(completion.slot);
        }
        Ok(())
    }
}

/// The reason of a failed request, in words.
fn why(status: Status) -> &'static str {
    match status {
        Status::IoError => {
            "an I/O error; `sidecore controller show` may say why (a full store, a quota that is \
             used up)"
        }
        Status::Unsupported => "the device does not support the request",
        _ => "the device gives no reason",
    }
}

fn sector(offset_bytes: u64) -> Sector {
    Sector(offset_bytes / sidecore_units::SECTOR_BYTES)
}
