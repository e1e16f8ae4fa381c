//! The way to a session, in both directions: strangers and clients that greet an IOhost in any
//! way, and an IOhost that sends a client any greetings and control messages. The IOhost does no
//! more handshakes than it has time for, sends no WELCOME to a station that has not shown its
//! address, and serves an honest client afterwards. The client gets through to an honest IOhost
//! afterwards, whatever the hostile one has told it.
//!
//! The input is a side (1 byte) and steps, whose numbers are those of `Input`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sidecore_block::Operation;
use sidecore_fuzz::Input;
use sidecore_fuzz::vrio::{
    Buffers, CLIENT, HOST, INCARNATION, Requests, SESSION, Wire, client, converse, device,
    greeting, host, part, write_frame,
};
use sidecore_units::Nanos;
use sidecore_vrio::handshake::{HostHandshake, code};
use sidecore_vrio::port::Plain;
use sidecore_vrio::slices::{Arrived, SlicePort};
use sidecore_vrio::wire::{
    DeviceEntry, Ending, Greeting, Hello, Kind, MIN_FRAME_BYTES, Pong, VERSION, Welcome,
};
use sidecore_vrio::{Client, HostOptions, Peer, Request, ServerOptions};

const BURST: u32 = 4;
const LIST_MAX: usize = 256;
/// Steps of an input: more show nothing new.
const STEPS: usize = 200;

/// No encryption, and a count of the handshakes.
#[derive(Default)]
struct Counted {
    opened: u64,
}

impl HostHandshake for Counted {
    type Seal = Plain;
    type Pending = ();

    fn hello(&mut self, code: u8, message: &[u8]) -> Option<(Hello, ())> {
        self.opened += 1;
        COUNT.with(|count| count.set(self.opened));
        HostHandshake::hello(&mut Plain, code, message)
    }

    fn welcome(
        &mut self,
        pending: (),
        fields: &Welcome,
        message: &mut [u8],
    ) -> Option<(usize, Plain)> {
        HostHandshake::welcome(&mut Plain, pending, fields, message)
    }
}

