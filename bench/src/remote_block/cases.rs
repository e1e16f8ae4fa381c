//! The cases: stores, operations, sizes, depths, clients and faults, and the systems of each.

use std::time::Duration;

use super::iohost::{Build, Disk, Fault, Setting};
use super::nbd::Peer;
use super::wire::Wire;
use super::{HANDOVER, LOCAL, LOSSLESS, ONE_CLIENT, PLAIN, UNFLOODED};
use crate::against;
use crate::load::{BLOCK_BYTES, Work};
use crate::record::{FLOOR, OURS};

pub(super) const DEPTHS: [u16; 3] = [1, 32, 128];
/// The longest requests are fewer: their data are larger than the caches.
const LONG_DEPTHS: [u16; 2] = [1, 32];
/// Requests of each client where there are several.
const SHARED_DEPTH: u16 = 8;
const SMALL_BYTES: u32 = 512;
pub(super) const LONG_BYTES: u32 = 64 << 10;
/// The numbers of clients of the cases that have several.
const CLIENTS: [u16; 4] = [2, 4, 8, 16];

/// The load of one case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) disk: Disk,
    pub(super) setting: Setting,
    pub(super) work: Work,
}

impl Case {
    pub(super) fn name(&self) -> String {
        let Self { disk, setting, work } = self;
        let operation = if work.write { "randwrite" } else { "randread" };
        let size = match work.bytes {
            SMALL_BYTES => "512",
            LONG_BYTES => "64k",
            _ => "",
        };
        let (wire, disk) = (setting.wire.name(), disk.name());
        let mut name = format!("{wire}/{disk}/{operation}{size}/qd{}", work.depth);
        if setting.clients > 1 && setting.fault != Fault::Flood {
            name.push_str(&format!("/c{}", setting.clients));
        }
        if setting.is_sealed {
            name.push_str("/aead");
        }
        name.push_str(&setting.fault.suffix("/"));
        name
    }

    /// The same work without neighbours and seal, with as many requests in flight in all.
    pub(super) fn of_one_client(&self) -> Work {
        Work { depth: self.work.depth * self.setting.clients, ..self.work }
    }

    /// The names of the systems, and their kinds: this build first.
    pub(super) fn kinds(&self, builds: bool) -> Vec<(String, Kind)> {
        let ours = (OURS.to_owned(), Kind::Remote(Build::This, self.setting));
        let mut kinds = vec![ours];
        if builds {
            kinds.push((against::before(OURS), Kind::Remote(Build::Before, self.setting)));
            return kinds;
        }
        let mut add = |name: &str, kind| kinds.push((name.to_owned(), kind));
        let (wire, plain) = (self.setting.wire, Setting::plain(self.setting.wire));
        if self.setting.fault == Fault::Flood {
            add(UNFLOODED, Kind::Unflooded);
            return kinds;
        }
        if self.setting != plain {
            let name = match self.setting {
                Setting { fault: Fault::Loss(_), .. } => LOSSLESS,
                Setting { is_sealed: true, .. } => PLAIN,
                _ => ONE_CLIENT,
            };
            add(name, Kind::Remote(Build::This, plain));
            return kinds;
        }
        if wire == Wire::Memory {
            add(LOCAL, Kind::Local);
        }
        if self.disk == Disk::Null && self.work.bytes != LONG_BYTES {
            add(FLOOR, Kind::Exchange);
        }
        if wire == Wire::Memory && self.disk == Disk::Null && self.work.bytes == BLOCK_BYTES {
            add(HANDOVER, Kind::Handover);
        }
        if wire != Wire::Memory && self.work.bytes != SMALL_BYTES {
            for peer in Peer::ALL.into_iter().filter(|peer| peer.has(self.disk)) {
                add(peer.name(), Kind::Nbd(peer));
            }
        }
        kinds
    }
}

/// A system of a case.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// An IOhost, whose clients make the faults of the setting.
    Remote(Build, Setting),
    /// The IOhost of the case, while the client that floods is idle.
    Unflooded,
    /// The same store as a local disk.
    Local,
    /// The link alone. Of those over a virtual wire, the faster one of packet sockets and AF_XDP.
    Exchange,
    /// The data alone.
    Handover,
    /// A server of NBD.
    Nbd(Peer),
}

/// All cases, with runs of this length on disks of this size.
pub(super) fn all(duration: Duration, disk_bytes: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |disk, setting, bytes: u32, depth| {
        for write in [false, true] {
            let blocks = disk_bytes / u64::from(bytes);
            let work = Work { write, depth, bytes, blocks, duration, ..Work::default() };
            cases.push(Case { disk, setting, work });
        }
    };
    for wire in Wire::ALL {
        let plain = Setting::plain(wire);
        for bytes in [SMALL_BYTES, BLOCK_BYTES] {
            DEPTHS.into_iter().for_each(|depth| add(Disk::Null, plain, bytes, depth));
        }
        for depth in LONG_DEPTHS {
            add(Disk::Null, plain, LONG_BYTES, depth);
            add(Disk::Null, Setting { is_sealed: true, ..plain }, BLOCK_BYTES, depth);
        }
    }
    let (memory, packet) = (Setting::plain(Wire::Memory), Setting::plain(Wire::Packet));
    for depth in LONG_DEPTHS {
        add(Disk::Ram, memory, BLOCK_BYTES, depth);
        add(Disk::Ram, packet, LONG_BYTES, depth);
        add(Disk::Slow, memory, BLOCK_BYTES, depth);
        add(Disk::Slow, packet, BLOCK_BYTES, depth);
        for percent in [1, 10] {
            let lossy = Setting { fault: Fault::Loss(percent), ..packet };
            add(Disk::Null, lossy, BLOCK_BYTES, depth);
            add(Disk::Null, lossy, LONG_BYTES, depth);
        }
    }
    let flooded = Setting { clients: 2, fault: Fault::Flood, ..memory };
    add(Disk::Null, flooded, BLOCK_BYTES, 1);
    for clients in CLIENTS {
        let several = Setting { clients, ..memory };
        add(Disk::Null, several, SMALL_BYTES, SHARED_DEPTH);
        add(Disk::Null, several, BLOCK_BYTES, SHARED_DEPTH);
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::Of;
    use crate::remote_block::BOUNDS;
    use crate::remote_block::sealing::METRIC;

    #[test]
    fn names_are_unique_and_each_bound_has_a_case_with_its_peer() {
        let cases = all(Duration::ZERO, 1 << 20);
        let mut names: Vec<String> = cases.iter().map(Case::name).collect();
        for bound in &BOUNDS {
            let case = cases.iter().find(|case| case.name() == bound.case);
            let kinds = case.unwrap_or_else(|| panic!("no case {}", bound.case)).kinds(false);
            let peer = match bound.of {
                Of::Ratio(METRIC, _) => PLAIN,
                Of::Ratio(_, peer) => peer,
                Of::FloorRatio(_) => FLOOR,
                Of::Ours(..) => continue,
            };
            assert!(kinds.iter().any(|(name, _)| name == peer), "{bound:?}");
        }
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
