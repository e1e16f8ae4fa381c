//! How idle time is spent.

use sidecore_units::Nanos;

/// What a pollable does when it has nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleMode {
    /// Never sleeps: no kick is ever asked for.
    Poll,
    /// Spins for a while after its last work, then sleeps until a kick.
    Adaptive {
        /// How long it spins.
        spin: Nanos,
    },
    /// Never spins: each burst of work is announced by a kick. The paper's
    /// baseline, and the yardstick.
    Interrupt,
}

impl IdleMode {
    /// How long to go on polling after the last work; `None` for ever.
    #[must_use]
    pub const fn spin(self) -> Option<Nanos> {
        match self {
            Self::Poll => None,
            Self::Adaptive { spin } => Some(spin),
            Self::Interrupt => Some(Nanos::ZERO),
        }
    }
}
