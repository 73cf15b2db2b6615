//! Every tier against plain Rust, bit for bit, and plain Rust against f64.

use fornax_plan::Gating;

use super::*;

fn noise(seed: u32, n: usize) -> Vec<f32> {
    (0..n as u32)
        .map(|i| {
            let h = (i.wrapping_mul(0x9E37_79B9) ^ seed.wrapping_mul(0x85EB_CA6B))
                .wrapping_mul(0xC2B2_AE35);
            ((h ^ (h >> 15)) >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn tiers() -> impl Iterator<Item = (Isa, &'static VectorOps)> {
    Isa::available().into_iter().map(|isa| (isa, VectorOps::of(isa)))
}

#[test]
fn norm_is_the_same_on_every_tier_and_right() {
    for n in [1, 7, 16, 33, 64, 576, 2048] {
        let (x, w, r) = (noise(1, n), noise(2, n), noise(3, n));
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n as f64;
        let scale = 1.0 / (mean + 1e-5).sqrt();
        let mut first: Option<Vec<f32>> = None;
        for (isa, ops) in tiers() {
            let mut out = vec![0.0; n];
            // SAFETY: available tier, `n` elements each.
            unsafe {
                (ops.norm)(x.as_ptr(), w.as_ptr(), r.as_ptr(), 1e-5, out.as_mut_ptr(), n);
            }
            for i in 0..n {
                let want = f64::from(x[i]) * scale * f64::from(w[i]) + f64::from(r[i]);
                assert!((f64::from(out[i]) - want).abs() < 1e-6 * 4.0, "{isa} {n} {i}");
            }
            assert_eq!(*first.get_or_insert_with(|| out.clone()), out, "{isa} {n}");
        }
    }
}

#[test]
fn gates_are_the_same_on_every_tier_and_right() {
    let swiglu = Activation::SwigluClamped { alpha: 1.702, limit: 7.0 };
    for act in [Activation::Silu, Activation::GeluTanh, swiglu] {
        let n = 1000;
        let g: Vec<f32> = noise(4, n).iter().map(|v| v * 30.0).collect();
        let u: Vec<f32> = noise(5, n).iter().map(|v| v * 9.0).collect();
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let mut first: Option<Vec<f32>> = None;
        for (isa, ops) in tiers() {
            let mut out = vec![0.0; n];
            // SAFETY: available tier, `n` elements each.
            unsafe { (ops.gate)(g.as_ptr(), u.as_ptr(), out.as_mut_ptr(), n, act) };
            for i in 0..n {
                let (g, u) = (f64::from(g[i]), f64::from(u[i]));
                let want = match act {
                    Activation::Silu => g * sigmoid(g) * u,
                    Activation::GeluTanh => {
                        let y = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                        0.5 * g * (1.0 + y.tanh()) * u
                    }
                    Activation::SwigluClamped { alpha, limit } => {
                        let (g, u) = (g.min(limit.into()), u.clamp(-7.0, 7.0));
                        g * sigmoid(f64::from(alpha) * g) * (u + 1.0)
                    }
                };
                let off = (f64::from(out[i]) - want).abs();
                // Below e^-10 the factor is the tail of a sigmoid, whose argument's own
                // rounding shows.
                assert!(off < 1e-5 * want.abs() + 1e-7, "{isa} {act:?} {g} {u}: {}", out[i]);
            }
            assert_eq!(*first.get_or_insert_with(|| out.clone()), out, "{isa} {act:?}");
        }
    }
}

#[test]
fn broken_numbers_stay_broken() {
    for (isa, ops) in tiers() {
        let (g, u, mut out) = ([f32::NAN; 16], [1.0; 16], [0.0; 16]);
        // SAFETY: available tier, sixteen elements each.
        unsafe { (ops.gate)(g.as_ptr(), u.as_ptr(), out.as_mut_ptr(), 16, Activation::Silu) };
        assert!(out.iter().all(|v| v.is_nan()), "{isa}");
        // SAFETY: as above.
        unsafe { (ops.scale_and_cap)(out.as_mut_ptr(), 16, 1.0, 30.0) };
        assert!(out.iter().all(|v| v.is_nan()), "{isa}");
    }
}

#[test]
fn the_exponential_is_within_two_units_and_zero_below() {
    for i in -8800..=0 {
        let x = i as f32 / 100.0;
        // SAFETY: plain Rust.
        let got = unsafe { math::exp_one::<lanes::Plain>(x) };
        let want = f64::from(x).exp();
        if x < -87.3 {
            assert_eq!(got, 0.0);
        } else {
            assert!((f64::from(got) / want - 1.0).abs() < 2.5e-7, "{x}: {got} against {want}");
        }
    }
}

#[test]
fn the_cap_bends_and_keeps_sign() {
    for (isa, ops) in tiers() {
        let mut x: Vec<f32> = (-200..=200).map(|v| v as f32).collect();
        // SAFETY: available tier, as many elements as told.
        unsafe { (ops.scale_and_cap)(x.as_mut_ptr(), x.len(), 0.5, 30.0) };
        for (got, i) in x.iter().zip(-200..) {
            let want = 30.0 * (f64::from(i) * 0.5 / 30.0).tanh();
            assert!((f64::from(*got) - want).abs() < 1e-5, "{isa} {i}: {got} {want}");
        }
    }
}

#[test]
fn halves_are_rounded_alike_everywhere() {
    let x: Vec<f32> = noise(9, 4096).iter().map(|v| v * 70000.0 * v * v * v * v).collect();
    for (isa, ops) in tiers() {
        let mut out = vec![0u16; x.len()];
        // SAFETY: available tier, as many elements as told.
        unsafe { (ops.to_f16)(x.as_ptr(), out.as_mut_ptr(), x.len()) };
        for (x, h) in x.iter().zip(&out) {
            assert_eq!(*h, fornax_gguf::blocks::f32_to_f16(*x), "{isa} {x}");
        }
    }
}

#[test]
fn routing_orders_by_score_then_id() {
    let scores = [1.0, 3.0, 3.0, -1.0, 2.0];
    let (mut ids, mut weights) = ([0; 3], [0.0; 3]);
    rows::route(&scores, Gating::TopKThenSoftmax, &mut ids, &mut weights);
    assert_eq!(ids, [1, 2, 4]);
    assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6 && weights[0] == weights[1]);
    rows::route(&scores, Gating::SoftmaxThenTopK { normalise: false }, &mut ids, &mut weights);
    assert!(weights.iter().sum::<f32>() < 1.0);
}
