//! The controllers of an assembly: opened with their stores, and managed while they run.

mod dedup;
mod scheduled;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use sidecore_block::BlockDevice;
use sidecore_controller::{
    Controller, ControllerError, ControllerOptions, FunctionOptions, Limit, Limits, Ownership,
};
use sidecore_extent::BlockRange;
use sidecore_nvme_subsystem::NamespaceIds;
use sidecore_units::Vlba;
use sidecore_volume::{
    FormatOptions, OpenError, Owner, VolumeError, VolumeId, VolumeInfo, VolumeState,
};

use crate::AssemblyError;
use crate::convert;
use crate::crash_log::answered;
use crate::operation::{ErrorKind, OperationError};
use crate::plan::Part;
use crate::report::{
    CheckReport, ClosedControllerReport, ControllerReport, ControllerState, ExtentReport,
    ExtentsReport, VolumeReport,
};
use crate::spec::{
    ControllerSpec, FormatSpec, LOST_STORE, LimitSpec, LimitsSpec, StoreSpec, VolumeSpec,
};
use crate::stores::Progress;

/// The controllers of the configuration, in its order.
pub(crate) struct Controllers {
    entries: RwLock<Vec<Entry>>,
    /// The owner of all of their stores, if several hosts reach them.
    pub(crate) owner: Option<Owner>,
}

struct Entry {
    spec: ControllerSpec,
    /// `None` until the controller's store is open.
    progress: Option<Progress<Arc<ControllerHandle>>>,
}

impl Controllers {
    /// A list without an open controller.
    pub(crate) fn new(specs: &[ControllerSpec], owner: Option<Owner>) -> Self {
        let entries = specs.iter().map(|spec| Entry { spec: spec.clone(), progress: None });
        Self { entries: RwLock::new(entries.collect()), owner }
    }

    pub(crate) fn set(&self, name: &str, progress: Progress<Arc<ControllerHandle>>) {
        if let Progress::Refused(reason) = &progress {
            tracing::error!(controller = name, "not opened: {reason}");
        }
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.iter_mut().find(|entry| entry.spec.name == name) {
            entry.progress = Some(progress);
        }
    }

    fn entries(&self) -> RwLockReadGuard<'_, Vec<Entry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The specification and phase of each controller that was opened or refused.
    pub(crate) fn parts(&self) -> BTreeMap<String, Part<ControllerSpec>> {
        let part = |entry: &Entry| {
            let part = Part { spec: entry.spec.clone(), phase: entry.progress.as_ref()?.phase() };
            Some((entry.spec.name.clone(), part))
        };
        self.entries().iter().filter_map(part).collect()
    }

    /// The names of all controllers, open or not.
    pub(crate) fn names(&self) -> Vec<String> {
        self.entries().iter().map(|entry| entry.spec.name.clone()).collect()
    }

    /// The controllers that are open.
    pub(crate) fn all(&self) -> Vec<Arc<ControllerHandle>> {
        let open = |entry: &Entry| match &entry.progress {
            Some(Progress::Open(controller)) => Some(Arc::clone(controller)),
            _ => None,
        };
        self.entries().iter().filter_map(open).collect()
    }

    /// The open controller of this name.
    pub(crate) fn get(&self, name: &str) -> Option<Arc<ControllerHandle>> {
        self.all().into_iter().find(|controller| controller.name() == name)
    }

    /// The controllers that are not open.
    pub(crate) fn closed(&self) -> Vec<ClosedControllerReport> {
        let closed = |entry: &Entry| {
            let (state, reason) = match &entry.progress {
                Some(Progress::Open(_)) => return None,
                None | Some(Progress::Opening) => {
                    (ControllerState::Opening, "its store does not answer yet".to_owned())
                }
                Some(Progress::Refused(reason)) => (ControllerState::Refused, reason.clone()),
            };
            let (name, store) = (entry.spec.name.clone(), entry.spec.store.clone());
            Some(ClosedControllerReport { name, store, state, reason })
        };
        self.entries().iter().filter_map(closed).collect()
    }

