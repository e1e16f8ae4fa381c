//! The handshake through its seams: who gets a session, and what its keys are.

use sidecore_trust::{
    Admission, ClientName, ClientTrust, HostTrust, Invitation, PrivateKey, PublicKey, SessionSeal,
};
use sidecore_vrio::handshake::{ClientHandshake, HostHandshake, MESSAGE_MAX, code};
use sidecore_vrio::port::Seal;
use sidecore_vrio::wire::{Hello, Welcome};

const HEAD: [u8; 30] = [3; 30];

/// An IOhost and the invitation of one client.
struct Place {
    iohost: PrivateKey,
    invitation: Invitation,
}

impl Place {
    fn new() -> Self {
        let iohost = PrivateKey::generate().unwrap();
        let invitation = Invitation {
            client: name("vmhost1"),
            iohost: iohost.public(),
            key: PrivateKey::generate().unwrap(),
        };
        Self { iohost, invitation }
    }

    fn client(&self) -> ClientTrust {
        ClientTrust::invited(&self.invitation)
    }

    fn host(&self) -> HostTrust {
        HostTrust::new(Some(self.iohost.clone()), self.host_clients())
    }

    fn host_clients(&self) -> Vec<(ClientName, Admission)> {
        vec![(self.invitation.client, Admission::Key(self.invitation.key.public()))]
    }
}

fn name(name: &str) -> ClientName {
    name.parse().unwrap()
}

fn hello(client: &str, number: u64) -> Hello {
    Hello { client: name(client).to_wire(), life: 4, number, queue: 2, ..Hello::default() }
}

fn welcome(session: u64) -> Welcome {
    Welcome { life: 4, number: 1, session, slots: 8, ..Welcome::default() }
}

fn sent(client: &mut ClientTrust, fields: &Hello) -> Vec<u8> {
    let mut message = [0; MESSAGE_MAX];
    let len = client.hello(fields, &mut message).unwrap();
    message[..len].to_vec()
}

fn answered(host: &mut HostTrust, message: &[u8], session: u64) -> (Vec<u8>, SessionSeal) {
    let (_, pending) = host.hello(code::NOISE, message).unwrap();
    let mut answer = [0; MESSAGE_MAX];
    let (len, seal) = host.welcome(pending, &welcome(session), &mut answer).unwrap();
    (answer[..len].to_vec(), seal)
}

fn session(client: &mut ClientTrust, host: &mut HostTrust) -> (SessionSeal, SessionSeal) {
    let message = sent(client, &hello("vmhost1", 1));
    let (answer, host_seal) = answered(host, &message, 77);
    let (fields, client_seal) = client.welcome(&answer).unwrap();
    assert_eq!(fields, welcome(77));
    (client_seal, host_seal)
}

/// Seals frame `counter` at one end. Returns what the wire sees.
fn sealed(seal: &mut SessionSeal, counter: u64) -> Vec<u8> {
    let mut frame = b"a payload of 23 bytes..".to_vec();
    frame.resize(frame.len() + seal.tag_bytes(), 0);
    assert_eq!(seal.phase(counter), 0);
    // The head's phase is bit 0 of byte 26: 3 here is for phase 1.
    let mut head = HEAD;
    head[26] = 0;
    seal.seal(counter, &head, &mut frame);
    frame
}

fn opens(seal: &mut SessionSeal, counter: u64, frame: &[u8]) -> bool {
    let mut head = HEAD;
    head[26] = 0;
    let mut copy = frame.to_vec();
    seal.open(counter, &head, &mut copy) && copy.starts_with(b"a payload of 23 bytes..")
}

#[test]
fn an_invited_client_gets_a_session_whose_frames_are_secret() {
    let place = Place::new();
    let (mut client, mut host) = session(&mut place.client(), &mut place.host());
    let frame = sealed(&mut client, 1);
    assert_eq!((client.tag_bytes(), host.tag_bytes()), (16, 16));
    assert!(!frame.starts_with(b"a payload"));
    assert!(opens(&mut host, 1, &frame));
    let frame = sealed(&mut host, 1);
    assert!(opens(&mut client, 1, &frame));
}

#[test]
fn the_host_learns_the_fields_and_the_wire_does_not() {
    let place = Place::new();
    let fields = Hello { life: 0x1122_3344_5566_7788, ..hello("vmhost1", 1) };
    let message = sent(&mut place.client(), &fields);
    let (opened, _) = place.host().hello(code::NOISE, &message).unwrap();
    assert_eq!(opened, fields);
    let contains = |part: &[u8]| message.windows(part.len()).any(|window| window == part);
    assert!(!contains(b"vmhost1") && !contains(&fields.life.to_le_bytes()));
    assert!(!contains(&place.invitation.key.public().0), "nor does it show which client it is");
}

