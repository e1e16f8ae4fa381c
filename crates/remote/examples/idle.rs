//! The CPU time of an IOhost with idle clients, of which each has a sidecore of its own:
//!
//!     cargo run --release -p sidecore-remote --example idle [memory|udp [CLIENTS [SECONDS]]]
//!
//! All are threads of this process, so that its CPU time is that of both sides, and of the kernel
//! as far as it runs on their time. UDP goes over the loopback interface.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sidecore_block::{Geometry, NullStore};
use sidecore_link::{
    Link, LinkAddress, LinkOptions, MemoryEnd, MemoryLink, MemoryOptions, UdpLink, UdpOptions,
};
use sidecore_linux::{Clock, peer_event};
use sidecore_reactor::IdleMode;
use sidecore_remote::client::{Iohost, Session, SessionOptions};
use sidecore_remote::export::{ClientShare, ClientSpec, Export, ExportError, ExportedDevice, Load};
use sidecore_sidecore::{Handle, SidecoreThread};
use sidecore_units::Nanos;
use sidecore_vrio::wire::DATA_HEADER_BYTES;
use sidecore_vrio::{ClientOptions, HostOptions, Plain};

const IDLE: IdleMode = IdleMode::Adaptive { spin: Nanos::from_micros(50) };
const PATIENCE: Duration = Duration::from_secs(60);

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The kind of the link.
enum Kind {
    Memory(tempfile::TempDir),
    Udp,
}

impl Kind {
    /// The IOhost's end, or a client's.
    fn open(&self, is_host: bool) -> Outcome<Box<dyn Link>> {
        let link = LinkOptions {
            receive_frames: 64,
            transmit_frames: 64,
            ..LinkOptions::new(DATA_HEADER_BYTES)
        };
        Ok(match self {
            Self::Memory(directory) => {
                let end = if is_host {
                    MemoryEnd::Listen { users: Vec::new(), clients: 128 }
                } else {
                    MemoryEnd::Connect
                };
                let path = directory.path().join("link.sock");
                let options = MemoryOptions { path, end, link, make_signal: peer_event };
                Box::new(MemoryLink::open_queues(&options, 1)?.remove(0))
            }
            Self::Udp => {
                let address = "127.0.0.1:0".parse()?;
                Box::new(UdpLink::open(&UdpOptions { address, link, coalesce: false })?)
            }
        })
    }
}

/// The name of a client for the wire.
fn name(number: usize) -> [u8; 16] {
    let mut name = [0; 16];
    for (to, from) in name.iter_mut().zip(format!("client{number}").bytes()) {
        *to = from;
    }
    name
}

/// The time that all threads of this process have run.
fn cpu_time() -> Outcome<Duration> {
    let mut sum_ns = 0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        sum_ns += text.split_whitespace().next().unwrap_or_default().parse::<u64>()?;
    }
    Ok(Duration::from_nanos(sum_ns))
}

/// Starts the IOhost's unit, which has a device for each client.
fn start_iohost(
    iohost: &SidecoreThread,
    link: Box<dyn Link>,
    clients: usize,
) -> Outcome<Handle<Export<Plain>>> {
    let load = Arc::new(Load::default());
    let export = iohost.sidecore().start(move |core| {
        let options = HostOptions { incarnation: 7, secret: [1, 2], ..HostOptions::default() };
        let mut export = Export::new(core, link, (options, Plain), &load, IDLE)?;
        for number in 0..clients {
            let id = export.add_client(&ClientSpec {
                name: format!("client{number}").into(),
                id: name(number),
                queues: 1,
                share: ClientShare::default(),
            })?;
            let store = NullStore::new(Geometry::new(1 << 30, 512));
            export.add_device(
                id,
                &ExportedDevice {
                    name: "disk".into(),
                    serial: String::new(),
                    store: Arc::new(store),
                    read_only: false,
                    write_cache: false,
                    epoch: 1,
                    tenure: Arc::default(),
                },
            )?;
        }
        Ok::<_, ExportError>(export)
    });
    export.map_err(|_| "the IOhost does not start".into())
}

/// Starts a client's unit, on a sidecore of its own.
fn start_client(
    clock: &Clock,
    link: Box<dyn Link>,
    number: usize,
    address: LinkAddress,
) -> Outcome<(SidecoreThread, Handle<Session<Plain>>)> {
    let thread = SidecoreThread::start(&format!("c{number}"), None, clock)?;
    let shared = Iohost::new("iohost")?;
    let options = SessionOptions {
        client: ClientOptions {
            client: name(number),
            life: 1 + number as u64,
            receive_frames: 64,
            replay_bytes: 1 << 20,
            ..ClientOptions::default()
        },
        address,
        idle: IDLE,
    };
    let session =
        thread.sidecore().start(move |core| Session::new(core, &shared, link, Plain, &options));
    Ok((thread, session.map_err(|_| "a client does not start")?))
}

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let kind = match arguments.next().as_deref() {
        Some("udp") => Kind::Udp,
        _ => Kind::Memory(tempfile::tempdir()?),
    };
    let clients: usize = arguments.next().map_or(Ok(100), |text| text.parse())?;
    let seconds: u64 = arguments.next().map_or(Ok(10), |text| text.parse())?;
    let clock = Clock::new();
    let iohost = SidecoreThread::start("iohost", None, &clock)?;
    let link = kind.open(true)?;
    let address = link.properties().address;
    let export = start_iohost(&iohost, link, clients)?;
    let mut sessions = Vec::new();
    for number in 0..clients {
        sessions.push(start_client(&clock, kind.open(false)?, number, address)?);
    }
    let begun = Instant::now();
    let connected = || {
        let status = export.ask(|export| export.status()).ok().flatten();
        status.map_or(0, |status| status.sessions.iter().filter(|it| it.session != 0).count())
    };
    while connected() < clients {
        if begun.elapsed() > PATIENCE {
            return Err(format!("{} of {clients} clients are connected", connected()).into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    // The round trips are told, and the first spins end.
    std::thread::sleep(Duration::from_secs(1));
    let before = (cpu_time()?, Instant::now());
    std::thread::sleep(Duration::from_secs(seconds));
    let (used, passed) = (cpu_time()?.saturating_sub(before.0), before.1.elapsed());
    println!(
        "{clients} idle clients and their IOhost: {:.2} % of a core over {:.1} s",
        100.0 * used.as_secs_f64() / passed.as_secs_f64(),
        passed.as_secs_f64()
    );
    if connected() < clients {
        return Err("a session was lost meanwhile".into());
    }
    // The threads end with the process; the socket's directory ends here.
    drop(kind);
    std::process::exit(0);
}
