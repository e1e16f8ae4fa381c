//! The file of a plan: parts with prices, racks, and a load with the costs of its requests.

use std::ops::RangeInclusive;

use serde::Deserialize;

/// The paper's plan, with comments: the example of a file.
pub const PAPER: &str = include_str!("paper.toml");

/// The longest file, in bytes.
pub const MAX_FILE_BYTES: u64 = 1 << 20;
/// The most entries of a list.
const MAX_LIST: usize = 16;
const MAX_PRICE: f64 = 1e9;
const MAX_GBPS: f64 = 1e6;
/// The most servers of a rack, and the most of any part in a host.
const MAX_SERVERS: u64 = 10_000;
const MAX_PARTS: u64 = 1024;
const MAX_NS: f64 = 1e9;
const MAX_BYTES: u64 = 64 << 10;
/// The most VMs and requests in flight of a simulation.
const MAX_VMS: f64 = 100_000.0;
const MAX_IN_FLIGHT: f64 = 100_000.0;

/// The faults of a file, a line each.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Fault(pub(crate) String);

/// A model of server without its parts.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Server {
    pub(crate) price: f64,
    pub(crate) cpus: Vec<u64>,
    pub(crate) dimms: [u64; 2],
    pub(crate) nics: u64,
    pub(crate) drives: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Cpu {
    pub(crate) price: f64,
    pub(crate) cores: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Dimm {
    pub(crate) gb: u64,
    pub(crate) price: f64,
}

/// A NIC or a drive.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) price: f64,
    pub(crate) gbps: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Racks {
    pub(crate) servers: Vec<u64>,
    pub(crate) cpus: u64,
    pub(crate) sidecores: u64,
    pub(crate) consolidation: f64,
    pub(crate) gb_per_core: f64,
    pub(crate) iohost_gb: f64,
    pub(crate) mbps_per_core: f64,
    pub(crate) mbps_in_gbps: f64,
    pub(crate) nic_shortfall: f64,
    pub(crate) server_nic: String,
    pub(crate) vmhost_nic: String,
    pub(crate) iohost_nic: String,
    #[serde(default)]
    pub(crate) iohost_drives: Vec<u64>,
}

/// The requests of a rack's VMs.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Load {
    pub(crate) vms: u64,
    pub(crate) requests_per_s: f64,
    pub(crate) reads: f64,
    pub(crate) active: f64,
    pub(crate) p99_us: f64,
}

/// The nanoseconds of a request, alone and in a batch.
pub(crate) type Pair = [f64; 2];

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Stages {
    pub(crate) client: Pair,
    pub(crate) iohost: Pair,
    pub(crate) hands_over: Pair,
    pub(crate) helper: Pair,
    pub(crate) answers: Pair,
    pub(crate) local_guest: Pair,
    pub(crate) local_sidecore: Pair,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Requests {
    pub(crate) bytes: u64,
    pub(crate) wire_ns: f64,
    pub(crate) local_wire_ns: f64,
    pub(crate) crossing_ns: f64,
    pub(crate) store_ns: f64,
    pub(crate) read: Stages,
    pub(crate) write: Stages,
}

/// A checked file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    pub(crate) server: Server,
    pub(crate) cpu: Cpu,
    #[serde(rename = "dimm")]
    pub(crate) dimms: Vec<Dimm>,
    #[serde(rename = "nic")]
    pub(crate) nics: Vec<Device>,
    #[serde(rename = "drive", default)]
    pub(crate) drives: Vec<Device>,
    pub(crate) rack: Racks,
    pub(crate) load: Option<Load>,
    pub(crate) requests: Option<Requests>,
}

