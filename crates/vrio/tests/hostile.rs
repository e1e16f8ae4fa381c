//! Frames that make no sense, or that a hostile peer has made: each is dropped with its reason.

mod common;

use common::{CLIENT, Rig, pattern, request};
use sidecore_block::Operation;
use sidecore_units::Nanos;
use sidecore_vrio::handshake::code;
use sidecore_vrio::slices::{Arrived, SlicePort};
use sidecore_vrio::wire::{
    AnswerBody, Ending, FrameHeader, Greeting, Hello, Kind, MIN_FRAME_BYTES, PART_HEADER_BYTES,
    PartHeader, RequestBody, VERSION, ending,
};
use sidecore_vrio::{ClientOptions, HostOptions, OnDisconnect, Peer, Reason, ServerOptions};

fn rig() -> Rig {
    let options = ClientOptions { on_disconnect: OnDisconnect::Stall, ..ClientOptions::default() };
    Rig::connected(options, ServerOptions::default())
}

/// Frames that the client and the IOhost have just sent, for a write that is held by the store.
fn caught(rig: &mut Rig) -> Vec<u8> {
    rig.holds = true;
    rig.write(1, 0, &pattern(1, 4096));
    rig.poll_client();
    let frame = rig.to_host.frames.back().unwrap().clone();
    rig.step();
    assert_eq!(rig.held.len(), 1);
    frame
}

/// The reason for which the IOhost drops this frame.
fn host_drops(rig: &mut Rig, frame: &[u8]) -> Option<Reason> {
    let before = rig.host_counts();
    rig.host_receives(Peer(9), frame);
    let after = rig.host_counts();
    Reason::ALL.iter().copied().find(|reason| after.dropped(*reason) > before.dropped(*reason))
}

/// The reason for which the client drops this frame.
fn client_drops(rig: &mut Rig, frame: &[u8]) -> Option<Reason> {
    let before = rig.client_counts();
    rig.client_receives(frame);
    let after = rig.client_counts();
    Reason::ALL.iter().copied().find(|reason| after.dropped(*reason) > before.dropped(*reason))
}

/// The frame with another counter and another body.
fn with_body(frame: &[u8], counter: u64, change: impl FnOnce(&mut RequestBody)) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[10..18].copy_from_slice(&counter.to_le_bytes());
    let mut body = RequestBody::decode(frame[30..].first_chunk().unwrap());
    change(&mut body);
    frame[30..82].copy_from_slice(&body.encode());
    frame
}

#[test]
fn a_request_that_lies_about_itself_is_dropped_by_its_reason() {
    let mut rig = rig();
    let frame = caught(&mut rig);
    let mut counter = 1_000;
    let mut drops = |change: &dyn Fn(&mut RequestBody)| {
        counter += 1;
        host_drops(&mut rig, &with_body(&frame, counter, change))
    };
    assert_eq!(drops(&|body| body.device = 9), Some(Reason::Device));
    assert_eq!(drops(&|body| body.epoch = 0), Some(Reason::Epoch));
    assert_eq!(drops(&|body| body.epoch = u64::MAX), Some(Reason::Epoch));
    assert_eq!(drops(&|body| body.slot = 128), Some(Reason::Slot));
    assert_eq!(drops(&|body| body.slot = u16::MAX), Some(Reason::Slot));
    assert_eq!(drops(&|body| body.sequence = 0), Some(Reason::Sequence));
    assert_eq!(drops(&|body| body.sequence = u32::MAX), Some(Reason::Sequence));
    for later in [2, 3, 1 << 31] {
        let dropped = drops(&|body| body.sequence = later);
        assert_eq!(dropped, Some(Reason::Slot), "the slot has a request");
    }
    assert_eq!(drops(&|body| body.header.sector = 8), Some(Reason::Segment), "another request's");
    assert_eq!(drops(&|body| body.len_bytes = 8192), Some(Reason::Segment));
    assert_eq!(drops(&|_| ()), Some(Reason::Duplicate));
    // In slots that are free.
    for older in [0, 1 << 31, u32::MAX] {
        let dropped = drops(&|body| (body.slot, body.sequence) = (5, older));
        assert_eq!(dropped, Some(Reason::Sequence));
    }
    assert_eq!(
        drops(&|body| (body.slot, body.sequence, body.offset_bytes) = (5, 1, 512)),
        Some(Reason::Segment)
    );
    assert_eq!(
        drops(&|body| (body.slot, body.sequence, body.header.kind) = (6, 1, 0)),
        Some(Reason::Segment)
    );
    assert_eq!(rig.held.len(), 1);
}

