//! A plan as the launches of steps with many rows: which ops go together, and what a product hands on to the next one
//! without a detour over f32 rows. It knows no kernel and no number of rows.

use std::collections::HashMap;
use std::ops::Range;

use fornax_gguf::TensorType;
use fornax_plan::{KvType, Op, Plan, RopePairs, ValueId};

use super::scratch::SLOTS;
use crate::fast::Addresses;
use crate::fast::planes::PLANED;
use crate::fast::stage::{GATED, NORM, ROWS, Stage};
use crate::prepare::{Action, Extent};

/// Query heads of a KV head that attention has rows for.
const SHARE_MAX: u32 = 64;
/// Elements of a head that the kernel for positions has room for.
const DIM_MAX: u32 = 256;

/// One launch or a few.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    /// One of the plain actions.
    Action(usize),
    Product(Product),
    Turn(Turn),
    Attend(Attend),
}

/// A matrix of a product: where it is, its format, its outputs, and how many stand before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Matrix {
    pub(crate) w: u64,
    pub(crate) ty: TensorType,
    pub(crate) outs: u32,
    pub(crate) before: u32,
}

/// Where a product finds its input. Values share memory with values that are gone, so no address tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    /// As rows of f32, which are rounded first.
    Rows,
    /// As attention has left it in the form that products read.
    Attention,
    /// As gated pairs have.
    Pairs,
    /// As a product has, which made its norm but for the factor; steps whose products take halves find rows of f32.
    Normed,
}

/// What a product leaves for the next one alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Onward {
    Nothing,
    /// Gated pairs, in the form that products read.
    Pairs,
    /// Beside its rows, their norm with these weights, but for the factor.
    Normed(u64),
}

#[derive(Clone, Debug)]
pub(crate) struct Product {
    pub(crate) op: u32,
    pub(crate) extent: Extent,
    pub(crate) stage: Stage,
    pub(crate) matrices: Vec<Matrix>,
    pub(crate) from: From,
    /// Which of the two inputs in scratch it reads; what it leaves goes into the other.
    pub(crate) reads: usize,
    /// What it gives is read by one op alone.
    pub(crate) once: bool,
    pub(crate) onward: Onward,
}

impl Product {
    /// Whether outputs can be written four at a time, as long products do.
    pub(crate) fn by_fours(&self) -> bool {
        let Stage { widths, cuts, outs, .. } = self.stage;
        let parts = widths.iter().chain(outs.iter()).chain(cuts.iter().filter(|c| **c != u32::MAX));
        parts.copied().all(|n| n.is_multiple_of(4))
    }
}

/// Norms and positions of queries and keys, and the append of keys and values.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    pub(crate) op: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) dim: u32,
    pub(crate) v_dim: u32,
    pub(crate) group: usize,
    pub(crate) pairs: u32,
    pub(crate) halves: bool,
    pub(crate) eps: f32,
    pub(crate) magnitude: f32,
    /// q, k, v, norm of q, norm of k, frequencies.
    pub(crate) from: [u64; 6],
    pub(crate) q_out: u64,
    pub(crate) pool: [u64; 2],
    /// Only one op reads the queries.
    once: bool,
    /// Attention behind it does this, too, where every sequence has one row.
    pub(crate) joined: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Attend {
    pub(crate) op: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) dim: u32,
    pub(crate) group: usize,
    pub(crate) window: u32,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    pub(crate) q: u64,
    pub(crate) pool: [u64; 2],
    pub(crate) sinks: u64,
    pub(crate) out: u64,
    /// What it gives is read by one op alone.
    pub(crate) once: bool,
    pub(crate) onward: bool,
    /// What it can do first.
    pub(crate) turn: Option<Turn>,
}

