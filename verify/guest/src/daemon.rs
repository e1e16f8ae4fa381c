//! `sidecored` as the demo runs it: one process, one sidecore, two disks.

use crate::cores::Cores;
use crate::process::{Event, Inbox, Running, Source};
use crate::report::Mode;
use crate::text;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The disks by the names of their stores; the guest and the report use the same names.
pub(crate) const DISKS: [&str; 2] = ["file", "ram"];

/// The disk with packed rings; the other has split ones, so that a real guest's driver is met with both.
pub(crate) const PACKED_DISK: &str = "ram";
/// One queue that interrupts and one that the guest may poll.
pub(crate) const QUEUES: u16 = 2;

const DISK_MIB: u64 = 256;

pub(crate) struct Daemon {
    running: Running,
    control: PathBuf,
    client: PathBuf,
}

/// What one device has counted since the daemon started, over all its queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) kicks: u64,
    pub(crate) requests: u64,
}

/// The socket of a disk, within the daemon's directory.
pub(crate) fn socket(directory: &Path, disk: &str) -> PathBuf {
    directory.join(format!("{disk}.sock"))
}

impl Daemon {
    /// Starts the daemon with its files and sockets in `directory`, and waits until it serves.
    pub(crate) fn start(
        inbox: &mut Inbox<'_>,
        binaries: &Path,
        directory: &Path,
        cores: &Cores,
        mode: Mode,
    ) -> Result<Daemon> {
        let image = directory.join("disk.img");
        std::fs::File::create(&image)
            .and_then(|file| file.set_len(DISK_MIB << 20))
            .with_context(|| format!("cannot create {}", image.display()))?;
        let control = directory.join("control.sock");
        let config = directory.join("sidecored.toml");
        std::fs::write(&config, configuration(directory, &image, &control, cores.sidecore, mode)?)?;
        let program = binaries.join("sidecored");
        let arguments = ["--config".as_ref(), config.as_os_str()];
        let running = Running::start(inbox, program.as_os_str(), arguments, Source::Daemon, Source::Daemon)?;
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match inbox.next(deadline)? {
                Some(Event::Line(Source::Daemon, line)) if line.starts_with("ready:") => break,
                Some(Event::Closed(Source::Daemon)) => bail!("sidecored ended before it was ready"),
                Some(_) => {}
                None => bail!("sidecored was not ready within 20 seconds"),
            }
        }
        Ok(Daemon { running, control, client: binaries.join("sidecore") })
    }

    /// Asks the daemon, the way a user would, what a disk's device has counted.
    pub(crate) fn counters(&self, disk: &str) -> Result<Counters> {
        let output = Command::new(&self.client)
            .arg("--socket")
            .arg(&self.control)
            .args(["stats", "--json"])
            .output()
            .with_context(|| format!("cannot run {}", self.client.display()))?;
        ensure!(output.status.success(), "sidecore stats failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        parse_stats(&output.stdout, &device(disk))
    }

    /// Ends the daemon as a service manager would, and checks that it goes in order.
    pub(crate) fn stop(self, inbox: &mut Inbox<'_>) -> Result<()> {
        self.running.terminate()?;
        let gone = inbox.wait_closed(Source::Daemon, Instant::now() + Duration::from_secs(15))?;
        ensure!(gone, "sidecored did not end within 15 seconds of SIGTERM");
        let status = self.running.reap()?;
        ensure!(status.success(), "sidecored ended with {status} after SIGTERM");
        Ok(())
    }
}

fn device(disk: &str) -> String {
    format!("vd-{disk}")
}

fn configuration(
    directory: &Path,
    image: &Path,
    control: &Path,
    sidecore_cpu: Option<usize>,
    mode: Mode,
) -> Result<String> {
    // A JSON string is a TOML string.
    let quoted = |path: &Path| -> Result<String> { Ok(serde_json::to_string(text(path)?)?) };
    let idle = match mode {
        Mode::Interrupt => "interrupt",
        Mode::Polled => "poll",
    };
    let mut config = format!("control_socket = {}\n\n[[sidecore]]\nname = \"sc0\"\n", quoted(control)?);
    if let Some(cpu) = sidecore_cpu {
        config.push_str(&format!("cpu = {cpu}\n"));
    }
    for disk in DISKS {
        let (device, socket) = (device(disk), quoted(&socket(directory, disk))?);
        let content = match disk {
            "file" => format!("path = {}", quoted(image)?),
            _ => format!("size = \"{DISK_MIB}MiB\""),
        };
        let packed = disk == PACKED_DISK;
        config.push_str(&format!(
            "\n[[store]]\nname = \"disk-{disk}\"\ntype = \"{disk}\"\n{content}\n\n[[device]]\nname = \"{device}\"\n\
             store = \"disk-{disk}\"\nsocket = {socket}\nqueues = {QUEUES}\npacked = {packed}\n\
             sidecore = \"sc0\"\nidle = \"{idle}\"\n"
        ));
    }
    Ok(config)
}

#[derive(Deserialize)]
struct Stats {
    devices: Vec<DeviceStats>,
}

#[derive(Deserialize)]
struct DeviceStats {
    name: String,
    queues: Vec<QueueStats>,
}

#[derive(Deserialize)]
struct QueueStats {
    kicks: u64,
    requests: u64,
}

fn parse_stats(json: &[u8], device: &str) -> Result<Counters> {
    let stats: Stats = serde_json::from_slice(json).context("cannot read the output of sidecore stats")?;
    let found = stats.devices.iter().find(|candidate| candidate.name == device);
    let queues = &found.with_context(|| format!("sidecore stats knows no device {device}"))?.queues;
    Ok(Counters {
        kicks: queues.iter().map(|queue| queue.kicks).sum(),
        requests: queues.iter().map(|queue| queue.requests).sum(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_summed_over_the_queues_of_the_device() {
        let json = br#"{"devices":[{"name":"vd-ram","queues":[{"index":0,"kicks":9,"requests":9}]},
            {"name":"vd-file","queues":[{"index":0,"kicks":1,"calls":7,"requests":10},
            {"index":1,"kicks":2,"requests":20}]}]}"#;
        assert_eq!(parse_stats(json, "vd-file").unwrap(), Counters { kicks: 3, requests: 30 });
        assert!(parse_stats(json, "vd-other").is_err());
        assert!(parse_stats(b"{}", "vd-file").is_err());
    }

    #[test]
    fn both_disks_and_the_mode_are_configured() {
        let directory = Path::new("/t");
        let config =
            |mode| configuration(directory, Path::new("/t/d \"x\""), Path::new("/t/c"), Some(3), mode).unwrap();
        let polled = config(Mode::Polled);
        assert_eq!(polled.matches("idle = \"poll\"").count(), 2);
        assert_eq!(polled.matches("[[device]]").count(), 2);
        assert!(polled.contains(r#"path = "/t/d \"x\"""#));
        assert!(polled.contains("cpu = 3\n"));
        assert!(polled.contains("socket = \"/t/ram.sock\""));
        assert!(config(Mode::Interrupt).contains("idle = \"interrupt\""));
    }
}
