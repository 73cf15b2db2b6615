//! How large everything is that an engine decides at its start: from what was asked for, the plan, and the memory that
//! the device says is left. It starts nothing.

use fornax_plan::{Device, KvType, Limits, Plan};

use super::api::ServeOptions;
use super::core::{GROUPS_MAX, Rules};
use crate::error::{Error, Result};
use crate::kv::KvRules;
use crate::speculate::DRAFT_MAX;

/// Bytes of keys and values that a pool takes where the device does not say what is free.
const POOL_BYTES: u64 = 2 << 30;
/// Bytes of saved states that the prefix cache keeps.
const STATE_BYTES: usize = 64 << 20;

/// Sizes of everything that is decided at the start.
///
/// # Errors
/// `is_unsupported` for a model with too many kinds of cache, `is_out_of_memory` where the pool does not fit.
pub(super) fn size(
    plan: &Plan,
    device: &dyn Device,
    options: &ServeOptions,
) -> Result<(Limits, Rules)> {
    if plan.kv.len() > GROUPS_MAX {
        return Err(Error::unsupported(format!(
            "starting the engine: the model's layers have {} kinds of key/value cache, expected at \
             most {GROUPS_MAX}",
            plan.kv.len()
        )));
    }
    let slots = options.max_running.clamp(1, 4096);
    let context = options.context.max(1) as usize;
    let info = device.info();
    let block = info.kv_block.max(1) as usize;
    let tokens = pool(plan, device, options, slots as u64)?;
    let blocks = u32::try_from(tokens.div_ceil(block as u64).max(1)).unwrap_or(u32::MAX);
    let asked = if options.step_rows == 0 { info.step_rows } else { options.step_rows };
    let rows = (asked.max(1) as usize).max(slots).min(context.max(slots));
    let wanted = rows.min(slots.max(4 * (DRAFT_MAX + 1)));
    let state: usize = plan.states.iter().map(|s| 4 * s.len as usize).sum();
    let limits = Limits {
        slots: slots as u32,
        rows: rows as u32,
        wanted: wanted as u32,
        kv_blocks: blocks,
        kv_type: options.kv_type,
        act: options.act,
        chain: 1,
        deterministic: options.deterministic,
        ..Limits::default()
    };
    let states = (STATE_BYTES / state.max(1)).clamp(4, 4096);
    let rules = Rules {
        slots,
        context,
        rows,
        wanted,
        kv: KvRules {
            block,
            blocks,
            rows,
            cache: options.prefix_cache,
            states: (!plan.states.is_empty()).then_some(states),
        },
        busy_ms: f64::from(options.step_ms_busy),
        idle_ms: f64::from(options.step_ms_idle),
        speculate: options.speculate,
        ahead: info.in_flight > 1,
    };
    Ok((limits, rules))
}

/// Positions of the pool.
///
/// # Errors
/// `is_out_of_memory` where what was asked for is not free, or what is free holds no request.
fn pool(plan: &Plan, device: &dyn Device, options: &ServeOptions, slots: u64) -> Result<u64> {
    let each = kv_bytes(plan, options.kv_type).max(1);
    let context = u64::from(options.context.max(1));
    let weights: u64 = plan.weights.iter().map(|w| w.len_bytes() as u64).sum();
    let left = |memory: Option<u64>| memory.map(|bytes| bytes.saturating_sub(weights));
    let asked = match (options.kv_tokens, options.kv_bytes) {
        (Some(tokens), _) => Some(tokens.max(1)),
        (None, Some(bytes)) => Some((bytes / each).max(1)),
        (None, None) => None,
    };
    let kind = device.info().kind;
    let mib = |tokens: u64| tokens.saturating_mul(each).div_ceil(1 << 20);
    if let Some(tokens) = asked {
        // Blocks are small; that the last one is not full is no matter here.
        match left(device.memory_free()) {
            Some(free) if tokens.saturating_mul(each) > free => {
                return Err(Error::out_of_memory(format!(
                    "starting the engine: keys and values of {tokens} positions take {} MiB, and {} MiB are free on \
                     {kind} beside the weights; make the pool smaller",
                    mib(tokens),
                    free >> 20
                )));
            }
            _ => return Ok(tokens),
        }
    }
    let unasked = left(device.memory_unasked());
    let room = unasked.unwrap_or(POOL_BYTES);
    if unasked.is_some() && room / each < context {
        return Err(Error::out_of_memory(format!(
            "starting the engine: keys and values of one request of {context} positions take {} MiB, and {} MiB may be \
             taken on {kind} beside the weights; allow shorter requests, store keys and values in 8 bits, or give the \
             pool a size",
            mib(context),
            room >> 20
        )));
    }
    Ok(slots.saturating_mul(context).min(room / each).max(context))
}

