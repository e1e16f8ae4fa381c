//! The plan: which legs a request goes to. One word, which queues load once a turn.

use crate::legs::LegSet;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Changes with each plan.
    pub(crate) version: u32,
    /// A write and a flush are answered when these have it.
    pub(crate) required: LegSet,
    /// The leg that is copied to: it gets the writes to regions that are equal on it already.
    pub(crate) copied: LegSet,
    /// Reads are from this leg.
    pub(crate) read: usize,
    /// No request starts.
    pub(crate) is_paused: bool,
}

impl Plan {
    /// Nothing is done before the keeper has begun an epoch.
    pub(crate) const CLOSED: Self = Self {
        version: 0,
        required: LegSet::EMPTY,
        copied: LegSet::EMPTY,
        read: 0,
        is_paused: true,
    };

    pub(crate) fn to_word(self) -> u64 {
        let [a, b, c, d] = self.version.to_le_bytes();
        let read = u8::try_from(self.read).unwrap_or(0);
        let required = self.required.bits();
        u64::from_le_bytes([
            required,
            self.copied.bits(),
            read,
            u8::from(self.is_paused),
            a,
            b,
            c,
            d,
        ])
    }

    #[inline]
    pub(crate) fn from_word(word: u64) -> Self {
        let [required, copied, read, paused, a, b, c, d] = word.to_le_bytes();
        Self {
            version: u32::from_le_bytes([a, b, c, d]),
            required: LegSet::from_bits(required),
            copied: LegSet::from_bits(copied),
            read: usize::from(read),
            is_paused: paused != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_a_word() {
        let plan = Plan {
            version: 0x0102_0304,
            required: LegSet::first(2),
            copied: LegSet::of(7),
            read: 1,
            is_paused: false,
        };
        assert_eq!(Plan::from_word(plan.to_word()), plan);
        assert_eq!(Plan::from_word(Plan::CLOSED.to_word()), Plan::CLOSED);
    }
}
