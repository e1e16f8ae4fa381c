use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;
use crate::data::Data;
use sidecore_spec_nvme::vfio;

fn bytes_of(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.write(&mut bytes);
    bytes
}

fn read_back(bytes: &[u8]) -> Message {
    let (header, payload) = bytes.split_first_chunk().unwrap();
    let header = Header::parse(header).unwrap();
    assert_eq!(header.payload_bytes, payload.len());
    Message::parse(header, payload, Vec::new())
}

fn header(command: u16, size_bytes: u32, flags: u32) -> [u8; HEADER_BYTES] {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&0x1234_u16.to_ne_bytes());
    bytes.extend_from_slice(&command.to_ne_bytes());
    bytes.extend_from_slice(&size_bytes.to_ne_bytes());
    bytes.extend_from_slice(&flags.to_ne_bytes());
    bytes.extend_from_slice(&0_u32.to_ne_bytes());
    bytes.try_into().unwrap()
}

#[test]
fn the_codes_are_the_specifications() {
    let codes: Vec<u16> = Command::ALL.iter().map(|command| command.code()).collect();
    assert_eq!(codes, (1..=18).collect::<Vec<u16>>());
    assert!(Command::ALL.iter().all(|command| Command::from_code(command.code()) == *command));
    assert_eq!(Command::from_code(0), Command::Unknown(0));
    assert_eq!(Command::Unknown(77).to_string(), "command 77");
    assert_eq!(Command::DeviceGetRegionIoFds.to_string(), "DEVICE_GET_REGION_IO_FDS");
}

#[test]
fn a_map_is_laid_out_as_qemu_sends_it() {
    let map = DmaMap {
        argsz: 32,
        flags: 3,
        offset_bytes: 0x1000,
        address: 0x1_0000_0000,
        len_bytes: 0x8000_0000,
    };
    let bytes = bytes_of(&Message::command(7, Command::DmaMap, Body::DmaMap(map), Vec::new()));
    let words = [u32::from(7_u16) | 2 << 16, 48, 0, 0, 32, 3, 0x1000, 0, 0, 1, 0x8000_0000, 0];
    assert_eq!(bytes, words.map(u32::to_le_bytes).concat(), "on a little-endian machine");
}

#[test]
fn a_regions_capability_is_laid_out_as_linux_has_it() {
    let area = SparseArea { offset_bytes: 0x2000, len_bytes: 0x4_0000 };
    let info = RegionInfo {
        argsz: 64,
        flags: 15,
        index: 0,
        len_bytes: 0x10_0000,
        offset_bytes: 0,
        areas: vec![area],
    };
    let bytes = bytes_of(&Message::reply(
        1,
        Command::DeviceGetRegionInfo,
        Body::RegionInfo(info),
        Vec::new(),
    ));
    let words = [
        1 | 5 << 16,
        80,
        1,
        0,
        64,
        15,
        0,
        32,
        0x10_0000,
        0,
        0,
        0,
        1 | 1 << 16,
        0,
        1,
        0,
        0x2000,
        0,
        0x4_0000,
        0,
    ];
    assert_eq!(bytes, words.map(u32::to_le_bytes).concat(), "on a little-endian machine");
}

#[test]
fn sizes_are_checked_before_anything_is_read() {
    let command = Command::RegionWrite;
    for size_bytes in [0, 1, 15] {
        let error = Header::parse(&header(10, size_bytes, 0)).unwrap_err();
        assert_eq!(error, MessageError::Undersized { command, size_bytes });
    }
    let most = (HEADER_BYTES + ACCESS_BYTES + MAX_TRANSFER_BYTES) as u32;
    assert_eq!(
        Header::parse(&header(10, most, 0)).unwrap().payload_bytes,
        most as usize - HEADER_BYTES
    );
    for size_bytes in [most + 1, u32::MAX] {
        let error = Header::parse(&header(10, size_bytes, 0)).unwrap_err();
        assert_eq!(error, MessageError::Oversized { command, size_bytes });
    }
    for command in (0..=20).map(Command::from_code) {
        assert!(Header::parse(&header(command.code(), most, 0)).is_ok());
        assert!(Header::parse(&header(command.code(), most + 1, 0)).is_err(), "{command}");
    }
}

#[test]
fn types_are_checked_and_unknown_flags_ignored() {
    for kind in 2..16 {
        let error = Header::parse(&header(13, 16, kind)).unwrap_err();
        assert_eq!(error, MessageError::UnknownType { command: Command::DeviceReset, kind });
    }
    let header = Header::parse(&header(13, 16, 0xffff_ff31)).unwrap();
    assert_eq!(header.flags, Flags { reply: true, no_reply: true, error: true });
    assert_eq!(header.id, 0x1234);
}