#[test]
fn a_stranger_a_revoked_client_and_a_wrong_name_get_none() {
    let place = Place::new();
    let mut host = place.host();
    let message = sent(&mut place.client(), &hello("vmhost1", 1));
    assert!(host.hello(code::NOISE, &message).is_some());

    let key = PrivateKey::generate().unwrap();
    let stranger = Invitation { key, ..place.invitation.clone() };
    let strange = sent(&mut ClientTrust::invited(&stranger), &hello("vmhost1", 1));
    assert!(host.hello(code::NOISE, &strange).is_none());
    let renamed = sent(&mut place.client(), &hello("vmhost2", 1));
    assert!(host.hello(code::NOISE, &renamed).is_none());
    assert!(host.hello(code::PLAIN, &hello("vmhost1", 1).encode()).is_none(), "nor without proof");
    assert!(host.hello(7, &message).is_none(), "nor by a handshake of another time");

    host.admit(Vec::new());
    assert!(host.hello(code::NOISE, &message).is_none(), "revoked");
}

#[test]
fn one_client_cannot_be_another() {
    let place = Place::new();
    let other = PrivateKey::generate().unwrap();
    let mut host = place.host();
    host.admit(vec![
        (name("vmhost1"), Admission::Key(place.invitation.key.public())),
        (name("vmhost2"), Admission::Key(other.public())),
        (name("cable"), Admission::Name),
    ]);
    let invitation = Invitation { client: name("vmhost2"), key: other, ..place.invitation.clone() };
    let mut second = ClientTrust::invited(&invitation);
    assert!(host.hello(code::NOISE, &sent(&mut second, &hello("vmhost2", 1))).is_some());
    for victim in ["vmhost1", "cable"] {
        assert!(host.hello(code::NOISE, &sent(&mut second, &hello(victim, 1))).is_none());
    }
    assert!(host.hello(code::PLAIN, &hello("cable", 1).encode()).is_some());
    assert!(host.hello(code::PLAIN, &hello("vmhost2", 1).encode()).is_none());
}

#[test]
fn a_client_takes_no_other_iohost() {
    let place = Place::new();
    let mut client = place.client();
    let message = sent(&mut client, &hello("vmhost1", 1));
    let admission = Admission::Key(place.invitation.key.public());
    let clients = vec![(name("vmhost1"), admission)];
    let mut impostor = HostTrust::new(Some(PrivateKey::generate().unwrap()), clients);
    assert!(impostor.hello(code::NOISE, &message).is_none());
    assert!(client.welcome(&welcome(1).encode()).is_none(), "nor one that asks for no proof");
    let (answer, _) = answered(&mut place.host(), &message, 1);
    assert!(client.welcome(&answer).is_some());
}

#[test]
fn damaged_messages_are_refused_and_change_nothing() {
    let place = Place::new();
    let (mut client, mut host) = (place.client(), place.host());
    let message = sent(&mut client, &hello("vmhost1", 1));
    for at in (0..message.len()).step_by(7) {
        let mut damaged = message.clone();
        damaged[at] ^= 4;
        assert!(host.hello(code::NOISE, &damaged).is_none(), "byte {at} of HELLO");
        assert!(host.hello(code::NOISE, &message[..at]).is_none(), "{at} bytes of HELLO");
    }
    // All public keys whose secret is known to everyone: zero, one, and p.
    for low in [[0; 32], [&[1][..], &[0; 31]].concat().try_into().unwrap(), {
        let mut p = [0xff; 32];
        (p[0], p[31]) = (0xed, 0x7f);
        p
    }] {
        let mut forged = message.clone();
        forged[..32].copy_from_slice(&low);
        assert!(host.hello(code::NOISE, &forged).is_none());
    }
    let (answer, mut host_seal) = answered(&mut host, &message, 5);
    for at in (0..answer.len()).step_by(7) {
        let mut damaged = answer.clone();
        damaged[at] ^= 4;
        assert!(client.welcome(&damaged).is_none(), "byte {at} of WELCOME");
        assert!(client.welcome(&answer[..at]).is_none(), "{at} bytes of WELCOME");
    }
    let (_, mut client_seal) = client.welcome(&answer).unwrap();
    assert!(opens(&mut host_seal, 1, &sealed(&mut client_seal, 1)));
}

/// An IOhost knows a HELLO again by its message: a longer one that it took as well would end the
/// session that the HELLO has begun.
#[test]
fn a_message_with_more_behind_it_is_refused() {
    let place = Place::new();
    let (mut client, mut host) = (place.client(), place.host());
    let message = sent(&mut client, &hello("vmhost1", 1));
    for more in 1..4 {
        let longer = [message.as_slice(), &[0; 4][..more]].concat();
        assert!(host.hello(code::NOISE, &longer).is_none(), "{more} more");
    }
    let (answer, _) = answered(&mut host, &message, 77);
    let longer = [answer.as_slice(), &[0]].concat();
    assert!(client.welcome(&longer).is_none());
    assert!(client.welcome(&answer).is_some());
}

