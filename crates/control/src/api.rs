//! The control API: HTTP/1.1 over a Unix socket. The only async runtime of the project is here, on
//! a thread of its own, where it cannot delay a sidecore; work that may wait for a disk runs on
//! other threads, so that it delays no other request.

mod answer;
mod capture;
mod connections;
mod dedup;
mod document;
mod mirrors;
mod new_device;
mod ports;
mod remote;
mod requests;
mod routes;
mod schedules;
mod stages;
mod stream;
mod trace;
mod volumes;

use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path as UrlPath, Query, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::IntoResponse;
use axum::{Json, Router};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_assembly::report::{
    ClosedControllerReport, ControllerReport, DeviceReport, SidecoreReport, Stats, SwitchReport,
    VolumeReport,
};
use sidecore_assembly::spec::SocketAccess;
use sidecore_assembly::{AccountError, AssemblyError};
use sidecore_socket::{ServerError, SocketFile};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::{Source, metrics};

use answer::{Refusal, body, off_thread};
use connections::Limits;

pub use dedup::Dedup;
pub use mirrors::{Mirrors, NewLeg, Permission, RepairOfLeg};
pub use new_device::NewDevice;
pub use ports::{LimitsOfPort, PortFaults, PortRules};
pub use remote::{Invitation, NewClient, NewIohost, NewLink, NewServe, ToLink};
pub use requests::{
    CaptureQuery, CreateVolume, ExtentsQuery, MetricsQuery, Named, Place, Prune, Quota, Resize,
    Share, TraceQuery,
};
pub use schedules::{NewSchedule, NewSchedules, Schedules};
pub use stages::NewStage;

/// The answer to `GET /v1/devices`.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Devices {
    /// In the order of the configuration.
    pub devices: Vec<DeviceReport>,
}

/// The answer to `GET /v1/sidecores`.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Sidecores {
    /// In the order of the configuration.
    pub sidecores: Vec<SidecoreReport>,
}

/// The answer to `GET /v1/switches`.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Switches {
    /// By their names.
    pub switches: Vec<SwitchReport>,
}

/// The answer to `GET /v1/controllers`.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Controllers {
    /// The open controllers, in the order of the configuration.
    pub controllers: Vec<ControllerReport>,
    /// The controllers that are not open, in the same order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub closed: Vec<ClosedControllerReport>,
}

/// The answer to `GET /v1/controllers/{controller}/volumes`.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Volumes {
    /// In the order of their creation.
    pub volumes: Vec<VolumeReport>,
}

/// The largest number of changes in progress; further changes wait.
const CHANGES_AT_ONCE: usize = 16;

/// The time limit for the controllers' metrics, which are left out after it.
const REPORT_PATIENCE: Duration = Duration::from_secs(2);

/// The number of connections that may wait to be accepted.
const BACKLOG: i32 = 128;

pub(crate) const DEVICES_PATH: &str = "/v1/devices";
pub(crate) const SIDECORES_PATH: &str = "/v1/sidecores";
pub(crate) const SWITCHES_PATH: &str = "/v1/switches";
pub(crate) const PORTS_PATH: &str = "/v1/ports";
pub(crate) const STATS_PATH: &str = "/v1/stats";
pub(crate) const CONTROLLERS_PATH: &str = "/v1/controllers";
pub(crate) const SCHEDULES_PATH: &str = "/v1/schedules";
pub(crate) const MIRRORS_PATH: &str = "/v1/mirrors";
pub(crate) const REMOTE_PATH: &str = "/v1/remote";
pub(crate) const OPENAPI_PATH: &str = "/openapi.json";
pub(crate) const METRICS_PATH: &str = "/metrics";

/// The control API's socket. A daemon binds it before it starts anything else, because a second
/// daemon of the same configuration fails here.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    file: Removed,
}

/// Removes the socket's file when dropped.
#[derive(Debug)]
struct Removed(SocketFile);

impl Drop for Removed {
    fn drop(&mut self) {
        self.0.remove();
    }
}

/// The reason why the control socket cannot be bound.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// Another daemon serves the socket.
    #[error(
        "another sidecored is serving {}; stop it, or choose another `control_socket`",
        .0.display()
    )]
    Taken(PathBuf),
    /// The socket's owner or group is not an account of this machine.
    #[error("the control socket: {0}")]
    Account(#[from] AccountError),
    /// A system call failed.
    #[error("cannot listen on the control socket {}: {error}", path.display())]
    Refused {
        /// The path of the socket.
        path: PathBuf,
        /// The error of the system call.
        error: io::Error,
    },
}

impl Socket {
    /// Binds the socket, in place of one without a listener. The users of `access` may connect, and
    /// so may delete volumes.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind(path: &Path, access: &SocketAccess) -> Result<Self, BindError> {
        let access = access.resolve()?;
        let (file, listener) =
            SocketFile::listen(path, access, BACKLOG).map_err(|error| match error {
                ServerError::InUse { path } | ServerError::Ours { path } => BindError::Taken(path),
                ServerError::Io { path, error } => BindError::Refused { path, error },
                other => {
                    BindError::Refused { path: path.to_owned(), error: io::Error::other(other) }
                }
            })?;
        Ok(Self { listener: UnixListener::from(listener), file: Removed(file) })
    }
}

