//! The session against a function that remembers, without a socket.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use proptest::prelude::*;
use sidecore_memory::{GuestAddress, RegionHint};
use sidecore_nvme::Region;
use sidecore_vfio_user::{
    Answer, Body, Command, DmaMap, DmaUnmap, Flags, HEADER_BYTES, Header, IrqInfo, IrqSet, MAX_TRANSFER_BYTES, Message,
    ProtocolError, Session, SparseArea, Version, vfio,
};

const EINVAL: u32 = 22;
const ENOENT: u32 = 2;
const EEXIST: u32 = 17;
const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;
const EVENTFD: u32 = vfio::IRQ_SET_DATA_EVENTFD | vfio::IRQ_SET_ACTION_TRIGGER;
const DISABLE: u32 = vfio::IRQ_SET_DATA_NONE | vfio::IRQ_SET_ACTION_TRIGGER;
const MSIX: u32 = vfio::PCI_MSIX_IRQ_INDEX;

struct Fixture {
    function: Arc<Function>,
    session: Session,
    woken: Arc<AtomicUsize>,
}

impl Fixture {
    /// Before VERSION.
    fn fresh() -> Self {
        Self::with(Function::new())
    }

    fn with(function: Arc<Function>) -> Self {
        let woken = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&woken);
        let wake = Arc::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
        });
        Self { session: Session::new(function.clone(), wake), function, woken }
    }

    fn new() -> Self {
        let mut fixture = Self::fresh();
        fixture.negotiate();
        fixture
    }

    fn negotiate(&mut self) {
        let reply = self.ask((Command::Version, version()), Vec::new());
        assert!(matches!(reply.body, Body::Version(_)));
    }

    fn handle(&mut self, ask: (Command, Body), fds: Vec<std::os::fd::OwnedFd>) -> Result<Answer, ProtocolError> {
        self.session.handle(Message::command(42, ask.0, ask.1, fds))
    }

    #[track_caller]
    fn ask(&mut self, ask: (Command, Body), fds: Vec<std::os::fd::OwnedFd>) -> Message {
        let command = ask.0;
        match self.handle(ask, fds) {
            Ok(Answer::Reply(reply)) => {
                assert!(reply.flags.reply && !reply.flags.no_reply);
                assert_eq!((reply.id, reply.command), (42, command));
                assert_eq!(reply.flags.error, reply.errno != 0);
                assert!(!reply.flags.error || (reply.body == Body::Empty && reply.fds.is_empty()));
                reply
            }
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn succeeds(&mut self, ask: (Command, Body), fds: Vec<std::os::fd::OwnedFd>) -> Body {
        let reply = self.ask(ask, fds);
        assert_eq!(reply.errno, 0);
        reply.body
    }

    #[track_caller]
    fn fails(&mut self, ask: (Command, Body), fds: Vec<std::os::fd::OwnedFd>) -> u32 {
        let reply = self.ask(ask, fds);
        assert_ne!(reply.errno, 0, "{reply:?}");
        reply.errno
    }

    fn map(&mut self, address: u64, len_bytes: u64) {
        assert_eq!(self.succeeds(dma_map(map(address, len_bytes)), vec![memfd(len_bytes)]), Body::Empty);
    }

    fn woken(&self) -> usize {
        self.woken.load(Ordering::SeqCst)
    }
}

fn dma_map(map: DmaMap) -> (Command, Body) {
    (Command::DmaMap, Body::DmaMap(map))
}

fn dma_unmap(unmap: DmaUnmap) -> (Command, Body) {
    (Command::DmaUnmap, Body::DmaUnmap(unmap))
}

fn set_irqs(set: IrqSet) -> (Command, Body) {
    (Command::DeviceSetIrqs, Body::IrqSet(set))
}

fn reset() -> (Command, Body) {
    (Command::DeviceReset, Body::Empty)
}

// The version.

#[test]
fn the_version_comes_first_and_once() {
    let mut fixture = Fixture::fresh();
    let command = Command::DeviceGetInfo;
    let error = fixture.handle((command, device_info()), Vec::new()).unwrap_err();
    assert_eq!(error, ProtocolError::NotNegotiated { command });
    fixture.negotiate();
    assert_eq!(fixture.fails((Command::Version, version()), Vec::new()), EINVAL);
    assert!(fixture.session.end());
    assert_eq!(fixture.function.events(), [Event::Reset, Event::Memory(0, 0)]);
}

#[test]
fn the_smaller_minor_version_counts_and_our_limits_fit_where_qemus_were() {
    for (theirs, ours) in [(0, 0), (1, 1), (2, 1), (u16::MAX, 1)] {
        let mut fixture = Fixture::fresh();
        let Body::Version(Version { data, .. }) = version() else { unreachable!() };
        let version = Body::Version(Version { major: 0, minor: theirs, data: data.clone() });
        let Body::Version(reply) = fixture.succeeds((Command::Version, version), Vec::new()) else { panic!() };
        assert_eq!((reply.major, reply.minor), (0, ours));
        assert!(reply.data.len() < data.len());
        let text = std::str::from_utf8(&reply.data).unwrap();
        let limits = r#""max_msg_fds":16,"max_data_xfer_size":65536,"max_dma_maps":509,"pgsizes":4096"#;
        assert_eq!(text, format!("{{\"capabilities\":{{{limits}}}}}\0"));
    }
}

#[test]
fn a_version_that_is_none_is_refused_and_another_one_ends_the_connection() {
    let mut fixture = Fixture::fresh();
    let of = |major, data: &[u8]| (Command::Version, Body::Version(Version { major, minor: 0, data: data.into() }));
    assert_eq!(fixture.fails(of(0, b"{}"), Vec::new()), EINVAL);
    assert_eq!(fixture.fails(of(0, b"{}\0"), vec![event()]), EINVAL);
    assert_eq!(fixture.fails((Command::Version, Body::Malformed(3)), Vec::new()), EINVAL);
    let error = fixture.handle(of(1, b"{}\0"), Vec::new()).unwrap_err();
    assert_eq!(error, ProtocolError::Version { major: 1, minor: 0 });
    assert!(fixture.session.end());
    assert_eq!(fixture.function.events(), [], "a client that was none changed nothing");

    let mut fixture = Fixture::fresh();
    fixture.succeeds(of(0, b""), Vec::new());
}

#[test]
fn a_reply_is_no_command() {
    let mut fixture = Fixture::new();
    let command = Command::DmaRead;
    let error = fixture.session.handle(Message::reply(1, command, Body::Empty, Vec::new())).unwrap_err();
    assert_eq!(error, ProtocolError::UnexpectedReply { command });
}

#[test]
fn what_is_not_offered_is_refused_as_such() {
    let mut fixture = Fixture::new();
    for command in [
        Command::DeviceGetRegionIoFds,
        Command::DmaRead,
        Command::DmaWrite,
        Command::DirtyPages,
        Command::RegionWriteMulti,
        Command::DeviceFeature,
        Command::MigDataRead,
        Command::MigDataWrite,
        Command::Unknown(0),
        Command::Unknown(0xffff),
    ] {
        assert_eq!(fixture.fails((command, Body::Other(vec![0; 40])), Vec::new()), ENOTSUP, "{command}");
    }
}

#[test]
fn who_wants_no_reply_gets_none() {
    let mut fixture = Fixture::new();
    let mut post = |(command, body)| {
        let message = Message::command(1, command, body, Vec::new()).without_reply();
        assert!(matches!(fixture.session.handle(message), Ok(Answer::Nothing)), "{command}");
    };
    post(write(0, 0x14, &[1, 0, 0, 0]));
    post(write(0, BAR_BYTES, &[1]));
    post((Command::DeviceFeature, Body::Other(Vec::new())));
    post(reset());
    assert_eq!(fixture.function.events(), [Event::Write(Region::Bar(0), 0x14, vec![1, 0, 0, 0]), Event::Reset]);
}

#[test]
fn descriptors_that_do_not_belong_to_a_command_are_refused() {
    let mut fixture = Fixture::new();
    for ask in [read(0, 0, 4), reset(), (Command::DeviceGetInfo, device_info())] {
        assert_eq!(fixture.fails(ask, vec![event()]), EINVAL);
    }
    for ask in [dma_map(map(0, PAGE)), dma_unmap(unmap(0, PAGE))] {
        assert_eq!(fixture.fails(ask, vec![memfd(PAGE), memfd(PAGE)]), EINVAL);
    }
    assert_eq!(fixture.function.events(), []);
}

/// SPDK's driver sends the file again.
#[test]
fn an_unmap_may_come_with_a_descriptor() {
    let mut fixture = Fixture::new();
    for fd in [memfd(PAGE), event()] {
        fixture.map(0, PAGE);
        fixture.succeeds(dma_unmap(unmap(0, PAGE)), vec![fd]);
        assert_eq!(fixture.function.memory().region_count(), 0);
    }
    assert_eq!(fixture.fails(dma_unmap(unmap(0, PAGE)), vec![memfd(PAGE)]), ENOENT);
}

/// The payload of each command as clients send it that reuse the reply's buffer: the structure, with an `argsz` of all
/// that follows the header, and anything behind it.
#[test]
fn payloads_may_be_longer_than_their_structures() {
    let signal = vfio::IRQ_SET_DATA_NONE | vfio::IRQ_SET_ACTION_TRIGGER;
    let signal_some = vfio::IRQ_SET_DATA_BOOL | vfio::IRQ_SET_ACTION_TRIGGER;
    for padding in [1_usize, 8, 4000, 4064 - 32, 64 << 10] {
        let argsz = |bytes: usize| (bytes + padding).min(64 << 10) as u32;
        let mut fixture = Fixture::new();
        let Body::DeviceInfo(mut device) = device_info() else { unreachable!() };
        device.argsz = argsz(16);
        let irq = IrqInfo { argsz: argsz(16), flags: 0, index: MSIX, count: 0 };
        let region = region_info(0, argsz(32));
        let map = DmaMap { argsz: argsz(32), ..map(0, PAGE) };
        let unmap = DmaUnmap { argsz: argsz(24), ..unmap(0, PAGE) };
        let sets = [irqs(EVENTFD, MSIX, 1, 1), irqs(signal, MSIX, 1, 1)];
        let some = IrqSet { data: vec![0, 1], ..irqs(signal_some, MSIX, 0, 2) };
        let mut asks = vec![
            ((Command::DeviceGetInfo, Body::DeviceInfo(device)), vec![]),
            ((Command::DeviceGetRegionInfo, region), vec![]),
            ((Command::DeviceGetIrqInfo, Body::IrqInfo(irq)), vec![]),
            (dma_map(map), vec![memfd(PAGE)]),
            (dma_unmap(unmap), vec![]),
            (read(0, 0, 4), vec![]),
            (reset(), vec![]),
        ];
        let fds = [vec![event()], vec![], vec![]];
        let sets = sets.into_iter().chain([some]).map(|set| set_irqs(IrqSet { argsz: argsz(20), ..set }));
        asks.extend(sets.zip(fds));
        for ((command, body), fds) in asks {
            let (payload_bytes, message) = padded(command, body, padding, fds);
            // No message is larger than the largest region access.
            if payload_bytes > (64 << 10) + 16 {
                continue;
            }
            match fixture.session.handle(message).unwrap() {
                Answer::Reply(reply) => assert_eq!(reply.errno, 0, "{command} with {padding} bytes behind it"),
                other => panic!("{other:?}"),
            }
        }
        let signalled = fixture.function.events().into_iter().filter(|event| *event == Event::Signal(1)).count();
        assert_eq!(signalled, if padding < 64 << 10 { 2 } else { 0 }, "vector 1 and no other");
        assert!(!fixture.function.events().contains(&Event::Signal(0)));
    }
}

/// A command as it is received with so many bytes behind its payload, which are not zero; and the payload's size.
fn padded(command: Command, body: Body, padding: usize, fds: Vec<std::os::fd::OwnedFd>) -> (usize, Message) {
    let mut bytes = Vec::new();
    Message::command(42, command, body, Vec::new()).write(&mut bytes);
    let mut payload = bytes.split_off(HEADER_BYTES);
    payload.resize(payload.len() + padding, 0xA5);
    let flags = Flags::default();
    let header = Header { id: 42, command, payload_bytes: payload.len(), flags, errno: 0 };
    (payload.len(), Message::parse(header, &payload, fds))
}

/// Each session that is spoken with is a new client of the function, and one without memory for it is refused.
#[test]
fn a_function_knows_of_each_client() {
    let function = Function::new();
    let connections = || function.connections.load(Ordering::SeqCst);
    for client in 1..4 {
        let mut fixture = Fixture::with(function.clone());
        assert_eq!(connections(), client - 1, "nothing was said yet");
        function.refuses.store(true, Ordering::SeqCst);
        assert_eq!(fixture.fails((Command::Version, version()), Vec::new()), 12);
        assert!(matches!(fixture.handle(read(0, 0, 4), Vec::new()), Err(ProtocolError::NotNegotiated { .. })));
        function.refuses.store(false, Ordering::SeqCst);
        fixture.negotiate();
        fixture.succeeds(reset(), Vec::new());
        assert_eq!(connections(), client);
        while !fixture.session.end() {}
    }
}

// What the device is.

#[test]
fn the_device_is_as_qemu_demands() {
    let mut fixture = Fixture::new();
    let Body::DeviceInfo(info) = fixture.succeeds((Command::DeviceGetInfo, device_info()), Vec::new()) else {
        panic!()
    };
    assert_eq!((info.argsz, info.flags, info.regions, info.irqs), (16, 3, 9, 5));
    let Body::DeviceInfo(mut short) = device_info() else { unreachable!() };
    short.argsz = 15;
    assert_eq!(fixture.fails((Command::DeviceGetInfo, Body::DeviceInfo(short)), Vec::new()), EINVAL);
}

#[test]
fn each_region_has_its_size() {
    let mut fixture = Fixture::with(Function::with_area("unmapped", None));
    fixture.negotiate();
    for (index, len_bytes) in [(0, BAR_BYTES), (1, 0), (4, 8192), (5, 0), (6, 0), (7, CONFIG_BYTES), (8, 0)] {
        let reply = fixture.ask((Command::DeviceGetRegionInfo, region_info(index, 32)), Vec::new());
        let Body::RegionInfo(info) = reply.body else { panic!() };
        assert_eq!((info.index, info.len_bytes, info.argsz), (index, len_bytes, 32));
        assert_eq!(info.flags, if len_bytes == 0 { 0 } else { 3 });
        assert!(info.areas.is_empty() && reply.fds.is_empty());
    }
    for (index, argsz) in [(9, 32), (u32::MAX, 32), (0, 31), (0, 0)] {
        let ask = (Command::DeviceGetRegionInfo, region_info(index, argsz));
        assert_eq!(fixture.fails(ask, Vec::new()), EINVAL);
    }
}

#[test]
fn what_can_be_mapped_comes_with_its_file_where_there_is_room_to_say_so() {
    let mut fixture = Fixture::new();
    let reply = fixture.ask((Command::DeviceGetRegionInfo, region_info(0, 32)), Vec::new());
    let Body::RegionInfo(info) = reply.body else { panic!() };
    assert_eq!((info.argsz, info.flags), (64, 7), "mappable, and so much room is needed");
    assert!(info.areas.is_empty() && reply.fds.is_empty());

    let reply = fixture.ask((Command::DeviceGetRegionInfo, region_info(0, 64)), Vec::new());
    let Body::RegionInfo(info) = reply.body else { panic!() };
    assert_eq!((info.argsz, info.flags, info.offset_bytes), (64, 15, 0));
    assert_eq!(info.areas, [SparseArea { offset_bytes: AREA.0, len_bytes: AREA.1 }]);
    let [file] = reply.fds.try_into().unwrap();
    assert_eq!(rustix::fs::fstat(&file).unwrap().st_size as u64, BAR_BYTES);
}

#[test]
fn an_area_is_where_the_regions_offset_and_its_own_say() {
    for (area, base) in [((0x2000, 0x2000), Some(0)), ((0x2000, 0x5000), Some(0x3000)), ((0x2000, 0), None)] {
        let mut fixture = Fixture::with(Function::with_area("area", Some(area)));
        fixture.negotiate();
        let reply = fixture.ask((Command::DeviceGetRegionInfo, region_info(0, 64)), Vec::new());
        let Body::RegionInfo(info) = reply.body else { panic!() };
        assert_eq!(base.is_some(), info.flags & vfio::REGION_INFO_FLAG_MMAP != 0);
        assert_eq!((info.offset_bytes, reply.fds.len()), (base.unwrap_or(0), usize::from(base.is_some())));
    }
}

#[test]
fn registers_and_configuration_space_are_read_and_written() {
    let mut fixture = Fixture::new();
    let Body::RegionAccess(config) = fixture.succeeds(read(7, 0, 4096), Vec::new()) else { panic!() };
    assert_eq!(config.data.as_slice(), (0..4096).map(|byte| byte as u8).collect::<Vec<_>>());
    for len in [1, 2, 4, 8, 64] {
        let Body::RegionAccess(reply) = fixture.succeeds(write(0, 0x1000, &vec![7; len]), Vec::new()) else { panic!() };
        assert_eq!((reply.offset_bytes, reply.region, reply.count), (0x1000, 0, len as u32));
        assert!(reply.data.as_slice().is_empty());
        let Body::RegionAccess(reply) = fixture.succeeds(read(0, 0x1000, len as u32), Vec::new()) else { panic!() };
        assert_eq!(reply.data.as_slice(), vec![7; len]);
        let written = fixture.function.take_events();
        assert_eq!(written, [Event::Write(Region::Bar(0), 0x1000, vec![7; len])], "as one access");
    }
    let Body::RegionAccess(reply) = fixture.succeeds(read(0, 0, 0), Vec::new()) else { panic!() };
    assert_eq!((reply.count, reply.data.as_slice()), (0, [].as_slice()));
}

#[test]
fn accesses_out_of_range_are_refused() {
    let mut fixture = Fixture::new();
    for ask in [
        read(0, BAR_BYTES, 1),
        read(0, BAR_BYTES - 3, 4),
        read(0, u64::MAX, 1),
        read(0, u64::MAX, u32::MAX),
        read(0, 0, MAX_TRANSFER_BYTES as u32 + 1),
        read(0, 0, u32::MAX),
        read(1, 0, 4),
        read(6, 0, 4),
        read(8, 0, 4),
        read(9, 0, 4),
        read(u32::MAX, 0, 4),
        read(7, 4096, 1),
        write(7, 4094, &[0; 4]),
        write(0, u64::MAX, &[0]),
        write(256, 0, &[0]),
    ] {
        assert_eq!(fixture.fails(ask, Vec::new()), EINVAL);
    }
}

// DMA.

#[test]
fn memory_is_what_is_mapped() {
    let mut fixture = Fixture::new();
    let file = memfd(4 * PAGE);
    rustix::io::pwrite(&file, b"hello", PAGE).unwrap();
    let second = DmaMap { offset_bytes: PAGE, ..map(1 << 32, 2 * PAGE) };
    fixture.succeeds(dma_map(second), vec![file]);
    fixture.map(0, 16 * PAGE);
    let memory = fixture.function.memory();
    assert_eq!((memory.region_count(), memory.len_bytes()), (2, 18 * PAGE));
    let bytes: [u8; 5] = memory.read_array(GuestAddress(1 << 32), &mut RegionHint::default()).unwrap();
    assert_eq!(&bytes, b"hello");
    let unmap = unmap(1 << 32, 2 * PAGE);
    assert_eq!(fixture.succeeds(dma_unmap(unmap), Vec::new()), Body::DmaUnmap(unmap), "the original entry");
    assert_eq!(fixture.function.memory().len_bytes(), 16 * PAGE);
    let all = DmaUnmap { argsz: 24, flags: vfio::DMA_UNMAP_FLAG_ALL, address: 0, len_bytes: 0 };
    assert_eq!(fixture.succeeds(dma_unmap(all), Vec::new()), Body::DmaUnmap(all));
    assert_eq!(fixture.function.memory().region_count(), 0);
    fixture.map(0, PAGE);
}

#[test]
fn a_map_over_another_is_refused() {
    let mut fixture = Fixture::new();
    fixture.map(8 * PAGE, 4 * PAGE);
    fixture.succeeds(dma_map(map(16 * PAGE, PAGE)), Vec::new());
    for (address, len) in [(8, 4), (7, 2), (11, 1), (0, 32), (9, 1), (16, 1), (12, 5)] {
        let ask = dma_map(map(address * PAGE, len * PAGE));
        assert_eq!(fixture.fails(ask, vec![memfd(32 * PAGE)]), EEXIST, "{address} {len}");
        assert_eq!(fixture.fails(dma_map(map(address * PAGE, len * PAGE)), Vec::new()), EEXIST);
    }
    fixture.map(7 * PAGE, PAGE);
    fixture.map(12 * PAGE, 4 * PAGE);
    assert_eq!(fixture.function.memory().region_count(), 3);
}

#[test]
fn maps_without_sense_are_refused() {
    let mut fixture = Fixture::new();
    let good = map(0, PAGE);
    for bad in [
        DmaMap { argsz: 31, ..good },
        DmaMap { flags: 0, ..good },
        DmaMap { flags: 8 | 3, ..good },
        DmaMap { flags: 1 << 31 | 3, ..good },
        DmaMap { len_bytes: 0, ..good },
        DmaMap { len_bytes: PAGE - 1, ..good },
        DmaMap { address: 1, ..good },
        DmaMap { address: PAGE.wrapping_neg(), ..good },
        DmaMap { address: PAGE, len_bytes: PAGE.wrapping_neg(), ..good },
        DmaMap { offset_bytes: PAGE, ..good },
        DmaMap { offset_bytes: u64::MAX, ..good },
        DmaMap { len_bytes: 2 * PAGE, ..good },
    ] {
        assert_eq!(fixture.fails(dma_map(bad), vec![memfd(PAGE)]), EINVAL, "{bad:?}");
    }
    assert_eq!(fixture.fails(dma_map(DmaMap { flags: 4 | 3, ..good }), Vec::new()), EINVAL, "a file is asked for");
    assert_eq!(fixture.fails((Command::DmaMap, Body::Malformed(31)), vec![memfd(PAGE)]), EINVAL);
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    assert_ne!(fixture.fails(dma_map(good), vec![reader]), 0);
    let file = memfd(PAGE);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let read_only = std::fs::File::open(path).unwrap();
    assert_eq!(fixture.fails(dma_map(good), vec![read_only.into()]), 13, "EACCES");
    // Who serves the filesystem of a file could make the thread wait, which serves others too.
    for path in [concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"), "/dev/zero"] {
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        assert_eq!(fixture.fails(dma_map(good), vec![file.into()]), EINVAL, "not in memory");
    }
    assert_eq!(fixture.function.events(), []);
}

#[test]
fn a_map_that_is_not_memory_is_remembered_and_taken_back() {
    let mut fixture = Fixture::new();
    let read_only = DmaMap { flags: vfio::DMA_MAP_FLAG_READ, ..map(0, PAGE) };
    let write_only = DmaMap { flags: vfio::DMA_MAP_FLAG_WRITE, ..map(4 * PAGE, PAGE) };
    fixture.succeeds(dma_map(read_only), vec![memfd(PAGE)]);
    fixture.succeeds(dma_map(write_only), vec![memfd(PAGE)]);
    fixture.succeeds(dma_map(map(8 * PAGE, PAGE)), Vec::new());
    for address in [0, 4 * PAGE, 8 * PAGE] {
        fixture.succeeds(dma_unmap(unmap(address, PAGE)), Vec::new());
        assert_eq!(fixture.fails(dma_unmap(unmap(address, PAGE)), Vec::new()), ENOENT);
    }
    assert_eq!(fixture.function.events(), [], "the function has seen nothing of them");
}

#[test]
fn what_is_unmapped_was_mapped_just_so() {
    let mut fixture = Fixture::new();
    fixture.map(0, 4 * PAGE);
    for bad in [unmap(0, PAGE), unmap(PAGE, PAGE), unmap(0, 8 * PAGE), unmap(0, 0), unmap(u64::MAX, u64::MAX)] {
        assert_eq!(fixture.fails(dma_unmap(bad), Vec::new()), ENOENT, "{bad:?}");
    }
    let good = unmap(0, 4 * PAGE);
    for bad in [
        DmaUnmap { argsz: 23, ..good },
        DmaUnmap { flags: 1, ..good },
        DmaUnmap { flags: 4, ..good },
        DmaUnmap { flags: vfio::DMA_UNMAP_FLAG_ALL, ..good },
    ] {
        assert_eq!(fixture.fails(dma_unmap(bad), Vec::new()), EINVAL, "{bad:?}");
    }
    fixture.succeeds(dma_unmap(good), Vec::new());
}

#[test]
fn there_are_as_many_maps_as_we_say() {
    let mut fixture = Fixture::new();
    for number in 0..509 {
        fixture.succeeds(dma_map(map(number * PAGE, PAGE)), if number % 2 == 0 { vec![memfd(PAGE)] } else { vec![] });
    }
    assert_eq!(fixture.fails(dma_map(map(1 << 40, PAGE)), vec![memfd(PAGE)]), ENOSPC);
    assert_eq!(fixture.fails(dma_map(map(1 << 40, PAGE)), Vec::new()), ENOSPC);
    fixture.succeeds(dma_unmap(unmap(PAGE, PAGE)), Vec::new());
    fixture.succeeds(dma_map(map(1 << 40, PAGE)), vec![memfd(PAGE)]);
}

// Interrupts.

#[test]
fn each_kind_of_interrupts_has_its_count() {
    let mut fixture = Fixture::new();
    for (index, count) in [(0, 0), (1, 0), (2, VECTORS.into()), (3, 1), (4, 1)] {
        let Body::IrqInfo(info) = fixture.succeeds((Command::DeviceGetIrqInfo, irq_info(index)), Vec::new()) else {
            panic!()
        };
        assert_eq!((info.argsz, info.flags, info.index, info.count), (16, vfio::IRQ_INFO_EVENTFD, index, count));
    }
    for index in [5, u32::MAX] {
        assert_eq!(fixture.fails((Command::DeviceGetIrqInfo, irq_info(index)), Vec::new()), EINVAL);
    }
}

#[test]
fn vectors_get_their_eventfds_and_lose_them() {
    let mut fixture = Fixture::new();
    let events = |count| (0..count).map(|_| event()).collect();
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 2, 3)), events(3));
    assert_eq!(fixture.function.assigned(), [2, 3, 4]);
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 24, 16)), events(16));
    // QEMU enables MSI-X without a vector like this, and takes eventfds away.
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 0, 1)), Vec::new());
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 3, 30)), Vec::new());
    assert_eq!(fixture.function.assigned(), [2, 33, 34, 35, 36, 37, 38, 39]);
    fixture.succeeds(set_irqs(irqs(DISABLE, MSIX, 0, 0)), Vec::new());
    assert_eq!(fixture.function.assigned(), []);
    for index in [vfio::PCI_INTX_IRQ_INDEX, vfio::PCI_MSI_IRQ_INDEX] {
        fixture.succeeds(set_irqs(irqs(DISABLE, index, 0, 0)), Vec::new());
    }
    for index in [vfio::PCI_ERR_IRQ_INDEX, vfio::PCI_REQ_IRQ_INDEX] {
        fixture.succeeds(set_irqs(irqs(EVENTFD, index, 0, 1)), events(1));
        fixture.succeeds(set_irqs(irqs(EVENTFD, index, 0, 1)), Vec::new());
        fixture.succeeds(set_irqs(irqs(DISABLE, index, 0, 0)), Vec::new());
    }
}

