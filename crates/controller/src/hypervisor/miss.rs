//! The handling of misses (thesis 5.3, figure 5.2).
//!
//! A write that finds no block of its own gets fresh blocks. No guest can read them until the
//! write's data is in them: not through the tree, which does not map them yet, and not after a
//! crash, because the transaction that maps them is written after a flush of the store. Blocks that
//! the write covers only partly are filled first, with zeros or with the contents that they are a
//! copy of. So a fresh block never exposes its former contents, which may be another volume's.

use std::io;
use std::sync::MutexGuard;

use sidecore_block::BlockError;
use sidecore_extent::{BlockRange, Extent, FunctionId, SetError};
use sidecore_units::{Plba, Vlba};
use sidecore_volume::{Disk, Mapped, VolumeError, VolumeId, Volumes};

use super::{Hypervisor, State};
use crate::mail::{Answer, GrantId, Message, Question, ReplyTo};

/// Extents looked up for one miss: a leaf's worth.
const LOOKUP_EXTENTS: usize = 128;

impl Hypervisor {
    /// Reads pruned mappings from the metadata again, from the start of `range` and as far behind
    /// it as one lookup reaches: a sequential reader then need not miss again.
    pub(super) fn regenerate(&self, message: Message, range: BlockRange, disk: &mut dyn Disk) {
        let mut state = self.state();
        let Some((id, open, volumes)) = state.volume_of(message.function) else {
            message.reply_to.reply(Answer::Failed(BlockError::EIO));
            return;
        };
        let blocks = open.tree.root().blocks();
        let range = BlockRange {
            first: range.first,
            count: blocks.saturating_sub(range.first.0).max(range.count),
        };
        // The mappings of locked blocks are not in the metadata yet.
        let range = match open.grants.conflict(range) {
            Some(conflict) if conflict.first <= range.first => {
                open.blocked.push(message);
                return;
            }
            Some(conflict) => BlockRange::between(range.first, conflict.first),
            None => range,
        };
        let answer = match volumes.map(disk, id, range, LOOKUP_EXTENTS) {
            Err(error) => {
                let name = state.name_of(id);
                self.refuse(&name, &error)
            }
            Ok(mapped) => match self.show(&mut state, message.function, &mapped) {
                Ok(()) => Answer::Rewalk,
                Err(SetError::OutOfNodes(_)) => return self.wait_for_epoch(&mut state, message),
                Err(error) => {
                    tracing::error!(
                        controller = self.name,
                        "the tree rejects a mapping of the metadata: {error}"
                    );
                    Answer::Failed(BlockError::EIO)
                }
            },
        };
        drop(state);
        message.reply_to.reply(answer);
    }

    /// Queues a question until an epoch has passed.
    fn wait_for_epoch(&self, state: &mut State, message: Message) {
        state.for_epoch.push(message);
        self.commits.retry_soon();
    }

    /// Sets the metadata's mappings in the function's tree.
    fn show(
        &self,
        state: &mut State,
        function: FunctionId,
        mapped: &Mapped,
    ) -> Result<(), SetError> {
        self.set(state, function, mapped.covered, &mapped.extents)
    }

    /// Changes a tree; without free nodes, prunes trees and tries again.
    fn set(
        &self,
        state: &mut State,
        function: FunctionId,
        range: BlockRange,
        extents: &[Extent],
    ) -> Result<(), SetError> {
        let once = |state: &mut State| match state.volume_of(function) {
            Some((_, open, _)) => {
                let result = open.tree.set(range, extents);
                let retired = open.tree.take_retired();
                state.limbo.retire(retired, &self.epochs);
                result
            }
            None => Ok(()),
        };
        match once(state) {
            Err(SetError::OutOfNodes(_)) => {
                self.make_room(state);
                once(state)
            }
            result => result,
        }
    }

