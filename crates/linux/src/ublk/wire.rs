//! The numbers and layouts of `include/uapi/linux/ublk_cmd.h`.

/// Flags of a device.
pub mod ublk_flag {
    /// Requests survive the end of the process that serves the device.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// Requests in flight at that end are given to the next process again.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands are numbered as ioctls.
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// The size of a device can change while it is used (Linux 6.16).
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// A server can have a device wait for the next one (Linux 6.16).
    pub const QUIESCE: u64 = 1 << 12;
    /// A server can have the kernel read no partitions (Linux 7.0).
    pub const NO_AUTO_PART_SCAN: u64 = 1 << 18;
}

/// `_IOC` of the kernel: direction, size of the argument, type `u`, number.
const fn command(direction: u32, size: u32, number: u32) -> u32 {
    direction << 30 | size << 16 | (b'u' as u32) << 8 | number
}

const READ: u32 = 2;
const READ_WRITE: u32 = 3;
const CONTROL_BYTES: u32 = 32;
const IO_BYTES: u32 = 16;

pub(super) const GET_DEV_INFO: u32 = command(READ, CONTROL_BYTES, 0x02);
pub(super) const ADD_DEV: u32 = command(READ_WRITE, CONTROL_BYTES, 0x04);
pub(super) const DEL_DEV: u32 = command(READ_WRITE, CONTROL_BYTES, 0x05);
pub(super) const START_DEV: u32 = command(READ_WRITE, CONTROL_BYTES, 0x06);
pub(super) const STOP_DEV: u32 = command(READ_WRITE, CONTROL_BYTES, 0x07);
pub(super) const SET_PARAMS: u32 = command(READ_WRITE, CONTROL_BYTES, 0x08);
pub(super) const GET_PARAMS: u32 = command(READ, CONTROL_BYTES, 0x09);
pub(super) const START_USER_RECOVERY: u32 = command(READ_WRITE, CONTROL_BYTES, 0x10);
pub(super) const END_USER_RECOVERY: u32 = command(READ_WRITE, CONTROL_BYTES, 0x11);
pub(super) const GET_FEATURES: u32 = command(READ, CONTROL_BYTES, 0x13);
pub(super) const UPDATE_SIZE: u32 = command(READ_WRITE, CONTROL_BYTES, 0x15);
pub(super) const FETCH_REQ: u32 = command(READ_WRITE, IO_BYTES, 0x20);
pub(super) const COMMIT_AND_FETCH_REQ: u32 = command(READ_WRITE, IO_BYTES, 0x21);

/// The largest depth of a queue; also the distance of the queues' descriptors in the mapping.
pub(super) const DEPTH_MAX: usize = 4096;

/// State and settings of a device (`struct ublksrv_ctrl_dev_info`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UblkInfo {
    /// Queues; the kernel makes no more than it has CPUs.
    pub queues: u16,
    /// Requests in flight in each queue.
    pub depth: u16,
    state: u16,
    padding: u16,
    /// The largest read or write.
    pub io_bytes_max: u32,
    /// The N of `/dev/ublkbN`.
    pub number: u32,
    /// The process that makes or serves it; -1 after it was stopped.
    pub server: i32,
    padding_2: u32,
    /// See [`ublk_flag`].
    pub flags: u64,
    /// A word for the server's use, which the kernel only keeps.
    pub server_word: u64,
    owner_uid: u32,
    owner_gid: u32,
    reserved: [u64; 2],
}

/// How far a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UblkState {
    /// Made and not started, or stopped.
    Dead,
    /// Started, and served by a process, which may have ended a moment ago.
    Live,
    /// Its process has ended: requests wait for the next one.
    Quiesced,
    /// One that this code does not know, for instance of a device that fails its requests.
    Other(u16),
}

impl UblkInfo {
    /// A device to be [added](super::UblkControl::add).
    #[must_use]
    pub fn new(
        number: u32,
        (queues, depth): (u16, u16),
        io_bytes_max: u32,
        server_word: u64,
    ) -> Self {
        Self { queues, depth, io_bytes_max, number, server_word, ..Self::default() }
    }

    pub(super) fn served_by(self, server: i32, flags: u64) -> Self {
        Self { server, flags: self.flags | flags, ..self }
    }

