//! The control channel between an IOhost and a VMhost: daemons with a memory link between them.

mod common;

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use sidecore_control::report::DeviceState;
use sidecore_control::{Client, CreateVolume, NewDevice, RemoteKind};
use sidecore_driver::{
    BlkClient, ClientOptions, NvmeClient, NvmeCommand, NvmeOptions, Status, admin_opcode,
};
use sidecore_kit::guest::{flush, read, write};
use sidecore_kit::wait;

use common::Daemon;

const SOON: Duration = Duration::from_secs(60);
const DISK_BYTES: u64 = 16 << 20;

/// An IOhost with volumes of a pool in memory, each exported to the client `vmhost`.
fn iohost(shared: &Path, volumes: &[&str]) -> String {
    let mut config = format!(
        "control_socket = \"control.sock\"\nkey_directory = \"{0}/keys\"\n[[sidecore]]\nname = \
         \"io0\"\n\
         [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{0}/wire.sock\"\n\
         [[client]]\nname = \"vmhost\"\nlinks = [\"wire\"]\n\
         [[store]]\nname = \"below\"\ntype = \"ram\"\nsize = \"128MiB\"\n\
         [[controller]]\nname = \"pool\"\nstore = \"below\"\nformat = \"blank\"\n",
        shared.display()
    );
    for volume in volumes {
        config += &format!(
            "[[store]]\nname = \"{volume}\"\ntype = \"volume\"\ncontroller = \"pool\"\nvolume = \
             \"{volume}\"\nsize = {DISK_BYTES}\n\
             [[device]]\nname = \"{volume}\"\nfront_end = \"vrio\"\nclient = \"vmhost\"\nstore = \
             \"{volume}\"\n"
        );
    }
    config
}

/// A VMhost whose IOhost is `io1`.
fn vmhost(shared: &Path, keys: &str) -> String {
    format!(
        "control_socket = \"control.sock\"\n[[sidecore]]\nname = \"vm0\"\n\
         [[link]]\nname = \"wire\"\ntype = \"memory\"\nsocket = \"{}/wire.sock\"\n\
         [[iohost]]\nname = \"io1\"\nlink = \"wire\"\nclient = \"vmhost\"\n{keys}",
        shared.display()
    )
}

fn start(config: &str) -> Daemon {
    Daemon::start(tempfile::tempdir().unwrap(), config)
}

fn end(mut daemon: Daemon) {
    daemon.signal(Signal::TERM);
    let (status, complaint) = daemon.wait();
    assert!(status.success(), "{complaint}");
}

/// Asynchronous Event Configuration, and its bit for namespaces.
const EVENT_CONFIGURATION: u32 = 0x0B;
const NAMESPACE_NOTICES: u32 = 1 << 8;
/// The result of the event's completion: a notice, namespace attribute changed, log page 04h.
const NAMESPACE_CHANGED: u32 = 0x0004_0002;

