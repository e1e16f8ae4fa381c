//! The tests of reservations that need no disk.

use super::*;

#[test]
fn structures_and_numbers_are_those_of_the_kernel() {
    assert_eq!(size_of::<RawReservation>(), 16);
    assert_eq!(size_of::<RawRegistration>(), 24);
    assert_eq!(size_of::<RawPreempt>(), 24);
    assert_eq!(size_of::<RawClear>(), 16);
    assert_eq!(size_of::<RawKeys>(), 16);
    assert_eq!(size_of::<RawHeld>(), 16);
    assert_eq!(std::mem::offset_of!(RawRegistration, flags), 16);
    assert_eq!(std::mem::offset_of!(RawPreempt, kind), 16);
    assert_eq!(std::mem::offset_of!(RawHeld, kind), 12);
    // As printed by a C program that includes linux/pr.h.
    for (found, kernel) in [
        (REGISTER, 0x4018_70c8),
        (RESERVE, 0x4010_70c9),
        (PREEMPT_AND_ABORT, 0x4018_70cc),
        (CLEAR, 0x4010_70cd),
        (READ_KEYS, 0xc010_70ce),
        (READ_RESERVATION, 0x8010_70cf),
    ] {
        assert_eq!(found, kernel, "{found:#x}");
    }
}

fn disk() -> ReservedDisk {
    ReservedDisk { path: "/dev/disk".into(), file: tempfile::tempfile().unwrap() }
}

#[test]
fn a_unit_attention_is_tried_again_and_a_conflict_is_not() {
    let disk = disk();
    let tries = |statuses: Vec<io::Result<i32>>| {
        let mut left = statuses.into_iter();
        let outcome = disk.judge(|| left.next().unwrap());
        (outcome, left.len())
    };
    let (outcome, left) = tries(vec![Ok(DEVICE_ERROR), Ok(DEVICE_ERROR), Ok(0), Ok(0)]);
    assert!(outcome.is_ok() && left == 1);
    let (outcome, left) = tries((0..9).map(|_| Ok(DEVICE_ERROR)).collect());
    assert!(matches!(outcome, Err(ReservationError::Device { status: DEVICE_ERROR, .. })));
    assert_eq!(left, 9 - ATTEMPTS);
    for conflict in [CONFLICT, NVME_CONFLICT, 0x4083] {
        let (outcome, left) = tries(vec![Ok(conflict), Ok(0)]);
        assert!(matches!(outcome, Err(ReservationError::Conflict(_))) && left == 1);
    }
}

#[test]
fn a_registration_that_was_sent_twice_and_conflicts_may_have_been_carried_out() {
    let disk = disk();
    let judge = |keys, statuses: &[i32]| {
        let mut left = statuses.iter().copied();
        disk.judge_registration(keys, || Ok(left.next().unwrap()))
    };
    let twice = judge((5, 7), &[DEVICE_ERROR, CONFLICT]);
    assert!(matches!(twice, Err(ReservationError::Device { .. })), "{twice:?}");
    assert!(judge((5, 7), &[DEVICE_ERROR, 0]).is_ok());
    // One that replaces nothing, and one that was sent once.
    for (keys, statuses) in [((7, 7), &[DEVICE_ERROR, CONFLICT][..]), ((5, 7), &[CONFLICT])] {
        let judged = judge(keys, statuses);
        assert!(matches!(judged, Err(ReservationError::Conflict(_))), "{judged:?}");
    }
}

#[test]
fn errors_of_the_kernel_are_told_apart() {
    let disk = disk();
    let error = |number| {
        let attempt = || Err(io::Error::from_raw_os_error(number));
        disk.judge(attempt).unwrap_err().to_string()
    };
    assert!(error(libc::EOPNOTSUPP).contains("knows no persistent reservations"));
    assert!(error(libc::ENOTTY).contains("another fence"));
    assert!(error(libc::EPERM).contains("not a partition"));
    assert!(error(libc::EINVAL).contains("loss of power"));
    assert!(error(libc::EBADE).contains("conflicts"));
    assert!(error(libc::EIO).contains("/dev/disk"));
}

#[test]
fn a_preemption_is_sent_once() {
    let disk = disk();
    let mut sent = 0;
    let outcome = disk.judge_once(|| {
        sent += 1;
        Ok(DEVICE_ERROR)
    });
    assert!(matches!(outcome, Err(ReservationError::Device { .. })));
    assert_eq!(sent, 1);
}

