//! The control API: HTTP/1.1 over a Unix socket, read-only. Here is the only async runtime, on a thread of its own,
//! where nothing that it does can hold a sidecore up.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use axum::extract::State;
use axum::http::{StatusCode, Uri, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use sidecore_assembly::report::{DeviceReport, SidecoreReport, Stats};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::{Source, metrics};

/// The answer to `GET /v1/devices`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Devices {
    /// In the order of the configuration.
    pub devices: Vec<DeviceReport>,
}

/// The answer to `GET /v1/sidecores`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sidecores {
    /// In the order of the configuration.
    pub sidecores: Vec<SidecoreReport>,
}

/// The paths there are.
pub(crate) const DEVICES_PATH: &str = "/v1/devices";
pub(crate) const SIDECORES_PATH: &str = "/v1/sidecores";
pub(crate) const STATS_PATH: &str = "/v1/stats";
pub(crate) const METRICS_PATH: &str = "/metrics";

/// The control API's socket. Binding it comes before anything else that a daemon starts, because that is how a second
/// daemon of the same configuration finds out.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    file: SocketFile,
}

/// Removes the socket's file in the end.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // It may be gone already, and nothing can be done about it here.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Why the control socket cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// Another daemon has it.
    #[error("another sidecored is serving {}; stop it, or choose another `control_socket`", .0.display())]
    Taken(PathBuf),
    /// The kernel refuses.
    #[error("cannot listen on the control socket {}: {error}", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

impl Socket {
    /// Makes the socket, in place of one that nobody listens on any more.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind(path: &Path) -> Result<Self, BindError> {
        let refused = |error| BindError::Refused { path: path.to_owned(), error };
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                match UnixStream::connect(path) {
                    Ok(_) => return Err(BindError::Taken(path.to_owned())),
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && is_socket(path) => {}
                    Err(_) => return Err(refused(error)),
                }
                std::fs::remove_file(path).map_err(refused)?;
                UnixListener::bind(path)
            }
            result => result,
        };
        let listener = listener.map_err(refused)?;
        let file = SocketFile(path.to_owned());
        listener.set_nonblocking(true).map_err(refused)?;
        Ok(Self { listener, file })
    }
}

/// Connecting to a plain file is refused as well.
fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

/// The running API. Dropping it ends it and removes the socket.
#[derive(Debug)]
pub struct Api {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _file: SocketFile,
}

impl Api {
    /// Answers on `socket` with what `source` says. Takes SIGTERM and SIGINT over from the kernel's default, and calls
    /// `signalled` for each from now on.
    ///
    /// # Errors
    /// No thread or no event loop can be had.
    pub fn start(
        socket: Socket,
        source: Arc<dyn Source>,
        signalled: impl FnMut() + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (listener, signals) = {
            let _context = runtime.enter();
            (tokio::net::UnixListener::from_std(socket.listener)?, Signals::new()?)
        };
        let run = move || {
            runtime.block_on(async move {
                tokio::spawn(signals.forward(signalled));
                tokio::select! {
                    _ = stopped => {}
                    result = axum::serve(listener, router(source)) => {
                        if let Err(error) = result {
                            tracing::error!("the control API ended: {error}");
                        }
                    }
                }
            });
        };
        let thread = std::thread::Builder::new().name("control".to_owned()).spawn(run)?;
        Ok(Self { stop: Some(stop), thread: Some(thread), _file: socket.file })
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn forward(mut self, mut signalled: impl FnMut()) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => {}
                _ = self.interrupt.recv() => {}
            }
            signalled();
        }
    }
}

fn router(source: Arc<dyn Source>) -> Router {
    Router::new()
        .route(DEVICES_PATH, get(devices))
        .route(SIDECORES_PATH, get(sidecores))
        .route(STATS_PATH, get(stats))
        .route(METRICS_PATH, get(prometheus))
        .fallback(unknown)
        .with_state(source)
}

async fn devices(State(source): State<Arc<dyn Source>>) -> Json<Devices> {
    Json(Devices { devices: source.devices() })
}

async fn sidecores(State(source): State<Arc<dyn Source>>) -> Json<Sidecores> {
    Json(Sidecores { sidecores: source.stats().sidecores })
}

async fn stats(State(source): State<Arc<dyn Source>>) -> Json<Stats> {
    Json(source.stats())
}

async fn prometheus(State(source): State<Arc<dyn Source>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], metrics::render(&source.stats(), &source.devices()))
}

async fn unknown(uri: Uri) -> impl IntoResponse {
    let paths = [DEVICES_PATH, SIDECORES_PATH, STATS_PATH, METRICS_PATH].join(", ");
    let error = format!("there is no {}; there are {paths}", uri.path());
    (StatusCode::NOT_FOUND, Json(serde_json::json!({ "error": error })))
}
