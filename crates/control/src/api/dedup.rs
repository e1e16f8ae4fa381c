//! Deduplication of a controller's volumes: `/v1/controllers/{controller}/dedup`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_assembly::report::DedupReport;
use sidecore_assembly::{ControllerHandle, DEFAULT_DEDUP_BYTES_PER_S, DedupOptions};

use super::answer::{Refusal, body};
use super::volumes::{find, with};
use crate::Source;

/// Lets equal blocks become one, in the background: `POST /v1/controllers/{controller}/dedup`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dedup {
    /// The volumes, each with its snapshots and clones, and those that it was made from; all by
    /// default.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<String>,
    /// Let blocks of volumes become one that are not copies of each other. Their guests can then
    /// find out, by the time that writes take, which contents the others have.
    #[serde(default)]
    pub across: bool,
    /// Change nothing.
    #[serde(default)]
    pub dry_run: bool,
    /// The bytes to read in a second at most, while guests make few requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_bytes_per_s: Option<u64>,
}

pub(super) async fn start(
    State(source): State<Arc<dyn Source>>,
    Path(controller): Path<String>,
    request: Request,
) -> Result<(StatusCode, Json<DedupReport>), Refusal> {
    // A missing controller is reported before all other faults of the request.
    find(&source, &controller)?;
    let Dedup { volumes, across, dry_run, rate_bytes_per_s } = body(request).await?;
    if rate_bytes_per_s == Some(0) {
        return Err(Refusal::invalid("`rate_bytes_per_s` is a number from 1 on"));
    }
    let bytes_per_s = rate_bytes_per_s.unwrap_or(DEFAULT_DEDUP_BYTES_PER_S);
    let options = DedupOptions { volumes, across, dry_run, bytes_per_s };
    let report = with(&source, controller, move |handle| handle.start_dedup(&options)).await?;
    Ok((StatusCode::ACCEPTED, Json(report)))
}

pub(super) async fn show(
    State(source): State<Arc<dyn Source>>,
    Path(controller): Path<String>,
) -> Result<Json<DedupReport>, Refusal> {
    with(&source, controller, ControllerHandle::dedup).await.map(Json)
}

pub(super) async fn stop(
    State(source): State<Arc<dyn Source>>,
    Path(controller): Path<String>,
) -> Result<Json<DedupReport>, Refusal> {
    with(&source, controller, ControllerHandle::stop_dedup).await.map(Json)
}
