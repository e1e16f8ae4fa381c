//! How large the parts of a client's memory are, and where they go.

use sidecore_spec_nvme::command::{
    COMMAND_BYTES, COMPLETION_BYTES, PRP_BYTES, SGL_DESCRIPTOR_BYTES,
};
use sidecore_units::PAGE_BYTES;

use super::options::{DataPointers, NvmeOptions};
use super::registers::NvmeCapabilities;
use crate::arena::{Arena, Part};
use crate::error::ClientError;

pub(crate) const PAGE: usize = PAGE_BYTES as usize;
/// Entries of the admin queues.
pub(crate) const ADMIN_ENTRIES: u32 = 32;
/// Default number of entries of an I/O submission queue, if the slots need no more: so many that
/// commands, as well as completions, lie on lines which the controller has long let go of, and that
/// the head doorbell is rarely due.
const USUAL_ENTRIES: u32 = 64;
/// Bytes for the data of one admin command.
pub(crate) const ADMIN_DATA_BYTES: usize = 2 * PAGE;

/// A slot's PRP list has one page.
const MAX_SLOT_BYTES: usize = PAGE / PRP_BYTES * PAGE;

/// The sizes of an I/O queue pair's parts, the same for all of them.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub commands: u32,
    pub completions: u32,
    /// Bytes from one slot's data to the next one's.
    pub data_stride: usize,
    /// Bytes of a slot's PRP list; zero where two entries are always enough.
    pub list_stride: usize,
    /// Bytes of a slot's descriptors or range.
    pub aux_stride: usize,
    shadow_bytes: usize,
}

/// The parts of one I/O queue pair.
#[derive(Debug)]
pub(crate) struct QueueParts {
    pub commands: Part,
    pub completions: Part,
    pub data: Part,
    pub lists: Part,
    pub aux: Part,
}

/// The parts of the admin queue pair.
#[derive(Debug)]
pub(crate) struct AdminParts {
    pub commands: Part,
    pub completions: Part,
    pub data: Part,
}

/// All of them.
#[derive(Debug)]
pub(crate) struct Parts {
    pub admin: AdminParts,
    pub shadow: [Part; 2],
    pub queues: Vec<QueueParts>,
}

impl Plan {
    pub(crate) fn new(
        options: &NvmeOptions,
        capabilities: NvmeCapabilities,
    ) -> Result<Self, ClientError> {
        let wrong = |why: String| Err(ClientError::Options(why));
        let slot_bytes = options.slot_bytes as usize;
        if options.queues == 0 || options.slots == 0 || options.max_pieces == 0 {
            return wrong("queues, slots and pieces are at least one".to_owned());
        }
        if slot_bytes == 0 || !slot_bytes.is_multiple_of(512) || slot_bytes > MAX_SLOT_BYTES {
            return wrong(format!(
                "a slot's buffer is a multiple of 512 bytes and at most {MAX_SLOT_BYTES}"
            ));
        }
        if options.max_pieces > 1 && options.pointers == DataPointers::Prp {
            return wrong("data in pieces needs SGLs".to_owned());
        }
        if usize::from(options.max_pieces) * SGL_DESCRIPTOR_BYTES > PAGE {
            return wrong(format!("at most {} pieces", PAGE / SGL_DESCRIPTOR_BYTES));
        }
        let least = u32::from(options.slots) + 1;
        let commands = match options.queue_entries {
            0 => USUAL_ENTRIES.min(capabilities.max_entries()).max(least),
            entries => entries,
        };
        if commands < least {
            return wrong(format!("{} slots need a queue of {least} entries", options.slots));
        }
        if commands > capabilities.max_entries() {
            return wrong(format!(
                "the controller's queues have at most {} entries",
                capabilities.max_entries()
            ));
        }
        let pages = slot_bytes.div_ceil(PAGE);
        Ok(Self {
            commands,
            // Room to spare, so that the head doorbell need not be rung for each batch.
            completions: commands.saturating_mul(2).min(capabilities.max_entries()),
            data_stride: pages * PAGE,
            list_stride: if pages > 1 { (pages * PRP_BYTES).next_power_of_two() } else { 0 },
            aux_stride: (usize::from(options.max_pieces) * SGL_DESCRIPTOR_BYTES)
                .next_power_of_two()
                .max(64),
            shadow_bytes: (2
                * (usize::from(options.queues) + 1)
                * capabilities.doorbell_stride_bytes() as usize)
                .next_multiple_of(PAGE),
        })
    }

    fn commands_bytes(&self) -> usize {
        self.commands as usize * COMMAND_BYTES
    }

    fn completions_bytes(&self) -> usize {
        self.completions as usize * COMPLETION_BYTES
    }

    /// Bytes of what a controller wants in one piece, in whole pages.
    pub(crate) fn contiguous_bytes(&self, queues: u16) -> u64 {
        let admin = [
            ADMIN_ENTRIES as usize * COMMAND_BYTES,
            ADMIN_ENTRIES as usize * COMPLETION_BYTES,
            ADMIN_DATA_BYTES,
        ];
        let shared = pages(&admin) + pages(&[self.shadow_bytes, self.shadow_bytes]);
        shared + u64::from(queues) * pages(&[self.commands_bytes(), self.completions_bytes()])
    }

    pub(crate) fn arena_bytes(&self, options: &NvmeOptions) -> u64 {
        let slots = usize::from(options.slots);
        let data = [slots * self.data_stride, slots * self.list_stride, slots * self.aux_stride];
        self.contiguous_bytes(options.queues) + u64::from(options.queues) * pages(&data)
    }

    /// Gives the parts out, the contiguous ones first.
    pub(crate) fn lay_out(
        &self,
        arena: &mut Arena,
        options: &NvmeOptions,
    ) -> Result<Parts, ClientError> {
        let admin = AdminParts {
            commands: arena.give(ADMIN_ENTRIES as usize * COMMAND_BYTES)?,
            completions: arena.give(ADMIN_ENTRIES as usize * COMPLETION_BYTES)?,
            data: arena.give(ADMIN_DATA_BYTES)?,
        };
        let shadow = [arena.give(self.shadow_bytes)?, arena.give(self.shadow_bytes)?];
        let mut rings = Vec::new();
        for _ in 0..options.queues {
            rings.push((arena.give(self.commands_bytes())?, arena.give(self.completions_bytes())?));
        }
        let slots = usize::from(options.slots);
        let mut queues = Vec::new();
        for (commands, completions) in rings {
            queues.push(QueueParts {
                commands,
                completions,
                data: arena.give(slots * self.data_stride)?,
                lists: arena.give(slots * self.list_stride)?,
                aux: arena.give(slots * self.aux_stride)?,
            });
        }
        Ok(Parts { admin, shadow, queues })
    }
}

fn pages(parts: &[usize]) -> u64 {
    parts.iter().map(|part| (*part as u64).next_multiple_of(PAGE_BYTES)).sum()
}
