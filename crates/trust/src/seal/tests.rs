use proptest::prelude::*;
use sidecore_vrio::wire::DATA_HEADER_BYTES;

use super::*;
use crate::schedule::{Binding, first_secrets};

const HEAD_BYTES: usize = DATA_HEADER_BYTES;

/// A frame as it is on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Frame {
    counter: u64,
    head: [u8; HEAD_BYTES],
    sealed: Vec<u8>,
}

/// Both ends of a session, whose keys change after so many frames.
fn pair_of(secret: u8, binding: Binding, frames_per_key: u64) -> (SessionSeal, SessionSeal) {
    let (client, host) = first_secrets(&[secret; 32], &[7; 32], binding).unwrap();
    let end = |own| {
        let aead = Aead::new(own, (&client, &host), frames_per_key).unwrap();
        SessionSeal::Aead(Box::new(aead))
    };
    (end(Sender::Client), end(Sender::Host))
}

fn pair(frames_per_key: u64) -> (SessionSeal, SessionSeal) {
    pair_of(1, Binding { session: 5, queue: 0 }, frames_per_key)
}

fn payload(counter: u64) -> Vec<u8> {
    (0..64).map(|at| (counter as u8).wrapping_mul(31).wrapping_add(at)).collect()
}

fn sealed(seal: &mut SessionSeal, counter: u64) -> Frame {
    let mut head = [counter as u8; HEAD_BYTES];
    head[PHASE_AT] = seal.phase(counter);
    let mut sealed = payload(counter);
    sealed.resize(64 + seal.tag_bytes(), 0xee);
    seal.seal(counter, &head, &mut sealed);
    Frame { counter, head, sealed }
}

/// Whether a frame opens; then its payload is the right one.
fn opens(seal: &mut SessionSeal, frame: &Frame) -> bool {
    let mut copy = frame.sealed.clone();
    let is_sound = seal.open(frame.counter, &frame.head, &mut copy);
    if is_sound {
        assert_eq!(copy[..64], payload(frame.counter), "frame {}", frame.counter);
    }
    is_sound
}

#[test]
fn frames_open_at_the_other_end_alone() {
    let (mut client, mut host) = pair(FRAMES_PER_KEY);
    let frame = sealed(&mut client, 1);
    assert!(opens(&mut host, &frame));
    assert!(!opens(&mut client, &frame), "a reflected frame");
    let answer = sealed(&mut host, 1);
    assert!(opens(&mut client, &answer));
    assert_ne!(frame.sealed, answer.sealed, "each direction has its key");
}

#[test]
fn each_byte_of_a_frame_matters_and_so_does_its_counter() {
    let (mut client, mut host) = pair(FRAMES_PER_KEY);
    let frame = sealed(&mut client, 9);
    for at in 0..HEAD_BYTES {
        let mut forged = frame.clone();
        forged.head[at] ^= 0x10;
        assert!(!opens(&mut host, &forged), "byte {at} of the head");
    }
    for at in 0..frame.sealed.len() {
        let mut forged = frame.clone();
        forged.sealed[at] ^= 1;
        assert!(!opens(&mut host, &forged), "sealed byte {at}");
        forged.sealed.truncate(at);
        assert!(!opens(&mut host, &forged), "cut to {at} bytes");
    }
    assert!(!opens(&mut host, &Frame { counter: 10, ..frame.clone() }));
    let mut head = frame.sealed.clone();
    assert!(!host.open(9, &frame.head[..PHASE_AT], &mut head), "a head without a phase");
    let mut turned = frame.clone();
    turned.head[PHASE_AT] ^= PHASE_BIT;
    assert!(!opens(&mut host, &turned), "the other phase");
    assert!(opens(&mut host, &frame), "forged frames have changed nothing");
}

#[test]
fn keys_depend_on_all_that_a_session_is() {
    let one = Binding { session: 5, queue: 0 };
    let frame = sealed(&mut pair_of(1, one, 8).0, 1);
    assert!(opens(&mut pair_of(1, one, 8).1, &frame));
    let others =
        [(2, one), (1, Binding { session: 6, queue: 0 }), (1, Binding { session: 5, queue: 1 })];
    for (secret, binding) in others {
        let (mut client, mut host) = pair_of(secret, binding, 8);
        assert!(!opens(&mut host, &frame), "{secret} {binding:?}");
        assert_ne!(sealed(&mut client, 1).sealed, frame.sealed);
    }
}

/// The frames of a second implementation, written from docs/vrio.md (Python's hmac, and AES-GCM of
/// OpenSSL).
#[test]
fn frames_are_those_of_the_document() {
    let binding = Binding { session: 5, queue: 2 };
    let (mut client, mut host) = pair_of(1, binding, 1);
    let head = |phase| {
        let mut head = [9; 30];
        head[PHASE_AT] = phase;
        head
    };
    let sealed = |seal: &mut SessionSeal, counter, phase, payload: &[u8]| {
        let mut frame = payload.to_vec();
        frame.resize(payload.len() + TAG_BYTES, 0);
        seal.seal(counter, &head(phase), &mut frame);
        frame.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
    };
    assert_eq!(client.phase(1), 0);
    let frame = sealed(&mut client, 1, 0, b"a payload");
    assert_eq!(frame, "f8c0a55b88b7c2e5ab2ab472ccc75999c26f945b0278aed2a9");
    assert_eq!(client.phase(2), 1);
    let frame = sealed(&mut client, 2, 1, b"a payload");
    assert_eq!(frame, "62804357926455ca6c9e6c448c1a6dd45e19714a9c5674897f");
    let frame = sealed(&mut host, 0x0102_0304_0506_0708, 0, b"");
    assert_eq!(frame, "98086dba7d4318831d8a7919328bb75e");
}

