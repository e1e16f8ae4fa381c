//! The admin queue pair: one command at a time, and those that complete when something happens.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use sidecore_ring::driver::SharedMemory;
use sidecore_ring::driver::nvme::{CompletionRing, SubmissionRing};
use sidecore_spec_nvme::vfio;

use super::command::NvmeCommand;
use super::plan::{ADMIN_DATA_BYTES, ADMIN_ENTRIES, AdminParts, PAGE};
use super::registers::NvmeCapabilities;
use super::status::NvmeStatus;
use super::transport::Transport;
use crate::error::ClientError;

/// How long to sleep at once: an interrupt that is masked, or does not exist, costs no more.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// An admin command that has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminCompletion {
    /// Its identifier.
    pub id: u16,
    /// Dword 0 of the completion.
    pub result: u32,
    /// How it ended.
    pub status: NvmeStatus,
}

/// The admin queues. Commands that wait for something (Asynchronous Event Request) are submitted
/// and looked for later; all others are run.
#[derive(Debug)]
pub struct NvmeAdmin {
    commands: SubmissionRing,
    completions: CompletionRing,
    data: SharedMemory,
    data_at: u64,
    commands_at: u64,
    completions_at: u64,
    transport: Transport,
    tail_at: u64,
    head_at: u64,
    /// Vector 0.
    event: OwnedFd,
    last_id: u16,
    /// Completed while something else was waited for.
    others: VecDeque<AdminCompletion>,
    timeout: Duration,
}

impl NvmeAdmin {
    pub(crate) fn new(
        parts: AdminParts,
        transport: &Transport,
        capabilities: NvmeCapabilities,
        event: OwnedFd,
        timeout: Duration,
    ) -> Result<Self, ClientError> {
        let AdminParts { commands, completions, data } = parts;
        Ok(Self {
            commands_at: commands.guest_address,
            completions_at: completions.guest_address,
            data_at: data.guest_address,
            commands: SubmissionRing::new(commands.window, ADMIN_ENTRIES)?,
            completions: CompletionRing::new(completions.window, ADMIN_ENTRIES)?,
            data: SharedMemory::new(data.window),
            transport: transport.clone(),
            tail_at: capabilities.tail_offset(0),
            head_at: capabilities.head_offset(0),
            event,
            last_id: 0,
            others: VecDeque::new(),
            timeout,
        })
    }

    /// Forgets everything, for a controller that was reset, at the end of this connection.
    pub(crate) fn restart(&mut self, transport: &Transport, capabilities: NvmeCapabilities) {
        self.commands.reset();
        self.completions.reset();
        self.others.clear();
        self.transport = transport.clone();
        self.tail_at = capabilities.tail_offset(0);
        self.head_at = capabilities.head_offset(0);
    }

    /// Where the submission and the completion queue are, for ASQ and ACQ.
    pub(crate) fn addresses(&self) -> [u64; 2] {
        [self.commands_at, self.completions_at]
    }

    /// Submits a command, and returns the identifier that it was given.
    ///
    /// # Errors
    /// The socket, or too many commands wait already.
    pub fn submit(&mut self, command: NvmeCommand) -> Result<u16, ClientError> {
        self.last_id = self.last_id.wrapping_add(1);
        self.post(&command.id(self.last_id).bytes())?;
        Ok(self.last_id)
    }

    /// Posts any 64 bytes.
    ///
    /// # Errors
    /// As [`NvmeAdmin::submit`].
    pub fn post(&mut self, entry: &[u8; 64]) -> Result<(), ClientError> {
        if !self.commands.push(entry) {
            return Err(ClientError::Request("the admin submission queue is full".to_owned()));
        }
        self.ring_tail(self.commands.tail())
    }

    /// Writes the tail doorbell, with any value.
    ///
    /// # Errors
    /// The socket.
    pub fn ring_tail(&self, value: u32) -> Result<(), ClientError> {
        self.transport.region_write(vfio::PCI_BAR0_REGION_INDEX, self.tail_at, &value.to_le_bytes())
    }

    /// Writes the head doorbell, with any value.
    ///
    /// # Errors
    /// The socket.
    pub fn ring_head(&self, value: u32) -> Result<(), ClientError> {
        self.transport.region_write(vfio::PCI_BAR0_REGION_INDEX, self.head_at, &value.to_le_bytes())
    }

