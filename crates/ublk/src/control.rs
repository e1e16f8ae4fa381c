//! The seam between the life of a device and the kernel's control commands.

use sidecore_linux::{UblkControl, UblkError, UblkInfo, UblkParameters};

/// The control commands of ublk. The one real `Control` is [`UblkControl`], which describes them.
pub trait Control {
    /// The device of this number; `None` if there is none.
    ///
    /// # Errors
    /// The kernel's.
    fn info(&self, number: u32) -> Result<Option<UblkInfo>, UblkError>;

    /// Makes a device. Returns what the kernel has made.
    ///
    /// # Errors
    /// The kernel's.
    fn add(&self, wanted: UblkInfo) -> Result<UblkInfo, UblkError>;

    /// Sets the size and the properties of a device that is not started.
    ///
    /// # Errors
    /// The kernel's.
    fn set_parameters(&self, number: u32, set: UblkParameters) -> Result<(), UblkError>;

    /// The size and the properties of a device.
    ///
    /// # Errors
    /// The kernel's.
    fn parameters(&self, number: u32) -> Result<UblkParameters, UblkError>;

    /// Starts a device, whose queues have fetched: the kernel shows the block device.
    ///
    /// # Errors
    /// The kernel's; ECANCELED if `gives_up` has ended the wait.
    fn start(&self, number: u32, gives_up: &dyn Fn() -> bool) -> Result<(), UblkError>;

    /// Stops a device: its requests end, and the block device vanishes.
    ///
    /// # Errors
    /// The kernel's.
    fn stop(&self, number: u32) -> Result<(), UblkError>;

    /// Removes a device, which is stopped first if it is not. Waits until nothing has it open.
    ///
    /// # Errors
    /// The kernel's; ECANCELED if `gives_up` has ended the wait.
    fn delete(&self, number: u32, gives_up: &dyn Fn() -> bool) -> Result<(), UblkError>;

    /// Begins to take over a device whose process has ended.
    ///
    /// # Errors
    /// The kernel's.
    fn begin_recovery(&self, number: u32) -> Result<(), UblkError>;

    /// Ends a recovery, when the queues have fetched: the requests go on.
    ///
    /// # Errors
    /// The kernel's; ECANCELED if `gives_up` has ended the wait.
    fn end_recovery(&self, number: u32, gives_up: &dyn Fn() -> bool) -> Result<(), UblkError>;
}

impl Control for UblkControl {
    fn info(&self, number: u32) -> Result<Option<UblkInfo>, UblkError> {
        self.info(number)
    }

    fn add(&self, wanted: UblkInfo) -> Result<UblkInfo, UblkError> {
        self.add(wanted)
    }

    fn set_parameters(&self, number: u32, set: UblkParameters) -> Result<(), UblkError> {
        self.set_parameters(number, set)
    }

    fn parameters(&self, number: u32) -> Result<UblkParameters, UblkError> {
        self.parameters(number)
    }

    fn start(&self, number: u32, gives_up: &dyn Fn() -> bool) -> Result<(), UblkError> {
        self.start(number, gives_up)
    }

    fn stop(&self, number: u32) -> Result<(), UblkError> {
        self.stop(number)
    }

    fn delete(&self, number: u32, gives_up: &dyn Fn() -> bool) -> Result<(), UblkError> {
        self.delete(number, gives_up)
    }

    fn begin_recovery(&self, number: u32) -> Result<(), UblkError> {
        self.begin_recovery(number)
    }

    fn end_recovery(&self, number: u32, gives_up: &dyn Fn() -> bool) -> Result<(), UblkError> {
        self.end_recovery(number, gives_up)
    }
}
