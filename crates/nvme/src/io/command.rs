//! From a command to a block request (NVM command set 1.0, 3.2 and 3.3).

use sidecore_block::{BlockRequest, Flush, Operation};
use sidecore_memory::{GuestMemory, RegionHint};
use sidecore_spec_nvme::command::{
    ATTRIBUTE_DEALLOCATE, BROADCAST_NSID, DEALLOCATE, DIRECTIVE_TYPE, FORCE_UNIT_ACCESS,
    PROTECTION_INFORMATION,
};
pub(super) use sidecore_spec_nvme::opcode::nvm as opcode;

use crate::pointer::{self, Direction, Gathered, MAX_TRANSFER_BYTES};
use crate::{Command, Namespace, Status};

/// The commands that take more than one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    Compare,
    Verify,
    /// A read that leaves out parts of what it reads.
    ReadAround,
    /// Dataset Management.
    Deallocate,
}

/// The way in which a valid command continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The block request is filled in and goes to the store, with this flush.
    Submit(Flush),
    /// It takes steps.
    Steps(Job),
    /// There is nothing to do.
    Done,
}

/// Bytes of the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
}

/// The properties of the namespace that a queue needs to parse a command.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    /// `None` while no namespace is attached.
    nsid: Option<u32>,
    /// NN: higher identifiers are not valid.
    nsid_max: u32,
    /// A logical block has two to the power of this bytes.
    block_shift: u32,
    blocks: u64,
    read_only: bool,
    pub(super) volatile_cache: bool,
    discard: bool,
    write_zeroes: bool,
}

impl Rules {
    pub(super) fn new(namespace: Option<&Namespace>, nsid_max: u32) -> Self {
        let Some(namespace) = namespace else {
            return Self {
                nsid: None,
                nsid_max,
                block_shift: 0,
                blocks: 0,
                read_only: true,
                volatile_cache: false,
                discard: false,
                write_zeroes: false,
            };
        };
        let geometry = namespace.store.geometry();
        let block_shift = namespace.block_bytes.checked_ilog2().unwrap_or(0);
        Self {
            nsid: Some(namespace.id),
            nsid_max,
            block_shift,
            blocks: geometry.capacity_bytes >> block_shift,
            read_only: geometry.read_only,
            volatile_cache: geometry.volatile_cache,
            discard: geometry.discard,
            write_zeroes: geometry.write_zeroes,
        }
    }

    /// Parses a command, except for its FUSE field, which the caller handles, and fills in
    /// `request` if the command is one request. With `write_through` no write completes before it
    /// is durable.
    ///
    /// # Errors
    /// The status that says what is wrong.
    // Reads and writes are parsed within the loop that takes commands, all others out of it: a
    // function for all of them cost a read or a write 32 instructions more, of 240.
    #[inline(always)]
    pub(super) fn parse(
        &self,
        command: &Command,
        write_through: bool,
        memory: &GuestMemory,
        hint: &mut RegionHint,
        request: &mut BlockRequest,
    ) -> Result<Verdict, Status> {
        match command.opcode() {
            opcode::READ => self.parse_read(command, memory, hint, request),
            opcode::WRITE => self.parse_write(command, write_through, memory, hint, request),
            _ => self.parse_other(command, write_through, request),
        }
    }

    /// Parses a command that is neither a read nor a write.
    #[inline(never)]
    fn parse_other(
        &self,
        command: &Command,
        write_through: bool,
        request: &mut BlockRequest,
    ) -> Result<Verdict, Status> {
        match command.opcode() {
            opcode::FLUSH => {
                // Identify Controller, VWC: all namespaces are this one, or none.
                if command.nsid() != BROADCAST_NSID {
                    self.check_namespace(command)?;
                } else if self.nsid.is_none() {
                    return Ok(Verdict::Done);
                }
                request.segments.clear();
                fill(request, Operation::Flush, Range { offset_bytes: 0, len_bytes: 0 });
                Ok(Verdict::Submit(Flush::Never))
            }
            opcode::WRITE_ZEROES if self.write_zeroes || self.nsid.is_none() => {
                self.check_writable(command)?;
                let range = self.range(command)?;
                request.segments.clear();
                let may_unmap = command.dword12() & DEALLOCATE != 0;
                fill(request, Operation::WriteZeroes { may_unmap }, range);
                Ok(Verdict::Submit(self.write_flush(command, write_through)))
            }
            opcode::COMPARE => {
                self.check_transfer(command)?;
                Ok(Verdict::Steps(Job::Compare))
            }
            opcode::VERIFY => {
                self.check_namespace(command)?;
                self.range(command)?;
                Ok(Verdict::Steps(Job::Verify))
            }
            opcode::DATASET_MANAGEMENT => {
                self.check_writable(command)?;
                // Everything it can ask for is advice.
                let deallocate = command.dword11() & ATTRIBUTE_DEALLOCATE != 0 && self.discard;
                Ok(if deallocate { Verdict::Steps(Job::Deallocate) } else { Verdict::Done })
            }
            _ => Err(Status::INVALID_OPCODE),
        }
    }