thread_local! {
    static COUNT: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// A greeting of any kind in a frame of the smallest size; the message may be said to be longer.
fn frame(kind: Kind, clear: Greeting, message: &[u8], claimed: u64) -> Vec<u8> {
    let mut payload = greeting(clear, message);
    if claimed > 0 {
        let clear = Greeting { message_bytes: claimed as u16, handshake: code::PLAIN, ..clear };
        payload[..Greeting::BYTES].copy_from_slice(&clear.encode());
    }
    write_frame(kind, (0, 0, INCARNATION), 0, &payload)
}

/// A HELLO as the input says, and the cookie that it shows, which is one of `cookies`.
fn any_hello(
    step: u8,
    now: Nanos,
    cookies: &[(u64, u64)],
    input: &mut Input<'_>,
) -> (Vec<u8>, u64) {
    let known = [1, 2, u64::from(MIN_FRAME_BYTES), now.0];
    let mut number = || input.number(&known).unwrap_or(1);
    let (life, wanted) = (number() % 4, number());
    let (challenged_ns, cookie) = cookies[number() as usize % cookies.len()];
    let hello = Hello {
        client: if step & 8 == 0 { CLIENT } else { [9; 16] },
        life: if step & 16 == 0 { life } else { number() },
        number: wanted,
        frame_bytes: if step & 32 == 0 { MIN_FRAME_BYTES } else { number() as u32 },
        receive_frames: number() as u32,
        slots: number() as u16,
        queue: (number() % 2) as u8,
        version_min: VERSION,
        version_max: if step & 64 == 0 { VERSION } else { number() as u8 },
        features: number(),
        cookie: if step & 4 == 0 { cookie } else { number() },
    };
    let clear = Greeting { life, number: wanted, challenged_ns, cookie, ..Greeting::default() };
    let claimed = if step & 128 == 0 { 0 } else { number() };
    (frame(Kind::Hello, clear, &hello.encode(), claimed), cookie)
}

/// Greets an IOhost as the input says.
fn greet_host(input: &mut Input<'_>) {
    let server = ServerOptions { slots: 8, ..ServerOptions::default() };
    let options = HostOptions {
        incarnation: INCARNATION,
        handshake_burst: BURST,
        server,
        ..HostOptions::default()
    };
    COUNT.with(|count| count.set(0));
    let mut host = host(options, Counted::default(), Nanos(1), &[device(0)]);
    let (mut wire, mut buffers) = (Wire::default(), Buffers::default());
    let mut port = SlicePort { wire: &mut wire, data: &mut buffers };
    let begin = Nanos::from_millis(1_000);
    let mut now = begin;
    let mut cookies = vec![(0, 0)];
    for _ in 0..STEPS {
        let Some(step) = input.byte() else { break };
        now = now.after(Nanos::from_micros(input.number(&[1_000_000]).unwrap_or(0) % 10_000_000));
        let from = Peer(u64::from(step % 3));
        let (hello, cookie) = any_hello(step, now, &cookies, input);
        port.to_host(&mut host, (now, from), &mut Arrived::new(hello));
        port.wire.room = 64;
        host.poll(now, &mut port);
        for sent in port.wire.take() {
            assert!(sent.len() <= MIN_FRAME_BYTES as usize, "more than the path has shown");
            match Kind::from_code(sent[1]) {
                Kind::Challenge => {
                    let challenge = Greeting::decode(part(&sent, 0));
                    cookies.push((challenge.challenged_ns, challenge.cookie));
                }
                Kind::Welcome => assert!(cookie != 0, "without its address"),
                _ => {}
            }
        }
        let time = 1 + now.since(begin).0 / HostOptions::default().handshake_every.0;
        // A station that is proved has its own share besides.
        let limit = (u64::from(BURST) + time) * 2 + 3;
        assert!(COUNT.with(std::cell::Cell::get) <= limit, "too many handshakes");
    }
    // An honest client of a later life is served.
    let mut client = client(99);
    for _ in 0..100 {
        now = now.after(Nanos::from_millis(50));
        converse(&mut client, &mut host, now, &mut port);
        if client.is_connected() {
            return;
        }
    }
    panic!("an honest client gets no session");
}

/// The session that a client believes in.
#[derive(Clone, Copy, Default)]
struct Believed {
    session: u64,
    incarnation: u64,
    counter: u64,
}

/// Numbers that mean something to a client.
fn known(now: Nanos, wanted: &Hello, believed: &Believed) -> [u64; 8] {
    [
        wanted.life,
        wanted.number,
        wanted.frame_bytes.into(),
        wanted.slots.into(),
        SESSION,
        INCARNATION,
        now.0,
        believed.session,
    ]
}

/// A frame outside of sessions that seems to answer the client's HELLO.
fn any_greeting(
    step: u8,
    (now, wanted): (Nanos, &Hello),
    believed: &mut Believed,
    input: &mut Input<'_>,
) -> Vec<u8> {
    let known = known(now, wanted, believed);
    let mut number = || input.number(&known).unwrap_or(0);
    let Hello { life, number: session_number, .. } = *wanted;
    let clear = Greeting { life, number: session_number, ..Greeting::default() };
    match step % 8 {
        0 => {
            let clear = Greeting { challenged_ns: number(), cookie: number(), ..clear };
            write_frame(Kind::Challenge, (0, 0, INCARNATION), 0, &clear.encode())
        }
        1 => {
            let welcome = Welcome {
                life,
                number: session_number,
                session: number(),
                incarnation: if step & 16 == 0 { INCARNATION } else { number() },
                features: if step & 32 == 0 { 0 } else { number() },
                frame_bytes: if step & 64 == 0 { wanted.frame_bytes } else { number() as u32 },
                devices_version: number() as u32,
                slots: number() as u16,
                slot_limit: number() as u16,
                version: VERSION,
                queue: 0,
            };
            let (session, incarnation) = (welcome.session, welcome.incarnation);
            *believed = Believed { session, incarnation, counter: 0 };
            let claimed = if step & 8 == 0 { 0 } else { number() };
            frame(Kind::Welcome, clear, &welcome.encode(), claimed)
        }
        _ => {
            let ending = Ending { life, number: session_number, code: number() as u16 };
            write_frame(Kind::Ending, (0, 0, INCARNATION), 0, &ending.encode())
        }
    }
}

/// A control message of the session.
fn any_message(
    step: u8,
    (now, wanted): (Nanos, &Hello),
    believed: &mut Believed,
    input: &mut Input<'_>,
) -> Vec<u8> {
    let known = known(now, wanted, believed);
    let mut number = || input.number(&known).unwrap_or(0);
    believed.counter += 1 + number() % 3;
    let Believed { session, incarnation, counter } = *believed;
    let name = (session, counter, incarnation);
    match step % 8 {
        6 => {
            let pong = Pong {
                sent_at: number(),
                held_ns: number() as u32,
                devices_version: number() as u32,
                slot_limit: number() as u16,
                acknowledge_ns: number() as u32,
            };
            write_frame(Kind::Pong, name, step & 8, &pong.encode())
        }
        7 => {
            let ending = Ending { code: number() as u16, ..Ending::default() };
            write_frame(Kind::Ending, name, 0, &ending.encode())
        }
        kind => {
            let entry = DeviceEntry {
                device: number() as u16,
                index: number() as u16,
                count: number() as u16,
                version: number() as u32,
                flags: number() as u32,
                epoch: number(),
                capacity_bytes: number(),
                block_bytes: if step & 16 == 0 { 512 } else { number() as u32 },
                ..device(0)
            };
            let kind = if kind == 3 { Kind::Device } else { Kind::Attached };
            write_frame(kind, name, 0, &entry.encode())
        }
    }
}

/// Sends a client the frames of the input.
fn greet_client(input: &mut Input<'_>) {
    let mut client = client(1);
    let (mut wire, mut buffers) = (Wire::default(), Buffers::default());
    let mut now = Nanos(1);
    let mut wanted = Hello::default();
    let mut believed = Believed::default();
    let mut requests = Requests::default();
    for _ in 0..STEPS {
        let Some(step) = input.byte() else { break };
        now =
            now.after(Nanos::from_micros(input.number(&[400_000, 800_000]).unwrap_or(0) % 900_000));
        let operation = if step & 128 == 0 { Operation::Read } else { Operation::Write };
        let request = Request { operation, offset_bytes: 0, len_bytes: 4096, fua: false };
        requests.submit(&mut client, request);
        let mut port = SlicePort { wire: &mut wire, data: &mut buffers };
        port.wire.room = 16;
        client.poll(now, &mut port);
        for frame in port.wire.take() {
            assert!(frame.len() <= MIN_FRAME_BYTES as usize);
            if frame[1] == Kind::Hello.code() {
                wanted = Hello::decode(part(&frame, Greeting::BYTES));
            }
        }
        let arrived = if step % 8 < 3 {
            any_greeting(step, (now, &wanted), &mut believed, input)
        } else {
            any_message(step, (now, &wanted), &mut believed, input)
        };
        port.to_client(&mut client, (now, HOST), &mut Arrived::new(arrived));
        requests.complete(&mut client);
        assert!(client.listed().len() <= LIST_MAX);
        if let Some(entry) = client.device(0) {
            assert!(entry.block_bytes.is_power_of_two() && entry.block_bytes <= 4096);
            assert!(entry.capacity_bytes.is_multiple_of(entry.block_bytes.into()));
        }
        let _ = client.deadline();
    }
    honest(&mut client, now, (&mut wire, &mut buffers));
}

/// An honest IOhost takes the place of the hostile one.
fn honest(client: &mut Client<Plain>, mut now: Nanos, (wire, buffers): (&mut Wire, &mut Buffers)) {
    let options = HostOptions { incarnation: 5, secret: [3, 4], ..HostOptions::default() };
    let mut host = host(options, Plain, now, &[device(0)]);
    let mut port = SlicePort { wire, data: buffers };
    for _ in 0..400 {
        now = now.after(Nanos::from_millis(20));
        converse(client, &mut host, now, &mut port);
        while client.next_event().is_some() {}
        if client.is_connected() && client.incarnation() == 5 {
            return;
        }
    }
    panic!("the client does not find an honest IOhost: {client:?}");
}

fuzz_target!(|input: &[u8]| {
    let Some((side, input)) = input.split_first() else { return };
    let mut input = Input::new(input);
    if side & 1 == 0 {
        greet_host(&mut input);
    } else {
        greet_client(&mut input);
    }
});