#[test]
fn a_function_with_msi_has_its_vectors_there_and_none_of_msi_x() {
    const MSI: u32 = vfio::PCI_MSI_IRQ_INDEX;
    let mut fixture = Fixture::new();
    fixture.function.use_msi();
    for (index, count) in [(MSI, VECTORS.into()), (MSIX, 0), (vfio::PCI_INTX_IRQ_INDEX, 0)] {
        let Body::IrqInfo(info) = fixture.succeeds((Command::DeviceGetIrqInfo, irq_info(index)), Vec::new()) else {
            panic!()
        };
        assert_eq!(info.count, count);
    }
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSI, 0, 2)), vec![event(), event()]);
    assert_eq!(fixture.function.assigned(), [0, 1]);
    assert_eq!(fixture.fails(set_irqs(irqs(EVENTFD, MSIX, 0, 1)), vec![event()]), EINVAL);
    fixture.succeeds(set_irqs(irqs(DISABLE, MSI, 1, 1)), Vec::new());
    assert_eq!(fixture.function.take_events().last(), Some(&Event::Signal(1)));
    fixture.succeeds(set_irqs(irqs(DISABLE, MSI, 0, 0)), Vec::new());
    assert_eq!(fixture.function.assigned(), []);
}

#[test]
fn interrupts_without_sense_are_refused() {
    let mut fixture = Fixture::new();
    let good = irqs(EVENTFD, MSIX, 0, 2);
    for bad in [
        IrqSet { argsz: 19, ..good.clone() },
        IrqSet { flags: 0, ..good.clone() },
        IrqSet { flags: EVENTFD | vfio::IRQ_SET_DATA_NONE, ..good.clone() },
        IrqSet { flags: EVENTFD | vfio::IRQ_SET_ACTION_MASK, ..good.clone() },
        IrqSet { flags: EVENTFD | 1 << 6, ..good.clone() },
        IrqSet { index: 5, ..good.clone() },
        IrqSet { index: vfio::PCI_INTX_IRQ_INDEX, ..good.clone() },
        IrqSet { index: vfio::PCI_ERR_IRQ_INDEX, ..good.clone() },
        IrqSet { start: 39, ..good.clone() },
        IrqSet { start: u32::MAX, ..good.clone() },
        IrqSet { count: 1, ..good.clone() },
        IrqSet { count: 0, ..good.clone() },
        IrqSet { count: u32::MAX, ..good.clone() },
        IrqSet { flags: DISABLE, ..good.clone() },
    ] {
        assert_eq!(fixture.fails(set_irqs(bad.clone()), vec![event(), event()]), EINVAL, "{bad:?}");
    }
    for bad in [
        IrqSet { start: 39, ..good.clone() },
        IrqSet { start: u32::MAX, ..good.clone() },
        IrqSet { count: u32::MAX, ..good.clone() },
        IrqSet { count: 0, ..good.clone() },
        IrqSet { start: 1, count: 0, flags: DISABLE, ..good.clone() },
        IrqSet { flags: vfio::IRQ_SET_DATA_BOOL | vfio::IRQ_SET_ACTION_TRIGGER, data: vec![1], ..good.clone() },
    ] {
        assert_eq!(fixture.fails(set_irqs(bad.clone()), Vec::new()), EINVAL, "{bad:?}");
    }
    assert_eq!(fixture.function.events(), []);
}

