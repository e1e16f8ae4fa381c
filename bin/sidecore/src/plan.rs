//! `sidecore plan`.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::Args;
use sidecore_plan::{
    Demand, DriveRow, Host, MAX_FILE_BYTES, PAPER, Plan, Printed, Rack, Report, Sidecores,
};

use crate::table::Table;
use crate::{print, print_json};

/// The arguments of `sidecore plan`.
///
/// Servers with sidecores of their own become VMhosts, all of whose cores run VMs, and IOhosts with
/// fewer sidecores. See docs/plan.md.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
    /// Print the file of the paper's parts, with comments, to start from.
    #[arg(long, conflicts_with_all = ["json", "file"])]
    example: bool,
    /// The parts, racks and load, in TOML. Without a file those of the paper "Paravirtual Remote
    /// I/O" (section 3), beside the numbers that the paper prints.
    file: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if arguments.example {
        return Ok(print(PAPER)?);
    }
    let report = match &arguments.file {
        None => Report::of_paper().map_err(|fault| anyhow!("{fault}"))?,
        Some(path) => {
            let of_file = || path.display().to_string();
            let text = read(path).with_context(of_file)?;
            let plan = Plan::parse(&text).map_err(|fault| lines(path, &fault.to_string()))?;
            Report::of(&plan).with_context(of_file)?
        }
    };
    if arguments.json { print_json(&report) } else { Ok(print(&text(&report))?) }
}

/// A message for each fault, behind the name of the file.
fn lines(path: &Path, faults: &str) -> anyhow::Error {
    anyhow!("{}:\n{}", path.display(), faults.trim_end())
}

/// Reads a regular file that is not too long: a pipe would let the command wait.
fn read(path: &Path) -> Result<String> {
    let metadata = std::fs::metadata(path)?;
    ensure!(metadata.is_file(), "not a regular file");
    ensure!(metadata.len() <= MAX_FILE_BYTES, "longer than {MAX_FILE_BYTES} bytes");
    let mut text = String::new();
    File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    Ok(text)
}

fn text(report: &Report) -> String {
    let mut text = hosts(&report.racks);
    text += &format!("\n{}", racks(&report.racks));
    if !report.drives.is_empty() {
        text += &format!("\n{}", drives(&report.drives));
    }
    if let Some(demands) = &report.sidecores {
        text += &format!("\n{}", sidecores(demands));
    }
    if let Some(paper) = &report.paper {
        text += &format!("\n{}", beside_paper(paper));
    }
    text
}

/// Hosts that differ, with the number of servers of their rack if several have one role.
fn columns(racks: &[Rack]) -> Vec<(String, &Host)> {
    let mut hosts: Vec<(u64, &Host)> = Vec::new();
    for rack in racks {
        for host in [&rack.server, &rack.vmhost, &rack.iohost] {
            if !hosts.iter().any(|(_, known)| *known == host) {
                hosts.push((rack.servers, host));
            }
        }
    }
    let name = |(servers, host): &(u64, &Host)| {
        let of_role = hosts.iter().filter(|(_, other)| other.role == host.role).count();
        if of_role > 1 { format!("{} OF {servers}", host.role) } else { host.role.to_owned() }
    };
    hosts.iter().map(|host| (name(host).to_uppercase(), host.1)).collect()
}

fn hosts(racks: &[Rack]) -> String {
    let columns = columns(racks);
    let headings = columns.iter().map(|(name, _)| format!(">{name}"));
    let headings: Vec<String> =
        ["PART".to_owned(), ">PRICE".to_owned()].into_iter().chain(headings).collect();
    let mut table = Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    let items = columns.first().map_or(&[][..], |(_, host)| &host.items);
    for (index, item) in items.iter().enumerate() {
        let counts = columns.iter().map(|(_, host)| match host.items.get(index) {
            Some(item) if item.count > 0 => item.count.to_string(),
            _ => "-".to_owned(),
        });
        table.row([item.part.clone(), money(item.price)].into_iter().chain(counts));
    }
    type Cell = fn(&Host) -> String;
    let sums: [(&str, Cell); 3] = [
        ("price", |host| money(host.price)),
        ("Gbps", |host| gbps(host.gbps)),
        ("required Gbps", |host| gbps(host.required_gbps)),
    ];
    for (name, cell) in sums {
        let cells = columns.iter().map(|(_, host)| cell(host));
        table.row([name.to_owned(), String::new()].into_iter().chain(cells));
    }
    table.render()
}

