//! Calls `sidecore`, the command line tool, as a user does; the demo counts and checks by its JSON.

use crate::text;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// The command for counters. Without the last word it takes a second, for latencies.
const STATS: [&str; 3] = ["stats", "--json", "--since-start"];

/// The tool, with the path of the daemon's control socket.
pub(crate) struct Sidecore {
    program: PathBuf,
    control: PathBuf,
}

/// A device's counts since the daemon's start, over all its queues.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) kicks: u64,
    pub(crate) requests: u64,
    /// Writes to blocks that the volume does not have, and requests that reached a pruned part of
    /// the tree.
    pub(crate) misses: u64,
}

/// A sidecore's sleeps since the daemon's start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Sleeps {
    pub(crate) sleeps: u64,
    /// Sleeps that a notification ended which a queue or a link had asked for.
    pub(crate) wakeups: u64,
}

#[derive(Deserialize)]
struct Stats {
    sidecores: Vec<Sleeps>,
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

#[derive(Deserialize)]
struct Volumes {
    volumes: Vec<Volume>,
}

/// A volume or a snapshot.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Volume {
    pub(crate) name: String,
    pub(crate) size_bytes: u64,
    pub(crate) allocated_bytes: u64,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Controller {
    pub(crate) space: Space,
    pub(crate) functions: Vec<Function>,
}

/// The free space of a controller's store, and the space that will soon be free.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Space {
    pub(crate) free_bytes: u64,
    pub(crate) pending_bytes: u64,
}

/// An open virtual function.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Function {
    pub(crate) volume: String,
    pub(crate) misses: u64,
    pub(crate) prune_misses: u64,
}

#[derive(Deserialize)]
struct Mapping {
    volume: MappedVolume,
    extents: Vec<Extent>,
}

#[derive(Deserialize)]
struct MappedVolume {
    block_bytes: u64,
}

/// Blocks of a volume that are also consecutive on the store; all numbers in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) struct Extent {
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) physical: u64,
}

impl Sidecore {
    pub(crate) fn new(binaries: &Path, control: &Path) -> Sidecore {
        Sidecore { program: binaries.join("sidecore"), control: control.to_path_buf() }
    }

    /// Runs the tool, which must succeed, and returns its output.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<String> {
        let output = self.output(arguments)?;
        ensure!(output.status.success(), "{} failed: {}", command(arguments), words(&output));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs the tool and returns the time from its start to its end.
    pub(crate) fn timed(&self, arguments: &[&str]) -> Result<Duration> {
        let start = Instant::now();
        self.run(arguments)?;
        Ok(start.elapsed())
    }

    /// Runs a check. Returns whether it passed, and its output.
    pub(crate) fn check(&self, arguments: &[&str]) -> Result<(bool, String)> {
        let output = self.output(arguments)?;
        let said = String::from_utf8_lossy(&output.stdout);
        match output.status.code() {
            Some(0) => Ok((true, said.trim().replace('\n', "; "))),
            Some(2) => Ok((false, said.trim().replace('\n', "; "))),
            _ => bail!("{} failed: {}", command(arguments), words(&output)),
        }
    }

    /// A device's counts, with the misses of its virtual function.
    pub(crate) fn counters(&self, controller: &str, device: &str) -> Result<Counters> {
        let stats: Stats = self.json(&STATS)?;
        let function = self
            .controller(controller)?
            .functions
            .into_iter()
            .find(|function| function.volume == device);
        let function =
            function.with_context(|| format!("no virtual function shows the volume {device}"))?;
        let mut counters = stats.counters(device)?;
        counters.misses = function.misses + function.prune_misses;
        Ok(counters)
    }

    /// The number of requests that a device has served.
    pub(crate) fn requests(&self, device: &str) -> Result<u64> {
        Ok(self.served(device)?.requests)
    }

    pub(crate) fn controller(&self, controller: &str) -> Result<Controller> {
        self.json(&["controller", "--controller", controller, "--json", "show"])
    }

    pub(crate) fn volume(&self, controller: &str, name: &str) -> Result<Volume> {
        let found: Volumes =
            self.json(&["volume", "--controller", controller, "--json", "list"])?;
        let mut volumes = found.volumes.into_iter();
        volumes
            .find(|volume| volume.name == name)
            .with_context(|| format!("sidecore lists no volume {name}"))
    }

    /// The extents of a part of a volume.
    pub(crate) fn extents(
        &self,
        controller: &str,
        volume: &str,
        first: u64,
        count: u64,
    ) -> Result<Vec<Extent>> {
        let arguments =
            ["volume", "--controller", controller, "--json", "show", volume, "--extents"];
        Ok(self.json::<Mapping>(&arguments)?.within(first, count))
    }

