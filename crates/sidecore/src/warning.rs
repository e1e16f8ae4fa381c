//! The warning about a sidecore without its core.

use std::fmt;

use sidecore_units::CoreId;

/// A sidecore's core is lost to other work, how much of it, and the remedy.
pub struct CoreWarning<'a> {
    pub(crate) sidecore: &'a str,
    pub(crate) cpu: Option<CoreId>,
    pub(crate) percent: u32,
}

impl fmt::Display for CoreWarning<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sidecore, cpu, percent } = self;
        let took = format_args!("other work kept it from running for {percent} % of the time");
        let meanwhile =
            "Until it has, it sleeps for moments between looks at its disks and does not poll";
        match cpu {
            Some(CoreId(cpu)) => write!(
                f,
                "sidecore \"{sidecore}\" does not have CPU {cpu} for itself: {took}. {meanwhile}; \
                 keep other work off CPU {cpu} (a cpuset, isolcpus={cpu}, IRQ affinity), give the \
                 sidecore another `cpu`, or set `idle = \"adaptive\"` for its disks"
            ),
            None => write!(
                f,
                "sidecore \"{sidecore}\" does not have a CPU for itself: {took}. {meanwhile}; give \
                 the sidecore a `cpu` that nothing else uses, or set `idle = \"adaptive\"` for its \
                 disks"
            ),
        }
    }
}
