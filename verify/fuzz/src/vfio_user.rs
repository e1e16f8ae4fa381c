//! A client that sends any messages, in any order, with any descriptors, while the function answers
//! at once or late. The session must not panic, not answer before the function is done, not ask a
//! function for two things at once, and not leave state of a client behind.
//!
//! The input is a sequence of steps. A step below 0xf0 is a message: command (1 byte), flags (1
//! byte: 1 no-reply, 2 reply), descriptors (1 byte: number and kind), payload size (2 bytes,
//! little-endian), payload. The other steps are: 0xf0 no action, 0xf1 the function answers late,
//! 0xf2 the function answers at once, 0xf3 another client.
#![no_main]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread;

use libfuzzer_sys::fuzz_target;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use sidecore_memory::GuestMemory;
use sidecore_nvme::{AccessError, BarInfo, Done, Interrupts, MappableArea, PciFunction, Region};
use sidecore_vfio_user::{
    Command, HEADER_BYTES, Header, MAX_FDS, MAX_TRANSFER_BYTES, Message, Session,
};

const FILE_BYTES: u64 = 1 << 20;
const BAR_BYTES: u64 = 1 << 16;
const CONFIG_BYTES: u64 = 4096;
const VECTORS: u16 = 5;

#[derive(Default)]
struct State {
    memory: Option<GuestMemory>,
    vectors: [bool; VECTORS as usize],
    outstanding: bool,
    resets: usize,
}

/// Files that all inputs share: making files is most of the work of a message.
struct Files {
    memory: OwnedFd,
    event: OwnedFd,
}

struct Function {
    files: Files,
    holds: AtomicBool,
    /// The thread that completes operations late.
    later: Sender<Done>,
    state: Mutex<State>,
    this: Weak<Self>,
}