/// What the items are made of.
pub(crate) struct Source<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) actions: &'a [Action],
    /// The actions of each op of the plan.
    pub(crate) spans: &'a [Range<usize>],
    pub(crate) stages: &'a [Stage],
    pub(crate) at: &'a dyn Addresses,
    pub(crate) ropes: &'a [u64],
    pub(crate) kv_type: KvType,
    pub(crate) deterministic: bool,
}

/// The items of a plan, in order.
pub(crate) fn items(s: &Source<'_>) -> Vec<Item> {
    let mut uses: HashMap<ValueId, u32> = HashMap::new();
    for v in s.plan.ops.iter().flat_map(|op| op.inputs().iter().collect::<Vec<_>>()) {
        *uses.entry(v).or_default() += 1;
    }
    let once = |v: ValueId| uses.get(&v) == Some(&1);
    let mut all = Vec::new();
    let mut next_stage = 0;
    let mut ix = 0;
    while ix < s.plan.ops.len() {
        let op_at = |span: &Range<usize>| span.start;
        if let Some(turn) = turn(s, ix, &once) {
            all.push(Item::Turn(turn));
            ix += 2;
            continue;
        }
        let number = s.spans[ix].clone().next().map_or(0, |at| op_number(&s.actions[at]));
        if let Some(attend) = attend(s, ix, number, &once) {
            all.push(Item::Attend(attend));
            ix += 1;
            continue;
        }
        for at in op_at(&s.spans[ix])..s.spans[ix].end {
            if let Action::Stage { op, extent, .. } = s.actions[at] {
                let stage = s.stages[next_stage];
                next_stage += 1;
                all.push(Item::Product(Product {
                    op,
                    extent,
                    stage,
                    matrices: matrices(&stage),
                    from: From::Rows,
                    reads: 0,
                    once: s.plan.ops[ix].outputs().iter().all(once),
                    onward: Onward::Nothing,
                }));
            } else {
                all.push(Item::Action(at));
            }
        }
        ix += 1;
    }
    hand_on(&mut all);
    join(&mut all);
    all
}

fn op_number(action: &Action) -> u32 {
    match action {
        Action::Launch { op, .. } | Action::Stage { op, .. } | Action::EmbedRows { op, .. } => *op,
        _ => 0,
    }
}

fn matrices(stage: &Stage) -> Vec<Matrix> {
    let part = |ix: usize, before| Matrix {
        w: stage.w[ix],
        ty: PLANED[stage.types[ix] as usize],
        outs: stage.outs[ix],
        before,
    };
    let mut all = vec![part(0, 0)];
    if stage.outs[1] > 0 {
        all.push(part(1, stage.outs[0]));
    }
    all
}

/// Norm and positions with the append behind them.
fn turn(s: &Source<'_>, ix: usize, once: &dyn Fn(ValueId) -> bool) -> Option<Turn> {
    let [
        Op::QkNormRope { q, k, q_norm, k_norm, eps, rope, dim, q_out, k_out },
        Op::KvWrite { k: written, v, kv },
    ] = s.plan.ops.get(ix..ix + 2)?
    else {
        return None;
    };
    let group = &s.plan.kv[kv.group as usize];
    if k_out != written || !once(*k_out) || *dim > DIM_MAX || group.k_width != *dim {
        return None;
    }
    let table = rope.map(|r| &s.plan.ropes[r.ix()]);
    let norm = |n: &Option<fornax_plan::WeightId>| n.map_or(0, |n| s.at.vector(n));
    Some(Turn {
        op: op_number(&s.actions[s.spans[ix].start]),
        heads: s.plan.width(*q) / dim,
        kv_heads: group.heads,
        dim: *dim,
        v_dim: group.v_width,
        group: kv.group as usize,
        pairs: table.map_or(0, |t| t.inv_freq.len() as u32),
        halves: table.is_some_and(|t| t.pairs == RopePairs::Halves),
        eps: *eps,
        magnitude: table.map_or(1.0, |t| t.magnitude),
        from: [
            s.at.value(*q),
            s.at.value(*k),
            s.at.value(*v),
            norm(q_norm),
            norm(k_norm),
            rope.map_or(0, |r| s.ropes[r.ix()]),
        ],
        q_out: s.at.value(*q_out),
        pool: s.at.pool(*kv),
        once: once(*q_out),
        joined: false,
    })
}