impl Plan {
    /// Reads and checks the text of a file.
    ///
    /// # Errors
    /// The text is not TOML, a key is missing or unknown, or a value is out of its range. All
    /// values out of range are named.
    pub fn parse(text: &str) -> Result<Self, Fault> {
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(Fault(format!("the file is longer than {MAX_FILE_BYTES} bytes")));
        }
        let plan: Self = toml::from_str(text).map_err(|error| Fault(error.to_string()))?;
        let mut check = Check(Vec::new());
        check.parts(&plan);
        check.rack(&plan);
        check.load(&plan);
        if check.0.is_empty() { Ok(plan) } else { Err(Fault(check.0.join("\n"))) }
    }

    /// The NIC of this name, which [`Plan::parse`] has found.
    pub(crate) fn nic(&self, name: &str) -> Result<&Device, Fault> {
        let nic = self.nics.iter().find(|nic| nic.name == name);
        nic.ok_or_else(|| Fault(format!("there is no [[nic]] with the name \"{name}\"")))
    }
}

/// The faults that were found.
struct Check(Vec<String>);

impl Check {
    fn number(&mut self, key: &str, value: f64, range: RangeInclusive<f64>) {
        if !range.contains(&value) {
            let (least, most) = (range.start(), range.end());
            self.0.push(format!("`{key}` must be a number from {least} to {most}, not {value}"));
        }
    }

    fn count(&mut self, key: &str, value: u64, range: RangeInclusive<u64>) {
        if !range.contains(&value) {
            let (least, most) = (range.start(), range.end());
            self.0.push(format!("`{key}` must be from {least} to {most}, not {value}"));
        }
    }

    fn list<T>(&mut self, key: &str, list: &[T], least: usize) {
        if !(least..=MAX_LIST).contains(&list.len()) {
            let len = list.len();
            self.0.push(format!("`{key}` must have {least} to {MAX_LIST} entries, not {len}"));
        }
    }

    fn parts(&mut self, plan: &Plan) {
        let server = &plan.server;
        // No setup is free, so that prices have a ratio.
        self.number("server.price", server.price, 1.0..=MAX_PRICE);
        self.list("server.cpus", &server.cpus, 1);
        for cpus in &server.cpus {
            self.count("server.cpus", *cpus, 1..=MAX_PARTS);
        }
        let [least, most] = server.dimms;
        self.count("server.dimms", most, 2..=MAX_PARTS);
        self.count("server.dimms", least, 0..=most);
        self.count("server.nics", server.nics, 0..=MAX_PARTS);
        self.count("server.drives", server.drives, 0..=MAX_PARTS);
        self.number("cpu.price", plan.cpu.price, 0.0..=MAX_PRICE);
        self.count("cpu.cores", plan.cpu.cores, 1..=MAX_PARTS);
        self.list("dimm", &plan.dimms, 1);
        for dimm in &plan.dimms {
            self.count("dimm.gb", dimm.gb, 1..=1 << 20);
            self.number("dimm.price", dimm.price, 0.0..=MAX_PRICE);
        }
        for (kind, devices, least) in [("nic", &plan.nics, 1), ("drive", &plan.drives, 0)] {
            self.list(kind, devices, least);
            for (index, device) in devices.iter().enumerate() {
                self.number(&format!("{kind}.price"), device.price, 0.0..=MAX_PRICE);
                self.number(&format!("{kind}.gbps"), device.gbps, 0.001..=MAX_GBPS);
                let is_good = |c: char| c.is_ascii_graphic() || c == ' ';
                if !(1..=64).contains(&device.name.len()) || !device.name.chars().all(is_good) {
                    self.0.push(format!("`{kind}.name` must have 1 to 64 printable characters"));
                }
                if devices.iter().take(index).any(|other| other.name == device.name) {
                    self.0.push(format!("two [[{kind}]] have the name \"{}\"", device.name));
                }
            }
        }
    }

