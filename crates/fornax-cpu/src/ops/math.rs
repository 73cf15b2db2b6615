//! Exponential, its relatives, and the row-wise arithmetic of norms and gated MLPs. It knows no
//! plan and no threads.

use fornax_plan::Activation;

use super::lanes::Lanes;

/// Below this the exponential is zero; above its negative it stays at the last value. The powers
/// of two within are all normal numbers.
const EXP_LIMIT: f32 = 87.3;
/// 1.5 · 2²³: adding it rounds to an integer in the low bits, ties to even.
const INTEGER: f32 = 12_582_912.0;
/// ln 2 in two parts: the first has few enough bits that its product with any exponent is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Taylor coefficients 1/7! … 1/2!: on ±ln2/2 the rest is 5e-9 of the value.
const TAYLOR: [f32; 6] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5];

/// eˣ within two units of the last place; NaN stays NaN.
///
/// # Safety
/// As [`Lanes`].
#[inline(always)]
pub(super) unsafe fn exp<L: Lanes>(x: L) -> L {
    // SAFETY: the caller's word.
    unsafe {
        let low = L::splat(-EXP_LIMIT);
        let c = L::splat(EXP_LIMIT).min(low.max(x));
        let t = L::splat(INTEGER).add_product(c, L::splat(std::f32::consts::LOG2_E));
        let n = t.sub(L::splat(INTEGER));
        let r = c.add_product(n, L::splat(-LN2_HIGH)).add_product(n, L::splat(-LN2_LOW));
        let mut p = L::splat(TAYLOR[0]);
        let mut i = 1;
        while i < TAYLOR.len() {
            p = L::splat(TAYLOR[i]).add_product(p, r);
            i += 1;
        }
        p = r.add_product(p.mul(r), r).add(L::splat(1.0));
        x.zero_below(low, p.mul(t.exp2_biased()))
    }
}

/// The same for one number.
///
/// # Safety
/// As [`Lanes`].
#[inline(always)]
pub(super) unsafe fn exp_one<L: Lanes>(x: f32) -> f32 {
    // SAFETY: the caller's word.
    unsafe { exp(L::splat(x)).first() }
}

/// `cap · tanh(x / cap)`.
///
/// # Safety
/// As [`Lanes`].
#[inline(always)]
pub(super) unsafe fn capped<L: Lanes>(x: L, cap: f32) -> L {
    // SAFETY: the caller's word.
    unsafe {
        let y = x.div(L::splat(cap));
        let e = exp(y.add(y)).add(L::splat(1.0));
        L::splat(cap).mul(L::splat(1.0).sub(L::splat(2.0).div(e)))
    }
}

/// `x / (1 + e⁻ʸ)`.
#[inline(always)]
unsafe fn times_sigmoid<L: Lanes>(x: L, y: L) -> L {
    // SAFETY: the caller's word.
    unsafe { x.div(L::splat(1.0).add(exp(L::splat(0.0).sub(y)))) }
}

/// Calls `$body` with a vector of each sixteen elements and how to put one back, the last ones
/// padded with zeros.
macro_rules! vectors {
    ($n:expr, $i:ident, $load:ident, $store:ident, $body:block) => {{
        let mut $i = 0;
        while $i + 16 <= $n {
            macro_rules! $load {
                ($p:expr) => {
                    L::load($p.add($i))
                };
            }
            #[allow(unused_macros, reason = "a body may only read")]
            macro_rules! $store {
                ($v:expr, $p:expr) => {
                    $v.store($p.add($i))
                };
            }
            $body
            $i += 16;
        }
        if $i < $n {
            macro_rules! $load {
                ($p:expr) => {
                    L::load_part($p.add($i), $n - $i)
                };
            }
            #[allow(unused_macros, reason = "a body may only read")]
            macro_rules! $store {
                ($v:expr, $p:expr) => {
                    $v.store_part($p.add($i), $n - $i)
                };
            }
            $body
        }
    }};
}

