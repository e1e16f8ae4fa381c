//! A client of the control API of a running daemon. Blocking, for command lines and tests.

mod mirrors;
mod schedules;
mod stages;
mod stream;
mod volumes;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sidecore_assembly::report::{
    DeviceReport, FirewallReport, LinkMove, RemoteReport, SidecoreReport, Stats, SwitchReport,
};
use sidecore_assembly::spec::RemoteKind;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use crate::api::{
    DEVICES_PATH, Devices, Invitation, LimitsOfPort, METRICS_PATH, NewDevice, PORTS_PATH,
    PortFaults, PortRules, REMOTE_PATH, SIDECORES_PATH, STATS_PATH, SWITCHES_PATH, Sidecores,
    Switches, ToLink,
};

/// The time limit of a request: a daemon that takes longer has a problem that waiting will not
/// solve.
const PATIENCE: Duration = Duration::from_secs(5);

/// The time limit of a request that may wait for a disk.
const DISK_PATIENCE: Duration = Duration::from_secs(120);

/// The time limit of a request that reads all of a disk's metadata.
const LONG_PATIENCE: Duration = Duration::from_secs(3600);

/// Larger than the answer of the largest daemon.
const ANSWER_MAX_BYTES: usize = 64 << 20;

/// The reason why a request failed. The messages name the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No process listens on the socket.
    #[error(
        "no sidecored is listening on {}; start one with `sidecored --config FILE`, or name its \
         `control_socket` with --socket",
        .0.display()
    )]
    NoDaemon(PathBuf),
    /// The socket's mode denies this user access.
    #[error(
        "no permission to talk to {}; run this as the user of sidecored, or as root",
        .0.display()
    )]
    NoPermission(PathBuf),
    /// A process listens and does not answer.
    #[error(
        "sidecored on {} did not answer within {} seconds; its log may say why",
        socket.display(),
        patience.as_secs()
    )]
    Silent {
        /// The path of the control socket.
        socket: PathBuf,
        /// The time limit of the request.
        patience: Duration,
    },
    /// The daemon refused the request.
    #[error("{why}")]
    Denied {
        /// The status code of HTTP.
        status: u16,
        /// The reason that the daemon gives.
        why: String,
    },
    /// The connection failed.
    #[error("talking to sidecored on {} failed: {error}", socket.display())]
    Failed {
        /// The path of the control socket.
        socket: PathBuf,
        /// The error of the connection.
        error: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file for an answer cannot be written.
    #[error("cannot write the file: {0}")]
    File(io::Error),
    /// The answering process does not have this API.
    #[error("{} answered {path} with {status}; is it the control socket of a sidecored of this \
             version?", socket.display())]
    Refused {
        /// The path of the control socket.
        socket: PathBuf,
        /// The path of the request.
        path: String,
        /// The status code of HTTP.
        status: u16,
    },
}

/// A client of one daemon. Each request has a connection of its own.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    runtime: tokio::runtime::Runtime,
}

