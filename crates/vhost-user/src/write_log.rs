//! The front end's log of the pages that the device writes, while it migrates its guest
//! (specification, "Migration").

use std::io;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use sidecore_memory::{DirtyLog, GuestMemory, MemoryError, MemoryFile};
use sidecore_peer::{ExportFds, FdPlace, ResumeError, ResumeFds};
use sidecore_spec_virtio::vhost_user::LOG_ALL;
use sidecore_virtio::QueueLog;

use crate::message::Log;

/// The settings of SET_LOG_BASE and SET_LOG_FD.
#[derive(Default)]
pub(crate) struct WriteLog {
    base: Option<Base>,
    /// Notifies the front end that pages were marked. QEMU sends none.
    event: Option<OwnedFd>,
}

/// A mapped log.
pub(crate) struct Base {
    pages: DirtyLog,
    /// The place of the log in its file, and the file, for the next process.
    place: Log,
    file: MemoryFile,
}

/// The log of a session in a snapshot.
#[derive(Serialize, Deserialize, Default)]
pub(crate) struct LogSnapshot {
    base: Option<(Log, FdPlace)>,
    event: Option<FdPlace>,
}

impl Base {
    /// The number of pages that have a bit in the log, if it lacks pages of `memory`.
    pub(crate) fn is_too_small_for(&self, memory: &GuestMemory) -> Option<u64> {
        (!self.pages.covers(memory)).then(|| self.pages.page_count())
    }
}

impl WriteLog {
    /// Whether there is a log.
    pub(crate) fn is_set(&self) -> bool {
        self.base.is_some()
    }

    /// Maps the log of SET_LOG_BASE.
    pub(crate) fn map(place: Log, file: OwnedFd) -> Result<Base, MemoryError> {
        let kept = MemoryFile::new(file.try_clone().map_err(MemoryError::Map)?);
        let pages = DirtyLog::map(file, place.file_offset_bytes, place.len_bytes)?;
        Ok(Base { pages, place, file: kept })
    }

    /// Replaces the log.
    pub(crate) fn set_base(&mut self, base: Base) {
        self.base = Some(base);
    }

    pub(crate) fn set_event(&mut self, event: Option<OwnedFd>) {
        self.event = event;
    }

    /// The log, if there is one.
    pub(crate) fn base(&self) -> Option<&Base> {
        self.base.as_ref()
    }

    /// Forgets the log: the front end sends another one before it logs again.
    pub(crate) fn clear(&mut self) {
        self.base = None;
    }

    /// The log for a queue under these features.
    pub(crate) fn for_queue(&self, features: u64) -> io::Result<Option<QueueLog>> {
        let Some(Base { pages, .. }) = self.base.as_ref().filter(|_| features & LOG_ALL != 0)
        else {
            return Ok(None);
        };
        let event = self.event.as_ref().map(OwnedFd::try_clone).transpose()?;
        Ok(Some(QueueLog { pages: pages.clone(), event }))
    }

    pub(crate) fn export(&mut self, fds: &mut ExportFds) -> LogSnapshot {
        LogSnapshot {
            base: self.base.take().map(|base| (base.place, fds.put(base.file.into_inner()))),
            event: self.event.take().map(|event| fds.put(event)),
        }
    }

    pub(crate) fn resume(
        &mut self,
        state: LogSnapshot,
        fds: &mut ResumeFds,
    ) -> Result<(), ResumeError> {
        if let Some((place, file)) = state.base {
            let base = Self::map(place, fds.take(file)?)
                .map_err(|error| ResumeError::Session(Box::new(error)))?;
            self.set_base(base);
        }
        self.event = state.event.map(|event| fds.take(event)).transpose()?;
        Ok(())
    }
}
