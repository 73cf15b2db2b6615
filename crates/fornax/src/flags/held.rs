//! What an answer is held to: the flags, and the grammar that they name. Knows no model.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use fornax_engine::constrain::Grammar;

/// At most one of these.
#[derive(Debug, Default, Args)]
#[group(multiple = false)]
pub(crate) struct Held {
    /// Hold the answer to the JSON schema in FILE
    #[arg(long, value_name = "FILE")]
    pub(crate) json_schema: Option<PathBuf>,
    /// Hold the answer to a regular expression, from end to end
    #[arg(long, value_name = "R")]
    pub(crate) regex: Option<String>,
    /// Hold the answer to the grammar in FILE, in GBNF or Lark
    #[arg(long, value_name = "FILE")]
    pub(crate) grammar: Option<PathBuf>,
}

impl Held {
    /// The grammar, where one was asked for.
    ///
    /// # Errors
    /// When a file cannot be read, or a schema is no JSON.
    pub(crate) fn grammar(&self) -> Result<Option<Grammar>> {
        if let Some(pattern) = &self.regex {
            return Ok(Some(Grammar::Regex(pattern.clone())));
        }
        if let Some(path) = &self.json_schema {
            let schema = serde_json::from_str(&text(path, "JSON schema")?)
                .with_context(|| format!("could not read the JSON schema {}", path.display()))?;
            return Ok(Some(Grammar::JsonSchema(schema)));
        }
        let Some(path) = &self.grammar else { return Ok(None) };
        let text = text(path, "grammar")?;
        Ok(Some(if is_gbnf(path, &text) { Grammar::Gbnf(text) } else { Grammar::Lark(text) }))
    }
}

fn text(path: &Path, what: &str) -> Result<String> {
    fs::read_to_string(path)
        .with_context(|| format!("could not read the {what} {}", path.display()))
}

/// By the name, else by the sign that GBNF alone has.
fn is_gbnf(path: &Path, text: &str) -> bool {
    match path.extension().and_then(|e| e.to_str()) {
        Some("gbnf") => true,
        Some("lark") => false,
        _ => text.contains("::="),
    }
}