/// Bytes of keys and values of one token, in all groups.
fn kv_bytes(plan: &Plan, kv_type: KvType) -> u64 {
    let elements = plan
        .kv
        .iter()
        .map(|g| g.layers.len() as u64 * u64::from(g.heads) * u64::from(g.k_width + g.v_width));
    let elements: u64 = elements.sum();
    match kv_type {
        KvType::F32 => elements * 4,
        KvType::F16 => elements * 2,
        KvType::Q8_0 => elements * 34 / 32,
    }
}

#[cfg(test)]
mod tests {
    use fornax_gguf::TensorType;
    use fornax_plan::reference::ReferenceDevice;
    use fornax_plan::{DeviceInfo, Program, Refusal, conformance};

    use super::*;

    /// A device of which nothing is used but what it says of its memory.
    struct Says(Option<u64>, Option<u64>);

    impl Device for Says {
        fn info(&self) -> DeviceInfo {
            ReferenceDevice { kv_block: 16, ..ReferenceDevice::default() }.info()
        }

        fn memory_free(&self) -> Option<u64> {
            self.0
        }

        fn memory_unasked(&self) -> Option<u64> {
            self.1
        }

        fn supports(&self, _: &Plan, _: &Limits) -> Vec<Refusal> {
            Vec::new()
        }

        fn prepare(&self, _: &Plan, _: &Limits) -> fornax_plan::Result<Box<dyn Program>> {
            Err(fornax_plan::Error::unsupported("nothing is prepared here"))
        }
    }

    #[test]
    fn the_pool_takes_what_is_left_and_no_more_than_can_be_used() {
        let plan = conformance::proof(TensorType::F32).plan;
        let each = kv_bytes(&plan, KvType::F16);
        let weights: u64 = plan.weights.iter().map(|w| w.len_bytes() as u64).sum();
        let positions = |device: &Says, options: ServeOptions| {
            let (limits, _) = size(&plan, device, &options)?;
            Ok::<u64, Error>(u64::from(limits.kv_blocks) * 16)
        };
        let options = ServeOptions { max_running: 4, context: 64, ..ServeOptions::default() };
        // Four contexts, whatever else is free.
        assert_eq!(positions(&Says(None, None), options.clone()).unwrap(), 256);
        let plenty = Some(weights + 10_000 * each);
        assert_eq!(positions(&Says(plenty, plenty), options.clone()).unwrap(), 256);
        // What may be taken unasked.
        let some = Some(weights + 160 * each);
        assert_eq!(positions(&Says(plenty, some), options.clone()).unwrap(), 160);
        let e = positions(&Says(plenty, Some(weights + 63 * each)), options.clone()).unwrap_err();
        assert!(e.is_out_of_memory() && e.to_string().contains("64 positions"), "{e}");
        let e = positions(&Says(Some(5), Some(5)), options.clone()).unwrap_err();
        assert!(e.is_out_of_memory(), "{e}");
        // What was asked for goes up to what is free.
        let asked = |bytes| ServeOptions { kv_bytes: Some(bytes), ..options.clone() };
        assert_eq!(positions(&Says(plenty, some), asked(960 * each)).unwrap(), 960);
        assert_eq!(positions(&Says(None, None), asked(960 * each)).unwrap(), 960);
        let e = positions(&Says(plenty, some), asked(20_000 * each)).unwrap_err();
        assert!(e.is_out_of_memory() && e.to_string().contains("20000 positions"), "{e}");
        let tokens = ServeOptions { kv_tokens: Some(32), ..options };
        assert_eq!(positions(&Says(plenty, some), tokens).unwrap(), 32);
    }
}