/// `out = act(gate) · up` over `n` elements; `out` may be `gate` or `up`.
///
/// # Safety
/// As [`Lanes`]; all pointers are good for `n` elements.
#[inline(always)]
pub(super) unsafe fn gate<L: Lanes>(
    gate: *const f32,
    up: *const f32,
    out: *mut f32,
    n: usize,
    act: Activation,
) {
    // SAFETY: the caller's word.
    unsafe {
        vectors!(n, i, load, store, {
            let (g, u) = (load!(gate), load!(up));
            let y = match act {
                Activation::Silu => times_sigmoid(g, g).mul(u),
                Activation::GeluTanh => {
                    // ½ (1 + tanh y) is the sigmoid of 2y; √(2/π) · 2 = 1.5957…
                    let cube = g.mul(g).mul(g).mul(L::splat(0.044_715));
                    let y = g.add(cube).mul(L::splat(1.595_769_2));
                    times_sigmoid(g, y).mul(u)
                }
                Activation::SwigluClamped { alpha, limit } => {
                    let (low, high) = (L::splat(-limit), L::splat(limit));
                    let (g, u) = (high.min(g), low.max(high.min(u)));
                    times_sigmoid(g, g.mul(L::splat(alpha))).mul(u.add(L::splat(1.0)))
                }
            };
            store!(y, out);
        });
    }
}

/// `out = x / sqrt(mean(x²) + eps) · weight (+ residual)`; `out` may be `x` or the residual.
///
/// # Safety
/// As [`Lanes`]; the pointers are good for `n` elements, `residual` may be null.
#[inline(always)]
pub(super) unsafe fn norm<L: Lanes>(
    x: *const f32,
    weight: *const f32,
    residual: *const f32,
    eps: f32,
    out: *mut f32,
    n: usize,
) {
    // SAFETY: the caller's word.
    unsafe {
        // Two chains of sums hide the latency of the addition.
        let (mut even, mut odd) = (L::splat(0.0), L::splat(0.0));
        vectors!(n, i, load, store, {
            let v = load!(x);
            if i % 32 == 0 {
                even = even.add(v.mul(v));
            } else {
                odd = odd.add(v.mul(v));
            }
        });
        let mean = even.add(odd).sum() / n as f32;
        let scale = L::splat(1.0 / (mean + eps).sqrt());
        vectors!(n, i, load, store, {
            let mut y = load!(x).mul(scale).mul(load!(weight));
            if !residual.is_null() {
                y = y.add(load!(residual));
            }
            store!(y, out);
        });
    }
}

/// `x = x · scale`, then the cap where it is not zero.
///
/// # Safety
/// As [`Lanes`]; `x` is good for `n` elements.
#[inline(always)]
pub(super) unsafe fn scale_and_cap<L: Lanes>(x: *mut f32, n: usize, scale: f32, cap: f32) {
    // SAFETY: the caller's word.
    unsafe {
        vectors!(n, i, load, store, {
            let mut y = load!(x).mul(L::splat(scale));
            if cap != 0.0 {
                y = capped(y, cap);
            }
            store!(y, x);
        });
    }
}

/// `x += y`.
///
/// # Safety
/// As [`Lanes`]; the pointers are good for `n` elements.
#[inline(always)]
pub(super) unsafe fn add<L: Lanes>(x: *mut f32, y: *const f32, n: usize) {
    // SAFETY: the caller's word.
    unsafe {
        vectors!(n, i, load, store, {
            let sum = load!(x).add(load!(y));
            store!(sum, x);
        });
    }
}

/// Halves from floats, to nearest, ties to even; `n` is a multiple of 16.
///
/// # Safety
/// As [`Lanes`]; the pointers are good for `n` elements.
#[inline(always)]
pub(super) unsafe fn to_f16<L: Lanes>(x: *const f32, out: *mut u16, n: usize) {
    for i in (0..n).step_by(16) {
        // SAFETY: the caller's word.
        unsafe { L::load(x.add(i)).store_f16(out.add(i)) }
    }
}
