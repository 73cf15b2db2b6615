//! The highest logit, and the row that feeds it back.

use super::{Call, constants};
use crate::args::ArgmaxArgs;
use crate::feed::{LOGPROB, NONE, ROW, SETS_LAST, STOPS, TOKEN, UNUSABLE, WANTED};

/// 0 logits, 1 wanted, 2 all rows, 3 last tokens by slot, 4 stop lists by sequence, 5 tickets to
/// stop by slot, 6 outputs.
pub(super) fn argmax(call: &mut Call<'_>) -> Result<(), String> {
    let a = constants(call, ArgmaxArgs::from_words)?;
    for ix in 0..a.rows as usize {
        let wanted = call.get(1, ix * WANTED, WANTED)?.to_vec();
        let (row, kind, chain, ticket) = (wanted[0], wanted[1], wanted[2], wanted[3]);
        let row = call.get(2, (a.base + row) as usize * ROW, ROW)?.to_vec();
        let [_, pos, seq, slot, left, round] = [0, 1, 2, 3, 4, 5].map(|i| row[i]);
        if kind & TOKEN == 0 || left == 0 {
            continue;
        }
        let logits = call.floats(0, ix * a.vocab as usize, a.vocab as usize)?;
        let best = best(&logits);
        let token = best.unwrap_or(0);
        let at = match round {
            0 => ix as u32,
            r => a.out_first + (r - 1) * a.out_next + ix as u32,
        };
        call.set(6, at as usize, &[best.unwrap_or(UNUSABLE)])?;
        if kind & LOGPROB != 0 {
            let at = (a.choices + at) as usize;
            call.set_floats(6, at, &[logprob(&logits, token)])?;
        }
        if kind & SETS_LAST != 0 {
            call.set(3, slot as usize, &[token])?;
        }
        if chain != NONE {
            let stops = call.get(4, seq as usize * STOPS, STOPS)?;
            let listed = stops[1..].iter().take(stops[0] as usize).any(|s| *s == token);
            let stopped = call.get(5, slot as usize, 1)?[0] >= ticket;
            let at = chain as usize * ROW;
            let left = call.get(2, at + 4, 1)?[0];
            let left = if listed || stopped || best.is_none() { 0 } else { left - 1 };
            call.set(2, at, &[token, pos + 1, seq, slot, left, round + 1])?;
        }
    }
    Ok(())
}

/// Ties to the lowest id; NaN and −∞ are never chosen.
fn best(logits: &[f32]) -> Option<u32> {
    let mut best = (f32::NEG_INFINITY, None);
    for (id, v) in logits.iter().enumerate() {
        if *v > best.0 {
            best = (*v, Some(id as u32));
        }
    }
    best.1
}

fn logprob(logits: &[f32], token: u32) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f32 = logits.iter().filter(|v| !v.is_nan()).map(|v| (v - max).exp()).sum();
    logits[token as usize] - max - sum.ln()
}
