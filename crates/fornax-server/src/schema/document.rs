//! Puts the description together from its parts and publishes it as OpenAPI. Knows paths and the names of
//! schemas; what an endpoint does is elsewhere.

use std::collections::HashMap;
use std::sync::OnceLock;

use serde_json::{Map, Value, json};

use super::shape::Shape;

/// An endpoint as the description knows it.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) method: &'static str,
    pub(crate) path: &'static str,
    pub(crate) summary: &'static str,
    /// The schema of the body.
    pub(crate) body: Option<&'static str>,
    /// What the answer is.
    answer: Answer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Json,
    /// JSON, or events where the request asks for them.
    JsonOrEvents,
    Text,
}

const fn post(
    path: &'static str,
    body: &'static str,
    answer: Answer,
    summary: &'static str,
) -> Endpoint {
    Endpoint { method: "post", path, summary, body: Some(body), answer }
}

const fn get(path: &'static str, answer: Answer, summary: &'static str) -> Endpoint {
    Endpoint { method: "get", path, summary, body: None, answer }
}

/// Every endpoint.
pub(crate) const ENDPOINTS: [Endpoint; 14] = [
    post("/v1/chat/completions", "ChatRequest", Answer::JsonOrEvents, "Answer a conversation"),
    post("/v1/completions", "CompletionsRequest", Answer::JsonOrEvents, "Continue a text"),
    post(
        "/v1/responses",
        "ResponsesRequest",
        Answer::JsonOrEvents,
        "Answer items (OpenAI's newer protocol)",
    ),
    post("/v1/embeddings", "EmbeddingsRequest", Answer::Json, "Turn texts into vectors"),
    post(
        "/v1/messages",
        "MessagesRequest",
        Answer::JsonOrEvents,
        "Answer a conversation (Anthropic's protocol)",
    ),
    post(
        "/v1/messages/count_tokens",
        "CountTokensRequest",
        Answer::Json,
        "Count the tokens of a conversation (Anthropic's protocol)",
    ),
    post("/tokenize", "TokenizeRequest", Answer::Json, "Turn text into token ids"),
    post("/detokenize", "DetokenizeRequest", Answer::Json, "Turn token ids into text"),
    post(
        "/apply-template",
        "ApplyTemplateRequest",
        Answer::Json,
        "Lay out a conversation as the model sees it",
    ),
    get("/v1/models", Answer::Json, "The models that are loaded"),
    get("/v1/models/{model}", Answer::Json, "One of them"),
    get("/health", Answer::Json, "Whether the engine works, and what it last did"),
    get("/metrics", Answer::Text, "Figures for Prometheus"),
    get("/openapi.json", Answer::Json, "This description"),
];

/// Files of the description, and what each holds.
const PARTS: [&str; 4] = [
    include_str!("parts.json"),
    include_str!("texts.json"),
    include_str!("messages.json"),
    include_str!("responses.json"),
];

/// The whole description, made once.
#[derive(Debug)]
pub(crate) struct Document {
    published: Value,
    shapes: HashMap<String, Shape>,
    /// The schemas as written, with what they include; for the tables of the documentation.
    #[cfg_attr(not(test), allow(dead_code))]
    pub(super) schemas: Map<String, Value>,
}

impl Document {
    /// The one description.
    pub(crate) fn get() -> &'static Document {
        static ONE: OnceLock<Document> = OnceLock::new();
        ONE.get_or_init(|| match Document::build() {
            Ok(document) => document,
            // Every test that starts a server comes through here.
            Err(why) => panic!("the description of the interface is broken: {why}"),
        })
    }

    /// The object of `/openapi.json`.
    pub(crate) fn published(&self) -> &Value {
        &self.published
    }

    /// What a request of this name must look like.
    pub(crate) fn shape(&self, name: &str) -> &Shape {
        self.shapes.get(name).unwrap_or(&Shape::Null)
    }

    fn build() -> Result<Document, String> {
        let parse = |text: &str| serde_json::from_str::<Value>(text).map_err(|e| e.to_string());
        let mut schemas = Map::new();
        for part in PARTS {
            let Value::Object(map) = parse(part)? else { return Err("a part is no object".into()) };
            schemas.extend(map);
        }
        schemas.insert("ChatRequest".into(), parse(include_str!("chat.json"))?);
        schemas.insert("CompletionsRequest".into(), parse(include_str!("completions.json"))?);
        let includes = json!({
            "generating": parse(include_str!("generating.json"))?,
            "sampling": parse(include_str!("sampling.json"))?,
        });
        let written = schemas.clone();
        for schema in schemas.values_mut() {
            include(schema, &includes, &written)?;
        }
        let mut shapes = HashMap::new();
        for (name, schema) in &schemas {
            let shape = Shape::read(schema, &schemas).map_err(|e| format!("{name}: {e}"))?;
            shapes.insert(name.clone(), shape);
        }
        let mut components = schemas.clone();
        components.values_mut().for_each(allow_null);
        components.insert("Error".into(), error_schema());
        let published = json!({
            "openapi": "3.1.0",
            "info": {
                "title": "fornax",
                "version": env!("CARGO_PKG_VERSION"),
                "description": "Every field that is not described here is refused by name with 400. Fields with `x-ignored` are accepted and have no effect; it says why. Null is the same as absent.",
            },
            "paths": paths(),
            "components": {
                "schemas": components,
                "securitySchemes": { "key": { "type": "http", "scheme": "bearer" } },
            },
        });
        Ok(Document { published, shapes, schemas })
    }
}

