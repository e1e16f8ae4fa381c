//! The side of a client: the sessions with an IOhost, and the stores that are its devices.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use sidecore_block::{BlockDevice, BlockError};
use sidecore_link::{Link, LinkAddress};
use sidecore_remote::client::{
    Canceller, Iohost, OpenError, Opening, Session, SessionOptions, SessionReport,
};
use sidecore_remote::{NicMonitor, RemoteNic, remote_nic};
use sidecore_sidecore::{Handle, Sidecore};
use sidecore_trust::{ClientName, ClientTrust, KeyError};
use sidecore_units::Nanos;
use sidecore_vrio::{ClientOptions, OnDisconnect};

use super::hosting::{not_started, stop};
use super::link::{Granted, Side, open_queues};
use super::promises::Promises;
use super::trust::of_iohost;
use crate::AssemblyError;
use crate::spec::{IohostSpec, LinkSpec, RemoteSpec};

pub(super) type SessionUnit = Session<ClientTrust>;

/// The sessions with an IOhost: one for each queue of the links to it.
pub(super) struct UsedIohost {
    pub(super) spec: IohostSpec,
    /// One or two.
    pub(super) links: Vec<UsedLink>,
    pub(super) sessions: Vec<(Iohost, Arc<Handle<SessionUnit>>)>,
    /// The stores that are its devices, by their names.
    pub(super) stores: BTreeMap<String, UsedDevice>,
    /// The NICs that are ports of switches, by the names of their devices.
    pub(super) nics: BTreeMap<String, UsedNic>,
    /// NICs that were opened, also those of which the use has ended.
    opened_nics: usize,
    /// Whether new requests wait, because it is to be taken away.
    pub(super) is_drained: bool,
}

/// A link to an IOhost.
pub(super) struct UsedLink {
    pub(super) spec: LinkSpec,
    pub(super) granted: Granted,
    /// The IOhost's.
    pub(super) address: LinkAddress,
}

impl UsedLink {
    /// Opens the queues of a link.
    fn open(
        spec: &LinkSpec,
        address: Option<&str>,
        failed: impl FnOnce(String) -> AssemblyError,
    ) -> Result<(Self, Vec<Box<dyn Link>>), AssemblyError> {
        let address = spec.kind.address(address).map_err(failed)?;
        let queues = open_queues(spec, Side::Client)?;
        let granted = queues.first().map(|queue| Granted::of(queue.properties()));
        let granted = granted.unwrap_or_default();
        Ok((Self { spec: spec.clone(), granted, address }, queues))
    }
}

/// The rest of a drain of an IOhost, of all sessions with it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DrainRest {
    /// Sessions that have not begun to drain.
    pub(super) pending: usize,
    /// Sessions that are not there, and hold requests or writes.
    pub(super) away: usize,
    pub(super) unanswered: usize,
    pub(super) kept_writes: u64,
    /// The error of a flush.
    pub(super) error: Option<BlockError>,
}

impl DrainRest {
    /// Adds the session of a report.
    pub(super) fn add(&mut self, session: &SessionReport) {
        let Some(drain) = session.drain else {
            self.pending = self.pending.saturating_add(1);
            return;
        };
        let is_away = !session.is_connected && !drain.is_complete();
        self.away = self.away.saturating_add(usize::from(is_away));
        self.unanswered = self.unanswered.saturating_add(drain.unanswered);
        self.kept_writes = self.kept_writes.saturating_add(drain.kept_writes);
        self.error = self.error.or(drain.error);
    }

    /// Whether the IOhost has nothing of this host that could be lost.
    pub(super) const fn is_complete(&self) -> bool {
        self.pending == 0 && self.unanswered == 0 && self.kept_writes == 0 && self.error.is_none()
    }
}

/// A store that is a device of an IOhost.
pub(super) struct UsedDevice {
    pub(super) device: String,
    pub(super) canceller: Canceller,
    /// The number of its session.
    pub(super) session: usize,
}

/// A NIC at an IOhost that is a port of a switch here.
pub(super) struct UsedNic {
    /// The name of the NIC at the IOhost.
    pub(super) nic: String,
    pub(super) monitor: NicMonitor,
}