#[test]
fn a_payload_that_is_too_short_is_malformed_and_no_more() {
    for command in Command::ALL {
        for len in 0..=80_usize {
            for reply in [false, true] {
                let flags = Flags { reply, ..Flags::default() };
                let header =
                    Header { id: 1, command: *command, payload_bytes: len, flags, errno: 0 };
                match Message::parse(header, &vec![0; len], Vec::new()).body {
                    Body::Malformed(size) => assert_eq!(size, len),
                    body => {
                        let mut bytes = Vec::new();
                        body.write(&mut bytes);
                        // A zeroed region info with bytes behind it has no known capability. Any
                        // bytes may follow a command's structure.
                        assert!(
                            bytes.len() == len || !reply && bytes.len() < len,
                            "{command}, reply {reply}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn an_error_has_no_payload() {
    let bytes = bytes_of(&Message::refusal(3, Command::RegionRead, 22));
    assert_eq!(bytes.len(), HEADER_BYTES);
    let message = read_back(&bytes);
    assert_eq!((message.errno, message.body), (22, Body::Empty));
    let flags = Flags { reply: true, no_reply: false, error: true };
    let header =
        Header { id: 3, command: Command::RegionRead, payload_bytes: 16, flags, errno: 22 };
    assert_eq!(Message::parse(header, &[0; 16], Vec::new()).body, Body::Malformed(16));
}

#[test]
fn a_count_that_is_not_the_datas_is_malformed() {
    let header = |payload_bytes| Header {
        id: 0,
        command: Command::RegionWrite,
        payload_bytes,
        flags: Flags::default(),
        errno: 0,
    };
    let mut payload = [0; 24];
    payload[12] = 8;
    assert!(matches!(Message::parse(header(24), &payload, Vec::new()).body, Body::RegionAccess(_)));
    for count in [0, 7, 9, 255] {
        payload[12] = count;
        assert_eq!(Message::parse(header(24), &payload, Vec::new()).body, Body::Malformed(24));
    }
}

#[test]
fn data_is_compared_by_its_bytes() {
    for len in [0, 1, 8, 9, 100] {
        let bytes: Vec<u8> = (0..len).collect();
        let mut data = Data::zeros(len.into());
        assert_eq!(data.as_slice(), vec![0; len.into()]);
        data.as_mut_slice().copy_from_slice(&bytes);
        assert_eq!(data, Data::from(bytes.as_slice()));
    }
    assert_ne!(Data::zeros(3), Data::zeros(4));
}

/// Reads and writes, commands and replies, as far as they have the data or not.
fn access_message(access: RegionAccess) -> impl Strategy<Value = (Command, bool, Body)> {
    let with_data = usize::try_from(access.count) == Ok(access.data.as_slice().len());
    let without = access.data.as_slice().is_empty();
    let fits = |write: bool, reply: bool| if write != reply { with_data } else { without };
    let kinds: Vec<(bool, bool)> = [(false, false), (false, true), (true, false), (true, true)]
        .into_iter()
        .filter(|(write, reply)| fits(*write, *reply))
        .collect();
    (proptest::sample::select(kinds), Just(access)).prop_map(|((write, reply), access)| {
        let command = if write { Command::RegionWrite } else { Command::RegionRead };
        (command, reply, Body::RegionAccess(access))
    })
}

/// Messages that can be written and are read back unchanged.
fn message() -> impl Strategy<Value = Message> {
    let data = || prop_oneof![vec(any::<u8>(), 0..20), vec(any::<u8>(), 0..5000)];
    let area = any::<(u64, u64)>()
        .prop_map(|(offset_bytes, len_bytes)| SparseArea { offset_bytes, len_bytes });
    let map = any::<(u32, u32, u64, u64, u64)>().prop_map(
        |(argsz, flags, offset_bytes, address, len_bytes)| {
            Body::DmaMap(DmaMap { argsz, flags, offset_bytes, address, len_bytes })
        },
    );
    let unmap = any::<(u32, u32, u64, u64)>().prop_map(|(argsz, flags, address, len_bytes)| {
        Body::DmaUnmap(DmaUnmap { argsz, flags, address, len_bytes })
    });
    let device = any::<(u32, u32, u32, u32)>().prop_map(|(argsz, flags, regions, irqs)| {
        Body::DeviceInfo(DeviceInfo { argsz, flags, regions, irqs })
    });
    let region = (any::<(u32, u32, u32, u64, u64)>(), vec(area, 0..=MAX_AREAS)).prop_map(
        |((argsz, flags, index, len_bytes, offset_bytes), areas)| {
            Body::RegionInfo(RegionInfo { argsz, flags, index, len_bytes, offset_bytes, areas })
        },
    );
    let irq = any::<(u32, u32, u32, u32)>().prop_map(|(argsz, flags, index, count)| {
        Body::IrqInfo(IrqInfo { argsz, flags, index, count })
    });
    let irqs = (any::<(u32, u32, u32, u32, u32)>(), vec(any::<u8>(), 0..2048)).prop_map(
        |((argsz, flags, index, start, count), data)| {
            Body::IrqSet(IrqSet { argsz, flags, index, start, count, data })
        },
    );
    let version = (any::<(u16, u16)>(), vec(any::<u8>(), 0..300))
        .prop_map(|((major, minor), data)| Body::Version(Version { major, minor, data }));
    let access = (any::<(u64, u32, u32)>(), option::of(data())).prop_map(
        |((offset_bytes, region, count), data)| {
            let count = data.as_ref().map_or(count, |data| data.len() as u32);
            let data = data.map_or(Data::empty(), |data| Data::from(data.as_slice()));
            RegionAccess { offset_bytes, region, count, data }
        },
    );
    let other = vec(any::<u8>(), 0..500).prop_map(Body::Other);
    let kind = prop_oneof![
        (Just(Command::DmaMap), Just(false), map),
        (Just(Command::DmaUnmap), any::<bool>(), unmap),
        (Just(Command::DeviceGetInfo), any::<bool>(), device),
        (Just(Command::DeviceGetRegionInfo), Just(true), region),
        (Just(Command::DeviceGetIrqInfo), any::<bool>(), irq),
        (Just(Command::DeviceSetIrqs), Just(false), irqs),
        (Just(Command::Version), any::<bool>(), version),
        (
            prop_oneof![Just(Command::DeviceFeature), (19_u16..).prop_map(Command::Unknown)],
            any::<bool>(),
            other
        ),
        (Just(Command::DeviceReset), any::<bool>(), Just(Body::Empty)),
        access.prop_flat_map(access_message),
    ];
    (kind, any::<u16>(), any::<bool>(), any::<u32>()).prop_map(
        |((command, reply, body), id, no_reply, errno)| {
            let flags = Flags { reply, no_reply, error: false };
            Message { id, command, flags, errno, body, fds: Vec::new() }
        },
    )
}

proptest! {
    #[test]
    fn a_written_message_is_read_back_unchanged(message in message()) {
        let read = read_back(&bytes_of(&message));
        prop_assert_eq!(&read.body, &message.body);
        prop_assert_eq!(
            (read.id, read.command, read.flags),
            (message.id, message.command, message.flags)
        );
        prop_assert_eq!(read.errno, message.errno);
    }

    #[test]
    fn any_bytes_are_read_or_refused(
        header in any::<[u8; HEADER_BYTES]>(),
        payload in vec(any::<u8>(), 0..200),
    ) {
        if let Ok(header) = Header::parse(&header) {
            prop_assert!(header.payload_bytes <= ACCESS_BYTES + MAX_TRANSFER_BYTES);
            let header = Header { payload_bytes: payload.len(), ..header };
            let message = Message::parse(header, &payload, Vec::new());
            let mut bytes = Vec::new();
            message.write(&mut bytes);
            prop_assert!(bytes.len() <= HEADER_BYTES + payload.len());
        }
    }

    #[test]
    fn any_payload_of_a_known_command_is_read_or_malformed(
        command in proptest::sample::select(Command::ALL),
        reply in any::<bool>(),
        payload in vec(any::<u8>(), 0..100),
    ) {
        let flags = Flags { reply, ..Flags::default() };
        let header = Header { id: 0, command, payload_bytes: payload.len(), flags, errno: 0 };
        match Message::parse(header, &payload, Vec::new()).body {
            Body::Malformed(len) => prop_assert_eq!(len, payload.len()),
            body => {
                let mut bytes = Vec::new();
                body.write(&mut bytes);
                prop_assert!(bytes.len() == payload.len() || !reply && bytes.len() < payload.len());
            }
        }
    }
}

#[test]
fn the_flags_are_linuxs() {
    assert_eq!(vfio::IRQ_SET_DATA_EVENTFD | vfio::IRQ_SET_ACTION_TRIGGER, 0x24);
    assert_eq!(vfio::DMA_UNMAP_FLAG_ALL, 2);
}
