//! The API's OpenAPI document, made of the routes, the types of requests and answers, and the
//! tables of keys.

use std::borrow::Cow;

use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

use super::routes::{Answer, ROUTES, Route};
use super::{NewDevice, NewStage};
use crate::config::keys::{self, Key, Kind, StageSpec, StoreKind, Variant};

/// The schema of a type.
pub(super) type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

impl JsonSchema for NewDevice {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "NewDevice".into()
    }

    fn json_schema(_generator: &mut SchemaGenerator) -> Schema {
        let apart = ["controller", "volume"];
        let volume = keys::VOLUME.iter().filter(|key| !["size", "quota"].contains(&key.name));
        let mut properties = properties(keys::device().chain(keys::front_ends()));
        let volume = self::properties(volume.chain([&keys::STAGE]));
        properties.insert("volume".to_owned(), object(volume, &apart));
        let remote = StoreKind::keys("remote").iter().chain([&keys::STAGE]);
        properties.insert("remote".to_owned(), object(self::properties(remote), &["iohost"]));
        let mut schema = object(properties, &["name"]);
        if let Value::Object(schema) = &mut schema {
            schema.insert(
                "oneOf".to_owned(),
                ["store", "volume", "remote", "switch"]
                    .map(|key| json!({ "required": [key] }))
                    .into(),
            );
        }
        schema.try_into().unwrap_or_default()
    }
}

impl JsonSchema for NewStage {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "NewStage".into()
    }

    fn json_schema(_generator: &mut SchemaGenerator) -> Schema {
        let position = described(
            json!({ "type": "integer", "minimum": 1, "default": 1 }),
            "The place among the stages that were added; 1 is the first that a request meets.",
        );
        let with_position = |variant: &Variant| {
            let mut section = section(variant);
            if let Some(Value::Object(keys)) = section.get_mut("properties") {
                keys.insert("position".to_owned(), position.clone());
            }
            section
        };
        let any: Vec<_> = StageSpec::VARIANTS.iter().map(with_position).collect();
        json!({ "anyOf": any }).try_into().unwrap_or_default()
    }
}

/// The schema of an object with these keys, and with others that depend on its type.
pub(super) fn schema_of_keys(
    keys: impl Iterator<Item = &'static Key>,
    of_types: impl Iterator<Item = &'static Key>,
) -> Schema {
    let keys: Vec<&Key> = keys.collect();
    let required = keys.iter().filter(|key| key.required.is_some()).map(|key| key.name);
    let required: Vec<&str> = required.collect();
    object(properties(keys.into_iter().chain(of_types)), &required).try_into().unwrap_or_default()
}

fn properties<'a>(keys: impl Iterator<Item = &'a Key>) -> Map<String, Value> {
    keys.filter(|key| !key.in_file_only)
        .map(|key| {
            (key.name.to_owned(), described(of_kind(key.kind), &keys::sentence(key.meaning)))
        })
        .collect()
}

fn of_kind(kind: Kind) -> Value {
    match kind {
        Kind::Text | Kind::Path => json!({ "type": "string" }),
        Kind::Word(words) => json!({ "type": "string", "enum": words }),
        Kind::Flag(usual) => json!({ "type": "boolean", "default": usual }),
        Kind::Number(least, most) => {
            json!({ "type": "integer", "minimum": least, "maximum": most })
        }
        Kind::Size => json!({ "type": ["integer", "string"], "minimum": 0 }),
        Kind::Texts | Kind::Lines => json!({ "type": "array", "items": { "type": "string" } }),
        Kind::Ranges => {
            let number = json!({ "type": "integer", "minimum": 0 });
            let pair = json!({ "type": "array", "items": number, "minItems": 2, "maxItems": 2 });
            json!({ "type": "array", "items": pair })
        }
        Kind::Sections(_, variants) => {
            let any: Vec<_> = variants.iter().map(section).collect();
            json!({ "type": "array", "items": { "anyOf": any } })
        }
    }
}

