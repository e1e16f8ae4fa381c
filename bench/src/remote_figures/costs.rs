//! The useful nanoseconds of requests, counted on one core.
//!
//! Each stage is measured with three shapes of batches: one request of 4 KiB, several of them, and
//! several of 64 KiB. The parts that a poll, a request and a byte cost follow from these.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use sidecore_block::{BlockDevice, Geometry, Operation, RamStore};
use sidecore_luks::{KEY_BYTES, SectorSize, Segment, Tweaks, Xts};
use sidecore_stage_encrypt::EncryptStore;

use super::local_rig::LocalRig;
use super::{BYTES, Bench};
use crate::cores;
use crate::process::watched;
use crate::record::{OURS, params};
use crate::remote_block::rig::{Execution, Rig};
use crate::rounds::Rounds;
use sidecore_plan::simulation::{Costs, Path, Stage};

const DISK_BYTES: u64 = 64 << 20;
const LONG_BYTES: u32 = 64 << 10;
/// The sizes and depths of the batches.
const SHAPES: [(u32, u64); 3] = [(BYTES, 1), (BYTES, MANY), (LONG_BYTES, LONG_MANY)];
const MANY: u64 = 16;
const LONG_MANY: u64 = 8;
/// Sectors that are encrypted one by one: LUKS2's smallest.
const SECTOR: SectorSize = SectorSize::SMALLEST;

/// The store below the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Disk {
    /// In memory.
    Ram,
    /// In memory, encrypted with AES-256-XTS.
    Encrypted,
}

impl Disk {
    const fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Encrypted => "encrypted",
        }
    }

    fn open(self) -> Result<Arc<dyn BlockDevice>> {
        let ram = Arc::new(RamStore::new(Geometry::new(DISK_BYTES, 512))?);
        Ok(match self {
            Self::Ram => ram,
            Self::Encrypted => {
                let segment =
                    Segment { offset_bytes: 0, len_bytes: None, sector: SECTOR, first_unit: 0 };
                Arc::new(EncryptStore::new(ram, key(), segment, false)?)
            }
        })
    }
}

/// A key like any other: the two halves differ.
fn key() -> Xts {
    Xts::new(&std::array::from_fn::<u8, KEY_BYTES, _>(|index| index as u8))
}

/// The costs of a disk, as a remote one and as a local one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Costed {
    pub(super) remote: Costs,
    pub(super) local: Costs,
}

/// The nanoseconds of the library of the cipher alone, for each byte.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Library {
    pub(super) encrypt_ns: f64,
    pub(super) decrypt_ns: f64,
}

/// The parts of a stage that takes `one` nanosecond for a request of 4 KiB alone, `many` for each
/// of several, and `long` for each of several of 64 KiB.
fn fit([one, many, long]: [f64; 3]) -> Stage {
    let Stage { poll_ns, .. } = Stage::of_batches([one, many], MANY as f64);
    let of_short = (one - poll_ns).max(0.0);
    let of_long = long - poll_ns / LONG_MANY as f64;
    let byte_ns = ((of_long - of_short) / f64::from(LONG_BYTES - BYTES)).max(0.0);
    let request_ns = (of_short - byte_ns * f64::from(BYTES)).max(0.0);
    Stage { poll_ns, request_ns, byte_ns }
}

impl Bench {
    /// Measures the costs of a disk.
    pub(super) fn costs(&mut self, disk: Disk) -> Result<Costed> {
        let mut costed = Costed::default();
        for (operation, name) in [(Operation::Read, "read"), (Operation::Write, "write")] {
            let mut paths = [Path::default(); 2];
            let case = |place: &str| format!("costs/{place}/{}/{name}", disk.name());
            let clock = self.experiment.clock.clone();
            let mut rig = Rig::new(&clock, disk.open()?, Execution::Here)?;
            let names = ["client", "iohost"];
            [paths[0].client, paths[0].here] =
                self.stages(&case("remote"), names, |(bytes, depth), count| {
                    let stages = rig.run((operation, bytes.into(), depth), count)?;
                    Ok([
                        stages.client_submits + stages.client_receives,
                        stages.iohost_receives + stages.iohost_answers,
                    ])
                })?;
            let mut rig = Rig::new(&clock, disk.open()?, Execution::OnHelper)?;
            let names = ["hands_over", "helper", "answers"];
            [paths[0].forward, paths[0].helper, paths[0].answer] =
                self.stages(&case("handed-over"), names, |(bytes, depth), count| {
                    let stages = rig.run((operation, bytes.into(), depth), count)?;
                    Ok([stages.iohost_receives, stages.helper, stages.iohost_answers])
                })?;
            let mut rig = LocalRig::new(&clock, &*disk.open()?, MANY as u16, LONG_BYTES)?;
            let names = ["guest", "sidecore"];
            [paths[1].client, paths[1].here] =
                self.stages(&case("local"), names, |(bytes, depth), count| {
                    rig.run((operation, bytes, depth), count)
                })?;
            let [remote, local] = paths;
            if operation == Operation::Write {
                (costed.remote.write, costed.local.write) = (remote, local);
            } else {
                (costed.remote.read, costed.local.read) = (remote, local);
            }
        }
        Ok(costed)
    }

