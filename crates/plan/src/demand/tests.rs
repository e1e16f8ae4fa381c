//! Numbers of sidecores beside those that queueing theory gives.

use super::*;
use crate::file::PAPER;

/// Costs with which sidecores alone take time, and nothing is cheaper in a batch.
fn plan(service_ns: u32, load: &str) -> Plan {
    let head: String = PAPER.split("# May be left out, with [requests]").take(1).collect();
    let stages = format!(
        "client = [1, 1]\niohost = [{service_ns}, {service_ns}]\nhands_over = [1, 1]\n\
         helper = [{service_ns}, {service_ns}]\nanswers = [1, 1]\nlocal_guest = [1, 1]\n\
         local_sidecore = [{service_ns}, {service_ns}]\n"
    );
    let text = format!(
        "{head}\n[load]\n{load}\n[requests]\nbytes = 4096\nwire_ns = 0\nlocal_wire_ns = 0\n\
         crossing_ns = 0\nstore_ns = 0\n[requests.read]\n{stages}[requests.write]\n{stages}"
    );
    Plan::parse(&text).unwrap()
}

/// A sidecore of a server is an M/D/1 queue: how long its mean wait is says how many VMs are
/// too many for it.
#[test]
fn a_server_has_the_sidecores_that_its_utilisation_needs() {
    // Together 3.2 sidecores' work. Generous latencies: the load alone decides.
    let load = "vms = 40\nrequests_per_s = 80000\nreads = 1\nactive = 1\np99_us = 100";
    let demand = demands(&plan(1000, load)).unwrap().remove(0);
    assert_eq!(demand.of_server.count, Some(4), "{demand:?}");
    let useful = demand.of_server.useful.unwrap();
    assert!((useful - 0.8).abs() < 0.02, "{demand:?}");
    // Three servers' work at IOhosts that share all of it: 9.6 sidecores.
    assert_eq!((demand.of_iohosts.count, demand.active_vms), (Some(10), 120), "{demand:?}");
}

/// A stricter p99 takes more sidecores, and each result meets it where one sidecore less does not.
#[test]
fn a_stricter_p99_takes_more_sidecores() {
    let load = |p99_us: f64| {
        format!("vms = 20\nrequests_per_s = 40000\nreads = 1\nactive = 1\np99_us = {p99_us}")
    };
    let counts = [20.0, 5.0, 2.5].map(|p99_us| {
        let demand = demands(&plan(1000, &load(p99_us))).unwrap().remove(0);
        for found in [&demand.of_server, &demand.of_iohosts] {
            assert!(found.p99_us.unwrap() <= p99_us, "{demand:?}");
        }
        (demand.of_server.count.unwrap(), demand.of_iohosts.count.unwrap())
    });
    assert!(counts[0].0 < counts[1].0 && counts[1].0 < counts[2].0, "{counts:?}");
    assert!(counts[0].1 <= counts[1].1 && counts[1].1 < counts[2].1, "{counts:?}");
    assert_eq!(counts[0].0, 1, "{counts:?}");
}

/// Idle VMs of other servers are the reason of the paper to share sidecores.
#[test]
fn shared_sidecores_are_fewer_when_few_vms_ask() {
    let demand = |active: f64| {
        let load =
            format!("vms = 48\nrequests_per_s = 30000\nreads = 0.5\nactive = {active}\np99_us = 9");
        demands(&plan(1000, &load)).unwrap().remove(1)
    };
    let (all, few) = (demand(1.0), demand(0.25));
    assert_eq!((all.active_vms, few.active_vms), (288, 72));
    assert_eq!(all.of_server, few.of_server);
    assert!(few.of_iohosts.count < all.of_iohosts.count, "{few:?} {all:?}");
    assert!(few.consolidation.unwrap() < 0.4, "{few:?}");
}

#[test]
fn a_p99_below_the_time_of_a_request_is_never_met() {
    let load = "vms = 4\nrequests_per_s = 1000\nreads = 1\nactive = 1\np99_us = 0.5";
    let demand = demands(&plan(1000, load)).unwrap().remove(0);
    assert_eq!((demand.of_server.count, demand.of_iohosts.count), (None, None));
    assert!(demand.of_server.p99_us.unwrap() >= 1.0, "{demand:?}");
    assert_eq!(demand.consolidation, None);
}

#[test]
fn more_work_than_all_sidecores_do_is_not_simulated() {
    let load = "vms = 1000\nrequests_per_s = 900000\nreads = 1\nactive = 1\np99_us = 1000";
    let demand = demands(&plan(1000, load)).unwrap().remove(0);
    assert_eq!(demand.of_iohosts, Sidecores { count: None, p99_us: None, useful: None });
}