    /// The same device in another state.
    #[must_use]
    pub const fn in_state(self, state: UblkState) -> Self {
        let state = match state {
            UblkState::Dead => 0,
            UblkState::Live => 1,
            UblkState::Quiesced => 2,
            UblkState::Other(other) => other,
        };
        Self { state, ..self }
    }

    /// How far the device is.
    #[must_use]
    pub const fn state(&self) -> UblkState {
        match self.state {
            0 => UblkState::Dead,
            1 => UblkState::Live,
            2 => UblkState::Quiesced,
            other => UblkState::Other(other),
        }
    }
}

const PARAMETERS_BASIC: u32 = 1;
const PARAMETERS_DISCARD: u32 = 2;
const READ_ONLY: u32 = 1;
const VOLATILE_CACHE: u32 = 1 << 2;
const FUA: u32 = 1 << 3;

/// The block device as the kernel shows it (`struct ublk_params`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RawParameters {
    len: u32,
    types: u32,
    attributes: u32,
    block_shift: u8,
    physical_block_shift: u8,
    optimal_shift: u8,
    least_shift: u8,
    sectors_max: u32,
    chunk_sectors: u32,
    sectors: u64,
    boundary_mask: u64,
    discard_alignment: u32,
    discard_granularity: u32,
    discard_sectors_max: u32,
    zeroes_sectors_max: u32,
    discard_segments_max: u16,
    reserved: u16,
    /// The next member of the kernel's structure begins here and is not used.
    padding: u32,
}

/// The settings of the block device that the kernel shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UblkParameters {
    /// Size in bytes.
    pub capacity_bytes: u64,
    /// The unit of reads and writes.
    pub block_bytes: u32,
    /// The unit that the medium writes without reading first.
    pub physical_block_bytes: u32,
    /// The largest read or write.
    pub io_bytes_max: u32,
    /// Whether the kernel refuses writes.
    pub read_only: bool,
    /// Whether completed writes need a flush to be durable.
    pub volatile_cache: bool,
    /// Whether discards do anything.
    pub discard: bool,
    /// Whether zeros can be written without data.
    pub write_zeroes: bool,
}

/// The largest discard or write of zeros: a stall of the queue is bounded by it.
const DISCARD_BYTES_MAX: u32 = 1 << 30;

impl RawParameters {
    /// Room for the kernel's answer.
    pub(super) fn blank() -> Self {
        Self { len: size_of::<Self>() as u32, ..Self::default() }
    }
}

impl UblkParameters {
    pub(super) fn to_raw(self) -> RawParameters {
        let shift = |bytes: u32| bytes.trailing_zeros() as u8;
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        let most = |is_there: bool| if is_there { DISCARD_BYTES_MAX >> 9 } else { 0 };
        let page = sidecore_units::PAGE_BYTES as u32;
        let physical =
            self.physical_block_bytes.clamp(self.block_bytes, page.max(self.block_bytes));
        RawParameters {
            types: PARAMETERS_BASIC | PARAMETERS_DISCARD,
            attributes: flag(self.read_only, READ_ONLY)
                | flag(self.volatile_cache, VOLATILE_CACHE | FUA),
            block_shift: shift(self.block_bytes),
            physical_block_shift: shift(physical),
            optimal_shift: shift(physical),
            least_shift: shift(physical),
            sectors_max: self.io_bytes_max >> 9,
            sectors: self.capacity_bytes >> 9,
            discard_granularity: physical,
            discard_sectors_max: most(self.discard),
            zeroes_sectors_max: most(self.write_zeroes),
            discard_segments_max: u16::from(self.discard),
            ..RawParameters::blank()
        }
    }

    pub(super) fn of_raw(raw: &RawParameters) -> Self {
        let bytes = |shift: u8| 1_u32.checked_shl(shift.into()).unwrap_or(0);
        Self {
            capacity_bytes: raw.sectors.saturating_mul(512),
            block_bytes: bytes(raw.block_shift),
            physical_block_bytes: bytes(raw.physical_block_shift),
            io_bytes_max: raw.sectors_max.saturating_mul(512),
            read_only: raw.attributes & READ_ONLY != 0,
            volatile_cache: raw.attributes & VOLATILE_CACHE != 0,
            discard: raw.discard_sectors_max > 0,
            write_zeroes: raw.zeroes_sectors_max > 0,
        }
    }
}

