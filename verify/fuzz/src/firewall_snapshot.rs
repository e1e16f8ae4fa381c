//! The input as the connections of an earlier firewall: the reader refuses it, or a firewall enters
//! what there is room for, and tells the same of what it has entered.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use sidecore_stage_firewall::{Firewall, Rules, SNAPSHOT_MAX, Snapshot};
use sidecore_units::Nanos;

fuzz_target!(|text: &str| {
    let Ok(snapshot) = Snapshot::parse(text) else { return };
    assert!(snapshot.len() <= SNAPSHOT_MAX);
    assert_eq!(Snapshot::parse(&snapshot.to_string()).as_ref(), Ok(&snapshot));
    let firewall = || {
        let rules = Rules::parse(&["ct state new accept"]).expect("a rule");
        Firewall::new(Arc::new(rules), 64, [3, 5])
    };
    let (mut one, mut other) = (firewall(), firewall());
    let now = Nanos::from_millis(10_000_000_000);
    let entered = one.resume(now, &snapshot);
    assert!(entered <= 64 && entered <= snapshot.len());
    let again = one.snapshot(now);
    assert_eq!(again.len(), entered);
    assert_eq!(other.resume(now, &again), entered);
    assert_eq!(other.snapshot(now).len(), entered);
});
