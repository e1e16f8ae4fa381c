//! Submitting requests: what a command says, and where its data is.

use sidecore_spec_nvme::command::{
    ATTRIBUTE_DEALLOCATE, DEALLOCATE, PRP_BYTES, SGL_DESCRIPTOR_BYTES,
};
use sidecore_spec_nvme::opcode::nvm as io_opcode;
use sidecore_units::{SECTOR_BYTES, Sector};

use super::command::{FUSED_FIRST, FUSED_SECOND, NvmeCommand};
use super::options::DataPointers;
use super::plan::PAGE;
use super::queue::NvmeQueue;
use crate::error::ClientError;
use crate::request::{Piece, Slot};

impl NvmeQueue {
    /// Reads `len_bytes` from `sector` on into the slot's buffer; both are whole blocks of the
    /// namespace's.
    ///
    /// # Errors
    /// The slot is in flight, its buffer is smaller, or these are no whole blocks.
    #[inline]
    pub fn submit_read(
        &mut self,
        slot: Slot,
        sector: Sector,
        len_bytes: u32,
    ) -> Result<(), ClientError> {
        self.submit_transfer(slot, io_opcode::READ, 0, sector, len_bytes)
    }

    /// Writes `len_bytes` of the slot's buffer from `sector` on.
    ///
    /// # Errors
    /// As [`NvmeQueue::submit_read`].
    #[inline]
    pub fn submit_write(
        &mut self,
        slot: Slot,
        sector: Sector,
        len_bytes: u32,
    ) -> Result<(), ClientError> {
        self.submit_transfer(slot, io_opcode::WRITE, 0, sector, len_bytes)
    }

    /// Compares `len_bytes` from `sector` on with the slot's buffer.
    ///
    /// # Errors
    /// As [`NvmeQueue::submit_read`].
    pub fn submit_compare(
        &mut self,
        slot: Slot,
        sector: Sector,
        len_bytes: u32,
    ) -> Result<(), ClientError> {
        self.submit_transfer(slot, io_opcode::COMPARE, 0, sector, len_bytes)
    }

    /// Writes the buffer of `write` if what is there equals that of `compare`, as one (fused)
    /// operation.
    ///
    /// # Errors
    /// As [`NvmeQueue::submit_read`], for either slot; then neither is submitted.
    pub fn submit_compare_and_write(
        &mut self,
        compare: Slot,
        write: Slot,
        sector: Sector,
        len_bytes: u32,
    ) -> Result<(), ClientError> {
        if compare == write || self.commands.room() < 2 {
            return Err(ClientError::Request(
                "two slots, and room for both, are needed".to_owned(),
            ));
        }
        self.check_here(write)?;
        self.submit_transfer(compare, io_opcode::COMPARE, FUSED_FIRST, sector, len_bytes)?;
        self.submit_transfer(write, io_opcode::WRITE, FUSED_SECOND, sector, len_bytes)
    }

