//! The tables of `docs/server.md`, made from the description; the page must hold them as they are now. Run this test
//! with `FORNAX_BLESS=1` where a change is meant, and look at the difference.

use std::fmt::Write;
use std::path::Path;

use serde_json::{Map, Value};

use super::Document;
use super::document::ENDPOINTS;

const BEGIN: &str =
    "<!-- made from the description: FORNAX_BLESS=1 cargo test -p fornax-server tables -->\n";
const END: &str = "<!-- end of what is made -->\n";

/// What a value may be, in few words.
fn kind(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str() {
        return name.rsplit('/').next().unwrap_or(name).to_owned();
    }
    if let Some(branches) = schema["anyOf"].as_array() {
        let mut kinds: Vec<String> = branches.iter().map(kind).collect();
        kinds.dedup();
        return kinds.join(" or ");
    }
    if let Some(only) = schema["enum"].as_array() {
        let all: Vec<String> = only.iter().map(|v| format!("`{v}`")).collect();
        return all.join(", ");
    }
    let range = |low: &str| match (schema[low].as_f64(), schema["maximum"].as_f64()) {
        (Some(low), Some(high)) if high < 1e9 => format!(" {low} to {high}"),
        (Some(low), _) if low > -1e9 => format!(" from {low}"),
        _ => String::new(),
    };
    match schema["type"].as_str() {
        Some("number") if !schema["exclusiveMinimum"].is_null() => {
            format!("number above {}, at most {}", schema["exclusiveMinimum"], schema["maximum"])
        }
        Some(number @ ("number" | "integer")) => format!("{number}{}", range("minimum")),
        Some("array") => format!("list of {}", kind(&schema["items"])),
        Some(other) => other.to_owned(),
        None => "anything".to_owned(),
    }
}

fn table(name: &str, schemas: &Map<String, Value>, out: &mut String) {
    let schema = &schemas[name];
    let _ = writeln!(out, "| field | value | what |\n| --- | --- | --- |");
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    for (field, property) in schema["properties"].as_object().into_iter().flatten() {
        let needed = if required.iter().any(|r| r == field) { " (needed)" } else { "" };
        let named = property["$ref"].as_str().and_then(|r| schemas.get(r.rsplit('/').next()?));
        let described = property["description"].as_str();
        let described = described.or_else(|| named?["description"].as_str());
        let mut what = described.unwrap_or_default().to_owned();
        if let Some(why) = property["x-ignored"].as_str() {
            what = format!("No effect: {why}.");
        }
        if let Some(value) = property.get("default") {
            let _ = write!(what, " Default: `{value}`.");
        }
        let kind = kind(property).replace('|', "\\|");
        let _ =
            writeln!(out, "| `{field}`{needed} | {kind} | {} |", what.trim().replace('|', "\\|"));
        assert!(!what.is_empty(), "{name}.{field} is not explained");
    }
    let refused = schema["x-refused"].as_object().into_iter().flatten();
    let refused: Vec<String> = refused
        .map(|(field, why)| format!("`{field}` ({})", why.as_str().unwrap_or_default()))
        .collect();
    if !refused.is_empty() {
        let _ = writeln!(out, "\nRefused with advice: {}.", refused.join("; "));
    }
    out.push('\n');
}

fn made() -> String {
    let schemas = &Document::get().schemas;
    let mut out = String::new();
    for endpoint in ENDPOINTS.iter().filter(|e| e.body.is_some()) {
        let name = endpoint.body.unwrap_or_default();
        let method = endpoint.method.to_uppercase();
        let _ = writeln!(out, "### `{method} {}`\n\n{}.\n", endpoint.path, endpoint.summary);
        table(name, schemas, &mut out);
    }
    out
}

#[test]
fn the_page_has_every_field() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/server.md");
    let page = std::fs::read_to_string(&path).expect("docs/server.md is there");
    let (before, rest) = page.split_once(BEGIN).expect("the page has the mark where tables begin");
    let (committed, after) = rest.split_once(END).expect("the page has the mark where they end");
    let made = made();
    if std::env::var_os("FORNAX_BLESS").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{made}{END}{after}")).expect("a page");
        return;
    }
    let differs = made.lines().zip(committed.lines()).find(|(now, then)| now != then);
    assert_eq!(differs, None, "first difference (now, committed)");
    assert_eq!(made, committed);
}

#[test]
fn routes_and_descriptions_are_the_same() {
    let routes = include_str!("../api/mod.rs");
    for endpoint in &ENDPOINTS {
        let path = endpoint.path.replace("{model}", "{*model}");
        assert!(
            routes.contains(&format!("\"{path}\", {}(", endpoint.method)),
            "{path} has no route"
        );
    }
    assert_eq!(routes.matches(".route(").count(), ENDPOINTS.len());
}