    /// Measures the stages of requests with all shapes of batches.
    fn stages<const N: usize>(
        &mut self,
        case: &str,
        names: [&str; N],
        mut run: impl FnMut((u32, u64), usize) -> Result<[f64; N]>,
    ) -> Result<[Stage; N]> {
        let mut medians = [[0.0; 3]; N];
        for (index, shape) in SHAPES.into_iter().enumerate() {
            let count = self.plan.stages / (shape.0 / BYTES) as usize;
            run(shape, count / 10 + 1)?;
            let mut rounds = [(); N].map(|()| Rounds::new());
            for _ in 0..self.plan.rounds {
                let (ns, waited_share) = watched(|| run(shape, count + 1))?;
                let counts = waited_share < cores::UNDISTURBED_SHARE;
                rounds.iter_mut().zip(ns).for_each(|(rounds, ns)| rounds.add(ns, counts));
            }
            let case = format!("{case}/{}/qd{}", size(shape.0), shape.1);
            let mut line = format!("  {case:<44}");
            for ((name, rounds), medians) in names.iter().zip(&rounds).zip(&mut medians) {
                let how = params([
                    ("how", "counted on one core".into()),
                    ("block_bytes", shape.0.into()),
                    ("depth", shape.1.into()),
                ]);
                let (median, params) = rounds.settle(how);
                medians[index] = median;
                line.push_str(&format!("  {name} {median:.0} ns"));
                self.experiment.records.measure(&case, OURS, name, median, "ns", params);
            }
            eprintln!("{line}");
        }
        Ok(medians.map(fit))
    }

    /// Measures the library of the cipher alone.
    pub(super) fn library(&mut self) -> Result<Library> {
        let (xts, mut tweaks) = (key(), Tweaks::default());
        let mut data = vec![0x5a; LONG_BYTES as usize];
        let mut measure = |decrypts: bool| -> Result<f64> {
            let (begin, mut bytes) = (Instant::now(), 0_u64);
            while begin.elapsed() < self.plan.run.max(Duration::from_millis(1)) {
                if decrypts {
                    xts.decrypt(bytes / 512, SECTOR, &mut data, &mut tweaks)?;
                } else {
                    xts.encrypt(bytes / 512, SECTOR, &mut data, &mut tweaks)?;
                }
                bytes += u64::from(LONG_BYTES);
            }
            Ok(begin.elapsed().as_nanos() as f64 / bytes as f64)
        };
        let mut settled = [0.0; 2];
        for (decrypts, name) in [(false, "encrypt"), (true, "decrypt")] {
            let mut rounds = Rounds::new();
            for _ in 0..self.plan.rounds {
                let (ns, waited_share) = watched(|| measure(decrypts))?;
                rounds.add(ns, waited_share < cores::UNDISTURBED_SHARE);
            }
            let how = params([("how", "the library alone, sectors of 512 bytes".into())]);
            let (median, params) = rounds.settle(how);
            settled[usize::from(decrypts)] = median;
            let records = &mut self.experiment.records;
            records.measure("costs/aes-256-xts", "library", name, median, "ns/B", params);
            eprintln!("  costs/aes-256-xts  {name} {:.2} GB/s", 1.0 / median);
        }
        let [encrypt_ns, decrypt_ns] = settled;
        Ok(Library { encrypt_ns, decrypt_ns })
    }
}

fn size(bytes: u32) -> String {
    format!("{}KiB", bytes >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_stage_give_the_measured_times_again() {
        let stage = Stage { poll_ns: 120.0, request_ns: 80.0, byte_ns: 0.03 };
        let measured = SHAPES.map(|(bytes, depth)| stage.in_batch(bytes, depth as f64));
        let fitted = fit(measured);
        let same = |one: f64, other: f64| (one - other).abs() < 1e-9;
        assert!(
            same(fitted.poll_ns, stage.poll_ns)
                && same(fitted.request_ns, stage.request_ns)
                && same(fitted.byte_ns, stage.byte_ns),
            "{fitted:?}"
        );
        // Noise makes no time negative.
        let odd = fit([100.0, 110.0, 90.0]);
        assert_eq!(odd, Stage { poll_ns: 0.0, request_ns: 100.0, byte_ns: 0.0 });
    }
}
