//! Answers of the control API that go on until they end or their client does.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::IntoResponse;
use hyper::body::Frame;
use tokio::sync::mpsc;

/// The time between two looks at a ring without frames. The ring calls no thread, so that a frame
/// costs its sidecore no system call.
const LOOK: Duration = Duration::from_millis(10);

/// A part of the answer has about as many bytes, and as many parts may wait for the client.
const PART_BYTES: usize = 128 << 10;
const PARTS: usize = 4;

/// More than a ring has: what is left in it when the time is over.
const END_BYTES: usize = 8 << 20;

/// Frames as they come. Its drop ends it, and may wait for a sidecore.
pub(super) trait Live: Send + 'static {
    /// Appends the beginning of the answer.
    fn start(&mut self, part: &mut Vec<u8>);

    /// Takes frames until there are no more, or `most` of them, or `part` has `len_bytes` bytes,
    /// and appends the answer for them. Returns their number, and waits for nothing.
    fn read(&mut self, part: &mut Vec<u8>, most: u64, len_bytes: usize) -> u64;

    /// Whether no frames come after those that are there by now.
    fn is_closed(&self) -> bool;

    /// Appends the end of the answer.
    fn end(&mut self, part: &mut Vec<u8>);
}

/// When an answer ends, besides by its client or its source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Until {
    /// After so many frames.
    pub(super) count: Option<u64>,
    /// After so many seconds.
    pub(super) seconds: Option<u64>,
}

/// The answer with these frames.
pub(super) fn answer<L: Live>(kind: &'static str, live: L, until: Until) -> impl IntoResponse {
    let (sender, parts) = mpsc::channel(PARTS);
    tokio::spawn(run(Running(Some(live)), until, sender));
    ([(header::CONTENT_TYPE, kind)], Body::new(Parts(parts)))
}

/// Frames that run. Its drop ends them on another thread, because that waits for a sidecore.
struct Running<L: Live>(Option<L>);

impl<L: Live> Running<L> {
    /// Ends them, and waits for the end.
    async fn end(mut self) {
        let live = self.0.take();
        let _ = tokio::task::spawn_blocking(move || drop(live)).await;
    }
}

impl<L: Live> Drop for Running<L> {
    fn drop(&mut self) {
        let Some(live) = self.0.take() else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(live))),
            Err(_) => drop(live),
        }
    }
}

/// The parts of an answer.
struct Parts(mpsc::Receiver<Vec<u8>>);

impl hyper::body::Body for Parts {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|part| part.map(|part| Ok(Frame::data(part.into()))))
    }
}

/// Sends the answer until its limits, the end of its source, or that of its client.
async fn run<L: Live>(mut running: Running<L>, until: Until, sender: mpsc::Sender<Vec<u8>>) {
    let Some(live) = &mut running.0 else { return };
    let mut left = until.count.unwrap_or(u64::MAX);
    let passing = pass(live, &mut left, &sender);
    let mut end = Vec::new();
    match until.seconds {
        // The client may not read: the answer ends nevertheless.
        Some(seconds) => {
            let _ = tokio::time::timeout(Duration::from_secs(seconds), passing).await;
            live.read(&mut end, left, END_BYTES);
        }
        None => passing.await,
    }
    live.end(&mut end);
    // A client that has the end can begin the next one.
    running.end().await;
    if !end.is_empty() {
        let _ = sender.send(end).await;
    }
}

/// Sends the beginning, and the frames.
async fn pass(live: &mut impl Live, left: &mut u64, sender: &mpsc::Sender<Vec<u8>>) {
    let mut part = Vec::new();
    live.start(&mut part);
    if !part.is_empty() && sender.send(part).await.is_err() {
        return;
    }
    while *left > 0 {
        // Asked first: frames that came before the end are sent.
        let is_closed = live.is_closed();
        let Ok(place) = sender.reserve().await else { return };
        let mut part = Vec::new();
        *left = left.saturating_sub(live.read(&mut part, *left, PART_BYTES));
        if !part.is_empty() {
            place.send(part);
        } else if is_closed {
            return;
        } else {
            drop(place);
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                () = sender.closed() => return,
            }
        }
    }
}
