//! Handshakes with strangers, and with a peer that has a key and is hostile, in both directions.
//!
//! The input is a mode (1 byte, see `fuzz_target`) and a message, fields, or changes to a message.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use sidecore_trust::{Admission, ClientName, ClientTrust, HostTrust, Invitation, PrivateKey};
use sidecore_vrio::handshake::{ClientHandshake, HostHandshake, MESSAGE_MAX, code};
use sidecore_vrio::port::Seal;
use sidecore_vrio::wire::{DATA_HEADER_BYTES, Hello, PHASE_AT, Welcome};

/// The keys change often, so that short inputs see it.
const FRAMES_PER_KEY: u64 = 3;

struct Keys {
    iohost: PrivateKey,
    invitation: Invitation,
}

static KEYS: LazyLock<Keys> = LazyLock::new(|| {
    let iohost = PrivateKey::from_bytes(&[1; 32]);
    let key = PrivateKey::from_bytes(&[2; 32]);
    let client = "the-fuzzed-one..".parse().expect("a name");
    Keys { invitation: Invitation { client, iohost: iohost.public(), key }, iohost }
});

fn client() -> ClientTrust {
    ClientTrust::invited(&KEYS.invitation).frames_per_key(FRAMES_PER_KEY)
}

fn host() -> HostTrust {
    let cable: ClientName = "cable".parse().expect("a name");
    let key = Admission::Key(KEYS.invitation.key.public());
    let clients = vec![(KEYS.invitation.client, key), (cable, Admission::Name)];
    HostTrust::new(Some(KEYS.iohost.clone()), clients).frames_per_key(FRAMES_PER_KEY)
}

fn hello(client: &mut ClientTrust, fields: &Hello) -> Vec<u8> {
    let mut message = [0; MESSAGE_MAX];
    let len = client.hello(fields, &mut message).expect("room");
    message[..len].to_vec()
}

/// A whole message's size of the input, with zeros behind it.
fn fields<const BYTES: usize>(input: &[u8]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    bytes.iter_mut().zip(input).for_each(|(to, from)| *to = *from);
    bytes
}

/// Changes a message as the input says: pairs of a place and a pattern. False if it is as it was.
fn change(message: &mut Vec<u8>, input: &[u8]) -> bool {
    let before = message.clone();
    for pair in input.chunks_exact(2) {
        let place = usize::from(pair[0]) % message.len();
        message[place] ^= pair[1];
    }
    if let [len] = input.chunks_exact(2).remainder() {
        message.truncate(usize::from(*len));
    }
    !message.starts_with(&before)
}

/// Our client, whose name and key are known.
fn known() -> Hello {
    Hello { client: KEYS.invitation.client.to_wire(), life: 1, number: 1, ..Hello::default() }
}

/// A client with a key sends any fields, the IOhost any others, and frames follow, some of them
/// forged.
fn talk(input: &[u8]) {
    let (first, rest) = input.split_at(Hello::BYTES.min(input.len()));
    let (second, frames) = rest.split_at(Welcome::BYTES.min(rest.len()));
    let mut wanted = Hello::decode(&fields(first));
    let is_known = first.is_empty() || wanted.client[0] & 1 == 0;
    if is_known {
        wanted.client = KEYS.invitation.client.to_wire();
    }
    let (mut client, mut host) = (client(), host());
    let opened = host.hello(code::NOISE, &hello(&mut client, &wanted));
    assert_eq!(opened.is_some(), wanted.client == KEYS.invitation.client.to_wire());
    let Some((seen, pending)) = opened else { return };
    assert_eq!(seen, wanted);
    let granted = Welcome::decode(&fields(second));
    let mut message = [0; MESSAGE_MAX];
    let (len, mut host) = host.welcome(pending, &granted, &mut message).expect("room");
    let (seen, mut client) = client.welcome(&message[..len]).expect("the IOhost's");
    assert_eq!(seen, granted);
    let mut counter = 0;
    for step in frames {
        counter += 1 + u64::from(step >> 6);
        let (from, to) =
            if step & 1 == 0 { (&mut client, &mut host) } else { (&mut host, &mut client) };
        let mut head = [*step; DATA_HEADER_BYTES];
        head[PHASE_AT] = from.phase(counter);
        let mut frame = [*step; 48];
        from.seal(counter, &head, &mut frame);
        let mut forged = frame;
        forged[usize::from(step >> 2) % 48] ^= 1;
        assert!(!to.open(counter, &head, &mut forged));
        assert!(to.open(counter, &head, &mut frame), "frame {counter}");
        assert_eq!(frame[..32], [*step; 32]);
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((mode, input)) = input.split_first() else { return };
    match mode % 6 {
        0 => {
            let opened = host().hello(mode / 6, input);
            let cable = *b"cable\0\0\0\0\0\0\0\0\0\0\0";
            assert!(
                opened.is_none_or(|(fields, _)| mode / 6 == code::PLAIN && fields.client == cable)
            );
        }
        1 => {
            let mut client = client();
            let _ = hello(&mut client, &known());
            assert!(client.welcome(input).is_none());
        }
        2 => {
            let mut message = hello(&mut client(), &known());
            let is_changed = change(&mut message, input);
            assert_eq!(host().hello(code::NOISE, &message).is_none(), is_changed);
        }
        3 => {
            let mut client = client();
            let mut host = host();
            let (_, pending) =
                host.hello(code::NOISE, &hello(&mut client, &known())).expect("known");
            let mut message = vec![0; MESSAGE_MAX];
            let (len, _) = host.welcome(pending, &Welcome::default(), &mut message).expect("room");
            message.truncate(len);
            let right = message.clone();
            let is_changed = change(&mut message, input);
            assert_eq!(client.welcome(&message).is_none(), is_changed);
            if is_changed {
                assert!(client.welcome(&right).is_some(), "the right one follows");
            }
        }
        _ => talk(input),
    }
});
