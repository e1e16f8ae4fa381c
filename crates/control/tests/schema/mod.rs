//! Answers are what the API's OpenAPI document says: JSON Schema as far as the document uses it.

use serde_json::Value;

/// Checks the JSON of an answer against the schema of its route.
pub fn check_answer(document: &Value, request: &str, status: u16, answer: &str) {
    let (method, target) = request.split_once(' ').unwrap();
    let path = target.split('?').next().unwrap();
    let fits = |template: &&String| {
        let parts = template.split('/').map(|part| (!part.starts_with('{')).then_some(part));
        parts.clone().count() == path.split('/').count()
            && parts
                .zip(path.split('/'))
                .all(|(wanted, part)| wanted.is_none_or(|wanted| wanted == part))
    };
    let template = document["paths"].as_object().unwrap().keys().find(fits);
    let template = template.unwrap_or_else(|| panic!("no path for {request}"));
    let responses = &document["paths"][template][method.to_lowercase()]["responses"];
    let schema = &responses[status.to_string()]["content"]["application/json"]["schema"];
    assert!(schema.is_object(), "{request}: no schema of {status} in {responses}");
    check(document, schema, &serde_json::from_str(answer).unwrap(), request);
}

fn check(document: &Value, schema: &Value, value: &Value, place: &str) {
    if let Some(reference) = schema["$ref"].as_str() {
        let schema = document.pointer(reference.strip_prefix('#').unwrap()).unwrap();
        return check(document, schema, value, place);
    }
    let kinds = schema["type"].as_array().cloned().unwrap_or_else(|| vec![schema["type"].clone()]);
    let is_of_kind = |kind: &Value| match kind.as_str() {
        Some("null") => value.is_null(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_u64(),
        Some("number") => value.is_number(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => true,
    };
    assert!(kinds.iter().any(is_of_kind), "{place}: {value} is not of {schema}");
    for key in ["anyOf", "oneOf"] {
        let Some(schemas) = schema[key].as_array() else { continue };
        let fitting = schemas.iter().find(|schema| match schema.get("const") {
            Some(constant) => constant == value,
            None => {
                schema["type"] == "null" && value.is_null()
                    || schema.get("$ref").is_some() && !value.is_null()
            }
        });
        check(
            document,
            fitting.unwrap_or_else(|| panic!("{place}: {value} is none of {schema}")),
            value,
            place,
        );
    }
    for element in value.as_array().into_iter().flatten().filter(|_| schema.get("items").is_some())
    {
        check(document, &schema["items"], element, place);
    }
    let Some(fields) = value.as_object() else { return };
    for (name, field) in fields {
        let known = schema["properties"].get(name);
        let schema = known.unwrap_or_else(|| panic!("{place}: {name} is not in {schema}"));
        check(document, schema, field, &format!("{place}: {name}"));
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        assert!(fields.contains_key(name.as_str().unwrap()), "{place}: {name} is missing");
    }
}
