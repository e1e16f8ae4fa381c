//! The configuration space (NVMe over PCIe transport 1.0, 3.8).

use sidecore_spec_nvme::pci::{
    BAR_BYTES, BAR_MEMORY_64, CLASS_NVME, CONFIG_BYTES, STATUS_CAPABILITIES, command, offset,
};

use crate::pci::bar::{Bar, MSIX_BAR, MSIX_BAR_BYTES, REGISTERS_BAR_BYTES};
use crate::pci::{Interrupts, capabilities, ids};

/// Where the base address register of the MSI-X table is.
const MSIX_BAR_OFFSET: usize = offset::BAR0 + MSIX_BAR as usize * BAR_BYTES;

/// Initiate Function Level Reset, bit 15 of Device Control.
const INITIATE_RESET: u8 = 1 << 7;

/// Values, and which of their bits a write changes. Writes are of any width, at any place.
pub(crate) struct ConfigSpace {
    values: Vec<u8>,
    writable: Vec<u8>,
    interrupts: Interrupts,
}

impl ConfigSpace {
    pub(crate) fn new(interrupts: Interrupts) -> Self {
        let mut space =
            Self { values: vec![0; CONFIG_BYTES], writable: vec![0; CONFIG_BYTES], interrupts };
        space.reset();
        space
    }

    /// All as after power on.
    pub(crate) fn reset(&mut self) {
        self.values.fill(0);
        self.writable.fill(0);
        // Behind the first 256 bytes is an empty list of extended capabilities.
        let [interface, sub_class, class] = CLASS_NVME;
        let device = u32::from(ids::DEVICE) << 16 | u32::from(ids::VENDOR);
        self.define(offset::ID, device, 0);
        let commands = command::MEMORY
            | command::BUS_MASTER
            | command::PARITY_ERROR
            | command::SERR
            | command::INTERRUPT_DISABLE;
        self.define(offset::COMMAND, u32::from(STATUS_CAPABILITIES) << 16, commands.into());
        self.define(
            offset::REVISION,
            u32::from_le_bytes([ids::REVISION, interface, sub_class, class]),
            0,
        );
        self.define(offset::CACHE_LINE_SIZE, 0, 0xFF);
        // BAR0 and BAR1: memory, 64-bit. BAR4: memory, 32-bit; for MSI-X alone.
        self.define(offset::BAR0, BAR_MEMORY_64, mask(REGISTERS_BAR_BYTES));
        self.define(offset::BAR0 + BAR_BYTES, 0, u32::MAX);
        if self.interrupts == Interrupts::MsiX {
            self.define(MSIX_BAR_OFFSET, 0, mask(MSIX_BAR_BYTES));
        }
        self.define(offset::SUBSYSTEM, device, 0);
        self.define(offset::CAPABILITIES, capabilities::FIRST.into(), 0);
        // The interrupt line; there is no pin.
        self.define(offset::INTERRUPT_LINE, 0, 0xFF);
        for field in capabilities::fields(self.interrupts) {
            self.define(field.offset, field.value, field.writable);
        }
    }

    fn define(&mut self, offset: usize, value: u32, writable: u32) {
        for (to, from) in [(&mut self.values, value), (&mut self.writable, writable)] {
            if let Some(place) = to.get_mut(offset..offset.saturating_add(4)) {
                place.copy_from_slice(&from.to_le_bytes());
            }
        }
    }

    /// All of its values.
    pub(crate) fn values(&self) -> &[u8] {
        &self.values
    }

    /// Restores the writable fields as the host has set them in the process before.
    pub(crate) fn take_over(&mut self, values: &[u8]) {
        for ((value, writable), new) in self.values.iter_mut().zip(&self.writable).zip(values) {
            *value = *value & !writable | new & writable;
        }
    }

    /// Reads what is at `offset`; false if it ends past the end.
    pub(crate) fn read(&self, offset: usize, data: &mut [u8]) -> bool {
        match self.values.get(offset..).and_then(|rest| rest.get(..data.len())) {
            Some(values) => {
                data.copy_from_slice(values);
                true
            }
            None => false,
        }
    }

    /// Writes what can be written; `None` if it ends past the end. Whether the function is to be
    /// reset.
    pub(crate) fn write(&mut self, offset: usize, data: &[u8]) -> Option<bool> {
        let end = offset.checked_add(data.len())?;
        let values = self.values.get_mut(offset..end)?;
        let writable = self.writable.get(offset..end)?;
        for ((value, writable), new) in values.iter_mut().zip(writable).zip(data) {
            *value = *value & !writable | new & writable;
        }
        let control = capabilities::DEVICE_CONTROL.saturating_add(1);
        let written = control.checked_sub(offset).and_then(|index| data.get(index));
        Some(written.is_some_and(|byte| byte & INITIATE_RESET != 0))
    }
}

/// Which bits of a base address register can be written: those of an address that is aligned to its
/// size.
const fn mask(len_bytes: u64) -> u32 {
    !(len_bytes.saturating_sub(1) as u32)
}