fn attend(s: &Source<'_>, ix: usize, op: u32, once: &dyn Fn(ValueId) -> bool) -> Option<Attend> {
    let Op::Attention { q, kv, heads, scale, softcap, sinks, out } = s.plan.ops[ix] else {
        return None;
    };
    let g = &s.plan.kv[kv.group as usize];
    let dim = g.k_width;
    let unit = match s.kv_type {
        KvType::F32 => return None,
        KvType::F16 => 16,
        KvType::Q8_0 => 32,
    };
    let fits = g.v_width == dim && dim.is_multiple_of(unit) && dim <= DIM_MAX;
    // Row by row there are few query heads at a time.
    let most = if s.deterministic { SLOTS } else { SHARE_MAX };
    (fits && heads / g.heads <= most).then(|| Attend {
        op,
        heads,
        kv_heads: g.heads,
        dim,
        group: kv.group as usize,
        window: g.window.unwrap_or(0),
        scale,
        softcap: softcap.unwrap_or(0.0),
        q: s.at.value(q),
        pool: s.at.pool(kv),
        sinks: sinks.map_or(0, |w| s.at.vector(w)),
        out: s.at.value(out),
        once: once(out),
        onward: false,
        turn: None,
    })
}

/// Notes where the next product reads what an item gives, and reads it as it is. What was written last is what lies at an
/// address, so the product right behind reads that value if it reads there.
fn hand_on(all: &mut [Item]) {
    for ix in 1..all.len() {
        let (before, after) = all.split_at_mut(ix);
        let (Some(from), Item::Product(to)) = (before.last_mut(), &mut after[0]) else { continue };
        if to.extent != Extent::Rows || !to.by_fours() {
            continue;
        }
        let (reads, width) = (to.stage.x[0], to.stage.nb * 32);
        match from {
            Item::Product(p) if p.extent == to.extent && p.by_fours() && p.matrices.len() == 1 => {
                let outs = p.stage.outs[0];
                let there = p.stage.y[0] == reads;
                if p.stage.epi == GATED && to.stage.pro != NORM {
                    let fits = (outs / 2).is_multiple_of(32) && outs / 2 == width;
                    if fits && there && p.once {
                        (p.onward, to.from, to.reads) = (Onward::Pairs, From::Pairs, 1 - p.reads);
                    }
                } else if p.stage.epi == ROWS && to.stage.pro == NORM {
                    let whole = p.stage.cuts[0] >= outs && outs.is_multiple_of(32) && outs == width;
                    if whole && there {
                        p.onward = Onward::Normed(to.stage.norm[0]);
                        (to.from, to.reads) = (From::Normed, 1 - p.reads);
                    }
                }
            }
            Item::Attend(a) if to.stage.pro != NORM => {
                let all = a.heads * a.dim;
                let fits = a.dim.is_multiple_of(32) && all.is_multiple_of(64) && all == width;
                if fits && a.once && a.out == reads {
                    (a.onward, to.from) = (true, From::Attention);
                }
            }
            _ => {}
        }
    }
}

