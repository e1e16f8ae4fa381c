//! The list of all routes: the router and the API's document are made of it.

use std::sync::Arc;

use axum::Router;
use serde_json::Value;

use super::document::Schema as _;
use super::requests::{CreateVolume, ExtentsQuery, MetricsQuery, Named, Prune, Quota, Resize, Share};
use super::{NewDevice, volumes};
use crate::Source;

/// A method of a path.
pub(super) struct Route {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) summary: &'static str,
    /// The schema of the request's body.
    pub(super) body: Option<fn() -> Value>,
    /// The schema of each parameter of the query.
    pub(super) query: Option<fn() -> Value>,
    pub(super) answer: Answer,
}

/// An answer that says yes.
pub(super) enum Answer {
    /// JSON with this status: one thing, or lists of things by these names.
    Json(u16, &'static [&'static str]),
    Text(&'static str),
    /// 204 No Content.
    Nothing,
}

use Answer::{Json, Nothing, Text};

macro_rules! routes {
    ($( $method:ident $path:literal => $handler:path, $summary:literal, $answer:expr
        $(, body $body:ty)? $(, query $query:ty)?; )*) => {
        /// All there are.
        pub(super) const ROUTES: &[Route] = &[$(
            Route {
                method: stringify!($method),
                path: $path,
                summary: $summary,
                body: optional!($($body)?),
                query: optional!($($query)?),
                answer: $answer,
            },
        )*];

        pub(super) fn router() -> Router<Arc<dyn Source>> {
            Router::new()$( .route($path, axum::routing::$method($handler)) )*
        }
    };
}

macro_rules! optional {
    () => {
        None
    };
    ($type:ty) => {
        Some(<$type>::schema)
    };
}

routes! {
    get "/openapi.json" => super::openapi, "This document", Json(200, &[]);
    get "/metrics" => super::prometheus, "Counters for Prometheus", Text("text/plain; version=0.0.4"),
        query MetricsQuery;
    get "/v1/devices" => super::devices, "The disks", Json(200, &["devices"]);
    post "/v1/devices" => super::add_device, "Serve one more disk", Json(201, &[]), body NewDevice;
    delete "/v1/devices/{device}" => super::remove_device, "Serve a disk no longer", Nothing;
    post "/v1/devices/{device}/accept-loss" => super::accept_loss,
        "Serve clients although answered writes may be missing", Nothing;
    get "/v1/sidecores" => super::sidecores, "The polling threads", Json(200, &["sidecores"]);
    get "/v1/stats" => super::stats, "All counters", Json(200, &["sidecores", "devices"]);
    get "/v1/controllers" => volumes::list, "The controllers", Json(200, &["controllers", "closed"]);
    get "/v1/controllers/{controller}" => volumes::show, "A controller", Json(200, &[]);
    post "/v1/controllers/{controller}/check" => volumes::check, "Check all metadata", Json(200, &[]);
    post "/v1/controllers/{controller}/prune" => volumes::prune, "Drop extent trees from memory", Nothing,
        body Prune;
    post "/v1/controllers/{controller}/flush-btlb" => volumes::flush_btlb,
        "Empty the buffers of translations", Nothing;
    post "/v1/controllers/{controller}/share" => volumes::share, "Let equal blocks be one", Nothing, body Share;
    get "/v1/controllers/{controller}/volumes" => volumes::volumes, "The volumes of a controller",
        Json(200, &["volumes"]);
    post "/v1/controllers/{controller}/volumes" => volumes::create, "Make a volume", Json(201, &[]),
        body CreateVolume;
    get "/v1/controllers/{controller}/volumes/{volume}" => volumes::volume, "A volume", Json(200, &[]);
    delete "/v1/controllers/{controller}/volumes/{volume}" => volumes::delete, "Delete a volume", Nothing;
    post "/v1/controllers/{controller}/volumes/{volume}/snapshot" => volumes::snapshot,
        "Make a read-only copy", Json(201, &[]), body Named;
    post "/v1/controllers/{controller}/volumes/{volume}/clone" => volumes::clone,
        "Make a writable copy", Json(201, &[]), body Named;
    post "/v1/controllers/{controller}/volumes/{volume}/resize" => volumes::resize,
        "Give a volume another size", Json(200, &[]), body Resize;
    post "/v1/controllers/{controller}/volumes/{volume}/rename" => volumes::rename,
        "Give a volume another name", Json(200, &[]), body Named;
    post "/v1/controllers/{controller}/volumes/{volume}/quota" => volumes::quota,
        "Give a volume another quota", Json(200, &[]), body Quota;
    get "/v1/controllers/{controller}/volumes/{volume}/extents" => volumes::extents,
        "The mapping of a part of a volume", Json(200, &[]), query ExtentsQuery;
}
