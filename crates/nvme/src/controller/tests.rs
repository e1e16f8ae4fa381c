//! Tests that control the time, or need a controller without a function around it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use sidecore_memory::{GuestAddress, GuestMemory, RegionSpec, UserAddress};

use super::*;
use crate::{CompletionQueueSetup, StartError, SubmissionQueueSetup};

/// Has no queues, and counts the calls of its inbox.
struct NoQueues;

impl QueueHost for NoQueues {
    fn start_completion_queue(&self, _setup: CompletionQueueSetup) -> Result<(), StartError> {
        Err(StartError::SidecoreGone)
    }

    fn start_submission_queue(&self, _setup: SubmissionQueueSetup) -> Result<(), StartError> {
        Err(StartError::SidecoreGone)
    }

    fn stop_submission_queue(&self, _id: u16, _done: Done) {}

    fn stop_completion_queue(&self, _id: u16, _done: Done) {}

    fn stop_all(&self, _done: Done) {}

    fn set_memory(&self, _memory: &GuestMemory, _done: Done) {}

    fn set_vector(&self, _vector: u16, _event: Option<OwnedFd>) {}

    fn is_pending(&self, _vector: u16) -> bool {
        false
    }

    fn set_namespace(&self, _namespace: Option<Arc<Namespace>>, _done: Done) {}

    fn set_coalescing(&self, _threshold: u16, _time_us: u32) {}

    fn set_vector_coalescing(&self, _vector: u16, _enabled: bool) {}

    fn set_doorbells(&self, _doorbells: Arc<Doorbells>) {}

    fn kick(&self, _queue: u16) {}

    fn set_shadow_doorbells(&self, _pages: Option<(GuestAddress, GuestAddress)>) {}
}

struct Fixture {
    controller: Controller,
    memory: GuestMemory,
    calls: Arc<AtomicUsize>,
    tail: u32,
}

const COMPLETIONS: u64 = 0x1000;

impl Fixture {
    /// A controller that is ready, with admin queues of 16 entries.
    fn new() -> Self {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 0x4000).unwrap();
        let memory = GuestMemory::map(vec![RegionSpec {
            guest_address: GuestAddress(0),
            user_address: UserAddress(0),
            len_bytes: 0x4000,
            file,
            file_offset_bytes: 0,
        }])
        .unwrap();
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let mut controller = Controller::new(Parts {
            identity: Identity {
                serial: "1".to_owned(),
                model: "1".to_owned(),
                subsystem_name: "nqn.2014-08.org.example:1".to_owned(),
                controller_id: 1,
            },
            limits: Limits { queue_pairs: 4, vectors: 4 },
            doorbells: Arc::new(Doorbells::new(4).unwrap()),
            doorbells_are_mapped: false,
            host: Arc::new(NoQueues),
            manager: None,
            statistics: Arc::new(crate::Activity::default),
            inbox: Inbox::new(Box::new(move || {
                counted.fetch_add(1, Ordering::Relaxed);
            })),
        });
        controller.set_memory(memory.clone(), Done::ignored());
        controller.write_register(0x24, 15 << 16 | 15);
        controller.write_register(0x30, COMPLETIONS as u32);
        controller.write_register(0x14, 1 | 6 << 16 | 4 << 20);
        assert!(controller.registers.status.ready);
        Self { controller, memory, calls, tail: 0 }
    }

    /// Carries out a command at this time; its status.
    fn command(&mut self, command: Command, now: Nanos) -> Status {
        let mut hint = RegionHint::default();
        let at = u64::from(self.tail);
        self.memory.write_slice(GuestAddress(at * 64), command.bytes(), &mut hint).unwrap();
        self.tail += 1;
        self.controller.write_admin_tail(self.tail);
        assert!(self.controller.run(now), "an interrupt is due");
        assert!(!self.controller.run(now), "but once");
        let entry: [u8; 16] =
            self.memory.read_array(GuestAddress(COMPLETIONS + at * 16), &mut hint).unwrap();
        assert_eq!(entry[14] & 1, 1);
        Status::from_field(u16::from_le_bytes([entry[14], entry[15]]))
    }
}

fn keep_alive_timeout(ms: u32) -> Command {
    Command::build(0x09, 1, 0).with_dword(10, 0x0F).with_dword(11, ms)
}

#[test]
fn a_keep_alive_timer_that_expires_is_fatal() {
    let mut fixture = Fixture::new();
    let at = Nanos::from_millis;
    assert_eq!(fixture.command(keep_alive_timeout(5000), at(100)), Status::SUCCESS);
    assert!(
        fixture.calls.load(Ordering::Relaxed) > 0,
        "the thread that runs the controller is woken for the timer"
    );
    assert_eq!(fixture.controller.deadline(), Some(at(5100)));
    assert_eq!(fixture.command(Command::build(0x18, 2, 0), at(4000)), Status::SUCCESS);
    fixture.controller.run(at(8999));
    assert!(!fixture.controller.registers.status.fatal);
    fixture.controller.run(at(9000));
    let status = fixture.controller.registers.status;
    assert!(status.fatal && status.ready);
    assert_eq!(fixture.controller.deadline(), None);
    assert_eq!(fixture.controller.errors.count(), 1);
}

#[test]
fn a_timer_that_is_turned_off_does_not_expire() {
    let mut fixture = Fixture::new();
    fixture.command(keep_alive_timeout(1000), Nanos::ZERO);
    fixture.command(keep_alive_timeout(0), Nanos::ZERO);
    fixture.controller.run(Nanos::MAX);
    assert!(!fixture.controller.registers.status.fatal);
}

#[test]
fn a_queue_that_cannot_be_started_is_an_internal_error() {
    let mut fixture = Fixture::new();
    let create = Command::build(0x05, 1, 0).with_dword(10, 7 << 16 | 1).with_dword(11, 1);
    let status = fixture.command(create, Nanos::ZERO);
    assert!(status.is_same_code(Status::INTERNAL_ERROR) && !status.is_do_not_retry());
    assert!(!fixture.controller.queues.has_completion_queue(1));
}

#[test]
fn a_write_cache_that_the_store_has_cannot_be_turned_off_by_default() {
    let mut fixture = Fixture::new();
    let mut geometry = sidecore_block::Geometry::new(1 << 20, 512);
    geometry.volatile_cache = true;
    let store = Arc::new(sidecore_block::NullStore::new(geometry));
    let namespace = Namespace { id: 1, store, block_bytes: 512, nguid: [1; 16], uuid: [2; 16] };
    fixture.controller.set_namespace(Some(Arc::new(namespace)), Done::ignored());
    let set = |value| Command::build(0x09, 1, 0).with_dword(10, 0x06).with_dword(11, value);
    assert_eq!(fixture.command(set(1), Nanos::ZERO), Status::SUCCESS);
    assert!(fixture.command(set(0), Nanos::ZERO).is_same_code(Status::FEATURE_NOT_CHANGEABLE));
}