    #[inline(always)]
    fn parse_read(
        &self,
        command: &Command,
        memory: &GuestMemory,
        hint: &mut RegionHint,
        request: &mut BlockRequest,
    ) -> Result<Verdict, Status> {
        self.check_namespace(command)?;
        let range = self.transfer(command)?;
        let segments = &mut request.segments;
        match pointer::gather(command, range.len_bytes, Direction::ToGuest, memory, hint, segments)?
        {
            Gathered::HasHoles => Ok(Verdict::Steps(Job::ReadAround)),
            Gathered::Whole => {
                fill(request, Operation::Read, range);
                Ok(Verdict::Submit(self.forced_flush(command, Flush::Before)))
            }
        }
    }

    #[inline(always)]
    fn parse_write(
        &self,
        command: &Command,
        write_through: bool,
        memory: &GuestMemory,
        hint: &mut RegionHint,
        request: &mut BlockRequest,
    ) -> Result<Verdict, Status> {
        self.check_writable(command)?;
        let range = self.transfer(command)?;
        if command.dword12() & DIRECTIVE_TYPE != 0 {
            return Err(Status::INVALID_FIELD);
        }
        pointer::gather(
            command,
            range.len_bytes,
            Direction::FromGuest,
            memory,
            hint,
            &mut request.segments,
        )?;
        fill(request, Operation::Write, range);
        Ok(Verdict::Submit(self.write_flush(command, write_through)))
    }

    /// The namespace that is served, and the number of its block at a place.
    pub(super) fn place(&self, offset_bytes: u64) -> (u32, u64) {
        (self.nsid.unwrap_or(0), offset_bytes >> self.block_shift)
    }

    /// The range of a command that transfers it, before its data is looked at.
    ///
    /// # Errors
    /// The namespace or the range is wrong.
    pub(super) fn check_transfer(&self, command: &Command) -> Result<Range, Status> {
        self.check_namespace(command)?;
        self.transfer(command)
    }

    /// Whether the blocks are to be read from the medium itself, which takes a flush.
    pub(super) fn wants_flush_first(&self, command: &Command) -> bool {
        self.forced_flush(command, Flush::Before) != Flush::Never
    }

    /// The range of a command that names one.
    ///
    /// # Errors
    /// It ends past the namespace, or wants protection information, which this namespace has not.
    #[inline]
    pub(super) fn range(&self, command: &Command) -> Result<Range, Status> {
        let dword12 = command.dword12();
        if dword12 & PROTECTION_INFORMATION != 0 {
            return Err(Status::INVALID_PROTECTION_INFORMATION);
        }
        // NLB is 0's based.
        self.blocks(command.qword10(), u64::from(dword12 & 0xFFFF).wrapping_add(1))
    }

    /// So many blocks from this one on.
    ///
    /// # Errors
    /// They end past the namespace.
    #[inline]
    pub(super) fn blocks(&self, first: u64, count: u64) -> Result<Range, Status> {
        match first.checked_add(count) {
            Some(end) if end <= self.blocks => Ok(Range {
                offset_bytes: first << self.block_shift,
                len_bytes: count << self.block_shift,
            }),
            _ => Err(Status::LBA_OUT_OF_RANGE),
        }
    }

    /// The range of a command that transfers it.
    #[inline]
    fn transfer(&self, command: &Command) -> Result<Range, Status> {
        let range = self.range(command)?;
        // Figure 275, MDTS.
        if range.len_bytes > MAX_TRANSFER_BYTES { Err(Status::INVALID_FIELD) } else { Ok(range) }
    }

    #[inline]
    fn check_writable(&self, command: &Command) -> Result<(), Status> {
        self.check_namespace(command)?;
        if self.read_only { Err(Status::NAMESPACE_WRITE_PROTECTED) } else { Ok(()) }
    }

    #[inline]
    fn check_namespace(&self, command: &Command) -> Result<(), Status> {
        let nsid = command.nsid();
        if self.nsid == Some(nsid) {
            return Ok(());
        }
        // 3.2.1: a namespace that is not attached is an invalid field, and a number that none can
        // have an invalid namespace.
        if (1..=self.nsid_max).contains(&nsid) {
            Err(Status::INVALID_FIELD)
        } else {
            Err(Status::INVALID_NAMESPACE)
        }
    }

    #[inline]
    fn forced_flush(&self, command: &Command, flush: Flush) -> Flush {
        if self.volatile_cache && command.dword12() & FORCE_UNIT_ACCESS != 0 {
            flush
        } else {
            Flush::Never
        }
    }

    #[inline]
    fn write_flush(&self, command: &Command, write_through: bool) -> Flush {
        if write_through && self.volatile_cache {
            Flush::After
        } else {
            self.forced_flush(command, Flush::After)
        }
    }
}

#[inline]
fn fill(request: &mut BlockRequest, operation: Operation, range: Range) {
    request.operation = operation;
    request.offset_bytes = range.offset_bytes;
    request.len_bytes = range.len_bytes;
}
