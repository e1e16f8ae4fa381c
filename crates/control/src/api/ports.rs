//! Ports of switches in the control API.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path as UrlPath, Request, State};
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sidecore_assembly::report::FirewallReport;

use super::answer::{Refusal, body, body_up_to, off_thread};
use crate::Source;

/// Larger than as many and as long rules as a port may have.
const RULES_MAX_BYTES: usize = 1 << 20;

/// The rules of a port: `PUT /v1/ports/{port}/rules`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortRules {
    /// The rules, the first of which that matches a frame decides.
    pub rules: Vec<String>,
}

/// The rate limits of a port: `PUT /v1/ports/{port}/limits`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitsOfPort {
    /// The limits, as in `from 5000 frames/s` or `to 10MiB/s burst 1MiB`.
    pub limits: Vec<String>,
}

/// The faults of a port's wire: `PUT /v1/ports/{port}/faults`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortFaults {
    /// The faults, as in `loss 0.1% delay 5ms`; an empty text makes the wire a good one.
    pub faults: String,
}

type Shared = State<Arc<dyn Source>>;

pub(super) async fn rules(
    State(source): Shared,
    UrlPath(name): UrlPath<String>,
) -> Result<Json<FirewallReport>, Refusal> {
    let mut ports = source.switches(false).into_iter().flat_map(|switch| switch.ports);
    let unknown = || Refusal::not_found(format!("there is no port \"{name}\""));
    let port = ports.find(|port| port.name == name).ok_or_else(unknown)?;
    Ok(Json(port.firewall.unwrap_or_default()))
}

pub(super) async fn set_rules(
    State(source): Shared,
    UrlPath(port): UrlPath<String>,
    request: Request,
) -> Result<StatusCode, Refusal> {
    let PortRules { rules } = body_up_to(request, RULES_MAX_BYTES).await?;
    off_thread(move || source.set_rules(&port, &rules)).await.map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn set_faults(
    State(source): Shared,
    UrlPath(port): UrlPath<String>,
    request: Request,
) -> Result<StatusCode, Refusal> {
    let PortFaults { faults } = body(request).await?;
    off_thread(move || source.set_faults(&port, &faults)).await.map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn set_limits(
    State(source): Shared,
    UrlPath(port): UrlPath<String>,
    request: Request,
) -> Result<StatusCode, Refusal> {
    let LimitsOfPort { limits } = body(request).await?;
    off_thread(move || source.set_limits(&port, &limits)).await.map(|()| StatusCode::NO_CONTENT)
}