    /// Changes a tree, or prunes all of it if there are no free nodes: the tree must not keep the
    /// old mapping.
    fn set_or_prune(
        &self,
        state: &mut State,
        function: FunctionId,
        range: BlockRange,
        extents: &[Extent],
    ) {
        if self.set(state, function, range, extents).is_ok() {
            return;
        }
        if let Some((_, open, _)) = state.volume_of(function) {
            open.tree.prune_all();
            let retired = open.tree.take_retired();
            state.limbo.retire(retired, &self.epochs);
        }
    }

    /// Finds blocks for a write that has none of its own in `range`.
    pub(super) fn allocate(
        &self,
        message: Message,
        range: BlockRange,
        (partial_head, partial_tail): (bool, bool),
        disk: &mut dyn Disk,
        to_do: &mut Vec<Message>,
    ) {
        let mut state = self.state();
        let Some((id, open, volumes)) = state.volume_of(message.function) else {
            message.reply_to.reply(Answer::Failed(BlockError::EIO));
            return;
        };
        if open.is_busy(range) {
            open.blocked.push(message);
            return;
        }
        let settled = self.epochs.passed(open.shared_at);
        let found = volumes.map(disk, id, range, LOOKUP_EXTENTS).and_then(|mapped| {
            let copies = |partial: bool, block| partial && locate(&mapped.extents, block).is_some();
            if !settled
                && (copies(partial_head, range.first) || copies(partial_tail, last_of(range)))
            {
                // Writes from before the block was shared may still be in flight to it: a copy
                // would lack them.
                return Ok(None);
            }
            let Some(missing) = missing_part(&mapped) else { return Ok(Some(Err(mapped))) };
            match volumes.allocate(disk, id, missing) {
                Ok(grant) => Ok(Some(Ok((mapped, grant)))),
                Err(error) => {
                    let own = without_guard(volumes, disk, (id, range), &error);
                    own.map(|mapped| Some(Err(mapped))).ok_or(error)
                }
            }
        });
        let (mapped, grant) = match found {
            Ok(Some(Ok(found))) => found,
            Ok(None) => return self.wait_for_epoch(&mut state, message),
            // The volume has its own blocks there: the tree lacks mappings of the metadata.
            Ok(Some(Err(mapped))) => return self.show_mapped(state, message, &mapped),
            Err(error) => return self.refuse_allocation(state, message, id, &error),
        };
        let granted = grant.range();
        let extents = grant.extents().to_vec();
        let grant = open_volume_add(&mut state, message.function, grant);
        drop(state);
        let Some(grant) = grant else { return };

        // First fills the blocks that the write covers only partly.
        let last = last_of(granted);
        let head = partial_head.then_some(granted.first);
        let tail = (partial_tail && last_of(range) == last && head != Some(last)).then_some(last);
        let filled = head.into_iter().chain(tail).try_for_each(|block| {
            let Some(target) = locate(&extents, block) else { return Ok(()) };
            self.fill(disk, locate(&mapped.extents, block), target)
        });
        let answer = match filled {
            Ok(()) => Answer::Grant { grant, range: granted, extents },
            Err(error) => {
                self.events
                    .note(&self.name, format!("the store failed to fill a fresh block: {error}"));
                self.end_grant(message.function, grant, to_do);
                Answer::Failed(BlockError::EIO)
            }
        };
        if !message.reply_to.reply(answer) {
            self.end_grant(message.function, grant, to_do);
        }
    }

    /// Keeps a message until a commit has freed space, or answers it with the error.
    fn refuse_allocation(
        &self,
        mut state: MutexGuard<'_, State>,
        message: Message,
        id: VolumeId,
        error: &VolumeError,
    ) {
        if let VolumeError::NoSpace { after_commit: true } = error {
            state.for_space.push(message);
            drop(state);
            self.commits.want();
            return;
        }
        let name = state.name_of(id);
        drop(state);
        message.reply_to.reply(self.refuse(&name, error));
    }

