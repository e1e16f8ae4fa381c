//! Controllers and their volumes: `/v1/controllers` and below. Every handler here may wait for a
//! disk.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, Request, State};
use axum::http::StatusCode;
use serde::de::DeserializeOwned;
use sidecore_assembly::report::{CheckReport, ControllerReport, ExtentsReport, VolumeReport};
use sidecore_assembly::{BlocksOf, ControllerHandle, OperationError};

use super::answer::{Refusal, body, off_thread};
use super::requests::{CreateVolume, ExtentsQuery, Named, Prune, Quota, Resize, Share};
use super::{Controllers, Volumes};
use crate::Source;

type Shared = State<Arc<dyn Source>>;
type Answer<T> = Result<Json<T>, Refusal>;
type Made = Result<(StatusCode, Json<VolumeReport>), Refusal>;
type Done = Result<StatusCode, Refusal>;
/// The controller and the volume that a path names.
type Pair = Path<(String, String)>;

/// Runs `work` with the controller of this name, on another thread than the API's.
pub(super) async fn with<T: Send + 'static>(
    source: &Arc<dyn Source>,
    controller: String,
    work: impl FnOnce(&ControllerHandle) -> Result<T, OperationError> + Send + 'static,
) -> Result<T, Refusal> {
    let handle = find(source, &controller)?;
    off_thread(move || work(&handle)).await
}

pub(super) fn find(source: &Arc<dyn Source>, name: &str) -> Result<Arc<ControllerHandle>, Refusal> {
    let controllers = source.controllers();
    controllers.iter().find(|controller| controller.name() == name).cloned().ok_or_else(|| {
        if let Some(closed) =
            source.closed_controllers().into_iter().find(|closed| closed.name == name)
        {
            return Refusal::new(StatusCode::CONFLICT, closed.to_string());
        }
        let names: Vec<String> =
            controllers.iter().map(|controller| format!("\"{}\"", controller.name())).collect();
        let there = if names.is_empty() {
            "there are none".to_owned()
        } else {
            format!("there are {}", names.join(", "))
        };
        Refusal::not_found(format!("there is no controller \"{name}\"; {there}"))
    })
}

type VolumeResult = Result<VolumeReport, OperationError>;

/// Reads the request's body, and makes a volume from it.
async fn make<T: DeserializeOwned + Send + 'static>(
    source: &Arc<dyn Source>,
    (controller, request): (String, Request),
    work: impl FnOnce(&ControllerHandle, T) -> VolumeResult + Send + 'static,
) -> Result<Json<VolumeReport>, Refusal> {
    // A missing controller is reported before all other faults of the request.
    find(source, &controller)?;
    let body: T = body(request).await?;
    with(source, controller, move |handle| work(handle, body)).await.map(Json)
}

fn created(volume: Json<VolumeReport>) -> (StatusCode, Json<VolumeReport>) {
    (StatusCode::CREATED, volume)
}

pub(super) async fn list(State(source): Shared) -> Answer<Controllers> {
    let report = move || {
        let controllers =
            source.controllers().iter().map(|controller| controller.report()).collect();
        Ok::<_, Refusal>(Controllers { controllers, closed: source.closed_controllers() })
    };
    Ok(Json(off_thread(report).await?))
}

pub(super) async fn show(
    State(source): Shared,
    Path(controller): Path<String>,
) -> Answer<ControllerReport> {
    with(&source, controller, |handle| Ok(handle.report())).await.map(Json)
}

pub(super) async fn volumes(
    State(source): Shared,
    Path(controller): Path<String>,
) -> Answer<Volumes> {
    with(&source, controller, ControllerHandle::volumes_with_usage)
        .await
        .map(|volumes| Json(Volumes { volumes }))
}

pub(super) async fn create(
    State(source): Shared,
    Path(controller): Path<String>,
    request: Request,
) -> Made {
    let create = |handle: &ControllerHandle, new: CreateVolume| {
        handle.create_volume(&new.name, new.size_bytes, new.quota_bytes)
    };
    make(&source, (controller, request), create).await.map(created)
}