#[test]
fn vectors_are_signalled_by_message() {
    let mut fixture = Fixture::new();
    fixture.succeeds(set_irqs(irqs(DISABLE, MSIX, 38, 2)), Vec::new());
    assert_eq!(fixture.function.take_events(), [Event::Signal(38), Event::Signal(39)]);
    let each = irqs(vfio::IRQ_SET_DATA_BOOL | vfio::IRQ_SET_ACTION_TRIGGER, MSIX, 4, 4);
    fixture.succeeds(set_irqs(IrqSet { data: vec![0, 1, 0, 0xFF], ..each.clone() }), Vec::new());
    assert_eq!(fixture.function.take_events(), [Event::Signal(5), Event::Signal(7)]);
    for bad in [
        irqs(DISABLE, MSIX, 39, 2),
        irqs(DISABLE, MSIX, u32::MAX, 1),
        irqs(DISABLE, MSIX, 0, u32::MAX),
        irqs(DISABLE, vfio::PCI_INTX_IRQ_INDEX, 0, 1),
        IrqSet { data: vec![1; 3], ..each.clone() },
        IrqSet { start: 37, data: vec![1; 4], ..each.clone() },
        IrqSet { count: 0, ..each },
    ] {
        assert_eq!(fixture.fails(set_irqs(bad.clone()), Vec::new()), EINVAL, "{bad:?}");
    }
    // Their eventfds are not kept.
    for index in [vfio::PCI_ERR_IRQ_INDEX, vfio::PCI_REQ_IRQ_INDEX] {
        assert_eq!(fixture.fails(set_irqs(irqs(DISABLE, index, 0, 1)), Vec::new()), ENOTSUP);
    }
    assert_eq!(fixture.function.events(), []);
}

