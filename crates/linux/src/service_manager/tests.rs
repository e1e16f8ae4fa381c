use std::ffi::OsString;
use std::io::{IoSliceMut, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::kept::Variables;
use super::*;

/// A manager in a temporary directory.
fn manager() -> (tempfile::TempDir, UnixDatagram, ServiceManager) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    (directory, socket, ServiceManager::at(path.as_os_str()).unwrap())
}

fn receive(socket: &UnixDatagram) -> (String, Vec<OwnedFd>) {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let (mut bytes, mut fds) = ([0; 4096], Vec::new());
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags).unwrap();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            fds.extend(some);
        }
    }
    (String::from_utf8(bytes[..received.bytes].to_vec()).unwrap(), fds)
}

#[test]
fn messages_are_those_of_sd_notify() {
    let (_directory, socket, manager) = manager();
    manager.ready().unwrap();
    manager.stopping().unwrap();
    manager.forget("nvme.disk0").unwrap();
    for expected in ["READY=1", "STOPPING=1", "FDSTOREREMOVE=1\nFDNAME=nvme.disk0"] {
        let (message, fds) = receive(&socket);
        assert_eq!((message.as_str(), fds.len()), (expected, 0));
    }
}

#[test]
fn a_stored_descriptor_goes_with_its_name() {
    let (_directory, socket, manager) = manager();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    manager.store("nvme.disk0", theirs.as_fd()).unwrap();
    drop(theirs);
    let (message, fds) = receive(&socket);
    assert_eq!(message, "FDSTORE=1\nFDNAME=nvme.disk0\nFDPOLL=0");
    let [fd] = <[OwnedFd; 1]>::try_from(fds).unwrap();
    ours.write_all(b"still there").unwrap();
    drop(ours);
    let mut text = String::new();
    UnixStream::from(fd).read_to_string(&mut text).unwrap();
    assert_eq!(text, "still there");
}

#[test]
fn an_abstract_socket_is_named_with_an_at_sign() {
    // Autobound: the kernel chooses a free name.
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    );
    let socket = UnixDatagram::from(socket.unwrap());
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new_unnamed()).unwrap();
    let address = socket.local_addr().unwrap();
    let value = [b"@", address.as_abstract_name().unwrap()].concat();
    ServiceManager::at(&OsString::from_vec(value)).unwrap().ready().unwrap();
    assert_eq!(receive(&socket).0, "READY=1");
}

#[test]
fn invalid_addresses_are_refused() {
    let long = format!("/{}", "x".repeat(200));
    for value in ["run/notify", "@", "vsock:2:1234", "no\0te", long.as_str()] {
        let error = ServiceManager::at(OsStr::new(value)).unwrap_err();
        assert!(error.to_string().contains("NOTIFY_SOCKET="), "{error}");
    }
}

#[test]
fn invalid_names_are_refused_before_a_message_is_sent() {
    let (_directory, socket, manager) = manager();
    let long = "x".repeat(NAME_MAX + 1);
    for name in ["", "a:b", "a\nFDSTORE=1", "a\u{7f}", "größe", long.as_str()] {
        assert_eq!(
            manager.store(name, socket.as_fd()).unwrap_err().kind(),
            io::ErrorKind::InvalidInput,
            "{name:?}"
        );
        assert_eq!(
            manager.forget(name).unwrap_err().kind(),
            io::ErrorKind::InvalidInput,
            "{name:?}"
        );
    }
    manager.store(&long[1..], socket.as_fd()).unwrap();
    assert!(receive(&socket).0.contains(&long[1..]));
}

#[test]
fn a_manager_that_is_gone_is_an_error() {
    let (_directory, socket, manager) = manager();
    drop(socket);
    assert!(manager.ready().is_err());
}

#[test]
fn a_barrier_is_passed_when_the_manager_closes_the_descriptor() {
    let (_directory, socket, manager) = manager();
    let answering = std::thread::spawn(move || {
        let (message, fds) = receive(&socket);
        assert_eq!((message.as_str(), fds.len()), ("BARRIER=1", 1));
        socket
    });
    manager.barrier(Duration::from_secs(20)).unwrap();
    let _socket = answering.join().unwrap();
    // Not earlier.
    assert_eq!(
        manager.barrier(Duration::from_millis(1)).unwrap_err().kind(),
        io::ErrorKind::TimedOut
    );
}

fn names(
    pid: Option<&str>,
    count: Option<&str>,
    names: Option<&str>,
) -> Result<Vec<String>, EnvironmentError> {
    Variables {
        pid: pid.map(Into::into),
        count: count.map(Into::into),
        names: names.map(Into::into),
    }
    .names(77)
}

#[test]
fn kept_descriptors_have_names_in_order() {
    assert_eq!(names(Some("77"), Some("3"), Some("a:b:a")).unwrap(), ["a", "b", "a"]);
    assert_eq!(names(Some("77"), Some("2"), None).unwrap(), ["unknown", "unknown"]);
    assert_eq!(names(Some("77"), Some("1"), Some("")).unwrap(), [""]);
}

#[test]
fn missing_variables_and_another_process_mean_no_descriptors() {
    for (pid, count) in
        [(None, None), (Some("77"), None), (None, Some("1")), (Some("78"), Some("1"))]
    {
        assert_eq!(names(pid, count, Some("a")).unwrap(), [""; 0]);
    }
    for these in [None, Some(""), Some("a:b")] {
        assert_eq!(names(Some("77"), Some("0"), these).unwrap(), [""; 0]);
    }
}

#[test]
fn nonsense_is_an_error_that_names_the_variable() {
    let huge = u64::MAX.to_string();
    for (pid, count, some, variable) in [
        ("", "1", "a", "LISTEN_PID"),
        ("-77", "1", "a", "LISTEN_PID"),
        ("77x", "1", "a", "LISTEN_PID"),
        ("77", "", "a", "LISTEN_FDS"),
        ("77", "-1", "a", "LISTEN_FDS"),
        ("77", "4294967295", "a", "LISTEN_FDS"),
        ("77", huge.as_str(), "a", "LISTEN_FDS"),
        ("77", "2", "a", "LISTEN_FDNAMES"),
        ("77", "1", "a:b", "LISTEN_FDNAMES"),
    ] {
        let error = names(Some(pid), Some(count), Some(some)).unwrap_err();
        assert_eq!(error.variable, variable, "{error}");
    }
}