#[test]
fn a_request_that_the_store_must_not_see_is_answered_with_an_error() {
    let mut rig = rig();
    let frame = caught(&mut rig);
    for (slot, change) in [(10, 0xffff_u32), (11, 0x1001), (12, 4), (13, 1)] {
        let frame = with_body(&frame, 2_000 + u64::from(slot), |body| {
            (body.slot, body.sequence) = (slot, 1);
            match slot {
                10 => body.header.kind = change,
                11 => body.len_bytes = change,
                12 => body.header.sector = u64::MAX,
                _ => body.header.sector = (1 << 20) / 512,
            }
        });
        assert_eq!(host_drops(&mut rig, &frame), None, "slot {slot}");
    }
    rig.execute();
    assert_eq!(rig.held.len(), 1);
    rig.poll_host();
    // A bundle of four answers without data.
    assert_eq!(rig.to_client.frames.len(), 1);
    let parts = rig.to_client.frames[0][FrameHeader::BYTES..].chunks(PART_HEADER_BYTES);
    let statuses: Vec<u8> = parts.map(|part| part[PartHeader::BYTES + 36]).collect();
    assert_eq!(statuses, [2, 0x82, 0x82, 0x82]);
}

#[test]
fn frames_of_no_session_or_of_another_time_are_dropped() {
    let mut rig = rig();
    let frame = caught(&mut rig);
    let mut changed = |at: usize, to: u8| {
        let mut frame = with_body(&frame, 3_000, |_| ());
        frame[at] ^= to;
        host_drops(&mut rig, &frame)
    };
    assert_eq!(changed(0, 1), Some(Reason::Version));
    assert_eq!(changed(1, 0x80), Some(Reason::Kind));
    assert_eq!(
        changed(1, Kind::Request.code() ^ Kind::Answer.code()),
        Some(Reason::Kind),
        "an answer to the IOhost"
    );
    assert_eq!(changed(9, 1), Some(Reason::Session));
    assert_eq!(changed(18, 1), Some(Reason::Incarnation));
    assert_eq!(host_drops(&mut rig, &frame), Some(Reason::Replayed));
    assert_eq!(host_drops(&mut rig, &frame[..100]), Some(Reason::Truncated));
    assert_eq!(host_drops(&mut rig, &[]), Some(Reason::Truncated));
}

#[test]
fn an_answer_that_was_not_asked_for_changes_nothing() {
    let mut rig = rig();
    rig.submit(1, request(Operation::Read, 0, 4096));
    rig.step();
    rig.poll_host();
    let answer = rig.to_client.frames.pop_back().unwrap();
    let mut counter = 500;
    let mut drops = |change: &dyn Fn(&mut AnswerBody), payload: usize| {
        counter += 1;
        let mut frame = answer[..82 + payload].to_vec();
        frame[10..18].copy_from_slice(&u64::to_le_bytes(counter));
        frame[28..30].copy_from_slice(&(payload as u16).to_le_bytes());
        let mut body = AnswerBody::decode(frame[30..].first_chunk().unwrap());
        change(&mut body);
        frame[30..82].copy_from_slice(&body.encode());
        client_drops(&mut rig, &frame)
    };
    assert_eq!(drops(&|body| body.slot = 1, 4096), Some(Reason::Unasked));
    assert_eq!(drops(&|body| body.slot = 999, 4096), Some(Reason::Unasked));
    assert_eq!(drops(&|body| body.sequence += 1, 4096), Some(Reason::Unasked));
    assert_eq!(drops(&|body| body.device = 3, 4096), Some(Reason::Unasked));
    assert_eq!(drops(&|body| body.epoch += 1, 4096), Some(Reason::Epoch));
    assert_eq!(drops(&|body| body.attempt += 1, 4096), Some(Reason::Attempt));
    assert_eq!(drops(&|body| body.len_bytes = 8192, 4096), Some(Reason::Segment));
    assert_eq!(drops(&|body| body.offset_bytes = 512, 3584), Some(Reason::Segment));
    assert_eq!(drops(&|_| (), 4095), Some(Reason::Segment));
    assert_eq!(drops(&|_| (), 0), Some(Reason::Segment));
    rig.client_receives(&answer);
    assert_eq!(rig.wait(1), Ok(()));
    assert_eq!(client_drops(&mut rig, &answer), Some(Reason::Replayed));
}