#[test]
fn nothing_is_masked_by_message() {
    let mut fixture = Fixture::new();
    for action in [vfio::IRQ_SET_ACTION_MASK, vfio::IRQ_SET_ACTION_UNMASK] {
        let none = irqs(vfio::IRQ_SET_DATA_NONE | action, MSIX, 0, 2);
        assert_eq!(fixture.fails(set_irqs(none.clone()), Vec::new()), ENOTSUP);
        let each = IrqSet { flags: vfio::IRQ_SET_DATA_BOOL | action, data: vec![1, 0], ..none.clone() };
        assert_eq!(fixture.fails(set_irqs(each), Vec::new()), ENOTSUP);
        let by_event = IrqSet { flags: vfio::IRQ_SET_DATA_EVENTFD | action, ..none };
        assert_eq!(fixture.fails(set_irqs(by_event), vec![event(), event()]), ENOTSUP);
    }
    assert_eq!(fixture.function.events(), []);
}

#[test]
fn a_vector_that_cannot_be_assigned_takes_the_others_of_its_message_back() {
    let mut fixture = Fixture::new();
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 9, 1)), vec![event()]);
    assert_eq!(fixture.fails(set_irqs(irqs(EVENTFD, MSIX, 0, 3)), vec![event(), event(), memfd(0)]), EINVAL);
    assert_eq!(fixture.function.assigned(), [9]);
}

