//! Attention with tiles, on an emulation of them, against f64.

use super::{Attend, BLOCK, TILE_QUERIES, TileScratch, tiles};
use crate::isa::Isa;
use crate::matrix::amx_tests::emulated;
use crate::ops::Cell;
use fornax_gguf::blocks::{f16_to_f32, f32_to_f16};

/// Rows of one key head and what they look at.
struct Scene {
    q: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    blocks: Vec<(Vec<u16>, Vec<u16>)>,
}

fn noise(seed: &mut u64) -> f32 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 40) as f32 / (1 << 23) as f32 - 1.0
}

/// `tokens` keys and values, in blocks whose ends hold what is not a number.
fn scene(queries: usize, tokens: usize, k: usize, v: usize, seed: u64) -> Scene {
    let seed = &mut (seed * 77 + 5);
    let half = |x: f32| f16_to_f32(f32_to_f16(x));
    let q = (0..queries * k).map(|_| 3.0 * noise(seed)).collect();
    let keys: Vec<f32> = (0..tokens * k).map(|_| half(3.0 * noise(seed))).collect();
    let values: Vec<f32> = (0..tokens * v).map(|_| half(noise(seed))).collect();
    let block = |b: usize| {
        let (mut of_keys, mut of_values) =
            (vec![0x7E00; k * BLOCK], vec![0x7E00; v.next_multiple_of(16) * BLOCK]);
        for t in 0..BLOCK.min(tokens - b * BLOCK) {
            let token = b * BLOCK + t;
            (0..k).for_each(|i| of_keys[i * BLOCK + t] = f32_to_f16(keys[token * k + i]));
            (0..v).for_each(|i| of_values[t * v + i] = f32_to_f16(values[token * v + i]));
        }
        (of_keys, of_values)
    };
    let blocks = (0..tokens.div_ceil(BLOCK)).map(block).collect();
    Scene { q, keys, values, blocks }
}

/// What a query gives by definition, and how large its terms are.
fn plain(a: &Attend<'_>, s: &Scene, m: usize) -> Vec<(f64, f64)> {
    let (pos, head) = (a.pos + m / a.heads, m % a.heads);
    let seen = (pos + 1).saturating_sub(a.window)..pos + 1;
    let score = |t: usize| {
        let of =
            |i: usize| f64::from(s.q[m * a.k_width + i]) * f64::from(s.keys[t * a.k_width + i]);
        let x = (0..a.k_width).map(of).sum::<f64>() * f64::from(a.scale);
        let cap = f64::from(a.cap);
        if cap == 0.0 { x } else { cap * (x / cap).tanh() }
    };
    let scores: Vec<f64> = seen.clone().map(score).collect();
    let sink = a.sinks.get(head).map(|s| f64::from(*s));
    let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|x| (x - max).exp()).collect();
    let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |s| (s - max).exp());
    let element = |i: usize| {
        let of = |(t, w): (usize, &f64)| {
            let v = w / total * f64::from(s.values[t * a.v_width + i]);
            (v, v.abs())
        };
        let sums = |a: (f64, f64), b: (f64, f64)| (a.0 + b.0, a.1 + b.1);
        seen.clone().zip(&weights).map(of).fold((0.0, 0.0), sums)
    };
    (0..a.v_width).map(element).collect()
}

#[test]
#[allow(clippy::print_stderr, reason = "a tier that is not there is not passed over in silence")]
fn tiles_are_right_to_the_rounding_of_weights_and_values() {
    if !Isa::Avx512Vnni.is_available() {
        eprintln!("avx512vnni: not available on this machine; the kernel is built on it");
        return;
    }
    // rows, heads, position of the first, window, widths, cap, sinks
    let all = usize::MAX;
    let cases = [
        (1, 1, 0, all, 32, 32, 0.0, 0),
        (33, 2, 0, all, 64, 64, 0.0, 0),
        (42, 3, 17, all, 64, 32, 0.0, 3),
        (64, 2, 448, all, 128, 128, 0.0, 0),
        (40, 2, 250, 40, 32, 64, 20.0, 0),
        (20, 4, 700, 300, 64, 96, 0.0, 4),
        (18, 7, 600, all, 64, 64, 30.0, 0),
    ];
    for (ix, (rows, heads, pos, window, k, v, cap, sinks)) in cases.into_iter().enumerate() {
        let queries = rows * heads;
        assert!(queries <= TILE_QUERIES);
        let s = scene(queries, pos + rows, k, v, ix as u64);
        let sinks: Vec<f32> = (0..sinks).map(|h| h as f32 - 1.0).collect();
        let block =
            |b: usize| (s.blocks[b].0.as_ptr().cast::<u8>(), s.blocks[b].1.as_ptr().cast::<u8>());
        let mut out = vec![f32::NAN; queries * v];
        let call = Attend {
            q: s.q.as_ptr(),
            q_stride: heads * k,
            out: out.as_mut_ptr(),
            out_stride: heads * v,
            rows,
            heads,
            pos,
            window,
            k_width: k,
            v_width: v,
            v_stride: v,
            // Large enough that scores in eight bits of fraction would be far off.
            scale: 0.3,
            cap,
            sinks: &sinks,
            cell: Cell::F16,
            block: &block,
        };
        let mut scratch = TileScratch::new(128, 128).unwrap();
        // SAFETY: the addresses are good for these sizes, and AVX-512 is there.
        unsafe { tiles::attend_with(&call, &mut scratch, &mut emulated()) };
        for m in 0..queries {
            for (i, (want, size)) in plain(&call, &s, m).into_iter().enumerate() {
                let found = f64::from(out[m * v + i]);
                // Half a step of a weight, of their sum and of a value.
                let bound = size * 3.0 / 512.0 + 1e-5;
                assert!((found - want).abs() <= bound, "case {ix}, {m}, {i}: {found}, {want}");
            }
        }
    }
}
