//! A virtio device behind a socket, and its session in the socket service.

use std::sync::Arc;
use std::time::Duration;

use sidecore_peer::{ResumeError, ResumeFds, SessionState};
use sidecore_virtio::VirtioDevice;

use crate::codec::Codec;
use crate::message::{Message, Request};
use crate::session::{ProtocolError, Session};

/// How long the front end must have sent nothing before it is notified of a change of the configuration
/// space. QEMU answers by reading the space, and 6.0 to 7.2 do so also in the middle of waiting for
/// another request's reply, which they then take for the answer.
const QUIET: Duration = Duration::from_millis(200);

/// A virtio device that VMMs are served on a socket, one after the other.
pub struct VirtioEndpoint(pub Arc<dyn VirtioDevice>);

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

    /// A front end may use its rings and its memory otherwise when it is hung up on.
    const HANGS_UP_LAST: bool = true;

    /// All but questions: a queue may start or stop, or its call eventfd change.
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

    fn resume_from(&mut self, _: SessionState, _: &mut ResumeFds) -> Result<(), ResumeError> {
        Err(ResumeError::Session("a virtio device is not handed over".into()))
    }
}

#[cfg(test)]
mod tests;