/// Keeps the sizes powers of two, as [`mask`] needs them.
const _: () = assert!(REGISTERS_BAR_BYTES.is_power_of_two() && MSIX_BAR_BYTES.is_power_of_two());
const _: () = assert!(Bar::END_BYTES <= REGISTERS_BAR_BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    fn read32(space: &ConfigSpace, offset: usize) -> u32 {
        let mut data = [0; 4];
        assert!(space.read(offset, &mut data));
        u32::from_le_bytes(data)
    }

    #[test]
    fn a_driver_finds_an_nvme_controller() {
        let space = ConfigSpace::new(Interrupts::MsiX);
        assert_eq!(read32(&space, 0x00), 0x5EC0_1234);
        assert_eq!(read32(&space, 0x08) >> 8, 0x01_0802);
        assert_eq!(read32(&space, 0x3C) >> 8 & 0xFF, 0, "no interrupt pin");
        assert_eq!(read32(&space, 0x100), 0, "no extended capabilities");
    }

    #[test]
    fn the_capabilities_are_a_list_that_ends() {
        let space = ConfigSpace::new(Interrupts::MsiX);
        assert_eq!(read32(&space, 0x04) >> 20 & 1, 1);
        let mut at = read32(&space, 0x34) as usize;
        let mut found = Vec::new();
        while at != 0 {
            let header = read32(&space, at);
            found.push(header & 0xFF);
            assert!(found.len() < 10);
            if header & 0xFF == 0x11 {
                assert_eq!(header >> 16 & 0x7FF, 63);
                assert_eq!((read32(&space, at + 4), read32(&space, at + 8)), (4, 0x1004));
            }
            if header & 0xFF == 0x10 {
                assert_eq!(read32(&space, at + 4) >> 28 & 1, 1, "function level reset");
            }
            at = (header >> 8 & 0xFF) as usize;
        }
        assert_eq!(found, [0x01, 0x11, 0x10]);
    }

    #[test]
    fn msi_takes_the_place_of_msi_x_and_of_its_memory() {
        let mut space = ConfigSpace::new(Interrupts::Msi);
        let header = read32(&space, 0x50);
        assert_eq!(
            (read32(&space, 0x40) >> 8 & 0xFF, header & 0xFF, header >> 8 & 0xFF),
            (0x50, 0x05, 0x60)
        );
        assert_eq!(header >> 16, 0x8A, "32 vectors, none enabled; 64-bit addresses, no masks");
        space.write(0x50, &[0xFF; 16]);
        assert_eq!(read32(&space, 0x50), header | 0x71 << 16, "enabled, as many as there are");
        assert_eq!(
            [0x54, 0x58, 0x5C].map(|offset| read32(&space, offset)),
            [0xFFFF_FFFC, u32::MAX, 0xFFFF]
        );
        assert_eq!(read32(&space, 0x60) & 0xFF, 0x10);
        space.write(0x20, &[0xFF; 4]);
        assert_eq!(read32(&space, 0x20), 0, "no BAR4");
        space.reset();
        assert_eq!(read32(&space, 0x50), header);
    }

    #[test]
    fn base_address_registers_tell_their_sizes() {
        let mut space = ConfigSpace::new(Interrupts::MsiX);
        for offset in (0x10..0x28).step_by(4) {
            assert_eq!(space.write(offset, &[0xFF; 4]), Some(false));
        }
        assert_eq!(read32(&space, 0x10), 0xFFF0_0004);
        assert_eq!(read32(&space, 0x14), u32::MAX);
        assert_eq!([0x18, 0x1C, 0x24].map(|offset| read32(&space, offset)), [0; 3]);
        assert_eq!(read32(&space, 0x20), 0xFFFF_E000);
        space.reset();
        assert_eq!(read32(&space, 0x10), 4);
    }

    #[test]
    fn only_what_can_be_written_is() {
        let mut space = ConfigSpace::new(Interrupts::MsiX);
        assert_eq!(space.write(0, &[0xFF; 4]), Some(false));
        assert_eq!(read32(&space, 0), 0x5EC0_1234);
        space.write(4, &[0xFF; 4]);
        assert_eq!(read32(&space, 4), 0x0010_0546);
        // MSI-X control is written as a word or as a byte.
        space.write(0x52, &[0, 0xC0]);
        assert_eq!(read32(&space, 0x50) >> 16, 0xC03F);
        space.write(0x53, &[0x80]);
        assert_eq!(read32(&space, 0x50) >> 16, 0x803F);
    }

    #[test]
    fn a_reset_is_asked_for_by_one_bit() {
        let mut space = ConfigSpace::new(Interrupts::MsiX);
        let control = read32(&space, capabilities::DEVICE_CONTROL);
        assert_eq!(space.write(capabilities::DEVICE_CONTROL, &[0xFF, 0xFF]), Some(true));
        assert_eq!(read32(&space, capabilities::DEVICE_CONTROL) >> 15 & 1, 0);
        assert_eq!(space.write(capabilities::DEVICE_CONTROL, &control.to_le_bytes()), Some(false));
        assert_eq!(space.write(capabilities::DEVICE_CONTROL + 1, &[0x80]), Some(true));
    }

    #[test]
    fn accesses_past_the_end_are_refused() {
        let mut space = ConfigSpace::new(Interrupts::MsiX);
        assert!(!space.read(4095, &mut [0; 2]) && space.read(4095, &mut [0]));
        assert_eq!(space.write(4094, &[0; 4]), None);
        assert_eq!(space.write(usize::MAX, &[0; 4]), None);
    }
}
