//! Row-wise arithmetic in plain Rust: rotary positions, convolution taps, expert choice. It knows
//! no plan and no threads.

use fornax_plan::{Gating, RopePairs, RopeTable};

/// Cosines and sines of one position, scaled by the table's magnitude: `[pair][cos, sin]` split
/// into two runs, cosines first.
pub(crate) fn angles(table: &RopeTable, pos: u32, out: &mut [f32]) {
    let n = table.inv_freq.len();
    let (cos, sin) = out[..2 * n].split_at_mut(n);
    let m = f64::from(table.magnitude);
    for (i, freq) in table.inv_freq.iter().enumerate() {
        // The angle is an f32 product, as in the models' own training code.
        let (s, c) = f64::from(pos as f32 * freq).sin_cos();
        cos[i] = (m * c) as f32;
        sin[i] = (m * s) as f32;
    }
}

/// Rotates the pairs of a head by what [`angles`] made.
#[inline(always)]
pub(super) fn rotate(head: &mut [f32], angles: &[f32], pairs: RopePairs) {
    let n = angles.len() / 2;
    let (cos, sin) = angles.split_at(n);
    match pairs {
        RopePairs::Halves => {
            let (a, b) = head[..2 * n].split_at_mut(n);
            for i in 0..n {
                let (x, y) = (a[i], b[i]);
                a[i] = x * cos[i] - y * sin[i];
                b[i] = x * sin[i] + y * cos[i];
            }
        }
        RopePairs::Adjacent => {
            for (i, pair) in head[..2 * n].chunks_exact_mut(2).enumerate() {
                let (x, y) = (pair[0], pair[1]);
                pair[0] = x * cos[i] - y * sin[i];
                pair[1] = x * sin[i] + y * cos[i];
            }
        }
    }
}

/// Channels from `from` on of one row of LFM2's gated short convolution. `x` is the row's B, C and
/// X side by side; `state` holds the last products B·X of all `width` channels, oldest first, one
/// tap after the other, and is moved on by one.
///
/// # Safety
/// `state` is good for `(taps − 1) · width` elements, and nobody else touches these channels.
pub(crate) unsafe fn short_conv(
    x: &[f32],
    kernel: &[f32],
    taps: usize,
    from: usize,
    state: *mut f32,
    width: usize,
    out: &mut [f32],
) {
    for (at, out) in out.iter_mut().enumerate() {
        let i = from + at;
        let now = x[i] * x[2 * width + i];
        let kernel = &kernel[i * taps..][..taps];
        let mut sum = 0.0;
        for (t, kernel) in kernel[..taps - 1].iter().enumerate() {
            // SAFETY: tap `t` of channel `i` exists, and the next where it is read.
            unsafe {
                let tap = state.add(t * width + i);
                sum += kernel * *tap;
                *tap = if t + 2 < taps { *tap.add(width) } else { now };
            }
        }
        *out = x[width + i] * (sum + kernel[taps - 1] * now);
    }
}

/// The best experts by score, best first, ties to the lowest id, and their weights.
pub(crate) fn route(scores: &[f32], gating: Gating, ids: &mut [u32], weights: &mut [f32]) {
    let better = |a: usize, b: usize| match scores[a].total_cmp(&scores[b]) {
        std::cmp::Ordering::Equal => a < b,
        order => order.is_gt(),
    };
    let mut kept = 0;
    for id in 0..scores.len() {
        let at = ids[..kept].iter().position(|k| better(id, *k as usize)).unwrap_or(kept);
        if at == ids.len() {
            continue;
        }
        kept = (kept + 1).min(ids.len());
        ids[at..kept].rotate_right(1);
        ids[at] = id as u32;
    }
    let max = f64::from(scores[ids[0] as usize]);
    let exp = |id: usize| (f64::from(scores[id]) - max).exp();
    let chosen = || ids.iter().map(|id| exp(*id as usize)).sum::<f64>();
    let sum = match gating {
        Gating::SoftmaxThenTopK { normalise: false } => (0..scores.len()).map(exp).sum(),
        Gating::SoftmaxThenTopK { normalise: true } | Gating::TopKThenSoftmax => chosen(),
    };
    for (weight, id) in weights.iter_mut().zip(ids.iter()) {
        *weight = (exp(*id as usize) / sum) as f32;
    }
}

/// `x += y`.
pub(crate) fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}
