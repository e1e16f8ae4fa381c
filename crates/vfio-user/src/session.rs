//! The server's side of one connection, as a state machine.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use sidecore_memory::GuestMemory;
use sidecore_nvme::{Done, HandedOver, PciFunction};

use crate::body::Body;
use crate::command::Command;
use crate::data::Data;
use crate::descriptors::Descriptors;
use crate::dma::{DmaTable, MAX_MAPS, PAGE_BYTES};
use crate::handover::{Leaving, Left, ResumeError, SessionState};
use crate::message::{MAX_FDS, MAX_TRANSFER_BYTES, Message, RegionAccess, Version};
use crate::refusal::Refusal;
use crate::ticket::{Ticket, Wake};
use crate::{interrupts, regions};

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

/// What becomes of a command.
#[derive(Debug)]
pub enum Answer {
    /// This is to be sent.
    Reply(Message),
    /// Nothing: the client wants no reply.
    Nothing,
    /// It is known when the session's wake has come and [`Session::resume`] says so. No command is served until then.
    Later,
}

/// How far a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No version yet.
    New,
    Serving,
    /// The client has gone; the function is being reset.
    Resetting,
    /// The function lets go of the client's memory.
    Unmapping,
    Over,
}

/// Whom the reply to a command goes to.
#[derive(Clone, Copy, Debug)]
struct Sender {
    id: u16,
    command: Command,
    no_reply: bool,
}

/// What the session waits for.
#[derive(Debug)]
struct Pending {
    ticket: Ticket,
    /// What is sent when it is done; `None` at the end of a session.
    then: Option<(Sender, Body)>,
}

/// What a command that succeeds leads to.
enum Outcome {
    /// The reply's payload and descriptors.
    Now(Body, Vec<OwnedFd>),
    /// The same, when the function is done.
    When(Ticket, Body),
}

/// The state of one connection to a VMM: the version, what is mapped for DMA, and the one command that is waited for.
///
/// It knows no socket: messages go in, answers come out, and the commands that take time (what changes memory, and
/// resets) are answered [`Answer::Later`]. Commands are served in the order in which they come. A command that fails is
/// answered with an errno, or with nothing if the client wants no reply; the connection goes on.
///
/// DEVICE_RESET resets the function and keeps the client's memory and eventfds: QEMU sends neither again.
pub struct Session {
    function: Arc<dyn PciFunction>,
    wake: Wake,
    stage: Stage,
    dma: DmaTable,
    pending: Option<Pending>,
    refused: u32,
}

impl Session {
    /// A session that has negotiated nothing yet. `wake` is called when a command that was to be answered later can be,
    /// and when a session that was to end has come further.
    #[must_use]
    pub fn new(function: Arc<dyn PciFunction>, wake: Wake) -> Self {
        Self { function, wake, stage: Stage::New, dma: DmaTable::new(), pending: None, refused: 0 }
    }

    /// Serves one command.
    ///
    /// # Errors
    /// The connection is to be closed, and the session to be ended.
    pub fn handle(&mut self, message: Message) -> Result<Answer, ProtocolError> {
        let Message { id, command, flags, body, fds, .. } = message;
        let fds = Descriptors::new(fds);
        if flags.reply {
            return Err(ProtocolError::UnexpectedReply { command });
        }
        if self.pending.is_some() {
            return Err(ProtocolError::OutOfTurn { command });
        }
        let sender = Sender { id, command, no_reply: flags.no_reply };
        let outcome = match self.stage {
            Stage::New => self.negotiate(command, body, &fds)?,
            Stage::Serving => self.serve(command, body, fds),
            Stage::Resetting | Stage::Unmapping | Stage::Over => return Err(ProtocolError::OutOfTurn { command }),
        };
        Ok(match outcome {
            Ok(Outcome::Now(body, fds)) => sender.answer(body, fds),
            Ok(Outcome::When(ticket, body)) => {
                self.pending = Some(Pending { ticket, then: Some((sender, body)) });
                Answer::Later
            }
            Err(refusal) => self.refuse(sender, &refusal),
        })
    }

    /// The answer that was to come later, if it is there.
    pub fn resume(&mut self) -> Answer {
        match self.pending.take() {
            Some(Pending { ticket, then: Some((sender, body)) }) if ticket.is_done() => sender.answer(body, Vec::new()),
            None => Answer::Nothing,
            waiting => {
                self.pending = waiting;
                Answer::Later
            }
        }
    }

    /// Whether a command waits for the function.
    #[must_use]
    pub const fn is_waiting(&self) -> bool {
        self.pending.is_some()
    }

    /// Leaves what the client has said to another process; nothing is waited for, and the function has been left. This
    /// session is over then.
    pub(crate) fn leave(&mut self, fds: &mut Leaving) -> SessionState {
        let is_serving = self.stage == Stage::Serving;
        self.stage = Stage::Over;
        SessionState { is_serving, maps: self.dma.leave(fds) }
    }

    /// Goes on with what another process has left, of the session and of the function.
    ///
    /// # Errors
    /// See [`ResumeError`]. The session is to be ended then, and the function reset with it.
    pub(crate) fn resume_left(
        &mut self,
        state: &SessionState,
        from: HandedOver,
        fds: &mut Left,
    ) -> Result<(), ResumeError> {
        // Whatever happens from here on, the function is used.
        self.stage = Stage::Serving;
        self.dma = DmaTable::resume(&state.maps, fds)?;
        self.function.take_over(from, self.dma.memory().clone())?;
        if !state.is_serving {
            self.stage = Stage::New;
        }
        Ok(())
    }

