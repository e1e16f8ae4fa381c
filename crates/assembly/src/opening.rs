//! Stores and controllers that are being opened, each on a thread of its own: one that does not answer keeps no other
//! from being served.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use sidecore_block::BlockDevice;

use crate::AssemblyError;
use crate::controllers::{ControllerHandle, Controllers};
use crate::report::ControllerState;
use crate::spec::{ControllerSpec, Spec, StoreKind, StoreSpec};
use crate::stores::{self, Stores};

/// How long the start waits for all of them together. What takes longer is served when it is open.
pub(crate) const START_PATIENCE: Duration = Duration::from_secs(5);

/// What is opened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Subject {
    Store(String),
    Controller(String),
}

/// The end of one attempt.
pub(crate) enum Opened {
    Store(String, Result<Arc<dyn BlockDevice>, AssemblyError>),
    Controller(String, Result<ControllerHandle, AssemblyError>),
}

impl Opened {
    pub(crate) fn subject(&self) -> Subject {
        match self {
            Self::Store(name, _) => Subject::Store(name.clone()),
            Self::Controller(name, _) => Subject::Controller(name.clone()),
        }
    }

    /// Makes it known to those that use it.
    pub(crate) fn keep(self, stores: &mut Stores, controllers: &Controllers) -> Result<(), AssemblyError> {
        match self {
            Self::Store(name, store) => stores.put(name, store?),
            Self::Controller(_, controller) => controllers.opened(controller?),
        }
        Ok(())
    }
}

/// What is not open yet, and which stores were refused.
pub(crate) struct Opening {
    sender: Sender<Opened>,
    receiver: Receiver<Opened>,
    /// Attempts that have not ended.
    in_flight: usize,
    /// Controllers whose stores are not open.
    waiting: Vec<ControllerSpec>,
    /// Stores that were refused, with the reason.
    refused: HashMap<String, String>,
}

impl Opening {
    /// Begins with the files that devices and controllers lead to. Controllers follow: [`Opening::go_on`].
    pub(crate) fn start(spec: &Spec, stores: &Stores) -> Result<Self, AssemblyError> {
        let (sender, receiver) = channel();
        let mut opening =
            Self { sender, receiver, in_flight: 0, waiting: spec.controllers.clone(), refused: HashMap::new() };
        let tops = spec.controllers.iter().map(|controller| &controller.store);
        let mut seen = HashSet::new();
        for top in tops.chain(spec.devices.iter().map(|device| &device.store)) {
            let Some(bottom) = stores.bottom(top).filter(|bottom| is_file(bottom) && seen.insert(&bottom.name)) else {
                continue;
            };
            let (name, bottom) = (bottom.name.clone(), bottom.clone());
            opening.spawn(&name.clone(), move || Opened::Store(name, stores::file_or_host_file(&bottom)))?;
        }
        Ok(opening)
    }

    /// Begins with the controllers whose stores are open by now, and refuses those whose stores were refused.
    ///
    /// # Errors
    /// The first that is the specification's fault. Its controller is refused.
    pub(crate) fn go_on(&mut self, stores: &mut Stores, controllers: &Controllers) -> Result<(), AssemblyError> {
        let mut first = Ok(());
        // A controller may wait for another one: until there is nothing new.
        loop {
            let before = self.waiting.len();
            for spec in std::mem::take(&mut self.waiting) {
                match waits_for(&spec.store, stores, controllers) {
                    Some(subject) => match self.refusal(&subject, controllers) {
                        Some(reason) => controllers.refuse(&spec.name, reason),
                        None => self.waiting.push(spec),
                    },
                    None => {
                        if let Err(error) = self.begin(&spec, stores, controllers) {
                            controllers.refuse(&spec.name, error.to_string());
                            if !error.is_of_a_store() {
                                first = first.and(Err(error));
                            }
                        }
                    }
                }
            }
            if self.waiting.len() == before {
                break;
            }
        }
        if self.in_flight == 0 {
            // Each waits for another of them.
            for spec in std::mem::take(&mut self.waiting) {
                let error = AssemblyError::Cycle { name: spec.store };
                controllers.refuse(&spec.name, error.to_string());
                first = first.and(Err(error));
            }
        }
        first
    }

