//! A cluster of etcd on the loopback interface of a network namespace.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::namespace::Namespace;
use crate::process::Process;
use crate::wait;

const MEMBERS: u16 = 3;
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2479;
/// The time in which another member is elected. Members elect after a second of silence, and
/// again after each vote that is split.
const ELECTION: Duration = Duration::from_secs(60);

/// Three members, which end with this value.
#[derive(Debug)]
pub struct Etcd {
    members: Vec<Process>,
    /// In memory, because members flush often.
    directory: TempDir,
    deposes: Mutex<()>,
}

impl Etcd {
    /// Starts the members. Clusters with different tokens have different numbers.
    ///
    /// # Errors
    /// etcd is not installed, or the kernel's.
    pub fn start(namespace: &Namespace, token: &str) -> io::Result<Self> {
        namespace.ip("link set lo up")?;
        let directory = TempDir::new_in("/dev/shm")?;
        let names: Vec<String> =
            (0..MEMBERS).map(|i| format!("m{i}={}", url(PEER_PORT, i))).collect();
        let start = |index| member(namespace, directory.path(), index, (&names.join(","), token));
        let members = (0..MEMBERS).map(start).collect::<io::Result<_>>()?;
        Ok(Self { members, directory, deposes: Mutex::new(()) })
    }

    /// The members' endpoints, as a command line takes them.
    #[must_use]
    pub fn endpoints() -> String {
        Self::endpoints_at("127.0.0.1")
    }

    /// The members' endpoints at an address of 127.0.0.0/8, which [`cut`](Self::cut) cuts.
    #[must_use]
    pub fn endpoints_at(address: &str) -> String {
        let urls: Vec<String> =
            (0..MEMBERS).map(|index| format!("http://{address}:{}", CLIENT_PORT + index)).collect();
        urls.join(",")
    }

    /// Drops all packets to and from an address of the members, until it is healed.
    ///
    /// # Errors
    /// ip's: it is cut already.
    pub fn cut(namespace: &Namespace, address: &str) -> io::Result<()> {
        namespace.ip(&format!("route add blackhole {address}/32 table local")).map(drop)
    }

    /// Lets packets pass again after [`cut`](Self::cut).
    ///
    /// # Errors
    /// ip's: it is not cut.
    pub fn heal(namespace: &Namespace, address: &str) -> io::Result<()> {
        namespace.ip(&format!("route del blackhole {address}/32 table local")).map(drop)
    }

    /// The directory of the members' data and logs.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Sends a signal to all members.
    ///
    /// # Panics
    /// A member has ended.
    pub fn signal(&self, signal: Signal) {
        self.members.iter().for_each(|member| member.signal(signal).unwrap());
    }

    /// Stops the leader until another member leads. Only one at a time is stopped so.
    ///
    /// # Panics
    /// No other member is elected.
    pub fn depose_leader(&self, namespace: &Namespace) {
        let _alone = self.deposes.lock().unwrap_or_else(PoisonError::into_inner);
        let (leader, term) = wait::succeed(ELECTION, || self.leader(namespace).ok_or("no leader"));
        let stopped = &self.members[usize::from(leader)];
        stopped.signal(Signal::STOP).unwrap();
        let is_deposed = || self.leader(namespace).is_some_and(|(_, newest)| newest > term);
        wait::until("another member is elected", ELECTION, is_deposed);
        stopped.signal(Signal::CONT).unwrap();
    }

    /// The leader with the newest term, and the term.
    fn leader(&self, namespace: &Namespace) -> Option<(u16, u64)> {
        let leads = |index| {
            let status = status(namespace, index).ok()?;
            let [leader, member, term] =
                ["leader", "member_id", "raft_term"].map(|name| number(&status, name));
            (leader? == member?).then_some((index, term?))
        };
        (0..MEMBERS).filter_map(leads).max_by_key(|(_, term)| *term)
    }
}

/// A member's answer about its state. One that is stopped does not answer.
fn status(namespace: &Namespace, index: u16) -> io::Result<String> {
    let ask = || -> io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", CLIENT_PORT + index))?;
        stream.set_read_timeout(Some(Duration::from_millis(200)))?;
        let request = "POST /v3/maintenance/status HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}";
        stream.write_all(request.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    namespace.within(ask)?
}

/// A number of an answer, which is a string in JSON.
fn number(answer: &str, name: &str) -> Option<u64> {
    let (_, rest) = answer.split_once(&format!("\"{name}\":\""))?;
    rest.split_once('"')?.0.parse().ok()
}

fn url(port: u16, index: u16) -> String {
    format!("http://127.0.0.1:{}", port + index)
}

fn member(
    namespace: &Namespace,
    directory: &Path,
    index: u16,
    (cluster, token): (&str, &str),
) -> io::Result<Process> {
    let (client, peer) = (url(CLIENT_PORT, index), url(PEER_PORT, index));
    let name = format!("m{index}");
    let mut command = namespace.command("etcd".as_ref());
    command.args(["--name", &name, "--data-dir"]).arg(directory.join(&name));
    let all = format!("http://0.0.0.0:{}", CLIENT_PORT + index);
    command.args(["--listen-client-urls", &all, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", cluster, "--initial-cluster-token", token]);
    command.args(["--heartbeat-interval", "100", "--election-timeout", "1000"]);
    let log = File::create(directory.join(format!("{name}.log")))?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    Process::start(&mut command)
}
