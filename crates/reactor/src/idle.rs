//! The ways to spend idle time.

use sidecore_units::Nanos;

/// The behaviour of a pollable without work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleMode {
    /// Never sleeps, and never asks for a kick.
    Poll,
    /// Spins for a while after its last work, then sleeps until a kick.
    Adaptive {
        /// The time to spin after the last work.
        spin: Nanos,
    },
    /// Never spins: each burst of work is announced by a kick. The paper's baseline, and the
    /// yardstick.
    Interrupt,
}

impl IdleMode {
    /// The time to poll after the last work; `None` for ever.
    #[must_use]
    pub const fn spin(self) -> Option<Nanos> {
        match self {
            Self::Poll => None,
            Self::Adaptive { spin } => Some(spin),
            Self::Interrupt => Some(Nanos::ZERO),
        }
    }
}
