//! How far 8-bit activations are from exact logits beside another engine that read the same file: the prompts that were
//! shown to it, and what is compared, prompt by prompt. It runs nothing and reads no file.

use crate::TokenId;

/// Tokens of each prompt.
pub const TOKENS: usize = 48;

/// The first `n` prompts for a vocabulary, the same for whoever asks: the upper bits of a linear congruential generator
/// (Knuth's MMIX constants).
pub fn prompts(vocab: u32, n: usize) -> Vec<Vec<TokenId>> {
    let mut state = 12_345u64;
    let mut token = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % u64::from(vocab)) as TokenId
    };
    (0..n).map(|_| (0..TOKENS).map(|_| token()).collect()).collect()
}

/// The mean distance of logits from those that are wanted.
pub fn mean_gap(want: &[f32], have: &[f32]) -> f64 {
    let gaps = want.iter().zip(have).map(|(a, b)| f64::from((a - b).abs()));
    gaps.sum::<f64>() / want.len() as f64
}

/// By how many standard errors the first of two paired samples is the larger in the mean.
///
/// # Panics
/// Where they are no pairs.
pub fn standard_errors(ours: &[f64], theirs: &[f64]) -> f64 {
    assert_eq!(ours.len(), theirs.len(), "prompts of both");
    let n = ours.len() as f64;
    let gaps: Vec<f64> = ours.iter().zip(theirs).map(|(a, b)| a - b).collect();
    let mean = gaps.iter().sum::<f64>() / n;
    let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / (n - 1.0);
    mean / (variance / n).sqrt().max(1e-12)
}