/// An IOhost that is there attaches a device in this time. After that, guests of an earlier process
/// are served as it has promised, and their requests wait.
const ATTACHED_WITHIN: Duration = Duration::from_secs(1);

/// A remote device that is being opened.
pub(crate) struct OpeningDevice {
    opening: Opening,
    iohost: String,
    device: String,
    promises: Arc<Promises>,
}

impl OpeningDevice {
    /// Blocks the calling thread until the device is known: the IOhost has attached it, or an
    /// earlier process has promised it to a guest. `None` if the attempt was given up.
    pub(crate) fn wait(self) -> Option<Arc<dyn BlockDevice>> {
        let Self { mut opening, iohost, device, promises } = self;
        let promised = promises.get(&(iohost.clone(), device.clone()));
        let patience = promised.map(|_| ATTACHED_WITHIN);
        let store = loop {
            opening = match opening.wait(patience).ok()? {
                Ok(store) => break store,
                Err(again) => again,
            };
            if let Some(entry) = &promised {
                opening = match opening.promised(entry).ok()? {
                    Ok(store) => break store,
                    Err(again) => again,
                };
            }
        };
        if let Some(entry) = store.status().entry {
            promises.note(&iohost, &device, &entry);
        }
        Some(Arc::new(store))
    }
}

impl UsedIohost {
    /// Opens the links, and starts a session on each of their sidecores.
    pub(super) fn start(
        spec: &IohostSpec,
        links: &[&LinkSpec],
        sidecores: &[Sidecore],
        life: u64,
    ) -> Result<Self, AssemblyError> {
        let failed = |error: String| AssemblyError::Iohost { name: spec.name.clone(), error };
        let second_address = spec.second.as_ref().and_then(|(_, address)| address.as_deref());
        let addresses = [spec.address.as_deref(), second_address];
        let opened = links.iter().zip(addresses);
        let opened = opened.map(|(link, address)| UsedLink::open(link, address, failed));
        let (links, queues): (Vec<_>, Vec<_>) =
            opened.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        let mut used = Self {
            spec: spec.clone(),
            links,
            sessions: Vec::new(),
            stores: BTreeMap::new(),
            nics: BTreeMap::new(),
            opened_nics: 0,
            is_drained: false,
        };
        let mut queues: Vec<_> = queues.into_iter().map(Vec::into_iter).collect();
        let names = used.links().next().map_or_else(Vec::new, |link| link.sidecores.clone());
        for (index, name) in names.iter().enumerate() {
            let mut its = queues.iter_mut().filter_map(Iterator::next);
            let core = sidecores.iter().find(|sidecore| sidecore.name() == name);
            if let (Some(core), Some(first)) = (core, its.next()) {
                used.start_session(core, (index, life), (first, its.next()))?;
            }
        }
        Ok(used)
    }

    /// The links, the first one first.
    pub(super) fn links(&self) -> impl Iterator<Item = &LinkSpec> {
        self.links.iter().map(|link| &link.spec)
    }

    /// Starts the session of a queue of the first link, and perhaps of the second one.
    fn start_session(
        &mut self,
        core: &Sidecore,
        (index, life): (usize, u64),
        (first, second): (Box<dyn Link>, Option<Box<dyn Link>>),
    ) -> Result<(), AssemblyError> {
        let spec = &self.spec;
        let failed = |error: String| AssemblyError::Iohost { name: spec.name.clone(), error };
        let client: ClientName =
            spec.client.parse().map_err(|error: KeyError| failed(error.to_string()))?;
        let Some(UsedLink { spec: link, address, .. }) = self.links.first() else { return Ok(()) };
        let second = second.zip(self.links.get(1).map(|link| link.address));
        // Larger frames than those of the link are not asked for.
        let frames = self.links().map(|link| link.frame_bytes).max();
        let receive_frames = self.links().map(|link| link.receive_frames).max();
        let after = |after: Duration| Nanos(after.as_nanos().try_into().unwrap_or(u64::MAX));
        let queue = u8::try_from(index).unwrap_or(u8::MAX);
        let options = SessionOptions {
            client: ClientOptions {
                client: client.to_wire(),
                life,
                queue,
                host_queue: queue,
                frame_bytes: frames.unwrap_or(link.frame_bytes),
                receive_frames: receive_frames.unwrap_or(link.receive_frames),
                replay_bytes: spec.replay_bytes,
                on_disconnect: spec
                    .fail_after
                    .map_or(OnDisconnect::Stall, |time| OnDisconnect::Fail(after(time))),
                ..ClientOptions::default()
            },
            address: *address,
            idle: link.idle,
        };
        let iohost = Iohost::new(&spec.name).map_err(|error| failed(error.to_string()))?;
        let trust = of_iohost(spec, &link.kind).map_err(failed)?;
        let shared = iohost.clone();
        let unit = core.start(move |context| -> io::Result<_> {
            let mut session = Session::new(context, &shared, first, trust, &options)?;
            if let Some((second, address)) = second {
                session.add_second(second, address, &options)?;
            }
            Ok(session)
        });
        let unit = Arc::new(unit.map_err(|error| failed(not_started(error)))?);
        self.sessions.push((iohost, unit));
        Ok(())
    }

