//! `qemu-img`, for images that are not raw.

use std::ffi::OsStr;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::bound;
use crate::interrupt::Interrupt;
use crate::progress::Progress;

/// The interval of checks for signals.
const SIGNAL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// The interval of checks for the end of the process, once it prints nothing more.
const CHILD_INTERVAL: Duration = Duration::from_millis(10);

/// The time in which a killed qemu-img has to end. It needs longer only if a filesystem does not
/// answer it.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);

/// The whole of a progress, in hundredths of a percent.
const WHOLE: u64 = 10_000;

/// Runs `qemu-img convert` with these arguments, and shows the progress on `total_bytes`.
pub(crate) fn convert<'a>(
    arguments: impl IntoIterator<Item = &'a OsStr>,
    what: &str,
    total_bytes: u64,
    interrupt: &Interrupt,
) -> Result<()> {
    let mut command = bound::command("qemu-img")?;
    command.args(["convert", "-p"]).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Running(command.spawn().context("qemu-img cannot be run")?);
    let mut progress = Progress::new(what, total_bytes);
    let mut stdout = child.0.stdout.take().context("qemu-img has no output")?;
    let mut stderr = child.0.stderr.take().context("qemu-img has no standard error")?;
    let errors = std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = stderr.read_to_end(&mut text);
        text
    });
    let mut shares = Shares::default();
    let mut piece = [0; 256];
    let mut prints = true;
    let status = loop {
        interrupt.check()?;
        if !prints {
            match child.0.try_wait()? {
                Some(status) => break status,
                None => std::thread::sleep(CHILD_INTERVAL),
            }
            continue;
        }
        let ready =
            poll(&mut [PollFd::new(&stdout.as_fd(), PollFlags::IN)], Some(&SIGNAL_INTERVAL));
        if matches!(ready, Ok(0) | Err(rustix::io::Errno::INTR)) {
            continue;
        }
        let count = stdout.read(&mut piece)?;
        prints = count > 0;
        if let Some(share) = shares.read(&piece[..count]) {
            progress.set((u128::from(total_bytes) * u128::from(share) / u128::from(WHOLE)) as u64);
        }
    };
    let errors = errors.join().unwrap_or_default();
    let errors = String::from_utf8_lossy(&errors);
    let errors = errors.trim();
    match status.code().map(u8::try_from) {
        Some(Ok(0)) => {}
        Some(Ok(bound::NOT_FOUND)) => bail!(
            "qemu-img is not installed, and only raw images can be handled without it; it comes \
             with the package qemu-utils (Debian, Ubuntu), qemu-img (Fedora, Arch) or qemu-tools \
             (openSUSE)"
        ),
        Some(Ok(bound::NOT_RUN)) => bail!("qemu-img cannot be run: {errors}"),
        _ => bail!("qemu-img failed ({status}): {errors}"),
    }
    progress.finish();
    Ok(())
}

/// A running process. Dropping it kills the process.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The process has ended already, except after an error.
        let _ = self.0.kill();
        let deadline = Instant::now() + KILL_TIMEOUT;
        while let Ok(None) = self.0.try_wait() {
            if Instant::now() >= deadline {
                let pid = self.0.id();
                eprintln!(
                    "sidecore: qemu-img (process {pid}) is killed, and gone when the filesystem \
                     that it waits for answers"
                );
                return;
            }
            std::thread::sleep(CHILD_INTERVAL);
        }
    }
}

/// Parses `(12.34/100%)`, which `-p` prints again and again.
#[derive(Default)]
struct Shares(String);

impl Shares {
    /// Parses a piece of output. Returns the last share that the piece completes, in hundredths of
    /// a percent.
    fn read(&mut self, piece: &[u8]) -> Option<u64> {
        let mut last = None;
        for byte in piece {
            match byte {
                b'(' => self.0.clear(),
                b'/' => {
                    last = self
                        .0
                        .trim()
                        .parse::<f64>()
                        .ok()
                        .map(|share| (share * 100.0) as u64)
                        .or(last)
                }
                // Longer than any number: the text is no share.
                _ if self.0.len() > 16 => self.0.clear(),
                byte => self.0.push(char::from(*byte)),
            }
        }
        last.map(|share| share.min(WHOLE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_parsed_from_pieces_of_any_length() {
        let text = b"    (0.00/100%)\r    (12.34/100%)\r    (100.00/100%)\r\n";
        assert_eq!(Shares::default().read(text), Some(10_000));
        let mut shares = Shares::default();
        let seen: Vec<u64> = text.chunks(3).filter_map(|piece| shares.read(piece)).collect();
        assert_eq!(seen, [0, 1234, 10_000]);
        assert_eq!(Shares::default().read(&[b'x'; 1000]), None);
    }
}
