//! A client of an IOhost over UDP: the engine and the trust of a VMhost, and std's socket as the
//! link. It runs wherever Rust's std does, so it shows that a client and its IOhost may be machines
//! of different kinds (vRIO, section 5, "Heterogeneity").
//!
//! `remote_client IOHOST CLIENT DEVICE [INVITATION]` writes and reads the first blocks of a device
//! in rounds, until its standard input ends, and prints each session and each round.

use std::io::{Read as _, stdin};
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use sidecore_block::Operation;
use sidecore_trust::{ClientName, ClientTrust, Invitation};
use sidecore_units::Nanos;
use sidecore_vrio::slices::{Arrived, Buffers, SlicePort, Transmit};
use sidecore_vrio::wire::DEVICE_NAME_BYTES;
use sidecore_vrio::{Client, ClientOptions, Event, OnDisconnect, Peer, Request, VrioStats};

type Failure = Box<dyn std::error::Error>;

const HOST: Peer = Peer(1);
const BLOCK: u64 = 4096;
/// Blocks that are written in a round, by requests of one block.
const BLOCKS: u64 = 64;
/// A request of several segments, behind them.
const LONG: u64 = 64 << 10;
/// No receive waits for longer: standard input may have ended.
const TICK: Duration = Duration::from_millis(50);

/// Bytes that differ in each sector, block and round.
fn data(index: u64, round: u64, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at / 512 + at % 7 + index * 7 + round * 31 + 1) as u8).collect()
}

/// std's socket, as a link that has room for each frame.
struct Wire {
    socket: UdpSocket,
    host: SocketAddr,
    buffer: Vec<u8>,
    len: usize,
}

impl Transmit for Wire {
    fn buffer(&mut self, len_bytes: usize) -> Option<&mut [u8]> {
        self.len = len_bytes;
        self.buffer.resize(len_bytes.max(self.buffer.len()), 0);
        self.buffer.get_mut(..len_bytes)
    }

    fn commit(&mut self, _to: Peer) {
        // While the IOhost is away, the kernel refuses frames, which are lost.
        let _ = self.socket.send_to(&self.buffer[..self.len], self.host);
    }
}

struct Guest {
    started: Instant,
    client: Client<ClientTrust>,
    wire: Wire,
    data: Buffers,
    unanswered: usize,
    sessions: u32,
}

impl Guest {
    fn now(&self) -> Nanos {
        Nanos(self.started.elapsed().as_nanos() as u64 + 1)
    }

    /// Sends what is due, takes a frame if one arrives, and handles events.
    fn turn(&mut self) -> Result<(), Failure> {
        let now = self.now();
        let mut port = SlicePort { wire: &mut self.wire, data: &mut self.data };
        self.client.poll(now, &mut port);
        let due = Duration::from_nanos(self.client.deadline().since(now).0);
        let wait = due.clamp(Duration::from_micros(10), TICK);
        self.wire.socket.set_read_timeout(Some(wait))?;
        let mut frame = vec![0; 1 << 16];
        // An error says that the time is over, or that the IOhost is away.
        if let Ok((len, from)) = self.wire.socket.recv_from(&mut frame)
            && from == self.wire.host
        {
            frame.truncate(len);
            let now = self.now();
            let mut port = SlicePort { wire: &mut self.wire, data: &mut self.data };
            port.to_client(&mut self.client, (now, HOST), &mut Arrived::new(frame));
        }
        while let Some(event) = self.client.next_event() {
            match event {
                Event::Completed { tag, result } => {
                    result.map_err(|error| format!("request {tag} failed: {error}"))?;
                    self.unanswered -= 1;
                }
                Event::Connected => {
                    self.sessions += 1;
                    println!("session {}", self.sessions);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Carries requests out, all at once as far as the client takes them: the tags are theirs.
    fn all(&mut self, requests: &[Request]) -> Result<(), Failure> {
        for (tag, request) in (0..).zip(requests) {
            self.client.submit(tag, 0, *request)?;
            self.unanswered += 1;
        }
        while self.unanswered > 0 {
            self.turn()?;
        }
        Ok(())
    }

    /// Writes, flushes, reads and compares all blocks.
    fn round(&mut self, round: u64) -> Result<(), Failure> {
        let places: Vec<(u64, u64)> = (0..BLOCKS)
            .map(|index| (index * BLOCK, BLOCK))
            .chain([(BLOCKS * BLOCK, LONG)])
            .collect();
        let requests = |operation| {
            let request = |(offset_bytes, len_bytes): &(u64, u64)| Request {
                operation,
                offset_bytes: *offset_bytes,
                len_bytes: *len_bytes,
                fua: false,
            };
            places.iter().map(request).collect::<Vec<_>>()
        };
        for (index, (_, bytes)) in (0..).zip(&places) {
            let place = &mut self.data.bytes(index)[..*bytes as usize];
            place.copy_from_slice(&data(index, round, *bytes));
        }
        self.all(&requests(Operation::Write))?;
        self.all(&[Request::FLUSH])?;
        for index in 0..places.len() as u64 {
            self.data.bytes(index).fill(0xee);
        }
        self.all(&requests(Operation::Read))?;
        for (index, (_, bytes)) in (0..).zip(&places) {
            if self.data.bytes(index)[..*bytes as usize] != data(index, round, *bytes) {
                return Err(format!("block {index} of round {round} has other data").into());
            }
        }
        Ok(())
    }
}

/// True once standard input has ended.
fn watch_input() -> Arc<AtomicBool> {
    let ended = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&ended);
    std::thread::spawn(move || {
        let mut rest = Vec::new();
        let _ = stdin().read_to_end(&mut rest);
        flag.store(true, Ordering::Relaxed);
    });
    ended
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (host, name, device, invitation) = match arguments.as_slice() {
        [host, name, device] => (host, name, device, None),
        [host, name, device, invitation] => (host, name, device, Some(invitation)),
        _ => return Err("usage: remote_client IOHOST CLIENT DEVICE [INVITATION]".into()),
    };
    let trust = match invitation {
        Some(path) => ClientTrust::invited(&Invitation::read(Path::new(path))?),
        None => ClientTrust::off(),
    };
    let life = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_nanos() as u64;
    let options = ClientOptions {
        client: name.parse::<ClientName>()?.to_wire(),
        life,
        on_disconnect: OnDisconnect::Stall,
        ..ClientOptions::default()
    };
    let mut client = Client::new(options, HOST, trust, Arc::new(VrioStats::default()));
    let mut wanted = [0; DEVICE_NAME_BYTES];
    wanted
        .get_mut(..device.len())
        .ok_or("the name is too long")?
        .copy_from_slice(device.as_bytes());
    client.open(&wanted);
    let host: SocketAddr = host.parse()?;
    let socket = UdpSocket::bind(if host.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    let wire = Wire { socket, host, buffer: Vec::new(), len: 0 };
    let (data, started) = (Buffers::default(), Instant::now());
    let mut guest = Guest { started, client, wire, data, unanswered: 0, sessions: 0 };
    let ended = watch_input();
    let mut rounds = 0;
    while !ended.load(Ordering::Relaxed) {
        rounds += 1;
        guest.round(rounds)?;
        println!("round {rounds}");
    }
    let now = guest.now();
    let mut port = SlicePort { wire: &mut guest.wire, data: &mut guest.data };
    guest.client.end(now, &mut port);
    Ok(())
}
