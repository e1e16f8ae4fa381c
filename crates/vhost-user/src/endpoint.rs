//! A virtio device behind a socket, and its session in the socket service.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sidecore_peer::{ExportFds, FdPlace, ResumeError, ResumeFds, SessionState};
use sidecore_virtio::VirtioDevice;

use crate::backend_channel::BackendChannel;
use crate::codec::Codec;
use crate::message::{MemoryRegion, Message, Request};
use crate::ring::RingSnapshot;
use crate::session::{ProtocolError, Session};
use crate::write_log::LogSnapshot;

/// The time without a message of the front end after which it is notified of a change of the
/// configuration space. QEMU reads the space in reply, and 6.0 to 7.2 do so even while they wait
/// for another request's reply, which they then take for the space.
const QUIET: Duration = Duration::from_millis(200);

/// A virtio device that a socket serves to VMMs, one after the other.
pub struct VirtioEndpoint(pub Arc<dyn VirtioDevice>);

/// A session in a snapshot. None of the guest's requests is in flight.
#[derive(Serialize, Deserialize)]
struct ExportedSession {
    /// The features that the device offered: the guest may rely on all of them.
    offered: u64,
    protocol_features: u64,
    features: Option<u64>,
    status: u8,
    regions: Vec<(MemoryRegion, FdPlace)>,
    rings: Vec<RingSnapshot>,
    backend_channel: Option<FdPlace>,
    /// Absent in snapshots of versions without logs.
    #[serde(default)]
    log: LogSnapshot,
}

impl sidecore_peer::Endpoint for VirtioEndpoint {
    type Session = Session;

    fn span(&self) -> tracing::Span {
        tracing::info_span!("vhost_user", device = self.0.name())
    }

    fn session(&self) -> Session {
        Session::new(Arc::clone(&self.0))
    }
}

impl sidecore_peer::Session for Session {
    type Codec = Codec;
    type Error = ProtocolError;

    /// After the end of the connection a front end may use its rings and its memory for other
    /// purposes.
    const HANGS_UP_LAST: bool = true;

    /// True for all requests but queries: a queue may start or stop, or its call eventfd change.
    fn may_wait(&self, message: &Message) -> bool {
        !matches!(
            message.request,
            Request::GetFeatures
                | Request::GetProtocolFeatures
                | Request::SetProtocolFeatures
                | Request::SetOwner
                | Request::GetQueueNum
                | Request::GetMaxMemSlots
                | Request::GetStatus
                | Request::GetConfig
        )
    }

    fn handle(&mut self, message: Message) -> Result<Option<Message>, ProtocolError> {
        self.handle(message)
    }

    fn disconnect(&mut self) {
        self.stop();
    }

    fn notifies_after(&self) -> Option<Duration> {
        self.owes_config_change().then_some(QUIET)
    }

    fn notify(&mut self) {
        self.send_config_change();
    }

    fn prepare_export(&mut self) -> bool {
        self.pause()
    }

    fn export(&mut self, fds: &mut ExportFds) -> SessionState {
        let regions = std::mem::take(&mut self.regions);
        let state = ExportedSession {
            offered: self.device.features(),
            protocol_features: self.protocol_features,
            features: self.features,
            status: self.status,
            regions: regions
                .into_iter()
                .map(|(region, file)| (region, fds.put(file.into_inner())))
                .collect(),
            rings: self.rings.iter_mut().map(|ring| ring.export(fds)).collect(),
            backend_channel: self
                .backend_channel
                .take()
                .map(|channel| fds.put(channel.into_inner())),
            log: self.log.export(fds),
        };
        self.forget();
        sidecore_peer::session_state(&state)
    }

    /// Resumes the session. The device has to offer the same features as before: otherwise the
    /// guest would continue with another device. The guest is notified of a changed configuration
    /// space, such as of a larger disk.
    fn resume_from(&mut self, state: SessionState, fds: &mut ResumeFds) -> Result<(), ResumeError> {
        let state: ExportedSession = serde_json::from_value(Value::Object(state))?;
        if state.offered != self.device.features() || state.rings.len() != self.rings.len() {
            return Err(ResumeError::Session(
                "the device has other features or another number of queues".into(),
            ));
        }
        self.protocol_features = state.protocol_features;
        self.features = state.features;
        self.status = state.status;
        if let Some(channel) = state.backend_channel {
            self.backend_channel = BackendChannel::new(fds.take(channel)?);
        }
        self.log.resume(state.log, fds)?;
        for (ring, state) in self.rings.iter_mut().zip(state.rings) {
            ring.resume(state, fds)?;
        }
        let regions = state.regions.into_iter().map(|(region, file)| Ok((region, fds.take(file)?)));
        let regions = regions.collect::<Result<Vec<_>, ResumeError>>()?;
        self.restart(regions).map_err(|error| ResumeError::Session(Box::new(error)))
    }
}

#[cfg(test)]
mod tests;
