//! Model families. Each is one file whose `build` reads like the paper: it pushes the ops of the
//! forward pass into a plan. A new family is a file here and a row of [`FAMILIES`].

mod builder;
mod gemma2;
mod gemma3;
mod gptoss;
mod lfm2;
mod llama;
mod mistral;
mod mixtral;
mod qwen2;
mod qwen3;
mod qwen3moe;
mod rope;

use fornax_gguf::Gguf;
use fornax_plan::Plan;

use crate::error::{Error, Result};
use builder::Builder;

/// One model family.
#[derive(Clone, Copy)]
pub struct Family {
    /// The name that reports use.
    pub name: &'static str,
    /// `general.architecture` of its files.
    pub architecture: &'static str,
    /// What it adds to a plain decoder, in a few words.
    pub notes: &'static str,
    /// Metadata (below the architecture's prefix) that tells it from others of that name.
    marker: Option<&'static str>,
    build: fn(&mut Builder<'_>) -> Result<()>,
}

impl std::fmt::Debug for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Family({})", self.name)
    }
}

const fn family(
    name: &'static str,
    architecture: &'static str,
    marker: Option<&'static str>,
    notes: &'static str,
    build: fn(&mut Builder<'_>) -> Result<()>,
) -> Family {
    Family { name, architecture, notes, marker, build }
}

/// Every family; of several with one architecture name, the first whose marker the file has.
pub const FAMILIES: &[Family] = &[
    family("mixtral", "llama", Some("expert_count"), "mixture of experts", mixtral::build),
    family("mistral", "llama", Some("attention.sliding_window"), "sliding window", mistral::build),
    family("llama", "llama", None, "linear, yarn and llama-3 rope scaling, biases", llama::build),
    family("qwen2", "qwen2", None, "attention biases, yarn", qwen2::build),
    family("qwen3", "qwen3", None, "QK norm", qwen3::build),
    family("qwen3moe", "qwen3moe", None, "QK norm, mixture of experts", qwen3moe::build),
    family("gemma2", "gemma2", None, "soft-caps, alternating window, post-norms", gemma2::build),
    family("gemma3", "gemma3", None, "QK norm, two rope bases, window pattern", gemma3::build),
    family("lfm2", "lfm2", None, "gated short convolutions", lfm2::build),
    family(
        "gpt-oss",
        "gpt-oss",
        None,
        "attention sinks, alternating window, experts",
        gptoss::build,
    ),
];

/// The family of a file.
///
/// # Errors
/// `is_unsupported`, naming the architecture found and those that are read.
pub fn family_of(gguf: &Gguf) -> Result<&'static Family> {
    let found = gguf.metadata().require_str("general.architecture")?;
    let has = |key: &str| {
        let key = format!("{found}.{key}");
        // A count of zero means that the feature is absent.
        gguf.metadata().get(&key).is_some_and(|v| v.as_integer() != Some(0))
    };
    let fits = |f: &&Family| f.architecture == found && f.marker.is_none_or(has);
    FAMILIES.iter().find(fits).ok_or_else(|| {
        let mut known: Vec<&str> = FAMILIES.iter().map(|f| f.architecture).collect();
        known.sort_unstable();
        known.dedup();
        Error::unsupported(format!(
            "loading the model: architecture {found:?} is not supported; supported: {}",
            known.join(", ")
        ))
    })
}

/// The plan of a model file.
///
/// # Errors
/// `is_unsupported` for an unknown architecture or feature, `is_malformed` for keys or tensors
/// that are missing or of the wrong shape, by name.
pub fn plan(gguf: &Gguf) -> Result<Plan> {
    let family = family_of(gguf)?;
    let mut builder = Builder::new(gguf, family)?;
    (family.build)(&mut builder)?;
    let plan = builder.finish();
    plan.validate().map_err(|e| Error::malformed(format!("loading the model: {e}")))?;
    Ok(plan)
}