// What takes time.

#[test]
fn what_takes_time_is_answered_when_it_is_done() {
    let mut fixture = Fixture::new();
    fixture.map(0, PAGE);
    fixture.function.hold(true);
    let asks = [
        (dma_map(map(PAGE, PAGE)), vec![memfd(PAGE)], Body::Empty),
        (dma_unmap(unmap(0, PAGE)), vec![], Body::DmaUnmap(unmap(0, PAGE))),
        (reset(), vec![], Body::Empty),
    ];
    for (number, (ask, fds, body)) in (1..).zip(asks) {
        let command = ask.0;
        assert!(matches!(fixture.handle(ask, fds), Ok(Answer::Later)));
        assert!(fixture.session.is_waiting());
        assert!(matches!(fixture.session.resume(), Answer::Later));
        let early = fixture.handle(reset(), Vec::new()).unwrap_err();
        assert_eq!(early, ProtocolError::OutOfTurn { command: Command::DeviceReset });
        fixture.function.release();
        assert_eq!(fixture.woken(), number);
        let Answer::Reply(reply) = fixture.session.resume() else { panic!() };
        assert_eq!((reply.id, reply.command, reply.body), (42, command, body));
        assert!(matches!(fixture.session.resume(), Answer::Nothing));
    }
    assert_eq!(fixture.function.memory().region_count(), 1);
    fixture.function.hold(false);
}