#[test]
fn a_handshake_that_stops_leaves_nothing_behind() {
    let place = Place::new();
    let (mut client, mut host) = (place.client(), place.host());
    assert!(client.welcome(&[0; MESSAGE_MAX]).is_none(), "none has begun");
    let first = sent(&mut client, &hello("vmhost1", 1));
    drop(host.hello(code::NOISE, &first).unwrap());
    let (late, _) = answered(&mut host, &first, 5);
    let second = sent(&mut client, &hello("vmhost1", 2));
    assert_ne!(first, second);
    assert!(client.welcome(&late).is_none(), "a WELCOME to a handshake that was given up");
    let (answer, _) = answered(&mut host, &second, 6);
    assert!(client.welcome(&answer).is_some());
    assert!(client.welcome(&answer).is_none(), "each WELCOME makes one session");
}

#[test]
fn no_two_sessions_share_keys() {
    let place = Place::new();
    let (mut client, mut host) = (place.client(), place.host());
    let (mut one, _) = session(&mut client, &mut host);
    let (mut two, mut two_host) = session(&mut client, &mut host);
    let frame = sealed(&mut one, 1);
    assert_ne!(frame, sealed(&mut two, 1), "same name, same counter, same payload");
    assert!(!opens(&mut two_host, 1, &frame), "a frame of an earlier session");

    // The same HELLO, opened twice: an attacker has kept it.
    let message = sent(&mut client, &hello("vmhost1", 3));
    let (answer, mut first) = answered(&mut host, &message, 9);
    let (_, mut replayed) = answered(&mut host, &message, 9);
    let (_, mut own) = client.welcome(&answer).unwrap();
    let frame = sealed(&mut own, 1);
    assert!(opens(&mut first, 1, &frame));
    assert!(!opens(&mut replayed, 1, &frame));
    assert_ne!(sealed(&mut first, 1), sealed(&mut replayed, 1));
}

#[test]
fn the_ends_change_keys_on_their_own() {
    let place = Place::new();
    let (mut client, mut host) = (place.client().frames_per_key(3), place.host().frames_per_key(5));
    let (mut client, mut host) = session(&mut client, &mut host);
    let mut phases = [0; 2];
    for counter in 1..=60_u64 {
        for seen in [0, 1] {
            let (from, to) =
                if seen == 0 { (&mut client, &mut host) } else { (&mut host, &mut client) };
            let mut head = HEAD;
            head[26] = from.phase(counter);
            phases[seen] += u32::from(head[26]);
            let mut frame = [7; 40];
            from.seal(counter, &head, &mut frame);
            assert!(to.open(counter, &head, &mut frame), "frame {counter}");
            assert_eq!(frame[..24], [7; 24]);
        }
    }
    assert_eq!(phases, [30, 30], "half of the frames have an odd key");
}

#[test]
fn without_encryption_names_are_believed() {
    let mut client = ClientTrust::off();
    let mut host = HostTrust::new(None, vec![(name("cable"), Admission::Name)]);
    assert_eq!(client.code(), code::PLAIN);
    let message = sent(&mut client, &hello("cable", 1));
    assert_eq!(message, hello("cable", 1).encode());
    let (fields, pending) = host.hello(code::PLAIN, &message).unwrap();
    assert_eq!(fields, hello("cable", 1));
    let mut answer = [0; MESSAGE_MAX];
    let (len, host_seal) = host.welcome(pending, &welcome(3), &mut answer).unwrap();
    let (fields, client_seal) = client.welcome(&answer[..len]).unwrap();
    assert_eq!((fields, client_seal.tag_bytes(), host_seal.tag_bytes()), (welcome(3), 0, 0));
    assert!(host.hello(code::PLAIN, &hello("other", 1).encode()).is_none());
    assert!(host.hello(code::NOISE, &[0; MESSAGE_MAX]).is_none(), "there is no key");
    assert!(host.hello(code::PLAIN, &[0; Hello::BYTES - 1]).is_none(), "cut");
}

#[test]
fn public_keys_are_those_of_the_specification() {
    // RFC 7748, 6.1.
    let bytes = |hex: &str| -> [u8; 32] {
        let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap();
        std::array::from_fn(byte)
    };
    let key = |private| PrivateKey::from_bytes(&bytes(private)).public();
    let alice = key("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a");
    let bob = key("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb");
    let shown = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a";
    assert_eq!(alice.to_string(), shown);
    assert_eq!(
        bob,
        PublicKey(bytes("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"))
    );
}

#[test]
fn a_host_that_gets_a_key_admits_the_same_clients() {
    let place = Place::new();
    let mut host = HostTrust::new(None, place.host_clients());
    let message = sent(&mut place.client(), &hello("vmhost1", 1));
    assert!(host.hello(code::NOISE, &message).is_none(), "it has no key");
    host.set_key(place.iohost.clone());
    session(&mut place.client(), &mut host);
    host.set_key(PrivateKey::generate().unwrap());
    assert!(host.hello(code::NOISE, &message).is_none(), "the former key is gone");
}