/// Gives positions to the attention right behind them, which can do both where it takes sequences row by row.
fn join(all: &mut [Item]) {
    for ix in 1..all.len() {
        let (before, after) = all.split_at_mut(ix);
        let (Some(Item::Turn(t)), Item::Attend(a)) = (before.last_mut(), &mut after[0]) else {
            continue;
        };
        let same = t.q_out == a.q && t.pool == a.pool && (t.dim, t.v_dim) == (a.dim, a.dim);
        if same && t.once && (t.heads, t.kv_heads) == (a.heads, a.kv_heads) {
            t.joined = true;
            a.turn = Some(t.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fast::fold;
    use crate::fast::stage::ROUND;
    use fornax_plan::liveness::{self, Buffers};
    use fornax_plan::{KvRef, Result, WeightId, conformance};

    struct Places(Buffers);

    impl Addresses for Places {
        fn value(&self, v: ValueId) -> u64 {
            1000 + self.0.ix(v) as u64
        }
        fn vector(&self, _: WeightId) -> u64 {
            1
        }
        fn pool(&self, _: KvRef) -> [u64; 2] {
            [2, 3]
        }
        fn keep(&mut self, _: &[f32]) -> Result<u64> {
            Ok(4)
        }
    }

    fn stage(plan: &Plan, op: &Op, normed: bool, at: &Places) -> Stage {
        let rows = |l: fornax_plan::Linear| plan.weights[l.weight.ix()].rows;
        let linears = op.linears();
        let outs: u32 = linears.iter().map(rows).sum();
        let x = op.inputs().iter().next().unwrap();
        let y = op.outputs().iter().next().unwrap();
        let gated = matches!(op, Op::GatedMlp { .. });
        Stage {
            pro: if normed { NORM } else { ROUND },
            epi: if gated { GATED } else { 0 },
            nb: plan.width(x) / 32,
            outs: [outs, 0],
            cuts: [u32::MAX; 2],
            widths: [plan.width(y); 3],
            x: [at.value(x), 0, 0],
            norm: [u64::from(normed), 0],
            y: [at.value(y); 3],
            ..Stage::default()
        }
    }

    /// The items of a plan whose products all have planes; every value has the given buffer, where one is given.
    fn items_of(plan: &Plan, one_buffer: bool) -> Vec<Item> {
        let folded = fold::fold(plan);
        let mut values = liveness::assign(&folded.plan);
        if one_buffer {
            values.of.fill(0);
        }
        let at = Places(values);
        let (mut actions, mut spans, mut stages) = (Vec::new(), Vec::new(), Vec::new());
        for (ix, op) in folded.plan.ops.iter().enumerate() {
            let from = actions.len();
            if fold::planed(&folded.plan, op) {
                let normed = folded.norms.contains_key(&ix);
                stages.push(stage(&folded.plan, op, normed, &at));
                actions.push(Action::Stage { op: ix as u32, at: 0, extent: Extent::Rows });
            } else {
                actions.push(Action::CopyHidden { from: 0 });
            }
            spans.push(from..actions.len());
        }
        items(&Source {
            plan: &folded.plan,
            actions: &actions,
            spans: &spans,
            stages: &stages,
            at: &at,
            ropes: &[5],
            kv_type: KvType::F16,
            deterministic: false,
        })
    }

    #[test]
    fn a_product_knows_whose_input_it_reads_though_values_share_memory() {
        let plan = conformance::proof(TensorType::Q8_0).plan;
        for one_buffer in [false, true] {
            let all = items_of(&plan, one_buffer);
            let from: Vec<(From, usize, Onward)> = all
                .iter()
                .filter_map(|i| match i {
                    Item::Product(p) => Some((p.from, p.reads, p.onward)),
                    _ => None,
                })
                .collect();
            // QKV, output, gate and up, down, head: what is read is never what is written.
            let want = [
                (From::Rows, 0, Onward::Nothing),
                (From::Attention, 0, Onward::Normed(1)),
                (From::Normed, 1, Onward::Pairs),
                (From::Pairs, 0, Onward::Nothing),
                (From::Rows, 0, Onward::Nothing),
            ];
            assert_eq!(from, want);
            assert!(all.iter().any(|i| matches!(i, Item::Attend(a) if a.onward)));
            let both = |pair: &[Item]| match pair {
                [Item::Turn(t), Item::Attend(a)] => t.joined && a.turn.is_some(),
                _ => false,
            };
            assert!(all.windows(2).any(both));
        }
    }
}
