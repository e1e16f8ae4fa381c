//! Disks: queues whose completions are polled.
//!
//! A driver makes its queues when it finds a disk, so the number of polled ones is a parameter of
//! the driver for the next boot.

use crate::boot::Parameter;
use crate::report::{Finding, State};
use crate::system::System;

/// The drivers with queues to poll, the beginnings of their disks' names, and the version of Linux
/// that brought the queues.
const DRIVERS: [(&str, &str, &str); 2] = [("virtio_blk", "vd", "5.19"), ("nvme", "nvme", "5.0")];
const DISKS: &str = "/sys/block";

/// The state of all disks.
pub(crate) fn status(system: &System) -> Vec<Finding> {
    let names = system.tree.names(DISKS).into_iter();
    let real = names.filter(|name| system.tree.exists(&format!("{DISKS}/{name}/device")));
    real.filter(|name| !name.starts_with("sr")).map(|name| disk(system, &name)).collect()
}

fn disk(system: &System, name: &str) -> Finding {
    let finding = Finding::new(name, "poll queues");
    let file = |file: &str| format!("{DISKS}/{name}/{file}");
    let of = DRIVERS.into_iter().find(|(_, prefix, _)| name.starts_with(prefix));
    let Some((driver, _, since)) = of else {
        return finding.cannot("its driver is neither virtio_blk nor nvme");
    };
    if system.tree.number(&file("queue/io_poll")) == Some(1) {
        return finding.is(State::InForce, "requests with RWF_HIPRI are polled");
    }
    let parameter = poll_queues(driver);
    if !system.tree.exists(&parameter.path()) {
        let release = system.release_text();
        return finding.cannot(format!("{driver} of Linux {release} cannot: it came with {since}"));
    }
    if system.tree.names(&file("mq")).len() == 1 {
        return finding.cannot(
            "the disk has one queue, and one has to have interrupts: give the device two queues",
        );
    }
    match parameter.of_next_boot(&system.tree) {
        Some((count, path)) => finding.is(State::AfterReboot, format!("{count}, by {path}")),
        None if parameter.is_built_in(&system.tree) => finding
            .is(State::Off, "")
            .because(format!("{driver} is built into the kernel: use --next-boot")),
        None => finding.is(State::Off, ""),
    }
}

fn poll_queues(driver: &'static str) -> Parameter {
    Parameter { driver, name: "poll_queues" }
}

/// The parameters of drivers that are in use and have them.
pub(crate) fn parameters(system: &System) -> Vec<Parameter> {
    let disks = system.tree.names(DISKS);
    let is_used = |prefix: &str| disks.iter().any(|disk| disk.starts_with(prefix));
    let used = DRIVERS.into_iter().filter(|(_, prefix, _)| is_used(prefix));
    let parameters = used.map(|(driver, ..)| poll_queues(driver));
    parameters.filter(|parameter| system.tree.exists(&parameter.path())).collect()
}
