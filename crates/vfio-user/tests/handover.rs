//! One service exports a client and another resumes it, at every byte of a message.

mod common;

use std::io::{Read, Write};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::*;
use sidecore_memory::{GuestAddress, GuestMemory, MemoryError};
use sidecore_nvme::{
    Activity, CompletionQueueSetup, Done, FunctionSetup, Identity, Interrupts, Namespace,
    NvmeFunction, PciFunction, QueueHost, QueuesState, Region, StartError, SubmissionQueueSetup,
};
use sidecore_reactor::EventFd;
use sidecore_ring::nvme::Doorbells;
use sidecore_vfio_user::{
    Access, Body, Command, Message, PciEndpoint, Service, Snapshot, SocketState, vfio,
};

/// Queues that are never started: their export is tested in the crates that have queues.
#[derive(Default)]
struct NoQueues {
    /// Whether vector 0 has an eventfd, and whether it had one when queues were resumed.
    signals: AtomicBool,
    signalled: AtomicBool,
}

impl QueueHost for NoQueues {
    fn start_completion_queue(&self, setup: CompletionQueueSetup) -> Result<(), StartError> {
        Err(StartError::Memory { id: setup.id, error: MemoryError::EmptyRegion })
    }

    fn start_submission_queue(&self, setup: SubmissionQueueSetup) -> Result<(), StartError> {
        Err(StartError::Memory { id: setup.id, error: MemoryError::EmptyRegion })
    }

    fn stop_submission_queue(&self, _: u16, _: Done) {}
    fn stop_completion_queue(&self, _: u16, _: Done) {}
    fn stop_all(&self, _: Done) {}

    fn hand_over(&self, reply: Box<dyn FnOnce(Option<QueuesState>) + Send>) {
        reply(Some(QueuesState::default()));
    }

    fn set_memory(&self, _: &GuestMemory, _: Done) {}
    fn set_vector(&self, vector: u16, event: Option<OwnedFd>) {
        if vector == 0 {
            self.signals.store(event.is_some(), Ordering::Relaxed);
        }
    }

    fn take_over(&self, _: &GuestMemory, _: &QueuesState) -> Result<(), StartError> {
        self.signalled.store(self.signals.load(Ordering::Relaxed), Ordering::Relaxed);
        Ok(())
    }

    fn is_pending(&self, _: u16) -> bool {
        false
    }

    fn set_namespace(&self, _: Option<Arc<Namespace>>, _: Done) {}
    fn set_coalescing(&self, _: u16, _: u32) {}
    fn set_vector_coalescing(&self, _: u16, _: bool) {}
    fn set_doorbells(&self, _: Arc<Doorbells>) {}
    fn kick(&self, _: u16) {}
    fn set_shadow_doorbells(&self, _: Option<(GuestAddress, GuestAddress)>) {}
}

fn function() -> Arc<NvmeFunction> {
    function_with(Interrupts::MsiX, Arc::default())
}

fn function_with(interrupts: Interrupts, host: Arc<NoQueues>) -> Arc<NvmeFunction> {
    NvmeFunction::new(FunctionSetup {
        name: "disk".to_owned(),
        identity: Identity {
            serial: "1".to_owned(),
            model: "test".to_owned(),
            subsystem_name: "nqn.2014-08.org.nvmexpress:uuid:0".to_owned(),
            controller_id: 0,
        },
        queue_pairs: 2,
        interrupts,
        signal: EventFd::peer_signal,
        doorbells: Arc::new(Doorbells::new(2).unwrap()),
        doorbells_are_mapped: true,
        host,
        statistics: Arc::new(Activity::default),
        manager: None,
        namespace: None,
        worker: None,
    })
}

/// A service in the role of a process, with one socket.
struct Process {
    service: Service,
    socket: sidecore_vfio_user::Socket,
}

impl Process {
    fn start(directory: &tempfile::TempDir, exported: Option<Snapshot>) -> Self {
        let service = Service::start(NonZeroUsize::MIN).unwrap();
        let path = directory.path().join("socket");
        let socket = service.serve(&path, Access::default(), PciEndpoint(function()), exported);
        Self { service, socket: socket.unwrap() }
    }

    /// Starts the successor, with the parts of the snapshot that a service manager would keep.
    fn succeed(self, directory: &tempfile::TempDir) -> Self {
        let Snapshot { state, fds } = self.socket.export().expect("there is a client");
        drop(self.service);
        assert!(!directory.path().join("socket").exists());
        let state: SocketState =
            serde_json::from_slice(&serde_json::to_vec(&state).unwrap()).unwrap();
        Self::start(directory, Some(Snapshot { state, fds }))
    }
}