/// A HELLO from `Peer(9)`, with its cookie if it has one.
fn hello_with((challenged_ns, cookie): (u64, u64), change: impl FnOnce(&mut Hello)) -> Vec<u8> {
    let mut hello = Hello {
        client: CLIENT,
        life: 1,
        number: 1,
        version_min: VERSION,
        version_max: VERSION,
        frame_bytes: MIN_FRAME_BYTES,
        slots: 4,
        cookie,
        ..Hello::default()
    };
    change(&mut hello);
    let greeting = Greeting {
        life: hello.life,
        number: hello.number,
        challenged_ns,
        cookie,
        handshake: code::PLAIN,
        queue: hello.queue,
        message_bytes: Hello::BYTES as u16,
    };
    let payload_bytes = MIN_FRAME_BYTES as u16 - FrameHeader::BYTES as u16;
    let header = FrameHeader {
        version: VERSION,
        kind: Kind::Hello.code(),
        payload_bytes,
        ..FrameHeader::default()
    };
    let mut frame = header.encode().to_vec();
    frame.extend(greeting.encode());
    frame.extend(hello.encode());
    frame.resize(MIN_FRAME_BYTES as usize, 0);
    frame
}

fn hello(change: impl FnOnce(&mut Hello)) -> Vec<u8> {
    hello_with((0, 0), change)
}

/// The cookie in the CHALLENGE to this HELLO.
fn cookie(rig: &mut Rig, hello: &[u8]) -> (u64, u64) {
    assert_eq!(host_drops(rig, hello), None);
    let (kind, frame) = reply(rig).unwrap();
    assert_eq!(kind, Kind::Challenge);
    let challenge = Greeting::decode(frame[30..].first_chunk().unwrap());
    (challenge.challenged_ns, challenge.cookie)
}

/// The reason for which the IOhost drops this HELLO from a sender that has shown its address.
fn challenged_drops(rig: &mut Rig, change: impl Fn(&mut Hello)) -> Option<Reason> {
    let cookie = cookie(rig, &hello(&change));
    host_drops(rig, &hello_with(cookie, &change))
}

/// The next frame that the IOhost sends.
fn reply(rig: &mut Rig) -> Option<(Kind, Vec<u8>)> {
    rig.poll_host();
    let frame = rig.to_client.frames.pop_front()?;
    Some((Kind::from_code(frame[1]), frame))
}

#[test]
fn a_client_without_an_invitation_gets_no_session() {
    let mut rig = rig();
    assert_eq!(challenged_drops(&mut rig, |hello| hello.client[0] ^= 1), Some(Reason::Client));
    let (kind, frame) = reply(&mut rig).unwrap();
    let ending = Ending::decode(frame[30..].first_chunk().unwrap());
    assert_eq!((kind, ending.code, ending.number), (Kind::Ending, ending::UNKNOWN_CLIENT, 1));
    assert_eq!(challenged_drops(&mut rig, |hello| hello.queue = 2), Some(Reason::Client));
    reply(&mut rig);
    assert_eq!(challenged_drops(&mut rig, |hello| hello.version_min = 2), Some(Reason::Version));
    assert_eq!(reply(&mut rig).unwrap().0, Kind::Ending);
    for frame_bytes in [0, MIN_FRAME_BYTES - 1, MIN_FRAME_BYTES + 1, u32::MAX] {
        assert_eq!(
            challenged_drops(&mut rig, |hello| hello.frame_bytes = frame_bytes),
            Some(Reason::Malformed)
        );
    }
    assert!(reply(&mut rig).is_none());
    // A handshake that the IOhost does not do.
    let cookie = cookie(&mut rig, &hello(|_| ()));
    let mut noise = hello_with(cookie, |_| ());
    noise[30 + 32] = code::NOISE;
    assert_eq!(host_drops(&mut rig, &noise), Some(Reason::Client));
}

