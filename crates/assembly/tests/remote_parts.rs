//! Parts of the remote channel that come and go while an assembly runs.

use std::net::UdpSocket;
use std::time::Duration;

use sidecore_assembly::Assembly;
use sidecore_assembly::spec::{
    IohostSpec, LinkKind, LinkSpec, RemoteKind, RemotePart, SidecoreSpec, Spec, UdpLinkSpec,
};

/// The first bytes of a HELLO: version and kind (docs/vrio.md).
const HELLO: [u8; 2] = [1, 4];

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
    let link = LinkSpec {
        name: "wire".to_owned(),
        kind: LinkKind::Udp(udp),
        sidecores: vec!["sc0".to_owned()],
        ..LinkSpec::default()
    };
    let part = IohostSpec {
        name: "io1".to_owned(),
        link: "wire".to_owned(),
        address: Some(iohost.local_addr().unwrap().to_string()),
        client: "vmhost1".to_owned(),
        encryption: Some(false),
        ..IohostSpec::default()
    };
    let sidecores = vec![SidecoreSpec { name: "sc0".to_owned(), cpu: None }];
    let spec = Spec { sidecores, links: vec![link], ..Spec::default() };
    let assembly = Assembly::start(&spec).unwrap();
    let part = RemotePart::Iohost(part);
    assembly.add_part(&part).unwrap();
    let (first, from) = next_life(&iohost, None);
    assembly.remove_part(RemoteKind::Iohost, "io1").unwrap();
    assembly.add_part(&part).unwrap();
    let (second, _) = next_life(&iohost, Some(from));
    assert_ne!(first, second);
}
