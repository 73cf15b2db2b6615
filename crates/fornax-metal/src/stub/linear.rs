//! Kernels that read weights: embedding, matrix products, the gated MLP.

use super::{Call, constants, dot};
use crate::args::{EmbedArgs, GatedArgs, MatmulArgs};
use crate::feed::{NONE, ROW};

/// 0 table, 1 rows, 2 last tokens by slot, 3 out.
pub(super) fn embed<const TY: u32>(call: &mut Call<'_>) -> Result<(), String> {
    let a = constants(call, EmbedArgs::from_words)?;
    let width = a.width as usize;
    for row in 0..a.rows as usize {
        let words = call.get(1, row * ROW, ROW)?;
        let (mut token, slot) = (words[0], words[3] as usize);
        if token == NONE {
            token = call.get(2, slot, 1)?[0];
        }
        if token >= a.vocab {
            return Err(format!("row {row}: token {token} of {}", a.vocab));
        }
        let mut x = call.weights::<TY>(0, token as usize, width)?;
        x.iter_mut().for_each(|v| *v *= a.scale);
        call.set_floats(3, row * width, &x)?;
    }
    Ok(())
}

/// 0 matrix, 1 x, 2 bias, 3 residual, 4 out.
pub(super) fn matmul<const TY: u32>(call: &mut Call<'_>) -> Result<(), String> {
    let a = constants(call, MatmulArgs::from_words)?;
    let (rows, cols, outs) = (a.rows as usize, a.cols as usize, a.outs as usize);
    let x = call.floats(1, 0, rows * cols)?;
    let bias = if a.bias != 0 { call.floats(2, 0, outs)? } else { vec![0.0; outs] };
    let mut y =
        if a.residual != 0 { call.floats(3, 0, rows * outs)? } else { vec![0.0; rows * outs] };
    for (o, bias) in bias.iter().enumerate() {
        let w = call.weights::<TY>(0, o, cols)?;
        for row in 0..rows {
            let mut v = (dot(&w, &x[row * cols..][..cols]) + bias) * a.scale;
            if a.softcap != 0.0 {
                v = a.softcap * (v / a.softcap).tanh();
            }
            y[row * outs + o] += v;
        }
    }
    call.set_floats(4, 0, &y)
}

/// 0 gate, 1 up, 2 x, 3 bias of the gate, 4 bias of up, 5 out.
pub(super) fn gated_mlp<const TY: u32>(call: &mut Call<'_>) -> Result<(), String> {
    let a = constants(call, GatedArgs::from_words)?;
    let (rows, cols, outs) = (a.rows as usize, a.cols as usize, a.outs as usize);
    let x = call.floats(2, 0, rows * cols)?;
    let bias = |call: &Call<'_>, slot, flag| {
        if a.bias & flag != 0 { call.floats(slot, 0, outs) } else { Ok(vec![0.0; outs]) }
    };
    let (gate_bias, up_bias) = (bias(call, 3, 1)?, bias(call, 4, 2)?);
    let mut y = vec![0.0; rows * outs];
    for o in 0..outs {
        let (g, u) = (call.weights::<TY>(0, o, cols)?, call.weights::<TY>(1, o, cols)?);
        for row in 0..rows {
            let x = &x[row * cols..][..cols];
            let (g, u) = (dot(&g, x) + gate_bias[o], dot(&u, x) + up_bias[o]);
            y[row * outs + o] = activate(g, u, &a);
        }
    }
    call.set_floats(5, 0, &y)
}

fn activate(g: f32, u: f32, a: &GatedArgs) -> f32 {
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    match a.act {
        0 => g * sigmoid(g) * u,
        1 => {
            let inner = (2.0 / std::f32::consts::PI).sqrt() * (g + 0.044715 * g * g * g);
            0.5 * g * (1.0 + inner.tanh()) * u
        }
        _ => {
            let (g, u) = (g.min(a.limit), u.clamp(-a.limit, a.limit));
            g * sigmoid(a.alpha * g) * (u + 1.0)
        }
    }
}
