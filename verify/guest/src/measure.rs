//! Parses the numbers that the guest's kernel and fio print.

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The interrupts that a line of /proc/interrupts counts for the request queues of a disk, over all
/// CPUs.
///
/// A virtio disk has one line for each vector: `virtio0-config`, and `virtio0-req.0` and so on for
/// its queues. The configuration's line and lines of other devices yield 0.
pub(crate) fn request_interrupts(line: &str, virtio: &str) -> Result<u64> {
    interrupts(line, |word| word.strip_prefix(virtio).is_some_and(|rest| rest.starts_with("-req")))
}

/// The same for the I/O queues of NVMe controllers, which are `nvme0q1` and so on; `nvme0q0` is the
/// admin queue.
pub(crate) fn nvme_interrupts(line: &str) -> Result<u64> {
    interrupts(line, |word| {
        let queue = word.strip_prefix("nvme").and_then(|rest| rest.split_once('q'));
        queue.is_some_and(|(controller, queue)| {
            controller.parse::<u32>().is_ok() && queue.parse().is_ok_and(|queue: u32| queue > 0)
        })
    })
}

/// The sum of a line over all CPUs, if `ours` holds for one of its names; else 0.
fn interrupts(line: &str, ours: impl Fn(&str) -> bool) -> Result<u64> {
    let Some((_, counts)) = line.split_once(':') else { return Ok(0) };
    // Queues that share a vector are listed with commas.
    if !counts.split_whitespace().any(|word| ours(word.trim_end_matches(','))) {
        return Ok(0);
    }
    let numbers = counts.split_whitespace().map_while(|word| word.parse::<u64>().ok());
    let (cpus, sum) = numbers.fold((0, 0), |(cpus, sum), number| (cpus + 1, sum + number));
    ensure!(cpus > 0, "no count in the line '{line}' of /proc/interrupts");
    Ok(sum)
}

/// The number of completed requests of all kinds, from a disk's `stat` file.
pub(crate) fn completed_requests(stat: &str) -> Result<u64> {
    let fields: Vec<u64> = stat
        .split_whitespace()
        .map(|field| {
            field.parse().with_context(|| format!("'{field}' in a disk's stat file is no number"))
        })
        .collect::<Result<_>>()?;
    ensure!(
        fields.len() >= 11,
        "a disk's stat file has {} fields instead of 11 or more",
        fields.len()
    );
    // Reads, writes, discards and flushes; older kernels lack the last two.
    Ok([0, 4, 11, 15].iter().filter_map(|field| fields.get(*field)).sum())
}

/// A result of fio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ios {
    pub(crate) iops: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) total: u64,
}

#[derive(Deserialize)]
struct Output {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i64,
    read: Option<Direction>,
    write: Option<Direction>,
}

#[derive(Deserialize)]
struct Direction {
    total_ios: u64,
    iops: f64,
    lat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    #[serde(default)]
    percentile: BTreeMap<String, u64>,
}

/// Parses fio's JSON of a single job that either reads or writes.
pub(crate) fn fio_ios(json: &str) -> Result<Ios> {
    let output: Output = serde_json::from_str(json).context("cannot read fio's output")?;
    let [job] = output.jobs.as_slice() else {
        bail!("fio reports {} jobs instead of one", output.jobs.len());
    };
    ensure!(job.error == 0, "fio reports error {}", job.error);
    let done: Vec<&Direction> =
        [&job.read, &job.write].into_iter().flatten().filter(|way| way.total_ios > 0).collect();
    let [done] = done.as_slice() else {
        bail!("fio did {}", if done.is_empty() { "nothing" } else { "both, reads and writes" });
    };
    let percentile_us = |wanted: f64| -> Result<f64> {
        let found = done.lat_ns.percentile.iter().find(|(key, _)| key.parse() == Ok(wanted));
        let (_, nanoseconds) =
            found.with_context(|| format!("fio reports no {wanted}th percentile"))?;
        Ok(*nanoseconds as f64 / 1000.0)
    };
    Ok(Ios {
        iops: done.iops,
        p50_us: percentile_us(50.0)?,
        p99_us: percentile_us(99.0)?,
        total: done.total_ios,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_lines_are_summed_over_cpus_and_others_are_not_counted() {
        let count = |line| request_interrupts(line, "virtio1").unwrap();
        assert_eq!(count("25:   120   3   PCI-MSI-0000:00:06.0   1-edge      virtio1-req.0"), 123);
        assert_eq!(count("26:   7   PCI-MSI 98306-edge      virtio1-req.1"), 7);
        assert_eq!(count("27:   7   PCI-MSI 98306-edge      virtio1-requests"), 7);
        assert_eq!(count("24:   9   PCI-MSI 98304-edge      virtio1-config"), 0);
        assert_eq!(count("25:   9   PCI-MSI 98304-edge      virtio11-req.0"), 0);
        assert_eq!(count("28:   4   PCI-MSI 98304-edge      virtio1-req.0, virtio1-req.1"), 4);
        assert!(request_interrupts("25: PCI-MSI virtio1-req.0", "virtio1").is_err());
    }

    #[test]
    fn nvme_queues_count_but_the_admin_queue() {
        let count = |line| nvme_interrupts(line).unwrap();
        assert_eq!(count("26:   9   2   PCI-MSIX-0000:01:00.0   1-edge      nvme0q1"), 11);
        assert_eq!(count("25:   9   2   PCI-MSIX-0000:01:00.0   0-edge      nvme0q0"), 0);
        assert_eq!(count("25:   9   2   PCI-MSI 98304-edge      nvmequeue"), 0);
        assert_eq!(count(""), 0);
    }

    #[test]
    fn requests_of_every_kind_count() {
        let old = "10 0 80 5 20 0 160 5 0 10 10";
        assert_eq!(completed_requests(old).unwrap(), 30);
        assert_eq!(completed_requests(&format!("{old} 3 0 0 0 2 1")).unwrap(), 35);
        assert!(completed_requests("1 2 3").is_err());
        assert!(completed_requests("1 2 3 4 5 6 7 8 9 10 x").is_err());
    }

    #[test]
    fn fio_output_gives_iops_and_percentiles() {
        let json = r#"{"fio version":"fio-3.33","jobs":[{"jobname":"measure","error":0,"read":{
            "total_ios":1000,"iops":2000.5,"lat_ns":{"min":1,
            "percentile":{"50.000000":15900,"99.000000":50000}}}}]}"#;
        let ios = fio_ios(json).unwrap();
        assert_eq!(ios, Ios { iops: 2000.5, p50_us: 15.9, p99_us: 50.0, total: 1000 });
        assert!(fio_ios(&json.replace("\"error\":0", "\"error\":5")).is_err());
        assert!(fio_ios(&json.replace("99.000000", "98.000000")).is_err());
        assert!(fio_ios(&json.replace("1000,", "0,")).is_err());
        assert!(fio_ios("fio: cannot start").is_err());
        let writes = json.replace("\"read\"", "\"write\"");
        assert_eq!(fio_ios(&writes).unwrap(), ios);
        let nothing = r#""read":{"total_ios":0,"iops":0.0,"lat_ns":{}},"write""#;
        assert_eq!(fio_ios(&writes.replace("\"write\"", nothing)).unwrap(), ios);
    }
}