#[test]
fn registers_maps_and_vectors_survive_a_handover() {
    let directory = tempfile::tempdir().unwrap();
    let process = Process::start(&directory, None);
    let mut client = Client::start(process.socket.path());
    let dma_map = |page: u64| (Command::DmaMap, Body::DmaMap(map(page * PAGE, PAGE)));
    for page in 0..3 {
        assert_eq!(client.ask(dma_map(page), vec![memfd(PAGE)]).errno, 0);
    }
    // A map without a file: no memory, but the client may unmap it all the same.
    assert_eq!(client.ask(dma_map(7), vec![]).errno, 0);
    let eventfd = vfio::IRQ_SET_DATA_EVENTFD | vfio::IRQ_SET_ACTION_TRIGGER;
    let interrupt = event();
    let set = (Command::DeviceSetIrqs, Body::IrqSet(irqs(eventfd, vfio::PCI_MSIX_IRQ_INDEX, 5, 1)));
    assert_eq!(client.ask(set, vec![interrupt.try_clone().unwrap()]).errno, 0);
    // AQA, and the command register in the configuration space.
    assert_eq!(client.ask(write(0, 0x24, &[7, 0, 3, 0]), vec![]).errno, 0);
    assert_eq!(client.ask(write(vfio::PCI_CONFIG_REGION_INDEX, 4, &[6, 4]), vec![]).errno, 0);

    let process = process.succeed(&directory).succeed(&directory);
    assert!(process.socket.is_connected());
    let read_back = |client: &mut Client, region, offset, count| match client
        .ask(read(region, offset, count), vec![])
        .body
    {
        Body::RegionAccess(access) => access.data.as_slice().to_vec(),
        other => panic!("{other:?}"),
    };
    assert_eq!(read_back(&mut client, 0, 0x24, 4), [7, 0, 3, 0]);
    assert_eq!(read_back(&mut client, vfio::PCI_CONFIG_REGION_INDEX, 4, 2), [6, 4]);
    let signal = vfio::IRQ_SET_DATA_NONE | vfio::IRQ_SET_ACTION_TRIGGER;
    let set = (Command::DeviceSetIrqs, Body::IrqSet(irqs(signal, vfio::PCI_MSIX_IRQ_INDEX, 5, 1)));
    assert_eq!(client.ask(set, vec![]).errno, 0);
    let mut count = [0; 8];
    rustix::io::read(&interrupt, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
    assert_ne!(client.ask(dma_map(1), vec![memfd(PAGE)]).errno, 0, "the range is mapped already");
    for page in [0, 1, 2, 7] {
        let unmapped =
            client.ask((Command::DmaUnmap, Body::DmaUnmap(unmap(page * PAGE, PAGE))), vec![]);
        assert_eq!(unmapped.errno, 0, "page {page}");
    }
}

#[test]
fn a_handover_may_cut_a_message_at_every_byte() {
    let directory = tempfile::tempdir().unwrap();
    let mut process = Process::start(&directory, None);
    let mut client = Client::start(process.socket.path());
    let mut bytes = Vec::new();
    Message::command(77, Command::DmaMap, Body::DmaMap(map(0, PAGE)), vec![]).write(&mut bytes);
    for cut in 0..bytes.len() {
        // The descriptor goes with the first byte.
        let (first, rest) = bytes.split_at(cut);
        if cut > 0 {
            let file = [memfd(PAGE)];
            let sent = sidecore_socket::send(
                &client.connection,
                first,
                &file,
                16,
                sidecore_socket::Blocking::Wait,
            );
            assert_eq!(sent.unwrap(), cut);
        }
        process = process.succeed(&directory);
        let file: Vec<_> = if cut == 0 { vec![memfd(PAGE)] } else { Vec::new() };
        sidecore_socket::send(&client.connection, rest, &file, 16, sidecore_socket::Blocking::Wait)
            .unwrap();
        let reply = client.answer();
        assert_eq!((reply.id, reply.errno), (77, 0), "cut after {cut} bytes");
        let unmapped = client.ask((Command::DmaUnmap, Body::DmaUnmap(unmap(0, PAGE))), vec![]);
        assert_eq!(unmapped.errno, 0, "the range was mapped");
    }
}

/// A client that does not read gets the rest of its reply from the next process.
#[test]
fn the_rest_of_a_half_sent_reply_is_sent() {
    const READS: u16 = 60;
    let directory = tempfile::tempdir().unwrap();
    let mut process = Process::start(&directory, None);
    let client = Client::start(process.socket.path());
    let mut stream = UnixStream::from(client.connection.as_fd().try_clone_to_owned().unwrap());
    let mut bytes = Vec::new();
    for id in 0..READS {
        let (command, body) = read(0, 0, 64 << 10);
        Message::command(id, command, body, vec![]).write(&mut bytes);
    }
    stream.set_nonblocking(false).unwrap();
    stream.write_all(&bytes).unwrap();
    process = process.succeed(&directory).succeed(&directory);
    for id in 0..READS {
        let mut header = [0; 16];
        stream.read_exact(&mut header).unwrap();
        assert_eq!(header[..2], id.to_ne_bytes());
        assert_eq!(header[4..8], (16 + 16 + (64_u32 << 10)).to_ne_bytes());
        let mut rest = vec![0; 16 + (64 << 10)];
        stream.read_exact(&mut rest).unwrap();
        if id % 10 == 0 {
            process = process.succeed(&directory);
        }
    }
    drop(process);
}

#[test]
fn without_a_client_there_is_nothing_to_export() {
    let directory = tempfile::tempdir().unwrap();
    let process = Process::start(&directory, None);
    assert!(process.socket.export().is_none());
    let process = Process::start(&directory, None);
    drop(Client::start(process.socket.path()));
    wait_until(|| !process.socket.is_connected());
    assert!(process.socket.export().is_none());
}

#[test]
fn a_client_with_a_command_in_progress_is_exported_after_its_reply() {
    let directory = tempfile::tempdir().unwrap();
    let service = Service::start(NonZeroUsize::MIN).unwrap();
    // This function refuses a hand-over: its client is lost, and the function is reset as usual.
    let function = Function::new();
    let socket = serve(&service, &directory, "socket", &function);
    let mut client = Client::start(socket.path());
    function.hold(true);
    client.post((Command::DmaMap, Body::DmaMap(map(0, PAGE))), vec![memfd(PAGE)]);
    wait_until(|| function.is_held());
    let exported = std::thread::spawn(move || socket.export().is_some());
    assert!(client.is_quiet());
    function.hold(false);
    function.release();
    assert_eq!(client.answer().errno, 0);
    assert!(client.is_hung_up());
    assert!(!exported.join().unwrap());
    assert_eq!(function.events().last(), Some(&Event::Memory(0, 0)));
}

/// A descriptor whose close may wait is part of no message, and is never handed over.
#[test]
fn a_client_that_has_sent_a_descriptor_whose_close_may_wait_is_not_exported() {
    let directory = tempfile::tempdir().unwrap();
    let process = Process::start(&directory, None);
    let client = Client::start(process.socket.path());
    let neighbour = process
        .service
        .serve(
            &directory.path().join("other"),
            Access::default(),
            PciEndpoint(Function::with_area("other", None)),
            None,
        )
        .unwrap();
    let mut neighbour = Client::start(neighbour.path());
    let (socket, end) = lingering();
    let half = sidecore_socket::send(
        &client.connection,
        &[0; 4],
        &[socket],
        16,
        sidecore_socket::Blocking::Wait,
    );
    assert_eq!(half.unwrap(), 4);
    // The same thread serves both: with the second reply it has read all earlier messages.
    for _ in 0..2 {
        neighbour.ask((Command::DeviceGetInfo, device_info()), vec![]);
    }
    let (done, wait) = std::sync::mpsc::channel();
    let Process { service, socket } = process;
    std::thread::spawn(move || done.send(socket.export().is_none()));
    assert_eq!(wait.recv_timeout(SOON), Ok(true));
    drop((end, client, service));
}

/// Queues start with the state of their vectors: a masked vector is never signalled, not even once.
#[test]
fn masked_vectors_of_msi_are_not_signalled_when_queues_are_resumed() {
    for is_masked in [false, true] {
        let first = function_with(Interrupts::Msi, Arc::default());
        first.set_vector(0, Some(event())).unwrap();
        // INTMS.
        first.write(Region::Bar(0), 0x0C, &[u8::from(is_masked), 0, 0, 0]).unwrap();
        let (reply, exported) = std::sync::mpsc::channel();
        first.hand_over(Box::new(move |state| reply.send(state).unwrap()));
        let host = Arc::<NoQueues>::default();
        let next = function_with(Interrupts::Msi, host.clone());
        next.take_over(exported.recv_timeout(SOON).unwrap().unwrap(), GuestMemory::empty())
            .unwrap();
        assert_eq!(host.signalled.load(Ordering::Relaxed), !is_masked);
    }
}
