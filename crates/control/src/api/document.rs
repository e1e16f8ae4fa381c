//! The API's OpenAPI document, made of the routes, the bodies of requests, and the tables of keys.

use serde_json::{Map, Value, json};

use super::NewDevice;
use super::routes::{Answer, ROUTES, Route};
use crate::config::keys::{self, Key, Kind, Variant};

/// Types that requests are made of.
pub(super) trait Schema {
    /// Whether a field of this type must be there.
    const IS_REQUIRED: bool = true;

    /// The JSON schema.
    fn schema() -> Value;
}

impl Schema for String {
    fn schema() -> Value {
        json!({ "type": "string" })
    }
}

macro_rules! integers {
    ($($type:ty),*) => {
        $(impl Schema for $type {
            fn schema() -> Value {
                json!({ "type": "integer", "minimum": 0 })
            }
        })*
    };
}

integers!(u8, u64, usize);

impl<T: Schema> Schema for Option<T> {
    const IS_REQUIRED: bool = false;

    fn schema() -> Value {
        json!({ "anyOf": [T::schema(), { "type": "null" }] })
    }
}

impl Schema for NewDevice {
    fn schema() -> Value {
        let apart = ["controller", "volume"];
        let volume = keys::VOLUME.iter().filter(|key| !["size", "quota"].contains(&key.name));
        let mut properties = properties(keys::device().chain(keys::front_ends()));
        let volume = self::properties(volume.chain([&keys::STAGE]));
        properties.insert("volume".to_owned(), object(volume, &apart));
        let mut schema = object(properties, &["name", "socket"]);
        if let Value::Object(schema) = &mut schema {
            schema.insert("oneOf".to_owned(), json!([{ "required": ["store"] }, { "required": ["volume"] }]));
        }
        schema
    }
}

fn properties<'a>(keys: impl Iterator<Item = &'a Key>) -> Map<String, Value> {
    keys.map(|key| (key.name.to_owned(), described(of_kind(key.kind), &keys::sentence(key.meaning)))).collect()
}

fn of_kind(kind: Kind) -> Value {
    match kind {
        Kind::Text | Kind::Path => json!({ "type": "string" }),
        Kind::Word(words) => json!({ "type": "string", "enum": words }),
        Kind::Flag(usual) => json!({ "type": "boolean", "default": usual }),
        Kind::Number(least, most) => json!({ "type": "integer", "minimum": least, "maximum": most }),
        Kind::Size => json!({ "type": ["integer", "string"], "minimum": 0 }),
        Kind::Texts => json!({ "type": "array", "items": { "type": "string" } }),
        Kind::Ranges => {
            let number = json!({ "type": "integer", "minimum": 0 });
            json!({ "type": "array", "items": { "type": "array", "items": number, "minItems": 2, "maxItems": 2 } })
        }
        Kind::Sections(_, variants) => {
            json!({ "type": "array", "items": { "anyOf": variants.iter().map(section).collect::<Vec<_>>() } })
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

/// A schema with a description.
pub(super) fn described(mut schema: Value, description: &str) -> Value {
    if let Value::Object(schema) = &mut schema {
        schema.insert("description".to_owned(), description.trim().into());
    }
    schema
}

/// An object with these properties and no others.
pub(super) fn object(properties: Map<String, Value>, required: &[&str]) -> Value {
    json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
}

/// The document.
pub(super) fn document() -> Value {
    let mut paths = Map::new();
    for route in ROUTES {
        let path = paths.entry(route.path).or_insert_with(|| json!({ "parameters": parameters(route.path) }));
        if let Value::Object(path) = path {
            path.insert(route.method.to_owned(), operation(route));
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "sidecored",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The control API of sidecored: HTTP/1.1 over the Unix socket `control_socket`.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [{ "url": "http://localhost" }],
        "paths": paths,
        "components": { "schemas": { "Refusal": refusal() } },
    })
}

fn refusal() -> Value {
    let error = described(String::schema(), "What is wrong, and the remedy.");
    json!({ "type": "object", "properties": { "error": error }, "required": ["error"] })
}

/// The parameters in a path.
fn parameters(path: &str) -> Vec<Value> {
    let names = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    names.map(|name| json!({ "name": name, "in": "path", "required": true, "schema": String::schema() })).collect()
}

fn operation(route: &Route) -> Value {
    let mut operation = Map::new();
    operation.insert("summary".to_owned(), route.summary.into());
    if let Some(body) = route.body {
        operation.insert("requestBody".to_owned(), json!({ "content": { "application/json": { "schema": body() } } }));
    }
    let query = route.query.map(|query| query());
    if let Some(Value::Object(properties)) = query.as_ref().and_then(|query| query.get("properties")) {
        let parameter = |(name, schema): (&String, &Value)| json!({ "name": name, "in": "query", "schema": schema });
        operation.insert("parameters".to_owned(), properties.iter().map(parameter).collect());
    }
    let (status, answer) = match route.answer {
        Answer::Nothing => (204, json!({ "description": "Done" })),
        Answer::Text(kind) => {
            (200, json!({ "description": route.summary, "content": { kind: { "schema": String::schema() } } }))
        }
        Answer::Json(status, lists) => {
            let list = |name: &&str| ((*name).to_owned(), json!({ "type": "array", "items": { "type": "object" } }));
            let schema = json!({ "type": "object", "properties": lists.iter().map(list).collect::<Map<_, _>>() });
            (status, json!({ "description": route.summary, "content": { "application/json": { "schema": schema } } }))
        }
    };
    let refusal = json!({ "schema": { "$ref": "#/components/schemas/Refusal" } });
    let refused = json!({ "description": "Refused", "content": { "application/json": refusal } });
    operation.insert("responses".to_owned(), json!({ status.to_string(): answer, "default": refused }));
    operation.into()
}

#[cfg(test)]
mod tests;
