//! The report of the measured disks: a table, JSON, and the rules that they break.

use crate::qemu::Accelerator;
use anyhow::Result;
use serde::Serialize;
use std::fmt::{self, Write};

/// The way in which guest and daemon learn of requests and completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// By notifications and interrupts: the paper's baseline.
    Interrupt,
    /// By polling the ring: no exit, no interrupt.
    Polled,
}

impl fmt::Display for Mode {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            Mode::Interrupt => "interrupt",
            Mode::Polled => "polled",
        })
    }
}

/// The measurement of a disk in a mode.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The mode of the run.
    pub mode: Mode,
    /// The disk's name.
    pub disk: String,
    /// Random reads of 4 KiB per second, one at a time.
    pub iops: f64,
    /// The median latency of a read.
    pub p50_us: f64,
    /// The latency of the 99th percentile.
    pub p99_us: f64,
    /// Notifications from the guest, each of which is an exit, per request.
    pub kicks_per_request: f64,
    /// Interrupts in the guest per request.
    pub interrupts_per_request: f64,
    /// Whether all data came back as it was written.
    pub verified: bool,
    /// The requests in the measured window.
    #[serde(skip)]
    pub requests: u64,
    /// The kicks in the measured window.
    #[serde(skip)]
    pub kicks: u64,
    /// The interrupts in the measured window.
    #[serde(skip)]
    pub interrupts: u64,
    /// The checks of data that failed.
    #[serde(skip)]
    pub complaints: Vec<String>,
}

/// The measured rows, and below them the paper's.
pub(crate) fn table(rows: &[Row], accelerator: Accelerator) -> String {
    let mut text = String::new();
    let mut line = |cells: [&str; 8]| {
        let [mode, disk, iops, p50, p99, kicks, interrupts, verified] = cells;
        let row = format!(
            "{mode:<24} {disk:<8} {iops:>9} {p50:>8} {p99:>8} {kicks:>13} {interrupts:>18}  \
             {verified}"
        );
        text.push_str(row.trim_end());
        text.push('\n');
    };
    line([
        "mode",
        "disk",
        "IOPS",
        "p50 us",
        "p99 us",
        "kicks/request",
        "interrupts/request",
        "verified",
    ]);
    for row in rows {
        line([
            &row.mode.to_string(),
            &row.disk,
            &format!("{:.0}", row.iops),
            &format!("{:.1}", row.p50_us),
            &format!("{:.1}", row.p99_us),
            &format!("{:.3}", row.kicks_per_request),
            &format!("{:.3}", row.interrupts_per_request),
            if row.verified { "yes" } else { "NO" },
        ]);
    }
    line(["FAST'12 baseline", "ramdisk", "48800", "50 (1)", "", "each I/O", "each I/O", ""]);
    line(["FAST'12 polled", "ramdisk", "357500", "15.9 (1)", "", "none", "none", ""]);
    text.push_str(
        "\nBoth disks are thin volumes, each behind a virtual function: `file` of a controller on \
         a sparse file, `ram` (with\n\
         packed rings) of one in memory. Each measured row is one 4 KiB random read at a time, \
         directly on the disk, for one\n\
         window; the counts cover that window alone. FAST'12's IOPS are 4 KiB direct reads of \
         several threads: 48.8K to\n\
         357.5K (7.3x); writes 43.8K to 284.1K (6.5x). (1) is its average latency of one 4 KiB \
         direct write; of the 50 us,\n\
         49 us were virtualization's overhead, and 6.6 us in the optimised path.\n\n",
    );
    text.push_str(match accelerator {
        Accelerator::Tcg => {
            "This guest was emulated (TCG), so its IOPS and microseconds mean nothing beside the \
             paper's; its counts of kicks\n\
             and interrupts are exact and do.\n"
        }
        Accelerator::Kvm => {
            "This guest ran under KVM; its times are this machine's, with one read at a time, and \
             not the paper's set-up.\n"
        }
    });
    let counted: Vec<String> = rows
        .iter()
        .map(|row| {
            let Row { mode, disk, requests, kicks, interrupts, .. } = row;
            format!("{mode}/{disk}: {requests} requests, {kicks} kicks, {interrupts} interrupts")
        })
        .collect();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "Counted: {}.", counted.join("; "));
    text
}

