//! The reports of mirrors.

use sidecore_mirror::{LegState, Mirror, Status, Waits};

use super::{MirrorInUse, Mirrors, State};
use crate::report::{LegReport, LegWord, MirrorReport, MirrorState};

impl Mirrors {
    /// Reports the mirrors in use, by their names.
    pub(crate) fn reports(&self) -> Vec<MirrorReport> {
        self.all().iter().map(|mirror| mirror.report()).collect()
    }
}

fn word(state: &LegState) -> LegWord {
    match state {
        LegState::None => LegWord::Out,
        LegState::Missing => LegWord::Missing,
        LegState::Failed => LegWord::Failed,
        LegState::Behind => LegWord::Behind,
        LegState::Copying => LegWord::Copying,
        LegState::InSync => LegWord::InSync,
    }
}

impl MirrorInUse {
    fn report(&self) -> MirrorReport {
        let state = self.state();
        let mut report = MirrorReport {
            name: self.name.clone(),
            witness: if self.spec.asks_operator { "operator" } else { "none" }.to_owned(),
            copy_bps: self.spec.copy_bytes_per_s,
            ..MirrorReport::default()
        };
        let Some(mirror) = &state.mirror else {
            if let Some(why) = &state.failure {
                (report.state, report.reason) = (MirrorState::Refused, Some(why.clone()));
            }
            if !state.is_closed {
                report.legs = self.spec.legs.iter().map(|leg| self.outside(leg, &state)).collect();
            }
            return report;
        };
        let (status, layout) = (mirror.status(), mirror.layout());
        report.state = match &status.waits {
            Some(_) => MirrorState::Waiting,
            None => MirrorState::Running,
        };
        report.reason = status.waits.as_ref().map(ToString::to_string);
        if let (true, Some(Waits::Permission { missing, .. })) =
            (self.spec.asks_operator, &status.waits)
        {
            report.asks_without = missing.numbers().collect();
        }
        (report.epoch, report.read) = (status.epoch, status.read);
        (report.capacity_bytes, report.region_bytes) = (layout.capacity_bytes, layout.region_bytes);
        report.dirty_regions = status.dirty_regions as u64;
        (report.copied_bytes, report.leg_failures) = (status.copied_bytes, status.failures);
        report.retried_reads = status.read_errors;
        report.legs = self.legs(&state, mirror, &status);
        report
    }

    fn legs(&self, state: &State, mirror: &Mirror, status: &Status) -> Vec<LegReport> {
        let mut legs = Vec::new();
        let mut unnamed = status.members;
        let leg = |number: usize, store: Option<&String>| {
            let state = status.legs.get(number).map_or(LegWord::Missing, word);
            let left = (status.regions_to_copy as u64).saturating_mul(mirror.layout().region_bytes);
            LegReport {
                leg: Some(number),
                store: store.cloned(),
                state,
                reason: status.reasons.get(number).cloned().flatten(),
                to_copy_bytes: if state == LegWord::Copying { left } else { 0 },
            }
        };
        for store in &self.spec.legs {
            match self.number_of(store, state, mirror) {
                Some(number) => {
                    unnamed = unnamed.without(sidecore_mirror::LegSet::of(number));
                    legs.push(leg(number, Some(store)));
                }
                None => legs.push(self.outside(store, state)),
            }
        }
        legs.extend(unnamed.numbers().map(|number| leg(number, None)));
        legs
    }

    /// A store that is no leg.
    fn outside(&self, store: &String, state: &State) -> LegReport {
        let (word, reason) = match state.stores.get(store) {
            None => (LegWord::Missing, Some("it does not answer".to_owned())),
            Some(Err(why)) => (LegWord::Missing, Some(why.clone())),
            Some(Ok(_)) => (LegWord::Out, state.refused.get(store).cloned()),
        };
        LegReport { store: Some(store.clone()), state: word, reason, ..LegReport::default() }
    }
}
