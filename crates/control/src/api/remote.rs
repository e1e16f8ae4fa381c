//! Links, clients and IOhosts in the control API.

use std::borrow::Cow;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path as UrlPath, Request, State};
use axum::http::StatusCode;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sidecore_assembly::report::{LinkMove, RemoteReport};
use sidecore_assembly::spec::RemoteKind;

use super::answer::{Refusal, body, off_thread};
use super::document::schema_of_keys;
use crate::Source;
use crate::config::{json, keys};

/// The answer to `POST /v1/remote/clients/{client}/invite`.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Invitation {
    /// The client's name.
    pub client: String,
    /// The text of the file that the client needs: a secret, which the daemon does not keep.
    pub invitation: String,
}

type Keys = Map<String, Value>;

macro_rules! parts {
    ($($(#[doc = $doc:literal])+ $Part:ident $keys:expr, $of_types:expr;)*) => {$(
        $(#[doc = $doc])+
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $Part(pub Keys);

        impl JsonSchema for $Part {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($Part).into()
            }

            fn json_schema(_generator: &mut SchemaGenerator) -> Schema {
                schema_of_keys($keys, $of_types)
            }
        }
    )*};
}

parts! {
    /// A link to add: `POST /v1/remote/links`, with the keys of a `[[link]]` in the configuration
    /// file.
    NewLink keys::link(), keys::of_links();
    /// A client to add: `POST /v1/remote/clients`, with the keys of a `[[client]]`.
    NewClient keys::client(), std::iter::empty();
    /// An IOhost to add: `POST /v1/remote/iohosts`, with the keys of an `[[iohost]]`.
    NewIohost keys::IOHOST.iter(), std::iter::empty();
    /// A pattern to add: `POST /v1/remote/serves`, with the keys of a `[[serve]]`.
    NewServe keys::serve(), keys::front_ends_of_disks();
}

type Shared = State<Arc<dyn Source>>;

async fn add(source: Arc<dyn Source>, kind: RemoteKind, keys: Keys) -> Result<StatusCode, Refusal> {
    let part = json::remote_part(kind, keys).map_err(Refusal::invalid)?;
    off_thread(move || source.add_part(&part)).await.map(|()| StatusCode::NO_CONTENT)
}

async fn remove(
    source: Arc<dyn Source>,
    kind: RemoteKind,
    name: String,
) -> Result<StatusCode, Refusal> {
    off_thread(move || source.remove_part(kind, &name)).await.map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn add_link(
    State(source): Shared,
    request: Request,
) -> Result<StatusCode, Refusal> {
    add(source, RemoteKind::Link, body::<NewLink>(request).await?.0).await
}

pub(super) async fn remove_link(
    State(source): Shared,
    UrlPath(link): UrlPath<String>,
) -> Result<StatusCode, Refusal> {
    remove(source, RemoteKind::Link, link).await
}

pub(super) async fn add_client(
    State(source): Shared,
    request: Request,
) -> Result<StatusCode, Refusal> {
    add(source, RemoteKind::Client, body::<NewClient>(request).await?.0).await
}

pub(super) async fn remove_client(
    State(source): Shared,
    UrlPath(client): UrlPath<String>,
) -> Result<StatusCode, Refusal> {
    remove(source, RemoteKind::Client, client).await
}

pub(super) async fn add_iohost(
    State(source): Shared,
    request: Request,
) -> Result<StatusCode, Refusal> {
    add(source, RemoteKind::Iohost, body::<NewIohost>(request).await?.0).await
}

pub(super) async fn remove_iohost(
    State(source): Shared,
    UrlPath(iohost): UrlPath<String>,
) -> Result<StatusCode, Refusal> {
    remove(source, RemoteKind::Iohost, iohost).await
}

pub(super) async fn add_serve(
    State(source): Shared,
    request: Request,
) -> Result<StatusCode, Refusal> {
    add(source, RemoteKind::Serve, body::<NewServe>(request).await?.0).await
}

pub(super) async fn remove_serve(
    State(source): Shared,
    UrlPath(serve): UrlPath<String>,
) -> Result<StatusCode, Refusal> {
    remove(source, RemoteKind::Serve, serve).await
}

pub(super) async fn report(State(source): Shared) -> Json<RemoteReport> {
    Json(source.remote())
}

pub(super) async fn invite(
    State(source): Shared,
    UrlPath(client): UrlPath<String>,
) -> Result<Json<Invitation>, Refusal> {
    let invitation = {
        let client = client.clone();
        off_thread(move || source.invite(&client)).await?
    };
    Ok(Json(Invitation { client, invitation }))
}

pub(super) async fn revoke(
    State(source): Shared,
    UrlPath(client): UrlPath<String>,
) -> Result<StatusCode, Refusal> {
    off_thread(move || source.revoke(&client)).await.map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn drain(
    State(source): Shared,
    UrlPath(client): UrlPath<String>,
) -> Result<StatusCode, Refusal> {
    off_thread(move || source.drain_client(&client)).await.map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn undrain(
    State(source): Shared,
    UrlPath(client): UrlPath<String>,
) -> Result<StatusCode, Refusal> {
    off_thread(move || source.undrain_client(&client)).await.map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn drain_iohost(
    State(source): Shared,
    UrlPath(iohost): UrlPath<String>,
) -> Result<StatusCode, Refusal> {
    off_thread(move || source.drain_iohost(&iohost)).await.map(|()| StatusCode::NO_CONTENT)
}

/// The link that an IOhost's sessions go to.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToLink {
    /// The name of one of the IOhost's two links.
    pub link: String,
}

pub(super) async fn move_iohost(
    State(source): Shared,
    UrlPath(iohost): UrlPath<String>,
    request: Request,
) -> Result<Json<LinkMove>, Refusal> {
    let ToLink { link } = body(request).await?;
    off_thread(move || source.move_iohost(&iohost, &link)).await.map(Json)
}

pub(super) async fn undrain_iohost(
    State(source): Shared,
    UrlPath(iohost): UrlPath<String>,
) -> Result<StatusCode, Refusal> {
    off_thread(move || source.undrain_iohost(&iohost)).await.map(|()| StatusCode::NO_CONTENT)
}