    /// Puts what a volume has mapped into the tree, and lets the function walk it again.
    fn show_mapped(&self, mut state: MutexGuard<'_, State>, message: Message, mapped: &Mapped) {
        let answer = match self.show(&mut state, message.function, mapped) {
            Err(SetError::OutOfNodes(_)) => return self.wait_for_epoch(&mut state, message),
            Err(_) => Answer::Failed(BlockError::EIO),
            Ok(()) => Answer::Rewalk,
        };
        drop(state);
        message.reply_to.reply(answer);
    }

    /// Copies the block `source` to a fresh block, or fills it with zeros.
    fn fill(&self, disk: &mut dyn Disk, source: Option<Plba>, target: Plba) -> io::Result<()> {
        let block_bytes = self.block_bytes();
        let mut block = vec![0; block_bytes as usize];
        let byte = |block: Plba| {
            block.0.checked_mul(u64::from(block_bytes)).ok_or(io::ErrorKind::InvalidInput)
        };
        if let Some(source) = source {
            disk.read(byte(source)?, &mut block)?;
        }
        disk.write(byte(target)?, &block)
    }

    fn block_bytes(&self) -> u32 {
        self.state().volumes.block_bytes()
    }

    /// Returns a grant's blocks; questions blocked by the grant go to `to_do`.
    fn end_grant(&self, function: FunctionId, grant: GrantId, to_do: &mut Vec<Message>) {
        let mut state = self.state();
        let Some((_, open, volumes)) = state.volume_of(function) else { return };
        if let Some(grant) = open.grants.remove(grant) {
            volumes.release(grant);
        }
        to_do.append(&mut open.blocked);
        // Other questions may wait for its room in the log, or for its blocks.
        to_do.append(&mut state.for_space);
    }

    /// Maps a grant's blocks, whose data is written: the volume now has that data.
    pub(super) fn link(
        &self,
        message: Message,
        grant: GrantId,
        all: bool,
        disk: &mut dyn Disk,
        to_do: &mut Vec<Message>,
    ) {
        let mut state = self.state();
        let transaction = state.transaction;
        let found = state.volume_of(message.function).and_then(|(id, open, volumes)| {
            let grant = open.grants.remove(grant)?;
            to_do.append(&mut open.blocked);
            Some((id, open, volumes, grant))
        });
        let Some((id, open, volumes, grant)) = found else {
            message.reply_to.reply(Answer::Failed(BlockError::EIO));
            return;
        };
        if !all {
            volumes.release(grant);
            to_do.append(&mut state.for_space);
            message.reply_to.reply(Answer::Failed(BlockError::EIO));
            return;
        }
        let range = grant.range();
        let answer = match volumes.link(disk, grant) {
            Ok(()) if self.answers_when_durable => {
                open.changed(transaction);
                self.withhold(&mut state, id, range, message.reply_to);
                drop(state);
                self.commits.want();
                return;
            }
            Ok(()) => {
                open.changed(transaction);
                // As in the metadata, also where it calls a block shared that no other volume has:
                // copying a block relies on no write to it in place.
                match volumes.map(disk, id, range, LOOKUP_EXTENTS) {
                    Ok(mapped) if mapped.covered == range => {
                        self.set_or_prune(&mut state, message.function, range, &mapped.extents);
                    }
                    _ => {
                        open.tree.prune(range);
                        let retired = open.tree.take_retired();
                        state.limbo.retire(retired, &self.epochs);
                    }
                }
                Answer::Done
            }
            Err(error) if without_guard(volumes, disk, (id, range), &error).is_some() => {
                Answer::Rewalk
            }
            Err(VolumeError::NoSpace { after_commit: true }) => {
                // No space for the metadata: the grant's blocks are not the guest's, so the guest's
                // data is written again.
                state.for_space.push(Message { question: Question::Retry, ..message });
                drop(state);
                self.commits.want();
                return;
            }
            Err(error) => {
                let name = state.name_of(id);
                self.refuse(&name, &error)
            }
        };
        self.end_change(state, message.reply_to, answer);
    }

