//! The list of all routes. The router and the API's document are generated from it.

use std::sync::Arc;

use axum::Router;
use schemars::SchemaGenerator;
use serde_json::{Map, Value};
use sidecore_assembly::report::{
    CheckReport, ControllerReport, DedupReport, DeviceReport, DropReport, ExtentsReport,
    FirewallReport, LinkMove, RemoteReport, StageChange, StagesReport, Stats, VolumeReport,
};

use super::document::SchemaOf;
use super::requests::{
    CaptureQuery, CreateVolume, ExtentsQuery, MetricsQuery, Named, Prune, Quota, Resize, Share,
    TraceQuery,
};
use super::{
    Controllers, Dedup, Devices, Invitation, LimitsOfPort, Mirrors, NewClient, NewDevice,
    NewIohost, NewLeg, NewLink, NewSchedules, NewServe, NewStage, Permission, PortFaults,
    PortRules, RepairOfLeg, Schedules, Sidecores, Switches, ToLink, Volumes, capture, dedup,
    mirrors, ports, remote, schedules, stages, trace, volumes,
};
use crate::Source;

/// A method of a path.
pub(super) struct Route {
    pub(super) method: &'static str,
    pub(super) path: &'static str,
    pub(super) summary: &'static str,
    /// The schema of the request's body.
    pub(super) body: Option<SchemaOf>,
    /// The schema of each parameter of the query.
    pub(super) query: Option<SchemaOf>,
    pub(super) answer: Answer,
}

