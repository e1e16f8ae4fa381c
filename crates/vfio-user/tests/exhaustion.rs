//! A process without free descriptors serves the connected clients, and the others once it has
//! descriptors again. A process of its own, because the limit is the whole process's.

mod common;

use std::num::NonZeroUsize;
use std::os::unix::net::UnixStream;

use common::*;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sidecore_vfio_user::{Access, Body, Command, Connection, PciEndpoint, Service};

#[test]
fn a_client_that_cannot_be_accepted_is_accepted_later() {
    let directory = tempfile::tempdir().unwrap();
    let service = Service::start(NonZeroUsize::MIN).unwrap();
    let serve = |name: &str| {
        service
            .serve(
                &directory.path().join(name),
                Access::default(),
                PciEndpoint(Function::new()),
                None,
            )
            .unwrap()
    };
    let (first, second) = (serve("first"), serve("second"));
    let mut served = Client::start(first.path());
    let stream = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();

    let before = getrlimit(Resource::Nofile);
    // All descriptors below this number are in use.
    setrlimit(Resource::Nofile, Rlimit { current: Some(8), ..before }).unwrap();
    connect(&stream, &SocketAddrUnix::new(second.path()).unwrap()).unwrap();
    // The same thread has tried to accept the other client before it replies to this one.
    assert_eq!(served.ask(read(0, 0, 8), vec![]).errno, 0);
    assert!(!second.is_connected());
    // Only a command that needs a descriptor fails.
    let refused = served.ask((Command::DeviceGetRegionInfo, region_info(0, 64)), vec![]);
    assert_eq!((refused.errno, refused.body), (24, Body::Empty), "EMFILE");
    setrlimit(Resource::Nofile, before).unwrap();

    let mut late = Client::over(Connection::new(UnixStream::from(stream)));
    assert_eq!(late.ask((Command::Version, version()), vec![]).errno, 0);
    assert!(second.is_connected());
    assert_eq!(served.ask((Command::DeviceGetRegionInfo, region_info(0, 64)), vec![]).errno, 0);
}