#[test]
fn who_wants_no_reply_gets_none_later_either() {
    let mut fixture = Fixture::new();
    fixture.function.hold(true);
    let message = Message::command(1, Command::DeviceReset, Body::Empty, Vec::new()).without_reply();
    assert!(matches!(fixture.session.handle(message), Ok(Answer::Later)));
    fixture.function.release();
    assert!(matches!(fixture.session.resume(), Answer::Nothing));
    assert!(!fixture.session.is_waiting());
    fixture.function.hold(false);
}

#[test]
fn a_reset_keeps_memory_and_eventfds() {
    let mut fixture = Fixture::new();
    fixture.map(0, PAGE);
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 0, 1)), vec![event()]);
    fixture.function.take_events();
    fixture.succeeds(reset(), Vec::new());
    assert_eq!(fixture.function.events(), [Event::Reset]);
}

#[test]
fn the_end_is_one_step_after_the_other() {
    let mut fixture = Fixture::new();
    fixture.map(0, PAGE);
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 7, 1)), vec![event()]);
    fixture.function.take_events();
    fixture.function.hold(true);
    assert!(matches!(fixture.handle(dma_map(map(PAGE, PAGE)), vec![memfd(PAGE)]), Ok(Answer::Later)));
    let asked = Event::Memory(2, 2 * PAGE);
    assert!(!fixture.session.end() && !fixture.session.end());
    assert_eq!(fixture.function.take_events(), [asked], "what was asked last is waited for");
    fixture.function.release();
    assert!(!fixture.session.end() && !fixture.session.end());
    assert_eq!(fixture.function.take_events(), [Event::Vector(7, false), Event::Reset]);
    fixture.function.release();
    assert!(!fixture.session.end() && !fixture.session.end());
    assert_eq!(fixture.function.take_events(), [Event::Memory(0, 0)]);
    fixture.function.release();
    assert!(fixture.session.end() && fixture.session.end());
    assert_eq!(fixture.woken(), 3);
    let command = Command::DeviceReset;
    assert_eq!(fixture.handle(reset(), Vec::new()).unwrap_err(), ProtocolError::OutOfTurn { command });
    drop(fixture.session);
    assert_eq!(fixture.function.events(), []);
}

