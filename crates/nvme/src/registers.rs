//! The controller's properties (NVMe base 2.0, 3.1.3): what they are, and what of them a host can
//! write.
//!
//! A property is to be accessed in its own width or as aligned dwords (3.1.1). A read of any other
//! shape gets the bytes that are there; a write of any other shape is not obeyed.

use serde::{Deserialize, Serialize};
use sidecore_spec_nvme::register::{self, VERSION_2_0, cap, cc, csts};

/// Most entries of a queue (CAP.MQES + 1).
pub(crate) const MAX_QUEUE_ENTRIES: u32 = 4096;

/// The longest time that a host has to wait for the controller to become ready, or to stop being
/// so, in units of 500 ms (CAP.TO). The latter includes requests that are in flight at the store.
const TIMEOUT: u32 = 60;

/// Controller Configuration (3.1.3.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Configuration(pub u32);

impl Configuration {
    /// All but bits 3:1 and 31:24. Controller Ready Independent of Media (bit 24) is not supported
    /// (CAP.CRMS).
    const WRITABLE: u32 = 0x00FF_FFF1;

    /// CC.EN.
    pub(crate) const fn is_enabled(self) -> bool {
        self.0 & cc::EN != 0
    }

    /// Whether CC.SHN asks for a shutdown, a normal or an abrupt one.
    pub(crate) const fn is_shutdown(self) -> bool {
        self.0 >> cc::SHN_SHIFT & 0b11 != 0
    }

    /// Whether CC.SHN asks for an abrupt one.
    pub(crate) const fn is_abrupt_shutdown(self) -> bool {
        self.0 >> cc::SHN_SHIFT & 0b11 == cc::SHN_ABRUPT
    }

    /// CC.IOSQES: log2 of the size of an I/O submission queue's entries.
    pub(crate) const fn submission_entry_size(self) -> u32 {
        self.0 >> cc::IOSQES_SHIFT & 0xF
    }

    /// CC.IOCQES.
    pub(crate) const fn completion_entry_size(self) -> u32 {
        self.0 >> cc::IOCQES_SHIFT & 0xF
    }

    /// Whether a controller can run so: pages of 4 KiB (MPS 0), round robin (AMS 0), the NVM
    /// command set (CSS 0).
    pub(crate) const fn is_supported(self) -> bool {
        let page_size = self.0 >> cc::MPS_SHIFT & 0xF;
        let arbitration = self.0 >> cc::AMS_SHIFT & 0b111;
        let command_set = self.0 >> cc::CSS_SHIFT & 0b111;
        page_size == 0 && arbitration == 0 && command_set == 0
    }
}

/// How far a shutdown is (CSTS.SHST).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Shutdown {
    #[default]
    None,
    Occurring,
    Complete,
}

/// Controller Status (3.1.3.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ControllerStatus {
    /// CSTS.RDY.
    pub ready: bool,
    /// CSTS.CFS.
    pub fatal: bool,
    /// CSTS.SHST.
    pub shutdown: Shutdown,
}

impl ControllerStatus {
    fn bits(self) -> u32 {
        let shutdown = match self.shutdown {
            Shutdown::None => 0,
            Shutdown::Occurring => csts::SHST_OCCURRING,
            Shutdown::Complete => csts::SHST_COMPLETE,
        };
        let ready = if self.ready { csts::RDY } else { 0 };
        let fatal = if self.fatal { csts::CFS } else { 0 };
        ready | fatal | shutdown << csts::SHST_SHIFT
    }
}

/// Where and how large the admin queues are (AQA, ASQ, ACQ).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdminQueues {
    pub submission_address: u64,
    pub submission_entries: u32,
    pub completion_address: u64,
    pub completion_entries: u32,
}

/// The register file. What follows from a write is the controller's business; CSTS is set by it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Registers {
    /// log2 of the doorbell stride, less two (CAP.DSTRD).
    doorbell_stride: u8,
    interrupt_mask: u32,
    configuration: Configuration,
    pub(crate) status: ControllerStatus,
    admin_attributes: u32,
    admin_submission: u64,
    admin_completion: u64,
}

