//! How a token is chosen from a row of logits, defined once so that every device draws alike.
//! It knows no model and keeps no state: the random number of a position is a function of the
//! seed and the position.
//!
//! Order: penalties, top-k, top-p, min-p, temperature, draw (the order that llama.cpp's users
//! know; top-p and min-p see probabilities at temperature 1). A temperature of 0 is the highest
//! logit whatever else is set. Exact ties go to the lowest id. NaN counts as impossible.

use crate::error::{Error, Result};
use crate::ids::TokenId;

/// Logits that [`argmax`] looks at together.
const CHUNK: usize = 4096;

/// How a sequence's tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleParams {
    /// 0 for the highest logit; else the softmax temperature, finite and positive.
    pub temperature: f32,
    /// Keep this many of the best; 0 for all.
    pub top_k: u32,
    /// Keep the smallest set of the best whose probability reaches this; 1 for all, 0 for one.
    pub top_p: f32,
    /// Drop what is less likely than this share of the best; 0 for none.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of recent tokens, once each; 1 for none.
    pub repeat_penalty: f32,
    /// Subtracted once per occurrence among the recent tokens; 0 for none.
    pub frequency_penalty: f32,
    /// Subtracted once per distinct recent token; 0 for none.
    pub presence_penalty: f32,
    /// How many recent tokens count as such; `u32::MAX` for all, 0 for none.
    pub penalty_window: u32,
    /// Seed of the sequence's random numbers.
    pub seed: u64,
}

impl Default for SampleParams {
    /// The highest logit, nothing penalised.
    fn default() -> SampleParams {
        SampleParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: 64,
            seed: 0,
        }
    }
}

impl SampleParams {
    /// Checks every parameter against its range.
    ///
    /// # Errors
    /// `is_malformed`, naming the first parameter out of range, its value and the range.
    pub fn validate(&self) -> Result<()> {
        let check = |ok: bool, name: &str, value: f32, range: &str| {
            if ok {
                return Ok(());
            }
            Err(Error::malformed(format!("sampling: {name} is {value}, expected {range}")))
        };
        let SampleParams { temperature, top_p, min_p, repeat_penalty, .. } = *self;
        check(
            temperature >= 0.0 && temperature.is_finite(),
            "temperature",
            temperature,
            "0 or more",
        )?;
        check((0.0..=1.0).contains(&top_p), "top_p", top_p, "0 to 1")?;
        check((0.0..=1.0).contains(&min_p), "min_p", min_p, "0 to 1")?;
        check(
            repeat_penalty > 0.0 && repeat_penalty.is_finite(),
            "repeat_penalty",
            repeat_penalty,
            "above 0",
        )?;
        check(
            self.frequency_penalty.is_finite(),
            "frequency_penalty",
            self.frequency_penalty,
            "a number",
        )?;
        check(
            self.presence_penalty.is_finite(),
            "presence_penalty",
            self.presence_penalty,
            "a number",
        )
    }

    /// Whether any penalty can change a logit.
    pub fn penalises(&self) -> bool {
        self.penalty_window > 0
            && (self.repeat_penalty != 1.0
                || self.frequency_penalty != 0.0
                || self.presence_penalty != 0.0)
    }
}

/// A number in [0, 1) that depends on the seed and the position alone: two rounds of the
/// SplitMix64 finaliser (Steele, Lea, Flood 2014), the top 24 bits.
pub fn uniform(seed: u64, pos: u32) -> f32 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let z = mix(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ (u64::from(pos) << 1 | 1));
    (z >> 40) as f32 / (1u64 << 24) as f32
}

/// Memory that choosing reuses from token to token.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    candidates: Vec<(f32, TokenId)>,
    recent: Vec<TokenId>,
}

impl Scratch {
    /// Room for a vocabulary and a penalty window, so that choosing never allocates.
    pub fn with_capacity(vocab: usize, history: usize) -> Scratch {
        Scratch { candidates: Vec::with_capacity(vocab), recent: Vec::with_capacity(history) }
    }
}

/// The index of the highest logit, ties to the lowest index, NaN never chosen; none if all are
/// NaN or −∞.
pub fn argmax(logits: &[f32]) -> Option<TokenId> {
    // Chunk by chunk, lane by lane: a vocabulary is large, and this is every greedy token's cost.
    let mut best = (f32::NEG_INFINITY, None);
    for (ix, chunk) in logits.chunks(CHUNK).enumerate() {
        let mut lanes = [f32::NEG_INFINITY; 16];
        let (whole, rest) = chunk.as_chunks::<16>();
        for vector in whole {
            for (lane, &v) in lanes.iter_mut().zip(vector) {
                *lane = if v > *lane { v } else { *lane };
            }
        }
        let most = lanes.iter().chain(rest).fold(best.0, |a, &v| if v > a { v } else { a });
        if most > best.0 {
            let at = chunk.iter().position(|&v| v == most);
            best = (most, at.map(|at| (ix * CHUNK + at) as TokenId));
        }
    }
    best.1
}

/// The natural log of the sum of the exponentials, in f64; NaN logits count as impossible.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().filter(|v| !v.is_nan()).map(|v| (f64::from(*v) - max).exp()).sum();
    max + sum.ln()
}

