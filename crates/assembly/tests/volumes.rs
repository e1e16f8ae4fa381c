//! Controllers in a running assembly: volumes are created, served, copied and deleted while their
//! guests run, and outlive a restart.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sidecore_assembly::offline::GiveUp;
use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::{
    ControllerSpec, DeviceSpec, FileOptions, FormatSpec, FrontEndSpec, LimitSpec, LimitsSpec,
    SidecoreSpec, Spec, StoreKind, StoreSpec, VirtioBlkSpec, VolumeSpec,
};
use sidecore_assembly::{Assembly, AssemblyError, BlocksOf, ControllerHandle, ErrorKind, offline};
use sidecore_driver::{BlkClient, Status};
use sidecore_kit::guest::{connect, flush, read, write};

use common::{device, until};

const STORE_BYTES: u64 = 64 << 20;
const VOLUME_BYTES: u64 = 8 << 20;

/// The kinds of stores that controllers are tested on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum On {
    Ram,
    File,
}

fn image(directory: &Path) -> PathBuf {
    directory.join("pool.img")
}

/// A controller, and a device in front of a volume that is created with it.
fn spec(directory: &Path, on: On) -> Spec {
    let kind = match on {
        On::Ram => StoreKind::Ram { size_bytes: STORE_BYTES, block_bytes: 512 },
        On::File => {
            let path = image(directory);
            if !path.exists() {
                std::fs::File::create(&path).unwrap().set_len(STORE_BYTES).unwrap();
            }
            StoreKind::File(FileOptions::new(path))
        }
    };
    let root = VolumeSpec { size_bytes: Some(VOLUME_BYTES), ..VolumeSpec::new("pool", "root") };
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        stores: vec![
            StoreSpec::new("below", kind),
            StoreSpec::new("root", StoreKind::Volume(root)),
        ],
        controllers: vec![ControllerSpec {
            format: Some(FormatSpec { label: "test".to_owned(), ..FormatSpec::default() }),
            ..ControllerSpec::new("pool", "below")
        }],
        devices: vec![device(directory, "root")],
        ..Spec::default()
    }
}

fn pool(assembly: &Assembly) -> Arc<ControllerHandle> {
    assembly.controllers().swap_remove(0)
}

/// Serves a volume on a socket of its own.
fn serve(assembly: &Assembly, directory: &Path, volume: &str) -> DeviceSpec {
    let name = format!("vf-{volume}");
    let device = DeviceSpec { store: format!("pool/{volume}"), ..device(directory, &name) };
    let kind = StoreKind::Volume(VolumeSpec::new("pool", volume));
    assembly.add_device(&device, Some(&StoreSpec::new(&device.store, kind))).unwrap();
    device
}

fn names(controller: &ControllerHandle) -> Vec<String> {
    controller.volumes().unwrap().into_iter().map(|volume| volume.name).collect()
}

/// Reports name the volume of each function, and account for all blocks.
fn check_reports(assembly: &Assembly, pool: &ControllerHandle) {
    let report = pool.report();
    let shown: Vec<&str> =
        report.functions.iter().map(|function| function.volume.as_str()).collect();
    assert_eq!(shown, ["root", "before", "copy"]);
    assert!(report.functions[0].misses > 0, "{report:?}");
    assert!(report.commits > 0);
    let space = report.space;
    assert!(space.data_bytes >= 4 * 4096, "{space:?}");
    let parts = [
        space.free_bytes,
        space.data_bytes,
        space.metadata_bytes,
        space.reserved_bytes,
        space.granted_bytes,
        space.pending_bytes,
    ];
    assert_eq!(parts.iter().sum::<u64>(), space.total_bytes);
    let device = &assembly.devices()[2];
    assert_eq!(
        (device.controller.as_deref(), device.volume.as_deref()),
        (Some("pool"), Some("copy"))
    );
    assert!(pool.check().unwrap().clean);
}

