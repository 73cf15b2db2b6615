//! The paged cache: appending keys and values, and attention over them.
//!
//! A pool holds `[block][token][heads · width]` floats of one layer, keys and values apart. Rows
//! with nothing left to produce are passed over: their positions may lie past their blocks.

use super::{Call, constants, dot};
use crate::args::{AttentionArgs, KvWriteArgs};
use crate::feed::ROW;

/// Position and sequence of a row; none where the row's chain has ended.
fn live(call: &Call<'_>, slot: usize, row: usize) -> Result<Option<(usize, usize)>, String> {
    let r = call.get(slot, row * ROW, ROW)?;
    Ok((r[4] > 0).then_some((r[1] as usize, r[2] as usize)))
}

/// Index of a token in a pool, counted in tokens.
fn token_at(
    call: &Call<'_>,
    table: usize,
    seq: usize,
    stride: u32,
    block: u32,
    pos: usize,
) -> Result<usize, String> {
    let (stride, block) = (stride as usize, block as usize);
    if pos / block >= stride {
        return Err(format!("position {pos} is past a table of {stride} blocks of {block}"));
    }
    let physical = call.get(table, seq * stride + pos / block, 1)?[0] as usize;
    Ok(physical * block + pos % block)
}

/// 0 k, 1 v, 2 rows, 3 tables, 4 key pool, 5 value pool.
pub(super) fn kv_write(call: &mut Call<'_>) -> Result<(), String> {
    let a = constants(call, KvWriteArgs::from_words)?;
    for row in 0..a.rows as usize {
        let Some((pos, seq)) = live(call, 2, row)? else { continue };
        let at = token_at(call, 3, seq, a.stride, a.block, pos)?;
        for (from, to, width) in [(0, 4, a.k_width as usize), (1, 5, a.v_width as usize)] {
            let x = call.get(from, row * width, width)?.to_vec();
            call.set(to, at * width, &x)?;
        }
    }
    Ok(())
}

/// 0 q, 1 rows, 2 tables, 3 key pool, 4 value pool, 5 sinks, 6 out.
pub(super) fn attention(call: &mut Call<'_>) -> Result<(), String> {
    let a = constants(call, AttentionArgs::from_words)?;
    let (heads, kv_heads) = (a.heads as usize, a.kv_heads as usize);
    let (kw, vw) = (a.k_width as usize, a.v_width as usize);
    let sinks = if a.sinks != 0 { call.floats(5, 0, heads)? } else { Vec::new() };
    for row in 0..a.rows as usize {
        let Some((pos, seq)) = live(call, 1, row)? else {
            call.set_floats(6, row * heads * vw, &vec![0.0; heads * vw])?;
            continue;
        };
        let first = if a.window == 0 { 0 } else { (pos + 1).saturating_sub(a.window as usize) };
        for head in 0..heads {
            let q = call.floats(0, (row * heads + head) * kw, kw)?;
            let group = head / (heads / kv_heads);
            // One pass with a running maximum, as the GPU kernel does it.
            let (mut max, mut sum) = (sinks.get(head).copied().unwrap_or(f32::NEG_INFINITY), 0.0);
            if a.sinks != 0 {
                sum = 1.0f32;
            }
            let mut mix = vec![0.0f32; vw];
            for key in first..=pos {
                let at = token_at(call, 2, seq, a.stride, a.block, key)?;
                let k = call.floats(3, (at * kv_heads + group) * kw, kw)?;
                let mut score = dot(&q, &k) * a.scale;
                if a.softcap != 0.0 {
                    score = a.softcap * (score / a.softcap).tanh();
                }
                let new = score.max(max);
                let (keep, weight) = ((max - new).exp(), (score - new).exp());
                (max, sum) = (new, sum * keep + weight);
                let v = call.floats(4, (at * kv_heads + group) * vw, vw)?;
                mix.iter_mut().zip(v).for_each(|(m, v)| *m = *m * keep + weight * v);
            }
            mix.iter_mut().for_each(|m| *m /= sum);
            call.set_floats(6, (row * heads + head) * vw, &mix)?;
        }
    }
    Ok(())
}