/// The natural log of the softmax at `id`.
pub fn logprob_of(logits: &[f32], id: TokenId) -> f32 {
    (f64::from(logits[id as usize]) - log_sum_exp(logits)) as f32
}

/// Chooses a token. `logits` is changed where penalties apply; `history` holds the sequence's
/// tokens so far; `pos` is the position that the chosen token will take.
///
/// # Errors
/// `is_malformed` when no logit is usable (all NaN or −∞).
pub fn choose(
    logits: &mut [f32],
    params: &SampleParams,
    history: &[TokenId],
    pos: u32,
    scratch: &mut Scratch,
) -> Result<TokenId> {
    penalise(logits, params, history, scratch);
    let best = argmax(logits).ok_or_else(|| {
        Error::malformed(format!("sampling: no usable logit at position {pos} (all NaN or -inf)"))
    })?;
    let max = logits[best as usize];
    if params.temperature == 0.0 || max == f32::INFINITY {
        return Ok(best);
    }
    let kept = &mut scratch.candidates;
    keep_top(logits, max, params, kept);
    let floor = if params.min_p > 0.0 { max + params.min_p.ln() } else { f32::NEG_INFINITY };
    let weight =
        |v: f32| if v >= floor || v == max { ((v - max) / params.temperature).exp() } else { 0.0 };
    let total: f32 = kept.iter().map(|(v, _)| weight(*v)).sum();
    let mut left = uniform(params.seed, pos) * total;
    let mut last = best;
    for (v, id) in kept.iter() {
        let w = weight(*v);
        if w > 0.0 {
            last = *id;
            if left < w {
                break;
            }
            left -= w;
        }
    }
    Ok(last)
}

/// Fills `kept` with what top-k and top-p leave; in the order best first, ties to the lowest id,
/// where either is on, else by id.
fn keep_top(logits: &[f32], max: f32, params: &SampleParams, kept: &mut Vec<(f32, TokenId)>) {
    let order = |a: &(f32, TokenId), b: &(f32, TokenId)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
    let usable = |v: f32| !v.is_nan() && v > f32::NEG_INFINITY;
    // −0.0 and 0.0 are a tie: adding zero makes them one value for the total order.
    let all = logits
        .iter()
        .enumerate()
        .filter(|(_, v)| usable(**v))
        .map(|(i, v)| (*v + 0.0, i as TokenId));
    kept.clear();
    let k = if params.top_k == 0 { usize::MAX } else { params.top_k as usize };
    if k == usize::MAX && params.top_p >= 1.0 {
        kept.extend(all);
        return;
    }
    // Most of the mass lies within a dozen nats of the best; sort the rest only if it does not.
    const NEAR: f32 = 12.0;
    let mass = |c: &[(f32, TokenId)]| c.iter().map(|(v, _)| (v - max).exp()).sum::<f32>();
    let total = if params.top_p < 1.0 {
        logits.iter().filter(|v| usable(**v)).map(|v| (v - max).exp()).sum()
    } else {
        0.0f32
    };
    kept.extend(all.clone().filter(|c| c.0 >= max - NEAR));
    let enough = if k < usize::MAX { kept.len() >= k } else { mass(kept) >= params.top_p * total };
    if !enough {
        kept.clear();
        kept.extend(all);
    }
    if k < kept.len() {
        kept.select_nth_unstable_by(k - 1, order);
        kept.truncate(k);
    }
    kept.sort_unstable_by(order);
    if params.top_p < 1.0 {
        let total = if k < usize::MAX { mass(kept) } else { total };
        let mut sum = 0.0;
        let reached = kept.iter().position(|(v, _)| {
            sum += (v - max).exp();
            sum >= params.top_p * total
        });
        kept.truncate(reached.map_or(kept.len(), |at| at + 1));
    }
}

