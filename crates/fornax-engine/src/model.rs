//! A model file made ready for use: its plan, tokenizer and chat template. It knows no device.

use std::path::Path;
use std::sync::Arc;

use fornax_gguf::{Gguf, TensorType};
use fornax_plan::{Plan, TokenId};
use fornax_text::{ChatTemplate, EncodeOptions, Tokenizer};
use serde_json::Value;

use crate::arch::{self, Family};
use crate::error::Result;

/// A loaded model. Opening reads the tables of the file and touches no weight.
#[derive(Debug)]
pub struct Model {
    gguf: Gguf,
    family: &'static Family,
    plan: Plan,
    tokenizer: Arc<Tokenizer>,
    /// The template, or why there is none that works.
    template: std::result::Result<ChatTemplate, String>,
}

impl Model {
    /// Opens a GGUF file (or the first file of a split set).
    ///
    /// # Errors
    /// `is_malformed` for a broken file, `is_unsupported` for a family, feature or tokenizer that
    /// is not read; by name. A broken chat template is no error until it is used.
    pub fn open(path: &Path) -> Result<Model> {
        Model::from_gguf(Gguf::open(path)?)
    }

    /// The model of an opened file.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn from_gguf(gguf: Gguf) -> Result<Model> {
        let family = arch::family_of(&gguf)?;
        let plan = arch::plan(&gguf)?;
        let tokenizer = Arc::new(Tokenizer::from_gguf(gguf.metadata())?);
        let template =
            ChatTemplate::from_gguf(gguf.metadata(), &tokenizer).map_err(|e| e.to_string());
        // The vocabulary was copied; its pages would count beside the weights.
        gguf.mappings().for_each(|m| m.release(0..m.len()));
        Ok(Model { gguf, family, plan, tokenizer, template })
    }

    /// The file.
    pub fn gguf(&self) -> &Gguf {
        &self.gguf
    }

    /// The family.
    pub fn family(&self) -> &'static Family {
        self.family
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The chat template.
    ///
    /// # Errors
    /// `is_request` with the reason, where the file has none or a broken one.
    pub fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().map_err(|why| crate::Error::request(why.clone()))
    }

    /// What the model calls itself, else its family.
    pub fn name(&self) -> &str {
        let name = self.gguf.metadata().str("general.name").ok().flatten();
        name.unwrap_or(self.family.name)
    }

    /// Number of weights.
    pub fn parameters(&self) -> u64 {
        self.gguf.n_elements()
    }

    /// Bits that one weight takes in the file, on average.
    pub fn bits_per_weight(&self) -> f64 {
        self.gguf.tensor_bytes() as f64 * 8.0 / self.parameters().max(1) as f64
    }

    /// The weight type that holds most of the file's bytes.
    pub fn main_type(&self) -> Option<TensorType> {
        let mut bytes: Vec<(TensorType, u64)> = Vec::new();
        for t in self.gguf.tensors() {
            match bytes.iter_mut().find(|(ty, _)| *ty == t.ty) {
                Some((_, sum)) => *sum += t.len,
                None => bytes.push((t.ty, t.len)),
            }
        }
        bytes.into_iter().max_by_key(|(_, sum)| *sum).map(|(ty, _)| ty)
    }

    /// Tokens of a plain text, with the model's BOS where it wants one; text that looks like a
    /// control token becomes one.
    pub fn encode(&self, text: &str) -> Vec<TokenId> {
        self.tokenizer.encode(text, EncodeOptions { special: true, bos: true })
    }

    /// Tokens of a conversation, ready for the model's answer. Control tokens come from the
    /// template alone, never from what a message contains.
    ///
    /// # Errors
    /// `is_request` where the file has no usable template, or the template refuses the messages.
    pub fn encode_chat(&self, messages: &Value, extra: &Value) -> Result<Vec<TokenId>> {
        let tokens = self.template()?.encode_chat(&self.tokenizer, messages, extra);
        tokens.map_err(|e| crate::Error::request(e.to_string()))
    }
}