/// The answer to a successful request.
pub(super) enum Answer {
    /// JSON with this status.
    Json(u16, SchemaOf),
    Text(&'static str),
    /// Bytes that may come for as long as the client wants them.
    Stream(&'static str),
    /// The same of lines, each of which is JSON of a type.
    Lines(&'static str, SchemaOf),
    /// 204 No Content.
    Nothing,
}

use Answer::{Nothing, Stream, Text};

/// JSON of this type.
macro_rules! json {
    ($status:literal, $type:ty) => {
        Answer::Json($status, SchemaGenerator::subschema_for::<$type>)
    };
}

/// Lines of JSON of this type.
macro_rules! lines {
    ($type:ty) => {
        Answer::Lines(trace::CONTENT_TYPE, SchemaGenerator::subschema_for::<$type>)
    };
}

macro_rules! routes {
    ($( $method:ident $path:literal => $handler:path, $summary:literal, $answer:expr
        $(, body $body:ty)? $(, query $query:ty)?; )*) => {
        /// All routes of the API.
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
        Some(SchemaGenerator::subschema_for::<$type>)
    };
}

routes! {
    get "/openapi.json" => super::openapi, "This document", json!(200, Map<String, Value>);
    get "/metrics" => super::prometheus,
        "Counters for Prometheus", Text("text/plain; version=0.0.4"),
        query MetricsQuery;
    get "/v1/devices" => super::devices, "The disks", json!(200, Devices);
    post "/v1/devices" => super::add_device, "Serve one more disk", json!(201, DeviceReport),
        body NewDevice;
    delete "/v1/devices/{device}" => super::remove_device, "Serve a disk no longer", Nothing;
    post "/v1/devices/{device}/accept-loss" => super::accept_loss,
        "Serve clients although answered writes may be missing", Nothing;
    get "/v1/devices/{device}/stages" => stages::list,
        "The stages of a disk, in the order in which a request meets them",
        json!(200, StagesReport);
    post "/v1/devices/{device}/stages" => stages::add,
        "Add a stage to a disk in use", json!(201, StageChange), body NewStage;
    delete "/v1/devices/{device}/stages/{stage}" => stages::remove,
        "Remove an added stage, by its type or its position", json!(200, StageChange);
    get "/v1/sidecores" => super::sidecores, "The polling threads", json!(200, Sidecores);
    get "/v1/stats" => super::stats, "All counters", json!(200, Stats);
    get "/v1/switches" => super::switches,
        "The switches, their ports, and the addresses that they know", json!(200, Switches);
    get "/v1/ports/{port}/rules" => ports::rules,
        "The rules of a port's firewall, and their counters", json!(200, FirewallReport);
    put "/v1/ports/{port}/rules" => ports::set_rules,
        "Replace the rules of a port's firewall at once; its connections stay", Nothing,
        body PortRules;
    put "/v1/ports/{port}/limits" => ports::set_limits,
        "Change the rate limits of a port", Nothing, body LimitsOfPort;
    put "/v1/ports/{port}/faults" => ports::set_faults,
        "Make the wire to a port a bad one, or a good one again", Nothing, body PortFaults;
    get "/v1/ports/{port}/capture" => capture::capture,
        "The frames of a port as they pass, until the client disconnects",
        Stream(capture::CONTENT_TYPE), query CaptureQuery;
    get "/v1/ports/{port}/trace" => trace::port,
        "Frames from and to a port as they are dropped, by flow and reason",
        lines!(DropReport), query TraceQuery;
    get "/v1/switches/{switch}/trace" => trace::switch,
        "Frames of a switch as they are dropped, by flow and reason",
        lines!(DropReport), query TraceQuery;
    get "/v1/remote" => remote::report, "Links, clients and IOhosts", json!(200, RemoteReport);
    post "/v1/remote/clients/{client}/invite" => remote::invite, "Make a key for a client",
        json!(200, Invitation);
    post "/v1/remote/clients/{client}/revoke" => remote::revoke,
        "Forget a client's key, and end its sessions", Nothing;
    post "/v1/remote/clients/{client}/drain" => remote::drain,
        "Let a client's requests wait, when those in flight have ended", Nothing;
    delete "/v1/remote/clients/{client}/drain" => remote::undrain,
        "Take a client's requests again", Nothing;
    post "/v1/remote/iohosts/{iohost}/drain" => remote::drain_iohost,
        "Let requests to an IOhost wait, when those in flight are answered and flushed", Nothing;
    delete "/v1/remote/iohosts/{iohost}/drain" => remote::undrain_iohost,
        "Let requests to an IOhost go on", Nothing;
    post "/v1/remote/iohosts/{iohost}/move" => remote::move_iohost,
        "Move the sessions with an IOhost to its other link", json!(200, LinkMove), body ToLink;
    post "/v1/remote/links" => remote::add_link, "Add a link", Nothing, body NewLink;
    delete "/v1/remote/links/{link}" => remote::remove_link, "Remove an unused link", Nothing;
    post "/v1/remote/clients" => remote::add_client, "Let a host use devices of this one", Nothing,
        body NewClient;
    delete "/v1/remote/clients/{client}" => remote::remove_client,
        "Remove a client that has no devices", Nothing;
    post "/v1/remote/iohosts" => remote::add_iohost, "Use devices of another host", Nothing,
        body NewIohost;
    delete "/v1/remote/iohosts/{iohost}" => remote::remove_iohost,
        "Remove an IOhost whose devices are not used", Nothing;
    post "/v1/remote/serves" => remote::add_serve, "Serve devices of an IOhost by their names",
        Nothing, body NewServe;
    delete "/v1/remote/serves/{serve}" => remote::remove_serve,
        "Serve such devices no longer", Nothing;
    get "/v1/schedules" => schedules::list, "The schedules of snapshots", json!(200, Schedules);
    put "/v1/schedules" => schedules::set,
        "Replace all schedules until the daemon ends; snapshots stay", Nothing,
        body NewSchedules;
    post "/v1/schedules/run" => schedules::run,
        "Make the snapshots that are due, and delete those that have expired",
        json!(200, Schedules);
    get "/v1/mirrors" => mirrors::list, "The mirrors in use, and their legs", json!(200, Mirrors);
    post "/v1/mirrors/{mirror}/legs" => mirrors::add,
        "Make a store a new leg, and copy everything to it", Nothing, body NewLeg;
    delete "/v1/mirrors/{mirror}/legs/{leg}" => mirrors::remove,
        "Let a leg go for good, by its store or its number", Nothing;
    post "/v1/mirrors/{mirror}/legs/{leg}/attach" => mirrors::attach,
        "Use a leg that was missing or has failed, by its store", Nothing;
    post "/v1/mirrors/{mirror}/repair" => mirrors::repair,
        "Write bytes of one leg to another", Nothing, body RepairOfLeg;
    post "/v1/mirrors/{mirror}/permit" => mirrors::permit,
        "Let half of the legs go on without the others, once", Nothing, body Permission;
    get "/v1/controllers" => volumes::list, "The controllers", json!(200, Controllers);
    get "/v1/controllers/{controller}" => volumes::show,
        "A controller", json!(200, ControllerReport);
    post "/v1/controllers/{controller}/check" => volumes::check,
        "Check all metadata", json!(200, CheckReport);
    post "/v1/controllers/{controller}/prune" => volumes::prune,
        "Drop extent trees from memory", Nothing,
        body Prune;
    post "/v1/controllers/{controller}/flush-btlb" => volumes::flush_btlb,
        "Empty the buffers of translations", Nothing;
    post "/v1/controllers/{controller}/share" => volumes::share,
        "Let equal blocks be one", Nothing, body Share;
    post "/v1/controllers/{controller}/dedup" => dedup::start,
        "Find equal blocks and let them be one, in the background", json!(202, DedupReport),
        body Dedup;
    get "/v1/controllers/{controller}/dedup" => dedup::show,
        "The deduplication in progress, or the last one", json!(200, DedupReport);
    delete "/v1/controllers/{controller}/dedup" => dedup::stop,
        "Stop a deduplication; what it has done stays", json!(200, DedupReport);
    get "/v1/controllers/{controller}/volumes" => volumes::volumes, "The volumes of a controller",
        json!(200, Volumes);
    post "/v1/controllers/{controller}/volumes" => volumes::create,
        "Make a volume", json!(201, VolumeReport),
        body CreateVolume;
    get "/v1/controllers/{controller}/volumes/{volume}" => volumes::volume,
        "A volume", json!(200, VolumeReport);
    delete "/v1/controllers/{controller}/volumes/{volume}" => volumes::delete,
        "Delete a volume", Nothing;
    post "/v1/controllers/{controller}/volumes/{volume}/snapshot" => volumes::snapshot,
        "Make a read-only copy", json!(201, VolumeReport), body Named;
    post "/v1/controllers/{controller}/volumes/{volume}/clone" => volumes::clone,
        "Make a writable copy", json!(201, VolumeReport), body Named;
    post "/v1/controllers/{controller}/volumes/{volume}/resize" => volumes::resize,
        "Give a volume another size", json!(200, VolumeReport), body Resize;
    post "/v1/controllers/{controller}/volumes/{volume}/rename" => volumes::rename,
        "Give a volume another name", json!(200, VolumeReport), body Named;
    post "/v1/controllers/{controller}/volumes/{volume}/quota" => volumes::quota,
        "Give a volume another quota", json!(200, VolumeReport), body Quota;
    get "/v1/controllers/{controller}/volumes/{volume}/extents" => volumes::extents,
        "The mapping of a part of a volume", json!(200, ExtentsReport), query ExtentsQuery;
}
