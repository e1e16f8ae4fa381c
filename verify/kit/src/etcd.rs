//! A cluster of etcd on the loopback interface of a network namespace.

mod scattered;

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::certificates::Certificates;
use crate::namespace::Namespace;
use crate::process::Process;
use crate::wait;

pub use scattered::Scattered;

const MEMBERS: u16 = 3;
const LOCALHOST: &str = "127.0.0.1";
const CLIENT_PORT: u16 = 2379;
const PEER_PORT: u16 = 2479;
/// Without TLS, for the tests themselves.
const PLAIN_PORT: u16 = 2579;
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
        Self::start_with(namespace, token, None)
    }

    /// Starts members with TLS, which have a certificate of this name, and clients need one.
    ///
    /// # Errors
    /// Those of [`start`](Self::start).
    pub fn start_secure(
        namespace: &Namespace,
        token: &str,
        certificates: &Certificates,
        name: &str,
    ) -> io::Result<Self> {
        Self::start_with(namespace, token, Some((certificates, name)))
    }

    fn start_with(
        namespace: &Namespace,
        token: &str,
        secure: Option<(&Certificates, &str)>,
    ) -> io::Result<Self> {
        namespace.ip("link set lo up")?;
        Self::start_in(namespace, TempDir::new_in("/dev/shm")?, token, secure)
    }

    fn start_in(
        namespace: &Namespace,
        directory: TempDir,
        token: &str,
        secure: Option<(&Certificates, &str)>,
    ) -> io::Result<Self> {
        let cluster = initial_cluster();
        let start = |index| {
            let (peer, cluster) = (url(PEER_PORT, index), (&*cluster, token));
            let mut command = member(namespace, directory.path(), (index, &peer), cluster)?;
            listen(&mut command, index, secure);
            Process::start(&mut command)
        };
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

    /// The endpoints of members with TLS, at an address of 127.0.0.0/8.
    #[must_use]
    pub fn secure_endpoints_at(address: &str) -> String {
        Self::endpoints_at(address).replace("http:", "https:")
    }

    /// Lets none but users in, of members that were started with TLS: one with this password, which
    /// has the keys of Sidecore.
    ///
    /// # Panics
    /// etcd refuses it, or does not answer.
    pub fn have_user(namespace: &Namespace, name: &str, password: &str) {
        // "/sidecore/" and its end.
        let keys =
            r#"{"permType":"READWRITE","key":"L3NpZGVjb3JlLw==","range_end":"L3NpZGVjb3JlMA=="}"#;
        for (method, body) in [
            ("user/add", r#"{"name":"root","password":"root"}"#.to_owned()),
            ("role/add", r#"{"name":"root"}"#.to_owned()),
            ("user/grant", r#"{"user":"root","role":"root"}"#.to_owned()),
            ("user/add", format!(r#"{{"name":"{name}","password":"{password}"}}"#)),
            ("role/add", r#"{"name":"sidecore"}"#.to_owned()),
            ("role/grant", format!(r#"{{"name":"sidecore","perm":{keys}}}"#)),
            ("user/grant", format!(r#"{{"user":"{name}","role":"sidecore"}}"#)),
            ("enable", "{}".to_owned()),
        ] {
            wait::succeed(ELECTION, || manage(namespace, method, &body, ""));
        }
    }

    /// Gives a user another password. Its tokens end.
    ///
    /// # Panics
    /// etcd refuses it, or does not answer.
    pub fn set_password(namespace: &Namespace, name: &str, password: &str) {
        let root = r#"{"name":"root","password":"root"}"#;
        let body = format!(r#"{{"name":"{name}","password":"{password}"}}"#);
        wait::succeed(ELECTION, || {
            let answer = manage(namespace, "authenticate", root, "")?;
            let token = field(&answer, "token").ok_or("no token")?;
            manage(namespace, "user/changepw", &body, &format!("Authorization: {token}\r\n"))
        });
    }

    /// Saves the cluster's contents in a file.
    ///
    /// # Errors
    /// etcdctl is not installed, or etcd's.
    pub fn back_up(&self, namespace: &Namespace, file: &Path) -> io::Result<()> {
        etcdctl(namespace, &["--endpoints", &url(CLIENT_PORT, 0), "snapshot", "save"], file)
    }

    /// Deletes all keys that begin so.
    ///
    /// # Errors
    /// etcdctl is not installed, or etcd's.
    pub fn delete(&self, namespace: &Namespace, keys: &str) -> io::Result<()> {
        let words = ["--endpoints", &url(CLIENT_PORT, 0), "del", "--prefix"];
        etcdctl(namespace, &words, keys.as_ref())
    }

    /// Ends all members without notice, and starts others at their addresses with the contents of
    /// a backup. With the token of before, they are the cluster of before to all clients.
    ///
    /// # Errors
    /// etcdctl's.
    pub fn restore(self, namespace: &Namespace, (file, token): (&Path, &str)) -> io::Result<Self> {
        drop(self.members);
        let directory = TempDir::new_in("/dev/shm")?;
        let cluster = initial_cluster();
        for index in 0..MEMBERS {
            let (name, peer) = (format!("m{index}"), url(PEER_PORT, index));
            let data = directory.path().join(&name);
            let mut words = vec!["snapshot", "restore", "--name", &name, "--data-dir"];
            words.extend([data.to_str().unwrap_or_default(), "--initial-cluster", &cluster]);
            words.extend(["--initial-advertise-peer-urls", &peer]);
            words.extend(["--initial-cluster-token", token]);
            etcdctl(namespace, &words, file)?;
        }
        Self::start_in(namespace, directory, token, None)
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
        leader(namespace, |index| (LOCALHOST.to_owned(), CLIENT_PORT + index))
    }
}

/// The leader with the newest term, and the term, of members that clients reach there.
fn leader(namespace: &Namespace, address: impl Fn(u16) -> (String, u16)) -> Option<(u16, u64)> {
    let leads = |index| {
        let status = status(namespace, &address(index)).ok()?;
        let [leader, member, term] =
            ["leader", "member_id", "raft_term"].map(|name| number(&status, name));
        (leader? == member?).then_some((index, term?))
    };
    (0..MEMBERS).filter_map(leads).max_by_key(|(_, term)| *term)
}

/// The members of a cluster, as etcd's command line takes them.
fn initial_cluster() -> String {
    let member = |index| format!("m{index}={}", url(PEER_PORT, index));
    (0..MEMBERS).map(member).collect::<Vec<_>>().join(",")
}

/// Runs etcdctl with these words and a file.
fn etcdctl(namespace: &Namespace, words: &[&str], file: &Path) -> io::Result<()> {
    let output = namespace.command("etcdctl".as_ref()).args(words).arg(file).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("etcdctl {} failed: {}", words.join(" "), said.trim())))
}

/// A member's answer about its state. One that is stopped does not answer.
fn status(namespace: &Namespace, address: &(String, u16)) -> io::Result<String> {
    let request = ("maintenance/status", "{}", "");
    ask(namespace, address, request, Duration::from_millis(200))
}

/// The answer about users, of a member with TLS. It fails while the cluster has no leader; a user
/// that exists already is none of its faults.
fn manage(namespace: &Namespace, method: &str, body: &str, header: &str) -> Result<String, String> {
    let request = (&*format!("auth/{method}"), body, header);
    match ask(namespace, &(LOCALHOST.to_owned(), PLAIN_PORT), request, ELECTION) {
        Ok(answer) if answer.contains("\"header\"") || answer.contains("already") => Ok(answer),
        Ok(answer) => Err(format!("{method}: {answer}")),
        Err(error) => Err(format!("{method}: {error}")),
    }
}

/// The answer to a method with a body and further headers, at an address without TLS.
fn ask(
    namespace: &Namespace,
    (host, port): &(String, u16),
    (method, body, headers): (&str, &str, &str),
    patience: Duration,
) -> io::Result<String> {
    let ask = || -> io::Result<String> {
        let mut stream = TcpStream::connect((host.as_str(), *port))?;
        stream.set_read_timeout(Some(patience))?;
        let request = format!(
            "POST /v3/{method} HTTP/1.0\r\nContent-Length: {}\r\n{headers}\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes())?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    namespace.within(ask)?
}

/// A number of an answer, which is a string in JSON.
fn number(answer: &str, name: &str) -> Option<u64> {
    field(answer, name)?.parse().ok()
}

/// A string of an answer.
fn field<'a>(answer: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = answer.split_once(&format!("\"{name}\":\""))?;
    Some(rest.split_once('"')?.0)
}

fn url(port: u16, index: u16) -> String {
    format!("http://127.0.0.1:{}", port + index)
}

fn member(
    namespace: &Namespace,
    directory: &Path,
    (index, peer): (u16, &str),
    (cluster, token): (&str, &str),
) -> io::Result<Command> {
    let name = format!("m{index}");
    let mut command = namespace.command("etcd".as_ref());
    command.args(["--name", &name, "--data-dir"]).arg(directory.join(&name));
    command.args(["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]);
    command.args(["--initial-cluster", cluster, "--initial-cluster-token", token]);
    command.args(["--heartbeat-interval", "100", "--election-timeout", "1000"]);
    let log = File::create(directory.join(format!("{name}.log")))?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    Ok(command)
}

/// Lets a member listen for clients, by TLS if there are certificates.
fn listen(command: &mut Command, index: u16, secure: Option<(&Certificates, &str)>) {
    let (scheme, own) =
        if secure.is_some() { ("https", PLAIN_PORT) } else { ("http", CLIENT_PORT) };
    let mut all = format!("{scheme}://0.0.0.0:{}", CLIENT_PORT + index);
    if let Some((certificates, name)) = secure {
        all.push_str(&format!(",{}", url(PLAIN_PORT, index)));
        let (certificate, key) = certificates.pair(name);
        command.args(["--client-cert-auth", "--trusted-ca-file"]).arg(certificates.ca());
        command.arg("--cert-file").arg(certificate).arg("--key-file").arg(key);
    }
    let advertised = url(own, index);
    command.args(["--listen-client-urls", &all, "--advertise-client-urls", &advertised]);
}