#[test]
fn an_old_hello_ends_no_session() {
    let mut rig = rig();
    let session = rig.host.session(0).unwrap().session();
    // Of an earlier life, and of a later number: a challenge, which its sender does not get any
    // more.
    for (life, number) in [(77, 1), (77, u64::MAX), (1, 2)] {
        let old = |hello: &mut Hello| (hello.life, hello.number) = (life, number);
        let (challenged_ns, right) = cookie(&mut rig, &hello(old));
        for guess in [(challenged_ns, right ^ 2), (challenged_ns + 1, right), (0, 1)] {
            cookie(&mut rig, &hello_with(guess, old));
        }
    }
    assert_eq!(rig.host.session(0).unwrap().session(), session);
    assert_eq!(rig.read(1, 0, 512), [0; 512]);
}

#[test]
fn a_hello_that_the_network_kept_from_an_earlier_life_ends_no_session() {
    let mut rig = rig();
    let old = |hello: &mut Hello| hello.life = 77;
    let kept = cookie(&mut rig, &hello(old));
    // The client of another life gets its session meanwhile.
    rig.now = rig.now.after(Nanos(1));
    let new = |hello: &mut Hello| hello.life = 78;
    assert_eq!(challenged_drops(&mut rig, new), None);
    assert_eq!(reply(&mut rig).unwrap().0, Kind::Welcome);
    let session = rig.host.session(0).unwrap().session();
    // Its cookie is right, and older than the session.
    cookie(&mut rig, &hello_with(kept, old));
    assert_eq!(rig.host.session(0).unwrap().session(), session);
}

#[test]
fn a_recorded_hello_with_a_new_cookie_ends_no_session() {
    let mut rig = rig();
    let old = |hello: &mut Hello| hello.life = 77;
    let mut recorded = hello_with(cookie(&mut rig, &hello(old)), old);
    assert_eq!(host_drops(&mut rig, &recorded), None);
    assert_eq!(reply(&mut rig).unwrap().0, Kind::Welcome);
    // The client starts again, and gets its session.
    rig.now = rig.now.after(Nanos(1));
    let new = |hello: &mut Hello| hello.life = 78;
    assert_eq!(challenged_drops(&mut rig, new), None);
    assert_eq!(reply(&mut rig).unwrap().0, Kind::Welcome);
    let session = rig.host.session(0).unwrap().session();
    // The clear part is the attacker's, the sealed message is not.
    rig.now = rig.now.after(Nanos(1));
    let (challenged_ns, fresh) = cookie(&mut rig, &hello(old));
    recorded[30 + 16..][..8].copy_from_slice(&challenged_ns.to_le_bytes());
    recorded[30 + 24..][..8].copy_from_slice(&fresh.to_le_bytes());
    assert_eq!(host_drops(&mut rig, &recorded), Some(Reason::Replayed));
    assert_eq!(rig.host.session(0).unwrap().session(), session);
}

#[test]
fn the_same_hello_has_the_same_welcome() {
    let mut rig = rig();
    let next = |hello: &mut Hello| hello.life = 5;
    let known = cookie(&mut rig, &hello(next));
    assert_eq!(host_drops(&mut rig, &hello_with(known, next)), None);
    let (kind, welcome) = reply(&mut rig).unwrap();
    assert_eq!(kind, Kind::Welcome);
    for _ in 0..1_000 {
        assert_eq!(host_drops(&mut rig, &hello_with(known, next)), None);
        assert_eq!(reply(&mut rig), Some((Kind::Welcome, welcome.clone())));
    }
    // Without its sender having shown its address, there is none.
    let mut other = hello_with(known, next);
    rig.host_receives(Peer(10), &other);
    assert_eq!(reply(&mut rig).unwrap().0, Kind::Challenge);
    // Another message in its place is no session's.
    other[30 + 40 + 48] ^= 1;
    assert_eq!(host_drops(&mut rig, &other), None);
    assert_eq!(reply(&mut rig).unwrap().0, Kind::Welcome);
}

#[test]
fn a_flood_of_handshakes_gets_its_share_and_no_more() {
    let mut rig = rig();
    let mut admitted = 0;
    for life in 100..400 {
        let unknown = |hello: &mut Hello| (hello.life, hello.client) = (life, [9; 16]);
        match challenged_drops(&mut rig, unknown) {
            Some(Reason::Client) => admitted += 1,
            dropped => assert_eq!(dropped, Some(Reason::Handshakes)),
        }
        reply(&mut rig);
    }
    assert_eq!(admitted, 16, "no time passes");
    assert_eq!(rig.read(1, 0, 512), [0; 512]);
}

