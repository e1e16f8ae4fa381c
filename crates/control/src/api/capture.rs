//! Captures of ports in the control API: an answer that goes on until it ends or its client does.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path as UrlPath, Query, State};
use axum::http::header;
use axum::response::IntoResponse;
use hyper::body::Frame;
use sidecore_assembly::Capture;
use tokio::sync::mpsc;

use super::answer::{Refusal, off_thread};
use super::requests::CaptureQuery;
use crate::Source;

/// The type of a pcapng file, which has no registered one.
pub(super) const CONTENT_TYPE: &str = "application/x-pcapng";

/// The time between two looks at a ring without frames. The ring calls no thread, so that a frame
/// costs its sidecore no system call.
const LOOK: Duration = Duration::from_millis(10);

/// A part of the answer has about as many bytes, and as many parts may wait for the client.
const PART_BYTES: usize = 128 << 10;
const PARTS: usize = 4;

/// More than a ring has: what is left in it when the time is over.
const END_BYTES: usize = 8 << 20;

pub(super) async fn capture(
    State(source): State<Arc<dyn Source>>,
    UrlPath(port): UrlPath<String>,
    query: Result<Query<CaptureQuery>, QueryRejection>,
) -> Result<impl IntoResponse, Refusal> {
    let Query(query) = query.map_err(|error| Refusal::invalid(error.body_text()))?;
    let begun = off_thread(move || source.capture(&port, query.snaplen)).await?;
    let (sender, parts) = mpsc::channel(PARTS);
    tokio::spawn(run(Running(Some(begun)), query, sender));
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], Body::new(Parts(parts))))
}

/// A capture. Its drop ends the capture on another thread, because that waits for a sidecore.
struct Running(Option<Capture>);

impl Running {
    /// Ends the capture, and waits for its end.
    async fn end(mut self) {
        let capture = self.0.take();
        let _ = tokio::task::spawn_blocking(move || drop(capture)).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(capture) = self.0.take() else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(capture))),
            Err(_) => drop(capture),
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

/// Sends a capture until its limits, the end of its port, or that of its client.
async fn run(mut running: Running, query: CaptureQuery, sender: mpsc::Sender<Vec<u8>>) {
    let Some(capture) = &mut running.0 else { return };
    let mut left = query.count.unwrap_or(u64::MAX);
    let passing = pass(capture, &mut left, &sender);
    let mut end = Vec::new();
    match query.seconds {
        // The client may not read: the capture ends nevertheless.
        Some(seconds) => {
            let _ = tokio::time::timeout(Duration::from_secs(seconds), passing).await;
            capture.read(&mut end, left, END_BYTES);
        }
        None => passing.await,
    }
    capture.end(&mut end);
    // A client that has the end can begin the next capture.
    running.end().await;
    let _ = sender.send(end).await;
}

/// Sends the beginning of a capture, and its frames.
async fn pass(capture: &mut Capture, left: &mut u64, sender: &mpsc::Sender<Vec<u8>>) {
    let mut part = Vec::new();
    capture.start(&mut part);
    if sender.send(part).await.is_err() {
        return;
    }
    while *left > 0 {
        // Asked first: frames that came before the port has gone are sent.
        let is_closed = capture.is_closed();
        let Ok(place) = sender.reserve().await else { return };
        let mut part = Vec::new();
        *left = left.saturating_sub(capture.read(&mut part, *left, PART_BYTES));
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
