//! The source of the control API's answers.

use std::sync::Arc;

use sidecore_assembly::report::{
    ClosedControllerReport, DeviceReport, LinkMove, MirrorReport, RemoteReport, ScheduleReport,
    StageChange, StagesReport, Stats, SwitchReport,
};
use sidecore_assembly::spec::{DeviceSpec, RemoteKind, RemotePart, ScheduleSpec, StoreSpec};
use sidecore_assembly::{
    AddedStage, Assembly, AssemblyError, Capture, ControllerHandle, OperationError, Trace,
};

/// A running assembly, or a test's stand-in, that reports its state and can be changed.
///
/// Reports are read on the API's thread and must not wait for a sidecore: an operator needs them
/// most when a sidecore hangs. Changes may wait, and so may all calls of a controller; they come
/// from other threads.
pub trait Source: Send + Sync + 'static {
    /// Returns all counters as of now.
    fn stats(&self) -> Stats;

    /// Returns the disks as of now.
    fn devices(&self) -> Vec<DeviceReport>;

    /// Returns the controllers that are open.
    fn controllers(&self) -> Vec<Arc<ControllerHandle>>;

    /// Returns the controllers that are not open.
    fn closed_controllers(&self) -> Vec<ClosedControllerReport>;

    /// Returns the links, the clients and the IOhosts as of now.
    fn remote(&self) -> RemoteReport;

    /// Returns the schedules of snapshots.
    fn schedules(&self) -> Vec<ScheduleReport>;

    /// Replaces all schedules of snapshots.
    ///
    /// # Errors
    /// Two have one name, or a controller does not exist; nothing has changed then.
    fn set_schedules(&self, schedules: Vec<ScheduleSpec>) -> Result<(), AssemblyError>;

    /// Makes the snapshots that are due now, and deletes those that have expired.
    fn run_schedules(&self) -> Vec<ScheduleReport>;

    /// Returns the mirrors in use.
    fn mirrors(&self) -> Vec<MirrorReport>;

    /// Makes a store a new leg of a mirror. Returns its number.
    ///
    /// # Errors
    /// The store cannot be a leg, or the mirror waits.
    fn add_leg(&self, mirror: &str, store: &str) -> Result<usize, OperationError>;

    /// Lets a leg of a mirror go for good, by its store or its number.
    ///
    /// # Errors
    /// There is no such leg, it is the only one in sync, or the mirror waits.
    fn remove_leg(&self, mirror: &str, leg: &str) -> Result<(), OperationError>;

    /// Uses a store that is a leg of a mirror, and was missing or has failed.
    ///
    /// # Errors
    /// It is no leg of this mirror, or cannot be used with the others.
    fn attach_leg(&self, mirror: &str, store: &str) -> Result<(), OperationError>;

    /// Writes bytes of one leg of a mirror to another, to the end unless there is a length.
    ///
    /// # Errors
    /// One of them is not in sync, or fails.
    fn repair_leg(
        &self,
        mirror: &str,
        legs: (&str, &str),
        range: (u64, Option<u64>),
    ) -> Result<(), OperationError>;

    /// Lets half of a mirror's legs go on without the others, once. Their numbers are `without`.
    ///
    /// # Errors
    /// The mirror asks no operator, waits for no permission, or lacks other legs than these.
    fn permit_mirror(&self, mirror: &str, without: &[usize]) -> Result<(), OperationError>;

    /// Returns the switches with the counters of their ports; with `asks` also what only their
    /// sidecores know, which waits for them.
    fn switches(&self, asks: bool) -> Vec<SwitchReport>;

    /// Replaces the rules of a port's firewall, all at once.
    ///
    /// # Errors
    /// There is no such port, or a rule is not understood; nothing has changed then.
    fn set_rules(&self, port: &str, rules: &[String]) -> Result<(), OperationError>;

    /// Changes the rate limits of a port.
    ///
    /// # Errors
    /// There is no such port, or a limit is not understood; nothing has changed then.
    fn set_limits(&self, port: &str, limits: &[String]) -> Result<(), OperationError>;

    /// Changes the faults of a port's wire.
    ///
    /// # Errors
    /// There is no such port, or a word is not understood; nothing has changed then.
    fn set_faults(&self, port: &str, faults: &str) -> Result<(), OperationError>;

    /// Begins to capture the frames of a port, up to `snaplen` bytes of each.
    ///
    /// # Errors
    /// There is no such port, it has a capture already, or `snaplen` is too small or too large.
    fn capture(&self, port: &str, snaplen: u32) -> Result<Capture, OperationError>;

    /// Begins a trace of the frames that are dropped from and to a port.
    ///
    /// # Errors
    /// There is no such port, or its switch has too many traces.
    fn trace_port(&self, port: &str) -> Result<Trace, OperationError>;

    /// Begins a trace of the frames that a switch drops.
    ///
    /// # Errors
    /// There is no such switch, or it has too many traces.
    fn trace_switch(&self, switch: &str) -> Result<Trace, OperationError>;

    /// Makes a key for a client, and returns the text of its invitation.
    ///
    /// # Errors
    /// There is no such client, it is invited already or needs no invitation, or its key cannot be
    /// stored.
    fn invite(&self, client: &str) -> Result<String, OperationError>;

    /// Forgets a client's key, and ends its sessions.
    ///
    /// # Errors
    /// There is no such client, it was not invited, or its key cannot be removed.
    fn revoke(&self, client: &str) -> Result<(), OperationError>;

    /// Takes no new requests of a client, and waits until those in flight are ended and flushed.
    ///
    /// # Errors
    /// There is no such client, or a store does not answer or cannot be flushed.
    fn drain_client(&self, client: &str) -> Result<(), OperationError>;

    /// Takes requests of a drained client again.
    ///
    /// # Errors
    /// There is no such client, or it is not drained.
    fn undrain_client(&self, client: &str) -> Result<(), OperationError>;

    /// Has new requests to an IOhost wait, and waits until the others are answered and flushed.
    ///
    /// # Errors
    /// There is no such IOhost, or it does not answer or cannot flush.
    fn drain_iohost(&self, iohost: &str) -> Result<(), OperationError>;

    /// Has requests to a drained IOhost go on.
    ///
    /// # Errors
    /// There is no such IOhost, or it is not drained.
    fn undrain_iohost(&self, iohost: &str) -> Result<(), OperationError>;

    /// Moves the sessions with an IOhost to this link, one of its two.
    ///
    /// # Errors
    /// There is no such IOhost, the link does not lead to it, or it does not answer there.
    fn move_iohost(&self, iohost: &str, link: &str) -> Result<LinkMove, OperationError>;

    /// Adds a link, a client or an IOhost.
    ///
    /// # Errors
    /// The part cannot be added; then nothing has changed.
    fn add_part(&self, part: &RemotePart) -> Result<(), AssemblyError>;

    /// Removes a link, a client or an IOhost.
    ///
    /// # Errors
    /// There is no such part, or another part uses it.
    fn remove_part(&self, kind: RemoteKind, name: &str) -> Result<(), AssemblyError>;

    /// Serves one more device. A store that is given lives as long as the device.
    ///
    /// # Errors
    /// The device cannot be added; then nothing has changed.
    fn add_device(
        &self,
        device: &DeviceSpec,
        store: Option<&StoreSpec>,
    ) -> Result<(), AssemblyError>;

    /// Stops serving a device.
    ///
    /// # Errors
    /// No device has this name.
    fn remove_device(&self, name: &str) -> Result<(), AssemblyError>;

    /// Serves clients of a device although answered writes may be missing.
    ///
    /// # Errors
    /// No device has this name, or the device misses no writes.
    fn accept_loss(&self, name: &str) -> Result<(), AssemblyError>;

    /// Returns the stages of a device.
    ///
    /// # Errors
    /// No device has this name, or the device is not served yet.
    fn stages(&self, device: &str) -> Result<StagesReport, OperationError>;

    /// Adds a stage in front of a device's store, at a position among those that were added.
    ///
    /// # Errors
    /// The stage cannot be added; then nothing has changed.
    fn add_stage(
        &self,
        device: &str,
        stage: &AddedStage,
        position: usize,
    ) -> Result<StageChange, OperationError>;

    /// Removes a stage that was added, by its type or its position.
    ///
    /// # Errors
    /// The stage cannot be removed; then nothing has changed.
    fn remove_stage(&self, device: &str, stage: &str) -> Result<StageChange, OperationError>;
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

    fn schedules(&self) -> Vec<ScheduleReport> {
        Self::schedules(self)
    }

    fn set_schedules(&self, schedules: Vec<ScheduleSpec>) -> Result<(), AssemblyError> {
        Self::set_schedules(self, schedules)
    }

    fn run_schedules(&self) -> Vec<ScheduleReport> {
        Self::run_schedules(self)
    }

    fn mirrors(&self) -> Vec<MirrorReport> {
        Self::mirrors(self)
    }

    fn add_leg(&self, mirror: &str, store: &str) -> Result<usize, OperationError> {
        Self::add_leg(self, mirror, store)
    }

    fn remove_leg(&self, mirror: &str, leg: &str) -> Result<(), OperationError> {
        Self::remove_leg(self, mirror, leg)
    }

    fn attach_leg(&self, mirror: &str, store: &str) -> Result<(), OperationError> {
        Self::attach_leg(self, mirror, store)
    }

    fn repair_leg(
        &self,
        mirror: &str,
        legs: (&str, &str),
        range: (u64, Option<u64>),
    ) -> Result<(), OperationError> {
        Self::repair_leg(self, mirror, legs, range)
    }

    fn permit_mirror(&self, mirror: &str, without: &[usize]) -> Result<(), OperationError> {
        Self::permit_mirror(self, mirror, without)
    }

    fn switches(&self, asks: bool) -> Vec<SwitchReport> {
        Self::switches(self, asks)
    }

    fn set_rules(&self, port: &str, rules: &[String]) -> Result<(), OperationError> {
        Self::set_rules(self, port, rules)
    }

    fn set_limits(&self, port: &str, limits: &[String]) -> Result<(), OperationError> {
        Self::set_limits(self, port, limits)
    }

    fn set_faults(&self, port: &str, faults: &str) -> Result<(), OperationError> {
        Self::set_faults(self, port, faults)
    }

    fn capture(&self, port: &str, snaplen: u32) -> Result<Capture, OperationError> {
        Self::capture(self, port, snaplen)
    }

    fn trace_port(&self, port: &str) -> Result<Trace, OperationError> {
        Self::trace_port(self, port)
    }

    fn trace_switch(&self, switch: &str) -> Result<Trace, OperationError> {
        Self::trace_switch(self, switch)
    }

    fn remote(&self) -> RemoteReport {
        Self::remote(self)
    }

    fn invite(&self, client: &str) -> Result<String, OperationError> {
        Self::invite(self, client)
    }

    fn revoke(&self, client: &str) -> Result<(), OperationError> {
        Self::revoke(self, client)
    }

    fn drain_client(&self, client: &str) -> Result<(), OperationError> {
        Self::drain_client(self, client)
    }

    fn undrain_client(&self, client: &str) -> Result<(), OperationError> {
        Self::undrain_client(self, client)
    }

    fn drain_iohost(&self, iohost: &str) -> Result<(), OperationError> {
        Self::drain_iohost(self, iohost)
    }

    fn undrain_iohost(&self, iohost: &str) -> Result<(), OperationError> {
        Self::undrain_iohost(self, iohost)
    }

    fn move_iohost(&self, iohost: &str, link: &str) -> Result<LinkMove, OperationError> {
        Self::move_iohost(self, iohost, link)
    }

    fn add_part(&self, part: &RemotePart) -> Result<(), AssemblyError> {
        Self::add_part(self, part)
    }

    fn remove_part(&self, kind: RemoteKind, name: &str) -> Result<(), AssemblyError> {
        Self::remove_part(self, kind, name)
    }

    fn add_device(
        &self,
        device: &DeviceSpec,
        store: Option<&StoreSpec>,
    ) -> Result<(), AssemblyError> {
        Self::add_device(self, device, store)
    }

    fn remove_device(&self, name: &str) -> Result<(), AssemblyError> {
        Self::remove_device(self, name)
    }

    fn accept_loss(&self, name: &str) -> Result<(), AssemblyError> {
        Self::accept_loss(self, name)
    }

    fn stages(&self, device: &str) -> Result<StagesReport, OperationError> {
        Self::stages(self, device)
    }

    fn add_stage(
        &self,
        device: &str,
        stage: &AddedStage,
        position: usize,
    ) -> Result<StageChange, OperationError> {
        Self::add_stage(self, device, stage, position)
    }

    fn remove_stage(&self, device: &str, stage: &str) -> Result<StageChange, OperationError> {
        Self::remove_stage(self, device, stage)
    }
}