    /// Answers a question that has changed mappings, which are in the log by now.
    fn end_change(&self, state: MutexGuard<'_, State>, reply_to: ReplyTo, answer: Answer) {
        // A question that waits for room in the log waits for a commit of its entries.
        let is_short = state.volumes.log_wants_commit() || !state.for_space.is_empty();
        drop(state);
        if is_short {
            self.commits.want();
        } else {
            self.commits.note_change();
        }
        reply_to.reply(answer);
    }

    /// Unmaps blocks that the guest has discarded.
    pub(super) fn unmap(&self, message: Message, range: BlockRange, disk: &mut dyn Disk) {
        let mut state = self.state();
        let transaction = state.transaction;
        let Some((id, open, volumes)) = state.volume_of(message.function) else {
            message.reply_to.reply(Answer::Failed(BlockError::EIO));
            return;
        };
        if open.is_busy(range) {
            open.blocked.push(message);
            return;
        }
        let answer = match volumes.unmap(disk, id, range) {
            // A range that was a durable hole already was not changed.
            Ok(()) if self.answers_when_durable && volumes.is_dirty(id) => {
                open.changed(transaction);
                self.withhold(&mut state, id, range, message.reply_to);
                drop(state);
                self.commits.want();
                return;
            }
            Ok(()) => {
                open.changed(transaction);
                self.set_or_prune(&mut state, message.function, range, &[]);
                Answer::Done
            }
            Err(VolumeError::NoSpace { after_commit: true }) => {
                state.for_space.push(message);
                drop(state);
                self.commits.want();
                return;
            }
            Err(error) => {
                let name = state.name_of(id);
                self.refuse(&name, &error)
            }
        };
        self.end_change(state, message.reply_to, answer);
    }
}

/// Locks a grant's blocks in its volume, or returns them if the volume is closed.
fn open_volume_add(
    state: &mut State,
    function: FunctionId,
    grant: sidecore_volume::Grant,
) -> Option<GrantId> {
    match state.volume_of(function) {
        Some((_, open, _)) => Some(open.grants.add(grant)),
        None => {
            state.volumes.release(grant);
            None
        }
    }
}

/// The first part of a looked-up range in which nothing can be written in place; `None` if its
/// first block can.
fn missing_part(mapped: &Mapped) -> Option<BlockRange> {
    let own = mapped.extents.iter().find(|extent| !extent.shared);
    let end =
        own.map_or_else(|| mapped.covered.end().unwrap_or(Vlba(u64::MAX)), |extent| extent.first);
    let missing = BlockRange::between(mapped.covered.first, end);
    (missing.count > 0).then_some(missing)
}

/// After an error of a write that takes fresh blocks: what is mapped, if there was no space for
/// them and only the guard of a deduplication has kept the write from blocks that it can write in
/// place. The guard ends then. Nothing is lost by that: after a write to its blocks there would be
/// no remap in any case.
fn without_guard(
    volumes: &mut Volumes,
    disk: &mut dyn Disk,
    (id, range): (VolumeId, BlockRange),
    error: &VolumeError,
) -> Option<Mapped> {
    let (VolumeError::NoSpace { .. }
    | VolumeError::QuotaExceeded { .. }
    | VolumeError::DiskFull(_)) = error
    else {
        return None;
    };
    let guarded = volumes.map(disk, id, range, LOOKUP_EXTENTS).ok()?;
    if !volumes.yield_guard(&guarded.extents) {
        return None;
    }
    let mapped = volumes.map(disk, id, range, LOOKUP_EXTENTS).ok()?;
    missing_part(&mapped).is_none().then_some(mapped)
}

/// The last block of a range that is not empty.
fn last_of(range: BlockRange) -> Vlba {
    Vlba(range.first.0.saturating_add(range.count).saturating_sub(1))
}

/// The physical place of a block.
fn locate(extents: &[Extent], block: Vlba) -> Option<Plba> {
    let extent = extents.iter().find(|extent| extent.range().contains(block))?;
    let skip = block.0.checked_sub(extent.first.0)?;
    extent.physical.0.checked_add(skip).map(Plba)
}