#[test]
fn running_guests_see_that_their_disk_has_grown_at_the_iohost() {
    let shared = tempfile::tempdir().unwrap();
    let iohost = start(&iohost(shared.path(), &["one"]));
    let vmhost = start(&vmhost(
        shared.path(),
        "[[store]]\nname = \"one\"\ntype = \"remote\"\niohost = \"io1\"\n\
         [[device]]\nname = \"vd0\"\nstore = \"one\"\nsocket = \"vd0.sock\"\n\
         [[device]]\nname = \"pci\"\nfront_end = \"nvme\"\nstore = \"one\"\nread_only = \
         true\nsocket = \"pci.sock\"\nqueues = 1\n",
    ));
    let socket = |name: &str| vmhost.directory.path().join(name);
    let options = ClientOptions { timeout: SOON, ..ClientOptions::default() };
    let mut blk = BlkClient::connect(socket("vd0.sock"), &options).unwrap();
    let mut watch = blk.watch_config().unwrap();
    let nvme = NvmeOptions { timeout: SOON, ..NvmeOptions::default() };
    let mut pci = NvmeClient::connect(socket("pci.sock"), &nvme).unwrap();
    let set = NvmeCommand::new(admin_opcode::SET_FEATURES, 0).dword(10, EVENT_CONFIGURATION);
    assert!(pci.admin().run(set.dword(11, NAMESPACE_NOTICES)).unwrap().status.is_ok());
    let event = NvmeCommand::new(admin_opcode::ASYNC_EVENT_REQUEST, 0);
    let event = pci.admin().submit(event).unwrap();
    let beyond = DISK_BYTES / 512;
    assert_eq!(write(&mut blk, 0, 1), Status::Ok);

    let control = iohost.client();
    control.resize_volume("pool", "one", 2 * DISK_BYTES).unwrap();
    watch.wait(SOON).unwrap();
    assert_eq!(blk.read_config().unwrap().capacity_sectors, 2 * beyond);
    let completion = pci.admin().wait(event).unwrap();
    assert_eq!(completion.result, NAMESPACE_CHANGED);
    assert_eq!(pci.read_namespace().unwrap().len_bytes(), 2 * DISK_BYTES);
    assert_eq!(write(&mut blk, beyond, 2), Status::Ok);
    assert_eq!((read(&mut blk, 0), read(&mut blk, beyond)), (1, 2));
    let devices = vmhost.client().devices().unwrap();
    let is_running = |device: &DeviceState| *device == DeviceState::Running;
    assert!(devices.iter().all(|it| it.capacity_bytes == 2 * DISK_BYTES && is_running(&it.state)));

    // A volume that is served does not shrink.
    assert!(control.resize_volume("pool", "one", DISK_BYTES).is_err());
    control.resize_volume("pool", "one", 3 * DISK_BYTES).unwrap();
    watch.wait(SOON).unwrap();
    assert_eq!(blk.read_config().unwrap().capacity_sectors, 3 * beyond);
    assert_eq!(read(&mut blk, 0), 1);
    drop((blk, pci));
    end(vmhost);
    end(iohost);
}

/// A disk is removed while its IOhost does not answer, after a write that no flush covers.
#[test]
fn a_removal_that_waits_for_an_iohost_ends_and_delays_no_other_change() {
    let shared = tempfile::tempdir().unwrap();
    let io = start(&iohost(shared.path(), &["one"]));
    let mem = "[[store]]\nname = \"mem\"\ntype = \"ram\"\nsize = \"1MiB\"\n";
    let vm = start(&vmhost(shared.path(), mem));
    let control = vm.client();
    let socket = |name: &str| vm.directory.path().join(name);
    let disk = NewDevice::new("vd0", &socket("vd0.sock")).of_iohost("io1", "one");
    control.add_device(&disk).unwrap();
    let options = ClientOptions { timeout: SOON, ..ClientOptions::default() };
    let mut blk = BlkClient::connect(socket("vd0.sock"), &options).unwrap();
    assert_eq!(write(&mut blk, 0, 1), Status::Ok);
    drop(blk);
    io.signal(Signal::STOP);
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| control.remove_device("vd0").unwrap());
        wait::until("the device is no longer listed", SOON, || {
            control.devices().unwrap().iter().all(|device| device.name != "vd0")
        });
        let local = NewDevice::new("vd1", &socket("vd1.sock")).with("store", "mem");
        vm.client().add_device(&local).unwrap();
        removal.join().unwrap();
    });
    io.signal(Signal::CONT);
    // The IOhost is there again, and so is its device.
    control.add_device(&disk).unwrap();
    let mut blk = BlkClient::connect(socket("vd0.sock"), &options).unwrap();
    assert_eq!(read(&mut blk, 0), 1);
    assert_eq!(write(&mut blk, 0, 2), Status::Ok);
    drop(blk);
    end(vm);
    end(io);
}

/// Exports a new volume to the client.
fn export(iohost: &Client, volume: &str, name: &str) {
    let new =
        CreateVolume { name: volume.to_owned(), size_bytes: DISK_BYTES, ..CreateVolume::default() };
    iohost.create_volume("pool", &new).unwrap();
    let device = NewDevice::default().with("name", name).with("front_end", "vrio");
    iohost.add_device(&device.with("client", "vmhost").of_volume("pool", volume)).unwrap();
}

