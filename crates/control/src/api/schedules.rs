//! Schedules of snapshots in the control API.

use std::borrow::Cow;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sidecore_assembly::AssemblyError;
use sidecore_assembly::report::ScheduleReport;
use sidecore_assembly::spec::{ScheduleSpec, Spec};

use super::answer::{Refusal, body, off_thread};
use super::document::schema_of_keys;
use crate::Source;
use crate::config::{json, keys};

/// The answer to `GET /v1/schedules` and to `POST /v1/schedules/run`.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
pub struct Schedules {
    /// In the order of the configuration.
    pub schedules: Vec<ScheduleReport>,
}

/// All schedules: `PUT /v1/schedules`.
#[derive(Clone, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewSchedules {
    /// The first one that fits a volume has it.
    pub schedules: Vec<NewSchedule>,
}

impl NewSchedules {
    /// The schedules of a specification.
    #[must_use]
    pub fn of(spec: &Spec) -> Self {
        let keys = |spec: &ScheduleSpec| {
            let ScheduleSpec { name, controller, volumes, keep } = spec;
            let controller = controller.clone().map_or(Value::Null, Value::from);
            let keys = [
                ("name", Value::from(name.clone())),
                ("controller", controller),
                ("volumes", Value::from(volumes.clone())),
                ("keep", Value::from(keep.to_string())),
            ];
            NewSchedule(keys.map(|(key, value)| (key.to_owned(), value)).into_iter().collect())
        };
        Self { schedules: spec.schedules.iter().map(keys).collect() }
    }
}

/// A schedule, with the keys of a `[[schedule]]` in the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NewSchedule(pub Map<String, Value>);

impl JsonSchema for NewSchedule {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "NewSchedule".into()
    }

    fn json_schema(_generator: &mut SchemaGenerator) -> Schema {
        schema_of_keys(keys::SCHEDULE.iter(), std::iter::empty())
    }
}

type Shared = State<Arc<dyn Source>>;

pub(super) async fn list(State(source): Shared) -> Json<Schedules> {
    Json(Schedules { schedules: source.schedules() })
}

pub(super) async fn set(State(source): Shared, request: Request) -> Result<StatusCode, Refusal> {
    let new = body::<NewSchedules>(request).await?.schedules;
    let specs = new.into_iter().map(|schedule| json::schedule(schedule.0));
    let specs = specs.collect::<Result<_, _>>().map_err(Refusal::invalid)?;
    off_thread(move || source.set_schedules(specs)).await.map(|()| StatusCode::NO_CONTENT)
}

pub(super) async fn run(State(source): Shared) -> Result<Json<Schedules>, Refusal> {
    let run = move || Ok::<_, AssemblyError>(source.run_schedules());
    off_thread(run).await.map(|schedules| Json(Schedules { schedules }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_schedule_has_the_keys_of_the_configuration() {
        let settle = |keys: Value| match keys {
            Value::Object(keys) => json::schedule(keys),
            _ => Err("no keys".to_owned()),
        };
        let good =
            json!({ "name": "s", "volumes": ["vm-*"], "keep": "2 daily", "controller": null });
        let spec = settle(good).unwrap();
        let of = NewSchedules::of(&Spec { schedules: vec![spec.clone()], ..Spec::default() });
        assert_eq!(settle(Value::Object(of.schedules[0].0.clone())), Ok(spec.clone()));
        assert_eq!((spec.keep.to_string().as_str(), spec.controller), ("2 daily", None));
        for (wanted, keys) in [
            ("`name` is missing", json!({ "volumes": ["*"], "keep": "2 daily" })),
            ("`keep` is missing", json!({ "name": "s", "volumes": ["*"] })),
            ("`volumes` is empty", json!({ "name": "s", "volumes": [], "keep": "2 daily" })),
            ("`volumes`", json!({ "name": "s", "volumes": "*", "keep": "2 daily" })),
            ("a rule keeps 1 to 1000", json!({ "name": "s", "volumes": ["*"], "keep": "0 daily" })),
            ("did you mean `keep`", json!({ "name": "s", "volumes": ["*"], "kep": "2 daily" })),
        ] {
            let said = settle(keys).unwrap_err();
            assert!(said.contains(wanted), "{wanted}: {said}");
        }
    }
}
