//! The mirrors in use: opened with the legs that are there, and followed until they are closed.

mod change;
mod comeback;
mod follow;
mod report;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sidecore_block::BlockDevice;
use sidecore_mirror::{
    Claim, End, Former, LegError, LegState, Mirror, MirrorError, OpenOptions, Operator, Witness,
};

use crate::AssemblyError;
use crate::graph::lock;
use crate::remote::Remote;
use crate::spec::MirrorSpec;

/// How long a mirror that is opened waits for its legs that are devices of IOhosts. Later ones are
/// attached when they come.
const REMOTE_PATIENCE: Duration = Duration::from_secs(3);

/// The time until a store that could not be read is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// A leg's store, when that has been opened or refused.
pub(crate) type Opened = Result<Arc<dyn BlockDevice>, String>;

/// The mirrors of the stores that are open or being opened, by the stores' names.
#[derive(Default)]
pub(crate) struct Mirrors(Mutex<BTreeMap<String, Arc<MirrorInUse>>>);

impl Mirrors {
    fn get(&self, name: &str) -> Option<Arc<MirrorInUse>> {
        lock(&self.0).get(name).cloned()
    }

    fn all(&self) -> Vec<Arc<MirrorInUse>> {
        lock(&self.0).values().cloned().collect()
    }

    /// Adds a mirror that is to be [opened](MirrorInUse::open). `stores`: the legs' stores that are
    /// open or refused already. `devices`: of each leg that lies on a device of an IOhost.
    pub(crate) fn begin(
        &self,
        name: &str,
        spec: &MirrorSpec,
        stores: BTreeMap<String, Opened>,
        (devices, remote): (BTreeMap<String, LegDevice>, &Arc<Remote>),
    ) -> Arc<MirrorInUse> {
        let mirror = Arc::new(MirrorInUse {
            name: name.to_owned(),
            spec: spec.clone(),
            devices,
            remote: Arc::clone(remote),
            state: Mutex::new(State { stores, ..State::default() }),
            changed: Condvar::new(),
        });
        lock(&self.0).insert(name.to_owned(), Arc::clone(&mirror));
        mirror
    }

    /// Passes a store on that was opened or refused, to the mirror whose leg it is.
    pub(crate) fn came(&self, store: &str, opened: Opened) {
        let is_leg = |mirror: &&Arc<MirrorInUse>| mirror.spec.legs.iter().any(|leg| leg == store);
        if let Some(mirror) = self.all().iter().find(is_leg) {
            let mut state = mirror.state();
            // One that could not be opened stays in the list, and must not keep stores open.
            if state.is_closed {
                return;
            }
            state.to_attach.push(store.to_owned());
            state.stores.insert(store.to_owned(), opened);
            mirror.changed.notify_all();
        }
    }

    /// Has operators' commands fail from now on, also those that wait for a leg: the daemon ends.
    pub(crate) fn end_commands(&self) {
        for found in self.all() {
            let mut state = found.state();
            state.is_ending = true;
            if let Some(mirror) = &state.mirror {
                mirror.answer_no_more();
            }
        }
    }

    /// Why the requests of a mirror wait, or its writes may; `None` if they do not, or it is no
    /// mirror.
    pub(crate) fn waits(&self, name: &str) -> Option<String> {
        let found = self.get(name)?;
        let mirror = found.state().mirror.clone()?;
        match mirror.status().waits {
            Some(waits) => Some(waits.to_string()),
            None => found.waits_for_iohost(&mirror),
        }
    }

    /// Takes a mirror out of the list, unless it could not be opened: then the reason stays.
    fn take(&self, name: &str) -> Option<Arc<MirrorInUse>> {
        let mirror = self.get(name)?;
        if mirror.state().failure.is_none() {
            lock(&self.0).remove(name);
        }
        Some(mirror)
    }

    /// Lets go of mirrors whose stores are closed, and waits until their keepers have ended, for
    /// `limit` in all: then their legs are unused, and need no copy at the next start.
    pub(crate) fn close(&self, names: &[&str], limit: Duration) {
        let deadline = std::time::Instant::now() + limit;
        let closed: Vec<_> = names.iter().filter_map(|name| self.take(name)).collect();
        let ends: Vec<(String, End)> = closed.iter().filter_map(|mirror| mirror.close()).collect();
        for (store, end) in ends {
            if !end.wait(deadline.saturating_duration_since(std::time::Instant::now())) {
                tracing::error!(
                    store,
                    "the mirror does not close: its next start may copy to its legs"
                );
            }
        }
    }
}

/// The device of an IOhost that a leg lies on.
pub(crate) struct LegDevice {
    /// The store that it is.
    pub(crate) store: String,
    /// A controller is in between. Once it could not flush, it takes no changes until it is opened
    /// again, so that the leg does not come back with its IOhost.
    pub(crate) has_controller: bool,
}

