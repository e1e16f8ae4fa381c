//! Changes of mappings that are shown and answered when they are durable: where no log
//! keeps them over the death of the process.
//!
//! What a volume shows is used without asking: writes go in place, and zeroes are not
//! written to holes. Both are answered at once, so a change must not be shown before it is
//! durable. Until then nothing of its blocks is in the tree, they are held, and whoever
//! needs them waits.

use std::io;

use sidecore_block::BlockError;
use sidecore_extent::BlockRange;
use sidecore_volume::{Disk, VolumeId};

use super::grants::Grants;
use super::{Hypervisor, State};
use crate::mail::{Answer, GrantId, ReplyTo};

/// A change that waits for its commit.
pub(crate) struct Withheld {
    /// The generation that makes it durable.
    generation: u64,
    volume: VolumeId,
    range: BlockRange,
    hold: GrantId,
    /// `None` once it has been answered that there is no space for the commit.
    reply_to: Option<ReplyTo>,
}

impl State {
    /// Holds what is not to be shown yet of a volume that is opened again.
    pub(crate) fn hold_withheld(&mut self, volume: VolumeId) -> Grants {
        let mut grants = Grants::default();
        for withheld in self.withheld.iter_mut().filter(|withheld| withheld.volume == volume) {
            withheld.hold = grants.hold(withheld.range);
        }
        grants
    }
}

impl Hypervisor {
    /// Withholds a change that was made just now, until a commit.
    pub(super) fn withhold(&self, state: &mut State, volume: VolumeId, range: BlockRange, reply_to: ReplyTo) {
        let generation = state.volumes.open_generation();
        let Some(open) = state.open.get_mut(&volume) else {
            // Nobody is left whom it could be shown to.
            reply_to.reply(Answer::Failed(BlockError::EIO));
            return;
        };
        open.tree.prune(range);
        let retired = open.tree.take_retired();
        let hold = open.grants.hold(range);
        state.limbo.retire(retired, &self.epochs);
        state.withheld.push(Withheld { generation, volume, range, hold, reply_to: Some(reply_to) });
    }

    /// Shows and answers the changes that have become durable; if nothing becomes durable
    /// any more, the others fail. To be called after each commit, with its result.
    pub(super) fn show_withheld(&self, result: &io::Result<()>, disk: &mut dyn Disk) {
        let (mut blocked, mut answers) = (Vec::new(), Vec::new());
        {
            let mut state = self.state();
            let durable = state.volumes.generation();
            let is_over = state.volumes.cannot_commit().is_some();
            let (due, mut later): (Vec<_>, Vec<_>) = std::mem::take(&mut state.withheld)
                .into_iter()
                .partition(|withheld| withheld.generation <= durable || is_over);
            for withheld in due {
                let is_durable = withheld.generation <= durable;
                let answer = if is_durable { Answer::Done } else { Answer::Failed(BlockError::EIO) };
                answers.extend(withheld.reply_to.map(|reply_to| (reply_to, answer)));
                if let Some(open) = state.open.get_mut(&withheld.volume) {
                    open.grants.remove(withheld.hold);
                    blocked.append(&mut open.blocked);
                }
            }
            if result.is_err() {
                // Nobody knows when there will be space, so nobody waits for it.
                let no_space = |reply_to| (reply_to, Answer::Failed(BlockError::NoSpace));
                answers.extend(later.iter_mut().filter_map(|withheld| withheld.reply_to.take()).map(no_space));
                for withheld in &later {
                    let Some(open) = state.open.get_mut(&withheld.volume) else { continue };
                    answers.extend(open.blocked.drain(..).map(|message| no_space(message.reply_to)));
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
