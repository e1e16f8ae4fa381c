//! Rules of a failover that can be turned off.

use sidecore_vrio::Neglected;

/// A rule without which a failover loses or shows what it must not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// One of the ownership's.
    Ownership(sidecore_ownership::Rule),
    /// One of the channel's.
    Channel(sidecore_vrio::Rule),
    /// A supervisor kills its daemon when its lease ends.
    Kill,
    /// The owner key is released when the locks have shown no request in flight. Neglected: a
    /// close after the end of the lease counts, and renewals are not heard of while it goes on.
    Look,
    /// A daemon that was fenced answers nothing. Neglected: the fence cuts it from the stores only.
    Silence,
    /// Each start of a daemon has an incarnation of its own, and with it an epoch.
    Incarnation,
}

impl Rule {
    /// All rules that can be neglected.
    pub const ALL: [Self; 10] = [
        Self::Ownership(sidecore_ownership::Rule::Fence),
        Self::Ownership(sidecore_ownership::Rule::FenceResult),
        Self::Channel(sidecore_vrio::Rule::Replay),
        Self::Channel(sidecore_vrio::Rule::ReplayOrder),
        Self::Channel(sidecore_vrio::Rule::ReplayFirst),
        Self::Channel(sidecore_vrio::Rule::FlushCovers),
        Self::Kill,
        Self::Look,
        Self::Silence,
        Self::Incarnation,
    ];

    pub(super) const fn of_ownership(rule: Option<Self>) -> Option<sidecore_ownership::Rule> {
        match rule {
            Some(Self::Ownership(rule)) => Some(rule),
            _ => None,
        }
    }

    pub(super) fn of_channel(rule: Option<Self>) -> Neglected {
        match rule {
            Some(Self::Channel(rule)) => Neglected::only(rule),
            _ => Neglected::default(),
        }
    }
}