/// The running API. Its drop ends the API and removes the socket.
#[derive(Debug)]
pub struct Api {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _file: Removed,
}

impl Api {
    /// Serves the reports of `source` on `socket`. From now on SIGTERM and SIGINT call `signalled`,
    /// instead of the kernel's default action.
    ///
    /// # Errors
    /// The thread or the event loop cannot be made.
    pub fn start(
        socket: Socket,
        source: Arc<dyn Source>,
        signalled: impl FnMut() + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.max_blocking_threads(CHANGES_AT_ONCE).enable_all().build()?;
        let (listener, signals) = {
            let _context = runtime.enter();
            (tokio::net::UnixListener::from_std(socket.listener)?, Signals::new()?)
        };
        let run = move || {
            runtime.block_on(async move {
                tokio::spawn(signals.forward(signalled));
                tokio::select! {
                    _ = stopped => {}
                    () = connections::serve(listener, router(source), Limits::default()) => {}
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
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
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
    routes::router().fallback(unknown).method_not_allowed_fallback(wrong_method).with_state(source)
}

/// Serves `GET /openapi.json`.
async fn openapi() -> Json<serde_json::Value> {
    Json(document::document())
}

async fn devices(State(source): State<Arc<dyn Source>>) -> Json<Devices> {
    Json(Devices { devices: source.devices() })
}

async fn add_device(
    State(source): State<Arc<dyn Source>>,
    request: Request,
) -> Result<(StatusCode, Json<DeviceReport>), Refusal> {
    let (device, store) = body::<NewDevice>(request).await?.settle().map_err(Refusal::invalid)?;
    let add = move || -> Result<_, AssemblyError> {
        source.add_device(&device, store.as_ref())?;
        Ok(source.devices().into_iter().find(|report| report.name == device.name))
    };
    let report = off_thread(add).await?;
    let gone = || Refusal::not_found("the device was added, and removed again by another client");
    Ok((StatusCode::CREATED, Json(report.ok_or_else(gone)?)))
}

async fn remove_device(
    State(source): State<Arc<dyn Source>>,
    UrlPath(device): UrlPath<String>,
) -> Result<StatusCode, Refusal> {
    off_thread(move || source.remove_device(&device)).await.map(|()| StatusCode::NO_CONTENT)
}

async fn accept_loss(
    State(source): State<Arc<dyn Source>>,
    UrlPath(device): UrlPath<String>,
) -> Result<StatusCode, Refusal> {
    off_thread(move || source.accept_loss(&device)).await.map(|()| StatusCode::NO_CONTENT)
}

async fn sidecores(State(source): State<Arc<dyn Source>>) -> Json<Sidecores> {
    Json(Sidecores { sidecores: source.stats().sidecores })
}

async fn switches(State(source): State<Arc<dyn Source>>) -> Result<Json<Switches>, Refusal> {
    let switches = off_thread(move || Ok::<_, Refusal>(source.switches(true))).await?;
    Ok(Json(Switches { switches }))
}

async fn stats(State(source): State<Arc<dyn Source>>) -> Json<Stats> {
    Json(source.stats())
}

async fn prometheus(
    State(source): State<Arc<dyn Source>>,
    query: Result<Query<MetricsQuery>, QueryRejection>,
) -> Result<impl IntoResponse, Refusal> {
    let Query(query) = query.map_err(|error| Refusal::invalid(error.body_text()))?;
    if query.per_queue > 1 {
        return Err(Refusal::invalid("`per_queue` is 0 or 1"));
    }
    let reports = {
        let source = Arc::clone(&source);
        move || {
            Ok::<_, Refusal>(
                source.controllers().iter().map(|controller| controller.report()).collect(),
            )
        }
    };
    // A controller that hangs must not hide the metrics of others.
    let controllers: Vec<ControllerReport> =
        match tokio::time::timeout(REPORT_PATIENCE, off_thread(reports)).await {
            Ok(Ok(controllers)) => controllers,
            Ok(Err(_)) | Err(_) => Vec::new(),
        };
    let page = metrics::render(
        &source.stats(),
        &source.devices(),
        &controllers,
        &source.remote(),
        (&source.switches(false), &source.schedules(), &source.mirrors()),
        query.per_queue == 1,
    );
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], page))
}

async fn unknown(uri: Uri) -> Refusal {
    let paths = [
        DEVICES_PATH,
        SIDECORES_PATH,
        SWITCHES_PATH,
        STATS_PATH,
        CONTROLLERS_PATH,
        SCHEDULES_PATH,
        MIRRORS_PATH,
        REMOTE_PATH,
        METRICS_PATH,
        OPENAPI_PATH,
    ]
    .join(", ");
    Refusal::not_found(format!("there is no {}; there are {paths}", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> Refusal {
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, format!("there is no {method} of {}", uri.path()))
}