    /// Begins to open a device as a store. Stores are spread over the sessions.
    pub(super) fn open(
        &mut self,
        store: &str,
        remote: &RemoteSpec,
        promises: &Arc<Promises>,
    ) -> Result<OpeningDevice, AssemblyError> {
        let failed = |error: String| AssemblyError::Remote { name: store.to_owned(), error };
        let load = |index: usize| self.stores.values().filter(|used| used.session == index).count();
        let least = (0..self.sessions.len()).min_by_key(|index| load(*index));
        let Some((session, (iohost, _))) =
            least.and_then(|index| Some((index, self.sessions.get(index)?)))
        else {
            return Err(failed("its IOhost has no session".to_owned()));
        };
        let device = remote.device.clone().unwrap_or_else(|| store.to_owned());
        let opening =
            Opening::new(iohost, &device).map_err(|error: OpenError| failed(error.to_string()))?;
        let canceller = opening.canceller();
        let used = UsedDevice { device: device.clone(), canceller, session };
        self.stores.insert(store.to_owned(), used);
        let (iohost, promises) = (self.spec.name.clone(), Arc::clone(promises));
        Ok(OpeningDevice { opening, iohost, device, promises })
    }

    /// Begins to use a NIC as a port of a switch: the use ends when that drops it. NICs are spread
    /// over the sessions.
    pub(super) fn open_nic(
        &mut self,
        device: &str,
        nic: &str,
        mtu: u16,
    ) -> Result<RemoteNic, String> {
        let session = self.opened_nics.checked_rem(self.sessions.len()).unwrap_or(0);
        let session = self.sessions.get(session);
        let (iohost, _) = session.ok_or_else(|| "its IOhost has no session".to_owned())?;
        let (queue, end) = remote_nic(mtu).map_err(|error| error.to_string())?;
        iohost.open_nic(nic, end).map_err(|error: OpenError| error.to_string())?;
        self.opened_nics = self.opened_nics.wrapping_add(1);
        let used = UsedNic { nic: nic.to_owned(), monitor: queue.monitor() };
        self.nics.insert(device.to_owned(), used);
        Ok(queue)
    }

    /// Has new requests wait, or go on.
    pub(super) fn drain(&mut self, drains: bool) {
        self.is_drained = drains;
        self.sessions.iter().for_each(|(iohost, _)| iohost.drain(drains));
    }

    /// The rest of the drain. Waits for the sidecores of the sessions.
    pub(super) fn drain_rest(&self) -> DrainRest {
        let mut rest = DrainRest::default();
        for (_, unit) in &self.sessions {
            // A session that has ended, has nothing.
            if let Some(report) = unit.ask(|unit| unit.report()).ok().flatten() {
                rest.add(&report);
            }
        }
        rest
    }

    /// Ends the sessions, and closes the link.
    pub(super) fn close(self) {
        let Self { sessions, spec, stores, .. } = self;
        stores.values().for_each(|used| used.canceller.cancel());
        drop(stores);
        for (_, unit) in sessions {
            if let Some(unit) = Arc::into_inner(unit) {
                stop(unit, &spec.name);
            }
        }
    }
}
