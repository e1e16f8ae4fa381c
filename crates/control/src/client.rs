//! Asks a running daemon over its control API. Blocking, for command lines and tests.

mod volumes;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sidecore_assembly::report::{DeviceReport, SidecoreReport, Stats};
use tokio::net::UnixStream;

use crate::api::{DEVICES_PATH, Devices, METRICS_PATH, NewDevice, SIDECORES_PATH, STATS_PATH, Sidecores};

/// A daemon that does not answer a question in this time has a problem that waiting will not solve.
const PATIENCE: Duration = Duration::from_secs(5);

/// The same for what may wait for a disk.
const DISK_PATIENCE: Duration = Duration::from_secs(120);

/// The same for what reads all of a disk's metadata.
const LONG_PATIENCE: Duration = Duration::from_secs(3600);

/// More than the largest daemon has to say.
const ANSWER_MAX_BYTES: usize = 64 << 20;

/// Why a question got no answer. The messages say what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nobody listens.
    #[error(
        "no sidecored is listening on {}; start one with `sidecored --config FILE`, or name its `control_socket` with \
         --socket",
        .0.display()
    )]
    NoDaemon(PathBuf),
    /// The socket's mode keeps this user out.
    #[error("no permission to talk to {}; run this as the user of sidecored, or as root", .0.display())]
    NoPermission(PathBuf),
    /// It listens and does not answer.
    #[error("sidecored on {} did not answer within {} seconds; its log may say why", socket.display(), patience.as_secs())]
    Silent {
        /// The socket.
        socket: PathBuf,
        /// How long was waited.
        patience: Duration,
    },
    /// The daemon does not do what it was asked to do.
    #[error("{why}")]
    Denied {
        /// HTTP's status.
        status: u16,
        /// What the daemon says.
        why: String,
    },
    /// Something else went wrong on the way.
    #[error("talking to sidecored on {} failed: {error}", socket.display())]
    Failed {
        /// The socket.
        socket: PathBuf,
        /// What.
        error: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Whoever listens does not speak this API.
    #[error("{} answered {path} with {status}; is it the control socket of a sidecored of this version?", socket.display())]
    Refused {
        /// The socket.
        socket: PathBuf,
        /// What was asked for.
        path: String,
        /// HTTP's status.
        status: u16,
    },
}

/// A daemon to ask. Each question is a connection of its own.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    runtime: tokio::runtime::Runtime,
}

impl Client {
    /// A client of the daemon whose control socket this is.
    ///
    /// # Errors
    /// No event loop can be had.
    pub fn new(socket: &Path) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { socket: socket.to_owned(), runtime })
    }

    /// All counters.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn stats(&self) -> Result<Stats, ClientError> {
        self.json(STATS_PATH)
    }

    /// The disks.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn devices(&self) -> Result<Vec<DeviceReport>, ClientError> {
        self.json::<Devices>(DEVICES_PATH).map(|answer| answer.devices)
    }

    /// The polling threads.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn sidecores(&self) -> Result<Vec<SidecoreReport>, ClientError> {
        self.json::<Sidecores>(SIDECORES_PATH).map(|answer| answer.sidecores)
    }

    /// All counters in Prometheus' text format; with `per_queue` those of each queue as well.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn metrics(&self, per_queue: bool) -> Result<String, ClientError> {
        let body = self.get(&format!("{METRICS_PATH}?per_queue={}", u8::from(per_queue)))?;
        String::from_utf8(body.into()).map_err(|error| self.failed(error))
    }

    /// Has one more device served.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn add_device(&self, device: &NewDevice) -> Result<DeviceReport, ClientError> {
        self.post(DEVICES_PATH, device, DISK_PATIENCE)
    }

    /// Has a device served no longer. This waits until its requests are done.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn remove_device(&self, name: &str) -> Result<(), ClientError> {
        self.ask(Method::DELETE, &format!("{DEVICES_PATH}/{}", escaped(name)), None, DISK_PATIENCE).map(drop)
    }

    /// Has clients of a device served although writes that were answered to them may be missing.
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

    /// Posts something, and reads the answer.
    fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
        patience: Duration,
    ) -> Result<T, ClientError> {
        self.parse(&self.tell(path, body, patience)?)
    }

    /// Posts something that has no answer but that it is done.
    fn tell(&self, path: &str, body: &impl Serialize, patience: Duration) -> Result<Bytes, ClientError> {
        let body = serde_json::to_vec(body).map_err(|error| self.failed(error))?;
        self.ask(Method::POST, path, Some(body), patience)
    }

    fn ask(&self, method: Method, path: &str, body: Option<Vec<u8>>, patience: Duration) -> Result<Bytes, ClientError> {
        let question = async { tokio::time::timeout(patience, self.exchange(method, path, body)).await };
        let silent = || Err(ClientError::Silent { socket: self.socket.clone(), patience });
        self.runtime.block_on(question).unwrap_or_else(|_| silent())
    }

    async fn exchange(&self, method: Method, path: &str, body: Option<Vec<u8>>) -> Result<Bytes, ClientError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ClientError::NoDaemon(self.socket.clone()),
            io::ErrorKind::PermissionDenied => ClientError::NoPermission(self.socket.clone()),
            _ => self.failed(error),
        })?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| self.failed(error))?;
        let connection = tokio::spawn(connection);
        let request = Request::builder().method(method).uri(path).header(hyper::header::HOST, "sidecored");
        let request = request.header(hyper::header::CONTENT_TYPE, "application/json");
        let request = request.body(Full::new(Bytes::from(body.unwrap_or_default())));
        let request = request.map_err(|error| self.failed(error))?;
        let response = sender.send_request(request).await.map_err(|error| self.failed(error))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_MAX_BYTES).collect().await;
        connection.abort();
        let body = body
            .map(http_body_util::Collected::to_bytes)
            .map_err(|error| ClientError::Failed { socket: self.socket.clone(), error })?;
        if status.is_success() {
            return Ok(body);
        }
        Err(match serde_json::from_slice::<Denial>(&body) {
            Ok(denial) => ClientError::Denied { status: status.as_u16(), why: denial.error },
            Err(_) => {
                ClientError::Refused { socket: self.socket.clone(), path: path.to_owned(), status: status.as_u16() }
            }
        })
    }

    fn failed(&self, error: impl std::error::Error + Send + Sync + 'static) -> ClientError {
        ClientError::Failed { socket: self.socket.clone(), error: Box::new(error) }
    }
}

/// What the daemon says when it says no.
#[derive(serde::Deserialize)]
struct Denial {
    error: String,
}

/// A name as a part of a path: whatever is in it, it stays one part.
fn escaped(name: &str) -> String {
    let mut text = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'~' => text.push(char::from(byte)),
            // The dot as well: a part that is all dots means another path.
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