/// Devices of an IOhost appear as sockets by themselves, and go.
fn takes_connections(control: &Client, device: &str) -> bool {
    let devices = control.devices().unwrap();
    devices.iter().any(|it| it.name == device && it.state == DeviceState::Waiting)
}

#[test]
fn devices_that_fit_a_pattern_come_grow_and_go_with_those_of_the_iohost() {
    let shared = tempfile::tempdir().unwrap();
    let io = start(&iohost(shared.path(), &["db-1", "web"]));
    let vm = start(&vmhost(
        shared.path(),
        "[[serve]]\nname = \"databases\"\niohost = \"io1\"\npattern = \"db-*\"\nsocket = \
         \"{device}.sock\"\n",
    ));
    let (control, iohost) = (vm.client(), io.client());
    let socket = |name: &str| vm.directory.path().join(format!("{name}.sock"));
    let names = || {
        let devices = control.devices().unwrap().into_iter();
        devices.map(|device| device.name).collect::<Vec<_>>()
    };
    let serves = || control.remote().unwrap().serves;
    wait::until("the device is served", SOON, || takes_connections(&control, "db-1"));
    let options = ClientOptions { timeout: SOON, ..ClientOptions::default() };
    let mut blk = BlkClient::connect(socket("db-1"), &options).unwrap();
    let mut watch = blk.watch_config().unwrap();
    assert_eq!(write(&mut blk, 8, 3), Status::Ok);
    flush(&mut blk);
    iohost.resize_volume("pool", "db-1", 2 * DISK_BYTES).unwrap();
    watch.wait(SOON).unwrap();

    // More of them, one with a name that is none, and by another pattern those that are left.
    export(&iohost, "two", "db-2");
    export(&iohost, "three", "-x");
    let rest = json!({
        "name": "rest",
        "iohost": "io1",
        "front_end": "nvme",
        "socket": vm.directory.path().join("{device}.sock"),
    });
    control.add_part(RemoteKind::Serve, &rest).unwrap();
    wait::until("the others are served", SOON, || names().len() == 3);
    wait::until("each pattern names its devices", SOON, || {
        let shown = serves();
        shown[0].devices == ["db-1", "db-2"] && shown[1].devices == ["web"]
    });
    wait::until("the refusal", SOON, || {
        serves()[1].refused.iter().any(|it| it.device == "-x" && it.reason.contains("its name"))
    });
    let metrics = control.metrics(false).unwrap();
    let labels = "iohost=\"io1\",serve=\"rest\"";
    assert!(metrics.contains(&format!("sidecore_serve_refused_devices{{{labels}}} 1\n")));
    let nvme = NvmeOptions { timeout: SOON, ..NvmeOptions::default() };
    wait::until("the NVMe device is served", SOON, || takes_connections(&control, "web"));
    drop(NvmeClient::connect(socket("web"), &nvme).unwrap());

    // The device of a guest goes: it is listed until the guest is gone. The unused one goes.
    iohost.remove_device("db-1").unwrap();
    iohost.remove_device("db-2").unwrap();
    wait::until("the unused device is gone", SOON, || !names().contains(&"db-2".to_owned()));
    assert!(!socket("db-2").exists());
    wait::until("the other one waits", SOON, || serves()[0].leaving == ["db-1"]);
    let warnings = control.devices().unwrap()[0].warnings.join("");
    assert!(warnings.contains("which the IOhost does not have"), "{warnings}");
    drop(blk);
    wait::until("the device is gone", SOON, || names() == ["web"]);
    assert!(!socket("db-1").exists());
    let refused = control.remove_part(RemoteKind::Iohost, "io1").unwrap_err().to_string();
    assert!(refused.contains("serve \"databases\""), "{refused}");
    control.remove_part(RemoteKind::Serve, "rest").unwrap();
    wait::until("no device is left", SOON, || names().is_empty());
    control.remove_part(RemoteKind::Serve, "databases").unwrap();
    control.remove_part(RemoteKind::Iohost, "io1").unwrap();
    end(vm);
    end(io);
}
