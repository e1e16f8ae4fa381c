//! The requests that begin, replace and end the log of written pages.

use std::os::fd::OwnedFd;

use sidecore_memory::GuestMemory;
use sidecore_spec_virtio::vhost_user::LOG_ALL;

use super::{ProtocolError, Session, memory_error};
use crate::message::{Log, Request};
use crate::write_log::{Base, WriteLog};

impl Session {
    /// Serves SET_FEATURES while rings run, which may only begin or end the log.
    pub(super) fn switch_log(&mut self, bits: u64) -> Result<(), ProtocolError> {
        if self.features.map(|before| before ^ bits) != Some(LOG_ALL) {
            return Err(ProtocolError::FeaturesWhileRunning);
        }
        if bits & LOG_ALL == 0 {
            self.log.clear();
        } else if !self.log.is_set() {
            return Err(ProtocolError::NoLog);
        }
        self.features = Some(bits);
        self.tell_log()
    }

    /// Has all running rings log their writes as the settings say, and starts those that waited
    /// for the log.
    pub(super) fn tell_log(&mut self) -> Result<(), ProtocolError> {
        let features = self.features.unwrap_or(0);
        for ring in &self.rings {
            ring.set_log(features, &self.log).map_err(ProtocolError::Descriptor)?;
        }
        self.start_all()
    }

    pub(super) fn set_log(&mut self, log: Log, fds: Vec<OwnedFd>) -> Result<(), ProtocolError> {
        let request = Request::SetLogBase;
        // `check_fds` has found exactly one.
        for file in fds {
            let base = WriteLog::map(log, file).map_err(memory_error(request))?;
            check_log(request, Some(&base), &self.memory)?;
            self.log.set_base(base);
        }
        self.tell_log()
    }

    pub(super) fn set_log_event(&mut self, fds: Vec<OwnedFd>) -> Result<(), ProtocolError> {
        self.log.set_event(fds.into_iter().next());
        self.tell_log()
    }
}

/// Refuses a log without a bit for each page of `memory`.
pub(super) fn check_log(
    request: Request,
    log: Option<&Base>,
    memory: &GuestMemory,
) -> Result<(), ProtocolError> {
    match log.and_then(|log| log.is_too_small_for(memory)) {
        None => Ok(()),
        Some(log_pages) => {
            let memory_end = memory.end_address().0;
            Err(ProtocolError::LogTooSmall { request, log_pages, memory_end })
        }
    }
}
