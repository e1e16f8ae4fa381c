//! Keys on disk.

mod directory;
mod file;
mod invitation;
mod text;

pub use directory::{Clients, Invited, KeyDirectory};
pub use invitation::Invitation;

#[cfg(test)]
mod tests;
