//! Permission to go on without the other half of the legs.

use crate::legs::LegSet;

/// A question to a witness: whether these legs may go on alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The mirror.
    pub mirror: [u8; 16],
    /// The newest epoch that one of the legs holds.
    pub held: u64,
    /// The epoch that they want to begin.
    pub epoch: u64,
    /// The legs.
    pub legs: LegSet,
}

/// Decides which half of a mirror's legs goes on.
///
/// It remembers the last claim that it has granted, over its own death and that of all that ask it:
/// [`Granted::allows`] is the rule.
pub trait Witness: Send + Sync {
    /// Grants the claim, durably, or says why not. May wait.
    ///
    /// # Errors
    /// The reason, for reports. The claim is made again later.
    fn may_go_on_alone(&self, claim: &Claim) -> Result<(), String>;

    /// Whether an operator may permit what this refuses: see
    /// [`Mirror::permit`](crate::Mirror::permit).
    fn asks_operator(&self) -> bool {
        false
    }
}

/// The last claim that a witness has granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granted {
    /// Its epoch.
    pub epoch: u64,
    /// Its legs.
    pub legs: LegSet,
}

impl Granted {
    /// Whether a claim may be granted after this one: the claimants know of this one's epoch, or
    /// were all named by it, so that none of the others has gone on.
    #[must_use]
    pub fn allows(&self, claim: &Claim) -> bool {
        self.epoch <= claim.held || claim.legs.is_within(self.legs)
    }

    /// Returns the memory of the witness after it has granted this claim, too. The claim's epoch
    /// may be an older one, if the claimants have died before they had written that of `self`.
    #[must_use]
    pub fn then(&self, claim: &Claim) -> Self {
        Self { epoch: self.epoch.max(claim.epoch), legs: claim.legs }
    }
}

/// A witness for which an operator answers, by [`Mirror::permit`](crate::Mirror::permit): it
/// refuses each claim itself.
///
/// The operator has to make sure that the missing legs are not in use elsewhere.
#[derive(Debug, Default)]
pub struct Operator;

impl Witness for Operator {
    fn may_go_on_alone(&self, _: &Claim) -> Result<(), String> {
        Err("no operator has permitted it".to_owned())
    }

    fn asks_operator(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(held: u64, epoch: u64, leg: usize) -> Claim {
        Claim { mirror: [7; 16], held, epoch, legs: LegSet::of(leg) }
    }

    #[test]
    fn the_other_half_is_refused_until_it_knows_of_the_epoch() {
        let granted = Granted { epoch: 6, legs: LegSet::of(1) };
        assert!(!granted.allows(&claim(5, 6, 0)));
        assert!(!granted.allows(&claim(5, 7, 0)));
        assert!(granted.allows(&claim(6, 7, 0)), "both were together since");
    }

    #[test]
    fn a_claim_may_be_repeated_by_the_same_legs() {
        let granted = Granted { epoch: 6, legs: LegSet::of(1) };
        assert!(granted.allows(&claim(5, 6, 1)), "it died before it wrote the epoch");
        assert!(granted.allows(&claim(6, 7, 1)));
        assert!(granted.allows(&claim(4, 5, 1)), "it had tried a larger number before");
        assert_eq!(
            granted.then(&claim(4, 5, 1)),
            granted,
            "the other half knows no more than it did"
        );
        assert_eq!(granted.then(&claim(6, 7, 0)), Granted { epoch: 7, legs: LegSet::of(0) });
    }
}
