//! The control socket's connections: their largest number, and their time limits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::AbortHandle;

/// The time between two attempts when an accept fails (no file descriptors, no memory).
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// The limits of clients.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The largest number of open connections.
    pub(super) connections: usize,
    /// The time limit from the connection, or the last answer, to the end of the next request's
    /// header.
    pub(super) header: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 64, header: Duration::from_secs(30) }
    }
}

/// A connection that may be open.
struct Open {
    /// The client's user id.
    user: u32,
    /// Whether a request is being answered.
    is_busy: Arc<AtomicBool>,
    task: AbortHandle,
}

/// A request in progress. Its drop is its end, also when the client disconnects before the answer.
struct Busy(Arc<AtomicBool>);

impl Busy {
    fn begin(is_busy: &Arc<AtomicBool>) -> Self {
        is_busy.store(true, Ordering::Relaxed);
        Self(Arc::clone(is_busy))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Accepts and serves connections for ever. A new connection is always accepted: see [`make_room`].
pub(super) async fn serve(listener: UnixListener, router: Router, limits: Limits) {
    // In the order of their acceptance.
    let mut open: Vec<Open> = Vec::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("cannot accept a connection to the control socket: {error}");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        open.retain(|connection| !connection.task.is_finished());
        if open.len() >= limits.connections {
            make_room(&mut open);
        }
        open.push(answer(stream, router.clone(), limits));
        // The connection's task runs before the next connection may end it.
        tokio::task::yield_now().await;
    }
}

/// Ends a connection: one without a request in progress, if there is any; of these, one of the user
/// with the most connections; of these, the oldest. So a client that holds all connections, or
/// makes new ones all the time, blocks no other user, and a request that was received is answered.
fn make_room(open: &mut Vec<Open>) {
    let count = |user| open.iter().filter(|connection| connection.user == user).count();
    let rank =
        |connection: &Open| (!connection.is_busy.load(Ordering::Relaxed), count(connection.user));
    // `max_by_key` returns the last maximum, so the reversed order finds the oldest.
    let last = open
        .iter()
        .enumerate()
        .rev()
        .max_by_key(|(_, connection)| rank(connection))
        .map(|(at, _)| at);
    if let Some(at) = last {
        let connection = open.remove(at);
        connection.task.abort();
        tracing::warn!(
            user = connection.user,
            "too many connections to the control socket, one is ended"
        );
    }
}

/// Serves one connection, in a task of its own.
fn answer(stream: UnixStream, router: Router, limits: Limits) -> Open {
    // Clients whose user is unknown count as one user.
    let user = stream.peer_cred().map_or(u32::MAX, |credentials| credentials.uid());
    let is_busy = Arc::new(AtomicBool::new(false));
    let service = {
        let (inner, is_busy) = (TowerToHyperService::new(router), Arc::clone(&is_busy));
        service_fn(move |request| {
            let (busy, answered) = (Busy::begin(&is_busy), inner.call(request));
            async move {
                let _busy = busy;
                answered.await
            }
        })
    };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header)
        .serve_connection(TokioIo::new(stream), service);
    let task = tokio::spawn(async move {
        // The error of a client that disconnects, or takes too long.
        let _ = connection.await;
    });
    Open { user, is_busy, task: task.abort_handle() }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::path::{Path, PathBuf};

    use axum::routing::get;

    use super::*;

    /// Starts a server on a thread of its own, which ends with the process.
    fn start(limits: Limits) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let router = Router::new().route("/", get(|| async { "hello" }));
                serve(UnixListener::from_std(listener).unwrap(), router, limits).await;
            });
        });
        (directory, path)
    }

    fn connect(path: &Path) -> UnixStream {
        let stream = UnixStream::connect(path).unwrap();
        // Longer than every step of the test.
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// Sends a request and returns the answer, and keeps the connection open.
    fn ask(stream: &mut UnixStream) -> String {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = [0; 512];
        let length = stream.read(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..length]).into_owned()
    }

    /// Waits until the server ends the connection.
    fn is_ended(mut stream: UnixStream) -> bool {
        let mut rest = Vec::new();
        match stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    #[test]
    fn half_a_header_and_an_idle_connection_are_ended() {
        let (_directory, path) =
            start(Limits { header: Duration::from_millis(50), ..Limits::default() });
        let silent = connect(&path);
        let mut half = connect(&path);
        half.write_all(b"GET / HTTP/1.1\r\nHost:").unwrap();
        let mut idle = connect(&path);
        assert!(ask(&mut idle).ends_with("hello"));
        assert!(is_ended(silent) && is_ended(half) && is_ended(idle));
    }

    #[test]
    fn a_client_that_holds_all_connections_blocks_no_other() {
        let limits = Limits { connections: 4, header: Duration::from_secs(3600) };
        let (_directory, path) = start(limits);
        let mut held: Vec<UnixStream> = (0..4).map(|_| connect(&path)).collect();
        for stream in &mut held {
            assert!(ask(stream).ends_with("hello"));
        }
        let mut operator = connect(&path);
        assert!(ask(&mut operator).ends_with("hello"));
        // The oldest connection was ended; the others are still open.
        assert!(is_ended(held.remove(0)));
        for stream in &mut held {
            assert!(ask(stream).ends_with("hello"));
        }
        // A flood of connections, of which only the permitted number is open at a time.
        let flood: Vec<UnixStream> = (0..100).map(|_| connect(&path)).collect();
        assert!(ask(&mut connect(&path)).ends_with("hello"));
        assert!(flood.into_iter().take(90).all(is_ended));
    }
}