    /// The requests and kicks of a device.
    pub(crate) fn served(&self, device: &str) -> Result<Counters> {
        self.json::<Stats>(&STATS)?.counters(device)
    }

    /// The answer of `sidecore remote list`.
    pub(crate) fn remote(&self) -> Result<serde_json::Value> {
        self.json(&["remote", "--json", "list"])
    }

    /// The sleeps of all sidecores, and the wake-ups among their ends.
    pub(crate) fn sleeps(&self) -> Result<Sleeps> {
        let stats: Stats = self.json(&STATS)?;
        let sum = |of: fn(&Sleeps) -> u64| stats.sidecores.iter().map(of).sum();
        Ok(Sleeps { sleeps: sum(|of| of.sleeps), wakeups: sum(|of| of.wakeups) })
    }

    pub(crate) fn json<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T> {
        let said = self.run(arguments)?;
        serde_json::from_str(&said)
            .with_context(|| format!("cannot read the output of {}", command(arguments)))
    }

    fn output(&self, arguments: &[&str]) -> Result<Output> {
        let socket = text(&self.control)?;
        let mut command = Command::new(&self.program);
        command.args(["--socket", socket]).args(arguments);
        command.output().with_context(|| format!("cannot run {}", self.program.display()))
    }
}

/// The command line as a user would type it.
pub(crate) fn command(arguments: &[&str]) -> String {
    format!("sidecore {}", arguments.join(" "))
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}

impl Stats {
    fn counters(&self, device: &str) -> Result<Counters> {
        let found = self.devices.iter().find(|candidate| candidate.name == device);
        let queues =
            &found.with_context(|| format!("sidecore stats knows no device {device}"))?.queues;
        Ok(Counters {
            kicks: queues.iter().map(|queue| queue.kicks).sum(),
            requests: queues.iter().map(|queue| queue.requests).sum(),
            misses: 0,
        })
    }
}

impl Mapping {
    /// The part of the mapping that lies in so many bytes of the volume.
    fn within(&self, first: u64, count: u64) -> Vec<Extent> {
        let block = self.volume.block_bytes;
        let all = self.extents.iter().map(|extent| Extent {
            first: extent.first * block,
            count: extent.count * block,
            physical: extent.physical * block,
        });
        all.filter_map(|extent| {
            let start = extent.first.max(first);
            let end = (extent.first + extent.count).min(first + count);
            let physical = extent.physical + (start - extent.first);
            (start < end).then(|| Extent { first: start, count: end - start, physical })
        })
        .collect()
    }
}

/// The number of bytes of the store that are in both.
pub(crate) fn in_common(one: &[Extent], other: &[Extent]) -> u64 {
    let overlap = |a: &Extent, b: &Extent| {
        let end = (a.physical + a.count).min(b.physical + b.count);
        end.saturating_sub(a.physical.max(b.physical))
    };
    one.iter().map(|a| other.iter().map(|b| overlap(a, b)).sum::<u64>()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_summed_over_the_queues_of_the_device() {
        let json = r#"{"sidecores":[{"sleeps":5,"wakeups":4}],"devices":[
            {"name":"ram","queues":[{"index":0,"kicks":9,"requests":9}]},
            {"name":"file","queues":[{"index":0,"kicks":1,"interrupts":7,"requests":10},
            {"index":1,"kicks":2,"requests":20}]}]}"#;
        let stats: Stats = serde_json::from_str(json).unwrap();
        assert_eq!(stats.counters("file").unwrap(), Counters { kicks: 3, requests: 30, misses: 0 });
        assert!(stats.counters("other").is_err());
    }

    #[test]
    fn a_part_of_a_mapping_is_cut_at_both_ends() {
        let json = r#"{"volume":{"name":"v","block_bytes":1024},"extents":[
            {"first":0,"count":4,"physical":100,"shared":false},
            {"first":8,"count":4,"physical":200,"shared":true}]}"#;
        let mapping: Mapping = serde_json::from_str(json).unwrap();
        let found = mapping.within(2048, 7 * 1024);
        let extent = |first, count, physical| Extent { first, count, physical };
        assert_eq!(found, [extent(2048, 2048, 102 * 1024), extent(8192, 1024, 200 * 1024)]);
        assert!(mapping.within(4096, 4096).is_empty());
    }

    #[test]
    fn what_two_mappings_share_is_counted_on_the_store() {
        let extent = |first, count, physical| Extent { first, count, physical };
        let one = [extent(0, 10, 100), extent(50, 10, 300)];
        assert_eq!(in_common(&one, &[extent(7, 10, 105), extent(90, 4, 302)]), 9);
        assert_eq!(in_common(&one, &[extent(0, 10, 110)]), 0);
    }
}