#[test]
fn volumes_are_created_served_copied_and_deleted_under_their_guests() {
    for on in [On::Ram, On::File] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let spec = spec(path, on);
        let assembly = Assembly::start(&spec).unwrap();
        let pool = pool(&assembly);
        assert_eq!(names(&pool), ["root"]);
        let mut root = connect(&spec.devices[0].socket);
        assert_eq!(root.config().capacity_sectors, VOLUME_BYTES / 512);
        assert_eq!(read(&mut root, 800), 0, "a block that was never written reads as zeros");
        assert_eq!(write(&mut root, 8, 1), Status::Ok);
        assert_eq!(write(&mut root, 800, 1), Status::Ok);
        until(&assembly, 0, |report| report.state == DeviceState::Running);

        // A snapshot stays as it was, a clone starts from the snapshot, and neither sees later
        // writes of the others.
        let snapshot = pool.snapshot_volume("root", "before").unwrap();
        assert!(snapshot.read_only);
        assert_eq!(snapshot.origin_name.as_deref(), Some("root"));
        assert_eq!(write(&mut root, 8, 2), Status::Ok);
        pool.clone_volume("before", "copy").unwrap();
        let (before, copy) = (serve(&assembly, path, "before"), serve(&assembly, path, "copy"));
        let (mut before, mut copied) = (connect(&before.socket), connect(&copy.socket));
        assert_eq!((read(&mut root, 8), read(&mut before, 8), read(&mut copied, 8)), (2, 1, 1));
        assert_eq!(write(&mut copied, 800, 3), Status::Ok);
        assert_ne!(write(&mut before, 800, 4), Status::Ok);
        assert_eq!(
            (read(&mut root, 800), read(&mut before, 800), read(&mut copied, 800)),
            (1, 1, 3)
        );
        flush(&mut copied);

        check_reports(&assembly, &pool);

        // A served volume is not deleted.
        let error = pool.delete_volume("copy").unwrap_err();
        assert_eq!(error.kind, ErrorKind::Conflict, "{error}");
        drop((before, copied));
        assembly.remove_device("vf-copy").unwrap();
        pool.delete_volume("copy").unwrap();
        assembly.remove_device("vf-before").unwrap();
        pool.delete_volume("before").unwrap();
        assert_eq!(names(&pool), ["root"]);
        assert_eq!((read(&mut root, 8), read(&mut root, 800)), (2, 1));
        assert!(pool.check().unwrap().clean);
        assert_eq!(sidecore_block::dropped_tags(), 0);
    }
}

#[test]
fn a_restart_keeps_volumes_and_a_running_daemon_claims_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let spec = spec(path, On::File);
    {
        let assembly = Assembly::start(&spec).unwrap();
        let pool = pool(&assembly);
        let mut root = connect(&spec.devices[0].socket);
        for page in 0..64 {
            assert_eq!(write(&mut root, page * 16, page as u8 + 1), Status::Ok);
        }
        pool.snapshot_volume("root", "snap").unwrap();
        assert_eq!(write(&mut root, 0, 99), Status::Ok);
        pool.set_quota("root", Some(4 << 20)).unwrap();

        // A second daemon, a check and a format find the file in use.
        let second = Spec { devices: Vec::new(), ..spec.clone() };
        let Err(error) = Assembly::start(&second) else { panic!("two daemons on one file") };
        assert!(error.to_string().contains("in use"), "{error}");
        let error = offline::check(&image(path)).unwrap_err();
        assert!(error.to_string().contains("in use"), "{error}");
        let error =
            offline::format(&image(path), &FormatSpec::default(), GiveUp::Contents).unwrap_err();
        assert!(error.to_string().contains("in use"), "{error}");
        // Without a flush by the guest: the drain makes completed writes durable.
    }
    let report = offline::check(&image(path)).unwrap();
    assert!(report.clean, "{report:?}");
    assert_eq!(report.volumes, 2);

    let assembly = Assembly::start(&spec).unwrap();
    let root = pool(&assembly).volume("root").unwrap();
    assert_eq!((root.size_bytes, root.quota_bytes), (VOLUME_BYTES, Some(4 << 20)));
    let snap = serve(&assembly, path, "snap");
    let (mut root, mut snap) = (connect(&spec.devices[0].socket), connect(&snap.socket));
    assert_eq!((read(&mut root, 0), read(&mut snap, 0)), (99, 1));
    for page in 1..64 {
        assert_eq!(
            (read(&mut root, page * 16), read(&mut snap, page * 16)),
            (page as u8 + 1, page as u8 + 1)
        );
    }
    assert_eq!(pool(&assembly).report().label, "test");
}

