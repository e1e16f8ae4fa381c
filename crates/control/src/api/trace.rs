//! Traces of drops in the control API: a line of JSON for each flow, reason and second.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path as UrlPath, Query, State};
use axum::response::IntoResponse;
use sidecore_assembly::Trace;

use super::answer::{Refusal, off_thread};
use super::requests::TraceQuery;
use super::stream::{self, Live, Until};
use crate::Source;

/// Lines of JSON, which have no registered type.
pub(super) const CONTENT_TYPE: &str = "application/x-ndjson";

type Shared = State<Arc<dyn Source>>;
type Asked = Result<Query<TraceQuery>, QueryRejection>;

pub(super) async fn port(
    State(source): Shared,
    UrlPath(port): UrlPath<String>,
    query: Asked,
) -> Result<impl IntoResponse, Refusal> {
    let until = until(query)?;
    let begun = off_thread(move || source.trace_port(&port)).await?;
    Ok(stream::answer(CONTENT_TYPE, begun, until))
}

pub(super) async fn switch(
    State(source): Shared,
    UrlPath(switch): UrlPath<String>,
    query: Asked,
) -> Result<impl IntoResponse, Refusal> {
    let until = until(query)?;
    let begun = off_thread(move || source.trace_switch(&switch)).await?;
    Ok(stream::answer(CONTENT_TYPE, begun, until))
}

fn until(query: Asked) -> Result<Until, Refusal> {
    let Query(query) = query.map_err(|error| Refusal::invalid(error.body_text()))?;
    let TraceQuery { count, seconds } = query;
    Ok(Until { count, seconds })
}

impl Live for Trace {
    fn start(&mut self, _: &mut Vec<u8>) {}

    fn read(&mut self, part: &mut Vec<u8>, most: u64, _: usize) -> u64 {
        let count = Self::read(self, most);
        if self.is_due() {
            lines(self, part);
        }
        count
    }

    fn is_closed(&self) -> bool {
        Self::is_closed(self)
    }

    fn end(&mut self, part: &mut Vec<u8>) {
        lines(self, part);
    }
}

fn lines(trace: &mut Trace, part: &mut Vec<u8>) {
    for report in trace.take() {
        // A report is text and numbers: it has a form in JSON, and memory does not refuse bytes.
        if serde_json::to_writer(&mut *part, &report).is_ok() {
            part.push(b'\n');
        }
    }
}
