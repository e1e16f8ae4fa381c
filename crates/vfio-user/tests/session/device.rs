//! The device's information: its regions, and access to them.

use sidecore_nvme::Region;
use sidecore_vfio_user::{Body, Command, MAX_TRANSFER_BYTES, SparseArea, vfio};

use crate::common::*;
use crate::fixture::*;

#[test]
fn the_device_is_as_qemu_demands() {
    let mut fixture = Fixture::new();
    let Body::DeviceInfo(info) =
        fixture.succeeds((Command::DeviceGetInfo, device_info()), Vec::new())
    else {
        panic!()
    };
    assert_eq!((info.argsz, info.flags, info.regions, info.irqs), (16, 3, 9, 5));
    let Body::DeviceInfo(mut short) = device_info() else { unreachable!() };
    short.argsz = 15;
    assert_eq!(
        fixture.fails((Command::DeviceGetInfo, Body::DeviceInfo(short)), Vec::new()),
        EINVAL
    );
}

#[test]
fn each_region_has_its_size() {
    let mut fixture = Fixture::with(Function::with_area("unmapped", None));
    fixture.negotiate();
    for (index, len_bytes) in
        [(0, BAR_BYTES), (1, 0), (4, 8192), (5, 0), (6, 0), (7, CONFIG_BYTES), (8, 0)]
    {
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
fn a_mappable_area_and_its_file_need_space_in_the_clients_buffer() {
    let mut fixture = Fixture::new();
    let reply = fixture.ask((Command::DeviceGetRegionInfo, region_info(0, 32)), Vec::new());
    let Body::RegionInfo(info) = reply.body else { panic!() };
    assert_eq!((info.argsz, info.flags), (64, 7), "mappable, and the needed size");
    assert!(info.areas.is_empty() && reply.fds.is_empty());

    let reply = fixture.ask((Command::DeviceGetRegionInfo, region_info(0, 64)), Vec::new());
    let Body::RegionInfo(info) = reply.body else { panic!() };
    assert_eq!((info.argsz, info.flags, info.offset_bytes), (64, 15, 0));
    assert_eq!(info.areas, [SparseArea { offset_bytes: AREA.0, len_bytes: AREA.1 }]);
    let [file] = reply.fds.try_into().unwrap();
    assert_eq!(rustix::fs::fstat(&file).unwrap().st_size as u64, BAR_BYTES);
}

#[test]
fn an_area_is_at_the_sum_of_the_regions_offset_and_its_own() {
    for (area, base) in
        [((0x2000, 0x2000), Some(0)), ((0x2000, 0x5000), Some(0x3000)), ((0x2000, 0), None)]
    {
        let mut fixture = Fixture::with(Function::with_area("area", Some(area)));
        fixture.negotiate();
        let reply = fixture.ask((Command::DeviceGetRegionInfo, region_info(0, 64)), Vec::new());
        let Body::RegionInfo(info) = reply.body else { panic!() };
        assert_eq!(base.is_some(), info.flags & vfio::REGION_INFO_FLAG_MMAP != 0);
        assert_eq!(
            (info.offset_bytes, reply.fds.len()),
            (base.unwrap_or(0), usize::from(base.is_some()))
        );
    }
}

#[test]
fn registers_and_configuration_space_are_read_and_written() {
    let mut fixture = Fixture::new();
    let Body::RegionAccess(config) = fixture.succeeds(read(7, 0, 4096), Vec::new()) else {
        panic!()
    };
    assert_eq!(config.data.as_slice(), (0..4096).map(|byte| byte as u8).collect::<Vec<_>>());
    for len in [1, 2, 4, 8, 64] {
        let Body::RegionAccess(reply) =
            fixture.succeeds(write(0, 0x1000, &vec![7; len]), Vec::new())
        else {
            panic!()
        };
        assert_eq!((reply.offset_bytes, reply.region, reply.count), (0x1000, 0, len as u32));
        assert!(reply.data.as_slice().is_empty());
        let Body::RegionAccess(reply) = fixture.succeeds(read(0, 0x1000, len as u32), Vec::new())
        else {
            panic!()
        };
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
