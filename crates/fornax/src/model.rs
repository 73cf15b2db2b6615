//! A model file made ready to be asked: its plan, its tokenizer, its chat template. Runs nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use fornax_engine::arch;
use fornax_gguf::Gguf;
use fornax_plan::Plan;
use fornax_text::{ChatTemplate, EncodeOptions, Tokenizer};
use serde_json::{Value, json};

use crate::flags::high::Config;
use crate::store::{Store, alias};

/// A loaded model.
pub(crate) struct Model {
    /// How reports call it.
    pub(crate) name: String,
    pub(crate) family: &'static str,
    pub(crate) gguf: Gguf,
    pub(crate) plan: Plan,
}

/// What turns text into tokens of a model and back.
pub(crate) struct Text {
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Why there is no template, where there is none.
    template: Result<ChatTemplate>,
}

/// The file that `name` stands for, the default model where it is absent.
///
/// # Errors
/// When nothing is called that or it cannot be brought.
pub(crate) fn file(config: &Config, name: Option<&str>) -> Result<PathBuf> {
    Store::open(config)?.file(name.unwrap_or(alias::DEFAULT))
}

impl Model {
    /// # Errors
    /// When it is no GGUF file or of no known family.
    pub(crate) fn open(path: &Path) -> Result<Model> {
        let name = path
            .file_name()
            .map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned());
        Model::of(Gguf::open(path)?, name)
            .with_context(|| format!("could not load {}", path.display()))
    }

    /// A file that is in memory.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub(crate) fn of(gguf: Gguf, name: String) -> Result<Model> {
        let family = arch::family_of(&gguf)?.name;
        let plan = arch::plan(&gguf)?;
        Ok(Model { name, family, gguf, plan })
    }

    /// Its tokenizer and template.
    ///
    /// # Errors
    /// When the file has none or of an unknown kind.
    pub(crate) fn text(&self) -> Result<Text> {
        Text::of(&self.gguf)
    }

    pub(crate) fn bits_per_weight(&self) -> f64 {
        self.gguf.tensor_bytes() as f64 * 8.0 / self.gguf.n_elements().max(1) as f64
    }
}

impl Text {
    /// # Errors
    /// When the file has no tokenizer or one of an unknown kind.
    pub(crate) fn of(gguf: &Gguf) -> Result<Text> {
        let tokenizer = Tokenizer::from_gguf(gguf.metadata())?;
        let template = ChatTemplate::from_gguf(gguf.metadata(), &tokenizer).map_err(Into::into);
        Ok(Text { tokenizer: Arc::new(tokenizer), template })
    }

    /// A text as it is, control tokens included.
    pub(crate) fn raw(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode(text, EncodeOptions { special: true, bos: true })
    }

    /// The tokens that lead to the assistant's next message.
    ///
    /// # Errors
    /// When the model has no template, or the template refuses the messages.
    pub(crate) fn chat(&self, messages: &[Value]) -> Result<Vec<u32>> {
        let template = self.template.as_ref().map_err(|e| anyhow::anyhow!("{e:#}"))?;
        let extra = json!({ "add_generation_prompt": true });
        Ok(template.encode_chat(&self.tokenizer, &Value::from(messages.to_vec()), &extra)?)
    }
}

/// One message of a chat.
pub(crate) fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}
