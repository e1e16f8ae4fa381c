//! Parts of the remote channel that come and go while an assembly runs.

use std::fs::{Permissions, set_permissions};
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sidecore_assembly::report::DeviceState;
use sidecore_assembly::spec::{
    ClientSpec, DeviceSpec, FileOptions, FrontEndSpec, IohostSpec, LinkKind, LinkSpec,
    MemoryLinkSpec, RemoteKind, RemotePart, ServeSpec, SidecoreSpec, Spec, StoreKind, StoreSpec,
    UdpLinkSpec, Value, Values, VrioSpec,
};
use sidecore_assembly::{Assembly, LeftDevice};
use sidecore_driver::Status;
use sidecore_kit::{guest, wait};

/// The first bytes of a HELLO: version and kind (docs/vrio.md).
const HELLO: [u8; 2] = [1, 4];

/// A sidecore with a link.
fn spec(kind: LinkKind) -> Spec {
    let sidecores = vec!["sc0".to_owned()];
    let link = LinkSpec { name: "wire".to_owned(), kind, sidecores, ..LinkSpec::default() };
    let sidecores = vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }];
    Spec { sidecores, links: vec![link], ..Spec::default() }
}

fn io1() -> IohostSpec {
    let [name, link, client] = ["io1", "wire", "vmhost1"].map(str::to_owned);
    IohostSpec { name, link, client, ..IohostSpec::default() }
}

/// The number of the client's start in the next HELLO from an address that is not `other`, and that
/// address.
fn next_life(
    iohost: &UdpSocket,
    other: Option<std::net::SocketAddr>,
) -> (u64, std::net::SocketAddr) {
    let mut frame = [0; 9_000];
    loop {
        let (len, from) = iohost.recv_from(&mut frame).expect("a HELLO comes");
        assert!(len > 38 && frame[..2] == HELLO, "{:?}", &frame[..2]);
        if Some(from) != other {
            return (u64::from_le_bytes(*frame[30..].first_chunk().unwrap()), from);
        }
    }
}

/// The numbers of sessions begin anew with each session unit. An IOhost refuses a lower number than
/// it has seen in one life, so a unit needs a life of its own.
#[test]
fn an_iohost_that_is_removed_and_added_sees_another_life_of_its_client() {
    let iohost = UdpSocket::bind("127.0.0.1:0").unwrap();
    iohost.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let udp = UdpLinkSpec { listen: "127.0.0.1:0".parse().unwrap(), coalesce: false };
    let link = LinkKind::Udp(udp);
    let address = Some(iohost.local_addr().unwrap().to_string());
    let part = IohostSpec { address, encryption: Some(false), ..io1() };
    let assembly = Assembly::start(&spec(link)).unwrap();
    let part = RemotePart::Iohost(part);
    assembly.add_part(&part).unwrap();
    let (first, from) = next_life(&iohost, None);
    assembly.remove_part(RemoteKind::Iohost, "io1").unwrap();
    assembly.add_part(&part).unwrap();
    let (second, _) = next_life(&iohost, Some(from));
    assert_ne!(first, second);
}

/// The keys cannot be read again after one of them was removed.
#[test]
fn a_client_is_revoked_although_the_key_directory_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let set_mode = |name: &str, mode| {
        set_permissions(path(name), Permissions::from_mode(mode)).unwrap();
    };
    let memory = MemoryLinkSpec { socket: path("wire.sock"), users: Vec::new() };
    let wire = LinkKind::Memory(memory);
    let client = ClientSpec {
        name: "vmhost1".to_owned(),
        links: vec!["wire".to_owned()],
        encryption: Some(true),
        ..ClientSpec::default()
    };
    let key_directory = path("keys");
    let iohost = Spec { clients: vec![client], key_directory, ..spec(wire.clone()) };
    let iohost = Assembly::start(&iohost).unwrap();
    std::fs::write(path("invitation"), iohost.invite("vmhost1").unwrap()).unwrap();
    set_mode("invitation", 0o600);
    let io1 = IohostSpec { invitation: Some(path("invitation")), encryption: Some(true), ..io1() };
    let vmhost = Assembly::start(&Spec { iohosts: vec![io1], ..spec(wire) }).unwrap();
    let has_sessions = |count| {
        wait::succeed(Duration::from_secs(20), || {
            let open = iohost.remote().clients.first().map(|client| client.sessions_open);
            if open == Some(count) { Ok(()) } else { Err(format!("{open:?} sessions are open")) }
        });
    };
    has_sessions(1);
    set_mode("keys", 0o777);
    let error = iohost.revoke("vmhost1").unwrap_err().to_string();
    assert!(error.contains("chmod go-w"), "{error}");
    has_sessions(0);
    drop(vmhost);
}

/// An IOhost with the device `db-1`, and a VMhost that serves devices by a pattern, in this
/// directory.
fn iohost_and_vmhost(directory: &Path) -> [Spec; 2] {
    let path = |name: &str| directory.join(name);
    let wire = LinkKind::Memory(MemoryLinkSpec { socket: path("wire.sock"), users: Vec::new() });
    let [vmhost, sc0] = ["vmhost1", "sc0"].map(str::to_owned);
    let client = ClientSpec {
        name: vmhost.clone(),
        links: vec!["wire".to_owned()],
        ..ClientSpec::default()
    };
    let file = FileOptions { direct: false, ..FileOptions::new(path("disk.img")) };
    std::fs::File::create(path("disk.img")).unwrap().set_len(1 << 20).unwrap();
    let export = DeviceSpec {
        name: "db-1".to_owned(),
        front_end: FrontEndSpec::Vrio(VrioSpec { client: vmhost, ..VrioSpec::default() }),
        store: "disk".to_owned(),
        ..DeviceSpec::default()
    };
    let iohost = Spec {
        clients: vec![client],
        stores: vec![StoreSpec::new("disk", StoreKind::File(file))],
        devices: vec![export],
        ..spec(wire.clone())
    };
    let device =
        DeviceSpec { socket: path("{device}.sock"), sidecores: vec![sc0], ..DeviceSpec::default() };
    let serve = ServeSpec {
        name: "db".to_owned(),
        iohost: "io1".to_owned(),
        pattern: "db-*".to_owned(),
        devices_max: 4,
        device,
        stages: Vec::new(),
    };
    [iohost, Spec { iohosts: vec![io1()], serves: vec![serve], ..spec(wire) }]
}

