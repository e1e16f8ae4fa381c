//! A witness that keeps the rule, and remembers what it has granted when. It answers by itself, or
//! refuses and is an operator, who permits the same by command.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sidecore_mirror::{Claim, Granted, Witness};

use super::legs::Order;

/// See the module. All clones are one witness.
#[derive(Clone, Default)]
pub(super) struct SimWitness {
    order: Order,
    is_operator: bool,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    granted: Vec<(u64, Granted)>,
    /// The last claim that an operator was asked to permit.
    asked: Option<Claim>,
    is_away: bool,
}

impl SimWitness {
    /// A witness that has granted this, if anything.
    pub(super) fn new(order: &Order, granted: Option<Granted>, is_operator: bool) -> Self {
        let granted = granted.into_iter().map(|granted| (0, granted)).collect();
        let state = Arc::new(Mutex::new(State { granted, ..State::default() }));
        Self { order: order.clone(), is_operator, state }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_away(&self, is_away: bool) {
        self.state().is_away = is_away;
    }

    /// Whether the operator permits now what was refused last.
    pub(super) fn permits(&self) -> bool {
        let asked = self.state().asked.take();
        asked.is_some_and(|claim| self.grants(&claim).is_ok())
    }

    fn grants(&self, claim: &Claim) -> Result<(), String> {
        let at = self.order.tick();
        let mut state = self.state();
        if state.is_away {
            return Err("the witness does not answer".to_owned());
        }
        if let Some((_, granted)) = state.granted.last()
            && !granted.allows(claim)
        {
            return Err(format!("{} may, since epoch {}", granted.legs, granted.epoch));
        }
        let new = Granted { epoch: claim.epoch, legs: claim.legs };
        let granted = state.granted.last().map_or(new, |(_, granted)| granted.then(claim));
        state.granted.push((at, granted));
        Ok(())
    }

    /// The last claim that it had granted at a time.
    pub(super) fn granted_at(&self, time: u64) -> Option<Granted> {
        let state = self.state();
        let before = state.granted.iter().take_while(|(at, _)| *at <= time);
        before.last().map(|(_, granted)| *granted)
    }
}

impl Witness for SimWitness {
    fn may_go_on_alone(&self, claim: &Claim) -> Result<(), String> {
        if self.is_operator {
            self.state().asked = Some(*claim);
            return Err("no operator has permitted it".to_owned());
        }
        self.grants(claim)
    }

    fn asks_operator(&self) -> bool {
        self.is_operator
    }
}