#[test]
fn the_contents_of_a_store_are_not_formatted_away() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let mut spec = spec(path, On::File);
    spec.controllers[0].format = None;
    let message = |spec: &Spec| match Assembly::start(spec) {
        Ok(_) => panic!("started"),
        Err(error) => error.to_string(),
    };
    let said = message(&spec);
    assert!(said.starts_with("controller \"pool\": the disk is not formatted"), "{said}");
    assert!(
        said.contains("`sidecore controller format PATH`") && said.contains("`format = \"blank\"`"),
        "{said}"
    );

    // An ext4 superblock's magic number, at its place.
    let mut bytes = vec![0; 4096];
    bytes[1024 + 56..1024 + 58].copy_from_slice(&[0x53, 0xef]);
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(image(path)).unwrap(),
        &bytes,
        0,
    )
    .unwrap();
    spec.controllers[0].format = Some(FormatSpec::default());
    let said = message(&spec);
    assert!(said.contains("ext") && said.contains("--force"), "{said}");
    let error = offline::format(&image(path), &FormatSpec::default(), GiveUp::Nothing).unwrap_err();
    assert!(error.to_string().contains("--force"), "{error}");
    let error = offline::check(&image(path)).unwrap_err();
    assert!(error.to_string().contains("not formatted"), "{error}");

    offline::format(
        &image(path),
        &FormatSpec { block_bytes: 4096, ..FormatSpec::default() },
        GiveUp::Contents,
    )
    .unwrap();
    spec.controllers[0].format = None;
    let assembly = Assembly::start(&spec).unwrap();
    assert_eq!(pool(&assembly).report().block_bytes, 4096);
}

#[test]
fn refusals_have_a_kind_and_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let assembly = Assembly::start(&spec(path, On::Ram)).unwrap();
    let pool = pool(&assembly);
    for (result, kind) in [
        (pool.create_volume("root", 4096, None), ErrorKind::Conflict),
        (pool.create_volume("a/b", 4096, None), ErrorKind::Invalid),
        (pool.create_volume("", 4096, None), ErrorKind::Invalid),
        (pool.create_volume("x", 0, None), ErrorKind::Invalid),
        (pool.create_volume("x", 1000, None), ErrorKind::Invalid),
        (pool.create_volume("x", 1 << 60, None), ErrorKind::Invalid),
        (pool.volume("x"), ErrorKind::NotFound),
        (pool.snapshot_volume("x", "y"), ErrorKind::NotFound),
        (pool.clone_volume("root", "root"), ErrorKind::Conflict),
        (pool.rename_volume("root", ".x"), ErrorKind::Invalid),
        (pool.resize_volume("root", 4096), ErrorKind::Conflict),
    ] {
        assert_eq!(result.as_ref().map_err(|error| error.kind), Err(kind), "{result:?}");
    }
    let missing = DeviceSpec { store: "new".to_owned(), ..device(path, "new") };
    let kind = |volume: VolumeSpec| StoreSpec::new("new", StoreKind::Volume(volume));
    let refused = |store: StoreSpec| assembly.add_device(&missing, Some(&store)).unwrap_err();
    let error = refused(kind(VolumeSpec::new("pool", "x")));
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("sidecore volume create x SIZE"), "{error}");
    let error = refused(kind(VolumeSpec::new("lake", "root")));
    assert_eq!(error.to_string(), "store \"new\" names controller \"lake\", which does not exist");
    let error = refused(kind(VolumeSpec { weight: 0, ..VolumeSpec::new("pool", "root") }));
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let error = refused(kind(VolumeSpec::new("pool", "root")));
    assert!(matches!(error, AssemblyError::SecondWriter { .. }), "{error}");
    let pf = StoreKind::PhysicalFunction { controller: "pool".to_owned() };
    let error = refused(StoreSpec::new("new", pf));
    assert!(error.to_string().contains("`physical_function = false`"), "{error}");
    assert_eq!(pool.report().functions.len(), 1);
    assert_eq!(names(&pool), ["root"]);
    // After the drain the controller still answers, and changes nothing.
    assembly.drain();
    assert_eq!(pool.report().functions.len(), 0);
    assert_eq!(pool.create_volume("late", 4096, None).unwrap_err().kind, ErrorKind::Ending);
}

