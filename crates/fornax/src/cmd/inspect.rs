//! `fornax inspect`: what a GGUF file says about itself. Touches no weight.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result};
use fornax_gguf::{Array, Gguf, Value};
use serde::Serialize;

use super::pull::size;
use crate::flags::high::Config;
use crate::flags::low::Inspect;
use crate::output;
use crate::store::Store;

/// Elements of an array that are shown, and bytes of a string.
const ELEMENTS_SHOWN: usize = 8;
const CHARS_SHOWN: usize = 100;
/// Longer arrays are left out of JSON.
const ELEMENTS_JSON: usize = 256;

/// The one object of `--json`.
#[derive(Serialize)]
struct Report {
    file: String,
    version: u32,
    alignment: u32,
    shards: usize,
    bytes: u64,
    architecture: String,
    name: String,
    parameters: u64,
    bits_per_weight: f64,
    types: BTreeMap<&'static str, TypeShare>,
    metadata: serde_json::Map<String, serde_json::Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<TensorLine>>,
}

#[derive(Default, Serialize)]
struct TypeShare {
    tensors: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct TensorLine {
    name: String,
    r#type: &'static str,
    dims: Vec<u64>,
    bytes: u64,
}

/// Prints the file's contents, its template, or one JSON object.
///
/// # Errors
/// When it is no GGUF file.
pub(crate) fn inspect(config: &Config, flags: &Inspect) -> Result<()> {
    let path = Store::open(config)?.file(&flags.model)?;
    let gguf = Gguf::open(&path)?;
    if flags.template {
        let template = gguf.metadata().str("tokenizer.chat_template")?;
        let template =
            template.with_context(|| format!("{} has no chat template", path.display()))?;
        return output::product(format!("{template}\n").as_bytes());
    }
    let report = Report::of(&gguf, path.display().to_string(), flags.tensors);
    if flags.json {
        return output::json(&report);
    }
    output::product(report.text(&gguf).as_bytes())
}

impl Report {
    fn of(gguf: &Gguf, file: String, with_tensors: bool) -> Report {
        let text = |key| gguf.metadata().str(key).ok().flatten().unwrap_or_default().to_owned();
        let mut types: BTreeMap<&'static str, TypeShare> = BTreeMap::new();
        for t in gguf.tensors() {
            let share = types.entry(t.ty.name()).or_default();
            share.tensors += 1;
            share.bytes += t.len;
        }
        let line = |t: &fornax_gguf::TensorInfo| TensorLine {
            name: t.name.clone(),
            r#type: t.ty.name(),
            dims: t.dims.clone(),
            bytes: t.len,
        };
        Report {
            file,
            version: gguf.version(),
            alignment: gguf.alignment(),
            shards: gguf.n_shards(),
            bytes: gguf.file_bytes(),
            architecture: text("general.architecture"),
            name: text("general.name"),
            parameters: gguf.n_elements(),
            bits_per_weight: gguf.tensor_bytes() as f64 * 8.0 / gguf.n_elements().max(1) as f64,
            types,
            metadata: gguf.metadata().iter().map(|(k, v)| (k.to_owned(), json(v))).collect(),
            tensors: with_tensors.then(|| gguf.tensors().iter().map(line).collect()),
        }
    }

    fn text(&self, gguf: &Gguf) -> String {
        let mut out = String::new();
        let shards =
            if self.shards > 1 { format!(", {} files", self.shards) } else { String::new() };
        let _ = writeln!(
            out,
            "{} (GGUF v{}, {}{shards})",
            clean(&self.file),
            self.version,
            size(self.bytes)
        );
        let _ = writeln!(
            out,
            "{} {}: {:.1} M parameters, {:.2} bits per weight",
            clean(&self.architecture),
            clean(&self.name),
            self.parameters as f64 / 1e6,
            self.bits_per_weight
        );
        for (name, share) in &self.types {
            let _ =
                writeln!(out, "  {name:<8} {:>5} tensors {:>10}", share.tensors, size(share.bytes));
        }
        let _ = writeln!(out, "metadata");
        for (key, value) in gguf.metadata().iter() {
            let _ = writeln!(out, "  {} = {}", clean(key), shown(value));
        }
        if let Some(tensors) = &self.tensors {
            let _ = writeln!(out, "tensors");
            for t in tensors {
                let dims: Vec<String> = t.dims.iter().map(u64::to_string).collect();
                let _ = writeln!(
                    out,
                    "  {:<40} {:<8} {:>20} {:>10}",
                    clean(&t.name),
                    t.r#type,
                    dims.join(" x "),
                    size(t.bytes)
                );
            }
        }
        out
    }
}

/// A file's text must not steer the terminal.
fn clean(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}

fn shown(value: &Value) -> String {
    match value {
        Value::Str(text) if text.chars().count() > CHARS_SHOWN => {
            let head: String = text.chars().take(CHARS_SHOWN).collect();
            format!("{}… ({} bytes)", clean(&head), text.len())
        }
        Value::Str(text) => clean(text),
        Value::Array(array) => {
            let json = array_json(array, ELEMENTS_SHOWN);
            let items: Vec<String> = json.iter().map(|v| clean(&v.to_string())).collect();
            let more = if array.len() > items.len() { ", …" } else { "" };
            format!("[{}{more}] ({} {})", items.join(", "), array.len(), array.element_name())
        }
        other => json(other).to_string(),
    }
}

fn json(value: &Value) -> serde_json::Value {
    match value {
        Value::Bool(b) => (*b).into(),
        Value::Str(text) => text.as_ref().into(),
        Value::Bytes(bytes) => String::from_utf8_lossy(bytes).into(),
        Value::Array(array) if array.len() > ELEMENTS_JSON => {
            serde_json::json!({ "elements": array.len(), "type": array.element_name() })
        }
        Value::Array(array) => array_json(array, ELEMENTS_JSON).into(),
        number => match number.as_integer() {
            Some(i) => integer(i),
            None => float(number),
        },
    }
}

/// An f32 in its own shortest digits, not in those of the f64 next to it.
fn float(number: &Value) -> serde_json::Value {
    match number {
        Value::F32(v) => v.to_string().parse::<f64>().ok().into(),
        other => other.as_float().into(),
    }
}

fn integer(i: i128) -> serde_json::Value {
    i64::try_from(i)
        .map(Into::into)
        .or_else(|_| u64::try_from(i).map(Into::into))
        .unwrap_or_default()
}

/// The first elements of an array.
fn array_json(array: &Array, most: usize) -> Vec<serde_json::Value> {
    let n = array.len().min(most);
    match array {
        Array::Str(strings) => strings.iter().take(n).map(Into::into).collect(),
        Array::Bytes(strings) => {
            strings.iter().take(n).map(|b| String::from_utf8_lossy(b).into()).collect()
        }
        Array::Bool(flags) => flags.iter().take(n).map(|&b| b.into()).collect(),
        Array::Nested(inner) => inner.iter().take(n).map(|a| array_json(a, most).into()).collect(),
        numbers => (0..n)
            .map(|i| match numbers.integer(i) {
                Some(whole) => integer(whole),
                None => numbers.float(i).into(),
            })
            .collect(),
    }
}
