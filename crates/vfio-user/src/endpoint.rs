//! A PCI function behind a socket, and its session in the socket service.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sidecore_nvme::{FunctionState, HandedOver, PciFunction, TakeOverError};
use sidecore_peer::{ExportFds, FdPlace, ResumeError, ResumeFds, SessionState, Snapshot};

use crate::codec::Codec;
use crate::dma::MapState;
use crate::message::Message;
use crate::session::{ProtocolError, Session};
use sidecore_spec_nvme::vfio_user::Command;

/// A PCI function that a socket serves to its clients, one after the other.
pub struct PciEndpoint(pub Arc<dyn PciFunction>);

/// A session and its function, in a snapshot.
#[derive(Serialize, Deserialize)]
struct ExportedSession {
    session: Negotiated,
    function: FunctionState,
    /// The eventfds, by vector.
    events: Vec<(u16, FdPlace)>,
    /// The file of the doorbells.
    doorbells: Option<FdPlace>,
}

/// The state of a session.
#[derive(Serialize, Deserialize)]
struct Negotiated {
    /// Whether the version is negotiated.
    is_serving: bool,
    maps: Vec<MapState>,
}

impl sidecore_peer::Endpoint for PciEndpoint {
    type Session = Session;

    fn span(&self) -> tracing::Span {
        tracing::info_span!("vfio_user", function = self.0.name())
    }

    fn session(&self) -> Session {
        Session::new(Arc::clone(&self.0))
    }
}

impl sidecore_peer::Session for Session {
    type Codec = Codec;
    type Error = ProtocolError;

    /// True for commands that map and unmap memory, or that assign and close eventfds. Accesses to
    /// registers never wait, and must not: an access may be a doorbell.
    fn may_wait(&self, message: &Message) -> bool {
        matches!(
            message.command,
            Command::Version
                | Command::DmaMap
                | Command::DmaUnmap
                | Command::DeviceSetIrqs
                | Command::DeviceReset
        )
    }

    fn handle(&mut self, message: Message) -> Result<Option<Message>, ProtocolError> {
        self.handle(message)
    }

    fn disconnect(&mut self) {
        self.end();
    }

    fn prepare_export(&mut self) -> bool {
        self.hand_over()
    }

    fn export(&mut self, fds: &mut ExportFds) -> SessionState {
        let Some(HandedOver { state: function, events, doorbells }) = self.handed_over() else {
            return SessionState::new();
        };
        let (is_serving, maps) = self.export_maps(fds);
        let events = events.into_iter().map(|(vector, event)| (vector, fds.put(event))).collect();
        let doorbells = Some(fds.put(doorbells));
        let session = Negotiated { is_serving, maps };
        sidecore_peer::session_state(&ExportedSession { session, function, events, doorbells })
    }

    fn resume_from(&mut self, state: SessionState, fds: &mut ResumeFds) -> Result<(), ResumeError> {
        let ExportedSession {
            session: Negotiated { is_serving, maps },
            function,
            events,
            doorbells,
        } = serde_json::from_value(Value::Object(state))?;
        let events = events.iter().map(|(vector, place)| Ok((*vector, fds.take(*place)?)));
        let events = events.collect::<Result<Vec<_>, ResumeError>>()?;
        let doorbells = fds.take(doorbells.ok_or(ResumeError::Descriptor)?)?;
        let from = HandedOver { state: function, events, doorbells };
        self.resume_function(is_serving, &maps, from, fds)
    }
}

pub(crate) fn not_resumed(error: TakeOverError) -> ResumeError {
    ResumeError::Session(Box::new(error))
}

/// Converts a snapshot of an older process, whose state does not name the doorbells: they are the
/// last of its descriptors.
#[must_use]
pub fn with_doorbells_last(mut snapshot: Snapshot) -> Snapshot {
    let last = snapshot.fds.len().checked_sub(1);
    snapshot.state.session.insert("doorbells".to_owned(), last.into());
    snapshot
}
