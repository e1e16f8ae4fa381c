//! The cost of a file system on a virtual function: the counts behind the thesis' figure 8.3, which
//! compares writes to the device with writes to a file on ext4.

use crate::measured::Totals;
use crate::report::Mode;
use anyhow::{Result, ensure};
use serde::Serialize;
use std::fmt::Write;

/// The windows, by the target of the writes and by whether it was written before.
pub(crate) const WRITES: [&str; 4] = ["raw-first", "raw-again", "ext4-first", "ext4-again"];

/// The cost of writes of 4 KiB, one at a time.
#[derive(Debug, Clone, Serialize)]
pub struct Overhead {
    /// The mode of the run.
    pub mode: Mode,
    /// One of the windows `raw-first`, `raw-again`, `ext4-first` and `ext4-again`.
    pub writes: String,
    /// Writes that fio did.
    pub operations: u64,
    /// Requests of the disk, including the file system's own.
    pub requests: u64,
    /// Notifications from the guest.
    pub kicks: u64,
    /// Interrupts in the guest.
    pub interrupts: u64,
    /// Requests that the function could not translate by itself, so that the hypervisor side
    /// allocated blocks.
    pub misses: u64,
    /// The median latency of a write.
    pub p50_us: f64,
}

impl Overhead {
    pub(crate) fn new(mode: Mode, writes: &str, totals: &Totals) -> Result<Overhead> {
        let Totals { ios, requests, kicks, interrupts, misses } = *totals;
        let operations = ios.total;
        ensure!(
            requests >= operations,
            "{mode}/{writes}: {operations} writes became only {requests} requests"
        );
        // Without a file system, a write is a request.
        ensure!(
            !writes.starts_with("raw") || requests == operations,
            "the window was not quiet: fio wrote {operations} times, but there were {requests} \
             requests"
        );
        Ok(Overhead {
            mode,
            writes: writes.to_owned(),
            operations,
            requests,
            kicks,
            interrupts,
            misses,
            p50_us: ios.p50_us,
        })
    }

    pub(crate) fn each(&self, count: u64) -> f64 {
        count as f64 / self.operations as f64
    }
}

/// The report.
pub(crate) fn table(overheads: &[Overhead]) -> String {
    let mut text = String::from(
        "Writes of 4 KiB, one at a time, to the virtual function and to a file on ext4 on it \
         (thesis, figure 8.3), each\n\
         divided by fio's writes; `first` where nothing was written before, `again` at the same \
         places:\n\n",
    );
    let mut line = |cells: [&str; 7]| {
        let [mode, writes, requests, kicks, interrupts, misses, p50] = cells;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{mode:<10} {writes:<11} {requests:>14} {kicks:>11} {interrupts:>16} {misses:>12} \
             {p50:>8}"
        );
    };
    line([
        "mode",
        "writes",
        "requests/write",
        "kicks/write",
        "interrupts/write",
        "misses/write",
        "p50 us",
    ]);
    for overhead in overheads {
        let Overhead { mode, writes, requests, kicks, interrupts, misses, p50_us, .. } = overhead;
        let each = [requests, kicks, interrupts, misses]
            .map(|count| format!("{:.3}", overhead.each(*count)));
        line([
            &mode.to_string(),
            writes,
            &each[0],
            &each[1],
            &each[2],
            &each[3],
            &format!("{p50_us:.1}"),
        ]);
    }
    text.push_str(
        "\nWhat ext4 adds are requests of its own, most of them by its journal; those come from \
         the kernel's own threads, which\n\
         do not poll, nor does it poll for a write that changes which blocks a file has.\n",
    );
    text
}

/// The measurements that break a rule, in words.
pub(crate) fn faults(overheads: &[Overhead]) -> Vec<String> {
    let fault = |overhead: &Overhead| {
        let Overhead { mode, writes, operations, kicks, interrupts, misses, .. } = overhead;
        let raw = writes.starts_with("raw");
        let must = match mode {
            Mode::Polled if *kicks > 0 => "there must be no kick",
            Mode::Polled if raw && *interrupts > 0 => "there must be no interrupt",
            // Without counts here, the zeros of the polled run would prove nothing.
            Mode::Interrupt if *kicks == 0 || *interrupts == 0 => {
                "there must be some of both: the counting does not work"
            }
            _ if writes == "raw-first" && *misses == 0 => {
                "some must have missed: nothing was written there before"
            }
            _ if writes == "raw-again" && *misses > 0 => {
                "none must have missed: all was written before"
            }
            _ => return None,
        };
        Some(format!(
            "{mode}/{writes}: {operations} writes took {kicks} kicks, {interrupts} interrupts and \
             {misses} misses; {must}"
        ))
    };
    overheads.iter().filter_map(fault).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Ios;

    fn overhead(mode: Mode, writes: &str, counts: [u64; 4]) -> Result<Overhead> {
        let [requests, kicks, interrupts, misses] = counts;
        let ios = Ios { iops: 1.0, p50_us: 15.9, p99_us: 50.0, total: 100 };
        Overhead::new(mode, writes, &Totals { ios, requests, kicks, interrupts, misses })
    }

    #[test]
    fn a_raw_write_is_a_request_and_one_to_a_file_may_be_more() {
        assert!(overhead(Mode::Polled, "raw-first", [101, 0, 0, 0]).is_err());
        assert!(overhead(Mode::Polled, "ext4-first", [99, 0, 0, 0]).is_err());
        let row = overhead(Mode::Interrupt, "ext4-first", [150, 100, 125, 100]).unwrap();
        assert!(
            table(&[row])
                .contains("          1.500       1.000            1.250        1.000     15.9")
        );
    }

    #[test]
    fn polling_takes_no_kick_and_only_a_file_system_may_interrupt() {
        let faults =
            |writes, counts| faults(&[overhead(Mode::Polled, writes, counts).unwrap()]).len();
        assert_eq!(faults("raw-again", [100, 0, 0, 0]), 0);
        assert_eq!(faults("raw-again", [100, 0, 1, 0]), 1);
        assert_eq!(faults("raw-again", [100, 1, 0, 0]), 1);
        assert_eq!(faults("ext4-again", [110, 0, 20, 0]), 0);
        assert_eq!(faults("ext4-again", [110, 1, 20, 0]), 1);
    }

    #[test]
    fn what_was_never_written_has_to_miss_and_the_rest_must_not() {
        let faults = |writes, misses| {
            faults(&[overhead(Mode::Interrupt, writes, [100, 100, 100, misses]).unwrap()]).len()
        };
        assert_eq!((faults("raw-first", 1), faults("raw-first", 0)), (0, 1));
        assert_eq!((faults("raw-again", 0), faults("raw-again", 1)), (0, 1));
    }
}