#[test]
fn a_volume_grows_is_renamed_and_mapped_as_it_was_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let spec = spec(path, On::Ram);
    let assembly = Assembly::start(&spec).unwrap();
    let pool = pool(&assembly);
    let mut root = connect(&spec.devices[0].socket);
    for sector in [0, 8, 4096, 8192] {
        assert_eq!(write(&mut root, sector, 5), Status::Ok);
    }
    let all = pool.extents("root", 0, 1000).unwrap();
    assert_eq!((all.block_bytes, all.next), (1024, None));
    let mapped: u64 = all.extents.iter().map(|extent| extent.count).sum();
    assert_eq!(mapped, 16, "{all:?}");
    // The same extents in small portions.
    let (mut pieces, mut next) = (Vec::new(), Some(0));
    while let Some(from) = next {
        let answer = pool.extents("root", from, 1).unwrap();
        pieces.extend(answer.extents);
        next = answer.next;
    }
    assert_eq!(pieces, all.extents);

    // Equal blocks become shared; other blocks are left alone.
    let (one, two) = (
        BlocksOf { volume: "root", first: 0, count: 4 },
        BlocksOf { volume: "root", first: 2048, count: 4 },
    );
    pool.share(one, two).unwrap();
    assert!(pool.extents("root", 0, 1000).unwrap().extents.iter().any(|extent| extent.shared));
    let hole = BlocksOf { volume: "root", first: 100, count: 4 };
    assert_eq!(pool.share(one, hole).unwrap_err().kind, ErrorKind::Conflict);
    assert_eq!(write(&mut root, 4096, 6), Status::Ok);
    assert_eq!((read(&mut root, 0), read(&mut root, 4096)), (5, 6));

    pool.prune(None).unwrap();
    pool.flush_btlb().unwrap();
    assert_eq!((read(&mut root, 0), read(&mut root, 8192)), (5, 5));
    assert!(pool.report().functions[0].prune_misses > 0);

    pool.rename_volume("root", "trunk").unwrap();
    assert_eq!(read(&mut root, 8), 5);
    drop(root);
    assert_eq!(pool.resize_volume("trunk", 2 * VOLUME_BYTES).unwrap().size_bytes, 2 * VOLUME_BYTES);
    assembly.remove_device("root").unwrap();
    let mut trunk = connect(&serve(&assembly, path, "trunk").socket);
    assert_eq!(trunk.config().capacity_sectors, 2 * VOLUME_BYTES / 512);
    assert_eq!(write(&mut trunk, VOLUME_BYTES / 512 + 8, 7), Status::Ok);
    assert_eq!((read(&mut trunk, VOLUME_BYTES / 512 + 8), read(&mut trunk, 8)), (7, 5));
}

#[test]
fn a_running_virtio_guest_is_notified_of_its_volumes_new_size() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), On::Ram);
    let assembly = Assembly::start(&spec).unwrap();
    let mut client = connect(&spec.devices[0].socket);
    let behind = VOLUME_BYTES / 512 + 8;
    let mut watch = client.watch_config().unwrap();

    pool(&assembly).resize_volume("root", 2 * VOLUME_BYTES).unwrap();
    watch.wait(common::PATIENCE).unwrap();
    assert_eq!(client.read_config().unwrap().capacity_sectors, 2 * VOLUME_BYTES / 512);
    assert_eq!(write(&mut client, behind, 7), Status::Ok);
    assert_eq!(read(&mut client, behind), 7);

    // A change without a channel to the VMM is announced when the channel is there.
    pool(&assembly).resize_volume("root", 3 * VOLUME_BYTES).unwrap();
    client.watch_config().unwrap().wait(common::PATIENCE).unwrap();
}

