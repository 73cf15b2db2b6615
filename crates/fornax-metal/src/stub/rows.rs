//! Kernels that go row by row: norm, rotary positions, selection, copies.

use super::{Call, constants, dot};
use crate::args::{CopyArgs, NormArgs, RopeArgs, SelectArgs};
use crate::feed::{ROW, WANTED};

/// 0 x, 1 weight, 2 residual, 3 out.
pub(super) fn rms_norm(call: &mut Call<'_>) -> Result<(), String> {
    let a = constants(call, NormArgs::from_words)?;
    let width = a.width as usize;
    let weight = call.floats(1, 0, width)?;
    for row in 0..a.rows as usize {
        let mut x = call.floats(0, row * width, width)?;
        normalise(&mut x, &weight, a.eps);
        if a.residual != 0 {
            let residual = call.floats(2, row * width, width)?;
            x.iter_mut().zip(residual).for_each(|(x, r)| *x += r);
        }
        call.set_floats(3, row * width, &x)?;
    }
    Ok(())
}

fn normalise(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    x.iter_mut().zip(weight).for_each(|(x, w)| *x *= scale * w);
}

/// 0 x, 1 norm, 2 radians per position, 3 rows, 4 out.
pub(super) fn norm_rope(call: &mut Call<'_>) -> Result<(), String> {
    let a = constants(call, RopeArgs::from_words)?;
    let (dim, heads, pairs) = (a.dim as usize, a.heads as usize, a.pairs as usize);
    let norm = if a.norm != 0 { call.floats(1, 0, dim)? } else { Vec::new() };
    let freqs = if pairs != 0 { call.floats(2, 0, pairs)? } else { Vec::new() };
    for row in 0..a.rows as usize {
        let pos = call.get(3, row * ROW, ROW)?[1];
        for head in 0..heads {
            let at = (row * heads + head) * dim;
            let mut x = call.floats(0, at, dim)?;
            if a.norm != 0 {
                normalise(&mut x, &norm, a.eps);
            }
            for (i, freq) in freqs.iter().enumerate() {
                let (p, q) = if a.halves != 0 { (i, i + pairs) } else { (2 * i, 2 * i + 1) };
                let (sin, cos) = (pos as f32 * freq).sin_cos();
                let (u, v) = (x[p], x[q]);
                x[p] = a.magnitude * (u * cos - v * sin);
                x[q] = a.magnitude * (u * sin + v * cos);
            }
            call.set_floats(4, at, &x)?;
        }
    }
    Ok(())
}

/// 0 x, 1 wanted, 2 out.
pub(super) fn select_rows(call: &mut Call<'_>) -> Result<(), String> {
    let a = constants(call, SelectArgs::from_words)?;
    let width = a.width as usize;
    for ix in 0..a.rows as usize {
        let row = call.get(1, ix * WANTED, WANTED)?[0] as usize;
        let x = call.get(0, row * width, width)?.to_vec();
        call.set(2, ix * width, &x)?;
    }
    Ok(())
}

/// 0 x, 1 out.
pub(super) fn copy(call: &mut Call<'_>) -> Result<(), String> {
    let a = constants(call, CopyArgs::from_words)?;
    let n = a.rows as usize * a.width as usize;
    let x = call.get(0, 0, n)?.to_vec();
    call.set(1, 0, &x)
}
