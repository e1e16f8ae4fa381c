//! A front end that sends half a message costs no CPU time. A process of its own, because the test
//! measures the CPU time of the whole process.

use std::io::{Read, Write};
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use sidecore_ring::RingState;
use sidecore_vhost_user::{Access, Body, Message, Request, Service, VirtioEndpoint};
use sidecore_virtio::{ConfigError, QueueLog, QueueResources, StartError, VirtioDevice};

/// A device without queues.
struct Idle;

impl VirtioDevice for Idle {
    fn name(&self) -> &str {
        "idle"
    }

    fn queue_count(&self) -> u16 {
        0
    }

    fn features(&self) -> u64 {
        1 << 32
    }

    fn read_config(&self, offset_bytes: u32, data: &mut [u8]) -> Result<(), ConfigError> {
        Err(ConfigError::OutOfRange { offset_bytes, len_bytes: data.len() as u32 })
    }

    fn config_generation(&self) -> u32 {
        0
    }

    fn write_config(&self, offset_bytes: u32, _: &[u8]) -> Result<(), ConfigError> {
        Err(ConfigError::ReadOnly { offset_bytes })
    }

    fn start_queue(&self, index: u16, _: QueueResources, _: RingState) -> Result<(), StartError> {
        Err(StartError::NoSuchQueue { index, queue_count: 0 })
    }

    fn stop_queue(&self, _: u16) -> Option<RingState> {
        None
    }

    fn set_call(&self, _: u16, _: Option<OwnedFd>) {}

    fn set_log(&self, _: u16, _: Option<QueueLog>) {}

    fn reset(&self) {}

    fn broken(&self) -> Option<String> {
        None
    }
}

/// The CPU time of this process's workers.
fn cpu_time() -> Duration {
    let mut ticks = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
        let Some((_, fields)) = stat.split_once("(peer-0) ") else { continue };
        let fields: Vec<_> = fields.split(' ').collect();
        ticks += fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    }
    Duration::from_millis(10 * ticks)
}

#[test]
fn a_stalled_connection_costs_no_time() {
    let directory = tempfile::tempdir().unwrap();
    let service = Service::start(NonZeroUsize::MIN).unwrap();
    let path = directory.path().join("socket");
    let socket =
        service.serve(&path, Access::default(), VirtioEndpoint(Arc::new(Idle)), None).unwrap();
    let mut front = UnixStream::connect(&path).unwrap();
    front
        .write_all(&Message::request(Request::GetFeatures, Body::Empty, Vec::new()).to_bytes())
        .unwrap();
    front.read_exact(&mut [0; 20]).unwrap();
    front
        .write_all(
            &Message::request(Request::SetFeatures, Body::U64(0), Vec::new()).to_bytes()[..14],
        )
        .unwrap();
    let before = cpu_time();
    std::thread::sleep(Duration::from_millis(50));
    let spent = cpu_time().saturating_sub(before);
    assert!(spent < Duration::from_millis(25), "{spent:?} of CPU in 50 ms of waiting");
    drop(socket);
    assert_eq!(front.read(&mut [0]).unwrap_or(0), 0);
}
