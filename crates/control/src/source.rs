//! Where the control API gets what it tells.

use std::sync::Arc;

use sidecore_assembly::report::{ClosedControllerReport, DeviceReport, Stats};
use sidecore_assembly::spec::{DeviceSpec, StoreSpec};
use sidecore_assembly::{Assembly, AssemblyError, ControllerHandle};

/// Something that is running and can be asked how it fares, and be changed: the assembly, or a stand-in of a test.
///
/// It is asked from the API's thread and must not wait for a sidecore: a sidecore that hangs is what one wants to see.
/// Changes may wait, and so may everything that is asked of a controller; they come from other threads.
pub trait Source: Send + Sync + 'static {
    /// All counters as of now.
    fn stats(&self) -> Stats;

    /// The disks as of now.
    fn devices(&self) -> Vec<DeviceReport>;

    /// The controllers that are open.
    fn controllers(&self) -> Vec<Arc<ControllerHandle>>;

    /// The controllers that are not open.
    fn closed_controllers(&self) -> Vec<ClosedControllerReport>;

    /// Serves one more device; a store that is given comes and goes with it.
    ///
    /// # Errors
    /// It cannot be had; then nothing has changed.
    fn add_device(&self, device: &DeviceSpec, store: Option<&StoreSpec>) -> Result<(), AssemblyError>;

    /// Serves a device no longer.
    ///
    /// # Errors
    /// There is no such device.
    fn remove_device(&self, name: &str) -> Result<(), AssemblyError>;

    /// Serves clients of a device although writes that were answered to them may be missing.
    ///
    /// # Errors
    /// There is no such device, or none are missing.
    fn accept_loss(&self, name: &str) -> Result<(), AssemblyError>;
}

impl Source for Assembly {
    fn stats(&self) -> Stats {
        Self::stats(self)
    }

    fn devices(&self) -> Vec<DeviceReport> {
        Self::devices(self)
    }

    fn controllers(&self) -> Vec<Arc<ControllerHandle>> {
        Self::controllers(self)
    }

    fn closed_controllers(&self) -> Vec<ClosedControllerReport> {
        Self::closed_controllers(self)
    }

    fn add_device(&self, device: &DeviceSpec, store: Option<&StoreSpec>) -> Result<(), AssemblyError> {
        Self::add_device(self, device, store)
    }

    fn remove_device(&self, name: &str) -> Result<(), AssemblyError> {
        Self::remove_device(self, name)
    }

    fn accept_loss(&self, name: &str) -> Result<(), AssemblyError> {
        Self::accept_loss(self, name)
    }
}