    /// The report of a controller, if the controller is not open.
    pub(crate) fn closed_one(&self, name: &str) -> Option<ClosedControllerReport> {
        self.closed().into_iter().find(|closed| closed.name == name)
    }

    /// Opens a virtual function for `user`, and creates its volume if the specification gives a
    /// size.
    pub(crate) fn open_function(
        &self,
        user: &str,
        spec: &VolumeSpec,
    ) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
        let controller = self.find(user, &spec.controller)?;
        let function = controller.open_function(spec);
        function.map_err(|error| AssemblyError::Controller { user: user.to_owned(), error })
    }

    /// Opens the physical function for `user`.
    pub(crate) fn physical_function(
        &self,
        user: &str,
        name: &str,
    ) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
        let controller = self.find(user, name)?;
        if !controller.spec.physical_function {
            let (user, controller) = (user.to_owned(), name.to_owned());
            return Err(AssemblyError::NoPhysicalFunction { user, controller });
        }
        Ok(controller.controller.physical_function())
    }

    fn find(&self, user: &str, name: &str) -> Result<Arc<ControllerHandle>, AssemblyError> {
        let user = user.to_owned();
        match (self.get(name), self.closed_one(name)) {
            (Some(controller), _) => Ok(controller),
            (None, Some(closed)) => {
                let error = OperationError::new(ErrorKind::Conflict, closed.to_string());
                Err(AssemblyError::Controller { user, error })
            }
            (None, None) => {
                Err(AssemblyError::Unknown { user, kind: "controller", name: name.to_owned() })
            }
        }
    }

    /// Makes everything durable and ends these controllers, side by side. Their functions are not
    /// in use. The controllers stay in the list for reports.
    pub(crate) fn shutdown(&self, names: &[&str]) {
        let all = self.all();
        std::thread::scope(|scope| {
            for controller in all.iter().filter(|controller| names.contains(&controller.name())) {
                scope.spawn(|| controller.controller.shutdown());
            }
        });
    }
}

fn options(spec: &ControllerSpec) -> ControllerOptions {
    ControllerOptions {
        btlb_entries: spec.btlb_entries,
        tree_memory_bytes: spec.tree_memory_bytes,
        format: spec.format.as_ref().map(|format| format_options(format, false)),
        commit_interval: spec.commit_interval,
        warn_used_percent: spec.warn_used_percent,
        ..ControllerOptions::default()
    }
}

/// Ends the process when a controller's store has another owner. Guests of this process may have
/// the other one already, or get it next: an error would be an answer.
fn ownership(controller: &str, owner: Owner) -> Ownership {
    let controller = controller.to_owned();
    let lost = move |why: &str| {
        tracing::error!(controller, "ended at once: {why}");
        std::process::exit(LOST_STORE.into());
    };
    Ownership { owner, lost: Arc::new(lost) }
}

/// The options for formatting a store, with a new UUID.
pub(crate) fn format_options(spec: &FormatSpec, force: bool) -> FormatOptions {
    let mut uuid = [0; 16];
    // If the kernel gives too few random bytes, the UUIDs of the store and of its volumes are only
    // less unlikely to be taken.
    let _ = rustix::rand::getrandom(&mut uuid, rustix::rand::GetRandomFlags::empty());
    FormatOptions { block_bytes: spec.block_bytes, label: spec.label.clone(), uuid, force }
}

/// Adds the remedy to the error for a store without a controller's metadata.
fn refused_to_open(spec: &ControllerSpec, error: ControllerError) -> OperationError {
    let remedy = match &error {
        ControllerError::Open(OpenError::NotFormatted(_)) if spec.format.is_none() => {
            "; if it may be formatted, do that with `sidecore controller format PATH`, or set \
             `format = \"blank\"`"
        }
        ControllerError::Open(OpenError::NotFormatted(_)) => {
            "; only a blank store is formatted by `format = \"blank\"`: if the store's contents \
             are not needed, format it with `sidecore controller format --force PATH`"
        }
        _ => "",
    };
    let mut error = OperationError::from(error);
    error.message.push_str(remedy);
    error
}

