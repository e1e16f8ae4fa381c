//! What is done about a miss (thesis 5.3, figure 5.2).
//!
//! A write that finds no block of its own is given fresh ones. Nobody can see
//! them until its data is there: not through the tree, which does not map them yet,
//! and not after a crash, because the transaction that maps them is written after a
//! flush of the store. Blocks of which the write covers only a part are filled up
//! first, with zeros or with what they are a copy of. So a fresh block never shows
//! what it held for somebody else.

use std::io;
use std::sync::MutexGuard;

use sidecore_block::BlockError;
use sidecore_extent::{BlockRange, Extent, FunctionId, SetError};
use sidecore_units::{Plba, Vlba};
use sidecore_volume::{Disk, Mapped, VolumeError};

use super::{Hypervisor, State};
use crate::mail::{Answer, GrantId, Message, Question, ReplyTo};

/// Extents that are looked up for one miss: a leaf's worth.
const LOOKUP_EXTENTS: usize = 128;

impl Hypervisor {
    /// Reads what was pruned from the metadata again, from the start of `range` on and
    /// as far behind it as one lookup goes: who reads on need not come again.
    pub(super) fn regenerate(&self, message: Message, range: BlockRange, disk: &mut dyn Disk) {
        let mut state = self.state();
        let Some((id, open, volumes)) = state.volume_of(message.function) else {
            message.reply_to.reply(Answer::Failed(BlockError::EIO));
            return;
        };
        let blocks = open.tree.root().blocks();
        let range = BlockRange { first: range.first, count: blocks.saturating_sub(range.first.0).max(range.count) };
        // What is in between is not in the metadata yet.
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
                Err(SetError::OutOfNodes(_)) => return self.wait_for_grace(&mut state, message),
                Err(error) => {
                    tracing::error!(controller = self.name, "a mapping that no tree takes: {error}");
                    Answer::Failed(BlockError::EIO)
                }
            },
        };
        drop(state);
        message.reply_to.reply(answer);
    }

    /// Puts a question off until a grace period is over.
    fn wait_for_grace(&self, state: &mut State, message: Message) {
        state.for_grace.push(message);
        self.commits.call();
    }

    /// Puts what the metadata says into the function's tree.
    fn show(&self, state: &mut State, function: FunctionId, mapped: &Mapped) -> Result<(), SetError> {
        self.set(state, function, mapped.covered, &mapped.extents)
    }

    /// Changes a tree; if it has no nodes for that, makes room and tries again.
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

    /// Changes a tree so that it says nothing wrong, whatever room there is: without
    /// any, it is pruned.
    fn set_or_prune(&self, state: &mut State, function: FunctionId, range: BlockRange, extents: &[Extent]) {
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
            let last = Vlba(range.first.0.saturating_add(range.count).saturating_sub(1));
            let copies = |partial: bool, block| partial && locate(&mapped.extents, block).is_some();
            if !settled && (copies(partial_head, range.first) || copies(partial_tail, last)) {
                // A block that is to be copied may be being written in place, since
                // before it was shared: the copy would be without that.
                return Ok(None);
            }
            let Some(missing) = missing_part(&mapped) else { return Ok(Some(Err(mapped))) };
            let grant = volumes.allocate(disk, id, missing)?;
            Ok(Some(Ok((mapped, grant))))
        });
        let (mapped, grant) = match found {
            Ok(Some(Ok(found))) => found,
            Ok(None) => return self.wait_for_grace(&mut state, message),
            // It has blocks of its own: the tree knows less than the metadata.
            Ok(Some(Err(mapped))) => {
                let answer = match self.show(&mut state, message.function, &mapped) {
                    Err(SetError::OutOfNodes(_)) => return self.wait_for_grace(&mut state, message),
                    Err(_) => Answer::Failed(BlockError::EIO),
                    Ok(()) => Answer::Rewalk,
                };
                drop(state);
                message.reply_to.reply(answer);
                return;
            }
            Err(VolumeError::NoSpace { after_commit: true }) => {
                state.for_space.push(message);
                drop(state);
                self.commits.want();
                return;
            }
            Err(error) => {
                let name = state.name_of(id);
                drop(state);
                message.reply_to.reply(self.refuse(&name, &error));
                return;
            }
        };
        let granted = grant.range();
        let extents = grant.extents().to_vec();
        let grant = open_volume_add(&mut state, message.function, grant);
        drop(state);
        let Some(grant) = grant else { return };

        // Blocks that the write covers only in part are completed first.
        let last = granted.first.0.saturating_add(granted.count).saturating_sub(1);
        let covers_last = range.first.0.saturating_add(range.count).saturating_sub(1) == last;
        let head = partial_head.then_some(granted.first);
        let tail = (partial_tail && covers_last && head != Some(Vlba(last))).then_some(Vlba(last));
        let filled = head.into_iter().chain(tail).try_for_each(|block| {
            let Some(target) = locate(&extents, block) else { return Ok(()) };
            self.fill(disk, locate(&mapped.extents, block), target)
        });
        let answer = match filled {
            Ok(()) => Answer::Grant { grant, range: granted, extents },
            Err(error) => {
                self.events.note(&self.name, format!("the store failed to fill a fresh block: {error}"));
                self.end_grant(message.function, grant, to_do);
                Answer::Failed(BlockError::EIO)
            }
        };
        if !message.reply_to.reply(answer) {
            self.end_grant(message.function, grant, to_do);
        }
    }

    /// Makes a fresh block hold what `source` holds, or zeros.
    fn fill(&self, disk: &mut dyn Disk, source: Option<Plba>, target: Plba) -> io::Result<()> {
        let block_bytes = self.block_bytes();
        let mut block = vec![0; block_bytes as usize];
        let byte = |block: Plba| block.0.checked_mul(u64::from(block_bytes)).ok_or(io::ErrorKind::InvalidInput);
        if let Some(source) = source {
            disk.read(byte(source)?, &mut block)?;
        }
        disk.write(byte(target)?, &block)
    }

    fn block_bytes(&self) -> u32 {
        self.state().volumes.block_bytes()
    }

    /// Gives a grant's blocks back; who waited for it goes to `to_do`.
    fn end_grant(&self, function: FunctionId, grant: GrantId, to_do: &mut Vec<Message>) {
        let mut state = self.state();
        let Some((_, open, volumes)) = state.volume_of(function) else { return };
        if let Some(grant) = open.grants.remove(grant) {
            volumes.release(grant);
        }
        to_do.append(&mut open.blocked);
        // Its room in the log, and its blocks, may be what others wait for.
        to_do.append(&mut state.for_space);
    }

    /// The data of a grant is written: from now on it is what the volume shows.
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
                // As the metadata says, also where it calls shared what nobody else has:
                // whoever copies a block relies on nobody writing it in place.
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
            Err(VolumeError::NoSpace { after_commit: true }) => {
                // For the metadata: its blocks are the guest's no more, so it writes
                // its data anew.
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
        // Whoever waits for room in the log waits for a commit of what is in it now.
        let is_short = state.volumes.log_wants_commit() || !state.for_space.is_empty();
        drop(state);
        if is_short {
            self.commits.want();
        } else {
            self.commits.note_change();
        }
        reply_to.reply(answer);
    }

    /// Blocks that the guest does not need any more.
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
            // What is a hole and durable already was not changed.
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

/// Keeps a grant with its volume, or gives it back if the volume is gone.
fn open_volume_add(state: &mut State, function: FunctionId, grant: sidecore_volume::Grant) -> Option<GrantId> {
    match state.volume_of(function) {
        Some((_, open, _)) => Some(open.grants.add(grant)),
        None => {
            state.volumes.release(grant);
            None
        }
    }
}

/// The first part of what was looked up in which nothing can be written in place;
/// `None` if its first block can.
fn missing_part(mapped: &Mapped) -> Option<BlockRange> {
    let own = mapped.extents.iter().find(|extent| !extent.shared);
    let end = own.map_or_else(|| mapped.covered.end().unwrap_or(Vlba(u64::MAX)), |extent| extent.first);
    let missing = BlockRange::between(mapped.covered.first, end);
    (missing.count > 0).then_some(missing)
}

/// Where a block lies.
fn locate(extents: &[Extent], block: Vlba) -> Option<Plba> {
    let extent = extents.iter().find(|extent| extent.range().contains(block))?;
    let skip = block.0.checked_sub(extent.first.0)?;
    extent.physical.0.checked_add(skip).map(Plba)
}