fn racks(racks: &[Rack]) -> String {
    let mut table = Table::new(&[
        ">SERVERS",
        ">VMHOSTS+IOHOSTS",
        ">PRICE OF SERVERS",
        ">PRICE WITH IOHOSTS",
        ">DIFFERENCE",
    ]);
    for rack in racks {
        table.row([
            rack.servers.to_string(),
            format!("{}+{}", rack.vmhosts, rack.iohosts),
            money(rack.local_price),
            money(rack.remote_price),
            format!("{:+.1}%", rack.difference * 100.0),
        ]);
    }
    table.render()
}

fn drives(rows: &[DriveRow]) -> String {
    let mut table = Table::new(&[
        "DRIVES",
        ">SERVERS=>IOHOSTS",
        ">NICS, ROUNDED UP",
        ">PRICE",
        ">NICS, ROUNDED DOWN",
        ">PRICE",
    ]);
    for row in rows {
        let [up, down] = row.relative.map(|relative| match relative {
            Some(relative) => format!("{:.1}%", relative * 100.0),
            None => "no place".to_owned(),
        });
        let [nics_up, nics_down] = row.nics.map(|nics| nics.to_string());
        let ratio = format!("{}=>{}", row.servers, row.iohost_drives);
        table.row([row.drive.clone(), ratio, nics_up, up, nics_down, down]);
    }
    format!("{}PRICE: with IOhosts, of that of servers with a drive each\n", table.render())
}

fn sidecores(demands: &[Demand]) -> String {
    let mut table = Table::new(&[
        ">SERVERS",
        ">SIDECORES OF EACH",
        ">P99 us",
        ">USEFUL",
        ">ACTIVE VMS",
        ">AT IOHOSTS",
        ">P99 us",
        ">USEFUL",
        ">RATIO",
    ]);
    for demand in demands {
        let cells = [&demand.of_server, &demand.of_iohosts].map(found);
        let [server, iohosts] = cells;
        let ratio = demand.consolidation.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
        let head = [demand.servers.to_string()].into_iter().chain(server);
        let tail = [demand.active_vms.to_string()].into_iter().chain(iohosts).chain([ratio]);
        table.row(head.chain(tail));
    }
    let wanted = demands.first().map_or(0.0, |demand| demand.p99_us);
    format!(
        "{}simulated, for a p99 of {wanted} us; RATIO: sidecores at IOhosts for each of the \
         servers'\n",
        table.render()
    )
}

fn found(sidecores: &Sidecores) -> [String; 3] {
    let number = |number: Option<f64>, digits, unit| {
        number.map_or("-".to_owned(), |number| format!("{number:.digits$}{unit}"))
    };
    [
        sidecores.count.map_or("too slow".to_owned(), |count| count.to_string()),
        number(sidecores.p99_us, 1, ""),
        number(sidecores.useful.map(|share| share * 100.0), 0, "%"),
    ]
}

fn beside_paper(paper: &Printed) -> String {
    let (wrong, agree): (Vec<_>, Vec<_>) = paper.cells.iter().partition(|cell| cell.contradicts());
    let most = wrong.iter().map(|cell| cell.difference()).fold(0.0, f64::max);
    let mut text = format!(
        "Of {} printed cells of Tables 1 and 2, {} follow from the parts to the last digit; the \
         others are\nat most {:.2} % off. The paper contradicts its own parts here:\n",
        paper.cells.len(),
        agree.len(),
        most * 100.0
    );
    for contradiction in &paper.contradictions {
        text += &format!("  {contradiction}\n");
    }
    text
}

/// A price with separators of thousands.
fn money(price: f64) -> String {
    let digits = format!("{price:.0}");
    let groups: Vec<&[u8]> = digits.as_bytes().rchunks(3).rev().collect();
    String::from_utf8_lossy(&groups.join(&b',')).into_owned()
}

/// A throughput; half a hundredth is rounded up.
fn gbps(gbps: f64) -> String {
    format!("{:.2}", (gbps * 100.0).round() / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_have_separators() {
        for (price, text) in [(0.0, "0"), (999.0, "999"), (1000.0, "1,000"), (266_790.4, "266,790")]
        {
            assert_eq!(money(price), text);
        }
    }
}
