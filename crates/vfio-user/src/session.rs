//! The server's side of one connection, as a state machine.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;

use sidecore_memory::GuestMemory;
use sidecore_nvme::{Done, HandedOver, PciFunction};
use sidecore_peer::{ExportFds, ResumeError, ResumeFds};

use crate::body::Body;
use crate::data::Data;
use crate::descriptors::Descriptors;
use crate::dma::{DmaTable, MAX_MAPS, MapState, PAGE_BYTES};
use crate::endpoint::not_resumed;
use crate::message::{MAX_FDS, MAX_TRANSFER_BYTES, Message, RegionAccess, Version};
use crate::refusal::Refusal;
use crate::{interrupts, regions};
use sidecore_spec_nvme::vfio_user::Command;

/// The highest supported version is 0.1.
const MAJOR: u16 = 0;
const MINOR: u16 = 1;
/// A session logs this many refusals as warnings, so that a client cannot fill the disk.
const WARNINGS: u32 = 16;

/// The reason to close a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A reply came, but this server sends no commands.
    #[error("a reply to {command}, but this server sends no commands")]
    UnexpectedReply {
        /// The command in the reply's header.
        command: Command,
    },
    /// A command came before VERSION.
    #[error("{command} before VERSION")]
    NotNegotiated {
        /// The command in the header.
        command: Command,
    },
    /// The client's major version is not supported.
    #[error("version {major}.{minor} is not supported, only major version 0")]
    Version {
        /// The client's major version.
        major: u16,
        /// The client's minor version.
        minor: u16,
    },
    /// A command came after the end of the session.
    #[error("{command} out of turn")]
    OutOfTurn {
        /// The command in the header.
        command: Command,
    },
}

/// The phase of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// VERSION has not come yet.
    New,
    Serving,
    /// The client is gone, and the function is free.
    Ended,
}

/// The payload and the descriptors of a reply.
type Reply = (Body, Vec<OwnedFd>);

/// The state of one connection to a VMM: the version, the DMA maps, and the hand-over.
///
/// The session has no socket: messages go in, replies come out, in their order. Changes of memory,
/// and resets, wait for the function, until it uses the old memory no longer. A command that fails
/// gets an errno, or no reply if the client wants none; the connection stays open.
///
/// DEVICE_RESET resets the function and keeps the client's memory and eventfds: QEMU sends neither
/// again.
pub struct Session {
    function: Arc<dyn PciFunction>,
    phase: Phase,
    dma: DmaTable,
    refused: u32,
    /// The function's state after a hand-over, until the export takes it.
    handed_over: Option<Box<HandedOver>>,
}

impl Session {
    /// Makes a session that waits for VERSION.
    #[must_use]
    pub fn new(function: Arc<dyn PciFunction>) -> Self {
        Self { function, phase: Phase::New, dma: DmaTable::new(), refused: 0, handed_over: None }
    }

    /// Serves one command. Returns the reply, if the client wants one.
    ///
    /// # Errors
    /// The caller has to close the connection and end the session.
    pub fn handle(&mut self, message: Message) -> Result<Option<Message>, ProtocolError> {
        let Message { id, command, flags, body, fds, .. } = message;
        let fds = Descriptors::new(fds);
        if flags.reply {
            return Err(ProtocolError::UnexpectedReply { command });
        }
        let outcome = match self.phase {
            Phase::New => self.negotiate(command, body, &fds)?,
            Phase::Serving => self.serve(command, body, fds),
            Phase::Ended => return Err(ProtocolError::OutOfTurn { command }),
        };
        let reply = match outcome {
            Ok((body, fds)) => Message::reply(id, command, body, fds),
            Err(refusal) => self.refuse(id, command, &refusal),
        };
        Ok((!flags.no_reply).then_some(reply))
    }

    /// Makes the function complete its accepted commands and accept no more. False if the function
    /// cannot be handed over.
    pub(crate) fn hand_over(&mut self) -> bool {
        let (reply, replied) = channel();
        self.function.hand_over(Box::new(move |function| {
            let _ = reply.send(function);
        }));
        self.handed_over = replied.recv().ok().flatten().map(Box::new);
        self.handed_over.is_some()
    }