/// The next daemon makes the device of an exported guest before the IOhost is there, and the guest
/// goes on when it is.
#[test]
fn a_guest_of_a_pattern_is_handed_over_as_that_of_a_configured_device() {
    let directory = tempfile::tempdir().unwrap();
    let [iohost_spec, vmhost_spec] = iohost_and_vmhost(directory.path());
    let start = |left: &mut Vec<LeftDevice>| {
        let vmhost = Arc::new(Assembly::take_over(&vmhost_spec, left).unwrap());
        vmhost.serve_late().unwrap();
        vmhost.serve_patterns().unwrap();
        vmhost
    };
    let has_state = |vmhost: &Assembly, state: DeviceState| {
        wait::succeed(Duration::from_secs(20), || {
            let devices = vmhost.devices();
            let is_it = devices.first().is_some_and(|device| device.state == state);
            if is_it { Ok(()) } else { Err(format!("{devices:?}")) }
        });
    };
    let iohost = Assembly::start(&iohost_spec).unwrap();
    let vmhost = start(&mut Vec::new());
    has_state(&vmhost, DeviceState::Waiting);
    let mut guest = guest::connect(&directory.path().join("db-1.sock"));
    assert_eq!(guest::write(&mut guest, 8, 7), Status::Ok);
    guest::flush(&mut guest);
    has_state(&vmhost, DeviceState::Running);
    let mut left = vmhost.hand_over();
    drop(vmhost);
    assert_eq!(left.len(), 1);
    drop(iohost);
    let vmhost = start(&mut left);
    assert!(left.is_empty());
    has_state(&vmhost, DeviceState::Opening);
    // A thread of the first IOhost's link closes its socket.
    let _iohost = wait::succeed(Duration::from_secs(20), || Assembly::start(&iohost_spec));
    has_state(&vmhost, DeviceState::Running);
    assert_eq!(guest::read(&mut guest, 8), 7, "on the same connection");
    wait::succeed(Duration::from_secs(20), || {
        let serves = vmhost.remote().serves;
        if serves[0].devices == ["db-1"] { Ok(()) } else { Err(format!("{serves:?}")) }
    });
    drop(guest);
}

/// A guest of a device that a pattern has made reaches the IOhost through the pattern's stages.
#[test]
fn requests_of_a_device_of_a_pattern_pass_the_stages_of_the_pattern() {
    let directory = tempfile::tempdir().unwrap();
    let [iohost_spec, mut vmhost_spec] = iohost_and_vmhost(directory.path());
    let delay = Values([("delay_us", Value::Number(1))].into());
    vmhost_spec.serves[0].stages = vec![("delay", delay), ("read-only", Values::default())];
    let _iohost = Assembly::start(&iohost_spec).unwrap();
    let vmhost = Arc::new(Assembly::start(&vmhost_spec).unwrap());
    vmhost.serve_patterns().unwrap();
    wait::succeed(Duration::from_secs(20), || {
        let devices = vmhost.devices();
        let is_served = devices.iter().any(|device| device.state == DeviceState::Waiting);
        if is_served { Ok(()) } else { Err(format!("{devices:?}")) }
    });
    let report = vmhost.devices().remove(0);
    assert_eq!((report.stages, report.read_only), (vec!["delay".into(), "read-only".into()], true));
    let mut guest = guest::connect(&directory.path().join("db-1.sock"));
    assert_eq!(guest::write(&mut guest, 8, 7), Status::IoError);
    assert_eq!(guest::read(&mut guest, 8), 0);
}

/// A client whose key cannot be read is not added, and can be added once it can.
#[test]
fn a_client_that_was_refused_can_be_added_later() {
    let directory = tempfile::tempdir().unwrap();
    let memory = MemoryLinkSpec { socket: directory.path().join("wire.sock"), users: Vec::new() };
    let key_directory = directory.path().join("keys");
    let client = |name: &str, encrypts| ClientSpec {
        name: name.to_owned(),
        links: vec!["wire".to_owned()],
        encryption: Some(encrypts),
        ..ClientSpec::default()
    };
    // The link is open for another one.
    let iohost = Spec {
        clients: vec![client("vmhost0", false)],
        key_directory: key_directory.clone(),
        ..spec(LinkKind::Memory(memory))
    };
    let iohost = Assembly::start(&iohost).unwrap();
    let client = RemotePart::Client(client("vmhost1", true));
    std::fs::create_dir(&key_directory).unwrap();
    set_permissions(&key_directory, Permissions::from_mode(0o777)).unwrap();
    for _ in 0..2 {
        let error = iohost.add_part(&client).unwrap_err().to_string();
        assert!(error.contains("chmod go-w"), "{error}");
    }
    set_permissions(&key_directory, Permissions::from_mode(0o700)).unwrap();
    iohost.add_part(&client).unwrap();
    iohost.invite("vmhost1").unwrap();
}
