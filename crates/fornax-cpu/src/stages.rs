//! From a plan to the list of stages that every thread walks: which ops run between two
//! barriers, and where their values live. It knows no kernel and no thread.
//!
//! A stage is a chain of row-wise ops (norms, embedding, selection) and one wide op that consumes
//! it. The chain is folded because it is cheap: for a single row every thread computes it for
//! itself, with no barrier; for many rows they are shared out first. So a layer of the Llama
//! kind has five stages: norm and QKV; head norms, rotation, KV write and attention; output
//! projection; norm and gated MLP; down projection.

use fornax_plan::{Op, Plan, RowSpace, ValueId};

/// Ops that run between two barriers, by index into the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Group {
    /// A router whose scores the stage before has computed; its choice comes first.
    pub(crate) route: Option<usize>,
    /// Row-wise ops, in order.
    pub(crate) chain: Vec<usize>,
    /// The wide op; up to three of attention's.
    pub(crate) wide: Vec<usize>,
}

impl Group {
    fn is_empty(&self) -> bool {
        self.route.is_none() && self.chain.is_empty() && self.wide.is_empty()
    }

    /// All its ops.
    pub(crate) fn ops(&self) -> impl Iterator<Item = usize> + '_ {
        self.chain.iter().chain(&self.wide).copied()
    }

    fn writes(&self, plan: &Plan, value: ValueId) -> bool {
        self.chain.iter().any(|op| plan.ops[*op].outputs().iter().any(|v| v == value))
    }
}

/// The rows that an op runs over.
pub(crate) fn space(plan: &Plan, op: &Op) -> RowSpace {
    let value = op.outputs().iter().next().or_else(|| op.inputs().iter().next());
    value.map_or(RowSpace::Tokens, |v| plan.values[v.ix()].rows)
}

/// Cuts the plan into stages.
pub(crate) fn cut(plan: &Plan) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut open = Group::default();
    let close = |open: &mut Group, groups: &mut Vec<Group>| {
        if !open.is_empty() {
            groups.push(std::mem::take(open));
        }
    };
    for (at, op) in plan.ops.iter().enumerate() {
        let other_rows =
            open.ops().chain(open.route).any(|o| space(plan, &plan.ops[o]) != space(plan, op));
        let attention = matches!(op, Op::KvWrite { .. } | Op::Attention { .. });
        let joins = open.wide.is_empty() || (attention && joins(plan, &open, op));
        if other_rows || !joins {
            close(&mut open, &mut groups);
        }
        match *op {
            Op::Embed { .. } | Op::RmsNorm { .. } | Op::SelectRows { .. } => open.chain.push(at),
            Op::MatMul { residual, .. } | Op::MoeMlp { residual, .. } => {
                // A residual that the chain makes exists only after a barrier.
                if residual.is_some_and(|r| open.writes(plan, r)) {
                    close(&mut open, &mut groups);
                }
                open.wide.push(at);
                close(&mut open, &mut groups);
            }
            Op::Qkv { .. } | Op::GatedMlp { .. } | Op::Logits { .. } => {
                open.wide.push(at);
                close(&mut open, &mut groups);
            }
            Op::MoeRoute { .. } => {
                open.wide.push(at);
                close(&mut open, &mut groups);
                open.route = Some(at);
            }
            Op::QkNormRope { .. } => {
                close(&mut open, &mut groups);
                open.wide.push(at);
            }
            Op::KvWrite { .. } => {
                if open.wide.is_empty() {
                    close(&mut open, &mut groups);
                }
                open.wide.push(at);
            }
            Op::Attention { .. } => {
                if open.wide.is_empty() {
                    close(&mut open, &mut groups);
                }
                open.wide.push(at);
                close(&mut open, &mut groups);
            }
            Op::ShortConv { .. } => {
                close(&mut open, &mut groups);
                open.wide.push(at);
                close(&mut open, &mut groups);
            }
            // Read after the last stage, by the caller.
            Op::Sample { .. } | Op::HiddenOut { .. } => {}
        }
    }
    close(&mut open, &mut groups);
    groups
}

