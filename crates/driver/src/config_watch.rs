//! Where a device says that its configuration space has changed.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use sidecore_spec_virtio::vhost_user::{BACKEND_CONFIG_CHANGE, FLAGS_VERSION, MessageHeader};

use crate::error::ClientError;
use crate::socket;

/// The message in full: it has no payload.
const CONFIG_CHANGE: MessageHeader =
    MessageHeader { request: BACKEND_CONFIG_CHANGE, flags: FLAGS_VERSION, payload_bytes: 0 };
const MESSAGE: &str = "BACKEND_CONFIG_CHANGE_MSG";

/// The socket on which a device sends requests of its own. The only one is that the configuration
/// is to be read again.
#[derive(Debug)]
pub struct ConfigWatch(UnixStream);

impl ConfigWatch {
    /// The client's end of a pair of sockets, and the end that goes to the device.
    pub(crate) fn pair() -> Result<(Self, UnixStream), ClientError> {
        let pair = UnixStream::pair()
            .map_err(|source| ClientError::Io { what: "making a pair of sockets", source });
        pair.map(|(ours, theirs)| (Self(ours), theirs))
    }

    /// Waits until the device says that its configuration has changed.
    ///
    /// # Errors
    /// [`ClientError::Timeout`]; the device hangs up or says something else.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), ClientError> {
        let set = self.0.set_read_timeout(Some(timeout));
        let mut bytes = [0; MessageHeader::BYTES];
        set.and_then(|()| self.0.read_exact(&mut bytes))
            .map_err(|source| socket::failed(MESSAGE, source))?;
        if bytes != CONFIG_CHANGE.encode() {
            return Err(ClientError::Answer { request: MESSAGE, why: format!("it is {bytes:?}") });
        }
        Ok(())
    }
}

impl AsFd for ConfigWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