/// A mirror, and the stores that may be its legs.
pub(crate) struct MirrorInUse {
    name: String,
    spec: MirrorSpec,
    devices: BTreeMap<String, LegDevice>,
    remote: Arc<Remote>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By their names; absent while they are being opened.
    stores: BTreeMap<String, Opened>,
    /// Why stores that are open are no legs, by their names.
    refused: BTreeMap<String, String>,
    /// Stores that came after the mirror was opened.
    to_attach: Vec<String>,
    mirror: Option<Arc<Mirror>>,
    /// Why the mirror is not open.
    failure: Option<String>,
    is_closed: bool,
    /// Commands fail.
    is_ending: bool,
}

/// Refuses each claim.
struct NoWitness;

impl Witness for NoWitness {
    fn may_go_on_alone(&self, _: &Claim) -> Result<(), String> {
        Err("the mirror has no `witness`".to_owned())
    }
}

/// The text of an error about a store that is to be a leg.
fn about(store: &str, error: MirrorError) -> String {
    match error {
        MirrorError::Leg { error, .. } => format!("store \"{store}\": {error}"),
        error => error.to_string(),
    }
}

fn is_same(one: &Arc<dyn BlockDevice>, other: &Arc<dyn BlockDevice>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

/// Whether a store with this error may be a leg all the same, when it is tried again.
const fn may_pass(error: &LegError) -> bool {
    matches!(error, LegError::Io(_) | LegError::Silent { .. } | LegError::Late { .. })
}

impl MirrorInUse {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Opens the mirror with the legs that are there, on a thread that may wait for IOhosts and for
    /// the stores.
    pub(crate) fn open(self: Arc<Self>) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
        let refused = |why: String| {
            self.state().failure = Some(why.clone());
            AssemblyError::Mirror { name: self.name.clone(), why }
        };
        // Headers of stores that are no legs any more.
        let former = Former::default();
        let mut tried = 0;
        let (mirror, left_out) = loop {
            let stores = self.stores_that_are_there(&mut tried);
            if self.state().is_closed {
                return Err(AssemblyError::Ending);
            }
            let (mirror, left_out) = self.open_with(stores, &former).map_err(refused)?;
            match mirror {
                Some(mirror) => break (Arc::new(mirror), left_out),
                // Another one may come and be a leg.
                None if tried < self.spec.legs.len() => {}
                None if left_out.values().any(may_pass) => self.rest(),
                None => return Err(refused(self.no_leg(&left_out))),
            }
        };
        let mut state = self.state();
        for (store, why) in left_out {
            tracing::warn!(store = self.name, leg = store, "not used as a leg: {why}");
            if may_pass(&why) {
                state.to_attach.push(store.clone());
            }
            state.refused.insert(store, why.to_string());
        }
        if state.is_closed {
            drop(state);
            return Err(AssemblyError::Ending);
        }
        if state.is_ending {
            mirror.answer_no_more();
        }
        state.mirror = Some(Arc::clone(&mirror));
        drop(state);
        self.read_preferred();
        let following = Arc::clone(&self);
        let thread = std::thread::Builder::new().name(format!("legs-{}", self.name));
        thread.spawn(move || following.follow()).map_err(AssemblyError::Threads)?;
        Ok(mirror)
    }

    /// Waits for a while, or until the mirror is closed.
    fn rest(&self) {
        let is_open = |state: &mut State| !state.is_closed;
        // The caller looks why it has ended.
        drop(self.changed.wait_timeout_while(self.state(), RETRY, is_open));
    }

    /// The stores that are open, when all legs have been tried, or IOhosts were waited for. There
    /// is one at least, unless all were refused; and more than `tried` have answered, if there are
    /// more. Then `tried` is their number.
    fn stores_that_are_there(&self, tried: &mut usize) -> Vec<(String, Arc<dyn BlockDevice>)> {
        let legs = &self.spec.legs;
        let known =
            |state: &State| legs.iter().filter(|leg| state.stores.contains_key(*leg)).count();
        let is_missing = |state: &mut State| !state.is_closed && known(state) < legs.len();
        let waited = self.changed.wait_timeout_while(self.state(), REMOTE_PATIENCE, is_missing);
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        let has_none = |state: &mut State| {
            is_missing(state)
                && (known(state) <= *tried || state.stores.values().all(Result::is_err))
        };
        let waited = self.changed.wait_while(state, has_none);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        *tried = known(&state);
        // Those that are there are not attached later.
        state.to_attach.clear();
        let device = |leg: &String| Some((leg.clone(), state.stores.get(leg)?.clone().ok()?));
        self.spec.legs.iter().filter_map(device).collect()
    }

    /// Opens the mirror of those stores that fit, if there is one. Returns the others, too, with
    /// the reasons.
    fn open_with(
        &self,
        mut stores: Vec<(String, Arc<dyn BlockDevice>)>,
        former: &Former,
    ) -> Result<(Option<Mirror>, BTreeMap<String, LegError>), String> {
        let witness: Arc<dyn Witness> = match self.spec.asks_operator {
            true => Arc::new(Operator),
            false => Arc::new(NoWitness),
        };
        let options = OpenOptions {
            name: self.name.clone(),
            copy_bytes_per_s: self.spec.copy_bytes_per_s,
            former: former.clone(),
            ..OpenOptions::new(witness)
        };
        let mut left_out = BTreeMap::new();
        loop {
            let devices: Vec<_> = stores.iter().map(|(_, device)| Arc::clone(device)).collect();
            let (store, error) = match Mirror::open(&devices, options.clone()) {
                Ok(mirror) => return Ok((Some(mirror), left_out)),
                Err(MirrorError::Leg { store, error }) if store < stores.len() => (store, error),
                Err(MirrorError::Count(0)) => return Ok((None, left_out)),
                Err(error) => return Err(error.to_string()),
            };
            let (name, _) = stores.remove(store);
            if !error.leaves_others() {
                return Err(format!("leg \"{name}\": {error}"));
            }
            left_out.insert(name, error);
        }
    }

    /// Why there is no store to open the mirror with: each was refused, or is none of its legs.
    fn no_leg(&self, left_out: &BTreeMap<String, LegError>) -> String {
        let state = self.state();
        let why = |leg: &String| {
            let refusal = state.stores.get(leg).and_then(|opened| opened.as_ref().err());
            let refused = left_out.get(leg).map(ToString::to_string);
            let why = refused.or_else(|| refusal.cloned())?;
            Some(format!("leg \"{leg}\": {why}"))
        };
        self.spec.legs.iter().filter_map(why).collect::<Vec<_>>().join("; ")
    }

    /// Has reads go to the leg that the specification names, if its store is one.
    fn read_preferred(&self) {
        let Some(store) = &self.spec.read else { return };
        let state = self.state();
        let Some(mirror) = state.mirror.clone() else { return };
        let number = self.number_of(store, &state, &mirror);
        drop(state);
        if let Some(number) = number {
            // A mirror that is closed is not read.
            let _ = mirror.prefer(number);
        }
    }

    /// The number of the leg that a store is; `None` if it is none.
    fn number_of(&self, store: &str, state: &State, mirror: &Mirror) -> Option<usize> {
        let device = state.stores.get(store)?.as_ref().ok()?;
        let is_it = |leg: &usize| mirror.store(*leg).is_some_and(|other| is_same(&other, device));
        mirror.status().members.numbers().find(is_it)
    }

    /// Why writes wait for a leg whose IOhost is away, and which has not failed for that yet.
    fn waits_for_iohost(&self, mirror: &Mirror) -> Option<String> {
        let mut away = self.devices.keys().filter(|leg| !self.is_there(leg));
        let leg = away.find(|leg| self.uses(leg, mirror))?;
        Some(format!("the IOhost of leg \"{leg}\" is away"))
    }

    /// Whether the IOhost of a store is there, or it has none.
    fn is_there(&self, leg: &str) -> bool {
        self.presence(leg).0
    }

    /// The same, and the number of its IOhost's absences until now.
    fn presence(&self, leg: &str) -> (bool, u64) {
        self.devices.get(leg).map_or((true, 0), |device| self.remote.presence(&device.store))
    }

    /// The state of the leg that a store is; `None` if it is none.
    fn leg_state(&self, store: &str, mirror: &Mirror) -> Option<LegState> {
        let number = self.number_of(store, &self.state(), mirror)?;
        mirror.status().legs.get(number).cloned()
    }

    /// Whether a store is a leg that has not failed.
    fn uses(&self, store: &str, mirror: &Mirror) -> bool {
        let state = self.leg_state(store, mirror);
        matches!(state, Some(LegState::InSync | LegState::Copying | LegState::Behind))
    }

    /// Lets go of the mirror. Returns the end of its keeper.
    fn close(&self) -> Option<(String, End)> {
        let mut state = self.state();
        state.is_closed = true;
        state.stores.clear();
        let mirror = state.mirror.take();
        self.changed.notify_all();
        drop(state);
        let mirror = mirror?;
        // Commands that wait for a leg would keep the mirror, and so would those that follow.
        mirror.answer_no_more();
        let end = mirror.end();
        // The last one that drops it waits for the keeper.
        let thread = std::thread::Builder::new().name(format!("close-{}", self.name));
        let _ = thread.spawn(move || drop(mirror));
        Some((self.name.clone(), end))
    }
}
