//! The faults of IOhosts, of their stores and of their paths.

use sidecore_units::Nanos;

use super::super::network::Way;
use super::process::STEPS;
use super::world::{MS, World};
use crate::ownership::etcd::STORE;

/// The time of a lease. A write that hangs while its owner hands over takes one or two.
const LEASE_MS: u64 = 3_000;

impl World {
    pub(super) fn fault(&mut self) {
        let index = self.random.below(2) as usize;
        // Long enough for a lease to end, or short.
        let most = if self.random.once_in(2) { 9_000 } else { 400 };
        let until = self.now.after(Nanos((1 + self.random.below(most)) * MS));
        let kind = self.random.below(16);
        match kind {
            0..7 => self.stop(index, until),
            7 | 8 => {
                self.tell(|| format!("the daemon of {index} dies"));
                self.outcome.deaths += 1;
                self.end_machine(index, 1_000);
            }
            9 => self.cut_power(),
            10 => self.machines[index].supervisor.cut_until = until,
            11 => self.etcd_away_until = until,
            12 | 13 => {
                let hands_over = self.machines[index].supervisor.daemon.hand_over(STORE);
                self.outcome.hand_overs += u64::from(hands_over);
                // A daemon that takes longer to end than its lease lasts.
                if hands_over && self.random.once_in(2) {
                    let time = Nanos((LEASE_MS + self.random.below(LEASE_MS)) * MS);
                    self.kernel.hang(self.now.after(time));
                }
            }
            _ => {
                let client = self.random.below(self.members.len() as u64) as usize;
                for network in &mut self.networks {
                    network.cut(Way::ToHost, client, until);
                    network.cut(Way::ToClient, client, until);
                }
            }
        }
    }

    /// The owner is stopped more often than the other IOhost.
    fn stop(&mut self, index: usize, until: Nanos) {
        let index = if self.random.once_in(4) { index } else { self.owner };
        let after = self.random.below(STEPS);
        let (supervisor, after) = match self.random.below(4) {
            0 => (true, None),
            1 => (false, Some(after)),
            _ => (true, Some(after)),
        };
        self.tell(|| format!("{index} is stopped until {until:?}: {supervisor} {after:?}"));
        self.outcome.stops += 1;
        self.machines[index].stop(until, (supervisor, after));
    }
}
