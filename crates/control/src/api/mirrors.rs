//! Mirrors in the control API.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_assembly::report::MirrorReport;

use super::answer::{Refusal, body, off_thread};
use crate::Source;

/// The answer to `GET /v1/mirrors`.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
pub struct Mirrors {
    /// By their names.
    pub mirrors: Vec<MirrorReport>,
}

/// A store that becomes a leg: `POST /v1/mirrors/{mirror}/legs`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewLeg {
    /// One of the `legs` in the configuration. All of it is overwritten.
    pub store: String,
}

/// Bytes of one leg that are written to another: `POST /v1/mirrors/{mirror}/repair`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RepairOfLeg {
    /// The leg that is right, by its store or its number.
    pub from: String,
    /// The leg that is overwritten, by its store or its number.
    pub to: String,
    /// The start of the bytes on the mirror, a multiple of its block size.
    #[serde(default)]
    pub offset_bytes: u64,
    /// Their number, a multiple of the block size; to the mirror's end by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub len_bytes: Option<u64>,
}

/// A permission to go on without legs: `POST /v1/mirrors/{mirror}/permit`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Permission {
    /// The numbers of the legs that are not in use elsewhere, and will not be: all that the mirror
    /// names in `asks_without`, and no others.
    pub without: Vec<usize>,
}

type Shared = State<Arc<dyn Source>>;

pub(super) async fn list(State(source): Shared) -> Json<Mirrors> {
    Json(Mirrors { mirrors: source.mirrors() })
}

pub(super) async fn add(
    State(source): Shared,
    Path(mirror): Path<String>,
    request: Request,
) -> Result<StatusCode, Refusal> {
    let NewLeg { store } = body(request).await?;
    off_thread(move || source.add_leg(&mirror, &store)).await.map(|_| StatusCode::NO_CONTENT)
}

pub(super) async fn remove(
    State(source): Shared,
    Path((mirror, leg)): Path<(String, String)>,
) -> Result<StatusCode, Refusal> {
    off_thread(move || source.remove_leg(&mirror, &leg)).await.map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn attach(
    State(source): Shared,
    Path((mirror, leg)): Path<(String, String)>,
) -> Result<StatusCode, Refusal> {
    off_thread(move || source.attach_leg(&mirror, &leg)).await.map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn repair(
    State(source): Shared,
    Path(mirror): Path<String>,
    request: Request,
) -> Result<StatusCode, Refusal> {
    let RepairOfLeg { from, to, offset_bytes, len_bytes } = body(request).await?;
    let range = (offset_bytes, len_bytes);
    let repair = move || source.repair_leg(&mirror, (&from, &to), range);
    off_thread(repair).await.map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn permit(
    State(source): Shared,
    Path(mirror): Path<String>,
    request: Request,
) -> Result<StatusCode, Refusal> {
    let Permission { without } = body(request).await?;
    let permit = move || source.permit_mirror(&mirror, &without);
    off_thread(permit).await.map(|()| StatusCode::NO_CONTENT)
}
