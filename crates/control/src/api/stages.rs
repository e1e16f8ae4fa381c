//! The stages of a device in the control API.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path as UrlPath, Request, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sidecore_assembly::AddedStage;
use sidecore_assembly::report::{StageChange, StagesReport};

use super::answer::{Refusal, body, off_thread};
use crate::Source;
use crate::config::json;

/// A stage to add to a device: `POST /v1/devices/{device}/stages`. It has the keys of a
/// `[[store.stage]]` in the configuration file, and may have a `position` among the stages that
/// were added: 1, which is the default, is the first that a request meets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NewStage(pub Map<String, Value>);

impl NewStage {
    /// Makes a stage of this type.
    #[must_use]
    pub fn new(word: &str) -> Self {
        Self::default().with("type", word)
    }

    /// Sets a key's value.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.0.insert(key.to_owned(), value.into());
        self
    }

    /// The stage and its position.
    fn settle(mut self) -> Result<(AddedStage, usize), String> {
        let position = match self.0.remove("position").unwrap_or(Value::Null) {
            Value::Null => 1,
            given => given
                .as_u64()
                .and_then(|position| usize::try_from(position).ok())
                .ok_or("`position` is a whole number from 1")?,
        };
        let setting = |(key, value): (&String, &Value)| match value {
            Value::String(text) => format!("{key}={text}"),
            value => format!("{key}={value}"),
        };
        let settings = self.0.iter().filter(|(key, value)| *key != "type" && !value.is_null());
        let settings = settings.map(setting).collect();
        Ok((AddedStage { spec: json::stage(self.0)?, settings }, position))
    }
}

type Shared = State<Arc<dyn Source>>;

pub(super) async fn list(
    State(source): Shared,
    UrlPath(device): UrlPath<String>,
) -> Result<Json<StagesReport>, Refusal> {
    off_thread(move || source.stages(&device)).await.map(Json)
}

pub(super) async fn add(
    State(source): Shared,
    UrlPath(device): UrlPath<String>,
    request: Request,
) -> Result<(StatusCode, Json<StageChange>), Refusal> {
    let (stage, position) = body::<NewStage>(request).await?.settle().map_err(Refusal::invalid)?;
    let added = off_thread(move || source.add_stage(&device, &stage, position)).await?;
    Ok((StatusCode::CREATED, Json(added)))
}

pub(super) async fn remove(
    State(source): Shared,
    UrlPath((device, stage)): UrlPath<(String, String)>,
) -> Result<Json<StageChange>, Refusal> {
    off_thread(move || source.remove_stage(&device, &stage)).await.map(Json)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_stage_has_the_keys_of_the_configuration_and_a_position() {
        let (stage, position) = NewStage::new("delay").with("delay_us", 5).settle().unwrap();
        assert_eq!((stage.spec.word(), position), ("delay", 1));
        assert_eq!(stage.settings, ["delay_us=5"]);
        let fault = NewStage::new("fault").with("ranges", json!([[0, 7]])).with("position", 2);
        let (stage, position) = fault.settle().unwrap();
        assert_eq!((stage.spec.word(), position), ("fault", 2));
        assert_eq!(stage.settings, ["ranges=[[0,7]]"]);
        for file in ["vd0.recording", "/tmp/vd0.recording"] {
            let (stage, _) = NewStage::new("record").with("file", file).settle().unwrap();
            assert_eq!(stage.spec.recording(), Some(std::path::Path::new(file)));
        }
    }

    #[test]
    fn each_fault_is_named() {
        let delay = || NewStage::new("delay").with("delay_us", 5);
        for (wanted, stage) in [
            ("`type` is missing", NewStage::default()),
            ("type = \"tape\" is not one of \"delay\"", NewStage::new("tape")),
            ("`delay_us` is missing", NewStage::new("delay")),
            ("`delay_us` must be a whole number", delay().with("delay_us", "x")),
            ("unknown key `delay_u`; did you mean `delay_us`?", delay().with("delay_u", 5)),
            ("`records` is allowed in the", NewStage::new("meter").with("records", "/etc/profile")),
            ("`file` is an absolute path", NewStage::new("record").with("file", "./a.recording")),
            ("`file` is a path that ends", NewStage::new("record").with("file", "..")),
            ("`position` is a whole number", delay().with("position", -1)),
            ("`position` is a whole number", delay().with("position", "first")),
        ] {
            let said = stage.settle().unwrap_err();
            assert!(said.contains(wanted), "{wanted}: {said}");
        }
    }
}