/// A range of a volume's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlocksOf<'a> {
    /// The volume's name on its controller.
    pub volume: &'a str,
    /// The first block, by its number.
    pub first: u64,
    /// The number of blocks.
    pub count: u64,
}

/// A controller of a running assembly, and the management of its volumes.
///
/// Every method may wait for the disk, for an epoch or for a commit: neither a sidecore nor a
/// worker of the socket service may call one.
pub struct ControllerHandle {
    controller: Arc<Controller>,
    spec: ControllerSpec,
    /// Whether the volumes were read-only from the start.
    opened_read_only: bool,
    /// Called after each change of a volume.
    changed: OnceLock<Listener>,
}

type Listener = Box<dyn Fn(VolumeChange<'_>) + Send + Sync>;

/// A change of a controller's volumes, for the listener.
#[derive(Clone, Copy, Debug)]
pub(crate) enum VolumeChange<'a> {
    /// A volume was created or deleted.
    Listed,
    /// A volume has another size.
    Resized,
    /// A volume has another name.
    Renamed { from: &'a str, to: &'a str },
}

/// Every method fails with an [`OperationError`]; then nothing has changed.
#[allow(clippy::missing_errors_doc)]
impl ControllerHandle {
    /// Opens the controller on its store. Blocks the calling thread, because it reads all metadata.
    pub(crate) fn open(
        spec: ControllerSpec,
        store: Arc<dyn BlockDevice>,
        bottom: Option<&StoreSpec>,
        owner: Option<Owner>,
    ) -> Result<Self, AssemblyError> {
        let user = format!("controller \"{}\"", spec.name);
        let pin: sidecore_controller::PinNodes = Box::new(sidecore_linux::pin_memory);
        let ownership = owner.map(|owner| ownership(&spec.name, owner));
        let answered = answered(&spec, bottom);
        let options = ControllerOptions { answered, ownership, ..options(&spec) };
        let controller =
            Controller::open(&spec.name, store, &options, Some(pin)).map_err(|error| {
                AssemblyError::Controller { user, error: refused_to_open(&spec, error) }
            })?;
        let report = controller.report();
        let opened_read_only = report.read_only.is_some() && !report.is_frozen;
        Ok(Self { controller, spec, opened_read_only, changed: OnceLock::new() })
    }

    /// The name from the configuration.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Whether a write of metadata has failed: changes acknowledged since then may be lost.
    pub(crate) fn has_lost_writes(&self) -> bool {
        let report = self.controller.report();
        !self.opened_read_only && report.read_only.is_some() && !report.is_frozen
    }

    /// The conditions that restrict a device in front of the controller, or of `volume` if it is
    /// given.
    pub(crate) fn warnings(&self, volume: Option<&str>) -> Vec<String> {
        let health = self.controller.health(volume);
        let name = &self.spec.name;
        let mut warnings = Vec::new();
        match &health.read_only {
            Some(_) if health.is_damaged => {
                let volume = volume.unwrap_or_default();
                warnings.push(format!(
                    "volume \"{volume}\" is damaged: only the parts in memory can be read; \
                     `sidecore volume repair` mends it while no daemon has the store"
                ));
            }
            Some(why) if health.is_frozen => warnings.push(format!(
                "controller \"{name}\" gives out no blocks and takes no discards, because metadata \
                 is damaged ({why}); `sidecore volume repair` mends it while no daemon has the \
                 store"
            )),
            Some(why) => warnings.push(format!("controller \"{name}\" is read-only: {why}")),
            None => {}
        }
        if let Some(percent) = health.used_percent {
            warnings.push(format!("{percent} % of controller \"{name}\" are in use"));
        }
        if let Some(why) = &health.full {
            warnings.push(format!(
                "the store of controller \"{name}\" is full ({why}): writes to fresh blocks fail \
                 until it has space"
            ));
        }
        warnings
    }

