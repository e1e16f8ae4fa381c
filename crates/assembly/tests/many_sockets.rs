//! A thousand devices are served by as many threads as a few devices. The test has a process of its
//! own because it counts all threads.

#[allow(dead_code, reason = "it uses a part")]
mod common;
#[allow(dead_code, reason = "it uses a part")]
#[path = "common/host.rs"]
mod host;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sidecore_assembly::Assembly;
use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::{DeviceSpec, SidecoreSpec, Spec, StoreKind, StoreSpec};
use sidecore_kit::wait;
use sidecore_vhost_user::{Body, HEADER_BYTES, Message, Request};

use common::{PATIENCE, device};
use host::{ADAPTIVE, function};

const DEVICES: usize = 1024;
/// One device of as many is an NVMe function.
const NVME: usize = 16;
/// The most threads of the pool: four, and one more for each call that takes long, as on a busy
/// machine.
const POOL: usize = 64;

fn spec(directory: &Path, count: usize) -> Spec {
    let device = |number: usize| {
        let name = format!("d{number}");
        let device = match number % NVME {
            0 => function(directory, &name, ADAPTIVE),
            _ => device(directory, &name),
        };
        DeviceSpec { store: "null".to_owned(), ..device }
    };
    let kind = StoreKind::Null { size_bytes: 1 << 20, block_bytes: 512 };
    Spec {
        sidecores: vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }],
        stores: vec![StoreSpec::new("null", kind)],
        controllers: Vec::new(),
        devices: (0..count).map(device).collect(),
        ..Spec::default()
    }
}

fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok())
        .collect()
}

/// The number of threads without those of the pool, which grows and shrinks with the work.
fn fixed_threads() -> usize {
    let threads = threads();
    let pool = threads.iter().filter(|name| name.trim() == "peer-job").count();
    assert!(pool <= POOL, "{threads:?}");
    threads.len() - pool
}

/// Connects to a device and waits for an answer: a function's version, or a disk's features, which
/// a thread of the pool sets.
fn connect(device: &DeviceSpec, is_function: bool) -> UnixStream {
    let mut stream = UnixStream::connect(&device.socket).unwrap();
    if is_function {
        use sidecore_vfio_user::{Body, Command, HEADER_BYTES, Message, Version};
        let version = Body::Version(Version { major: 0, minor: 1, data: Vec::new() });
        let mut bytes = Vec::new();
        Message::command(1, Command::Version, version, Vec::new()).write(&mut bytes);
        stream.write_all(&bytes).unwrap();
        stream.read_exact(&mut [0; HEADER_BYTES]).unwrap();
        return stream;
    }
    let ask = |request, body| Message::request(request, body, Vec::new()).to_bytes();
    stream.write_all(&ask(Request::SetFeatures, Body::U64(1 << 32))).unwrap();
    stream.write_all(&ask(Request::GetFeatures, Body::Empty)).unwrap();
    stream.read_exact(&mut [0; HEADER_BYTES + 8]).unwrap();
    stream
}

fn wait_until(assembly: &Assembly, state: DeviceState) {
    let is_so = || assembly.devices().iter().all(|device| device.state == state);
    wait::until(&format!("all devices are {state:?}"), 6 * PATIENCE, is_so);
}

#[test]
fn a_thousand_sockets_take_the_threads_of_a_few() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let few = Assembly::start(&spec(directory.path(), NVME + 1)).unwrap();
    let expected = fixed_threads();
    drop(few);

    let spec = spec(directory.path(), DEVICES);
    let assembly = Assembly::start(&spec).unwrap();
    assert_eq!(fixed_threads(), expected, "{:?}", threads());
    let clients: Vec<UnixStream> = spec
        .devices
        .iter()
        .enumerate()
        .map(|(number, device)| connect(device, number % NVME == 0))
        .collect();
    assert_eq!(fixed_threads(), expected, "{:?}", threads());
    wait_until(&assembly, DeviceState::Connected);
    drop(clients);
    wait_until(&assembly, DeviceState::Waiting);
    assert_eq!(fixed_threads(), expected, "{:?}", threads());
    // Each device accepts its next client.
    for number in [0, 1, DEVICES - 1] {
        connect(&spec.devices[number], number % NVME == 0);
    }
}
