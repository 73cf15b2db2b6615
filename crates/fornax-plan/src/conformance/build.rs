//! Random weights and the frame of a one-op plan: embedding in, hidden rows out.

use std::sync::Arc;

use fornax_gguf::{Mapping, TensorType, blocks};

use super::{Case, Seq};
use crate::device::KvType;
use crate::ids::{TokenId, ValueId};
use crate::op::Op;
use crate::plan::{Hyper, Plan, WeightRef};
use crate::sample::uniform;
use crate::step::Want;

/// Tokens of a case's vocabulary.
pub(super) const VOCAB: u32 = 64;

/// Values in (−1, 1), a function of the seed alone, scaled.
pub(super) fn noise(seed: u64, len: usize, scale: f32) -> Vec<f32> {
    (0..len as u32).map(|i| (2.0 * uniform(seed, i) - 1.0) * scale).collect()
}

/// A random matrix (or `experts` of them) of any type that has a quantiser, scaled so that
/// products keep the size of their input.
pub fn weight(
    name: &str,
    ty: TensorType,
    experts: u32,
    rows: u32,
    cols: u32,
    seed: u64,
) -> WeightRef {
    let scale = (3.0 / cols as f32).sqrt();
    let n = experts as usize * rows as usize * cols as usize;
    let values = noise(seed, n, scale);
    let bytes = n / ty.block_len() * ty.block_bytes();
    let mut data = vec![0u8; bytes];
    blocks::quantize(ty, &values, &mut data).expect("invariant: cases use types with a quantiser");
    WeightRef {
        name: name.to_string(),
        ty,
        cols,
        rows,
        experts,
        data: Arc::new(Mapping::from_vec(data)),
        offset: 0,
    }
}

/// A plan of `embed → body → hidden rows`; the embedding rows are random f32.
pub(super) fn one_op(
    width: u32,
    seed: u64,
    body: impl FnOnce(&mut Plan, ValueId) -> ValueId,
) -> Plan {
    let hyper = Hyper { family: "case".into(), vocab: VOCAB, width, context: 1 << 14 };
    let mut plan = Plan::new(hyper);
    let rows = noise(seed, (VOCAB * width) as usize, 2.0);
    let table = plan.weight(WeightRef::from_f32("table", VOCAB, width, &rows));
    let x = plan.value("x", width);
    plan.push(Op::Embed { table, scale: 1.0, out: x });
    let y = body(&mut plan, x);
    let wanted = plan.wanted_value("wanted", plan.width(y));
    plan.push(Op::SelectRows { x: y, out: wanted });
    plan.push(Op::HiddenOut { x: wanted });
    plan
}

/// Tokens that look random.
pub(super) fn tokens(seed: u64, n: u32) -> Vec<TokenId> {
    (0..n).map(|i| (uniform(seed, i) * VOCAB as f32) as TokenId).collect()
}

/// A sequence that wants every hidden row of `n` tokens from `pos` on.
pub(super) fn hidden_seq(slot: u32, pos: u32, n: u32) -> Seq {
    let wants = vec![(0..n, Want::Hidden)];
    Seq { slot, pos, tokens: tokens(u64::from(slot) << 32 | u64::from(pos), n), wants, max_new: 1 }
}

/// One step of one sequence of `rows` tokens.
pub(super) fn simple(name: String, plan: Plan, rows: u32, tolerance: f32) -> Case {
    let steps = vec![vec![hidden_seq(0, 0, rows)]];
    Case { name, plan, steps, kv_type: KvType::F32, tolerance }
}
