//! Asks a running daemon over its control API. Blocking, for command lines and tests.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use sidecore_assembly::report::{DeviceReport, SidecoreReport, Stats};
use tokio::net::UnixStream;

use crate::api::{DEVICES_PATH, Devices, METRICS_PATH, SIDECORES_PATH, STATS_PATH, Sidecores};

/// A daemon that does not answer in this time has a problem that waiting will not solve.
const PATIENCE: Duration = Duration::from_secs(5);

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
    #[error("sidecored on {} did not answer within {} seconds; its log may say why", .0.display(), PATIENCE.as_secs())]
    Silent(PathBuf),
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
        path: &'static str,
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

    /// All counters in Prometheus' text format.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub fn metrics(&self) -> Result<String, ClientError> {
        let body = self.get(METRICS_PATH)?;
        String::from_utf8(body.into()).map_err(|error| self.failed(error))
    }

    fn json<T: DeserializeOwned>(&self, path: &'static str) -> Result<T, ClientError> {
        serde_json::from_slice(&self.get(path)?).map_err(|error| self.failed(error))
    }

    fn get(&self, path: &'static str) -> Result<Bytes, ClientError> {
        let question = async { tokio::time::timeout(PATIENCE, self.ask(path)).await };
        self.runtime.block_on(question).unwrap_or_else(|_| Err(ClientError::Silent(self.socket.clone())))
    }

    async fn ask(&self, path: &'static str) -> Result<Bytes, ClientError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ClientError::NoDaemon(self.socket.clone()),
            io::ErrorKind::PermissionDenied => ClientError::NoPermission(self.socket.clone()),
            _ => self.failed(error),
        })?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| self.failed(error))?;
        let connection = tokio::spawn(connection);
        let request = Request::get(path).header(hyper::header::HOST, "sidecored").body(Empty::<Bytes>::new());
        let request = request.map_err(|error| self.failed(error))?;
        let response = sender.send_request(request).await.map_err(|error| self.failed(error))?;
        let status = response.status();
        if status != StatusCode::OK {
            return Err(ClientError::Refused { socket: self.socket.clone(), path, status: status.as_u16() });
        }
        let body = Limited::new(response.into_body(), ANSWER_MAX_BYTES).collect().await;
        connection.abort();
        body.map(http_body_util::Collected::to_bytes)
            .map_err(|error| ClientError::Failed { socket: self.socket.clone(), error })
    }

    fn failed(&self, error: impl std::error::Error + Send + Sync + 'static) -> ClientError {
        ClientError::Failed { socket: self.socket.clone(), error: Box::new(error) }
    }
}