    /// The next command that has completed and was not waited for.
    ///
    /// # Errors
    /// The socket; the controller makes no sense.
    pub fn poll(&mut self) -> Result<Option<AdminCompletion>, ClientError> {
        self.look()?;
        Ok(self.others.pop_front())
    }

    /// Waits for the completion of a command that was submitted.
    ///
    /// # Errors
    /// As [`NvmeAdmin::poll`], and when it takes longer than the options' time-out.
    pub fn wait(&mut self, id: u16) -> Result<AdminCompletion, ClientError> {
        let end = Instant::now() + self.timeout;
        loop {
            self.look()?;
            if let Some(at) = self.others.iter().position(|completion| completion.id == id)
                && let Some(completion) = self.others.remove(at)
            {
                return Ok(completion);
            }
            if Instant::now() >= end {
                return Err(ClientError::Timeout { request: "an admin command" });
            }
            self.nap()?;
        }
    }

    /// Runs a command without data.
    ///
    /// # Errors
    /// As [`NvmeAdmin::wait`]; that the command failed is no error here.
    pub fn run(&mut self, command: NvmeCommand) -> Result<AdminCompletion, ClientError> {
        let id = self.submit(command)?;
        self.wait(id)
    }

    /// Runs a command that the controller answers with data, 8 KiB at most.
    ///
    /// # Errors
    /// As [`NvmeAdmin::run`].
    pub fn read(
        &mut self,
        command: NvmeCommand,
        to: &mut [u8],
    ) -> Result<AdminCompletion, ClientError> {
        let command = self.with_data(command, to.len())?;
        let completion = self.run(command)?;
        self.data.read_bytes(0, to);
        Ok(completion)
    }

    /// Runs a command that comes with data, 8 KiB at most.
    ///
    /// # Errors
    /// As [`NvmeAdmin::run`].
    pub fn write(
        &mut self,
        command: NvmeCommand,
        from: &[u8],
    ) -> Result<AdminCompletion, ClientError> {
        let command = self.with_data(command, from.len())?;
        self.data.write_bytes(0, from);
        self.run(command)
    }

    /// Runs a command that has to succeed, and returns its result.
    pub(crate) fn must(
        &mut self,
        name: &'static str,
        command: NvmeCommand,
    ) -> Result<u32, ClientError> {
        check(name, self.run(command)?)
    }

    /// The same with data from the controller.
    pub(crate) fn must_read(
        &mut self,
        name: &'static str,
        command: NvmeCommand,
        to: &mut [u8],
    ) -> Result<u32, ClientError> {
        check(name, self.read(command, to)?)
    }

    fn with_data(
        &self,
        command: NvmeCommand,
        len_bytes: usize,
    ) -> Result<NvmeCommand, ClientError> {
        if len_bytes > ADMIN_DATA_BYTES {
            return Err(ClientError::Request(format!(
                "{len_bytes} bytes of an admin command's data"
            )));
        }
        let second = if len_bytes > PAGE { self.data_at + PAGE as u64 } else { 0 };
        Ok(command.prp(self.data_at, second))
    }

    fn look(&mut self) -> Result<(), ClientError> {
        let before = self.completions.head();
        // No more than the queue has entries, whatever the controller writes.
        for _ in 0..ADMIN_ENTRIES {
            let Some(entry) = self.completions.pop() else { break };
            self.commands.set_head(entry.sq_head)?;
            let status = NvmeStatus(entry.status >> 1);
            self.others.push_back(AdminCompletion {
                id: entry.command_id,
                result: entry.result,
                status,
            });
        }
        if self.completions.head() != before {
            self.ring_head(self.completions.head())?;
        }
        Ok(())
    }

    fn nap(&self) -> Result<(), ClientError> {
        match rustix::event::poll(&mut [PollFd::new(&self.event, PollFlags::IN)], Some(&NAP)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(ClientError::io("waiting for an interrupt")(errno)),
        }
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        Ok(())
    }
}

fn check(command: &'static str, completion: AdminCompletion) -> Result<u32, ClientError> {
    let AdminCompletion { result, status, .. } = completion;
    if status.is_ok() { Ok(result) } else { Err(ClientError::Command { command, status }) }
}