    /// Takes the function's state, if the function was handed over.
    pub(crate) fn handed_over(&mut self) -> Option<HandedOver> {
        self.handed_over.take().map(|function| *function)
    }

    /// Exports the session's state, after the function was handed over. Ends the session.
    pub(crate) fn export_maps(&mut self, fds: &mut ExportFds) -> (bool, Vec<MapState>) {
        let is_serving = self.phase == Phase::Serving;
        self.phase = Phase::Ended;
        (is_serving, self.dma.export(fds))
    }

    /// Resumes the session and the function of another process.
    ///
    /// # Errors
    /// See [`ResumeError`]. The caller has to end the session then, which resets the function.
    pub(crate) fn resume_function(
        &mut self,
        is_serving: bool,
        maps: &[MapState],
        from: HandedOver,
        fds: &mut ResumeFds,
    ) -> Result<(), ResumeError> {
        // From here on the function has a client, so that `end` resets it also after an error.
        self.phase = Phase::Serving;
        self.dma = DmaTable::resume(maps, fds)?;
        self.function.take_over(from, self.dma.memory().clone()).map_err(not_resumed)?;
        if !is_serving {
            self.phase = Phase::New;
        }
        Ok(())
    }

    /// Ends the session: closes all eventfds, resets the function, and then takes the client's
    /// memory from it. The function is free for another client afterwards.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.phase, Phase::Ended) != Phase::Serving {
            return;
        }
        let vectors = 0..self.function.vectors().into();
        if let Err(error) = interrupts::release(&*self.function, vectors) {
            tracing::error!(%error, "a vector keeps its eventfd");
        }
        self.wait(|function, done| function.reset(done));
        self.dma.unmap_all();
        self.wait(|function, done| function.set_memory(GuestMemory::empty(), done));
    }

    /// Calls the function, and waits until the function has called back.
    fn wait(&self, call: impl FnOnce(&dyn PciFunction, Done)) {
        let (done, over) = channel::<()>();
        call(&*self.function, Done::new(move || drop(done)));
        // The callback's drop closes the channel; no message is ever sent.
        let _ = over.recv();
    }

    fn refuse(&mut self, id: u16, command: Command, refusal: &Refusal) -> Message {
        if self.refused < WARNINGS {
            self.refused = self.refused.saturating_add(1);
            tracing::warn!(%command, error = %refusal, "command refused");
        } else {
            tracing::debug!(%command, error = %refusal, "command refused");
        }
        Message::refusal(id, command, refusal.errno())
    }

    /// Negotiates VERSION, which has to be the first command. The client's capabilities are
    /// ignored: this server sends no commands, and one descriptor per reply, which every client
    /// accepts.
    fn negotiate(
        &mut self,
        command: Command,
        body: Body,
        fds: &Descriptors,
    ) -> Result<Result<Reply, Refusal>, ProtocolError> {
        let (Command::Version, body) = (command, body) else {
            return Err(ProtocolError::NotNegotiated { command });
        };
        let Body::Version(Version { major, minor, data }) = body else {
            return Ok(Err(wrong_body(&body)));
        };
        if fds.count() > 0 {
            return Ok(Err(Refusal::FdCount { count: fds.count() }));
        }
        if data.last().is_some_and(|last| *last != 0) {
            return Ok(Err(Refusal::VersionData));
        }
        if major != MAJOR {
            return Err(ProtocolError::Version { major, minor });
        }
        if let Err(error) = self.function.connect() {
            return Ok(Err(Refusal::Connect(error)));
        }
        self.phase = Phase::Serving;
        Ok(Ok((Body::Version(our_version(minor)), Vec::new())))
    }

    fn serve(&mut self, command: Command, body: Body, fds: Descriptors) -> Result<Reply, Refusal> {
        let most_fds = match command {
            // SPDK sends the file with both. The file of an unmap is unused, and closed like every
            // other.
            Command::DmaMap | Command::DmaUnmap => 1,
            Command::DeviceSetIrqs => MAX_FDS,
            _ => 0,
        };
        if fds.count() > most_fds {
            return Err(Refusal::FdCount { count: fds.count() });
        }
        let function = &*self.function;
        let reply = match (command, body) {
            (Command::Version, _) => return Err(Refusal::Settled),
            (Command::DmaMap, Body::DmaMap(map)) => {
                let memory = self.dma.map(&map, fds.into_file())?;
                self.change_memory(memory);
                Body::Empty
            }
            (Command::DmaUnmap, Body::DmaUnmap(unmap)) => {
                let memory = self.dma.unmap(&unmap)?;
                self.change_memory(memory);
                Body::DmaUnmap(unmap)
            }
            (Command::DeviceReset, Body::Empty) => {
                self.wait(|function, done| function.reset(done));
                Body::Empty
            }
            (Command::DeviceGetRegionInfo, Body::RegionInfo(info)) => {
                let (info, file) = regions::region_info(function, &info)?;
                return Ok((Body::RegionInfo(info), file.into_iter().collect()));
            }
            (Command::DeviceGetInfo, Body::DeviceInfo(info)) => {
                Body::DeviceInfo(regions::device_info(&info)?)
            }
            (Command::DeviceGetIrqInfo, Body::IrqInfo(info)) => {
                Body::IrqInfo(interrupts::info(function, &info)?)
            }
            (Command::DeviceSetIrqs, Body::IrqSet(set)) => {
                interrupts::set(function, &set, fds.into_events()?)?;
                Body::Empty
            }
            (Command::RegionRead, Body::RegionAccess(access)) => read(function, access)?,
            (Command::RegionWrite, Body::RegionAccess(access)) => write(function, access)?,
            (_, Body::Other(_)) => return Err(Refusal::NotOffered),
            (_, body) => return Err(wrong_body(&body)),
        };
        Ok((reply, Vec::new()))
    }

    /// Changes the function's memory. When this returns, the function uses the old memory no
    /// longer: memory that the client unmapped is out of reach. The kernel may unmap and free it
    /// later (the reaper of `sidecore_memory`).
    fn change_memory(&self, memory: Option<GuestMemory>) {
        if let Some(memory) = memory {
            self.wait(|function, done| function.set_memory(memory, done));
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { function, phase, dma, .. } = self;
        let mut debug = formatter.debug_struct("Session");
        debug
            .field("function", &function.name())
            .field("phase", phase)
            .field("dma", dma)
            .finish_non_exhaustive()
    }
}

