//! Frames are sealed and opened without an allocation, changes of keys included.

use sidecore_counting_alloc::{CountingAllocator, allocations};
use sidecore_trust::{Admission, ClientTrust, HostTrust, Invitation, PrivateKey, SessionSeal};
use sidecore_vrio::handshake::{ClientHandshake, HostHandshake, MESSAGE_MAX, code};
use sidecore_vrio::port::Seal;
use sidecore_vrio::wire::{DATA_HEADER_BYTES, Hello, PHASE_AT, Welcome};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const FRAMES: u64 = 100_000;
const FRAMES_PER_KEY: u64 = 1_000;

fn session() -> (SessionSeal, SessionSeal) {
    let iohost = PrivateKey::generate().unwrap();
    let key = PrivateKey::generate().unwrap();
    let client = "a".parse().unwrap();
    let admission = Admission::Key(key.public());
    let invitation = Invitation { client, iohost: iohost.public(), key };
    let mut client_trust = ClientTrust::invited(&invitation).frames_per_key(FRAMES_PER_KEY);
    let mut host_trust =
        HostTrust::new(Some(iohost), vec![(client, admission)]).frames_per_key(FRAMES_PER_KEY);
    let (mut hello, mut welcome) = ([0; MESSAGE_MAX], [0; MESSAGE_MAX]);
    let fields = Hello { client: client.to_wire(), ..Hello::default() };
    let len = client_trust.hello(&fields, &mut hello).unwrap();
    let (_, pending) = host_trust.hello(code::NOISE, &hello[..len]).unwrap();
    let fields = Welcome { session: 1, ..Welcome::default() };
    let (len, host) = host_trust.welcome(pending, &fields, &mut welcome).unwrap();
    (client_trust.welcome(&welcome[..len]).unwrap().1, host)
}

#[test]
fn frames_allocate_nothing() {
    let (mut client, mut host) = session();
    let mut frame = vec![0; 1024 + client.tag_bytes()];
    let mut changes = 0;
    let mut phase = 0;
    let before = allocations();
    for counter in 1..=FRAMES {
        let mut head = [1; DATA_HEADER_BYTES];
        head[PHASE_AT] = client.phase(counter);
        changes += u64::from(head[PHASE_AT] != phase);
        phase = head[PHASE_AT];
        client.seal(counter, &head, &mut frame);
        assert!(host.open(counter, &head, &mut frame));
        // A forged one each time.
        assert!(!host.open(counter, &head, &mut frame));
    }
    assert_eq!(allocations() - before, 0);
    assert_eq!(changes, FRAMES / FRAMES_PER_KEY - 1);
}