#[test]
fn a_counter_seals_once() {
    let (mut client, mut host) = pair(FRAMES_PER_KEY);
    assert!(opens(&mut host, &sealed(&mut client, 3)));
    for counter in [3, 2, 0] {
        let again = sealed(&mut client, counter);
        assert!(again.sealed.iter().all(|byte| *byte == 0), "no second frame with a nonce");
        assert!(!opens(&mut host, &again));
    }
    assert!(opens(&mut host, &sealed(&mut client, 4)));
}

#[test]
fn keys_change_before_their_limit_and_the_phase_says_so() {
    let (mut client, mut host) = pair(4);
    for counter in 1..=40 {
        let frame = sealed(&mut client, counter);
        let generation = (counter - 1) / 4;
        assert_eq!(u64::from(frame.head[PHASE_AT]), generation % 2, "frame {counter}");
        assert!(opens(&mut host, &frame), "frame {counter}");
    }
}

#[test]
fn a_key_seals_no_more_than_the_limit_whatever_is_asked_for() {
    let (mut client, mut host) = pair(u64::MAX);
    assert_eq!(client.phase(FRAMES_PER_KEY), 0);
    assert_eq!(client.phase(FRAMES_PER_KEY + 1), 1);
    assert!(opens(&mut host, &sealed(&mut client, FRAMES_PER_KEY + 1)));
    const { assert!(FRAMES_PER_KEY < 1 << 23) }
}

#[test]
fn frames_around_a_change_of_keys_open_in_any_order() {
    let (mut client, mut host) = pair(4);
    let frames: Vec<Frame> = (1..=12).map(|counter| sealed(&mut client, counter)).collect();
    // 4 and 5, 8 and 9 are around a change.
    for at in [2, 5, 1, 4, 3, 6, 9, 8, 7, 12, 10, 11] {
        assert!(opens(&mut host, &frames[at - 1]), "frame {at}");
    }
}

#[test]
fn a_key_with_all_frames_lost_is_skipped_by_none() {
    let (mut client, mut host) = pair(4);
    let frames: Vec<Frame> = (1..=16).map(|counter| sealed(&mut client, counter)).collect();
    assert!(opens(&mut host, &frames[4]), "the first key has opened nothing");
    assert!(opens(&mut host, &frames[0]), "and opens late frames");
    assert!(!opens(&mut host, &frames[12]), "two keys ahead");
    assert!(opens(&mut host, &frames[8]));
    assert!(!opens(&mut host, &frames[1]), "two keys behind");
    assert!(opens(&mut host, &frames[15]));
}

#[test]
fn the_key_before_is_dropped_when_no_late_frame_can_come() {
    let (mut client, mut host) = pair(FRAMES_PER_KEY);
    let SessionSeal::Aead(sender) = &mut client else { unreachable!() };
    sender.sealing.frames_per_key = 10;
    let late = sealed(&mut client, 10);
    assert!(opens(&mut host, &sealed(&mut client, 11)));
    let SessionSeal::Aead(sender) = &mut client else { unreachable!() };
    sender.sealing.frames_per_key = FRAMES_PER_KEY;
    assert!(opens(&mut host, &sealed(&mut client, 11 + LATE_FRAMES)));
    assert!(opens(&mut host, &late));
    assert!(opens(&mut host, &sealed(&mut client, 12 + LATE_FRAMES)));
    assert!(!opens(&mut host, &late), "its key is gone");
}

#[test]
fn plain_seals_nothing() {
    let mut plain = SessionSeal::Plain;
    let frame = sealed(&mut plain, 1);
    assert_eq!((plain.tag_bytes(), plain.phase(1 << 40)), (0, 0));
    assert!(opens(&mut plain, &frame));
}

/// The frames of a sender, each shuffled by up to `LATE_FRAMES` places by a key of its own.
fn arrivals(count: u64, jitter: &[u16]) -> Vec<u64> {
    let mut order: Vec<(u64, u64)> = (1..=count)
        .map(|counter| (counter + u64::from(jitter[counter as usize % jitter.len()]), counter))
        .collect();
    order.sort_unstable();
    order.into_iter().map(|(_, counter)| counter).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// As long as frames are less late than a key lasts, each opens, and forged ones change
    /// nothing.
    #[test]
    fn reordered_frames_open_with_any_length_of_keys(
        frames_per_key in 20_u64..60,
        jitter in prop::collection::vec(0_u16..20, 1..40),
        forged in any::<prop::sample::Index>(),
    ) {
        let (mut client, mut host) = pair(frames_per_key);
        let frames: Vec<Frame> = (1..=400).map(|counter| sealed(&mut client, counter)).collect();
        for counter in arrivals(400, &jitter) {
            let frame = &frames[counter as usize - 1];
            let mut bad = frame.clone();
            bad.counter = bad.counter.wrapping_add(forged.index(900) as u64 + 1);
            bad.head[PHASE_AT] ^= counter as u8 & PHASE_BIT;
            prop_assert!(!opens(&mut host, &bad));
            prop_assert!(opens(&mut host, frame), "frame {}", counter);
        }
    }
}
