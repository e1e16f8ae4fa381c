//! The control connection to a running QEMU (the QEMU Machine Protocol), by which devices are
//! plugged and unplugged.

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use sidecore_kit::interrupt;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest time for an answer of QEMU.
const PATIENCE: Duration = Duration::from_secs(30);
/// A wait is cut into pieces of this length, so that a signal is noticed.
const PIECE: Duration = Duration::from_millis(100);

pub(crate) struct Qmp {
    stream: UnixStream,
    /// Received bytes of an incomplete line.
    partial: Vec<u8>,
    /// Received events that no call has taken.
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects to a QEMU that may have just been started.
    pub(crate) fn connect(socket: &Path) -> Result<Qmp> {
        let deadline = Instant::now() + PATIENCE;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => {
                    return Err(error)
                        .with_context(|| format!("cannot connect to {}", socket.display()));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
            interrupt::check()?;
        };
        Qmp::greet(stream)
    }

    fn greet(stream: UnixStream) -> Result<Qmp> {
        stream.set_read_timeout(Some(PIECE))?;
        let mut qmp = Qmp { stream, partial: Vec::new(), events: VecDeque::new() };
        let greeting = qmp.message(Instant::now() + PATIENCE)?.context("QEMU does not greet")?;
        if greeting.get("QMP").is_none() {
            bail!("QEMU greets with {greeting}");
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and returns QEMU's answer.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.stream
            .write_all(line.as_bytes())
            .with_context(|| format!("cannot send QEMU {command}"))?;
        let deadline = Instant::now() + PATIENCE;
        while let Some(mut message) = self.message(deadline)? {
            if let Some(error) = message.get("error") {
                bail!(
                    "QEMU refuses {command}: {}",
                    error.get("desc").and_then(Value::as_str).unwrap_or("no reason")
                );
            }
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
            self.events.push_back(message);
        }
        bail!("QEMU does not answer {command}")
    }

    /// Plugs a device, described as on QEMU's command line.
    pub(crate) fn plug(&mut self, device: Value) -> Result<()> {
        self.execute("device_add", device).map(drop)
    }

    /// Asks the guest to release a device. [`unplugged`](Self::unplugged) waits for that.
    pub(crate) fn unplug(&mut self, device: &str) -> Result<()> {
        self.execute("device_del", json!({ "id": device })).map(drop)
    }

    /// Waits until a device is gone; `false` if it is not by the deadline.
    pub(crate) fn unplugged(&mut self, device: &str, deadline: Instant) -> Result<bool> {
        loop {
            while let Some(event) = self.events.pop_front() {
                if event["event"] == "DEVICE_DELETED" && event["data"]["device"] == device {
                    return Ok(true);
                }
            }
            match self.message(deadline)? {
                Some(event) => self.events.push_back(event),
                None => return Ok(false),
            }
        }
    }

    /// The next message; `None` if the deadline passes first.
    fn message(&mut self, deadline: Instant) -> Result<Option<Value>> {
        loop {
            if let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.partial.drain(..=end).collect();
                return serde_json::from_slice(&line)
                    .map(Some)
                    .context("QEMU's message is no JSON");
            }
            interrupt::check()?;
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => bail!("QEMU has closed its control socket"),
                Ok(length) => self.partial.extend_from_slice(&bytes[..length]),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    if Instant::now() > deadline {
                        return Ok(None);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("cannot read from QEMU"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};

    /// A QEMU that greets, and answers each request with the next one of `answers`.
    fn qemu(answers: Vec<&'static str>) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut writer = theirs.try_clone().unwrap();
            writer.write_all(b"{\"QMP\": {\"version\": {}}}\r\n").unwrap();
            let mut lines = BufReader::new(theirs).lines();
            for answer in ["{\"return\": {}}"].into_iter().chain(answers) {
                let Some(Ok(_)) = lines.next() else { return };
                writer.write_all(answer.as_bytes()).unwrap();
                writer.write_all(b"\r\n").unwrap();
            }
            let _ = lines.next();
        });
        ours
    }

    #[test]
    fn events_before_an_answer_are_kept() {
        let deleted =
            "{\"event\": \"DEVICE_DELETED\", \"data\": {\"device\": \"vf\"}}\r\n{\"return\": {}}";
        let mut qmp = Qmp::greet(qemu(vec![deleted])).unwrap();
        qmp.unplug("vf").unwrap();
        assert!(qmp.unplugged("vf", Instant::now()).unwrap());
        assert!(!qmp.unplugged("vf", Instant::now()).unwrap());
    }

    #[test]
    fn a_refusal_has_its_reason() {
        let refusal = "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no such bus\"}}";
        let mut qmp = Qmp::greet(qemu(vec![refusal])).unwrap();
        let error = qmp.plug(json!({ "driver": "vfio-user-pci" })).unwrap_err().to_string();
        assert!(error.contains("no such bus"), "{error}");
    }
}