impl Client {
    /// Makes a client of the daemon with this control socket.
    ///
    /// # Errors
    /// The event loop cannot be made.
    pub fn new(socket: &Path) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { socket: socket.to_owned(), runtime })
    }

    /// Returns all counters.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn stats(&self) -> Result<Stats, ClientError> {
        self.json(STATS_PATH)
    }

    /// Returns the disks.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn devices(&self) -> Result<Vec<DeviceReport>, ClientError> {
        self.json::<Devices>(DEVICES_PATH).map(|answer| answer.devices)
    }

    /// Returns the polling threads.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn sidecores(&self) -> Result<Vec<SidecoreReport>, ClientError> {
        self.json::<Sidecores>(SIDECORES_PATH).map(|answer| answer.sidecores)
    }

    /// Returns the links, the clients and the IOhosts.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn remote(&self) -> Result<RemoteReport, ClientError> {
        self.json(REMOTE_PATH)
    }

    /// Returns the switches with their ports and known addresses.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn switches(&self) -> Result<Vec<SwitchReport>, ClientError> {
        self.json::<Switches>(SWITCHES_PATH).map(|answer| answer.switches)
    }

    /// Returns the rules of a port's firewall, with their counters.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn rules(&self, port: &str) -> Result<FirewallReport, ClientError> {
        self.json(&port_path(port, "rules"))
    }

    /// Replaces the rules of a port's firewall, all at once.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn set_rules(&self, port: &str, rules: Vec<String>) -> Result<(), ClientError> {
        self.put(&port_path(port, "rules"), &PortRules { rules })
    }

    /// Changes the rate limits of a port.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn set_limits(&self, port: &str, limits: Vec<String>) -> Result<(), ClientError> {
        self.put(&port_path(port, "limits"), &LimitsOfPort { limits })
    }

    /// Changes the faults of a port's wire.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn set_faults(&self, port: &str, faults: &str) -> Result<(), ClientError> {
        self.put(&port_path(port, "faults"), &PortFaults { faults: faults.to_owned() })
    }

    fn put(&self, path: &str, body: &impl Serialize) -> Result<(), ClientError> {
        let body = serde_json::to_vec(body).map_err(|error| self.failed(error))?;
        self.ask(Method::PUT, path, Some(body), PATIENCE).map(drop)
    }

    /// Makes a key for a client of the daemon.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn invite(&self, client: &str) -> Result<Invitation, ClientError> {
        let path = format!("{REMOTE_PATH}/clients/{}/invite", escaped(client));
        self.parse(&self.ask(Method::POST, &path, None, PATIENCE)?)
    }

    /// Makes the daemon forget a client's key, and end its sessions.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn revoke(&self, client: &str) -> Result<(), ClientError> {
        let path = format!("{REMOTE_PATH}/clients/{}/revoke", escaped(client));
        self.ask(Method::POST, &path, None, PATIENCE).map(drop)
    }

    /// Makes the daemon let a client's requests wait, or take them again with `undo`. Waits until
    /// the requests in flight have ended.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn drain(&self, client: &str, undo: bool) -> Result<(), ClientError> {
        self.drain_part(RemoteKind::Client, client, undo)
    }

    /// Makes the daemon let new requests to an IOhost wait, or go on with `undo`. Waits until the
    /// other requests are answered, and the answered writes are flushed.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn drain_iohost(&self, iohost: &str, undo: bool) -> Result<(), ClientError> {
        self.drain_part(RemoteKind::Iohost, iohost, undo)
    }

    /// Makes the daemon move the sessions with an IOhost to this link, one of its two.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn move_iohost(&self, iohost: &str, link: &str) -> Result<LinkMove, ClientError> {
        let path = format!("{REMOTE_PATH}/iohosts/{}/move", escaped(iohost));
        self.post(&path, &ToLink { link: link.to_owned() }, DISK_PATIENCE)
    }

    fn drain_part(&self, kind: RemoteKind, name: &str, undo: bool) -> Result<(), ClientError> {
        let path = format!("{REMOTE_PATH}/{}s/{}/drain", kind.word(), escaped(name));
        let method = if undo { Method::DELETE } else { Method::POST };
        self.ask(method, &path, None, DISK_PATIENCE).map(drop)
    }

    /// Adds a link, a client or an IOhost, with the keys of its section in the configuration file.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn add_part(&self, kind: RemoteKind, keys: &impl Serialize) -> Result<(), ClientError> {
        let path = format!("{REMOTE_PATH}/{}s", kind.word());
        self.post_only(&path, keys, DISK_PATIENCE).map(drop)
    }

    /// Removes a link, a client or an IOhost.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn remove_part(&self, kind: RemoteKind, name: &str) -> Result<(), ClientError> {
        let path = format!("{REMOTE_PATH}/{}s/{}", kind.word(), escaped(name));
        self.ask(Method::DELETE, &path, None, DISK_PATIENCE).map(drop)
    }

    /// Returns all counters in Prometheus' text format; with `per_queue` those of each queue as
    /// well.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn metrics(&self, per_queue: bool) -> Result<String, ClientError> {
        let body = self.get(&format!("{METRICS_PATH}?per_queue={}", u8::from(per_queue)))?;
        String::from_utf8(body.into()).map_err(|error| self.failed(error))
    }

    /// Makes the daemon serve one more device.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn add_device(&self, device: &NewDevice) -> Result<DeviceReport, ClientError> {
        self.post(DEVICES_PATH, device, DISK_PATIENCE)
    }

    /// Makes the daemon stop serving a device. Waits until the device's requests are done.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn remove_device(&self, name: &str) -> Result<(), ClientError> {
        self.ask(Method::DELETE, &format!("{DEVICES_PATH}/{}", escaped(name)), None, DISK_PATIENCE)
            .map(drop)
    }

    /// Makes the daemon serve clients of a device although answered writes may be missing.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn accept_loss(&self, name: &str) -> Result<(), ClientError> {
        let path = format!("{DEVICES_PATH}/{}/accept-loss", escaped(name));
        self.ask(Method::POST, &path, None, PATIENCE).map(drop)
    }

    fn json<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.parse(&self.get(path)?)
    }

    fn parse<T: DeserializeOwned>(&self, body: &Bytes) -> Result<T, ClientError> {
        serde_json::from_slice(body).map_err(|error| self.failed(error))
    }

    fn get(&self, path: &str) -> Result<Bytes, ClientError> {
        self.ask(Method::GET, path, None, PATIENCE)
    }

    /// Posts `body`, and parses the answer.
    fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        patience: Duration,
    ) -> Result<T, ClientError> {
        self.parse(&self.post_only(path, body, patience)?)
    }

    /// Posts `body`, and expects no answer but success.
    fn post_only(
        &self,
        path: &str,
        body: &impl Serialize,
        patience: Duration,
    ) -> Result<Bytes, ClientError> {
        let body = serde_json::to_vec(body).map_err(|error| self.failed(error))?;
        self.ask(Method::POST, path, Some(body), patience)
    }

    fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
        patience: Duration,
    ) -> Result<Bytes, ClientError> {
        let request =
            async { tokio::time::timeout(patience, self.exchange(method, path, body)).await };
        let silent = || Err(ClientError::Silent { socket: self.socket.clone(), patience });
        self.runtime.block_on(request).unwrap_or_else(|_| silent())
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<Bytes, ClientError> {
        let (response, connection) = self.send(method, path, body).await?;
        let answer = self.answer(path, response).await;
        connection.abort();
        answer
    }

    /// Sends a request. Returns the head of its answer, and the task of its connection.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<(Response<Incoming>, JoinHandle<hyper::Result<()>>), ClientError> {
        let stream =
            UnixStream::connect(&self.socket).await.map_err(|error| match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                    ClientError::NoDaemon(self.socket.clone())
                }
                io::ErrorKind::PermissionDenied => ClientError::NoPermission(self.socket.clone()),
                _ => self.failed(error),
            })?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.failed(error))?;
        let connection = tokio::spawn(connection);
        let request =
            Request::builder().method(method).uri(path).header(hyper::header::HOST, "sidecored");
        let request = request.header(hyper::header::CONTENT_TYPE, "application/json");
        let request = request.body(Full::new(Bytes::from(body.unwrap_or_default())));
        let request = request.map_err(|error| self.failed(error))?;
        let response = sender.send_request(request).await.map_err(|error| self.failed(error))?;
        Ok((response, connection))
    }

    /// Returns the body of an answer, or the refusal that it is.
    async fn answer(&self, path: &str, response: Response<Incoming>) -> Result<Bytes, ClientError> {
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_MAX_BYTES).collect().await;
        let body = body
            .map(http_body_util::Collected::to_bytes)
            .map_err(|error| ClientError::Failed { socket: self.socket.clone(), error })?;
        if status.is_success() {
            return Ok(body);
        }
        Err(match serde_json::from_slice::<Denial>(&body) {
            Ok(denial) => ClientError::Denied { status: status.as_u16(), why: denial.error },
            Err(_) => ClientError::Refused {
                socket: self.socket.clone(),
                path: path.to_owned(),
                status: status.as_u16(),
            },
        })
    }

    fn failed(&self, error: impl std::error::Error + Send + Sync + 'static) -> ClientError {
        ClientError::Failed { socket: self.socket.clone(), error: Box::new(error) }
    }
}

fn port_path(port: &str, what: &str) -> String {
    format!("{PORTS_PATH}/{}/{what}", escaped(port))
}

/// The body of a refusal.
#[derive(serde::Deserialize)]
struct Denial {
    error: String,
}

/// Escapes a name so that it stays one part of a path.
fn escaped(name: &str) -> String {
    let mut text = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'~' => {
                text.push(char::from(byte))
            }
            // The dot is escaped as well: a part that is only dots means another path.
            other => text.push_str(&format!("%{other:02X}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_one_part_of_a_path() {
        assert_eq!(escaped("vd-0_a~"), "vd-0_a~");
        assert_eq!(escaped("../a b?é"), "%2E%2E%2Fa%20b%3F%C3%A9");
    }
}
