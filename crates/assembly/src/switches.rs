//! The switches of an assembly, and their ports.

mod capture;
mod firewall;
mod limits;
mod stations;
mod trace;
mod wire;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sidecore_linux::Clock;
use sidecore_net::{
    FrameStage, PortConfig, PortId, PortStats, StagePlace, Switch, SwitchError, SwitchOptions,
    SwitchUnit,
};
use sidecore_reactor::{IdleMode, caught};
use sidecore_sidecore::{Handle, NotStarted, Sidecore, Stopped};
use sidecore_telemetry::CounterSet;
use sidecore_units::Nanos;

use crate::AssemblyError;
use crate::operation::{ErrorKind, OperationError};
use crate::report::{PortReport, StageFailureReport, StationReport, SwitchReport};
use crate::spec::SwitchSpec;
use capture::PortCapture;
use firewall::PortFirewall;
use limits::limits;
use wire::PortWire;

pub use capture::Capture;
pub use trace::Trace;

/// A switch has nothing in flight: only a sidecore that is stuck takes longer to stop it.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

const NANOS_PER_S: u64 = 1_000_000_000;

/// The running switches by their names.
pub(crate) struct Switches {
    clock: Clock,
    running: Mutex<BTreeMap<String, Arc<RunningSwitch>>>,
}

/// A switch that runs on its sidecore.
pub(crate) struct RunningSwitch {
    spec: SwitchSpec,
    pub(crate) sidecore: Sidecore,
    clock: Clock,
    unit: Mutex<Option<Handle<SwitchUnit>>>,
    ports: Mutex<Vec<RunningPort>>,
    /// Held while the stages of a port change, so that `ports` shows the last change.
    changes: Mutex<()>,
}

/// A port, with its counters.
#[derive(Clone)]
struct RunningPort {
    id: PortId,
    name: String,
    stats: Arc<PortStats>,
    firewall: PortFirewall,
    limits: Vec<String>,
    wire: PortWire,
    capture: PortCapture,
}

/// The keys of a port's stages.
pub(crate) struct StagesSpec<'a> {
    pub rules: &'a [String],
    pub connections: u32,
    pub limits: &'a [String],
    pub faults: &'a str,
}

/// A stage, if there is one at its place.
type Stage = Option<Box<dyn FrameStage>>;

fn invalid(why: String) -> OperationError {
    OperationError::new(ErrorKind::Invalid, why)
}

