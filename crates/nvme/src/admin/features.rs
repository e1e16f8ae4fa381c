//! Get Features and Set Features (NVMe base 2.0, 5.15 and 5.27).

use serde::{Deserialize, Serialize};
use sidecore_spec_nvme::command::BROADCAST_NSID;
use sidecore_spec_nvme::feature::{
    ARBITRATION, ASYNCHRONOUS_EVENTS, ERROR_RECOVERY, INTERRUPT_COALESCING, INTERRUPT_VECTOR,
    KEEP_ALIVE_TIMER, NUMBER_OF_QUEUES, POWER_MANAGEMENT, TEMPERATURE_THRESHOLD,
    VOLATILE_WRITE_CACHE, WRITE_ATOMICITY,
};
use sidecore_units::Nanos;

use crate::admin::events::Event;
use crate::controller::{Controller, Outcome};
use crate::{Command, Status};

/// The composite temperature in kelvins: a constant, because there is no hardware that gets warm.
pub(crate) const TEMPERATURE: u16 = 300;
/// Warning and critical composite temperature threshold (figure 275, WCTEMP and CCTEMP).
pub(crate) const WARNING_TEMPERATURE: u16 = 343;
pub(crate) const CRITICAL_TEMPERATURE: u16 = 353;

/// Keep Alive Support (figure 275, KAS): the timer's granularity, in units of 100 ms.
pub(crate) const KEEP_ALIVE_UNITS: u16 = 10;

/// The Optional Asynchronous Events Supported (figure 275, OAES) that features can turn on:
/// Namespace Attribute Notices.
pub(crate) const NAMESPACE_NOTICES: u32 = 1 << 8;

/// Bits of Asynchronous Event Configuration that mean something: SMART / health critical warnings,
/// and the notices.
const EVENT_CONFIGURATION: u32 = 0xFF | NAMESPACE_NOTICES;

/// The critical warning about the temperature, in the log page as in the configuration of events
/// (figure 207).
pub(crate) const TEMPERATURE_WARNING: u8 = 1 << 1;

/// Feature identifiers that are supported (figure 316), and the bits of their Supported
/// Capabilities (figure 195).
pub(crate) const FEATURES: &[(u8, u32)] = &[
    (ARBITRATION, CHANGEABLE),
    (POWER_MANAGEMENT, CHANGEABLE),
    (TEMPERATURE_THRESHOLD, CHANGEABLE),
    (ERROR_RECOVERY, CHANGEABLE | NAMESPACE_SPECIFIC),
    (VOLATILE_WRITE_CACHE, CHANGEABLE),
    (NUMBER_OF_QUEUES, CHANGEABLE),
    (INTERRUPT_COALESCING, CHANGEABLE),
    (INTERRUPT_VECTOR, CHANGEABLE),
    (WRITE_ATOMICITY, CHANGEABLE),
    (ASYNCHRONOUS_EVENTS, CHANGEABLE),
    (KEEP_ALIVE_TIMER, CHANGEABLE),
];
const NAMESPACE_SPECIFIC: u32 = 1 << 1;
const CHANGEABLE: u32 = 1 << 2;

/// Coalescing Disable (figure 328).
const COALESCING_DISABLE: u32 = 1 << 16;

/// Dword 11 of each feature, as the host set it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Features {
    arbitration: u32,
    power_management: u32,
    over_temperature: u16,
    under_temperature: u16,
    error_recovery: u32,
    write_cache: bool,
    /// NCQR and NSQR as granted, 0's based; `None` before the host has asked: as many as there are.
    queues: Option<(u16, u16)>,
    coalescing: u32,
    /// The vectors that coalescing is disabled for, a bit each.
    uncoalesced: u128,
    write_atomicity: u32,
    events: u32,
    /// KATO in ms, rounded up; 0 if off.
    keep_alive_ms: u32,
    /// When the timer expires, by a clock that only this process has.
    #[serde(skip)]
    keep_alive_at: Option<Nanos>,
}

impl Default for Features {
    fn default() -> Self {
        Self {
            // No limit on how many commands are taken from a queue at once.
            arbitration: 0b111,
            power_management: 0,
            over_temperature: WARNING_TEMPERATURE,
            under_temperature: 0,
            error_recovery: 0,
            write_cache: true,
            queues: None,
            coalescing: 0,
            // Vector 0 is the admin queue's, which is never coalesced (5.27.1.6).
            uncoalesced: 1,
            write_atomicity: 0,
            events: 0,
            keep_alive_ms: 0,
            keep_alive_at: None,
        }
    }
}

