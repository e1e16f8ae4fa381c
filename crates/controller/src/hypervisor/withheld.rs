//! Changes of mappings that are published and answered only when they are durable: where no log
//! preserves them over the death of the process.
//!
//! Channels use published mappings without asking: they write in place, and write no zeros to
//! holes. Both complete at once, so a change must not be published before it is durable. Until then
//! the tree has no mapping of its blocks, the blocks are locked, and requests for them wait.

use std::io;

use sidecore_block::BlockError;
use sidecore_extent::BlockRange;
use sidecore_volume::{Disk, VolumeId};

use super::grants::Grants;
use super::{Hypervisor, State};
use crate::mail::{Answer, GrantId, ReplyTo};

/// A change that waits for its commit.
pub(crate) struct Withheld {
    /// The generation that makes the change durable.
    generation: u64,
    volume: VolumeId,
    range: BlockRange,
    lock: GrantId,
    /// `None` after the answer that there is no space for the commit.
    reply_to: Option<ReplyTo>,
}

impl State {
    /// Locks the ranges of withheld changes of a volume that is opened again.
    pub(crate) fn lock_withheld(&mut self, volume: VolumeId) -> Grants {
        let mut grants = Grants::default();
        for withheld in self.withheld.iter_mut().filter(|withheld| withheld.volume == volume) {
            withheld.lock = grants.lock(withheld.range);
        }
        grants
    }
}

impl Hypervisor {
    /// Withholds a change, made in this transaction, until its commit.
    pub(super) fn withhold(
        &self,
        state: &mut State,
        volume: VolumeId,
        range: BlockRange,
        reply_to: ReplyTo,
    ) {
        let generation = state.volumes.open_generation();
        let Some(open) = state.open.get_mut(&volume) else {
            // The function is closed, so there is no tree to change.
            reply_to.reply(Answer::Failed(BlockError::EIO));
            return;
        };
        open.tree.prune(range);
        let retired = open.tree.take_retired();
        let lock = open.grants.lock(range);
        state.limbo.retire(retired, &self.epochs);
        state.withheld.push(Withheld { generation, volume, range, lock, reply_to: Some(reply_to) });
    }

    /// Publishes and answers the changes that have become durable; fails the others if nothing can
    /// become durable. Call after each commit, with its result.
    pub(super) fn show_withheld(&self, result: &io::Result<()>, disk: &mut dyn Disk) {
        let (mut blocked, mut answers) = (Vec::new(), Vec::new());
        {
            let mut state = self.state();
            let durable = state.volumes.generation();
            let is_over = state.volumes.cannot_commit().is_some();
            let (ended, mut later): (Vec<_>, Vec<_>) = std::mem::take(&mut state.withheld)
                .into_iter()
                .partition(|withheld| withheld.generation <= durable || is_over);
            for withheld in ended {
                let is_durable = withheld.generation <= durable;
                let answer =
                    if is_durable { Answer::Done } else { Answer::Failed(BlockError::EIO) };
                answers.extend(withheld.reply_to.map(|reply_to| (reply_to, answer)));
                if let Some(open) = state.open.get_mut(&withheld.volume) {
                    open.grants.remove(withheld.lock);
                    blocked.append(&mut open.blocked);
                }
            }
            if result.is_err() {
                // The time when the store will have space is unknown, so requests do not wait for
                // it.
                let no_space = |reply_to| (reply_to, Answer::Failed(BlockError::NoSpace));
                answers.extend(
                    later.iter_mut().filter_map(|withheld| withheld.reply_to.take()).map(no_space),
                );
                for withheld in &later {
                    let Some(open) = state.open.get_mut(&withheld.volume) else { continue };
                    answers
                        .extend(open.blocked.drain(..).map(|message| no_space(message.reply_to)));
                }
            }
            state.withheld.append(&mut later);
        }
        for (reply_to, answer) in answers {
            reply_to.reply(answer);
        }
        for message in blocked {
            self.serve(message, disk);
        }
    }
}
