//! The block seam: what a front end asks of a store, and what a stage is put between.
//!
//! # Architecture
//!
//! A [`BlockDevice`] is shared by all sidecores. Each queue that is served from it opens a
//! [`BlockChannel`] on its own sidecore, and from then on only that sidecore touches the channel:
//! it is not `Send`, so nothing in it needs a lock. A stage is a device around a device, whose
//! channels are channels around channels; its specification is a [`Stage`].
//!
//! # I/O model
//!
//! Requests travel as [`Box<BlockRequest>`], a pointer each, in vectors that the caller owns and
//! reuses: [`BlockChannel::submit`] takes from one, [`BlockChannel::poll`] gives to another.
//! Dynamic dispatch is paid once a batch. The boxes come from the front end's pool and go back to
//! it, so that nothing is allocated for a request.
//!
//! A request carries its data as a scatter-gather list of guest memory
//! ([`Segments`](sidecore_memory::Segments)); a store reads and writes that memory directly. The
//! guest can change it meanwhile: a store or stage that looks at a byte twice must copy it first.
//!
//! # Duties
//!
//! * Every request submitted comes out of `poll` exactly once, in any order,
//!   with its result set. Dropping one is a bug that [`Tag`] reports.
//! * A [`Operation::Flush`] covers every write that was *completed* before it
//!   was submitted; ordering anything else is the guest's business.
//! * Requests are in bounds and aligned to [`Geometry::block_bytes`]: the front
//!   end has checked them ([`Geometry::check`]), and stores check again where
//!   memory safety or another tenant's data depends on it.
//!
//! # Errors
//!
//! A store says what happened in its own words ([`BlockError`]); the front end
//! alone turns that into a status of its protocol.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::todo,
        clippy::unimplemented
    )
)]

mod bounce;
mod contain;
mod device;
mod error;
mod filter;
mod findings;
mod in_flight;
mod limits;
mod mapped;
mod meter;
mod null;
mod observe;
mod ram;
mod recording;
mod request;
mod split;
mod stage;
mod stats;
mod sums;

pub use bounce::{BounceParts, PartNumber};
pub use contain::{StageAccount, StageCounts, StageThreads, contain};
pub use device::{BlockChannel, BlockDevice, Geometry, Next, Readiness};
pub use error::{BlockError, BoundsError};
pub use filter::FilterChannel;
pub use findings::{BadBlock, Findings, FindingsCounts, FindingsStats};
pub use in_flight::{BATCH, Budget, Context, Flush, InFlight, Paused, QueueName, SwapChannel};
pub use limits::{Gate, Limit, Limits};
pub use mapped::Mapped;
pub use meter::{Meter, MeterCounts, MeterStats};
pub use null::NullStore;
pub use observe::{Observe, Observer, OpenedObserver, observe};
pub use ram::RamStore;
pub use recording::{Recording, RecordingCounts, RecordingState, RecordingStats};
pub use request::{Batch, BlockRequest, Detour, Operation, Tag, dropped_tags};
pub use split::{Place, Split, SplitTable};
pub use stage::{OpenedStage, Stage, StageError, open_stage};
pub use stats::{QueueCounts, QueueStats};
