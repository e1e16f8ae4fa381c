//! Racks other than the paper's.

use super::*;
use crate::file::PAPER;

fn plan(changes: &[(&str, &str)]) -> Plan {
    let mut text = PAPER.to_owned();
    for (line, other) in changes {
        assert!(text.contains(line), "{line}");
        text = text.replacen(line, other, 1);
    }
    Plan::parse(&text).unwrap()
}

fn count(host: &Host, part: &str) -> u64 {
    host.items.iter().find(|item| item.part == part).unwrap().count
}

#[test]
fn cores_traffic_and_memory_of_the_servers_are_all_there() {
    let plan = plan(&[("servers = [3, 6]", "servers = [1, 2, 4, 7, 12, 40]")]);
    for rack in racks(&plan).unwrap() {
        let servers = rack.servers as f64;
        assert!(rack.vmhosts as f64 * 72.0 >= servers * 48.0, "{rack:?}");
        assert!(rack.iohosts * count(&rack.iohost, "18 core CPU") * 18 >= rack.servers * 12);
        for host in [&rack.server, &rack.vmhost, &rack.iohost] {
            assert!(host.gbps >= host.required_gbps * 0.995, "{host:?}");
            let dimms = count(host, "8GB DRAM") + count(host, "16GB DRAM");
            assert!(dimms.is_multiple_of(2), "{host:?}");
        }
        let gb = 8 * count(&rack.vmhost, "8GB DRAM") + 16 * count(&rack.vmhost, "16GB DRAM");
        assert!((gb * rack.vmhosts) as f64 >= servers * 288.0, "{rack:?}");
        let required = rack.iohosts as f64 * rack.iohost.required_gbps;
        assert!((required - 2.0 * servers * rack.server.required_gbps).abs() < 1e-6, "{rack:?}");
    }
}

#[test]
fn a_rack_has_as_many_iohosts_as_its_sidecores_need() {
    let plan = plan(&[("servers = [3, 6]", "servers = [12, 18]")]);
    let racks = racks(&plan).unwrap();
    let iohosts = racks.iter().map(|rack| (rack.vmhosts, rack.iohosts));
    assert_eq!(iohosts.collect::<Vec<_>>(), [(8, 2), (12, 3)]);
}

#[test]
fn the_cheapest_memory_is_taken() {
    // Two of 8 GB cost less than one of 16 GB: no host has the larger ones.
    let plan = plan(&[("price = 172", "price = 100")]);
    let rack = racks(&plan).unwrap().remove(0);
    assert_eq!((count(&rack.server, "8GB DRAM"), count(&rack.server, "16GB DRAM")), (36, 0));
    // The places decide where the cheapest ones do not fit.
    let plan = plan_with_few_dimms();
    let rack = racks(&plan).unwrap().remove(0);
    assert_eq!((count(&rack.vmhost, "8GB DRAM"), count(&rack.vmhost, "16GB DRAM")), (2, 26));
}

fn plan_with_few_dimms() -> Plan {
    plan(&[("price = 172", "price = 100"), ("dimms = [8, 96]", "dimms = [8, 28]")])
}

#[test]
fn parts_that_do_not_fit_are_named() {
    for (changes, why) in [
        (("dimms = [8, 96]", "dimms = [8, 20]"), "a vmhost needs 432 GB, which 20 DIMMs"),
        (("nics = 10 ", "nics = 1 "), "a server needs 2 \"10Gbps NIC DP\", but `server.nics` is 1"),
        (("consolidation = 0.5", "consolidation = 9"), "3 IOhosts are too few"),
    ] {
        let fault = racks(&plan(&[changes])).unwrap_err().to_string();
        assert!(fault.contains(why), "{fault}");
    }
}

#[test]
fn drives_without_places_have_no_price() {
    let plan = plan(&[("drives = 8 ", "drives = 2 ")]);
    let rows = with_drives(&plan, &racks(&plan).unwrap());
    assert_eq!(rows.len(), 2 * 3 + 2 * 4);
    for row in rows {
        assert_eq!(row.relative[0].is_some(), row.iohost_drives <= 2, "{row:?}");
    }
}
