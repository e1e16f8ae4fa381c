//! The trust of an IOhost in its clients, and that of a client in its IOhost.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_trust::{
    Admission, ClientName, ClientTrust, HostTrust, Invitation, KeyDirectory, KeyError, Pending,
    PrivateKey, SessionSeal,
};
use sidecore_vrio::handshake::HostHandshake;
use sidecore_vrio::wire::{Hello, Welcome};

use crate::spec::{IohostSpec, LinkKind};

/// The trust in the clients of a link, shared by its queues. A handshake locks it, and no frame
/// of a session does.
#[derive(Clone)]
pub(super) struct SharedTrust(Arc<Mutex<HostTrust>>);

impl SharedTrust {
    pub(super) fn new(key: Option<PrivateKey>) -> Self {
        Self(Arc::new(Mutex::new(HostTrust::new(key, Vec::new()))))
    }

    /// Admits these clients from now on, and no others.
    pub(super) fn admit(&self, clients: Vec<(ClientName, Admission)>) {
        self.lock().admit(clients);
    }

    /// Replaces this host's key. The clients that are admitted stay so.
    pub(super) fn set_key(&self, key: PrivateKey) {
        self.lock().set_key(key);
    }

    fn lock(&self) -> MutexGuard<'_, HostTrust> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostHandshake for SharedTrust {
    type Seal = SessionSeal;
    type Pending = Pending;

    fn hello(&mut self, code: u8, message: &[u8]) -> Option<(Hello, Pending)> {
        self.lock().hello(code, message)
    }

    fn welcome(
        &mut self,
        pending: Pending,
        fields: &Welcome,
        message: &mut [u8],
    ) -> Option<(usize, SessionSeal)> {
        self.lock().welcome(pending, fields, message)
    }
}

/// The proof that a client has to give; `None` if it was not invited.
pub(super) fn admission(
    keys: &KeyDirectory,
    client: ClientName,
    encrypts: bool,
) -> Result<Option<Admission>, KeyError> {
    if !encrypts {
        return Ok(Some(Admission::Name));
    }
    let invited = keys.clients()?.invited.into_iter().find(|invited| invited.name == client);
    Ok(invited.map(|invited| Admission::Key(invited.key)))
}

/// The trust in an IOhost at the other end of a link of this type.
pub(super) fn of_iohost(spec: &IohostSpec, link: &LinkKind) -> Result<ClientTrust, String> {
    let path = match &spec.invitation {
        _ if !spec.encrypts(link) => return Ok(ClientTrust::off()),
        Some(path) => path,
        None => return Err("it needs an `invitation`, or `encryption = \"off\"`".to_owned()),
    };
    let invitation = Invitation::read(path).map_err(|error| error.to_string())?;
    if invitation.client.as_str() != spec.client {
        return Err(format!(
            "{} is the invitation of client \"{}\", not of \"{}\"",
            path.display(),
            invitation.client,
            spec.client
        ));
    }
    Ok(ClientTrust::invited(&invitation))
}
