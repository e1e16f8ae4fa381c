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

/// How often a signal is looked for.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// How often the process is looked for once it prints nothing more.
const LOOK_AT_CHILD: Duration = Duration::from_millis(10);

/// How long a killed qemu-img is waited for. It takes longer only if a filesystem does not answer it.
const GRACE: Duration = Duration::from_secs(1);

/// Units that a progress has in all: hundredths of a percent.
const WHOLE: u64 = 10_000;

/// Runs `qemu-img convert` with these arguments, and shows how far it is of `total_bytes`.
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
    let complaint = std::thread::spawn(move || {
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
                None => std::thread::sleep(LOOK_AT_CHILD),
            }
            continue;
        }
        let ready = poll(&mut [PollFd::new(&stdout.as_fd(), PollFlags::IN)], Some(&LOOK));
        if matches!(ready, Ok(0) | Err(rustix::io::Errno::INTR)) {
            continue;
        }
        let count = stdout.read(&mut piece)?;
        prints = count > 0;
        if let Some(share) = shares.read(&piece[..count]) {
            progress.set((u128::from(total_bytes) * u128::from(share) / u128::from(WHOLE)) as u64);
        }
    };
    let complaint = complaint.join().unwrap_or_default();
    let complaint = String::from_utf8_lossy(&complaint);
    let complaint = complaint.trim();
    match status.code().map(u8::try_from) {
        Some(Ok(0)) => {}
        Some(Ok(bound::NOT_FOUND)) => bail!(
            "qemu-img is not installed, and only raw images can be handled without it; it comes with the package \
             qemu-utils (Debian, Ubuntu), qemu-img (Fedora, Arch) or qemu-tools (openSUSE)"
        ),
        Some(Ok(bound::NOT_RUN)) => bail!("qemu-img cannot be run: {complaint}"),
        _ => bail!("qemu-img failed ({status}): {complaint}"),
    }
    progress.finish();
    Ok(())
}

/// Dropping it ends it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already, unless something went wrong.
        let _ = self.0.kill();
        let deadline = Instant::now() + GRACE;
        while let Ok(None) = self.0.try_wait() {
            if Instant::now() >= deadline {
                let pid = self.0.id();
                eprintln!(
                    "sidecore: qemu-img (process {pid}) is killed, and gone when the filesystem that it waits for answers"
                );
                return;
            }
            std::thread::sleep(LOOK_AT_CHILD);
        }
    }
}

/// Reads `(12.34/100%)` out of what `-p` prints, over and over.
#[derive(Default)]
struct Shares(String);

impl Shares {
    /// The last share that `piece` completes, in hundredths of a percent.
    fn read(&mut self, piece: &[u8]) -> Option<u64> {
        let mut last = None;
        for byte in piece {
            match byte {
                b'(' => self.0.clear(),
                b'/' => last = self.0.trim().parse::<f64>().ok().map(|share| (share * 100.0) as u64).or(last),
                // Longer than any number: nonsense.
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
    fn shares_are_read_however_they_are_cut() {
        let text = b"    (0.00/100%)\r    (12.34/100%)\r    (100.00/100%)\r\n";
        assert_eq!(Shares::default().read(text), Some(10_000));
        let mut shares = Shares::default();
        let seen: Vec<u64> = text.chunks(3).filter_map(|piece| shares.read(piece)).collect();
        assert_eq!(seen, [0, 1234, 10_000]);
        assert_eq!(Shares::default().read(&[b'x'; 1000]), None);
    }
}