#[test]
fn without_a_write_cache_a_write_is_durable_when_it_completes() {
    for write_cache in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let mut spec = spec(directory.path(), On::Ram);
        spec.devices[0].front_end = FrontEndSpec::VirtioBlk(VirtioBlkSpec {
            write_cache,
            packed: true,
            ..VirtioBlkSpec::default()
        });
        let assembly = Assembly::start(&spec).unwrap();
        let mut client = connect(&spec.devices[0].socket);
        assert_eq!(client.config().write_back, write_cache);
        assert_eq!(write(&mut client, 8, 1), Status::Ok);
        // The first write to a block changes the volume's metadata, so its durability takes a
        // commit.
        let commits = pool(&assembly).report().commits;
        assert_eq!(write(&mut client, 800, 1), Status::Ok);
        // With a cache the time of the commit is unknown.
        assert!(write_cache || pool(&assembly).report().commits > commits);
    }
}

#[test]
fn a_quota_and_limits_hold_for_their_function_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let mut spec = spec(path, On::Ram);
    let limited = VolumeSpec {
        size_bytes: Some(VOLUME_BYTES),
        quota_bytes: Some(64 << 10),
        weight: 300,
        limits: LimitsSpec {
            read_iops: Some(LimitSpec { per_s: 100, burst: 1 }),
            ..LimitsSpec::default()
        },
        ..VolumeSpec::new("pool", "small")
    };
    spec.stores.push(StoreSpec::new("small", StoreKind::Volume(limited)));
    spec.devices.push(device(path, "small"));
    let assembly = Assembly::start(&spec).unwrap();
    let (mut root, mut small) =
        (connect(&spec.devices[0].socket), connect(&spec.devices[1].socket));
    let written = (0..64).take_while(|page| write(&mut small, page * 8, 1) == Status::Ok).count();
    assert_eq!(written, 16, "64 KiB in pages");
    assert_eq!(write(&mut root, 0, 2), Status::Ok);
    let begin = std::time::Instant::now();
    for _ in 0..20 {
        assert_eq!(read(&mut small, 0), 1);
    }
    assert!(begin.elapsed().as_millis() >= 150, "{:?}", begin.elapsed());
    let report = pool(&assembly).report();
    let function = report.functions.iter().find(|function| function.volume == "small").unwrap();
    assert_eq!((function.weight, function.read_iops, function.write_iops), (300, Some(100), None));
    assert!(function.throttled > 0);
}

#[test]
fn the_physical_function_shows_all_of_the_store() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let mut spec = spec(path, On::Ram);
    spec.controllers[0].physical_function = true;
    let pf = StoreKind::PhysicalFunction { controller: "pool".to_owned() };
    spec.stores.push(StoreSpec::new("pf", pf));
    spec.devices.push(DeviceSpec { read_only: true, ..device(path, "pf") });
    let assembly = Assembly::start(&spec).unwrap();
    let (mut root, pf) = (connect(&spec.devices[0].socket), connect(&spec.devices[1].socket));
    assert_eq!(pf.config().capacity_sectors, STORE_BYTES / 512);
    assert_eq!(write(&mut root, 0, 7), Status::Ok);
    let extent = pool(&assembly).extents("root", 0, 1).unwrap().extents[0];
    let mut pf = pf;
    assert_eq!(read(&mut pf, extent.physical * 2), 7);
}

/// The first pages of a snapshot are of one moment, and a clone of it is written without it.
fn check_copies(before: &mut BlkClient, copied: &mut BlkClient, count: u64) {
    let pages: Vec<u8> = (0..count).map(|page| read(before, page * 8)).collect();
    // The pages are of one moment: from some page on, one pass older.
    let passes = pages.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!(passes <= 1, "{pages:?}");
    for page in (0..count).step_by(3) {
        assert_eq!(write(copied, page * 8, 255), Status::Ok);
    }
    for page in 0..count {
        let own = if page % 3 == 0 { 255 } else { pages[page as usize] };
        assert_eq!(read(copied, page * 8), own, "page {page}");
        assert_eq!(read(before, page * 8), pages[page as usize], "page {page}");
    }
}