/// Applies the repetition, frequency and presence penalties to a row of logits.
pub fn penalise(
    logits: &mut [f32],
    params: &SampleParams,
    history: &[TokenId],
    scratch: &mut Scratch,
) {
    if !params.penalises() {
        return;
    }
    let recent = &mut scratch.recent;
    let from = history.len().saturating_sub(params.penalty_window as usize);
    recent.clear();
    recent.extend(history[from..].iter().filter(|id| (**id as usize) < logits.len()));
    recent.sort_unstable();
    for same in recent.chunk_by(|a, b| a == b) {
        let logit = &mut logits[same[0] as usize];
        *logit = if *logit > 0.0 {
            *logit / params.repeat_penalty
        } else {
            *logit * params.repeat_penalty
        };
        *logit -= params.frequency_penalty * same.len() as f32 + params.presence_penalty;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pick(logits: &[f32], params: &SampleParams) -> TokenId {
        choose(&mut logits.to_vec(), params, &[], 0, &mut Scratch::default()).unwrap()
    }

    #[test]
    fn temperature_zero_is_argmax_whatever_else_is_set() {
        for top_k in [0, 1, 1_000_000_000] {
            for (top_p, min_p) in [(0.0, 0.0), (1.0, 1.0), (0.5, 0.5)] {
                let p = SampleParams { top_k, top_p, min_p, ..SampleParams::default() };
                assert_eq!(pick(&[1.0, 3.0, 2.0], &p), 1);
            }
        }
        let tiny = SampleParams { temperature: 1e-9, ..SampleParams::default() };
        assert_eq!(pick(&[1.0, 3.0, 2.0], &tiny), 1);
    }

    #[test]
    fn one_candidate_always_survives() {
        for seed in 0..200 {
            let base = SampleParams { temperature: 1.0, seed, ..SampleParams::default() };
            for p in [
                SampleParams { top_p: 0.0, ..base },
                SampleParams { min_p: 1.0, ..base },
                SampleParams { top_k: 1, ..base },
            ] {
                assert_eq!(pick(&[1.0, 3.0, 2.0], &p), 1, "{p:?}");
            }
        }
    }

    #[test]
    fn out_of_range_parameters_are_named() {
        let d = SampleParams::default();
        for (p, name) in [
            (SampleParams { temperature: -1.0, ..d }, "temperature"),
            (SampleParams { temperature: f32::NAN, ..d }, "temperature"),
            (SampleParams { top_p: 1.5, ..d }, "top_p"),
            (SampleParams { min_p: 2.0, ..d }, "min_p"),
            (SampleParams { repeat_penalty: 0.0, ..d }, "repeat_penalty"),
        ] {
            let e = p.validate().unwrap_err();
            assert!(e.is_malformed() && e.to_string().contains(name), "{e}");
        }
    }

    #[test]
    fn nan_infinities_and_ties_never_panic() {
        let warm =
            SampleParams { temperature: 1.0, top_k: 40, top_p: 0.9, ..SampleParams::default() };
        for at in [0, 15_999, 31_999] {
            let mut x = vec![0.5; 32_000];
            x[at] = f32::NAN;
            assert_ne!(pick(&x, &warm), at as u32);
            x[at] = f32::INFINITY;
            assert_eq!(pick(&x, &warm), at as u32);
        }
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            let e = choose(&mut [bad; 9], &warm, &[], 0, &mut Scratch::default()).unwrap_err();
            assert!(e.is_malformed());
        }
        assert_eq!(argmax(&[5.0, 5.0, 5.0]), Some(0));
        assert_eq!(argmax(&[0.0, -0.0]), Some(0));
        assert_eq!(argmax(&[-0.0, 0.0]), Some(0));
    }

    #[test]
    fn penalties_apply_once_per_distinct_token() {
        let run = |r, f, p| {
            let mut x = [2.0, -1.0, 0.5];
            let params = SampleParams {
                repeat_penalty: r,
                frequency_penalty: f,
                presence_penalty: p,
                ..SampleParams::default()
            };
            penalise(&mut x, &params, &[0, 0, 1, 77], &mut Scratch::default());
            x
        };
        assert_eq!(run(1.5, 0.0, 0.0), [2.0 / 1.5, -1.5, 0.5]);
        assert_eq!(run(1.0, 0.5, 0.0), [1.0, -1.5, 0.5]);
        assert_eq!(run(1.0, 0.0, 0.5), [1.5, -1.5, 0.5]);
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0f32, 1.0, 2.0, -30.0];
        let z: f32 = logits.iter().map(|v| v.exp()).sum();
        let mut counts = [0u32; 4];
        let n = 40_000;
        for pos in 0..n {
            let p = SampleParams { temperature: 1.0, seed: 7, ..SampleParams::default() };
            counts[choose(&mut logits.clone(), &p, &[], pos, &mut Scratch::default()).unwrap()
                as usize] += 1;
        }
        for (count, logit) in counts.iter().zip(logits) {
            let (got, want) = (*count as f32 / n as f32, logit.exp() / z);
            assert!((got - want).abs() < 0.01, "{got} against {want}");
        }
    }

    #[test]
    fn top_p_keeps_the_smallest_set_and_agrees_with_a_plain_sort() {
        let logits: Vec<f32> = (0..500).map(|i| 8.0 * uniform(3, i)).collect();
        for (top_p, top_k) in [(0.3, 0), (0.9, 0), (0.9, 20), (1.0, 7), (0.9999999, 0)] {
            let params = SampleParams { top_p, top_k, ..SampleParams::default() };
            let max = logits.iter().copied().fold(0.0, f32::max);
            let mut kept = Vec::new();
            keep_top(&logits, max, &params, &mut kept);
            let mut plain: Vec<u32> = (0..500).collect();
            plain
                .sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
            if top_k > 0 {
                plain.truncate(top_k as usize);
            }
            let w = |id: &u32| f64::from(logits[*id as usize] - max).exp();
            let total: f64 = plain.iter().map(w).sum();
            let mut sum = 0.0;
            let n = plain.iter().position(|id| {
                sum += w(id);
                sum >= f64::from(top_p) * total
            });
            let n = n.map_or(plain.len(), |n| n + 1);
            assert!(kept.len().abs_diff(n) <= 1, "{} against {n}", kept.len());
            assert!(kept.iter().map(|c| c.1).eq(plain.into_iter().take(kept.len())));
        }
    }
}