/// The rows as JSON.
pub(crate) fn json(rows: &[Row]) -> Result<String> {
    Ok(serde_json::to_string_pretty(rows)? + "\n")
}

/// The measurements that break a rule, in words.
pub(crate) fn faults(rows: &[Row]) -> Vec<String> {
    let mut wrong = Vec::new();
    for row in rows {
        let Row { mode, disk, requests, kicks, interrupts, .. } = row;
        if !row.verified {
            wrong.push(format!(
                "{mode}/{disk} did not give back what was stored: {}",
                row.complaints.join("; ")
            ));
        }
        match mode {
            Mode::Polled if *kicks > 0 || *interrupts > 0 => wrong.push(format!(
                "{mode}/{disk} shows {kicks} kicks and {interrupts} interrupts for {requests} \
                 requests; there must be none"
            )),
            // Without counts here, the zeros of the polled run would prove nothing.
            Mode::Interrupt if *kicks == 0 || *interrupts == 0 => wrong.push(format!(
                "{mode}/{disk} shows {kicks} kicks and {interrupts} interrupts for {requests} \
                 requests; there must be some, so the counting does not work"
            )),
            _ => {}
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(mode: Mode, kicks: u64, interrupts: u64) -> Row {
        Row {
            mode,
            disk: "ram".to_owned(),
            iops: 1234.5,
            p50_us: 15.9,
            p99_us: 50.0,
            kicks_per_request: kicks as f64 / 100.0,
            interrupts_per_request: interrupts as f64 / 100.0,
            verified: true,
            requests: 100,
            kicks,
            interrupts,
            complaints: Vec::new(),
        }
    }

    #[test]
    fn json_has_the_agreed_keys_and_no_others() {
        let value: serde_json::Value =
            serde_json::from_str(&json(&[row(Mode::Polled, 0, 0)]).unwrap()).unwrap();
        let object = value[0].as_object().unwrap();
        let keys: Vec<&str> = object.keys().map(String::as_str).collect();
        let mut expected = [
            "mode",
            "disk",
            "iops",
            "p50_us",
            "p99_us",
            "kicks_per_request",
            "interrupts_per_request",
            "verified",
        ];
        expected.sort_unstable();
        let mut sorted = keys.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, expected);
        assert_eq!(object["mode"], "polled");
        assert_eq!(object["verified"], true);
    }

    #[test]
    fn good_rows_pass() {
        assert!(faults(&[row(Mode::Interrupt, 100, 100), row(Mode::Polled, 0, 0)]).is_empty());
    }

    #[test]
    fn one_kick_or_interrupt_fails_the_polled_run() {
        assert!(faults(&[row(Mode::Polled, 1, 0)])[0].contains("1 kicks"));
        assert_eq!(faults(&[row(Mode::Polled, 0, 1)]).len(), 1);
    }

    #[test]
    fn a_baseline_without_counts_and_a_wrong_byte_fail() {
        assert_eq!(faults(&[row(Mode::Interrupt, 0, 100)]).len(), 1);
        let spoiled = Row {
            verified: false,
            complaints: vec!["tree: ./x".to_owned()],
            ..row(Mode::Polled, 0, 0)
        };
        assert!(faults(&[spoiled])[0].contains("./x"));
    }

    #[test]
    fn the_table_is_honest_about_emulation() {
        let rows = [row(Mode::Interrupt, 100, 100)];
        assert!(table(&rows, Accelerator::Tcg).contains("mean nothing"));
        assert!(table(&rows, Accelerator::Tcg).contains("357500"));
        assert!(!table(&rows, Accelerator::Kvm).contains("mean nothing"));
    }
}