    /// The name of the volume with this number.
    pub(crate) fn name_of(&self, id: u64) -> Option<String> {
        let volumes = self.volumes().ok()?;
        volumes.into_iter().find(|volume| volume.id == id).map(|volume| volume.name)
    }

    /// The name of the store that the controller owns.
    pub(crate) fn store(&self) -> &str {
        &self.spec.store
    }

    /// The UUID that the store got when it was formatted.
    pub(crate) fn store_uuid(&self) -> [u8; 16] {
        self.controller.store_uuid()
    }

    /// The identifiers of a volume as an NVMe namespace.
    pub(crate) fn namespace_ids(&self, volume: &VolumeReport) -> NamespaceIds {
        NamespaceIds::of_volume(
            &self.spec.name,
            volume.id,
            volume.created_at_unix_s,
            self.store_uuid(),
        )
    }

    /// The size in bytes of a logical block of volumes as NVMe namespaces: the store's.
    pub(crate) fn logical_block_bytes(&self) -> u32 {
        self.controller.report().store.block_bytes.max(sidecore_units::SECTOR_BYTES as u32)
    }

    /// The controller's settings and state.
    #[must_use]
    pub fn report(&self) -> ControllerReport {
        convert::controller(self.controller.report(), &self.spec.store, &self.controller.volumes())
    }

    /// The volumes and snapshots, oldest first.
    pub fn volumes(&self) -> Result<Vec<VolumeReport>, OperationError> {
        let volumes = self.controller.volumes();
        let names: HashMap<VolumeId, String> =
            volumes.iter().map(|info| (info.id, info.name.clone())).collect();
        Ok(volumes
            .iter()
            .map(|info| self.volume_report(info, |id| names.get(&id).cloned()))
            .collect())
    }

    /// The volumes with their exclusive and shared bytes. This walks all metadata if there was a
    /// commit since the last walk.
    pub fn volumes_with_usage(&self) -> Result<Vec<VolumeReport>, OperationError> {
        let mut volumes = self.volumes()?;
        self.add_usage(&mut volumes);
        Ok(volumes)
    }

    /// The report of one volume.
    pub fn volume(&self, name: &str) -> Result<VolumeReport, OperationError> {
        self.controller.volume(name).map(|info| self.report_of(&info)).map_err(OperationError::from)
    }

    /// The report of one volume with its exclusive and shared bytes, as
    /// [`volumes_with_usage`](Self::volumes_with_usage).
    pub fn volume_with_usage(&self, name: &str) -> Result<VolumeReport, OperationError> {
        let mut report = self.volume(name)?;
        self.add_usage(std::slice::from_mut(&mut report));
        Ok(report)
    }

    /// Adds exclusive and shared bytes, as far as they are known.
    fn add_usage(&self, reports: &mut [VolumeReport]) {
        let usage = self.controller.usage().unwrap_or_default();
        for report in reports {
            let bytes = |blocks: &u64| blocks.saturating_mul(self.controller.block_bytes().into());
            report.exclusive_bytes = usage.exclusive.get(&VolumeId(report.id)).map(bytes);
            report.shared_bytes = usage.shared.get(&VolumeId(report.id)).map(bytes);
        }
    }

    fn report_of(&self, info: &VolumeInfo) -> VolumeReport {
        self.volume_report(info, |id| {
            self.controller
                .volumes()
                .into_iter()
                .find(|volume| volume.id == id)
                .map(|volume| volume.name)
        })
    }

