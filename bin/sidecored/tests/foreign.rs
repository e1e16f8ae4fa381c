//! An IOhost of this machine, and a client that is a program of another kind of machine, run by
//! QEMU.

mod common;

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use sidecore_kit::namespace::Namespace;
use sidecore_kit::process::Process;
use sidecore_skip::skip;
use tempfile::TempDir;

use common::Daemon;
use common::remote::data;

const SOON: Duration = Duration::from_secs(60);
const DISK_BYTES: u64 = 1 << 20;
const ADDRESS: &str = "127.0.0.1:34997";
/// The client's blocks, and the size of its last one.
const BLOCKS: u64 = 64;
const LONG: u32 = 64 << 10;

fn iohost(place: &Namespace, shared: &Path, keys: &str) -> Daemon {
    let config = format!(
        "control_socket = \"control.sock\"\nkey_directory = \"{0}/keys\"\n[[sidecore]]\nname = \
         \"io0\"\n[[link]]\nname = \"wire\"\ntype = \"udp\"\n\
         [[client]]\nname = \"vmhost\"\nlinks = [\"wire\"]\n{keys}\
         [[store]]\nname = \"disk\"\ntype = \"file\"\npath = \"{0}/disk.img\"\ndirect = false\n\
         [[device]]\nname = \"disk1\"\nfront_end = \"vrio\"\nclient = \"vmhost\"\nstore = \
         \"disk\"\n",
        shared.display()
    );
    Daemon::start_in(place, tempfile::tempdir().unwrap(), &config)
}

/// The running client.
struct Client {
    process: Process,
    lines: BufReader<ChildStdout>,
    input: Option<ChildStdin>,
    rounds: u64,
    sessions: u64,
}

impl Client {
    /// Starts the program that `cargo xtask foreign` names, with its emulator.
    fn start(place: &Namespace, invitation: Option<&Path>) -> Self {
        let named = ["SIDECORE_FOREIGN_EMULATOR", "SIDECORE_FOREIGN_CLIENT"].map(std::env::var);
        let [Ok(emulator), Ok(program)] = named else {
            panic!("the client is built by `cargo xtask foreign`: run that");
        };
        let mut words = emulator.split_whitespace();
        let mut command = place.command(words.next().unwrap().as_ref());
        command.args(words).args([&program, ADDRESS, "vmhost", "disk1"]);
        command.args(invitation.map(Path::as_os_str).into_iter().collect::<Vec<&OsStr>>());
        let mut process =
            Process::start(command.stdin(Stdio::piped()).stdout(Stdio::piped())).unwrap();
        let (lines, input) = (process.stdout.take().unwrap(), process.stdin.take());
        Self { process, lines: BufReader::new(lines), input, rounds: 0, sessions: 0 }
    }

    /// Reads lines until a round has ended; false at the end of the output. Remembers the numbers
    /// of the last round and of the last session.
    fn next_round(&mut self) -> bool {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                return false;
            }
            let (word, number) = line.trim().split_once(' ').unwrap();
            let number = number.parse().unwrap();
            match word {
                "session" => self.sessions = number,
                "round" => {
                    self.rounds = number;
                    return true;
                }
                _ => panic!("the client says {line}"),
            }
        }
    }

    /// Has the client end after its round.
    fn end(&mut self) {
        self.input = None;
        while self.next_round() {}
        let status = self.process.wait_for_end(SOON).unwrap().expect("the client ends");
        assert!(status.success(), "{status}");
    }
}

/// A client uses a device of an IOhost that is killed once.
fn serves(is_sealed: bool) {
    let Ok(place) = Namespace::new() else {
        return skip("no network namespace can be made (CAP_SYS_ADMIN)");
    };
    place.ip("link set lo up").unwrap();
    let shared = TempDir::new().unwrap();
    let disk = shared.path().join("disk.img");
    std::fs::File::create(&disk).unwrap().set_len(DISK_BYTES).unwrap();
    let keys = if is_sealed { "" } else { "encryption = \"off\"\n" };
    let mut killed = iohost(&place, shared.path(), keys);
    let invitation = is_sealed.then(|| {
        let path = shared.path().join("invitation");
        std::fs::write(&path, killed.client().invite("vmhost").unwrap().invitation).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        path
    });
    let mut client = Client::start(&place, invitation.as_deref());
    assert!(client.next_round());
    killed.child.signal(Signal::KILL).unwrap();
    killed.child.wait_for_end(SOON).unwrap();
    let killed_in = client.sessions;
    // The client is in a round now, which the next IOhost ends.
    let mut host = iohost(&place, shared.path(), keys);
    client.end();
    assert!(client.sessions > killed_in, "{} sessions", client.sessions);
    let round = client.rounds;
    let file = std::fs::read(&disk).unwrap();
    for index in 0..BLOCKS {
        let at = index as usize * 4096;
        assert!(file[at..][..4096] == data(index, round, 4096), "block {index}, round {round}");
    }
    let last = &file[BLOCKS as usize * 4096..][..LONG as usize];
    assert!(last == data(BLOCKS, round, LONG), "round {round}");
    host.signal(Signal::TERM);
    let (status, complaint) = host.wait();
    assert!(status.success(), "{complaint}");
}

#[test]
#[ignore = "cargo xtask foreign runs it"]
fn a_foreign_client_uses_a_disk_and_survives_its_iohost() {
    serves(false);
}

#[test]
#[ignore = "cargo xtask foreign runs it"]
fn a_foreign_client_uses_a_sealed_disk_and_survives_its_iohost() {
    serves(true);
}
