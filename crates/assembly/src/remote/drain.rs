//! Drains a client of this IOhost, before work on its stores; and an IOhost of this host, before it
//! is taken away.

use std::time::{Duration, Instant};

use super::using::DrainRest;
use super::{Remote, known, known_client};
use crate::flush::flush;
use crate::operation::{ErrorKind, OperationError};

/// The time that stores have to end the requests of a client.
const PATIENCE: Duration = Duration::from_secs(60);

/// The time that a drained IOhost without a session has to come back.
const AWAY_PATIENCE: Duration = Duration::from_secs(5);

/// The time between two questions to the sidecores.
const LOOK: Duration = Duration::from_millis(10);

fn failed(error: String) -> OperationError {
    OperationError::new(ErrorKind::Failed, error)
}

impl Remote {
    /// Takes no new requests of a client, waits until its requests have ended that stores have, and
    /// flushes its stores.
    pub(crate) fn drain_client(&self, name: &str) -> Result<(), OperationError> {
        known_client(&mut self.lock().clients, name)?.drain(true).map_err(failed)?;
        tracing::info!(client = name, "draining: its new requests wait");
        let deadline = Instant::now() + PATIENCE;
        let stores = loop {
            // The parts are not locked while the requests end.
            let (executing, stores) = {
                let mut parts = self.lock();
                let client = known_client(&mut parts.clients, name)?;
                (client.executing(), client.written())
            };
            if executing == 0 {
                break stores;
            }
            if Instant::now() >= deadline {
                return Err(failed(format!(
                    "client \"{name}\" waits, but its stores still have {executing} requests after \
                     {} s: drain it again when they answer, or undo",
                    PATIENCE.as_secs()
                )));
            }
            std::thread::sleep(LOOK);
        };
        let unflushed: Vec<String> = stores
            .into_iter()
            .filter(|(name, store)| !flush(name, store.as_ref()))
            .map(|(name, _)| format!("\"{name}\""))
            .collect();
        if !unflushed.is_empty() {
            return Err(failed(format!(
                "client \"{name}\" waits, but its devices {} cannot be flushed: the log says why",
                unflushed.join(", ")
            )));
        }
        tracing::info!(client = name, "drained");
        Ok(())
    }

    /// Takes requests of a client again.
    pub(crate) fn undrain_client(&self, name: &str) -> Result<(), OperationError> {
        let mut parts = self.lock();
        let client = known_client(&mut parts.clients, name)?;
        if !client.is_drained {
            let message = format!("client \"{name}\" is not drained");
            return Err(OperationError::new(ErrorKind::Conflict, message));
        }
        client.drain(false).map_err(failed)?;
        tracing::info!(client = name, "no longer drained");
        Ok(())
    }
    /// Has new requests to an IOhost wait, and waits until all others are answered and the answered
    /// writes are flushed.
    pub(crate) fn drain_iohost(&self, name: &str) -> Result<(), OperationError> {
        known(&mut self.lock().iohosts, "iohost", name)?.drain(true);
        let begun = Instant::now();
        loop {
            // The parts are not locked in between.
            let rest = known(&mut self.lock().iohosts, "iohost", name)?.drain_rest();
            if rest.is_complete() {
                tracing::info!(iohost = name, "drained: it can be taken away");
                return Ok(());
            }
            if let Some(obstacle) = obstacle(&rest, begun.elapsed()) {
                return Err(failed(format!(
                    "new requests to iohost \"{name}\" wait, but it is not drained: {obstacle}; \
                     {} requests have no answer, and {} answered writes are covered by no flush; \
                     drain it again, or undo",
                    rest.unanswered, rest.kept_writes
                )));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Has requests to an IOhost go on.
    pub(crate) fn undrain_iohost(&self, name: &str) -> Result<(), OperationError> {
        let mut parts = self.lock();
        let iohost = known(&mut parts.iohosts, "iohost", name)?;
        if !iohost.is_drained {
            let message = format!("iohost \"{name}\" is not drained");
            return Err(OperationError::new(ErrorKind::Conflict, message));
        }
        iohost.drain(false);
        Ok(())
    }
}

/// The cause for which a drain of an IOhost that has taken so long is given up.
fn obstacle(rest: &DrainRest, elapsed: Duration) -> Option<String> {
    match rest.error {
        Some(error) => Some(format!("its devices cannot be flushed ({error})")),
        None if rest.away > 0 && elapsed >= AWAY_PATIENCE => Some("it does not answer".to_owned()),
        None if elapsed >= PATIENCE => Some(format!("it has taken {} s", PATIENCE.as_secs())),
        None => None,
    }
}
