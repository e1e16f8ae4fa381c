//! A sparse pool on a full filesystem: a tmpfs of the test's own, which takes root.

mod common;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sidecore_assembly::Assembly;
use sidecore_assembly::offline;
use sidecore_assembly::spec::{
    ControllerSpec, DeviceSpec, FileOptions, FormatSpec, SidecoreSpec, Spec, StoreKind, StoreSpec,
    VolumeSpec,
};
use sidecore_driver::Status;
use sidecore_kit::guest::{connect, flush, read, write};
use sidecore_kit::mount::Mount;

use common::device;

const FILESYSTEM_BYTES: u64 = 16 << 20;
const STORE_BYTES: u64 = 256 << 20;
const VOLUME_BYTES: u64 = 64 << 20;

/// Takes all free space of a filesystem but `left` pages.
fn fill(filesystem: &Mount, left: usize) -> PathBuf {
    let ballast = filesystem.path().join("ballast");
    let mut file = std::fs::File::create(&ballast).unwrap();
    let page = [1; 4096];
    let mut pages = 0;
    while file.write_all(&page).is_ok() {
        pages += 1;
    }
    file.set_len((pages - left as u64) * 4096).unwrap();
    ballast
}

fn spec(pool: &Path, sockets: &Path) -> Spec {
    if !pool.exists() {
        std::fs::File::create(pool).unwrap().set_len(STORE_BYTES).unwrap();
    }
    let names = ["root", "other"];
    let volume = |name: &str| {
        let kind = StoreKind::Volume(VolumeSpec {
            size_bytes: Some(VOLUME_BYTES),
            ..VolumeSpec::new("pool", name)
        });
        StoreSpec::new(name, kind)
    };
    let below = StoreSpec::new("below", StoreKind::File(FileOptions::new(pool)));
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        stores: [below].into_iter().chain(names.map(volume)).collect(),
        controllers: vec![ControllerSpec {
            format: Some(FormatSpec::default()),
            commit_interval: Duration::from_millis(50),
            ..ControllerSpec::new("pool", "below")
        }],
        devices: names
            .map(|name| DeviceSpec { store: name.to_owned(), ..device(sockets, name) })
            .into(),
        ..Spec::default()
    }
}

#[test]
fn a_full_filesystem_stops_fresh_writes_alone_until_it_has_space() {
    let Some(small) = Mount::tmpfs(FILESYSTEM_BYTES) else { return };
    let sockets = tempfile::tempdir().unwrap();
    let pool = small.path().join("pool.img");
    let spec = spec(&pool, sockets.path());
    let assembly = Assembly::start(&spec).unwrap();
    let controller = assembly.controllers().swap_remove(0);
    let (mut root, mut other) =
        (connect(&spec.devices[0].socket), connect(&spec.devices[1].socket));
    for index in 0..256 {
        assert_eq!(write(&mut root, index * 8, 1), Status::Ok);
        assert_eq!(write(&mut other, index * 8, 2), Status::Ok);
    }
    flush(&mut root);
    flush(&mut other);

    let ballast = fill(&small, 0);
    // Writes to fresh blocks fail sooner or later: the pool still has some free pages.
    let mut refused = None;
    for index in 0..4096 {
        if write(&mut root, 8192 + index * 8, 3) != Status::Ok {
            refused = Some(index);
            break;
        }
    }
    let refused = refused.unwrap();
    // The metadata has space of its own: answered writes become durable, and volumes are created
    // and deleted.
    flush(&mut root);
    assert_eq!(write(&mut root, 8, 4), Status::Ok);
    flush(&mut root);
    controller.snapshot_volume("other", "s").unwrap();
    controller.delete_volume("s").unwrap();
    assert!(controller.report().reason.is_none(), "{:?}", controller.report());

    // Deleting returns space to the filesystem, and writes succeed again without a restart.
    drop(other);
    assembly.remove_device("other").unwrap();
    controller.delete_volume("other").unwrap();
    // The commit thread returns the blocks to the filesystem after an epoch.
    let mut rounds = 0;
    while write(&mut root, 8192 + refused * 8, 5) != Status::Ok {
        rounds += 1;
        assert!(rounds < 1000, "{:?}", controller.report());
        controller.create_volume("tick", 4096, None).unwrap();
        controller.delete_volume("tick").unwrap();
    }
    flush(&mut root);
    assert_eq!((read(&mut root, 8), read(&mut root, 8192 + refused * 8)), (4, 5));
    std::fs::remove_file(&ballast).unwrap();
    for index in 0..128 {
        assert_eq!(write(&mut root, 65536 + index * 8, 6), Status::Ok);
    }
    flush(&mut root);
    drop((root, controller));
    drop(assembly);
    assert!(offline::check(&pool).unwrap().clean);
    let assembly = Assembly::start(&spec).unwrap();
    let mut root = connect(&spec.devices[0].socket);
    for index in 0..refused {
        assert_eq!(read(&mut root, 8192 + index * 8), 3, "block {index}");
    }
    assert_eq!(read(&mut root, 65536), 6);
    drop(assembly);
}
