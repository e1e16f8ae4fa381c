//! Two functions on one shared controller, or on a controller each.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use anyhow::{Context, Result};
use sidecore_block::{BlockDevice, Geometry, RamStore};
use sidecore_controller::{
    Controller, ControllerOptions, FunctionOptions, PhysicalDisk, VirtualFunction,
};
use sidecore_volume::{Disk, FormatOptions};

use super::sidecore::{Queues, Work, serve};
use super::{Case, DEPTH, Placement, Plan};
use crate::cores::Partner;

/// The size of a function's volume.
const VOLUME_BYTES: u64 = 64 << 20;
/// Space for a controller's metadata and reserve, with a margin.
const SPARE_BYTES: u64 = 32 << 20;
const PIECE_BYTES: u64 = 1 << 20;

/// The functions' weights: different ones, because the cost must not depend on them.
const WEIGHTS: [u32; 2] = [100, 400];

pub(super) struct Arrangement {
    functions: [Arc<VirtualFunction>; 2],
    _controllers: Vec<Arc<Controller>>,
}

/// The result of a run.
pub(super) struct Run {
    /// Requests a second of both functions.
    pub(super) per_s: f64,
    /// The share of the time that a sidecore waited for its core: the larger of the two.
    pub(super) waited_share: f64,
}

impl Arrangement {
    /// Makes the arrangement of one controller and that of two, in this order if `shared_first`.
    pub(super) fn both(shared_first: bool) -> Result<[Self; 2]> {
        if shared_first {
            return Ok([Self::new(true)?, Self::new(false)?]);
        }
        let apart = Self::new(false)?;
        Ok([Self::new(true)?, apart])
    }

    /// Makes two functions, on one controller if `is_shared`.
    fn new(is_shared: bool) -> Result<Self> {
        let first = controller(if is_shared { 2 } else { 1 })?;
        let second = if is_shared { Arc::clone(&first) } else { controller(1)? };
        let functions =
            [function(&first, "first", WEIGHTS[0])?, function(&second, "second", WEIGHTS[1])?];
        Ok(Self { functions, _controllers: vec![first, second] })
    }

    /// Serves the functions on this thread and the partner's.
    pub(super) fn run(&self, case: Case, partner: &Partner, plan: &Plan) -> Result<Run> {
        let barrier = Arc::new(Barrier::new(2));
        let work = |sidecore: usize| Work {
            queues: self.queues(case, sidecore),
            bytes: case.bytes,
            span_bytes: VOLUME_BYTES,
            depth: DEPTH,
            warm_up: plan.warm_up,
            measured: plan.measured,
            barrier: Arc::clone(&barrier),
        };
        let (ours, theirs) = (work(0), work(1));
        let other = partner.run(move || serve(&theirs))?;
        let runs = [serve(&ours)?, other.recv().context("the second sidecore died")??];
        let served: u64 = runs.iter().map(|(served, _)| *served).sum();
        let per_s = served as f64 / Duration::as_secs_f64(&plan.measured);
        Ok(Run { per_s, waited_share: runs[0].1.max(runs[1].1) })
    }

    /// The queues that a sidecore serves.
    fn queues(&self, case: Case, sidecore: usize) -> Vec<Queues> {
        let here = |function: usize| match case.placement {
            Placement::Apart | Placement::Resting if function != sidecore => 0,
            Placement::Apart | Placement::Resting => case.queues,
            Placement::Spread => case.queues / 2,
        };
        let of = |function: usize| Queues {
            function: Arc::clone(&self.functions[function]),
            count: here(function),
            rests: case.placement == Placement::Resting && function == 1,
        };
        (0..self.functions.len()).map(of).collect()
    }
}

fn controller(volumes: u64) -> Result<Arc<Controller>> {
    let capacity_bytes = volumes * (VOLUME_BYTES + SPARE_BYTES);
    let store = RamStore::new(Geometry::new(capacity_bytes, 512)).context("not enough memory")?;
    let format =
        FormatOptions { block_bytes: 4096, label: String::new(), uuid: [1; 16], force: false };
    let options = ControllerOptions {
        format: Some(format),
        commit_interval: Duration::from_secs(3600),
        ..ControllerOptions::default()
    };
    Ok(Controller::open("bench", Arc::new(store), &options, None)?)
}

/// Makes a function on a volume that is written from its start to its end.
fn function(
    controller: &Arc<Controller>,
    volume: &str,
    weight: u32,
) -> Result<Arc<VirtualFunction>> {
    controller.create_volume(volume, VOLUME_BYTES, None)?;
    let function =
        controller.open_function(&FunctionOptions { weight, ..FunctionOptions::new(volume) })?;
    let device: Arc<dyn BlockDevice> = Arc::clone(&function) as _;
    let mut disk = PhysicalDisk::open(&device)?;
    let piece = vec![1; usize::try_from(PIECE_BYTES)?];
    for offset_bytes in (0..VOLUME_BYTES).step_by(piece.len()) {
        disk.write(offset_bytes, &piece).context("cannot fill a volume")?;
    }
    disk.flush().context("cannot fill a volume")?;
    Ok(function)
}
