//! The PCI function that a controller is.

mod bar;
mod capabilities;
mod config;
mod function;
pub(crate) mod ids;
mod msix;
mod nvme_function;

pub use bar::MAX_QUEUE_PAIRS;
pub(crate) use bar::TRAPPED_STRIDE;
pub use function::{AccessError, BarInfo, Interrupts, MappableArea, PciFunction, Region};
pub use nvme_function::{FunctionSetup, NvmeFunction};
