//! The VMhost's side: the session with an IOhost, and the stores of its devices.
//!
//! ```text
//!    sidecore A              sidecore B (has the session)
//!    queue ─► HandoverChannel ──► desk ─► vrio::Client ─► LinkPort ─► link
//!                         queue ─► LocalChannel ─┘
//! ```
//!
//! * [`Iohost`] is a session as all threads see it: its counters, and the commands for it.
//! * [`Session`] is the unit that serves it. It takes the requests of all queues to one desk, whose
//!   table names them for the engine, in parts of 64 KiB at most.
//! * [`Opening`] waits until the IOhost has attached a device, and becomes its [`RemoteStore`].
//!
//! A queue of the session's sidecore calls the desk: its requests are on the wire before the call
//! returns. A queue of another sidecore sends them through a bounded queue, and is woken by an
//! eventfd if it sleeps when one comes back.

mod desk;
mod handover;
mod iohost;
mod local;
mod session;
mod stats;
mod status;
mod store;
mod table;

pub use desk::{MoveError, Moved};
pub use iohost::Iohost;
pub use session::{DrainReport, OpenedReport, Session, SessionOptions, SessionReport};
pub use stats::{SessionCounts, SessionStats};
pub use status::{DeviceStatus, Waiting, WaitsFor};
pub use store::{Canceller, OpenError, Opening, RemoteStore};