    fn volume_report(
        &self,
        info: &VolumeInfo,
        name_of: impl Fn(VolumeId) -> Option<String>,
    ) -> VolumeReport {
        let block_bytes = self.controller.block_bytes();
        let bytes = |blocks: u64| blocks.saturating_mul(block_bytes.into());
        VolumeReport {
            id: info.id.0,
            name: info.name.clone(),
            controller: self.spec.name.clone(),
            size_bytes: bytes(info.blocks),
            block_bytes,
            quota_bytes: info.quota_blocks.map(bytes),
            allocated_bytes: bytes(info.allocated_blocks),
            extents: info.extents,
            read_only: info.read_only,
            origin: info.origin.map(|id| id.0),
            origin_name: info.origin.and_then(name_of),
            created_at_unix_s: info.created_at_unix_s,
            exclusive_bytes: None,
            shared_bytes: None,
            damaged: info.state == VolumeState::Damaged,
        }
    }

    /// Creates a volume, which takes no space until it is written.
    pub fn create_volume(
        &self,
        name: &str,
        size_bytes: u64,
        quota_bytes: Option<u64>,
    ) -> Result<VolumeReport, OperationError> {
        scheduled::check_name(name)?;
        let created = self.controller.create_volume(name, size_bytes, quota_bytes)?;
        self.notify(VolumeChange::Listed);
        Ok(self.report_of(&created))
    }

    /// Creates a read-only copy of a volume's present contents, without copying blocks.
    pub fn snapshot_volume(
        &self,
        volume: &str,
        name: &str,
    ) -> Result<VolumeReport, OperationError> {
        scheduled::check_name(name)?;
        let created = self.controller.snapshot_volume(volume, name)?;
        self.notify(VolumeChange::Listed);
        Ok(self.report_of(&created))
    }

    /// Creates a writable copy of the present contents of a volume or snapshot, without copying
    /// blocks.
    pub fn clone_volume(&self, origin: &str, name: &str) -> Result<VolumeReport, OperationError> {
        scheduled::check_name(name)?;
        let created = self.controller.clone_volume(origin, name)?;
        self.notify(VolumeChange::Listed);
        Ok(self.report_of(&created))
    }

    /// Sets the size of a volume.
    pub fn resize_volume(
        &self,
        volume: &str,
        size_bytes: u64,
    ) -> Result<VolumeReport, OperationError> {
        let resized = self.controller.resize_volume(volume, size_bytes)?;
        self.notify(VolumeChange::Resized);
        Ok(self.report_of(&resized))
    }

