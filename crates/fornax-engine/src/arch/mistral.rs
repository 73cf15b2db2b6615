//! Mistral 7B (Jiang et al. 2023): Llama with a sliding window on every layer.

use super::builder::Builder;
use super::llama;
use crate::error::Result;

/// Pushes the forward pass of a windowed Llama.
pub(super) fn build(b: &mut Builder<'_>) -> Result<()> {
    let window = b.require("attention.sliding_window")?;
    llama::decoder(b, Some(window))
}
