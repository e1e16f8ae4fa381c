//! The hosts of a rack, and their prices: vRIO, section 3.
//!
//! Servers with sidecores of their own become VMhosts, all of whose cores run VMs, and IOhosts with
//! fewer sidecores. Traffic and memory of the servers are divided among the VMhosts; each packet of
//! a VMhost enters and leaves an IOhost.

use serde::Serialize;

use crate::file::{Device, Fault, Plan};

/// A part of a host.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Item {
    /// The name of the part.
    pub part: String,
    /// Of one.
    pub price: f64,
    /// The number of them in the host.
    pub count: u64,
}

/// A host with its parts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Host {
    /// `server`, `vmhost` or `iohost`.
    pub role: &'static str,
    /// The parts in the order of the paper's Table 1, also those of which the host has none.
    pub items: Vec<Item>,
    /// The sum of the parts.
    pub price: f64,
    /// The throughput of its NICs.
    pub gbps: f64,
    /// The throughput that it needs.
    pub required_gbps: f64,
}

/// A rack in both forms.
#[derive(Clone, Debug, Serialize)]
pub struct Rack {
    /// The number of servers with sidecores of their own.
    pub servers: u64,
    /// The number of VMhosts of the other form.
    pub vmhosts: u64,
    /// The number of its IOhosts.
    pub iohosts: u64,
    /// Such a server.
    pub server: Host,
    /// A VMhost.
    pub vmhost: Host,
    /// An IOhost.
    pub iohost: Host,
    /// The price of all servers.
    pub local_price: f64,
    /// The price of all VMhosts and IOhosts.
    pub remote_price: f64,
    /// The second price beside the first: -0.1 is a tenth less.
    pub difference: f64,
}

/// A rack with drives: one in each server, or some at the IOhosts.
#[derive(Clone, Debug, Serialize)]
pub struct DriveRow {
    /// The number of servers, and of their drives.
    pub servers: u64,
    /// The number of drives at the IOhosts.
    pub iohost_drives: u64,
    /// The name of the drive.
    pub drive: String,
    /// NICs for the drives' throughput, rounded up and rounded down.
    pub nics: [u64; 2],
    /// The price with IOhosts beside that of the servers, for each number of NICs. `None` if the
    /// IOhosts have no places for so many parts.
    pub relative: [Option<f64>; 2],
}

/// The counts of parts of a host.
struct Counts<'a> {
    cpus: u64,
    gb: f64,
    nic: &'a Device,
    nics: u64,
    required_gbps: f64,
}

/// Composes all racks of a plan.
///
/// # Errors
/// A host cannot have the parts that it needs.
pub fn racks(plan: &Plan) -> Result<Vec<Rack>, Fault> {
    plan.rack.servers.iter().map(|servers| rack(plan, *servers)).collect()
}

/// Adds drives to racks.
#[must_use]
pub fn with_drives(plan: &Plan, racks: &[Rack]) -> Vec<DriveRow> {
    let mut rows = Vec::new();
    for rack in racks {
        for drive in &plan.drives {
            let fewer = plan.rack.iohost_drives.iter().filter(|drives| **drives <= rack.servers);
            rows.extend(fewer.filter_map(|drives| drive_row(plan, rack, drive, *drives)));
        }
    }
    rows
}

fn drive_row(plan: &Plan, rack: &Rack, drive: &Device, drives: u64) -> Option<DriveRow> {
    let nic = plan.nic(&plan.rack.iohost_nic).ok()?;
    let share = drives as f64 * drive.gbps / nic.gbps;
    let nics = [share.ceil() as u64, share.floor() as u64];
    let present = rack.iohost.items.iter().rfind(|item| item.part == nic.name)?.count;
    let places = plan.server.nics.saturating_sub(present).saturating_mul(rack.iohosts);
    let fits = drives <= plan.server.drives.saturating_mul(rack.iohosts);
    let local = rack.local_price + rack.servers as f64 * drive.price;
    let relative = nics.map(|nics| {
        let more = drives as f64 * drive.price + nics as f64 * nic.price;
        (fits && nics <= places).then_some((rack.remote_price + more) / local)
    });
    let (servers, drive) = (rack.servers, drive.name.clone());
    Some(DriveRow { servers, iohost_drives: drives, drive, nics, relative })
}

fn rack(plan: &Plan, servers: u64) -> Result<Rack, Fault> {
    let racks = &plan.rack;
    let cores = racks.cpus * plan.cpu.cores;
    let vmhosts = (servers * (cores - racks.sidecores)).div_ceil(cores);
    let gbps = cores as f64 * racks.mbps_per_core / racks.mbps_in_gbps;
    let gb = cores as f64 * racks.gb_per_core;
    let of_vmhost = servers as f64 / vmhosts as f64;
    let whole = |role, name: &str, gb, required_gbps| {
        let nic = plan.nic(name)?;
        let nics = nics(plan, nic, required_gbps);
        host(plan, role, &Counts { cpus: racks.cpus, gb, nic, nics, required_gbps })
    };
    let server = whole("server", &racks.server_nic, gb, gbps)?;
    let vmhost = whole("vmhost", &racks.vmhost_nic, gb * of_vmhost, gbps * of_vmhost)?;
    let (iohosts, iohost) = iohosts(plan, servers, gbps * servers as f64)?;
    let local_price = servers as f64 * server.price;
    let remote_price = vmhosts as f64 * vmhost.price + iohosts as f64 * iohost.price;
    Ok(Rack {
        servers,
        vmhosts,
        iohosts,
        server,
        vmhost,
        iohost,
        local_price,
        remote_price,
        difference: remote_price / local_price - 1.0,
    })
}