#[test]
fn copies_come_and_go_while_the_original_is_written() {
    const PAGES: u64 = 32;
    for on in [On::Ram, On::File] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let spec = spec(path, on);
        let assembly = Assembly::start(&spec).unwrap();
        let pool = pool(&assembly);
        let stop = AtomicBool::new(false);
        let mut root = connect(&spec.devices[0].socket);
        // The first pass is complete before the first copy.
        (0..PAGES).for_each(|page| assert_eq!(write(&mut root, page * 8, 1), Status::Ok));
        std::thread::scope(|scope| {
            // Writes one pass after the other, each with another byte, and reads each page back.
            let writer = scope.spawn(|| {
                for pass in (1..=250_u8).cycle() {
                    for page in 0..PAGES {
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                        assert_eq!(write(&mut root, page * 8, pass), Status::Ok);
                        assert_eq!(read(&mut root, page * 8), pass);
                    }
                }
            });
            let rounds = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for round in 0..12 {
                    pool.snapshot_volume("root", "snap").unwrap();
                    pool.clone_volume("snap", "copy").unwrap();
                    let (snap, copy) =
                        (serve(&assembly, path, "snap"), serve(&assembly, path, "copy"));
                    let (mut before, mut copied) = (connect(&snap.socket), connect(&copy.socket));
                    check_copies(&mut before, &mut copied, PAGES);
                    drop((before, copied));
                    for name in ["copy", "snap"] {
                        assembly.remove_device(&format!("vf-{name}")).unwrap();
                        pool.delete_volume(name).unwrap();
                    }
                    let report = pool.check().unwrap();
                    assert!(report.clean, "round {round}: {report:?}");
                }
            }));
            stop.store(true, Ordering::Relaxed);
            writer.join().unwrap();
            if let Err(panic) = rounds {
                std::panic::resume_unwind(panic);
            }
        });
        let volume = pool.volume("root").unwrap();
        assert_eq!(volume.allocated_bytes, PAGES * 4096);
        assembly.drain();
        if on == On::File {
            drop((assembly, pool));
            assert!(offline::check(&image(path)).unwrap().clean);
        }
        assert_eq!(sidecore_block::dropped_tags(), 0);
    }
}

#[test]
fn a_nearly_full_pool_says_so_and_clones_show_what_they_share() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let mut spec = spec(path, On::Ram);
    spec.controllers[0].warn_used_percent = 5;
    let assembly = Assembly::start(&spec).unwrap();
    let pool = pool(&assembly);
    let mut root = connect(&spec.devices[0].socket);
    assert_eq!(
        (pool.report().nearly_full_percent, pool.report().provisioned_bytes),
        (None, VOLUME_BYTES)
    );
    assert!(assembly.devices()[0].warnings.is_empty());
    for page in 0..1024 {
        assert_eq!(write(&mut root, page * 8, 1), Status::Ok);
    }
    flush(&mut root);
    let percent = pool.report().nearly_full_percent.unwrap();
    assert!((5..10).contains(&percent), "{percent}");
    assert!(assembly.devices()[0].warnings[0].contains("are in use"), "{:?}", assembly.devices());

    pool.clone_volume("root", "copy").unwrap();
    let report = pool.report();
    assert_eq!(report.provisioned_bytes, 2 * VOLUME_BYTES);
    let events = report.events.iter().filter(|event| event.what.contains("nearly full"));
    assert_eq!(events.count(), 1, "{:?}", report.events);
    let exclusive = |name: &str| pool.volume_with_usage(name).unwrap().exclusive_bytes.unwrap();
    assert_eq!((exclusive("root"), exclusive("copy")), (0, 0));
    let shared = |name: &str| pool.volume_with_usage(name).unwrap().shared_bytes.unwrap();
    assert_eq!((shared("root"), shared("copy")), (4 << 20, 4 << 20));
    assert_eq!(pool.check().unwrap().shared_data_blocks, 4 << 10);
    assert_eq!(write(&mut root, 0, 2), Status::Ok);
    flush(&mut root);
    assert_eq!((exclusive("root"), exclusive("copy")), (8192, 8192));
    // The written block is shared again, with the snapshot.
    pool.snapshot_volume("copy", "monday").unwrap();
    assert_eq!(
        (shared("root"), shared("copy"), shared("monday")),
        ((4 << 20) - 4096, 4 << 20, 4 << 20)
    );
    pool.delete_volume("monday").unwrap();
    let listed: Vec<_> =
        pool.volumes_with_usage().unwrap().iter().map(|volume| volume.exclusive_bytes).collect();
    assert_eq!(listed, [Some(8192), Some(8192)]);
}
