//! Get Log Page (NVMe base 2.0, 5.16).

use sidecore_spec_nvme::command::BROADCAST_NSID;
use sidecore_spec_nvme::log_page::{
    CHANGED_NAMESPACES, COMMANDS_SUPPORTED, ERROR_INFORMATION, FEATURES_SUPPORTED, FIRMWARE_SLOT,
    HEALTH, MANAGEMENT_SUPPORTED, SUPPORTED_LOG_PAGES,
};
use sidecore_units::Nanos;

use crate::admin::effects::{commands_supported, features_supported, log_pages_supported};
use crate::admin::events::EventKind;
use crate::admin::features::TEMPERATURE;
use crate::bytes::{Bytes, text};
use crate::controller::{Controller, FIRMWARE, Outcome};
use crate::pointer::MAX_TRANSFER_BYTES;
use crate::{Command, Status};

/// The log pages that there are.
pub(crate) const LOG_PAGES: [u8; 8] = [
    SUPPORTED_LOG_PAGES,
    ERROR_INFORMATION,
    HEALTH,
    FIRMWARE_SLOT,
    CHANGED_NAMESPACES,
    COMMANDS_SUPPORTED,
    FEATURES_SUPPORTED,
    MANAGEMENT_SUPPORTED,
];

/// The fields of a Get Log Page command (figures 196 to 200).
struct Request {
    page: u8,
    len_bytes: u64,
    offset_bytes: u64,
    /// Retain Asynchronous Event: reading does not clear the event.
    retain_event: bool,
}

impl Request {
    fn parse(command: &Command) -> Result<Self, Status> {
        let dwords =
            u64::from(command.dword10() >> 16) | u64::from(command.dword11() & 0xFFFF) << 16;
        let len_bytes = dwords.saturating_add(1).saturating_mul(4);
        let offset_bytes = u64::from(command.dword12()) | u64::from(command.dword13()) << 32;
        // Offset Type: an index into a list of structures, which no page here is.
        let is_index = command.dword14() >> 23 & 1 != 0;
        if len_bytes > MAX_TRANSFER_BYTES || !offset_bytes.is_multiple_of(4) || is_index {
            return Err(Status::INVALID_FIELD);
        }
        Ok(Self {
            page: (command.dword10() & 0xFF) as u8,
            len_bytes,
            offset_bytes,
            retain_event: command.dword10() >> 15 & 1 != 0,
        })
    }
}

impl Controller {
    /// Get Log Page. Bytes past a page's end read as zeros; an offset past the end is an error.
    pub(crate) fn get_log_page(
        &mut self,
        command: &Command,
        now: Nanos,
    ) -> Result<Outcome, Status> {
        let request = Request::parse(command)?;
        let page = match request.page {
            SUPPORTED_LOG_PAGES => log_pages_supported(),
            ERROR_INFORMATION => self.errors.page(),
            HEALTH => {
                // One for the controller, none for each namespace (LPA).
                if ![0, BROADCAST_NSID].contains(&command.nsid()) {
                    return Err(Status::INVALID_FIELD);
                }
                self.health(now)
            }
            FIRMWARE_SLOT => firmware_slots(),
            CHANGED_NAMESPACES => self.changed.page(),
            COMMANDS_SUPPORTED => {
                commands_supported(self.manager.is_some(), !self.doorbells_are_mapped)
            }
            FEATURES_SUPPORTED => features_supported(),
            // There is no management interface, and so no command of it.
            MANAGEMENT_SUPPORTED => vec![0; 1024],
            _ => return Err(Status::INVALID_LOG_PAGE),
        };
        let start = usize::try_from(request.offset_bytes).unwrap_or(usize::MAX);
        let part = page.get(start..).ok_or(Status::INVALID_FIELD)?;
        self.send(command, part, request.len_bytes)?;
        if !request.retain_event {
            self.log_page_was_read(request.page);
        }
        Ok(Outcome::Now(0))
    }

    fn log_page_was_read(&mut self, page: u8) {
        match page {
            ERROR_INFORMATION => self.events.clear(EventKind::Error),
            HEALTH => self.events.clear(EventKind::Health),
            CHANGED_NAMESPACES => {
                self.changed.clear();
                self.events.clear(EventKind::Notice);
            }
            _ => {}
        }
    }

    /// SMART / Health Information (figure 207).
    fn health(&self, now: Nanos) -> Vec<u8> {
        let activity = self.activity();
        // Data units are thousands of 512 bytes, rounded up.
        let units = |bytes: u64| u128::from(bytes.div_ceil(512_000));
        let hours = now.0 / 3_600_000_000_000;
        let mut page = Bytes::new(512);
        page.put(0, &[self.features.critical_warnings()]);
        page.put(1, &TEMPERATURE.to_le_bytes());
        // Available spare and its threshold, in percent. Nothing is worn off.
        page.put(3, &[100, 10, 0]);
        page.put(32, &units(activity.read_bytes).to_le_bytes());
        page.put(48, &units(activity.written_bytes).to_le_bytes());
        page.put(64, &u128::from(activity.read_commands).to_le_bytes());
        page.put(80, &u128::from(activity.write_commands).to_le_bytes());
        page.put(96, &u128::from(activity.busy_minutes).to_le_bytes());
        // One power cycle: the function was made.
        page.put(112, &1_u128.to_le_bytes());
        page.put(128, &u128::from(hours).to_le_bytes());
        page.put(160, &u128::from(activity.media_errors).to_le_bytes());
        page.put(176, &u128::from(self.errors.count()).to_le_bytes());
        page.into()
    }
}

/// Firmware Slot Information (figure 208): slot 1 is active, and the only one.
fn firmware_slots() -> Vec<u8> {
    let mut page = Bytes::new(512);
    page.put(0, &[1]);
    page.put(8, &text::<8>(FIRMWARE));
    page.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(dwords: [u32; 5]) -> Command {
        let [ten, eleven, twelve, thirteen, fourteen] = dwords;
        let command = Command::build(0x02, 1, 0).with_dword(10, ten).with_dword(11, eleven);
        command.with_dword(12, twelve).with_dword(13, thirteen).with_dword(14, fourteen)
    }

    #[test]
    fn lengths_and_offsets_are_put_together_from_their_halves() {
        let request = Request::parse(&command([0xFF << 16 | 1 << 15 | 0x02, 1, 8, 1, 0])).unwrap();
        assert_eq!((request.page, request.retain_event), (0x02, true));
        assert_eq!(request.len_bytes, (0x1_00FF + 1) * 4);
        assert_eq!(request.offset_bytes, 1 << 32 | 8);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for wrong in [[u32::MAX, u32::MAX, 0, 0, 0], [1, 0, 2, 0, 0], [1, 0, 0, 0, 1 << 23]] {
            assert_eq!(
                Request::parse(&command(wrong)).err(),
                Some(Status::INVALID_FIELD),
                "{wrong:x?}"
            );
        }
    }

    #[test]
    fn the_firmware_has_one_slot() {
        let page = firmware_slots();
        assert_eq!(
            (page.len(), page[0], &page[8..16]),
            (512, 1, format!("{FIRMWARE:<8}").as_bytes())
        );
    }
}
