//! VMMs whose eventfds are full and block writers: no thread of the daemon waits for them.

#[allow(dead_code, reason = "it uses a part")]
mod common;
#[path = "common/graph.rs"]
mod graph;
#[path = "common/host.rs"]
mod host;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::OFlags;
use sidecore_assembly::Assembly;
use sidecore_assembly::spec::{IdleMode, Sector};
use sidecore_driver::{
    BlkClient, ClientOptions, Notify, NvmeClient, NvmeOptions, NvmeStatus, Queue, Slot, vfio,
};

use common::{PATIENCE, device};
use graph::{queue, spec};
use host::{ADAPTIVE, PAGE, connect, connect_as, read, write};

/// A full eventfd that blocks writers. `drop` empties it, so that a thread which waits for it fails
/// the test instead of hanging.
struct Full(OwnedFd);

impl Full {
    fn new() -> Self {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let full = Self(event);
        full.fill();
        full
    }

    fn of(event: BorrowedFd<'_>) -> Self {
        Self(event.try_clone_to_owned().unwrap())
    }

    fn fill(&self) {
        rustix::fs::fcntl_setfl(&self.0, OFlags::NONBLOCK).unwrap();
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
        rustix::io::write(&self.0, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        rustix::fs::fcntl_setfl(&self.0, OFlags::empty()).unwrap();
    }

    /// Empties the eventfd; false if it was empty.
    fn empty(&self) -> bool {
        rustix::fs::fcntl_setfl(&self.0, OFlags::NONBLOCK).unwrap();
        let was = rustix::io::read(&self.0, &mut [0; 8]).is_ok();
        rustix::fs::fcntl_setfl(&self.0, OFlags::empty()).unwrap();
        was
    }

    /// Waits for a signal.
    fn wait(&self) {
        let timeout = Timespec::try_from(PATIENCE).unwrap();
        assert_eq!(
            poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&timeout)).unwrap(),
            1,
            "no signal"
        );
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        self.empty();
    }
}

fn interrupts() -> NvmeOptions {
    NvmeOptions { notify: Notify::Interrupt, ..NvmeOptions::default() }
}

fn submit_read<Q: Queue>(queue: &mut Q) -> Slot {
    let slot = queue.take_slot().unwrap();
    queue.submit_read(slot, Sector(0), PAGE as u32).unwrap();
    queue.publish().unwrap();
    slot
}

/// Reads from a queue whose interrupt is full, while the neighbour is served.
fn read_beside<Q: Queue>(silenced: &mut Q, neighbour: &mut NvmeClient) {
    for byte in 0..100 {
        let slot = submit_read(silenced);
        let mut completions = Vec::new();
        while completions.is_empty() {
            assert_eq!(write(queue(neighbour), 8, byte), NvmeStatus::OK);
            silenced.poll_completions(&mut completions).unwrap();
        }
        silenced.release_slot(slot);
    }
}

#[test]
fn a_full_interrupt_of_an_io_queue_holds_up_no_neighbour() {
    for idle in [IdleMode::Poll, ADAPTIVE] {
        let directory = tempfile::tempdir().unwrap();
        let spec = spec(directory.path(), idle, &["mem", "one"]);
        let assembly = Assembly::start(&spec).unwrap();
        let mut client = connect_as(&spec.devices[0].socket, &interrupts());
        let mut neighbour = connect(&spec.devices[1].socket);
        let full = Full::new();
        client.transport().set_vectors(vfio::PCI_MSIX_IRQ_INDEX, 1, &[full.0.as_fd()]).unwrap();
        full.fill();
        let silenced = queue(&mut client);
        read_beside(silenced, &mut neighbour);
        assert_eq!(read(queue(&mut neighbour), 8), 99);
        // A VMM that empties its eventfd is signalled as before.
        for _ in 0..3 {
            assert!(full.empty());
            let slot = submit_read(silenced);
            full.wait();
            while silenced.poll_completions(&mut Vec::new()).unwrap() == 0 {
                std::thread::yield_now();
            }
            silenced.release_slot(slot);
        }
        drop(client);
        assembly.drain();
    }
}

#[test]
fn a_full_interrupt_of_an_admin_queue_holds_up_no_other_socket() {
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), ADAPTIVE, &["mem", "one"]);
    let assembly = Assembly::start(&spec).unwrap();
    let mut client = connect_as(&spec.devices[0].socket, &interrupts());
    let full = Full::new();
    client.transport().set_vectors(vfio::PCI_MSIX_IRQ_INDEX, 0, &[full.0.as_fd()]).unwrap();
    full.fill();
    for _ in 0..10 {
        client.read_namespace().unwrap();
        let mut neighbour = connect(&spec.devices[1].socket);
        assert_eq!(write(queue(&mut neighbour), 8, 1), NvmeStatus::OK);
    }
    assert!(full.empty());
    client.read_namespace().unwrap();
    full.wait();
    drop(client);
    assembly.drain();
}

#[test]
fn a_full_interrupt_that_its_vmm_triggers_holds_up_no_other_socket() {
    let signal = |client: &NvmeClient| {
        let flags = vfio::IRQ_SET_DATA_NONE | vfio::IRQ_SET_ACTION_TRIGGER;
        client.transport().set_irqs(flags, vfio::PCI_MSIX_IRQ_INDEX, 3..4, &[], &[]).unwrap();
    };
    let directory = tempfile::tempdir().unwrap();
    let spec = spec(directory.path(), ADAPTIVE, &["mem", "one"]);
    let assembly = Assembly::start(&spec).unwrap();
    let client = connect_as(&spec.devices[0].socket, &interrupts());
    let full = Full::new();
    client.transport().set_vectors(vfio::PCI_MSIX_IRQ_INDEX, 3, &[full.0.as_fd()]).unwrap();
    full.fill();
    for _ in 0..10 {
        signal(&client);
        let mut neighbour = connect(&spec.devices[1].socket);
        assert_eq!(write(queue(&mut neighbour), 8, 1), NvmeStatus::OK);
    }
    assert!(full.empty());
    signal(&client);
    full.wait();
    drop(client);
    assembly.drain();
}

#[test]
fn a_full_call_of_a_virtqueue_holds_up_no_neighbour() {
    let directory = tempfile::tempdir().unwrap();
    let mut spec = spec(directory.path(), ADAPTIVE, &["mem", "one"]);
    spec.devices[0] = device(directory.path(), "mem");
    let assembly = Assembly::start(&spec).unwrap();
    let usual = ClientOptions::default();
    let options =
        ClientOptions { huge_pages: false, notify: Notify::Interrupt, event_idx: false, ..usual };
    let mut client = BlkClient::connect(&spec.devices[0].socket, &options).unwrap();
    let mut neighbour = connect(&spec.devices[1].socket);
    let silenced = client.queue(0).unwrap();
    let full = Full::of(silenced.call());
    full.fill();
    // An interrupt for each completion (VIRTQ_AVAIL_F_NO_INTERRUPT is not set).
    silenced.raw_ring().set_available_flags(0);
    read_beside(silenced, &mut neighbour);
    assert!(full.empty());
    submit_read(silenced);
    full.wait();
    // The queue signals once more when it starts again.
    full.fill();
    client.share_memory_again().unwrap();
    assert_eq!(write(queue(&mut neighbour), 8, 1), NvmeStatus::OK);
    drop(client);
    assembly.drain();
}