    /// Sets the one listener. It runs after each change, before the change returns.
    pub(crate) fn on_change(&self, notify: impl Fn(VolumeChange<'_>) + Send + Sync + 'static) {
        let _ = self.changed.set(Box::new(notify));
    }

    fn notify(&self, change: VolumeChange<'_>) {
        if let Some(notify) = self.changed.get() {
            notify(change);
        }
    }

    /// Renames a volume, also while it is served.
    pub fn rename_volume(&self, volume: &str, name: &str) -> Result<VolumeReport, OperationError> {
        scheduled::check_name(name)?;
        let renamed = self.controller.rename_volume(volume, name)?;
        self.notify(VolumeChange::Renamed { from: volume, to: name });
        Ok(self.report_of(&renamed))
    }

    /// Sets a volume's quota; `None` removes the quota.
    pub fn set_quota(
        &self,
        volume: &str,
        quota_bytes: Option<u64>,
    ) -> Result<VolumeReport, OperationError> {
        Ok(self.report_of(&self.controller.set_quota(volume, quota_bytes)?))
    }

    /// Deletes a volume or snapshot, unless a device serves it.
    pub fn delete_volume(&self, volume: &str) -> Result<(), OperationError> {
        self.controller.delete_volume(volume)?;
        self.notify(VolumeChange::Listed);
        Ok(())
    }

    /// Lists up to `max` extents of a volume from block `from_block` on.
    pub fn extents(
        &self,
        volume: &str,
        from_block: u64,
        max: usize,
    ) -> Result<ExtentsReport, OperationError> {
        let blocks = self.controller.volume(volume)?.blocks;
        let (extents, covered) = self.controller.volume_extents(volume, Vlba(from_block), max)?;
        let extent = |extent: &sidecore_extent::Extent| ExtentReport {
            first: extent.first.0,
            count: extent.count,
            physical: extent.physical.0,
            shared: extent.shared,
        };
        let end = covered.end().map_or(blocks, |end| end.0);
        Ok(ExtentsReport {
            block_bytes: self.controller.block_bytes(),
            extents: extents.iter().map(extent).collect(),
            next: Some(end).filter(|end| *end < blocks && !covered.is_empty()),
        })
    }

    /// Reads all metadata and accounts for every block, while the controller works.
    pub fn check(&self) -> Result<CheckReport, OperationError> {
        Ok(convert::check(self.controller.check()?))
    }

    /// Drops the extent trees of one volume, or of all, from memory. The next requests read them
    /// again.
    pub fn prune(&self, volume: Option<&str>) -> Result<(), OperationError> {
        Ok(self.controller.prune(volume)?)
    }

    /// Empties the sidecores' translation buffers.
    pub fn flush_btlb(&self) -> Result<(), OperationError> {
        self.controller.flush_btlb();
        Ok(())
    }

    /// Maps the blocks of `to` to those of `from`, if their contents are equal.
    pub fn share(&self, from: BlocksOf<'_>, to: BlocksOf<'_>) -> Result<(), OperationError> {
        let range = BlockRange { first: Vlba(from.first), count: from.count };
        Ok(self.controller.share_blocks((from.volume, range), (to.volume, Vlba(to.first)))?)
    }

    /// Opens a virtual function of a volume, which is created if the specification gives a size.
    pub(crate) fn open_function(
        &self,
        spec: &VolumeSpec,
    ) -> Result<Arc<dyn BlockDevice>, OperationError> {
        match (self.controller.volume(&spec.volume), spec.size_bytes) {
            (Err(ControllerError::NoSuchVolume(_)), Some(size_bytes)) => {
                scheduled::check_name(&spec.volume)?;
                self.controller.create_volume(&spec.volume, size_bytes, spec.quota_bytes)?;
                tracing::info!(
                    controller = self.spec.name,
                    volume = spec.volume,
                    size_bytes,
                    "volume created"
                );
            }
            (Err(error @ ControllerError::NoSuchVolume(_)), None) => {
                let mut error = OperationError::from(error);
                let (volume, controller) = (&spec.volume, &self.spec.name);
                error.message.push_str(&format!(
                    " on controller \"{controller}\"; make it with `sidecore volume create \
                     {volume} SIZE`"
                ));
                return Err(error);
            }
            (Err(error), _) => return Err(error.into()),
            (Ok(info), _) => {
                let block_bytes = u64::from(self.controller.block_bytes());
                let quota_bytes =
                    info.quota_blocks.map(|blocks| blocks.saturating_mul(block_bytes));
                if spec.quota_bytes.is_some() && spec.quota_bytes != quota_bytes {
                    match self.controller.set_quota(&spec.volume, spec.quota_bytes) {
                        // A failure to change the quota does not keep the volume from being served.
                        Err(ControllerError::Volume(error @ VolumeError::StoreDamaged(_))) => {
                            let (controller, volume) = (&self.spec.name, &spec.volume);
                            tracing::warn!(
                                controller,
                                volume,
                                "the quota cannot be changed: {error}"
                            );
                        }
                        changed => drop(changed?),
                    }
                }
            }
        }
        let options = FunctionOptions {
            volume: spec.volume.clone(),
            weight: spec.weight,
            limits: limits(&spec.limits),
            read_only: spec.read_only,
        };
        let function: Arc<dyn BlockDevice> = self.controller.open_function(&options)?;
        Ok(function)
    }
}

pub(crate) fn limits(spec: &LimitsSpec) -> Limits {
    let limit =
        |limit: Option<LimitSpec>| limit.map(|LimitSpec { per_s, burst }| Limit { per_s, burst });
    Limits {
        read_iops: limit(spec.read_iops),
        write_iops: limit(spec.write_iops),
        read_bytes_per_s: limit(spec.read_bps),
        write_bytes_per_s: limit(spec.write_bps),
    }
}