/// Whether one thread can run `op` for a key head right after the attention ops of `open`.
fn joins(plan: &Plan, open: &Group, op: &Op) -> bool {
    if !open.chain.is_empty() || open.route.is_some() {
        return false;
    }
    let last = open.wide.last().map(|o| &plan.ops[*o]);
    let by_head = |v: ValueId, heads: u32, dim: u32| plan.width(v) == heads * dim;
    match (last, op) {
        (Some(Op::QkNormRope { q_out, k_out, dim, .. }), Op::KvWrite { k, kv, .. }) => {
            let g = &plan.kv[kv.group as usize];
            k == k_out
                && *dim == g.k_width
                && by_head(*k_out, g.heads, *dim)
                && plan.width(*q_out).is_multiple_of(plan.width(*k_out))
        }
        (Some(Op::KvWrite { kv: written, .. }), Op::Attention { q, kv, heads, .. }) => {
            let g = &plan.kv[kv.group as usize];
            let rotated = match plan.ops[open.wide[0]] {
                Op::QkNormRope { q_out, .. } => q_out == *q,
                _ => true,
            };
            written == kv && rotated && by_head(*q, *heads, g.k_width)
        }
        _ => false,
    }
}

/// Which buffer every value lives in, and how wide and in which row space each buffer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    /// By value; none where nothing runs it.
    pub(crate) of: Vec<Option<usize>>,
    /// Rows and columns of each buffer.
    pub(crate) buffers: Vec<(RowSpace, usize)>,
}

/// Assigns buffers as [`fornax_plan::liveness`] does for single ops, but for whole stages: threads
/// are anywhere within a stage, so nothing written in it may lie where anything in it is read.
pub(crate) fn assign(plan: &Plan, groups: &[Group]) -> Layout {
    let mut last = vec![0; plan.values.len()];
    for (at, group) in groups.iter().enumerate() {
        for op in group.ops().chain(group.route) {
            for v in plan.ops[op].inputs().iter().chain(plan.ops[op].outputs().iter()) {
                last[v.ix()] = at;
            }
        }
    }
    for op in &plan.ops {
        if let Op::Sample { logits: v } | Op::HiddenOut { x: v } = *op {
            last[v.ix()] = groups.len();
        }
    }
    let mut layout = Layout { of: vec![None; plan.values.len()], buffers: Vec::new() };
    let mut live: Vec<ValueId> = Vec::new();
    for (at, group) in groups.iter().enumerate() {
        live.retain(|v| last[v.ix()] >= at);
        for op in group.ops() {
            for v in plan.ops[op].outputs().iter() {
                let spec = &plan.values[v.ix()];
                let taken: Vec<Option<usize>> = live.iter().map(|v| layout.of[v.ix()]).collect();
                let width = spec.width as usize;
                let free = (0..layout.buffers.len())
                    .filter(|b| layout.buffers[*b].0 == spec.rows && !taken.contains(&Some(*b)))
                    .min_by_key(|b| layout.buffers[*b].1.abs_diff(width));
                let ix = free.unwrap_or_else(|| {
                    layout.buffers.push((spec.rows, width));
                    layout.buffers.len() - 1
                });
                layout.buffers[ix].1 = layout.buffers[ix].1.max(width);
                layout.of[v.ix()] = Some(ix);
                live.push(v);
            }
        }
    }
    layout
}

#[cfg(test)]
mod tests {
    use super::*;
    use fornax_plan::conformance;

    #[test]
    fn nothing_is_written_where_its_stage_or_a_later_one_still_reads() {
        for case in conformance::cases() {
            let plan = &case.plan;
            let groups = cut(plan);
            let layout = assign(plan, &groups);
            let stage_of = |v: ValueId| {
                let writes =
                    |g: &Group| g.ops().any(|o| plan.ops[o].outputs().iter().any(|w| w == v));
                groups.iter().position(writes)
            };
            let last_read = |v: ValueId| {
                let reads = |g: &Group| {
                    g.ops().chain(g.route).any(|o| plan.ops[o].inputs().iter().any(|w| w == v))
                };
                groups.iter().rposition(reads)
            };
            for a in (0..plan.values.len() as u32).map(ValueId) {
                for b in (0..plan.values.len() as u32).map(ValueId) {
                    if a == b || layout.of[a.ix()] != layout.of[b.ix()] {
                        continue;
                    }
                    let (Some(first), Some(second)) = (stage_of(a), stage_of(b)) else { continue };
                    let ends = last_read(a).unwrap_or(first).max(first);
                    assert!(
                        second < first || ends < second,
                        "{}: values {} and {} overlap",
                        case.name,
                        a.0,
                        b.0
                    );
                }
            }
            let all: Vec<usize> = groups.iter().flat_map(|g| g.ops().collect::<Vec<_>>()).collect();
            let run = |op: &Op| !matches!(op, Op::Sample { .. } | Op::HiddenOut { .. });
            assert_eq!(all.len(), plan.ops.iter().filter(|o| run(o)).count(), "{}", case.name);
        }
    }
}
