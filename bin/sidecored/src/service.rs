//! The service manager around the daemon, if there is one: systemd, or `sidecore keep`.

use std::io;
use std::os::fd::AsFd as _;
use std::time::Duration;

use sidecore_assembly::LeftDevice;
use sidecore_linux::{KeptDescriptor, ServiceManager, take_kept};
use sidecore_socket::{close_aside, parcel};

/// What a device's descriptor is called: this, and the device's name.
const PREFIX: &str = "nvme.";

/// How long the manager may take to deal with what it was sent last.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a service manager gave this process, and is told by it. Without one, nothing is given, and nobody is told.
pub struct Service {
    manager: Option<ServiceManager>,
    kept: Vec<KeptDescriptor>,
    /// What the manager still has copies of.
    names: Vec<String>,
}

impl Service {
    /// Looks at the environment. To be called before anything opens files: see [`take_kept`].
    ///
    /// A daemon whose environment makes no sense serves all the same: guests that it could have kept are lost already.
    pub fn find() -> Self {
        let manager = ServiceManager::from_environment().unwrap_or_else(|error| {
            tracing::warn!("no service manager is told anything: {error}");
            None
        });
        let kept = take_kept().unwrap_or_else(|error| {
            tracing::warn!("nothing is taken over from an earlier daemon: {error}");
            Vec::new()
        });
        let names = kept.iter().map(|kept| kept.name.clone()).collect();
        Self { manager, kept, names }
    }

    pub fn ready(&self) {
        self.tell("ready", ServiceManager::ready);
    }

    pub fn stopping(&self) {
        self.tell("stopping", ServiceManager::stopping);
    }

    /// Whether there is somebody who may keep something.
    pub const fn keeps(&self) -> bool {
        self.manager.is_some()
    }

    /// Whether an earlier daemon has left anything that was not taken yet.
    pub const fn has_left(&self) -> bool {
        !self.kept.is_empty()
    }

    /// The devices that an earlier daemon left: once. Nobody else has them from then on.
    pub fn take_left(&mut self) -> Vec<LeftDevice> {
        let device = |kept: KeptDescriptor| {
            let Some(name) = kept.name.strip_prefix(PREFIX) else {
                tracing::warn!("nothing takes {:?} over, which the service manager kept", kept.name);
                return None;
            };
            match parcel::unpack(&kept.fd) {
                Ok((state, fds)) => Some(LeftDevice { name: name.to_owned(), state, fds }),
                Err(error) => {
                    tracing::error!(device = name, "what an earlier daemon left cannot be read: {error}");
                    None
                }
            }
        };
        self.kept.drain(..).filter_map(device).collect()
    }

    /// Has the manager close its copies of what was kept: the next daemon is not to find it again.
    pub fn forget_kept(&mut self) {
        for name in self.names.drain(..) {
            if let Some(manager) = &self.manager
                && let Err(error) = manager.forget(&name)
            {
                tracing::warn!("the service manager goes on keeping {name:?}: {error}");
            }
        }
    }

    /// Has the manager keep devices for the next daemon.
    pub fn leave(&self, left: Vec<LeftDevice>) {
        let Some(manager) = &self.manager else { return };
        for LeftDevice { name, state, fds } in left {
            let kept = parcel::pack(&state, fds).and_then(|parcel| {
                let stored = manager.store(&format!("{PREFIX}{name}"), parcel.as_fd());
                // Perhaps nobody else has it: to close it may take as long as the VMM likes.
                close_aside(parcel);
                stored
            });
            match kept {
                Ok(()) => tracing::info!(device = name, "left to the next daemon"),
                Err(error) => tracing::error!(device = name, "its guest loses it, it cannot be kept: {error}"),
            }
        }
        // It may know us no longer when we have ended, and then not whose messages these are.
        self.tell("all", |manager| manager.barrier(PATIENCE));
    }

    fn tell(&self, what: &str, tell: impl FnOnce(&ServiceManager) -> io::Result<()>) {
        if let Some(manager) = &self.manager
            && let Err(error) = tell(manager)
        {
            tracing::warn!("cannot tell the service manager `{what}`: {error}");
        }
    }
}
