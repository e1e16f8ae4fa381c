//! Where the control API gets what it tells.

use sidecore_assembly::Assembly;
use sidecore_assembly::report::{DeviceReport, Stats};

/// Something that is running and can be asked how it fares: the assembly, or a stand-in of a test.
///
/// It is asked from the API's thread and must not wait for a sidecore: a sidecore that hangs is what one wants to see.
pub trait Source: Send + Sync + 'static {
    /// All counters as of now.
    fn stats(&self) -> Stats;

    /// The disks as of now.
    fn devices(&self) -> Vec<DeviceReport>;
}

impl Source for Assembly {
    fn stats(&self) -> Stats {
        Self::stats(self)
    }

    fn devices(&self) -> Vec<DeviceReport> {
        Self::devices(self)
    }
}