    fn rack(&mut self, plan: &Plan) {
        let rack = &plan.rack;
        self.list("rack.servers", &rack.servers, 1);
        for servers in &rack.servers {
            self.count("rack.servers", *servers, 1..=MAX_SERVERS);
        }
        if !plan.server.cpus.contains(&rack.cpus) {
            let known = &plan.server.cpus;
            self.0.push(format!("`rack.cpus` must be one of `server.cpus` {known:?}"));
        }
        let cores = rack.cpus.saturating_mul(plan.cpu.cores);
        self.count("rack.sidecores", rack.sidecores, 0..=cores.saturating_sub(1));
        self.number("rack.consolidation", rack.consolidation, 0.0..=10.0);
        self.number("rack.gb_per_core", rack.gb_per_core, 0.0..=1e6);
        self.number("rack.iohost_gb", rack.iohost_gb, 0.0..=1e9);
        self.number("rack.mbps_per_core", rack.mbps_per_core, 0.0..=1e9);
        self.number("rack.mbps_in_gbps", rack.mbps_in_gbps, 1000.0..=1024.0);
        self.number("rack.nic_shortfall", rack.nic_shortfall, 0.0..=0.5);
        self.list("rack.iohost_drives", &rack.iohost_drives, 0);
        for drives in &rack.iohost_drives {
            self.count("rack.iohost_drives", *drives, 1..=MAX_SERVERS);
        }
        for (key, name) in [
            ("server_nic", &rack.server_nic),
            ("vmhost_nic", &rack.vmhost_nic),
            ("iohost_nic", &rack.iohost_nic),
        ] {
            if let Err(Fault(fault)) = plan.nic(name) {
                self.0.push(format!("`rack.{key}`: {fault}"));
            }
        }
    }

    /// Bounds of the simulation's time and memory.
    fn size(&mut self, load: &Load, requests: &Requests, servers: u64) {
        let vms = (servers.saturating_mul(load.vms) as f64 * load.active).ceil();
        if vms > MAX_VMS {
            self.0.push(format!("{vms} VMs: at most {MAX_VMS} that ask at one time are simulated"));
        }
        let around_ns = requests.store_ns + 2.0 * requests.wire_ns.max(requests.local_wire_ns);
        let in_flight = vms.max(load.vms as f64) * load.requests_per_s * around_ns / 1e9;
        if in_flight > MAX_IN_FLIGHT {
            self.0.push(format!(
                "{in_flight:.0} requests in flight, at the store and on the way: at most \
                 {MAX_IN_FLIGHT} are simulated; lower `requests.store_ns` or the load"
            ));
        }
        let client_ns = requests.read.client[1].max(requests.write.client[1]);
        if load.requests_per_s * client_ns >= 1e9 {
            self.0.push(format!(
                "a VM with {} requests a second of {client_ns} ns needs more than one core",
                load.requests_per_s
            ));
        }
    }

    fn load(&mut self, plan: &Plan) {
        let (load, requests) = match (&plan.load, &plan.requests) {
            (Some(load), Some(requests)) => (load, requests),
            (None, None) => return,
            _ => return self.0.push("[load] and [requests] need each other".to_owned()),
        };
        self.count("load.vms", load.vms, 1..=MAX_PARTS);
        self.number("load.requests_per_s", load.requests_per_s, 1.0..=1e8);
        self.number("load.reads", load.reads, 0.0..=1.0);
        self.number("load.active", load.active, 0.001..=1.0);
        self.number("load.p99_us", load.p99_us, 0.001..=1e7);
        self.size(load, requests, plan.rack.servers.iter().copied().max().unwrap_or(1));
        self.count("requests.bytes", requests.bytes, 512..=MAX_BYTES);
        for (key, ns) in [
            ("wire_ns", requests.wire_ns),
            ("local_wire_ns", requests.local_wire_ns),
            ("crossing_ns", requests.crossing_ns),
            ("store_ns", requests.store_ns),
        ] {
            self.number(&format!("requests.{key}"), ns, 0.0..=MAX_NS);
        }
        for (kind, stages) in [("read", &requests.read), ("write", &requests.write)] {
            for (key, [alone, many]) in [
                ("client", stages.client),
                ("iohost", stages.iohost),
                ("hands_over", stages.hands_over),
                ("helper", stages.helper),
                ("answers", stages.answers),
                ("local_guest", stages.local_guest),
                ("local_sidecore", stages.local_sidecore),
            ] {
                let key = format!("requests.{kind}.{key}");
                self.number(&key, alone, 1.0..=MAX_NS);
                self.number(&key, many, 1.0..=MAX_NS);
                if many > alone {
                    let text = "must be [alone, in a batch]: the second is not above the first";
                    self.0.push(format!("`{key}` {text}"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