    fn begin(
        &mut self,
        spec: &ControllerSpec,
        stores: &mut Stores,
        controllers: &Controllers,
    ) -> Result<(), AssemblyError> {
        let store = stores.open(&spec.store, &format!("controller \"{}\"", spec.name), controllers)?;
        let bottom = stores.bottom(&spec.store).cloned();
        let (name, spec) = (spec.name.clone(), spec.clone());
        self.spawn(&name.clone(), move || {
            Opened::Controller(name, ControllerHandle::open(spec, store, bottom.as_ref()))
        })
    }

    fn spawn(&mut self, name: &str, open: impl FnOnce() -> Opened + Send + 'static) -> Result<(), AssemblyError> {
        let sender = self.sender.clone();
        let thread = std::thread::Builder::new().name(format!("open-{name}"));
        // After an end of the assembly the receiver is gone.
        thread.spawn(move || drop(sender.send(open()))).map_err(AssemblyError::Threads)?;
        self.in_flight = self.in_flight.saturating_add(1);
        Ok(())
    }

    /// The next that has been opened or refused; `None` if there is nothing more to come, or not until the deadline.
    pub(crate) fn next(&mut self, deadline: Option<Instant>) -> Option<Opened> {
        if self.in_flight == 0 {
            return None;
        }
        let opened = match deadline {
            None => self.receiver.recv().ok(),
            Some(deadline) => self.receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok(),
        };
        if opened.is_some() {
            self.in_flight = self.in_flight.saturating_sub(1);
        }
        opened
    }

    /// Whether everything was opened or refused.
    pub(crate) fn is_done(&self) -> bool {
        self.in_flight == 0
    }

    pub(crate) fn refuse(&mut self, subject: Subject, error: &AssemblyError, controllers: &Controllers) {
        match subject {
            Subject::Store(name) => {
                tracing::error!(store = name, "not opened: {error}");
                self.refused.insert(name, error.to_string());
            }
            Subject::Controller(name) => controllers.refuse(&name, error.to_string()),
        }
    }

    /// Why it will not be opened.
    pub(crate) fn refusal(&self, subject: &Subject, controllers: &Controllers) -> Option<String> {
        match subject {
            Subject::Store(name) => self.refused.get(name).cloned(),
            Subject::Controller(name) => {
                let closed = controllers.closed_one(name)?;
                (closed.state == ControllerState::Refused).then_some(closed.reason)
            }
        }
    }
}

/// What has to be opened before a store can be.
pub(crate) fn waits_for(store: &str, stores: &Stores, controllers: &Controllers) -> Option<Subject> {
    let bottom = stores.bottom(store)?;
    match bottom.kind.controller() {
        Some(name) => controllers.closed_one(name).map(|closed| Subject::Controller(closed.name)),
        None => (is_file(bottom) && !stores.is_open(&bottom.name)).then(|| Subject::Store(bottom.name.clone())),
    }
}

/// Opens one file for a device that is added while the daemon runs. One that does not answer is given up.
pub(crate) fn open_alone(file: StoreSpec) -> Result<Arc<dyn BlockDevice>, AssemblyError> {
    let (sender, receiver) = channel();
    let name = file.name.clone();
    let thread = std::thread::Builder::new().name(format!("open-{name}"));
    // After the patience has ended the receiver is gone, and the file is closed again.
    let open = move || drop(sender.send(stores::file_or_host_file(&file)));
    thread.spawn(open).map_err(AssemblyError::Threads)?;
    receiver.recv_timeout(START_PATIENCE).unwrap_or(Err(AssemblyError::NoAnswer { name }))
}

pub(crate) fn is_file(store: &StoreSpec) -> bool {
    matches!(store.kind, StoreKind::File(_) | StoreKind::HostFile(_))
}