impl Features {
    /// How many completion queues the host may create, at most.
    pub(crate) fn completion_queues(&self) -> u16 {
        self.queues.map_or(u16::MAX, |(completion, _)| completion.saturating_add(1))
    }

    /// How many submission queues the host may create, at most.
    pub(crate) fn submission_queues(&self) -> u16 {
        self.queues.map_or(u16::MAX, |(_, submission)| submission.saturating_add(1))
    }

    /// Whether the host has enabled notices of changed namespaces.
    pub(crate) const fn wants_namespace_notices(&self) -> bool {
        self.events & NAMESPACE_NOTICES != 0
    }

    /// The critical warnings that hold (figure 207).
    pub(crate) const fn critical_warnings(&self) -> u8 {
        // A threshold of FFFFh is never reached, one of 0 never undercut.
        let warm = TEMPERATURE >= self.over_temperature && self.over_temperature != u16::MAX;
        let cold = TEMPERATURE <= self.under_temperature;
        if warm || cold { TEMPERATURE_WARNING } else { 0 }
    }

    fn is_uncoalesced(&self, vector: u16) -> bool {
        self.uncoalesced.checked_shr(vector.into()).is_some_and(|bits| bits & 1 != 0)
    }

    fn wants_warning(&self) -> bool {
        self.events & u32::from(self.critical_warnings()) != 0
    }

    /// Starts the keep alive timer anew.
    pub(crate) fn keep_alive(&mut self, now: Nanos) {
        let armed = self.keep_alive_ms > 0;
        self.keep_alive_at =
            armed.then(|| now.after(Nanos::from_millis(self.keep_alive_ms.into())));
    }

    /// When the keep alive timer expires, if it runs.
    pub(crate) const fn keep_alive_at(&self) -> Option<Nanos> {
        self.keep_alive_at
    }
}

/// Dword 11 or the result of Number of Queues: NSQ in bits 15:0, NCQ in bits 31:16.
fn queue_counts((completion, submission): (u16, u16)) -> u32 {
    u32::from(submission) | u32::from(completion) << 16
}

impl Controller {
    /// Get Features.
    pub(crate) fn get_features(&mut self, command: &Command) -> Result<Outcome, Status> {
        let feature = (command.dword10() & 0xFF) as u8;
        let Some((_, capabilities)) = FEATURES.iter().find(|(id, _)| *id == feature) else {
            return Err(Status::INVALID_FIELD);
        };
        if feature == VOLATILE_WRITE_CACHE && !self.has_volatile_cache() {
            return Err(Status::INVALID_FIELD);
        }
        // SEL: what is not saveable has its default saved.
        let value = match command.dword10() >> 8 & 0b111 {
            0 => self.feature(feature, command, &self.features)?,
            1 | 2 => self.feature(feature, command, &Features::default())?,
            3 => *capabilities,
            _ => return Err(Status::INVALID_FIELD),
        };
        Ok(Outcome::Now(value))
    }

    fn feature(&self, feature: u8, command: &Command, values: &Features) -> Result<u32, Status> {
        let dword11 = command.dword11();
        Ok(match feature {
            ARBITRATION => values.arbitration,
            POWER_MANAGEMENT => values.power_management,
            TEMPERATURE_THRESHOLD => {
                // The composite sensor is the only one.
                match (dword11 >> 16 & 0xF, dword11 >> 20 & 0b11) {
                    (0, 0) => values.over_temperature.into(),
                    (0, 1) => values.under_temperature.into(),
                    _ => return Err(Status::INVALID_FIELD),
                }
            }
            ERROR_RECOVERY => {
                self.check_feature_namespace(command.nsid())?;
                values.error_recovery
            }
            VOLATILE_WRITE_CACHE => values.write_cache.into(),
            NUMBER_OF_QUEUES => {
                let all = self.limits.queue_pairs.saturating_sub(1);
                queue_counts(values.queues.unwrap_or((all, all)))
            }
            INTERRUPT_COALESCING => values.coalescing,
            INTERRUPT_VECTOR => {
                let vector = self.vector(dword11)?;
                let disabled = values.is_uncoalesced(vector);
                u32::from(vector) | if disabled { COALESCING_DISABLE } else { 0 }
            }
            WRITE_ATOMICITY => values.write_atomicity,
            ASYNCHRONOUS_EVENTS => values.events,
            KEEP_ALIVE_TIMER => values.keep_alive_ms,
            _ => return Err(Status::INVALID_FIELD),
        })
    }

