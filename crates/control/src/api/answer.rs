//! Reads requests and writes answers: bounded, in JSON, with the right status.

use std::time::Duration;

use axum::Json;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use sidecore_assembly::{AssemblyError, ErrorKind, OperationError};

/// Larger than the longest of most requests.
const REQUEST_MAX_BYTES: usize = 64 << 10;

/// The time limit for receiving a request's body.
const PATIENCE: Duration = Duration::from_secs(10);

/// A refusal: a status, and the reason in JSON.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    why: String,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, why: impl Into<String>) -> Self {
        Self { status, why: why.into() }
    }

    /// The refusal of a name that does not exist.
    pub(super) fn not_found(why: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, why)
    }

    /// The refusal of an invalid request.
    pub(super) fn invalid(why: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, why)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, Json(serde_json::json!({ "error": self.why }))).into_response()
    }
}

impl From<OperationError> for Refusal {
    fn from(error: OperationError) -> Self {
        Self::new(status(error.kind), error.message)
    }
}

impl From<AssemblyError> for Refusal {
    fn from(error: AssemblyError) -> Self {
        Self::new(status(error.kind()), error.to_string())
    }
}

fn status(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::Conflict => StatusCode::CONFLICT,
        ErrorKind::Invalid => StatusCode::BAD_REQUEST,
        ErrorKind::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
        ErrorKind::Ending => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Reads the JSON in a request's body; an empty body is an empty object.
pub(super) async fn body<T: DeserializeOwned>(request: Request) -> Result<T, Refusal> {
    body_up_to(request, REQUEST_MAX_BYTES).await
}

/// As [`body`], of up to `max_bytes`.
pub(super) async fn body_up_to<T: DeserializeOwned>(
    request: Request,
    max_bytes: usize,
) -> Result<T, Refusal> {
    let reading = Limited::new(request.into_body(), max_bytes).collect();
    let bytes = match tokio::time::timeout(PATIENCE, reading).await {
        Ok(Ok(collected)) => collected.to_bytes(),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            let why = format!("a request has at most {max_bytes} bytes");
            return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, why));
        }
        Ok(Err(error)) => {
            return Err(Refusal::invalid(format!("the request cannot be read: {error}")));
        }
        Err(_) => {
            return Err(Refusal::new(
                StatusCode::REQUEST_TIMEOUT,
                "the rest of the request did not come",
            ));
        }
    };
    let text = if bytes.is_empty() { b"{}" } else { bytes.as_ref() };
    serde_json::from_slice(text)
        .map_err(|error| Refusal::invalid(format!("the request is invalid: {error}")))
}

/// Runs work that may wait for a disk on another thread, so that it delays no other request.
pub(super) async fn off_thread<T, E>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, Refusal>
where
    T: Send + 'static,
    E: Into<Refusal> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(Refusal::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "sidecored failed over this request; its log says why",
        )),
    }
}
