//! Captures of ports in the control API.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path as UrlPath, Query, State};
use axum::response::IntoResponse;
use sidecore_assembly::Capture;

use super::answer::{Refusal, off_thread};
use super::requests::CaptureQuery;
use super::stream::{self, Live, Until};
use crate::Source;

/// The type of a pcapng file, which has no registered one.
pub(super) const CONTENT_TYPE: &str = "application/x-pcapng";

pub(super) async fn capture(
    State(source): State<Arc<dyn Source>>,
    UrlPath(port): UrlPath<String>,
    query: Result<Query<CaptureQuery>, QueryRejection>,
) -> Result<impl IntoResponse, Refusal> {
    let Query(query) = query.map_err(|error| Refusal::invalid(error.body_text()))?;
    let CaptureQuery { snaplen, count, seconds } = query;
    let begun = off_thread(move || source.capture(&port, snaplen)).await?;
    Ok(stream::answer(CONTENT_TYPE, begun, Until { count, seconds }))
}

impl Live for Capture {
    fn start(&mut self, part: &mut Vec<u8>) {
        Self::start(self, part);
    }

    fn read(&mut self, part: &mut Vec<u8>, most: u64, len_bytes: usize) -> u64 {
        Self::read(self, part, most, len_bytes)
    }

    fn is_closed(&self) -> bool {
        Self::is_closed(self)
    }

    fn end(&mut self, part: &mut Vec<u8>) {
        Self::end(self, part);
    }
}
