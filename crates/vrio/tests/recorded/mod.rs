//! Recorded conversations, and players of either side.

pub mod client;
pub mod format;
pub mod frame;
pub mod host;
pub mod recorder;
pub mod requests;
pub mod said;