    /// Set Features. Nothing is saveable.
    pub(crate) fn set_features(
        &mut self,
        command: &Command,
        now: Nanos,
    ) -> Result<Outcome, Status> {
        let feature = (command.dword10() & 0xFF) as u8;
        let Some((_, capabilities)) = FEATURES.iter().find(|(id, _)| *id == feature) else {
            return Err(Status::INVALID_FIELD);
        };
        if command.dword10() >> 31 != 0 {
            return Err(Status::FEATURE_NOT_SAVEABLE);
        }
        if capabilities & NAMESPACE_SPECIFIC != 0 {
            self.check_feature_namespace(command.nsid())?;
        } else if command.nsid() != 0 && command.nsid() != BROADCAST_NSID {
            return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC);
        }
        let value = command.dword11();
        match feature {
            ARBITRATION => self.features.arbitration = value & 0xFFFF_FF07,
            POWER_MANAGEMENT => {
                // There is power state 0 and no other.
                if value & 0x1F != 0 {
                    return Err(Status::INVALID_FIELD);
                }
                self.features.power_management = value & 0xFF;
            }
            TEMPERATURE_THRESHOLD => self.set_temperature_threshold(value)?,
            ERROR_RECOVERY => {
                // Bit 16: the error for deallocated blocks is not supported (NSFEAT).
                if value & 1 << 16 != 0 {
                    return Err(Status::INVALID_FIELD);
                }
                self.features.error_recovery = value & 0xFFFF;
            }
            VOLATILE_WRITE_CACHE => self.set_write_cache(value & 1 != 0)?,
            NUMBER_OF_QUEUES => return self.set_number_of_queues(value),
            INTERRUPT_COALESCING => self.set_coalescing(value & 0xFFFF),
            INTERRUPT_VECTOR => self.set_vector_coalescing(value)?,
            WRITE_ATOMICITY => self.features.write_atomicity = value & 1,
            ASYNCHRONOUS_EVENTS => {
                self.features.events = value & EVENT_CONFIGURATION;
                self.check_temperature();
            }
            KEEP_ALIVE_TIMER => {
                let unit_ms = u32::from(KEEP_ALIVE_UNITS).saturating_mul(100);
                self.features.keep_alive_ms = value.div_ceil(unit_ms).saturating_mul(unit_ms);
                self.features.keep_alive(now);
                // The controller's thread has to learn of the new timer.
                self.inbox.wake();
            }
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(Outcome::Now(0))
    }

    fn vector(&self, dword11: u32) -> Result<u16, Status> {
        let vector = (dword11 & 0xFFFF) as u16;
        if vector < self.limits.vectors { Ok(vector) } else { Err(Status::INVALID_FIELD) }
    }

    /// Checks the namespace identifier of a feature: the attached namespace, or all.
    fn check_feature_namespace(&self, nsid: u32) -> Result<(), Status> {
        match nsid {
            0 | BROADCAST_NSID => Ok(()),
            _ if self.namespace.as_ref().is_some_and(|namespace| namespace.id == nsid) => Ok(()),
            _ => Err(Status::INVALID_NAMESPACE),
        }
    }

    fn set_temperature_threshold(&mut self, value: u32) -> Result<(), Status> {
        // TMPSEL: the composite temperature, or all sensors.
        if ![0, 0xF].contains(&(value >> 16 & 0xF)) {
            return Err(Status::INVALID_FIELD);
        }
        let threshold = (value & 0xFFFF) as u16;
        match value >> 20 & 0b11 {
            0 => self.features.over_temperature = threshold,
            1 => self.features.under_temperature = threshold,
            _ => return Err(Status::INVALID_FIELD),
        }
        self.check_temperature();
        Ok(())
    }

    fn check_temperature(&mut self) {
        if self.features.wants_warning() {
            self.events.raise(Event::TemperatureThreshold);
        }
    }

    fn set_write_cache(&mut self, enabled: bool) -> Result<(), Status> {
        if !self.has_volatile_cache() {
            return Err(Status::INVALID_FIELD);
        }
        if !self.host.set_write_cache(enabled) {
            return Err(Status::FEATURE_NOT_CHANGEABLE);
        }
        self.features.write_cache = enabled;
        Ok(())
    }

