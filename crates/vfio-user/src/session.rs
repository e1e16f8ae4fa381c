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

/// The version that is spoken: 0.1 at most.
const MAJOR: u16 = 0;
const MINOR: u16 = 1;
/// Refusals that a client gets a warning each in the log for; it could fill the disk otherwise.
const WARNINGS: u32 = 16;

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A reply came where a command belongs.
    #[error("a reply to {command}, which was not asked")]
    UnexpectedReply {
        /// What it answers.
        command: Command,
    },
    /// A command came before the version was settled.
    #[error("{command} before VERSION")]
    NotNegotiated {
        /// What was asked.
        command: Command,
    },
    /// The client speaks another version.
    #[error("version {major}.{minor} is not spoken here")]
    Version {
        /// Its major number.
        major: u16,
        /// Its minor number.
        minor: u16,
    },
    /// A command came while another one is being served, or after the end.
    #[error("{command} out of turn")]
    OutOfTurn {
        /// What was asked.
        command: Command,
    },
}

/// The state of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No version yet.
    New,
    Serving,
    /// The client has gone, and the function is free.
    Over,
}

/// The payload and the descriptors of a reply.
type Reply = (Body, Vec<OwnedFd>);

/// The state of one connection to a VMM: the version, what is mapped for DMA, and the one command that is waited for.
///
/// It knows no socket: messages go in, replies come out, in their order. What changes memory, and resets, waits for the
/// function, until nothing uses the memory from before. A command that fails is answered with an errno, or with nothing if
/// the client wants no reply; the connection goes on.
///
/// DEVICE_RESET resets the function and keeps the client's memory and eventfds: QEMU sends neither again.
pub struct Session {
    function: Arc<dyn PciFunction>,
    stage: Stage,
    dma: DmaTable,
    refused: u32,
    /// The function as it was handed over.
    handed_over: Option<Box<HandedOver>>,
}

impl Session {
    /// A session that has negotiated nothing yet.
    #[must_use]
    pub fn new(function: Arc<dyn PciFunction>) -> Self {
        Self { function, stage: Stage::New, dma: DmaTable::new(), refused: 0, handed_over: None }
    }

    /// Serves one command. The reply, if the client wants one.
    ///
    /// # Errors
    /// The connection is to be closed, and the session to be ended.
    pub fn handle(&mut self, message: Message) -> Result<Option<Message>, ProtocolError> {
        let Message { id, command, flags, body, fds, .. } = message;
        let fds = Descriptors::new(fds);
        if flags.reply {
            return Err(ProtocolError::UnexpectedReply { command });
        }
        let outcome = match self.stage {
            Stage::New => self.negotiate(command, body, &fds)?,
            Stage::Serving => self.serve(command, body, fds),
            Stage::Over => return Err(ProtocolError::OutOfTurn { command }),
        };
        let reply = match outcome {
            Ok((body, fds)) => Message::reply(id, command, body, fds),
            Err(refusal) => self.refuse(id, command, &refusal),
        };
        Ok((!flags.no_reply).then_some(reply))
    }

    /// Has the function complete what it has taken, and take nothing more. False if it cannot be handed over.
    pub(crate) fn hand_over(&mut self) -> bool {
        let (reply, replied) = channel();
        self.function.hand_over(Box::new(move |function| {
            let _ = reply.send(function);
        }));
        self.handed_over = replied.recv().ok().flatten().map(Box::new);
        self.handed_over.is_some()
    }

    /// The function, if it was handed over.
    pub(crate) fn handed_over(&mut self) -> Option<HandedOver> {
        self.handed_over.take().map(|function| *function)
    }

    /// Exports what the client has negotiated; the function has been handed over. This session is over
    /// then.
    pub(crate) fn export_maps(&mut self, fds: &mut ExportFds) -> (bool, Vec<MapState>) {
        let is_serving = self.stage == Stage::Serving;
        self.stage = Stage::Over;
        (is_serving, self.dma.export(fds))
    }

    /// Resumes the session and the function of another process.
    ///
    /// # Errors
    /// See [`ResumeError`]. The session is to be ended then, and the function reset with it.
    pub(crate) fn resume_function(
        &mut self,
        is_serving: bool,
        maps: &[MapState],
        from: HandedOver,
        fds: &mut ResumeFds,
    ) -> Result<(), ResumeError> {
        // Whatever happens from here on, the function is used.
        self.stage = Stage::Serving;
        self.dma = DmaTable::resume(maps, fds)?;
        self.function.take_over(from, self.dma.memory().clone()).map_err(not_resumed)?;
        if !is_serving {
            self.stage = Stage::New;
        }
        Ok(())
    }

    /// Ends the session: all eventfds are closed, the function is reset and lets go of the client's memory, one after the
    /// other. The function is free for another client then.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.stage, Stage::Over) != Stage::Serving {
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

    /// Has the function do something that takes time, and waits until it is done.
    fn wait(&self, call: impl FnOnce(&dyn PciFunction, Done)) {
        let (done, over) = channel::<()>();
        call(&*self.function, Done::new(move || drop(done)));
        // Nothing is ever sent.
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

    /// VERSION, which has to be the first. What the client says of itself is of no use to us: we send no command, and one
    /// descriptor at a time, which is the least that it may say.
    fn negotiate(
        &mut self,
        command: Command,
        body: Body,
        fds: &Descriptors,
    ) -> Result<Result<Reply, Refusal>, ProtocolError> {
        let (Command::Version, body) = (command, body) else { return Err(ProtocolError::NotNegotiated { command }) };
        let Body::Version(Version { major, minor, data }) = body else { return Ok(Err(wrong_body(&body))) };
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
        self.stage = Stage::Serving;
        Ok(Ok((Body::Version(our_version(minor)), Vec::new())))
    }

    fn serve(&mut self, command: Command, body: Body, fds: Descriptors) -> Result<Reply, Refusal> {
        let most_fds = match command {
            // SPDK sends the file with both. That of an unmap is of no use, and closed like any other.
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
            (Command::DeviceGetInfo, Body::DeviceInfo(info)) => Body::DeviceInfo(regions::device_info(&info)?),
            (Command::DeviceGetIrqInfo, Body::IrqInfo(info)) => Body::IrqInfo(interrupts::info(function, &info)?),
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

    /// Returns when nothing uses the memory from before: what the client unmaps is out of everybody's reach then. The
    /// kernel may take it out of our address space, and free it, later (the reaper of `sidecore_memory`).
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
        let Self { function, stage, dma, .. } = self;
        let mut debug = formatter.debug_struct("Session");
        debug.field("function", &function.name()).field("stage", stage).field("dma", dma).finish_non_exhaustive()
    }
}

/// The smaller minor version, and our limits. QEMU has room for no more than it has sent, which is about 190 bytes.
fn our_version(minor: u16) -> Version {
    let mut data = format!(
        r#"{{"capabilities":{{"max_msg_fds":{MAX_FDS},"max_data_xfer_size":{MAX_TRANSFER_BYTES},"max_dma_maps":{MAX_MAPS},"pgsizes":{PAGE_BYTES}}}}}"#,
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

/// The size of an access, if one may be so large and ends within 64 bits.
fn access_bytes(access: &RegionAccess) -> Result<usize, Refusal> {
    let bad_range = Refusal::BadRange { start: access.offset_bytes, count: access.count.into() };
    let fits = access.offset_bytes.checked_add(access.count.into()).is_some();
    usize::try_from(access.count).ok().filter(|count| fits && *count <= MAX_TRANSFER_BYTES).ok_or(bad_range)
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
