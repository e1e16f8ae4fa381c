//! The socket of a device.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use sidecore_peer::{Access, Disconnect, Endpoint, Listening, Service, Snapshot, Socket};

use super::LastStart;
use crate::AssemblyError;
use crate::left::LeftDevice;

/// The socket that a device gets.
#[derive(Debug)]
pub(crate) enum Place {
    /// It is made, with these rights.
    New(Access),
    /// It has listened since before its store was open.
    Listening(Listening),
}

/// An endpoint whose device is told of a client that is gone.
pub(super) struct Watched<E, F> {
    pub(super) endpoint: E,
    /// Called by a thread that must not wait.
    pub(super) gone: F,
}

impl<E: Endpoint, F: Fn() + Send + 'static> Endpoint for Watched<E, F> {
    type Session = E::Session;

    fn span(&self) -> tracing::Span {
        self.endpoint.span()
    }

    fn session(&self) -> E::Session {
        self.endpoint.session()
    }

    fn gone(&self) {
        (self.gone)();
    }
}

/// The socket of a device: `None` before the device is served and after it has stopped. Locked
/// while the device stops.
#[derive(Default)]
pub(super) struct DeviceSocket(Mutex<Option<Socket>>);

impl DeviceSocket {
    fn lock(&self) -> MutexGuard<'_, Option<Socket>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`FrontEnd::serve`](super::FrontEnd::serve).
    pub(super) fn serve(
        &self,
        name: &str,
        service: &Service,
        endpoint: impl Endpoint,
        (path, place): (&Path, Place),
        left: Option<LeftDevice>,
    ) -> Result<(), AssemblyError> {
        let left = left.and_then(LeftDevice::unpack_or_disconnect);
        let served = match place {
            Place::New(access) => service.serve(path, access, endpoint, left),
            Place::Listening(listening) => service.serve_on(listening, endpoint, left),
        };
        *self.lock() =
            Some(served.map_err(|error| AssemblyError::Server { name: name.to_owned(), error })?);
        Ok(())
    }

    /// See [`FrontEnd::stop`](super::FrontEnd::stop).
    pub(super) fn stop(&self) -> bool {
        self.lock().take().map(drop).is_some()
    }

    /// Stops the device and exports its client, if the protocol allows that.
    pub(super) fn export(&self) -> Option<Snapshot> {
        self.lock().take()?.export()
    }

    /// Asks the socket; `None` if there is none, or while the device stops.
    pub(super) fn ask<T>(&self, question: impl FnOnce(&Socket) -> T) -> Option<T> {
        let socket = match self.0.try_lock() {
            Ok(socket) => socket,
            Err(TryLockError::Poisoned(socket)) => socket.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        socket.as_ref().map(question)
    }

    /// See [`FrontEnd::disconnect`](super::FrontEnd::disconnect).
    pub(super) fn last_disconnect(&self, last_start: &LastStart) -> Option<Disconnect> {
        let last = self.ask(Socket::last_disconnect)??;
        last_start.is_before(&last).then_some(last)
    }
}