/// Puts what a schema includes or extends in front of its own properties.
fn include(
    schema: &mut Value,
    includes: &Value,
    written: &Map<String, Value>,
) -> Result<(), String> {
    let Some(map) = schema.as_object_mut() else { return Ok(()) };
    let mut properties = Map::new();
    if let Some(name) = map.remove("x-extends") {
        let base = name.as_str().and_then(|n| written.get(n)).ok_or("extends what is not there")?;
        properties.extend(base["properties"].as_object().cloned().unwrap_or_default());
    }
    let names = map.remove("x-include");
    let own = map.get("properties").and_then(Value::as_object).cloned().unwrap_or_default();
    properties.extend(own);
    for name in names.iter().filter_map(Value::as_array).flatten().filter_map(Value::as_str) {
        let included = includes[name].as_object().ok_or("includes what is not there")?;
        properties.extend(included.clone());
    }
    if !properties.is_empty() {
        map.insert("properties".into(), properties.into());
    }
    Ok(())
}

/// Says of every optional property that it may be null, all the way down.
fn allow_null(schema: &mut Value) {
    let Some(map) = schema.as_object_mut() else { return };
    let required = map.get("required").cloned().unwrap_or_default();
    let is_required = |name: &str| required.as_array().is_some_and(|r| r.iter().any(|v| v == name));
    if let Some(properties) = map.get_mut("properties").and_then(Value::as_object_mut) {
        for (name, property) in properties.iter_mut() {
            allow_null(property);
            if !is_required(name) {
                *property = or_null(property.take());
            }
        }
    }
    for branch in map.get_mut("anyOf").and_then(Value::as_array_mut).into_iter().flatten() {
        allow_null(branch);
    }
    if let Some(items) = map.get_mut("items") {
        allow_null(items);
    }
    if let Some(keys) = map.remove("x-keys") {
        map.insert("propertyNames".into(), json!({ "pattern": keys }));
    }
}

fn or_null(schema: Value) -> Value {
    let Value::Object(mut map) = schema else { return schema };
    let null = json!({ "type": "null" });
    if let Some(branches) = map.get_mut("anyOf").and_then(Value::as_array_mut) {
        branches.push(null);
        return map.into();
    }
    if map.contains_key("$ref") {
        return json!({ "anyOf": [map, null] });
    }
    if map.get("type").is_some_and(|t| t == "null") {
        return map.into();
    }
    if let Some(only) = map.get_mut("enum").and_then(Value::as_array_mut) {
        only.push(Value::Null);
    }
    if let Some(kind) = map.get_mut("type") {
        *kind = json!([kind.take(), "null"]);
    }
    map.into()
}

fn error_schema() -> Value {
    json!({
        "type": "object",
        "required": ["error"],
        "properties": { "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": { "type": "string" },
                "type": { "type": "string" },
                "param": { "type": ["string", "null"] },
                "code": { "type": ["string", "null"] },
            },
        }},
    })
}

fn paths() -> Value {
    let mut paths = Map::new();
    for endpoint in &ENDPOINTS {
        let json_answer = json!({ "schema": { "type": "object" } });
        let events = json!({ "schema": { "type": "string" } });
        let content = match endpoint.answer {
            Answer::Json => json!({ "application/json": json_answer }),
            Answer::JsonOrEvents => {
                json!({ "application/json": json_answer, "text/event-stream": events })
            }
            Answer::Text => json!({ "text/plain": events }),
        };
        let refused = json!({
            "description": "Refused; the message says why",
            "content": { "application/json": { "schema": { "$ref": "#/components/schemas/Error" } } },
        });
        let mut operation = json!({
            "summary": endpoint.summary,
            "responses": { "200": { "description": "Done", "content": content }, "4XX": refused, "5XX": refused },
        });
        if let Some(body) = endpoint.body {
            let schema = json!({ "$ref": format!("#/components/schemas/{body}") });
            operation["requestBody"] = json!({ "required": true, "content": { "application/json": { "schema": schema } } });
        }
        if endpoint.path.contains('{') {
            operation["parameters"] = json!([{
                "name": "model", "in": "path", "required": true,
                "schema": { "type": "string", "minLength": 1 },
            }]);
        }
        paths.insert(endpoint.path.into(), json!({ endpoint.method: operation }));
    }
    paths.into()
}
