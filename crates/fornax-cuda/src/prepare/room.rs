//! Whether a model fits before any of it is allocated, and what would help if not. It knows no kernel.

use fornax_plan::{Error, KvGroup, Limits, Op, Plan, Result, liveness};

use super::{KV_BLOCK, distinct, pool_bytes};
use crate::driver::Gpu;

/// Bytes that a plan needs at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Need {
    pub(super) weights: u64,
    pub(super) kv: u64,
    /// Values between ops, of the largest step.
    pub(super) values: u64,
}

pub(super) fn need(plan: &Plan, limits: &Limits) -> Need {
    let kv = |g: &KvGroup| (pool_bytes(g, limits).iter().sum::<usize>() * g.layers.len()) as u64;
    let rows = u64::from(limits.rows.max(limits.wanted).max(limits.slots));
    let values = liveness::assign(plan).specs.iter().map(|b| 4 * rows * u64::from(b.width)).sum();
    Need {
        weights: distinct(plan).values().map(|w| *w as u64).sum(),
        kv: plan.kv.iter().map(kv).sum(),
        values,
    }
}

/// # Errors
/// `is_out_of_memory` with what is needed, what is free, and the flag that makes the largest part smaller.
pub(super) fn check(gpu: &Gpu, plan: &Plan, limits: &Limits) -> Result<()> {
    let need = need(plan, limits);
    let free = gpu.free_bytes()?;
    let Need { weights, kv, values } = need;
    let all = weights + kv + values;
    if all <= free {
        return Ok(());
    }
    let rows = u64::from(limits.rows);
    let help = if weights > free {
        "use a smaller model or one of fewer bits a weight, or --device cpu".to_string()
    } else if kv > free.saturating_sub(weights) / 2 {
        let smaller =
            if limits.kv_type == fornax_plan::KvType::Q8_0 { "" } else { ", or --kv-type q8_0" };
        format!("use a smaller --kv-memory, --ctx or --max-running{smaller}")
    } else {
        format!("use a smaller --max-running (a step has up to {rows} rows)")
    };
    let tokens = u64::from(limits.kv_blocks) * u64::from(KV_BLOCK);
    let states = plan.ops.iter().any(|op| matches!(op, Op::ShortConv { .. }));
    let states = if states { ", besides states" } else { "" };
    Err(Error::out_of_memory(format!(
        "cuda: {all} bytes are needed (weights {weights}, keys and values of {tokens} tokens {kv}, values between \
         operations {values}{states}), {free} are free on {}; {help}",
        gpu.name
    )))
}