pub(super) async fn volume(
    State(source): Shared,
    Path((controller, volume)): Pair,
) -> Answer<VolumeReport> {
    with(&source, controller, move |handle| handle.volume_with_usage(&volume)).await.map(Json)
}

pub(super) async fn delete(State(source): Shared, Path((controller, volume)): Pair) -> Done {
    with(&source, controller, move |handle| handle.delete_volume(&volume))
        .await
        .map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn snapshot(
    State(source): Shared,
    Path((controller, volume)): Pair,
    request: Request,
) -> Made {
    let take =
        move |handle: &ControllerHandle, new: Named| handle.snapshot_volume(&volume, &new.name);
    make(&source, (controller, request), take).await.map(created)
}

pub(super) async fn clone(
    State(source): Shared,
    Path((controller, volume)): Pair,
    request: Request,
) -> Made {
    let clone =
        move |handle: &ControllerHandle, new: Named| handle.clone_volume(&volume, &new.name);
    make(&source, (controller, request), clone).await.map(created)
}

pub(super) async fn resize(
    State(source): Shared,
    Path((controller, volume)): Pair,
    request: Request,
) -> Answer<VolumeReport> {
    let resize =
        move |handle: &ControllerHandle, new: Resize| handle.resize_volume(&volume, new.size_bytes);
    make(&source, (controller, request), resize).await
}

pub(super) async fn rename(
    State(source): Shared,
    Path((controller, volume)): Pair,
    request: Request,
) -> Answer<VolumeReport> {
    let rename =
        move |handle: &ControllerHandle, new: Named| handle.rename_volume(&volume, &new.name);
    make(&source, (controller, request), rename).await
}

pub(super) async fn quota(
    State(source): Shared,
    Path((controller, volume)): Pair,
    request: Request,
) -> Answer<VolumeReport> {
    let quota =
        move |handle: &ControllerHandle, new: Quota| handle.set_quota(&volume, new.quota_bytes);
    make(&source, (controller, request), quota).await
}

pub(super) async fn extents(
    State(source): Shared,
    Path((controller, volume)): Pair,
    query: Result<Query<ExtentsQuery>, QueryRejection>,
) -> Answer<ExtentsReport> {
    let Query(query) = query.map_err(|error| Refusal::invalid(error.body_text()))?;
    if !(1..=ExtentsQuery::MAX).contains(&query.max) {
        return Err(Refusal::invalid(format!(
            "`max` is a whole number from 1 to {}",
            ExtentsQuery::MAX
        )));
    }
    with(&source, controller, move |handle| handle.extents(&volume, query.from, query.max))
        .await
        .map(Json)
}

pub(super) async fn check(
    State(source): Shared,
    Path(controller): Path<String>,
) -> Answer<CheckReport> {
    with(&source, controller, ControllerHandle::check).await.map(Json)
}

pub(super) async fn prune(
    State(source): Shared,
    Path(controller): Path<String>,
    request: Request,
) -> Done {
    act(&source, (controller, request), |handle, request: Prune| {
        handle.prune(request.volume.as_deref())
    })
    .await
}

pub(super) async fn flush_btlb(State(source): Shared, Path(controller): Path<String>) -> Done {
    with(&source, controller, ControllerHandle::flush_btlb).await.map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn share(
    State(source): Shared,
    Path(controller): Path<String>,
    request: Request,
) -> Done {
    let share = |handle: &ControllerHandle, request: Share| {
        let from = BlocksOf {
            volume: &request.from.volume,
            first: request.from.first,
            count: request.count,
        };
        let to =
            BlocksOf { volume: &request.to.volume, first: request.to.first, count: request.count };
        handle.share(from, to)
    };
    act(&source, (controller, request), share).await
}

/// Reads the request's body, and runs `work` with it, which returns nothing.
async fn act<T: DeserializeOwned + Send + 'static>(
    source: &Arc<dyn Source>,
    (controller, request): (String, Request),
    work: impl FnOnce(&ControllerHandle, T) -> Result<(), OperationError> + Send + 'static,
) -> Done {
    find(source, &controller)?;
    let body: T = body(request).await?;
    with(source, controller, move |handle| work(handle, body))
        .await
        .map(|()| StatusCode::NO_CONTENT)
}