impl Registers {
    pub(crate) const fn new(doorbell_stride: u8) -> Self {
        Self {
            doorbell_stride,
            interrupt_mask: 0,
            configuration: Configuration(0),
            status: ControllerStatus { ready: false, fatal: false, shutdown: Shutdown::None },
            admin_attributes: 0,
            admin_submission: 0,
            admin_completion: 0,
        }
    }

    /// log2 of the doorbell stride, less two.
    pub(crate) const fn doorbell_stride(&self) -> u8 {
        self.doorbell_stride
    }

    /// CAP.DSTRD from now on: the doorbells are in other memory.
    pub(crate) const fn set_doorbell_stride(&mut self, doorbell_stride: u8) {
        self.doorbell_stride = doorbell_stride;
    }

    /// All as after power on.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.doorbell_stride);
    }

    /// Which vectors are masked, if they are of MSI (INTMS and INTMC).
    pub(crate) const fn interrupt_mask(&self) -> u32 {
        self.interrupt_mask
    }

    /// Unmasks all interrupts: part of a controller reset (3.7.2).
    pub(crate) fn unmask_interrupts(&mut self) {
        self.interrupt_mask = 0;
    }

    pub(crate) const fn configuration(&self) -> Configuration {
        self.configuration
    }

    /// AQA, ASQ and ACQ, which a controller reset leaves as they are (3.7.2).
    pub(crate) const fn admin_queues(&self) -> AdminQueues {
        AdminQueues {
            submission_address: self.admin_submission,
            submission_entries: (self.admin_attributes & 0xFFF).saturating_add(1),
            completion_address: self.admin_completion,
            completion_entries: (self.admin_attributes >> 16 & 0xFFF).saturating_add(1),
        }
    }

    /// CAP: queues are contiguous (CQR), no weighted round robin, no subsystem reset, the NVM
    /// command set, pages of 4 KiB and nothing else, and CRTO says how long to wait (CRMS.CRWMS),
    /// as version 2.0 wants it.
    fn capabilities(&self) -> u64 {
        let queue_entries = u64::from(MAX_QUEUE_ENTRIES.saturating_sub(1));
        let timeout = u64::from(TIMEOUT) << cap::TO_SHIFT;
        let stride = u64::from(self.doorbell_stride & 0xF) << cap::DSTRD_SHIFT;
        queue_entries | cap::CQR | timeout | stride | cap::CSS_NVM | cap::CRMS_CRWMS
    }

    /// The dword at `offset`, a multiple of four; what is reserved or not implemented is zero.
    fn dword(&self, offset: u64) -> u32 {
        let low = |value: u64| (value & 0xFFFF_FFFF) as u32;
        let high = |value: u64| (value >> 32) as u32;
        match offset {
            register::CAP => low(self.capabilities()),
            0x04 => high(self.capabilities()),
            register::VS => VERSION_2_0,
            register::INTMS | register::INTMC => self.interrupt_mask,
            register::CC => self.configuration.0,
            register::CSTS => self.status.bits(),
            register::AQA => self.admin_attributes,
            register::ASQ => low(self.admin_submission),
            0x2C => high(self.admin_submission),
            register::ACQ => low(self.admin_completion),
            0x34 => high(self.admin_completion),
            // CRWMT, in the same units as CAP.TO and not less.
            register::CRTO => TIMEOUT,
            _ => 0,
        }
    }

    /// Reads what is at `offset`; zeros where nothing is.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            let value = self.dword(at & !3);
            let [zero, one, two, three] = value.to_le_bytes();
            *byte = match at & 3 {
                0 => zero,
                1 => one,
                2 => two,
                _ => three,
            };
        }
    }

    /// Writes a dword; true if it was CC.
    pub(crate) fn write(&mut self, offset: u64, value: u32) -> bool {
        let with_low = |old: u64, mask: u32| old & 0xFFFF_FFFF_0000_0000 | u64::from(value & mask);
        let with_high = |old: u64| old & 0xFFFF_FFFF | u64::from(value) << 32;
        // ASQ and ACQ hold a page's number: their low 12 bits are reserved.
        const PAGE: u32 = 0xFFFF_F000;
        match offset {
            // Without effect on MSI-X (3.1.3.3).
            register::INTMS => self.interrupt_mask |= value,
            register::INTMC => self.interrupt_mask &= !value,
            register::CC => {
                self.configuration = Configuration(value & Configuration::WRITABLE);
                return true;
            }
            register::AQA => self.admin_attributes = value & 0x0FFF_0FFF,
            register::ASQ => self.admin_submission = with_low(self.admin_submission, PAGE),
            0x2C => self.admin_submission = with_high(self.admin_submission),
            register::ACQ => self.admin_completion = with_low(self.admin_completion, PAGE),
            0x34 => self.admin_completion = with_high(self.admin_completion),
            _ => {}
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read32(registers: &Registers, offset: u64) -> u32 {
        let mut data = [0; 4];
        registers.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn capabilities_are_what_a_driver_needs_to_know() {
        let registers = Registers::new(9);
        let mut data = [0; 8];
        registers.read(0, &mut data);
        let capabilities = u64::from_le_bytes(data);
        assert_eq!(capabilities & 0xFFFF, 4095);
        assert_eq!(capabilities >> 16 & 1, 1, "contiguous queues required");
        assert_eq!(capabilities >> 24 & 0xFF, u64::from(TIMEOUT));
        assert_eq!(capabilities >> 32 & 0xF, 9);
        assert_eq!(capabilities >> 37 & 0xFF, 1, "the NVM command set");
        assert_eq!(capabilities >> 48 & 0xFF, 0, "pages of 4 KiB only");
        assert_eq!(read32(&registers, 0x08), 0x0002_0000);
        assert!(read32(&registers, 0x68) >= TIMEOUT, "Linux calls anything less a bad CRTO");
    }

    #[test]
    fn what_is_read_only_stays_and_what_is_reserved_reads_zero() {
        let mut registers = Registers::new(0);
        let before: Vec<u32> =
            (0..0x1000).step_by(4).map(|offset| read32(&registers, offset)).collect();
        for offset in (0..0x1000).step_by(4) {
            if ![0x0C, 0x10, 0x14, 0x24, 0x28, 0x2C, 0x30, 0x34].contains(&offset) {
                assert!(!registers.write(offset, u32::MAX));
            }
        }
        let after: Vec<u32> =
            (0..0x1000).step_by(4).map(|offset| read32(&registers, offset)).collect();
        assert_eq!(before, after);
        assert!(registers.write(0x14, u32::MAX));
        assert_eq!(read32(&registers, 0x14), 0x00FF_FFF1);
        registers.write(0x24, u32::MAX);
        assert_eq!(read32(&registers, 0x24), 0x0FFF_0FFF);
        registers.write(0x28, u32::MAX);
        registers.write(0x2C, 0x1234_5678);
        assert_eq!(registers.admin_queues().submission_address, 0x1234_5678_FFFF_F000);
        assert_eq!(registers.admin_queues().completion_entries, 4096);
    }

    #[test]
    fn interrupts_are_masked_and_unmasked_by_bit() {
        let mut registers = Registers::new(0);
        registers.write(0x0C, 0b1010);
        registers.write(0x10, 0b0010);
        assert_eq!((read32(&registers, 0x0C), read32(&registers, 0x10)), (0b1000, 0b1000));
    }

    #[test]
    fn reads_of_any_shape_get_the_bytes_that_are_there() {
        let registers = Registers::new(9);
        let mut byte = [0];
        registers.read(0x0A, &mut byte);
        assert_eq!(byte, [2], "the major version");
        let mut crooked = [0; 7];
        registers.read(0x07, &mut crooked);
        assert_eq!(crooked, [0x08, 0, 0, 2, 0, 0, 0]);
    }

    #[test]
    fn status_bits_are_where_the_standard_has_them() {
        let mut registers = Registers::new(0);
        registers.status =
            ControllerStatus { ready: true, fatal: false, shutdown: Shutdown::Complete };
        assert_eq!(read32(&registers, 0x1C), 0b1001);
        registers.status =
            ControllerStatus { ready: false, fatal: true, shutdown: Shutdown::Occurring };
        assert_eq!(read32(&registers, 0x1C), 0b0110);
    }

    #[test]
    fn unsupported_configurations_are_told() {
        assert!(Configuration(1 | 6 << 16 | 4 << 20).is_supported());
        for wrong in [1 << 7, 1 << 11, 6 << 4, 7 << 4] {
            assert!(!Configuration(1 | wrong).is_supported(), "{wrong:#x}");
        }
    }
}