#[test]
fn a_flood_of_one_station_leaves_handshakes_to_the_others() {
    let mut rig = Rig::new(ClientOptions::default(), ServerOptions::default());
    let stranger = Peer(666);
    let drops = |rig: &mut Rig, frame: &[u8]| {
        let before = rig.host_counts().dropped(Reason::Handshakes);
        rig.host_receives(stranger, frame);
        rig.host_counts().dropped(Reason::Handshakes) > before
    };
    for life in 100..400 {
        // It has shown its address, and is no client.
        let unknown = |hello: &mut Hello| (hello.life, hello.client) = (life, [9; 16]);
        drops(&mut rig, &hello(unknown));
        let (_, frame) = reply(&mut rig).unwrap();
        let challenge = Greeting::decode(frame[30..].first_chunk().unwrap());
        let cookie = (challenge.challenged_ns, challenge.cookie);
        let is_dropped = drops(&mut rig, &hello_with(cookie, unknown));
        assert_eq!(is_dropped, life >= 113, "HELLO {life}");
        rig.poll_host();
        rig.to_client.frames.clear();
    }
    // A client without a session gets one meanwhile.
    rig.run_until(Nanos::from_millis(5), |rig| rig.client.is_connected());
    assert!(rig.client.is_connected());
}

#[test]
fn the_setup_of_a_host_shows_no_secret() {
    let options = HostOptions { secret: [0x5ec3, 0x7e57_ab1e], ..HostOptions::default() };
    let shown = format!("{options:?} {options:#?}");
    assert!(shown.contains("handshake_every") && shown.contains("incarnation"), "{shown}");
    for word in options.secret {
        assert!(!shown.contains(&word.to_string()) && !shown.contains("secret"), "{shown}");
    }
}

#[test]
fn frames_of_other_stations_are_not_the_iohosts() {
    let mut rig = rig();
    rig.submit(1, request(Operation::Read, 0, 4096));
    rig.step();
    rig.poll_host();
    let answer = rig.to_client.frames.pop_back().unwrap();
    let mut port = SlicePort { wire: &mut rig.to_host, data: &mut rig.guest };
    let from = (rig.now, Peer(2));
    port.to_client(&mut rig.client, from, &mut Arrived::new(answer.clone()));
    assert_eq!(rig.client_counts().dropped(Reason::Peer), 1);
    assert_eq!(client_drops(&mut rig, &answer), None);
}

#[test]
fn an_ending_that_anyone_can_send_is_looked_into_and_not_believed() {
    let mut rig = rig();
    rig.step();
    let session = rig.host.session(0).unwrap().session();
    let of = |session| {
        let header = FrameHeader {
            version: VERSION,
            kind: Kind::Ending.code(),
            session,
            payload_bytes: Ending::BYTES as u16,
            ..FrameHeader::default()
        };
        let mut frame = header.encode().to_vec();
        frame.extend(Ending { code: ending::UNKNOWN_SESSION, ..Ending::default() }.encode());
        frame
    };
    rig.write(1, 0, &[1; 512]);
    assert_eq!(rig.wait(1), Ok(()));
    rig.client_receives(&of(session));
    assert!(rig.client.is_connected(), "the IOhost has been heard just now");
    rig.now = rig.now.after(Nanos::from_millis(100));
    for other in [0, session ^ 1 << 60, u64::MAX] {
        assert_eq!(client_drops(&mut rig, &of(other)), Some(Reason::Session));
        assert!(rig.client.is_connected(), "a stranger does not know the session's name");
    }
    rig.client_receives(&of(session));
    assert!(!rig.client.is_connected());
    assert_eq!(rig.read(2, 0, 512), [1; 512]);
}

#[test]
fn a_flood_of_forged_frames_costs_a_session_and_no_request() {
    let mut rig = rig();
    let frame = caught(&mut rig);
    for counter in 0..10_000 {
        let noise = with_body(&frame, 5_000 + counter, |body| body.sequence = counter as u32);
        rig.host_receives(Peer(9), &noise);
        rig.host_receives(Peer(8), &hello(|hello| hello.life = counter));
    }
    // The window is far ahead of the client now, as it cannot be with a seal.
    rig.holds = false;
    assert_eq!(rig.wait(1), Ok(()));
    assert_eq!(rig.read(2, 0, 4096), pattern(1, 4096));
}