/// The fewest IOhosts that have the sidecores and the throughput for this traffic.
fn iohosts(plan: &Plan, servers: u64, gbps: f64) -> Result<(u64, Host), Fault> {
    let racks = &plan.rack;
    let nic = plan.nic(&racks.iohost_nic)?;
    let sidecores = (servers * racks.sidecores) as f64 * racks.consolidation;
    for iohosts in 1..=servers {
        let cores = sidecores / iohosts as f64;
        let enough = |cpus: &u64| (cpus * plan.cpu.cores) as f64 >= cores;
        let Some(cpus) = plan.server.cpus.iter().copied().filter(enough).min() else { continue };
        // A packet enters and leaves.
        let required_gbps = 2.0 * gbps / iohosts as f64;
        let nics = nics(plan, nic, required_gbps);
        if nics > plan.server.nics {
            continue;
        }
        let counts = Counts { cpus, gb: racks.iohost_gb, nic, nics, required_gbps };
        return Ok((iohosts, host(plan, "iohost", &counts)?));
    }
    Err(Fault(format!(
        "{servers} IOhosts are too few for the sidecores and the traffic of {servers} servers: \
         they need more CPUs in `server.cpus`, more `server.nics`, or a faster `rack.iohost_nic`"
    )))
}

/// The NICs for a throughput.
fn nics(plan: &Plan, nic: &Device, required_gbps: f64) -> u64 {
    (required_gbps * (1.0 - plan.rack.nic_shortfall) / nic.gbps).ceil() as u64
}

fn host(plan: &Plan, role: &'static str, counts: &Counts<'_>) -> Result<Host, Fault> {
    if counts.nics > plan.server.nics {
        let (nics, places, name) = (counts.nics, plan.server.nics, &counts.nic.name);
        return Err(Fault(format!(
            "a {role} needs {nics} \"{name}\", but `server.nics` is {places}: choose a faster NIC"
        )));
    }
    let item = |part: String, price, count| Item { part, price, count };
    let mut items = vec![
        item("base".to_owned(), plan.server.price, 1),
        item(format!("{} core CPU", plan.cpu.cores), plan.cpu.price, counts.cpus),
    ];
    let dimms = dimms(plan, role, counts.gb)?;
    let of_dimms = plan.dimms.iter().zip(dimms);
    items.extend(
        of_dimms.map(|(dimm, count)| item(format!("{}GB DRAM", dimm.gb), dimm.price, count)),
    );
    for nic in &plan.nics {
        let count = if nic.name == counts.nic.name { counts.nics } else { 0 };
        items.push(item(nic.name.clone(), nic.price, count));
    }
    let price = items.iter().map(|item| item.price * item.count as f64).sum();
    let gbps = counts.nics as f64 * counts.nic.gbps;
    Ok(Host { role, items, price, gbps, required_gbps: counts.required_gbps })
}

/// The cheapest DIMMs for so much memory, of at most two sizes: the number of each size.
fn dimms(plan: &Plan, role: &str, gb: f64) -> Result<Vec<u64>, Fault> {
    let [least, most] = plan.server.dimms;
    let mut best: Option<(f64, Vec<u64>)> = None;
    for (first, one) in plan.dimms.iter().enumerate() {
        for (second, other) in plan.dimms.iter().enumerate().skip(first) {
            for ones in 0..=most {
                let rest = (gb - (ones * one.gb) as f64).max(0.0);
                let mut others = (rest / other.gb as f64).ceil() as u64;
                others = others.max(least.saturating_sub(ones));
                others += (ones + others) % 2;
                let price = ones as f64 * one.price + others as f64 * other.price;
                let is_cheaper = best.as_ref().is_none_or(|(least, _)| price < *least);
                if ones + others <= most && is_cheaper {
                    let mut counts = vec![0; plan.dimms.len()];
                    for (index, count) in [(first, ones), (second, others)] {
                        if let Some(sum) = counts.get_mut(index) {
                            *sum += count;
                        }
                    }
                    best = Some((price, counts));
                }
            }
        }
    }
    best.map(|(_, counts)| counts).ok_or_else(|| {
        Fault(format!(
            "a {role} needs {gb:.0} GB, which {most} DIMMs do not hold: raise `server.dimms`, or \
             add a larger [[dimm]]"
        ))
    })
}

#[cfg(test)]
mod tests;