/// A request as the kernel describes it (`struct ublksrv_io_desc`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoDescriptor {
    /// The operation in bits 0 to 7, and flags.
    pub operation_and_flags: u32,
    /// Its length in sectors of 512 bytes.
    pub sectors: u32,
    /// Its first sector.
    pub start_sector: u64,
    /// The buffer that this process has given.
    pub address: u64,
}

/// A command of a queue (`struct ublksrv_io_cmd`).
pub(super) fn io_command(queue: u16, tag: u16, result: i32, address: u64) -> [u8; 16] {
    let mut command = [0; 16];
    command[0..2].copy_from_slice(&queue.to_ne_bytes());
    command[2..4].copy_from_slice(&tag.to_ne_bytes());
    command[4..8].copy_from_slice(&result.to_ne_bytes());
    command[8..16].copy_from_slice(&address.to_ne_bytes());
    command
}

/// The argument of a control command: a buffer, or a number.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Argument {
    pub address: u64,
    pub len: u16,
    pub data: u64,
}

/// A command about a device (`struct ublksrv_ctrl_cmd`), as large as a submission has room for.
pub(super) fn control_command(number: u32, argument: Argument) -> [u8; 80] {
    let mut command = [0; 80];
    command[0..4].copy_from_slice(&number.to_ne_bytes());
    // No command here is about one queue.
    command[4..6].copy_from_slice(&u16::MAX.to_ne_bytes());
    command[6..8].copy_from_slice(&argument.len.to_ne_bytes());
    command[8..16].copy_from_slice(&argument.address.to_ne_bytes());
    command[16..24].copy_from_slice(&argument.data.to_ne_bytes());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_and_numbers_are_those_of_the_kernels_header() {
        assert_eq!((size_of::<UblkInfo>(), size_of::<IoDescriptor>()), (64, 24));
        assert_eq!(size_of::<RawParameters>(), 64);
        assert_eq!(std::mem::offset_of!(UblkInfo, flags), 24);
        assert_eq!(std::mem::offset_of!(RawParameters, sectors), 24);
        assert_eq!(std::mem::offset_of!(RawParameters, discard_alignment), 40);
        // UBLK_U_CMD_ADD_DEV, UBLK_U_CMD_GET_FEATURES and UBLK_U_IO_COMMIT_AND_FETCH_REQ.
        assert_eq!((ADD_DEV, GET_FEATURES), (0xc020_7504, 0x8020_7513));
        assert_eq!(COMMIT_AND_FETCH_REQ, 0xc010_7521);
    }

    #[test]
    fn parameters_come_back_as_they_were_set() {
        let set = UblkParameters {
            capacity_bytes: 1 << 30,
            block_bytes: 512,
            physical_block_bytes: 4096,
            io_bytes_max: 256 << 10,
            read_only: false,
            volatile_cache: true,
            discard: true,
            write_zeroes: true,
        };
        assert_eq!(UblkParameters::of_raw(&set.to_raw()), set);
        assert_eq!(set.to_raw().attributes, VOLATILE_CACHE | FUA);
        let plain = UblkParameters {
            read_only: true,
            volatile_cache: false,
            discard: false,
            write_zeroes: false,
            // The kernel takes no physical block that is larger than a page.
            physical_block_bytes: 65536,
            ..set
        };
        let raw = plain.to_raw();
        assert_eq!((raw.attributes, raw.discard_sectors_max), (READ_ONLY, 0));
        assert_eq!(UblkParameters::of_raw(&raw).physical_block_bytes, 4096);
    }

    #[test]
    fn a_hostile_kernel_word_is_no_panic() {
        let raw = RawParameters { block_shift: 200, sectors: u64::MAX, ..Default::default() };
        assert_eq!(UblkParameters::of_raw(&raw).block_bytes, 0);
        for state in 0..8 {
            let info = UblkInfo { state, ..UblkInfo::default() };
            assert_eq!(matches!(info.state(), UblkState::Other(_)), state > 2);
            assert_eq!(UblkInfo::default().in_state(info.state()), info);
        }
    }
}
