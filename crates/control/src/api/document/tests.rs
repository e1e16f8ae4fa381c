//! The document is well formed, complete, and equal to the file in docs/.

use serde_json::{Value, json};

use super::{ROUTES, document};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");

/// If `cargo xtask openapi` sets this variable, the file is written.
const WRITE: &str = "SIDECORE_WRITE_DOCS";

#[test]
fn the_file_in_docs_is_the_document() {
    let right = serde_json::to_string_pretty(&document()).unwrap() + "\n";
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(FILE, right).unwrap();
        return;
    }
    let found = std::fs::read_to_string(FILE).unwrap_or_default();
    assert!(
        found == right,
        "run `cargo xtask openapi`: docs/openapi.json is not what the API says"
    );
}

/// Checks a schema object: JSON Schema 2020-12, as far as this document uses it.
fn check_schema(schema: &Value, place: &str) {
    let schema = schema.as_object().unwrap_or_else(|| panic!("{place} is no object"));
    if let Some(reference) = schema.get("$ref") {
        let path = reference.as_str().unwrap().strip_prefix('#').unwrap();
        assert!(document().pointer(path).is_some(), "{place}: {reference} leads nowhere");
        return;
    }
    for (key, value) in schema {
        match key.as_str() {
            "type" => {
                let types = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
                let known = ["string", "integer", "number", "boolean", "object", "array", "null"];
                assert!(
                    types.iter().all(|kind| known.contains(&kind.as_str().unwrap())),
                    "{place}: {value}"
                );
            }
            "properties" => {
                let properties = value.as_object().unwrap();
                properties
                    .iter()
                    .for_each(|(name, schema)| check_schema(schema, &format!("{place}.{name}")));
            }
            "required" => {
                let properties = &schema["properties"];
                for name in value.as_array().unwrap() {
                    assert!(
                        properties.get(name.as_str().unwrap()).is_some(),
                        "{place}: {name} is required and unknown"
                    );
                }
            }
            "items" => check_schema(value, &format!("{place}[]")),
            "prefixItems" => {
                value.as_array().unwrap().iter().for_each(|schema| check_schema(schema, place))
            }
            "anyOf" => {
                value.as_array().unwrap().iter().for_each(|schema| check_schema(schema, place))
            }
            "oneOf" => assert!(value.as_array().unwrap().len() > 1, "{place}"),
            "enum" => assert!(!value.as_array().unwrap().is_empty(), "{place}"),
            "minimum" | "maximum" | "minItems" | "maxItems" => assert!(value.is_u64(), "{place}"),
            "additionalProperties" => assert!(value.is_boolean(), "{place}"),
            "default" => {}
            "description" | "format" | "const" => {
                assert!(!value.as_str().unwrap().is_empty(), "{place}")
            }
            other => panic!("{place}: {other} is no keyword that is checked here"),
        }
    }
}

/// Checks the rules of OpenAPI 3.1.0, section 4.8, for the objects in the document.
#[test]
fn the_document_has_the_structure_of_openapi() {
    let document = document();
    assert_eq!(document["openapi"], "3.1.0");
    assert!(document["info"]["title"].is_string() && document["info"]["version"].is_string());
    for (path, item) in document["paths"].as_object().unwrap() {
        assert!(path.starts_with('/'), "{path}");
        let of_path: Vec<&str> = item["parameters"]
            .as_array()
            .unwrap()
            .iter()
            .map(|p| p["name"].as_str().unwrap())
            .collect();
        assert_eq!(of_path.len(), path.matches('{').count(), "{path}");
        assert!(of_path.iter().all(|name| path.contains(&format!("{{{name}}}"))), "{path}");
        for (method, operation) in
            item.as_object().unwrap().iter().filter(|(key, _)| *key != "parameters")
        {
            assert!(["get", "post", "put", "delete"].contains(&method.as_str()), "{method} {path}");
            assert!(operation["responses"].as_object().unwrap().len() == 2, "{method} {path}");
            for (status, response) in operation["responses"].as_object().unwrap() {
                assert!(
                    status == "default"
                        || status.parse::<u16>().is_ok_and(|status| (200..300).contains(&status))
                );
                assert!(response["description"].is_string(), "{method} {path}");
                for media in
                    response["content"].as_object().iter().flat_map(|content| content.values())
                {
                    check_schema(&media["schema"], path);
                }
            }
            if let Some(body) = operation.get("requestBody") {
                assert!(["post", "put"].contains(&method.as_str()), "{path}");
                check_schema(&body["content"]["application/json"]["schema"], path);
            }
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                assert_eq!(parameter["in"], "query", "{method} {path}");
                check_schema(&parameter["schema"], path);
            }
        }
    }
}

#[test]
fn the_schemas_of_answers_are_those_of_the_reports() {
    let document = document();
    let schemas = document["components"]["schemas"].as_object().unwrap();
    for (name, schema) in schemas {
        check_schema(schema, name);
    }
    let device = &schemas["DeviceReport"];
    assert_eq!(device["properties"]["queues"]["type"], "integer");
    assert!(
        device["properties"].get("type").is_some()
            && device["properties"].get("store_type").is_none()
    );
    let required = device["required"].as_array().unwrap();
    assert!(
        required.contains(&json!("reason")) && !required.contains(&json!("warnings")),
        "{required:?}"
    );
    // Counters are fields of their report.
    let queue = &schemas["QueueCounters"]["properties"];
    assert!(
        ["index", "requests", "latency_ns"].iter().all(|name| queue.get(name).is_some()),
        "{queue}"
    );
}

#[test]
fn every_route_is_in_the_document_and_a_device_has_the_keys_of_the_file() {
    let document = document();
    for route in ROUTES {
        assert!(
            document["paths"][route.path].get(route.method).is_some(),
            "{} {}",
            route.method,
            route.path
        );
    }
    let body = "/paths/~1v1~1devices/post/requestBody/content/application~1json/schema/properties";
    let device = document.pointer(body).unwrap();
    assert_eq!(device["queues"]["maximum"], 64);
    assert_eq!(device["idle"]["enum"], json!(["poll", "adaptive", "interrupt"]));
    assert_eq!(device["volume"]["properties"]["weight"]["maximum"], 1000);
    assert_eq!(device["write_cache"]["default"], true);
}