    /// Number of Queues (5.27.1.5): grants the number that is asked for, at most as many as there
    /// are.
    fn set_number_of_queues(&mut self, value: u32) -> Result<Outcome, Status> {
        if !self.queues.is_empty() {
            return Err(Status::COMMAND_SEQUENCE_ERROR);
        }
        let (submission, completion) = ((value & 0xFFFF) as u16, (value >> 16) as u16);
        if submission == u16::MAX || completion == u16::MAX {
            return Err(Status::INVALID_FIELD);
        }
        let all = self.limits.queue_pairs.saturating_sub(1);
        let granted = (completion.min(all), submission.min(all));
        self.features.queues = Some(granted);
        Ok(Outcome::Now(queue_counts(granted)))
    }

    /// Interrupt Coalescing (5.27.1.6): a threshold, 0's based, in bits 7:0, a time in units of 100
    /// us in bits 15:8. Either being zero means none.
    fn set_coalescing(&mut self, value: u32) {
        self.features.coalescing = value;
        let (threshold, time) = (value & 0xFF, value >> 8 & 0xFF);
        if threshold == 0 || time == 0 {
            self.host.set_coalescing(0, 0);
        } else {
            self.host
                .set_coalescing((threshold as u16).saturating_add(1), time.saturating_mul(100));
        }
    }

    fn set_vector_coalescing(&mut self, value: u32) -> Result<(), Status> {
        let vector = self.vector(value)?;
        let disabled = value & COALESCING_DISABLE != 0;
        let bit = 1_u128.checked_shl(vector.into()).unwrap_or(0);
        if disabled {
            self.features.uncoalesced |= bit;
        } else {
            self.features.uncoalesced &= !bit;
        }
        self.host.set_vector_coalescing(vector, !disabled);
        Ok(())
    }

    /// Keep Alive (5.18).
    pub(crate) fn keep_alive(&mut self, now: Nanos) -> Result<Outcome, Status> {
        self.features.keep_alive(now);
        Ok(Outcome::Now(0))
    }

    /// Restores the features that the host has set in the process before.
    pub(crate) fn take_over_features(&mut self, features: Features, now: Nanos) {
        self.features = features;
        self.set_coalescing(self.features.coalescing);
        for vector in
            (0..self.limits.vectors).filter(|vector| self.features.is_uncoalesced(*vector))
        {
            self.host.set_vector_coalescing(vector, false);
        }
        if !self.features.write_cache {
            self.host.set_write_cache(false);
        }
        self.features.keep_alive(now);
        // The controller's thread has to learn of the new timer.
        self.inbox.wake();
    }

    /// All features at their defaults, as after a reset.
    pub(crate) fn reset_features(&mut self) {
        let before = std::mem::take(&mut self.features);
        if before.coalescing != 0 {
            self.host.set_coalescing(0, 0);
        }
        for vector in 0..self.limits.vectors {
            let disabled = self.features.is_uncoalesced(vector);
            if before.is_uncoalesced(vector) != disabled {
                self.host.set_vector_coalescing(vector, !disabled);
            }
        }
        if !before.write_cache {
            self.host.set_write_cache(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_warn_of_nothing_and_grant_all_queues() {
        let features = Features::default();
        assert_eq!(features.critical_warnings(), 0);
        assert_eq!(
            (features.completion_queues(), features.submission_queues()),
            (u16::MAX, u16::MAX)
        );
        assert!(!features.wants_namespace_notices());
    }

    #[test]
    fn thresholds_on_either_side_warn() {
        let warm = Features { over_temperature: TEMPERATURE, ..Features::default() };
        let cold = Features { under_temperature: TEMPERATURE, ..Features::default() };
        assert_eq!(
            (warm.critical_warnings(), cold.critical_warnings()),
            (TEMPERATURE_WARNING, TEMPERATURE_WARNING)
        );
        assert!(!warm.wants_warning());
        assert!(Features { events: 0xFF, ..warm }.wants_warning());
    }

    #[test]
    fn the_keep_alive_timer_starts_anew_with_each_command() {
        let mut features = Features { keep_alive_ms: 1000, ..Features::default() };
        features.keep_alive(Nanos::from_millis(500));
        assert_eq!(features.keep_alive_at(), Some(Nanos::from_millis(1500)));
        features.keep_alive(Nanos::from_millis(900));
        assert_eq!(features.keep_alive_at(), Some(Nanos::from_millis(1900)));
        features.keep_alive_ms = 0;
        features.keep_alive(Nanos::from_millis(950));
        assert_eq!(features.keep_alive_at(), None);
    }
}