/// Frees a stage that has left the port of this name. Its code may panic, as it has before if the
/// stage has failed.
fn free(port: &str, stage: Stage) {
    if let Err(message) = caught(|| drop(stage)) {
        tracing::error!(port, "a stage of a port has panicked as it was dropped: {message}");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Switches {
    pub(crate) fn new(clock: Clock) -> Self {
        Self { clock, running: Mutex::default() }
    }

    /// The specifications of the running switches.
    pub(crate) fn parts(&self) -> BTreeMap<String, SwitchSpec> {
        let running = lock(&self.running);
        running.iter().map(|(name, switch)| (name.clone(), switch.spec.clone())).collect()
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<RunningSwitch>> {
        lock(&self.running).get(name).cloned()
    }

    /// Starts a switch without ports.
    pub(crate) fn start(
        &self,
        spec: &SwitchSpec,
        sidecores: &[Sidecore],
    ) -> Result<(), AssemblyError> {
        let failed = |why: String| AssemblyError::Switch { name: spec.name.clone(), why };
        let sidecore = sidecores.iter().find(|sidecore| sidecore.name() == spec.sidecore);
        let Some(sidecore) = sidecore.cloned() else {
            return Err(failed(format!("there is no sidecore \"{}\"", spec.sidecore)));
        };
        // The standard library's hash keys are the process's random numbers.
        let mut options = SwitchOptions::new(RandomState::new().hash_one(&spec.name));
        options.stations = usize::try_from(spec.stations).unwrap_or(options.stations);
        options.age = Nanos(u64::from(spec.age_s).saturating_mul(NANOS_PER_S));
        let (name, idle) = (spec.name.clone(), spec.idle);
        let unit = sidecore.start(move |_| SwitchUnit::new(&name, Switch::new(options), idle));
        let unit = unit.map_err(|error| match error {
            NotStarted::Unit(error) | NotStarted::Watch(error) => failed(error.to_string()),
            NotStarted::Gone => failed("its sidecore has ended".to_owned()),
        })?;
        let switch = RunningSwitch {
            spec: spec.clone(),
            sidecore,
            clock: self.clock.clone(),
            unit: Mutex::new(Some(unit)),
            ports: Mutex::default(),
            changes: Mutex::default(),
        };
        lock(&self.running).insert(spec.name.clone(), Arc::new(switch));
        tracing::info!(switch = spec.name, sidecore = spec.sidecore, "switch started");
        Ok(())
    }

    /// Stops a switch. Its NICs have stopped before.
    pub(crate) fn stop(&self, name: &str) {
        let stopped = lock(&self.running).remove(name);
        let unit = stopped.and_then(|switch| lock(&switch.unit).take());
        let Some(stopping) = unit.map(Handle::stop) else { return };
        while stopping.wait(STOP_PATIENCE) == Stopped::StillInFlight {
            tracing::warn!(switch = name, "stopping: its sidecore does not answer");
        }
        tracing::info!(switch = name, "switch stopped");
    }

    /// Replaces the rules of a port's firewall, all at once. Its connections stay.
    pub(crate) fn set_rules(&self, port: &str, rules: &[String]) -> Result<(), OperationError> {
        self.of_port(port)?.set_rules(port, rules)?;
        tracing::info!(port, rules = rules.len(), "rules replaced");
        Ok(())
    }

    /// Changes the rate limits of a port.
    pub(crate) fn set_limits(&self, port: &str, limits: &[String]) -> Result<(), OperationError> {
        self.of_port(port)?.set_limits(port, limits)?;
        tracing::info!(port, limits = limits.join(", "), "limits changed");
        Ok(())
    }

    /// Changes the faults of a port's wire.
    pub(crate) fn set_faults(&self, port: &str, faults: &str) -> Result<(), OperationError> {
        self.of_port(port)?.set_faults(port, faults)?;
        tracing::info!(port, faults, "faults of the wire changed");
        Ok(())
    }

    /// Begins to capture the frames of a port, up to `snaplen` bytes of each.
    pub(crate) fn capture(&self, port: &str, snaplen: u32) -> Result<Capture, OperationError> {
        let capture = RunningSwitch::capture(&self.of_port(port)?, port, snaplen)?;
        tracing::info!(port, snaplen, "capture begins");
        Ok(capture)
    }

    /// Begins a trace of the frames that are dropped from and to a port.
    pub(crate) fn trace_port(&self, port: &str) -> Result<Trace, OperationError> {
        RunningSwitch::trace_port(&self.of_port(port)?, port)
    }

    /// Begins a trace of the frames that a switch drops.
    pub(crate) fn trace_switch(&self, name: &str) -> Result<Trace, OperationError> {
        let switch = self.get(name).ok_or_else(|| {
            let why = format!("there is no switch \"{name}\"; `sidecore net list` shows them");
            OperationError::new(ErrorKind::NotFound, why)
        })?;
        RunningSwitch::trace(&switch, name, None)
    }

    /// The switch that has this port.
    fn of_port(&self, port: &str) -> Result<Arc<RunningSwitch>, OperationError> {
        let running: Vec<_> = lock(&self.running).values().cloned().collect();
        running.into_iter().find(|switch| switch.has_port(port)).ok_or_else(|| {
            let why = format!("there is no port \"{port}\"; `sidecore net list` shows the ports");
            OperationError::new(ErrorKind::NotFound, why)
        })
    }

    /// Reports all switches, in the order of their names.
    pub(crate) fn reports(&self, asks: bool) -> Vec<SwitchReport> {
        let running: Vec<_> = lock(&self.running).values().cloned().collect();
        running.iter().map(|switch| switch.report(asks)).collect()
    }
}

impl RunningSwitch {
    pub(crate) fn idle(&self) -> IdleMode {
        self.spec.idle
    }

    /// Asks the switch, on its sidecore; `None` if it has stopped.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut SwitchUnit) -> T + Send + 'static,
    ) -> Option<T> {
        // Locked until the answer: a switch is asked in the order of the questions.
        let unit = lock(&self.unit);
        unit.as_ref()?.ask(question).ok().flatten()
    }

    pub(crate) fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// Adds a port with these stages and counters.
    ///
    /// # Errors
    /// The reason, for people.
    pub(crate) fn add_port(
        &self,
        name: &str,
        config: PortConfig,
        stages: &StagesSpec<'_>,
        stats: Arc<PortStats>,
    ) -> Result<PortId, String> {
        let (firewall, filter) = PortFirewall::new(stages).map_err(|error| error.to_string())?;
        let (limits, limit) = limits(stages.limits).map_err(|error| error.message)?;
        let (wire, faults) = PortWire::new(stages.faults).map_err(|error| error.message)?;
        let (now, of_port, named) = (self.now(), Arc::clone(&stats), name.to_owned());
        let added = self.ask(move |unit| {
            let switch = unit.switch_mut();
            let port = switch.add_port(now, &named, config, of_port)?;
            switch.set_stage(port, StagePlace::Firewall, filter)?;
            switch.set_stage(port, StagePlace::Limit, limit)?;
            switch.set_stage(port, StagePlace::Wire, faults).map(|_| port)
        });
        let added = added.ok_or_else(|| "it does not run".to_owned())?;
        let id = added.map_err(|error: SwitchError| format!("device \"{name}\": {error}"))?;
        let name = name.to_owned();
        let capture = PortCapture::default();
        lock(&self.ports).push(RunningPort { id, name, stats, firewall, limits, wire, capture });
        Ok(id)
    }

    /// Replaces a stage of a port between two frames. `make` makes the stage, and `note` notes what
    /// reports show of it. Returns the port.
    fn set_stage<S>(
        &self,
        port: &str,
        place: StagePlace,
        make: impl FnOnce(&RunningPort) -> Result<(S, Stage), OperationError>,
        note: impl FnOnce(&mut RunningPort, S),
    ) -> Result<PortId, OperationError> {
        let _changes = lock(&self.changes);
        let found = lock(&self.ports).iter().find(|found| found.name == port).cloned();
        let gone = || OperationError::new(ErrorKind::NotFound, format!("port \"{port}\" is gone"));
        let found = found.ok_or_else(gone)?;
        let (shown, stage) = make(&found)?;
        let id = found.id;
        // This thread frees the old stage, whose memory may be large.
        let old = self.ask(move |unit| unit.switch_mut().set_stage(id, place, stage));
        free(port, old.ok_or_else(gone)?.map_err(|_| gone())?);
        if let Some(port) = lock(&self.ports).iter_mut().find(|port| port.id == id) {
            note(port, shown);
        }
        Ok(id)
    }

    fn has_port(&self, name: &str) -> bool {
        lock(&self.ports).iter().any(|port| port.name == name)
    }

    /// Removes a port, whose queues have stopped.
    pub(crate) fn remove_port(&self, id: PortId) {
        lock(&self.ports).retain(|port| port.id != id);
        self.ask(move |unit| drop(unit.remove_port(id)));
    }

    fn report(&self, asks: bool) -> SwitchReport {
        let (now, ports) = (self.now(), lock(&self.ports).clone());
        let ids: Vec<PortId> = ports.iter().map(|port| port.id).collect();
        let tables = move |unit: &mut SwitchUnit| {
            let switch = unit.switch_mut();
            switch.refresh();
            let failure = |id| {
                let failure = switch.failure(id)?;
                let (stage, message) = (failure.place.word().to_owned(), failure.message.clone());
                Some(StageFailureReport { stage, message })
            };
            let state = |id: &PortId| PortReport {
                is_up: switch.is_up(*id),
                is_blocked: switch.is_blocked(*id),
                is_standby: switch.is_standby(*id),
                failure: failure(*id),
                ..PortReport::default()
            };
            let states: Vec<_> = ids.iter().map(state).collect();
            (states, switch.stations().collect::<Vec<_>>())
        };
        let seen = if asks { self.ask(tables) } else { None };
        let (states, stations) = seen.unwrap_or_default();
        let port_of = |id| ports.iter().find(|port| port.id == id).map(|port| port.name.clone());
        let mut stations: Vec<_> = stations
            .into_iter()
            .filter_map(|station| {
                Some(StationReport {
                    mac: station.mac.to_string(),
                    vlan: station.vlan,
                    port: port_of(station.port)?,
                    is_fixed: station.is_fixed,
                    silent_s: now.since(station.seen_at).0 / NANOS_PER_S,
                })
            })
            .collect();
        stations.sort_by(|one, other| (one.vlan, &one.mac).cmp(&(other.vlan, &other.mac)));
        let states = states.into_iter().chain(std::iter::repeat_with(PortReport::default));
        let ports = ports.iter().zip(states).map(|(port, state)| PortReport {
            name: port.name.clone(),
            counters: port.stats.counts(),
            firewall: port.firewall.report(),
            limits: port.limits.clone(),
            wire: port.wire.report(),
            capture: port.capture.report(),
            ..state
        });
        SwitchReport {
            name: self.spec.name.clone(),
            sidecore: self.spec.sidecore.clone(),
            ports: ports.collect(),
            stations,
        }
    }
}