/// A section of a list whose sections have types.
fn section(variant: &Variant) -> Value {
    let mut properties = properties(variant.keys.iter());
    properties.insert("type".to_owned(), json!({ "type": "string", "enum": [variant.word] }));
    let required = variant.keys.iter().filter(|key| key.required.is_some()).map(|key| key.name);
    let schema = object(properties, &["type"].into_iter().chain(required).collect::<Vec<_>>());
    described(schema, &keys::sentence(variant.meaning))
}

/// Adds a description to a schema.
fn described(mut schema: Value, description: &str) -> Value {
    if let Value::Object(schema) = &mut schema {
        schema.insert("description".to_owned(), description.trim().into());
    }
    schema
}

/// Makes the schema of an object with these properties and no others.
fn object(properties: Map<String, Value>, required: &[&str]) -> Value {
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    })
}

/// The document. Requests have their schemas in place, answers share theirs.
pub(super) fn document() -> Value {
    let mut sent = SchemaSettings::draft2020_12()
        .with(|settings| settings.inline_subschemas = true)
        .into_generator();
    let mut answered = SchemaSettings::draft2020_12().for_serialize();
    answered.definitions_path = "/components/schemas".into();
    let mut answered = answered.into_generator();
    let mut paths = Map::new();
    for route in ROUTES {
        let path = paths
            .entry(route.path)
            .or_insert_with(|| json!({ "parameters": parameters(route.path) }));
        if let Value::Object(path) = path {
            path.insert(route.method.to_owned(), operation(route, &mut sent, &mut answered));
        }
    }
    let mut schemas = answered.take_definitions(true);
    schemas.insert("Refusal".to_owned(), refusal());
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "sidecored",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The control API of sidecored: HTTP/1.1 over the Unix socket \
                            `control_socket`.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [{ "url": "http://localhost" }],
        "paths": paths,
        "components": { "schemas": schemas },
    })
}

fn refusal() -> Value {
    let error = described(text(), "What is wrong, and the remedy.");
    json!({ "type": "object", "properties": { "error": error }, "required": ["error"] })
}

fn text() -> Value {
    json!({ "type": "string" })
}

/// Returns the parameters in a path.
fn parameters(path: &str) -> Vec<Value> {
    let names = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    names
        .map(|name| json!({ "name": name, "in": "path", "required": true, "schema": text() }))
        .collect()
}

fn operation(route: &Route, sent: &mut SchemaGenerator, answered: &mut SchemaGenerator) -> Value {
    let mut operation = Map::new();
    operation.insert("summary".to_owned(), route.summary.into());
    if let Some(body) = route.body {
        let schema = body(sent);
        operation.insert(
            "requestBody".to_owned(),
            json!({ "content": { "application/json": { "schema": schema } } }),
        );
    }
    let query = route.query.map(|query| query(sent).to_value());
    if let Some(Value::Object(properties)) =
        query.as_ref().and_then(|query| query.get("properties"))
    {
        let parameter = |(name, schema): (&String, &Value)| {
            json!(
                { "name": name, "in": "query", "schema": schema }
            )
        };
        operation.insert("parameters".to_owned(), properties.iter().map(parameter).collect());
    }
    let content = |kind: &str, schema| {
        json!(
            { "description": route.summary, "content": { kind: { "schema": schema } } }
        )
    };
    let (status, answer) = match route.answer {
        Answer::Nothing => (204, json!({ "description": "Done" })),
        Answer::Text(kind) => (200, content(kind, text())),
        Answer::Stream(kind) => (200, content(kind, json!({}))),
        Answer::Lines(kind, schema) => (200, content(kind, schema(answered).to_value())),
        Answer::Json(status, schema) => {
            (status, content("application/json", schema(answered).to_value()))
        }
    };
    let refusal = json!({ "schema": { "$ref": "#/components/schemas/Refusal" } });
    let refused = json!({ "description": "Refused", "content": { "application/json": refusal } });
    operation
        .insert("responses".to_owned(), json!({ status.to_string(): answer, "default": refused }));
    operation.into()
}

#[cfg(test)]
mod tests;