#[test]
fn a_session_that_is_dropped_lets_go_of_everything() {
    let mut fixture = Fixture::new();
    fixture.map(0, PAGE);
    fixture.succeeds(set_irqs(irqs(EVENTFD, MSIX, 7, 1)), vec![event()]);
    fixture.function.take_events();
    drop(fixture.session);
    assert_eq!(fixture.function.events(), [Event::Vector(7, false), Event::Reset, Event::Memory(0, 0)]);
}

// The maps against a model.

#[derive(Clone, Debug)]
enum Change {
    Map {
        page: u64,
        pages: u64,
        kind: u8,
    },
    Unmap {
        page: u64,
        pages: u64,
    },
    /// One that is mapped, by its place in the row.
    UnmapSome(usize),
    All,
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        6 => (0..40_u64, 1..6_u64, 0..4_u8).prop_map(|(page, pages, kind)| Change::Map { page, pages, kind }),
        1 => (0..40_u64, 0..6_u64).prop_map(|(page, pages)| Change::Unmap { page, pages }),
        3 => any::<usize>().prop_map(Change::UnmapSome),
        1 => Just(Change::All),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn memory_is_what_a_model_says(changes in proptest::collection::vec(change(), 1..40)) {
        let mut fixture = Fixture::new();
        let mut model: Vec<(u64, u64, bool)> = Vec::new();
        for change in changes {
            let (ask, fds, fits) = match change {
                Change::Map { page, pages, kind } => {
                    let fits = model.iter().all(|(at, len, _)| page + pages <= *at || at + len <= page);
                    let flags = if kind == 1 { 1 } else { 3 };
                    let fds = if kind == 2 { vec![] } else { vec![memfd(pages * PAGE)] };
                    if fits {
                        model.push((page, pages, kind != 1 && kind != 2));
                    }
                    (dma_map(DmaMap { flags, ..map(page * PAGE, pages * PAGE) }), fds, fits)
                }
                Change::Unmap { page, pages } => {
                    let found = model.iter().position(|(at, len, _)| (*at, *len) == (page, pages));
                    found.map(|found| model.swap_remove(found));
                    (dma_unmap(unmap(page * PAGE, pages * PAGE)), vec![], found.is_some())
                }
                Change::UnmapSome(some) => {
                    let Some(some) = some.checked_rem(model.len()) else { continue };
                    let (page, pages, _) = model.swap_remove(some);
                    (dma_unmap(unmap(page * PAGE, pages * PAGE)), vec![], true)
                }
                Change::All => {
                    model.clear();
                    (dma_unmap(DmaUnmap { flags: vfio::DMA_UNMAP_FLAG_ALL, ..unmap(0, 0) }), vec![], true)
                }
            };
            prop_assert_eq!(fixture.ask(ask, fds).errno == 0, fits);
            let memory = fixture.function.memory();
            let pages: u64 = model.iter().filter(|(_, _, memory)| *memory).map(|(_, pages, _)| pages).sum();
            prop_assert_eq!(memory.len_bytes(), pages * PAGE);
            for page in 0..48 {
                let is_there = memory.read_array::<8>(GuestAddress(page * PAGE), &mut RegionHint::default()).is_ok();
                let expected = model.iter().any(|(at, len, memory)| *memory && (*at..at + len).contains(&page));
                prop_assert_eq!(is_there, expected, "page {}", page);
            }
        }
    }
}
