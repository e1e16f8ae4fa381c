//! Files that are refused, and the reasons.

use proptest::prelude::*;

use super::*;

fn fault(text: &str) -> String {
    Plan::parse(text).unwrap_err().to_string()
}

/// The paper's file with one line replaced.
fn with(line: &str, other: &str) -> String {
    assert!(PAPER.contains(line), "{line}");
    PAPER.replacen(line, other, 1)
}

#[test]
fn the_papers_file_is_read() {
    let plan = Plan::parse(PAPER).unwrap();
    assert_eq!((plan.nics.len(), plan.rack.servers.as_slice()), (2, &[3, 6][..]));
    assert!(plan.load.is_some() && plan.requests.is_some());
}

#[test]
fn a_value_out_of_its_range_is_named_with_the_range() {
    for (line, other, why) in [
        ("price = 6407", "price = -6407", "`server.price` must be a number from 1"),
        (
            "price = 8006",
            "price = nan",
            "`cpu.price` must be a number from 0 to 1000000000, not NaN",
        ),
        ("price = 8006", "price = inf", "not inf"),
        ("gbps = 80", "gbps = 0", "`nic.gbps` must be a number from 0.001"),
        ("gb = 8", "gb = 0", "`dimm.gb` must be from 1"),
        ("gb = 8\n", "gb = -8\n", "line"),
        ("cores = 18", "cores = 18446744073709551616", "line"),
        ("cores = 18", "cores = 100000", "`cpu.cores` must be from 1 to 1024, not 100000"),
        ("servers = [3, 6]", "servers = []", "`rack.servers` must have 1 to 16 entries, not 0"),
        ("servers = [3, 6]", "servers = [0]", "`rack.servers` must be from 1"),
        ("servers = [3, 6]", "servers = [3, 1e3]", "line"),
        ("sidecores = 24", "sidecores = 72", "`rack.sidecores` must be from 0 to 71, not 72"),
        ("consolidation = 0.5", "consolidation = -0.5", "`rack.consolidation`"),
        ("cpus = 4 ", "cpus = 3 ", "`rack.cpus` must be one of `server.cpus` [2, 4]"),
        ("dimms = [8, 96]", "dimms = [8, 4]", "`server.dimms` must be from 0 to 4, not 8"),
        ("server_nic = \"10Gbps NIC DP\"", "server_nic = \"x\"", "no [[nic]] with the name \"x\""),
        ("name = \"40Gbps NIC DP\"", "name = \"10Gbps NIC DP\"", "two [[nic]] have the name"),
        ("name = \"3.2TB\"", "name = \"\\u001b[2J\"", "`drive.name` must have"),
        ("reads = 0.7", "reads = 1.5", "`load.reads` must be a number from 0 to 1, not 1.5"),
        ("requests_per_s = 40000 ", "requests_per_s = 0 ", "`load.requests_per_s`"),
        ("requests_per_s = 40000 ", "requests_per_s = 4e6 ", "needs more than one core"),
        ("client = [453, 306]", "client = [306, 453]", "`requests.read.client` must be [alone"),
        ("client = [453, 306]", "client = [453]", "line"),
        ("store_ns = 0 ", "store_ns = 1e9 ", "requests in flight"),
        ("active = 0.5", "actve = 0.5", "unknown field `actve`"),
        ("cores = 18\n", "\n", "missing field `cores`"),
    ] {
        let fault = fault(&with(line, other));
        assert!(fault.contains(why), "{other}: {fault}");
    }
}

#[test]
fn all_values_out_of_range_are_named() {
    let text = with("price = 8006", "price = -1").replacen("gbps = 20 ", "gbps = -1 ", 1);
    assert_eq!(fault(&text).lines().count(), 2);
}

#[test]
fn too_many_vms_for_a_simulation_are_refused() {
    let text = with("servers = [3, 6]", "servers = [10000]");
    assert!(fault(&text).contains("240000 VMs: at most 100000"), "{}", fault(&text));
}

#[test]
fn a_load_needs_the_costs_of_its_requests() {
    let text: String = PAPER.split("# Measured nanoseconds").take(1).collect();
    assert!(fault(&text).contains("[load] and [requests] need each other"));
    let text: String = PAPER.split("# May be left out, with [requests]").take(1).collect();
    assert!(Plan::parse(&text).unwrap().load.is_none());
}

#[test]
fn a_long_file_is_refused_before_it_is_read() {
    let text = "#".repeat(MAX_FILE_BYTES as usize + 1);
    assert!(fault(&text).contains("longer than 1048576 bytes"));
}

proptest! {
    /// Any numbers in the places of numbers give a fault, or a rack with finite prices.
    #[test]
    fn any_numbers_give_a_fault_or_finite_prices(
        numbers in proptest::collection::vec(prop_oneof![
            any::<f64>().prop_map(|number| format!("{number:?}")),
            any::<i64>().prop_map(|number| number.to_string()),
            (0_u64..3000).prop_map(|number| number.to_string()),
        ], 1..4),
        places in proptest::collection::vec(0_usize..200, 3),
    ) {
        let head: String = PAPER.split("# May be left out, with [requests]").take(1).collect();
        let mut parts: Vec<String> = Vec::new();
        for line in head.lines() {
            parts.push(line.split('#').next().unwrap_or_default().to_owned());
        }
        for (number, place) in numbers.iter().zip(places) {
            let index = place % parts.len();
            if let Some((key, _)) = parts[index].clone().split_once('=') {
                parts[index] = format!("{key}= {number}");
            }
        }
        if let Ok(plan) = Plan::parse(&parts.join("\n"))
            && let Ok(racks) = crate::rack::racks(&plan)
        {
            let rows = crate::rack::with_drives(&plan, &racks);
            prop_assert!(racks.iter().all(|rack| rack.difference.is_finite()));
            let shares = rows.iter().flat_map(|row| row.relative).flatten();
            prop_assert!(shares.into_iter().all(f64::is_finite));
        }
    }
}
