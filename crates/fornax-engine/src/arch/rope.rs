//! Rotary frequencies and their scaling rules, folded into one table per plan so that devices
//! know only frequencies. It knows no family.

use std::f32::consts::PI;

use fornax_plan::{RopePairs, RopeTable};

/// Parameters of the yarn rule (Peng et al. 2023, `rope.scaling.type = yarn`).
#[derive(Clone, Copy, Debug)]
pub(super) struct Yarn {
    /// How many times the context is stretched.
    pub(super) factor: f32,
    /// Context before stretching.
    pub(super) original_context: u32,
    /// Pairs that turn more often than this in the original context keep their frequency.
    pub(super) beta_fast: f32,
    /// Pairs that turn less often than this are interpolated.
    pub(super) beta_slow: f32,
}

/// How positions beyond training are reached.
#[derive(Clone, Debug)]
pub(super) enum Scaling {
    /// As trained.
    None,
    /// Every frequency divided by a factor.
    Linear(f32),
    /// Interpolation by wavelength.
    Yarn(Yarn),
    /// A divisor for every pair, from the file (`rope_freqs.weight`, the llama-3 rule).
    Factors(Vec<f32>),
}

/// The table for `dims` rotated elements at base `base`.
pub(super) fn table(pairs: RopePairs, dims: u32, base: f32, scaling: &Scaling) -> RopeTable {
    let n = dims as usize / 2;
    let plain = |i: usize| 1.0 / base.powf(2.0 * i as f32 / dims as f32);
    let (inv_freq, magnitude) = match scaling {
        Scaling::None => ((0..n).map(plain).collect(), 1.0),
        Scaling::Linear(factor) => ((0..n).map(|i| plain(i) / factor).collect(), 1.0),
        Scaling::Factors(divisors) => ((0..n).map(|i| plain(i) / divisors[i]).collect(), 1.0),
        Scaling::Yarn(yarn) => {
            let (low, high) = correction_range(yarn, dims, base);
            let freq = |i: usize| {
                let ramp = ((i as f32 - low) / (high - low)).clamp(0.0, 1.0);
                plain(i) / yarn.factor * ramp + plain(i) * (1.0 - ramp)
            };
            let magnitude = if yarn.factor > 1.0 { 0.1 * yarn.factor.ln() + 1.0 } else { 1.0 };
            ((0..n).map(freq).collect(), magnitude)
        }
    };
    RopeTable { pairs, inv_freq, magnitude }
}

/// First and last pair of the ramp between kept and interpolated frequencies.
fn correction_range(yarn: &Yarn, dims: u32, base: f32) -> (f32, f32) {
    let pair_that_turns = |times: f32| {
        let context = yarn.original_context as f32;
        dims as f32 * (context / (times * 2.0 * PI)).ln() / (2.0 * base.ln())
    };
    let low = pair_that_turns(yarn.beta_fast).floor().max(0.0);
    let high = pair_that_turns(yarn.beta_slow).ceil().min(dims as f32 - 1.0);
    (low, if high > low { high } else { low + 0.001 })
}
