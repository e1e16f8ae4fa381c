//! A front end that sends any messages, in any order, with any descriptors: the session must not
//! panic, and must know which queues run.
//!
//! The input is a sequence of messages: request (1 byte), flags (1 byte: 1 need-reply, 2 reply),
//! number of file descriptors (1 byte), payload size (2 bytes, little-endian), payload.
#![no_main]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use libfuzzer_sys::fuzz_target;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use sidecore_ring::RingState;
use sidecore_vhost_user::{HEADER_BYTES, Header, Message, Request, Session};
use sidecore_virtio::{ConfigError, QueueLog, QueueResources, StartError, VirtioDevice};

const QUEUES: u16 = 3;
const CONFIG_BYTES: usize = 60;
const FILE_BYTES: u64 = 1 << 20;

/// A device that keeps the resources of its running queues.
#[derive(Default)]
struct Device {
    queues: Mutex<[Option<(QueueResources, RingState)>; QUEUES as usize]>,
    config_generation: AtomicU32,
}

impl Device {
    fn queues(&self) -> MutexGuard<'_, [Option<(QueueResources, RingState)>; QUEUES as usize]> {
        self.queues.lock().unwrap()
    }

    fn is_stopped(&self) -> bool {
        self.queues().iter().all(Option::is_none)
    }
}

impl VirtioDevice for Device {
    fn name(&self) -> &str {
        "fuzz"
    }

    fn queue_count(&self) -> u16 {
        QUEUES
    }

    fn features(&self) -> u64 {
        1 << 28 | 1 << 29 | 1 << 32 | 1 << 34
    }

    fn read_config(&self, offset_bytes: u32, data: &mut [u8]) -> Result<(), ConfigError> {
        let len_bytes = data.len() as u32;
        match [1; CONFIG_BYTES]
            .get(offset_bytes as usize..)
            .and_then(|config| config.get(..data.len()))
        {
            Some(config) => {
                data.copy_from_slice(config);
                Ok(())
            }
            None => Err(ConfigError::OutOfRange { offset_bytes, len_bytes }),
        }
    }

    fn config_generation(&self) -> u32 {
        // Every read returns another generation.
        self.config_generation.fetch_add(1, Ordering::Relaxed)
    }

    fn write_config(&self, offset_bytes: u32, _data: &[u8]) -> Result<(), ConfigError> {
        if offset_bytes == 32 { Ok(()) } else { Err(ConfigError::ReadOnly { offset_bytes }) }
    }

    fn start_queue(
        &self,
        index: u16,
        resources: QueueResources,
        state: RingState,
    ) -> Result<(), StartError> {
        let QueueResources { layout, memory, .. } = &resources;
        for area in [layout.descriptor_area, layout.driver_area, layout.device_area] {
            memory.window(area, 64, 4).map_err(|error| StartError::Memory { index, error })?;
        }
        let slot = &mut self.queues()[usize::from(index)];
        assert!(slot.is_none(), "started twice");
        *slot = Some((resources, state));
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Option<RingState> {
        let (_, state) =
            self.queues()[usize::from(index)].take().expect("stopped without being started");
        Some(RingState {
            next_avail: state.next_avail.wrapping_add(1),
            next_used: state.next_used.wrapping_add(1),
        })
    }

    fn set_call(&self, index: u16, call: Option<OwnedFd>) {
        self.queues()[usize::from(index)]
            .as_mut()
            .expect("a call for a queue that does not run")
            .0
            .call = call;
    }

    fn set_log(&self, index: u16, log: Option<QueueLog>) {
        let mut queues = self.queues();
        let (resources, _) =
            queues[usize::from(index)].as_mut().expect("a log for a queue that does not run");
        // A log that the session has accepted has a bit for each page of the memory.
        assert!(log.as_ref().is_none_or(|log| log.pages.covers(&resources.memory)));
        resources.log = log;
    }

    fn reset(&self) {
        assert!(self.is_stopped(), "reset with queues running");
    }

    fn broken(&self) -> Option<String> {
        None
    }
}

/// A descriptor for a request: a socket for `SetBackendReqFd`, else a file.
fn descriptor(request: u8) -> OwnedFd {
    if Request::from_code(request.into()) == Request::SetBackendReqFd {
        return UnixStream::pair().unwrap().0.into();
    }
    memfd()
}

fn memfd() -> OwnedFd {
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, FILE_BYTES).unwrap();
    file
}

/// The next message and the rest of the input. The message is `None` where a server would have
/// closed the connection.
fn next_message(input: &[u8]) -> Option<(Option<Message>, &[u8])> {
    let ([request, flags, fds, size @ ..], rest) = input.split_first_chunk::<5>()?;
    let size = usize::from(u16::from_le_bytes(*size)).min(rest.len());
    let (payload, rest) = rest.split_at(size);
    let words = [
        u32::from(*request),
        1 | u32::from(flags & 1) << 3 | u32::from(flags & 2) << 1,
        size as u32,
    ];
    let header: [u8; HEADER_BYTES] = words.map(u32::to_ne_bytes).as_flattened().try_into().unwrap();
    let fds = (0..fds % 10).map(|_| descriptor(*request)).collect();
    let message = Header::parse(&header).and_then(|header| Message::parse(header, payload, fds));
    Some((message.ok(), rest))
}

fuzz_target!(|input: &[u8]| {
    let device = Arc::new(Device::default());
    let mut session = Session::new(device.clone());
    let mut rest = input;
    while let Some((message, next)) = next_message(rest) {
        rest = next;
        let Some(message) = message else { continue };
        let (request, need_reply) = (message.request, message.flags.need_reply);
        if session.owes_config_change() {
            session.send_config_change();
        }
        // A session must also survive messages after the error that ends its connection.
        if let Ok(Some(reply)) = session.handle(message) {
            assert!(reply.flags.reply && reply.request == request && reply.fds.is_empty());
            assert!(
                need_reply || request.has_reply(),
                "a reply that the front end does not wait for"
            );
            let bytes = reply.to_bytes();
            let (header, payload) = bytes.split_first_chunk().unwrap();
            let read = Message::parse(Header::parse(header).unwrap(), payload, Vec::new()).unwrap();
            assert_eq!(read.body, reply.body);
        }
    }
    session.end();
    assert!(device.is_stopped(), "queues run after the end");
});