/// The smaller minor version, and this server's limits. QEMU's buffer is no larger than the command
/// that it has sent, about 190 bytes.
fn our_version(minor: u16) -> Version {
    let mut data = format!(
        "{{\"capabilities\":{{\"max_msg_fds\":{MAX_FDS},\
         \"max_data_xfer_size\":{MAX_TRANSFER_BYTES},\"max_dma_maps\":{MAX_MAPS},\
         \"pgsizes\":{PAGE_BYTES}}}}}"
    )
    .into_bytes();
    data.push(0);
    Version { major: MAJOR, minor: minor.min(MINOR), data }
}

fn wrong_body(body: &Body) -> Refusal {
    match body {
        Body::Malformed(len_bytes) => Refusal::Malformed { len_bytes: *len_bytes },
        _ => Refusal::UnexpectedBody,
    }
}

/// Returns the size of an access that is within the limit and ends within 64 bits.
fn access_bytes(access: &RegionAccess) -> Result<usize, Refusal> {
    let bad_range = Refusal::BadRange { start: access.offset_bytes, count: access.count.into() };
    let fits = access.offset_bytes.checked_add(access.count.into()).is_some();
    usize::try_from(access.count)
        .ok()
        .filter(|count| fits && *count <= MAX_TRANSFER_BYTES)
        .ok_or(bad_range)
}

fn read(function: &dyn PciFunction, mut access: RegionAccess) -> Result<Body, Refusal> {
    let region = regions::region(access.region)?;
    access.data = Data::zeros(access_bytes(&access)?);
    if access.count > 0 {
        function.read(region, access.offset_bytes, access.data.as_mut_slice())?;
    }
    Ok(Body::RegionAccess(access))
}

fn write(function: &dyn PciFunction, mut access: RegionAccess) -> Result<Body, Refusal> {
    let region = regions::region(access.region)?;
    access_bytes(&access)?;
    if access.count > 0 {
        function.write(region, access.offset_bytes, access.data.as_slice())?;
    }
    access.data = Data::empty();
    Ok(Body::RegionAccess(access))
}