    /// Checks that `sectors` sectors from `sector` on can be read, without moving them.
    ///
    /// # Errors
    /// As [`NvmeQueue::submit_read`].
    pub fn submit_verify(
        &mut self,
        slot: Slot,
        sector: Sector,
        sectors: u32,
    ) -> Result<(), ClientError> {
        let (lba, blocks) = self.blocks(sector, sectors)?;
        self.submit(slot, NvmeCommand::new(io_opcode::VERIFY, self.namespace).blocks(lba, blocks))
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// The slot is in flight.
    pub fn submit_flush(&mut self, slot: Slot) -> Result<(), ClientError> {
        self.submit(slot, NvmeCommand::new(io_opcode::FLUSH, self.namespace))
    }

    /// Zeroes `sectors` sectors from `sector` on, and frees them if `unmap` and the controller can.
    /// At most 65536 blocks.
    ///
    /// # Errors
    /// As [`NvmeQueue::submit_read`].
    pub fn submit_write_zeroes(
        &mut self,
        slot: Slot,
        sector: Sector,
        sectors: u32,
        unmap: bool,
    ) -> Result<(), ClientError> {
        let (lba, blocks) = self.blocks(sector, sectors)?;
        let command = NvmeCommand::new(io_opcode::WRITE_ZEROES, self.namespace).blocks(lba, blocks);
        let deallocate = if unmap { DEALLOCATE } else { 0 };
        self.submit(slot, command.dword(12, command.0[12] | deallocate))
    }

    /// Forgets `sectors` sectors from `sector` on (Dataset Management, Deallocate).
    ///
    /// # Errors
    /// As [`NvmeQueue::submit_read`].
    pub fn submit_deallocate(
        &mut self,
        slot: Slot,
        sector: Sector,
        sectors: u32,
    ) -> Result<(), ClientError> {
        self.check_here(slot)?;
        let (lba, blocks) = self.blocks(sector, sectors)?;
        let at = slot.index() * self.aux_stride;
        self.aux.store_u32(at, 0);
        self.aux.store_u32(at + 4, blocks);
        self.aux.store_u64(at + 8, lba);
        let command = NvmeCommand::new(io_opcode::DATASET_MANAGEMENT, self.namespace)
            .dword(11, ATTRIBUTE_DEALLOCATE);
        let address = self.aux_at + at as u64;
        let command = match self.pointers {
            DataPointers::Prp => command.prp(address, 0),
            DataPointers::Sgl => command.sgl_data(address, SGL_DESCRIPTOR_BYTES as u32),
        };
        self.submit(slot, command)
    }

    /// Reads into any memory that the controller may reach, such as a
    /// [`DmaBuffer`](super::DmaBuffer)'s: `len_bytes` at `address`, a multiple of four, and no more
    /// than a slot's buffer has. The slot's own buffer is not touched.
    ///
    /// # Errors
    /// As [`NvmeQueue::submit_read`].
    pub fn submit_read_at(
        &mut self,
        slot: Slot,
        sector: Sector,
        address: u64,
        len_bytes: u32,
    ) -> Result<(), ClientError> {
        self.submit_at(slot, io_opcode::READ, 0, sector, address, len_bytes)
    }

    /// Writes from any memory that the controller may reach.
    ///
    /// # Errors
    /// As [`NvmeQueue::submit_read_at`].
    pub fn submit_write_at(
        &mut self,
        slot: Slot,
        sector: Sector,
        address: u64,
        len_bytes: u32,
    ) -> Result<(), ClientError> {
        self.submit_at(slot, io_opcode::WRITE, 0, sector, address, len_bytes)
    }

    /// Reads, writes or compares ([`io_opcode`]) with the data scattered over pieces of the slot's
    /// buffer, in their order.
    ///
    /// # Errors
    /// As [`NvmeQueue::submit_read`]; a piece is outside of the buffer, there are none, or more
    /// than the options' `max_pieces`.
    pub fn submit_scattered(
        &mut self,
        slot: Slot,
        opcode: u8,
        sector: Sector,
        pieces: &[Piece],
    ) -> Result<(), ClientError> {
        self.check_here(slot)?;
        if self.pointers != DataPointers::Sgl || pieces.is_empty() || pieces.len() > self.max_pieces
        {
            let (pieces, most) = (pieces.len(), self.max_pieces);
            return Err(ClientError::Request(format!(
                "{pieces} pieces, with SGLs the queue takes 1 to {most}"
            )));
        }
        let mut len_bytes = 0_u32;
        let at = slot.index() * self.aux_stride;
        for (index, piece) in pieces.iter().enumerate() {
            let to = at + index * SGL_DESCRIPTOR_BYTES;
            self.aux.store_u64(to, self.data.piece_address(slot, piece)?);
            // A data block descriptor's type is zero.
            self.aux.store_u64(to + 8, piece.len_bytes.into());
            len_bytes = len_bytes.saturating_add(piece.len_bytes);
        }
        let (lba, blocks) = self.blocks_of_bytes(sector, len_bytes)?;
        let segment_bytes = (pieces.len() * SGL_DESCRIPTOR_BYTES) as u32;
        let command = NvmeCommand::new(opcode, self.namespace).blocks(lba, blocks);
        self.submit(slot, command.sgl_segment(self.aux_at + at as u64, segment_bytes))
    }

    /// Submits any command, with the slot's number as its identifier.
    ///
    /// # Errors
    /// The slot is in flight.
    #[inline]
    pub fn submit(&mut self, slot: Slot, command: NvmeCommand) -> Result<(), ClientError> {
        self.check_here(slot)?;
        if !self.commands.push(&command.id(slot.0).bytes()) {
            return Err(full());
        }
        self.slots.depart(slot);
        self.counters.requests += 1;
        Ok(())
    }

    #[inline]
    fn submit_transfer(
        &mut self,
        slot: Slot,
        opcode: u8,
        flags: u32,
        sector: Sector,
        len_bytes: u32,
    ) -> Result<(), ClientError> {
        self.submit_at(slot, opcode, flags, sector, self.data_address(slot), len_bytes)
    }

    #[inline]
    fn submit_at(
        &mut self,
        slot: Slot,
        opcode: u8,
        flags: u32,
        sector: Sector,
        address: u64,
        len_bytes: u32,
    ) -> Result<(), ClientError> {
        // Before its list is written: the controller may still be reading that of a slot in flight.
        self.check_here(slot)?;
        self.data.check_len(len_bytes)?;
        let (lba, blocks) = self.blocks_of_bytes(sector, len_bytes)?;
        let command = NvmeCommand::new(opcode, self.namespace).flags(flags).blocks(lba, blocks);
        let command = match self.pointers {
            DataPointers::Sgl => command.sgl_data(address, len_bytes),
            DataPointers::Prp => {
                let second = self.second_prp(slot, address, len_bytes as usize);
                command.prp(address, second)
            }
        };
        self.submit(slot, command)
    }

    /// PRP entry 2 (NVMe base 2.0, 4.1.1): nothing, the second page, or a list of all pages but the
    /// first.
    #[inline]
    fn second_prp(&mut self, slot: Slot, address: u64, len_bytes: usize) -> u64 {
        let page = PAGE as u64;
        let in_first = PAGE - (address % page) as usize;
        let next_page = address - address % page + page;
        if len_bytes <= in_first {
            return 0;
        }
        if len_bytes <= in_first + PAGE {
            return next_page;
        }
        if self.list_of.get(slot.index()) != Some(&next_page) {
            self.write_list(slot, next_page);
        }
        self.lists_at + (slot.index() * self.list_stride) as u64
    }

    /// Makes the slot's PRP list one of the pages from `next_page` on.
    #[cold]
    pub(super) fn write_list(&mut self, slot: Slot, next_page: u64) {
        let at = slot.index() * self.list_stride;
        for index in 0..self.list_stride / PRP_BYTES {
            self.lists.store_u64(at + index * PRP_BYTES, next_page + (index * PAGE) as u64);
        }
        if let Some(list_of) = self.list_of.get_mut(slot.index()) {
            *list_of = next_page;
        }
    }

    /// Logical blocks, for a range that is a whole number of them.
    #[inline]
    fn blocks(&self, sector: Sector, sectors: u32) -> Result<(u64, u32), ClientError> {
        let mask = (1_u64 << self.sector_shift) - 1;
        if (sector.0 | u64::from(sectors)) & mask != 0 || sectors == 0 {
            return Err(no_blocks(sector, sectors, self.sector_shift));
        }
        Ok((sector.0 >> self.sector_shift, sectors >> self.sector_shift))
    }

    #[inline]
    fn blocks_of_bytes(&self, sector: Sector, len_bytes: u32) -> Result<(u64, u32), ClientError> {
        const SECTOR: u32 = SECTOR_BYTES as u32;
        if !len_bytes.is_multiple_of(SECTOR) {
            return Err(no_blocks(sector, len_bytes / SECTOR, self.sector_shift));
        }
        self.blocks(sector, len_bytes / SECTOR)
    }

    #[inline]
    fn check_here(&self, slot: Slot) -> Result<(), ClientError> {
        if self.slots.is_here(slot) { Ok(()) } else { Err(in_flight(slot)) }
    }
}

#[cold]
fn in_flight(slot: Slot) -> ClientError {
    ClientError::Request(format!("slot {} is in flight, or there is no such slot", slot.0))
}

#[cold]
fn full() -> ClientError {
    ClientError::Request("the submission queue is full: take completions first".to_owned())
}

#[cold]
fn no_blocks(sector: Sector, sectors: u32, sector_shift: u32) -> ClientError {
    let block_bytes = SECTOR_BYTES << sector_shift;
    ClientError::Request(format!(
        "{sectors} sectors from {} on are no whole blocks of {block_bytes} bytes",
        sector.0
    ))
}
