//! The service manager around the daemon, if there is one: systemd, or `sidecore keep`.

use std::io;
use std::os::fd::AsFd as _;
use std::time::Duration;

use sidecore_assembly::LeftDevice;
use sidecore_linux::{KeptDescriptor, ServiceManager, take_kept};
use sidecore_socket::{close_aside, parcel};

/// The prefix of a descriptor's name, before the device's name.
const PREFIX: &str = "nvme.";

/// The time in which the manager has to handle the last messages.
const PATIENCE: Duration = Duration::from_secs(5);

/// The service manager, and the descriptors that it kept for this process. Without a manager there
/// are no descriptors, and no messages are sent.
pub struct Service {
    manager: Option<ServiceManager>,
    kept: Vec<KeptDescriptor>,
    /// The names of the descriptors of which the manager still has copies.
    names: Vec<String>,
}

impl Service {
    /// Reads the environment. Must be called before any file is opened: see [`take_kept`].
    ///
    /// A daemon whose environment is invalid serves all the same: the guests that it could have
    /// resumed are lost already.
    pub fn find() -> Self {
        let manager = ServiceManager::from_environment().unwrap_or_else(|error| {
            tracing::warn!("the service manager is not notified: {error}");
            None
        });
        let kept = take_kept().unwrap_or_else(|error| {
            tracing::warn!("no device of an earlier daemon is resumed: {error}");
            Vec::new()
        });
        let names = kept.iter().map(|kept| kept.name.clone()).collect();
        Self { manager, kept, names }
    }

    pub fn ready(&self) {
        self.notify("ready", ServiceManager::ready);
    }

    pub fn stopping(&self) {
        self.notify("stopping", ServiceManager::stopping);
    }

    /// Whether a manager can keep descriptors.
    pub const fn keeps(&self) -> bool {
        self.manager.is_some()
    }

    /// Whether there are exported devices of an earlier daemon that were not taken yet.
    pub const fn has_exported(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Takes the devices that an earlier daemon has exported. Taking a device empties its
    /// descriptor: only this process has the device from then on.
    pub fn take_exported(&mut self) -> Vec<LeftDevice> {
        let device = |kept: KeptDescriptor| {
            let Some(name) = kept.name.strip_prefix(PREFIX) else {
                tracing::warn!(
                    "the service manager kept {:?}, which is no device of this daemon",
                    kept.name
                );
                return None;
            };
            match parcel::unpack(&kept.fd) {
                Ok((state, fds)) => Some(LeftDevice { name: name.to_owned(), state, fds }),
                Err(error) => {
                    tracing::error!(
                        device = name,
                        "the state that an earlier daemon exported cannot be read: {error}"
                    );
                    None
                }
            }
        };
        self.kept.drain(..).filter_map(device).collect()
    }

    /// Makes the manager close its copies of the kept descriptors, so that the next daemon does not
    /// get them again.
    pub fn forget_kept(&mut self) {
        for name in self.names.drain(..) {
            if let Some(manager) = &self.manager
                && let Err(error) = manager.forget(&name)
            {
                tracing::warn!("the service manager still keeps {name:?}: {error}");
            }
        }
    }

    /// Exports devices to the manager, for the next daemon.
    pub fn export(&self, devices: Vec<LeftDevice>) {
        let Some(manager) = &self.manager else { return };
        for LeftDevice { name, state, fds } in devices {
            let kept = parcel::pack(&state, fds).and_then(|parcel| {
                let stored = manager.store(&format!("{PREFIX}{name}"), parcel.as_fd());
                // This may be the only copy: closing it may take as long as the VMM likes.
                close_aside(parcel);
                stored
            });
            match kept {
                Ok(()) => tracing::info!(device = name, "exported to the next daemon"),
                Err(error) => {
                    tracing::error!(
                        device = name,
                        "the guest loses the device, whose state is not kept: {error}"
                    )
                }
            }
        }
        // After the end of this process, the manager may no longer know the sender of its messages.
        self.notify("all", |manager| manager.barrier(PATIENCE));
    }

    fn notify(&self, what: &str, notify: impl FnOnce(&ServiceManager) -> io::Result<()>) {
        if let Some(manager) = &self.manager
            && let Err(error) = notify(manager)
        {
            tracing::warn!("cannot notify the service manager `{what}`: {error}");
        }
    }
}
