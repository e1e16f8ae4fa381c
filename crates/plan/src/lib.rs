//! The prices of racks with and without IOhosts, and the sidecores that they need: the cost model
//! of vRIO (section 3), and a queueing simulation of clients and sidecores.
//!
//! A [`Plan`] is a file of parts, racks and a load. [`Report::of`] composes the hosts of each rack,
//! and counts its sidecores by simulation. Everything is calculated: the result depends on the file
//! alone.
#![forbid(unsafe_code)]

mod demand;
mod file;
mod paper;
mod rack;
pub mod random;
pub mod simulation;
pub mod work;

use serde::Serialize;

pub use demand::{Demand, Sidecores};
pub use file::{Fault, MAX_FILE_BYTES, PAPER, Plan};
pub use paper::Cell;
pub use rack::{DriveRow, Host, Item, Rack};

/// All that follows from a plan.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The racks with their hosts and prices.
    pub racks: Vec<Rack>,
    /// The racks with drives.
    pub drives: Vec<DriveRow>,
    /// The sidecores of each rack; `None` without a load.
    pub sidecores: Option<Vec<Demand>>,
    /// Beside the tables of the paper; `None` for other parts than the paper's.
    pub paper: Option<Printed>,
}

/// The paper's tables beside its parts.
#[derive(Clone, Debug, Serialize)]
pub struct Printed {
    /// All cells of Tables 1 and 2.
    pub cells: Vec<Cell>,
    /// The places where the paper contradicts its parts, a sentence each.
    pub contradictions: Vec<String>,
}

impl Report {
    /// Composes the racks of a plan, and counts their sidecores.
    ///
    /// # Errors
    /// A host cannot have the parts that it needs.
    pub fn of(plan: &Plan) -> Result<Self, Fault> {
        let racks = rack::racks(plan)?;
        let drives = rack::with_drives(plan, &racks);
        Ok(Self { racks, drives, sidecores: demand::demands(plan), paper: None })
    }

    /// The report of [`PAPER`], with the paper's own tables.
    ///
    /// # Errors
    /// As [`Report::of`].
    pub fn of_paper() -> Result<Self, Fault> {
        let report = Self::of(&Plan::parse(PAPER)?)?;
        let cells = paper::cells(&report.racks);
        let contradictions = paper::contradictions(&report.racks, &report.drives);
        Ok(Self { paper: Some(Printed { cells, contradictions }), ..report })
    }
}