#[test]
fn a_kernel_that_does_not_know_an_order_says_so_at_the_first_one() {
    let disk = disk();
    // The answer to the first read of keys, and that to the next one.
    let read = |first: Result<u32, i32>, next: Result<u32, i32>| {
        let mut answers = [next, first].to_vec();
        let answer = |_: &mut [u64]| {
            let answer = answers.pop().unwrap();
            answer.or_else(|number| {
                let failed = || Err(io::Error::from_raw_os_error(number));
                disk.judge_once(failed).map(|()| 0)
            })
        };
        disk.read_keys(answer).map_err(|error| error.to_string())
    };
    for unknown in [libc::ENOTTY, libc::EOPNOTSUPP, libc::EINVAL] {
        assert_eq!(read(Err(unknown), Ok(0)), Ok(None), "{unknown}");
        read(Ok(KEYS + 1), Err(unknown)).expect_err("the first read was known");
    }
    for error in [libc::EIO, libc::EPERM] {
        read(Err(error), Ok(0)).expect_err("an error of the disk");
    }
    assert_eq!(read(Ok(2), Ok(0)).unwrap().unwrap().len(), 2);
    assert_eq!(read(Ok(KEYS + 9), Ok(KEYS + 5)).unwrap().unwrap().len(), KEYS as usize + 5);
    let error = read(Ok(KEYS_MAX + 1), Ok(0)).unwrap_err();
    assert!(error.contains("65537 registrations"), "{error}");
    // A disk that has more of them at each read.
    let mut count = KEYS;
    let grows = |_: &mut [u64]| {
        count += 1;
        Ok(count)
    };
    let error = disk.read_keys(grows).unwrap_err().to_string();
    assert!(error.contains("more registrations at each read"), "{error}");
    assert_eq!(count as usize, KEYS as usize + 1 + ATTEMPTS, "the first read, and larger ones");
}

#[test]
fn devices_of_device_mapper_are_told_apart() {
    let devices = tempfile::tempdir().unwrap();
    let numbers = rustix::fs::makedev(253, 300);
    assert!(!is_mapped(devices.path(), numbers));
    let map = devices.path().join("253:300/dm");
    std::fs::create_dir_all(&map).unwrap();
    std::fs::write(map.join("uuid"), "mpath-3600\n").unwrap();
    assert!(is_mapped(devices.path(), numbers));
    assert!(!is_mapped(devices.path(), rustix::fs::makedev(253, 301)));
    let error = ReservationError::Mapped("/dev/mapper/shared".into()).to_string();
    assert!(error.contains("another fence"), "{error}");
}

#[test]
fn a_disk_has_one_device_and_an_identity() {
    let disks = tempfile::tempdir().unwrap();
    let attribute = |disk: &str, name: &str, text: &str| {
        let file = disks.path().join(disk).join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, format!("{text}\n")).unwrap();
    };
    let of = |minor| {
        let found = disk().id_among(disks.path(), rustix::fs::makedev(259, minor));
        found.map_err(|error| error.to_string())
    };
    attribute("nvme0n1", "dev", "259:1");
    assert!(of(1).unwrap_err().contains("no WWID of /dev/disk"));
    attribute("nvme0n1", "wwid", "eui.01");
    attribute("sda", "dev", "259:2");
    attribute("sda", "device/wwid", "t10.ATA  DISK 7 ");
    assert_eq!([of(1), of(2)], [Ok("eui.01".into()), Ok("t10.ATA  DISK 7".into())]);
    // A path of multipath, and one without.
    attribute("nvme0c1n1", "dev", "259:3");
    attribute("nvme0c1n1", "wwid", "eui.01");
    attribute("nvme0c1n1", "hidden", "1");
    assert_eq!(of(1), Ok("eui.01".into()));
    attribute("nvme1n1", "dev", "259:4");
    attribute("nvme1n1", "wwid", "eui.01");
    attribute("nvme1n1", "hidden", "0");
    let number = rustix::fs::makedev(259, 1);
    assert_eq!(twins(disks.path(), number).1, [Path::new("/dev/nvme1n1")]);
    attribute("cciss!c0d0", "dev", "104:0");
    attribute("cciss!c0d0", "device/wwid", "t10.ATA  DISK 7 ");
    let device = twins(disks.path(), rustix::fs::makedev(259, 2)).1;
    assert_eq!(device, [Path::new("/dev/cciss/c0d0")]);
    let error = of(1).unwrap_err();
    assert!(error.contains("/dev/nvme1n1 is the same disk as /dev/disk"), "{error}");
    assert!(of(9).unwrap_err().contains("no WWID"));
    // Disks without an identity are not one disk.
    for (disk, minor) in [("vda", 5), ("vdb", 6)] {
        attribute(disk, "dev", &format!("259:{minor}"));
    }
    assert_eq!(twins(disks.path(), rustix::fs::makedev(259, 5)).1, [""; 0].map(PathBuf::from));
}

#[test]
fn a_file_has_no_reservations() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = ReservedDisk::open(file.path()).unwrap_err();
    assert!(matches!(error, ReservationError::NotADisk(_)), "{error}");
    let error = disk().probe(1).unwrap_err();
    assert!(matches!(error, ReservationError::Unsupported(_)), "{error}");
}