    /// The function that is served.
    pub(crate) fn function(&self) -> &Arc<dyn PciFunction> {
        &self.function
    }

    /// Ends the session: what was asked last is waited for, all eventfds are closed, the function is reset and lets go of
    /// the client's memory. Call it again with each wake until it is true; only then the function is free for another client.
    pub fn end(&mut self) -> bool {
        loop {
            if self.pending.as_ref().is_some_and(|pending| !pending.ticket.is_done()) {
                return false;
            }
            self.pending = None;
            let (stage, ticket) = match self.stage {
                Stage::New => (Stage::Over, None),
                Stage::Serving => {
                    self.release_vectors();
                    (Stage::Resetting, self.start(|function, done| function.reset(done)))
                }
                Stage::Resetting => {
                    self.dma.unmap_all();
                    let forget = |function: &dyn PciFunction, done| function.set_memory(GuestMemory::empty(), done);
                    (Stage::Unmapping, self.start(forget))
                }
                Stage::Unmapping | Stage::Over => {
                    self.stage = Stage::Over;
                    return true;
                }
            };
            self.stage = stage;
            self.pending = ticket.map(|ticket| Pending { ticket, then: None });
        }
    }

    fn release_vectors(&self) {
        let vectors = 0..self.function.vectors().into();
        if let Err(error) = interrupts::release(&*self.function, vectors) {
            tracing::error!(%error, "a vector keeps its eventfd");
        }
    }

    /// Has the function do something that takes time. A ticket, unless it is done already.
    fn start(&self, call: impl FnOnce(&dyn PciFunction, Done)) -> Option<Ticket> {
        let (ticket, done) = Ticket::issue(&self.wake);
        call(&*self.function, done);
        (!ticket.is_done()).then_some(ticket)
    }

    fn refuse(&mut self, sender: Sender, refusal: &Refusal) -> Answer {
        let Sender { id, command, no_reply } = sender;
        if self.refused < WARNINGS {
            self.refused = self.refused.saturating_add(1);
            tracing::warn!(%command, error = %refusal, "command refused");
        } else {
            tracing::debug!(%command, error = %refusal, "command refused");
        }
        if no_reply { Answer::Nothing } else { Answer::Reply(Message::refusal(id, command, refusal.errno())) }
    }

    /// VERSION, which has to be the first. What the client says of itself is of no use to us: we send no command, and one
    /// descriptor at a time, which is the least that it may say.
    fn negotiate(
        &mut self,
        command: Command,
        body: Body,
        fds: &Descriptors,
    ) -> Result<Result<Outcome, Refusal>, ProtocolError> {
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
        Ok(Ok(Outcome::Now(Body::Version(our_version(minor)), Vec::new())))
    }

    fn serve(&mut self, command: Command, body: Body, fds: Descriptors) -> Result<Outcome, Refusal> {
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
                return Ok(self.change_memory(memory, Body::Empty));
            }
            (Command::DmaUnmap, Body::DmaUnmap(unmap)) => {
                let memory = self.dma.unmap(&unmap)?;
                return Ok(self.change_memory(memory, Body::DmaUnmap(unmap)));
            }
            (Command::DeviceReset, Body::Empty) => {
                let ticket = self.start(|function, done| function.reset(done));
                return Ok(Outcome::when(ticket, Body::Empty));
            }
            (Command::DeviceGetRegionInfo, Body::RegionInfo(info)) => {
                let (info, file) = regions::region_info(function, &info)?;
                return Ok(Outcome::Now(Body::RegionInfo(info), file.into_iter().collect()));
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
        Ok(Outcome::Now(reply, Vec::new()))
    }

    /// The message is answered when nothing uses the memory from before: what the client unmaps is out of everybody's reach by
    /// then. That the kernel takes it out of our address space, and frees what is nobody's, may follow (the reaper of
    /// `sidecore_memory`): that takes as long as the memory is large, and this thread serves others.
    fn change_memory(&self, memory: Option<GuestMemory>, reply: Body) -> Outcome {
        let ticket = memory.and_then(|memory| self.start(|function, done| function.set_memory(memory, done)));
        Outcome::when(ticket, reply)
    }
}

impl Drop for Session {
    /// The same as [`Session::end`], but that nobody waits.
    fn drop(&mut self) {
        match self.stage {
            Stage::New | Stage::Unmapping | Stage::Over => return,
            Stage::Serving => {
                self.release_vectors();
                self.function.reset(Done::nobody());
            }
            Stage::Resetting => {}
        }
        self.function.set_memory(GuestMemory::empty(), Done::nobody());
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { function, stage, dma, pending, .. } = self;
        let mut debug = formatter.debug_struct("Session");
        debug.field("function", &function.name()).field("stage", stage).field("dma", dma).field("pending", pending);
        debug.finish_non_exhaustive()
    }
}

impl Sender {
    fn answer(self, body: Body, fds: Vec<OwnedFd>) -> Answer {
        if self.no_reply { Answer::Nothing } else { Answer::Reply(Message::reply(self.id, self.command, body, fds)) }
    }
}

impl Outcome {
    fn when(ticket: Option<Ticket>, body: Body) -> Self {
        match ticket {
            Some(ticket) => Self::When(ticket, body),
            None => Self::Now(body, Vec::new()),
        }
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