impl Function {
    fn new() -> Arc<Self> {
        let memory = memfd_create("fuzz", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, FILE_BYTES).unwrap();
        let files = Files { memory, event: eventfd(0, EventfdFlags::CLOEXEC).unwrap() };
        let (holds, state) = (AtomicBool::new(false), Mutex::default());
        let (later, held) = channel();
        thread::spawn(move || held.iter().for_each(Done::call));
        Arc::new_cyclic(|this| Self { files, holds, later, state, this: this.clone() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn later(&self, done: Done) {
        let mut state = self.state();
        assert!(!state.outstanding, "two things at once");
        state.outstanding = true;
        let this = self.this.clone();
        let done = Done::new(move || {
            if let Some(this) = this.upgrade() {
                this.state().outstanding = false;
            }
            done.call();
        });
        drop(state);
        if self.holds.load(Ordering::Relaxed) {
            self.later.send(done).unwrap();
        } else {
            done.call();
        }
    }

    /// Whether the function is in the state in which the next client must find it.
    fn is_free(&self) -> bool {
        let state = self.state();
        let empty = state.memory.as_ref().is_none_or(|memory| memory.region_count() == 0);
        empty && !state.vectors.contains(&true) && !state.outstanding
    }

    fn fds(&self, what: u8) -> Vec<OwnedFd> {
        let fd: BorrowedFd<'_> =
            if what & 0x80 == 0 { self.files.memory.as_fd() } else { self.files.event.as_fd() };
        (0..usize::from(what & 0x1f).min(MAX_FDS))
            .map(|_| fd.try_clone_to_owned().unwrap())
            .collect()
    }
}

fn check(region: Region, offset_bytes: u64, len: usize) -> Result<(), AccessError> {
    assert!((1..=MAX_TRANSFER_BYTES).contains(&len));
    let room = match region {
        Region::Bar(0) => BAR_BYTES,
        Region::Config => CONFIG_BYTES,
        Region::Bar(bar) => {
            assert!(bar < 6);
            0
        }
    };
    let len_bytes = len as u64;
    // The session must reject an access that wraps.
    if offset_bytes + len_bytes > room {
        return Err(AccessError::OutOfRange { region, offset_bytes, len_bytes });
    }
    Ok(())
}

impl PciFunction for Function {
    fn name(&self) -> &str {
        "fuzz"
    }

    fn config_bytes(&self) -> u64 {
        CONFIG_BYTES
    }

    fn bar(&self, index: u8) -> Option<BarInfo> {
        let area =
            MappableArea { offset_bytes: 0x2000, len_bytes: 0x4000, file_offset_bytes: 0x2000 };
        (index == 0).then_some(BarInfo { len_bytes: BAR_BYTES, mappable: Some(area) })
    }

    fn area_file(&self, index: u8) -> io::Result<OwnedFd> {
        assert_eq!(index, 0);
        self.files.memory.try_clone()
    }

    fn connect(&self) -> io::Result<()> {
        assert!(self.is_free());
        Ok(())
    }

    fn interrupts(&self) -> Interrupts {
        Interrupts::MsiX
    }

    fn vectors(&self) -> u16 {
        VECTORS
    }

    fn read(&self, region: Region, offset_bytes: u64, data: &mut [u8]) -> Result<(), AccessError> {
        check(region, offset_bytes, data.len())?;
        data.fill(0x5a);
        Ok(())
    }

    fn write(&self, region: Region, offset_bytes: u64, data: &[u8]) -> Result<(), AccessError> {
        check(region, offset_bytes, data.len())
    }

    fn signal(&self, vector: u16) -> Result<(), AccessError> {
        assert!(vector < VECTORS);
        Ok(())
    }

    fn set_vector(&self, vector: u16, event: Option<OwnedFd>) -> Result<(), AccessError> {
        if let Some(event) = &event {
            // A real function checks this more thoroughly: a file has a size.
            if rustix::fs::fstat(event).unwrap().st_size != 0 {
                return Err(AccessError::NotAnEvent { vector: vector.into() });
            }
            assert!(event.as_raw_fd() >= 0);
        }
        self.state().vectors[usize::from(vector)] = event.is_some();
        Ok(())
    }

    fn set_memory(&self, memory: GuestMemory, done: Done) {
        self.state().memory = Some(memory);
        self.later(done);
    }

    fn reset(&self, done: Done) {
        self.state().resets += 1;
        self.later(done);
    }
}

/// Checks a reply before it is sent.
fn check_reply(message: &Message, id: u16, command: Command) {
    assert!(message.flags.reply && !message.flags.no_reply);
    assert_eq!((message.id, message.command), (id, command));
    assert_eq!(
        message.flags.error,
        message.errno != 0,
        "an error without an errno is a success to QEMU"
    );
    assert!(message.fds.len() <= 1);
    let mut bytes = Vec::new();
    message.write(&mut bytes);
    let (header, payload) = bytes.split_first_chunk().unwrap();
    let read = Message::parse(Header::parse(header).unwrap(), payload, Vec::new());
    assert_eq!(read.body, message.body);
}

/// A client's session.
struct Client(Session);

impl Client {
    fn new(function: &Arc<Function>) -> Self {
        assert!(function.is_free());
        Self(Session::new(function.clone()))
    }

    fn handle(&mut self, message: Message, function: &Function) {
        let (id, command, no_reply) = (message.id, message.command, message.flags.no_reply);
        match self.0.handle(message) {
            // A session must also survive messages after the error that ends its connection.
            Err(_) => {}
            Ok(Some(reply)) => {
                assert!(!no_reply, "a reply that the client does not wait for");
                check_reply(&reply, id, command);
            }
            Ok(None) => assert!(no_reply),
        }
        assert!(!function.state().outstanding, "answered before it was done");
    }

    fn end(mut self, function: &Function) {
        self.0.end();
        assert!(function.is_free(), "state of the client is left");
    }
}

/// The next message and the rest of the input. The message is `None` where a server would have
/// closed the connection.
fn next_message<'a>(input: &'a [u8], function: &Function) -> Option<(Option<Message>, &'a [u8])> {
    let ([command, flags, fds, size @ ..], rest) = input.split_first_chunk::<5>()?;
    let size = usize::from(u16::from_le_bytes(*size)).min(rest.len());
    let (payload, rest) = rest.split_at(size);
    let flags = u32::from(flags & 1) << 4 | u32::from(flags & 2) >> 1;
    let first = u32::from_ne_bytes([7, 0, *command, 0]);
    let words = [first, (HEADER_BYTES + size) as u32, flags, 0];
    let header: [u8; HEADER_BYTES] = words.map(u32::to_ne_bytes).as_flattened().try_into().unwrap();
    let message =
        Header::parse(&header).map(|header| Message::parse(header, payload, function.fds(*fds)));
    Some((message.ok(), rest))
}

fuzz_target!(|input: &[u8]| {
    thread_local! {
        static FUNCTION: Arc<Function> = Function::new();
    }
    let function = FUNCTION.with(Arc::clone);
    function.holds.store(false, Ordering::Relaxed);
    let mut client = Client::new(&function);
    let mut rest = input;
    while let Some((step, after)) = rest.split_first() {
        match step {
            0xf0 => {}
            0xf1 => function.holds.store(true, Ordering::Relaxed),
            0xf2 => function.holds.store(false, Ordering::Relaxed),
            0xf3 => {
                client.end(&function);
                client = Client::new(&function);
            }
            _ => {
                let Some((message, next)) = next_message(rest, &function) else { break };
                if let Some(message) = message {
                    client.handle(message, &function);
                }
                rest = next;
                continue;
            }
        }
        rest = after;
    }
    client.end(&function);
});
