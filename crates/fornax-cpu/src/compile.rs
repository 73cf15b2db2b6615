//! Stages with everything resolved: addresses of values, packed matrices, small weights as f32.
//! It knows the plan and the buffers; it runs nothing.

use std::ops::Range;
use std::sync::Arc;

use fornax_plan::{
    Activation, Gating, KvRef, Linear, Op, Plan, RopePairs, RowSpace, ValueId, WeightId, WeightRef,
};

use crate::matrix::Matrix;
use crate::matrix::coarse::CoarseMatrix;
use crate::stages::{Group, space};
use crate::weights::{Weights, key};

/// Bytes of weights that one claimed piece of work should read at least: a claim costs a cache
/// line changing hands.
const PIECE_BYTES: usize = 32 << 10;
/// Tiles of one piece, at most; bounds the thread's room for a gated pair.
pub(crate) const PIECE_TILES: usize = 8;
/// The same of coarse products: whole spans of what the next takes.
pub(crate) const COARSE_TILES: usize = 16;

/// Rows of f32 (or u32) at an address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) at: *mut f32,
    pub(crate) width: usize,
}

// SAFETY: an address and a width; whoever reads or writes through it answers for the races.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

impl Rows {
    /// # Safety
    /// The row exists and nobody writes it meanwhile.
    pub(crate) unsafe fn row<'a>(self, row: usize) -> &'a [f32] {
        // SAFETY: the caller's word.
        unsafe { std::slice::from_raw_parts(self.ptr(row), self.width) }
    }

    /// # Safety
    /// The row exists and nobody else reads or writes it meanwhile.
    pub(crate) unsafe fn row_mut<'a>(self, row: usize) -> &'a mut [f32] {
        // SAFETY: the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(row), self.width) }
    }

    pub(crate) fn ptr(self, row: usize) -> *mut f32 {
        self.at.wrapping_add(row * self.width)
    }
}

/// A value as an op of a chain sees it: in its buffer, and where the chain makes it, also in a
/// slot of each thread's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wire {
    pub(crate) rows: Rows,
    pub(crate) slot: Option<usize>,
}

/// A row-wise op.
pub(crate) enum RowOp {
    Embed { table: Table, scale: f32, out: Wire },
    Norm { x: Wire, weight: Arc<[f32]>, eps: f32, residual: Option<Wire>, out: Wire },
    Select { x: Rows, out: Wire },
    Route { scores: Rows, gating: Gating, ids: Wire, weights: Wire },
}

/// The embedding table: packed where the head is tied to it, else as the file has it.
pub(crate) enum Table {
    Packed(Arc<Matrix>),
    File(WeightRef),
}

/// A matrix with its bias.
#[derive(Clone)]
pub(crate) struct Affine {
    pub(crate) matrix: Arc<Matrix>,
    /// One for each output, experts one after the other.
    pub(crate) bias: Option<Arc<[f32]>>,
    /// What long prompts are multiplied with, where that was asked for.
    pub(crate) coarse: Option<Arc<CoarseMatrix>>,
}

/// One matrix of a stage.
pub(crate) struct Part {
    pub(crate) affine: Affine,
    pub(crate) out: Rows,
    pub(crate) residual: Option<Rows>,
}

/// What follows the product.
pub(crate) enum Finish {
    Plain,
    Gate { up: Affine, act: Activation },
    Logits { scale: f32, cap: f32 },
}

/// Products with rows of one value, cut into pieces.
pub(crate) struct Tiles {
    pub(crate) x: Wire,
    pub(crate) parts: Vec<Part>,
    pub(crate) finish: Finish,
    /// Part and tiles of it.
    pub(crate) pieces: Vec<(usize, Range<usize>)>,
    pub(crate) q8: bool,
    /// Some of them take f32.
    pub(crate) floats: bool,
    /// The stage before has made the 8-bit form of `x`.
    pub(crate) ready: bool,
    /// Makes the 8-bit form of its output for the stage after.
    pub(crate) makes: bool,
    /// Whether somebody takes its output who does not take that form.
    pub(crate) keeps: bool,
    /// How rows of long prompts are multiplied, where that was asked for and all parts can.
    pub(crate) coarse: Option<Coarse>,
}

/// A product of long prompts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Coarse {
    /// Part and tiles of it.
    pub(crate) pieces: Vec<(usize, Range<usize>)>,
    /// The stage before has made the coarse form of the input.
    pub(crate) ready: bool,
    /// Makes the coarse form of its output for the stage after, and nothing else.
    pub(crate) makes: bool,
}

impl Tiles {
    /// Where the weights of a piece begin.
    pub(crate) fn start(&self, piece: usize) -> *const u8 {
        match self.pieces.get(piece) {
            Some((part, tiles)) => self.parts[*part].affine.matrix.start(0, tiles.start),
            None => std::ptr::null(),
        }
    }
}

/// Head norms and rotation.
pub(crate) struct Rotate {
    pub(crate) q: Rows,
    pub(crate) k: Rows,
    pub(crate) q_out: Rows,
    pub(crate) k_out: Rows,
    pub(crate) q_norm: Option<Arc<[f32]>>,
    pub(crate) k_norm: Option<Arc<[f32]>>,
    pub(crate) eps: f32,
    /// Where the row's angles start, and how many; which elements pair up.
    pub(crate) angles: Option<(Range<usize>, RopePairs)>,
    pub(crate) dim: usize,
}

/// A write to the cache.
pub(crate) struct Write {
    pub(crate) k: Rows,
    pub(crate) v: Rows,
    pub(crate) kv: KvRef,
}

/// Attention over the cache.
pub(crate) struct Look {
    pub(crate) q: Rows,
    pub(crate) kv: KvRef,
    pub(crate) heads: usize,
    pub(crate) window: usize,
    pub(crate) scale: f32,
    pub(crate) cap: f32,
    pub(crate) sinks: Option<Arc<[f32]>>,
    pub(crate) out: Rows,
    /// Makes the 8-bit form of its output for the stage after.
    pub(crate) makes: bool,
    /// Whether somebody takes its output who does not take that form.
    pub(crate) keeps: bool,
    /// Not that of rows of long prompts, which the stage after makes into coarse ones.
    pub(crate) coarse: bool,
}

/// A mixture's MLPs.
pub(crate) struct Moe {
    pub(crate) x: Wire,
    pub(crate) ids: Wire,
    pub(crate) weights: Wire,
    pub(crate) gate: Affine,
    pub(crate) up: Affine,
    pub(crate) down: Affine,
    pub(crate) act: Activation,
    pub(crate) residual: Option<Rows>,
    pub(crate) out: Rows,
    /// Tiles of a piece of gate and up, and of down.
    pub(crate) gate_tiles: usize,
    pub(crate) down_tiles: usize,
}

/// A gated short convolution.
pub(crate) struct Conv {
    pub(crate) x: Rows,
    pub(crate) kernel: Arc<[f32]>,
    pub(crate) taps: usize,
    /// Elements of the state before this one, and its length.
    pub(crate) state: Range<usize>,
    pub(crate) out: Rows,
}

/// The wide op of a stage.
pub(crate) enum Wide {
    None,
    Tiles(Tiles),
    Heads { rotate: Option<Rotate>, write: Option<Write>, look: Option<Look> },
    Moe(Moe),
    Conv(Conv),
}

/// What runs between two barriers.
pub(crate) struct Stage {
    /// Names of its ops, joined.
    pub(crate) name: String,
    /// Weight bytes that one row reads.
    pub(crate) bytes: u64,
    pub(crate) space: RowSpace,
    pub(crate) chain: Vec<RowOp>,
    /// The slot of the product's input, where nobody else takes that: its f32 need not be kept.
    pub(crate) alone: Option<usize>,
    pub(crate) wide: Wide,
}

/// Turns groups of ops into stages.
pub(crate) struct Compiler<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) weights: &'a mut Weights,
    /// Where every value lives.
    pub(crate) places: Vec<Option<Rows>>,
    /// Scores of routers.
    pub(crate) scores: *mut f32,
    /// Where each rotary table's angles start in a row of them.
    pub(crate) angles: Vec<Range<usize>>,
    pub(crate) threads: usize,
}

impl Compiler<'_> {
    pub(crate) fn stage(&mut self, group: &Group) -> Stage {
        let plan = self.plan;
        let mut made: Vec<ValueId> = Vec::new();
        let mut chain = Vec::new();
        if let Some(Op::MoeRoute { router, gating, ids, weights, .. }) =
            group.route.map(|o| &plan.ops[o])
        {
            made.extend([*ids, *weights]);
            chain.push(RowOp::Route {
                scores: self.scores_of(*router),
                gating: *gating,
                ids: self.wire(*ids, &made),
                weights: self.wire(*weights, &made),
            });
        }
        for op in &group.chain {
            let op = &plan.ops[*op];
            made.extend(op.outputs().iter());
            chain.push(self.row_op(op, &made));
        }
        let mut alone = None;
        let wide = match group.wide.first().map(|o| &plan.ops[*o]) {
            None => Wide::None,
            Some(Op::MoeMlp { .. }) => self.moe(&plan.ops[group.wide[0]], &made),
            Some(Op::ShortConv { .. }) => self.conv(&plan.ops[group.wide[0]]),
            Some(Op::QkNormRope { .. } | Op::KvWrite { .. } | Op::Attention { .. }) => {
                self.heads(group)
            }
            Some(op) => {
                let tiles = self.tiles(op, &made);
                alone = tiles.x.slot.filter(|slot| plan.uses(made[*slot]) == 1);
                Wide::Tiles(tiles)
            }
        };
        let ops = || group.ops().map(|o| &plan.ops[o]);
        let names: Vec<&str> = ops().map(Op::name).collect();
        let rows_of = ops().next().or(group.route.map(|o| &plan.ops[o]));
        Stage {
            name: if names.is_empty() { "moe_route".into() } else { names.join("+") },
            bytes: ops().map(|op| plan.op_bytes_per_token(op)).sum(),
            space: rows_of.map_or(RowSpace::Tokens, |op| space(plan, op)),
            chain,
            alone,
            wide,
        }
    }

    fn rows(&self, value: ValueId) -> Rows {
        self.places[value.ix()].expect("invariant: every value that an op touches has a buffer")
    }

    fn wire(&self, value: ValueId, made: &[ValueId]) -> Wire {
        Wire { rows: self.rows(value), slot: made.iter().position(|v| *v == value) }
    }

    fn scores_of(&self, router: Linear) -> Rows {
        Rows { at: self.scores, width: self.plan.weights[router.weight.ix()].rows as usize }
    }

    fn vector(&mut self, id: WeightId) -> Arc<[f32]> {
        let plan = self.plan;
        let make = || Arc::from(plan.weight_f32(id));
        Arc::clone(self.weights.vectors.entry(id).or_insert_with(make))
    }

    fn affine(&mut self, linear: Linear) -> Affine {
        let w = &self.plan.weights[linear.weight.ix()];
        let matrix = Arc::clone(&self.weights.matrices[&key(w)]);
        let coarse = self.weights.coarse.get(&key(w)).map(Arc::clone);
        Affine { matrix, bias: linear.bias.map(|b| self.vector(b)), coarse }
    }

    fn row_op(&mut self, op: &Op, made: &[ValueId]) -> RowOp {
        match *op {
            Op::Embed { table, scale, out } => {
                let w = &self.plan.weights[table.ix()];
                let table = match self.weights.matrices.get(&key(w)) {
                    Some(matrix) => Table::Packed(Arc::clone(matrix)),
                    None => Table::File(w.clone()),
                };
                RowOp::Embed { table, scale, out: self.wire(out, made) }
            }
            Op::RmsNorm { x, weight, eps, residual, out } => RowOp::Norm {
                x: self.wire(x, made),
                weight: self.vector(weight),
                eps,
                residual: residual.map(|r| self.wire(r, made)),
                out: self.wire(out, made),
            },
            Op::SelectRows { x, out } => {
                RowOp::Select { x: self.rows(x), out: self.wire(out, made) }
            }
            _ => unreachable!("not a row-wise op"),
        }
    }

    fn tiles(&mut self, op: &Op, made: &[ValueId]) -> Tiles {
        let mut parts = Vec::new();
        let mut finish = Finish::Plain;
        let mut part = |this: &mut Self, linear, out, residual: Option<ValueId>| {
            let residual = residual.map(|r| this.rows(r));
            parts.push(Part { affine: this.affine(linear), out, residual });
        };
        let x = match *op {
            Op::MatMul { x, linear, residual, out } => {
                part(self, linear, self.rows(out), residual);
                x
            }
            Op::Qkv { x, q, k, v, q_out, k_out, v_out } => {
                for (linear, out) in [(q, q_out), (k, k_out), (v, v_out)] {
                    part(self, linear, self.rows(out), None);
                }
                x
            }
            Op::GatedMlp { x, gate, up, act, out } => {
                part(self, gate, self.rows(out), None);
                finish = Finish::Gate { up: self.affine(up), act };
                x
            }
            Op::Logits { x, linear, scale, softcap, out } => {
                part(self, linear, self.rows(out), None);
                finish = Finish::Logits { scale, cap: softcap.unwrap_or(0.0) };
                x
            }
            Op::MoeRoute { x, router, .. } => {
                part(self, router, self.scores_of(router), None);
                x
            }
            _ => unreachable!("not a product"),
        };
        let up = match &finish {
            Finish::Gate { up, .. } => Some(&*up.matrix),
            _ => None,
        };
        let all = || parts.iter().map(|p| &*p.affine.matrix).chain(up);
        let q8 = all().any(Matrix::takes_q8);
        let floats = !all().all(Matrix::takes_q8);
        let total: usize = parts.iter().map(|p| p.affine.matrix.tiles()).sum();
        let mut pieces = Vec::new();
        for (ix, p) in parts.iter().enumerate() {
            let matrix = &p.affine.matrix;
            let bytes = matrix.tile_bytes() + up.map_or(0, Matrix::tile_bytes);
            let mut step = piece_tiles(total, bytes, self.threads);
            if up.is_some() {
                // Whole blocks of 8-bit activations.
                step = step.next_multiple_of(2);
            }
            let cut = (0..matrix.tiles()).step_by(step);
            pieces.extend(cut.map(|t| (ix, t..(t + step).min(matrix.tiles()))));
        }
        let up_coarse = match &finish {
            Finish::Gate { up, .. } => up.coarse.is_some(),
            _ => true,
        };
        // The head has no coarse form, unless it shares its weights with something that has.
        let product = !matches!(op, Op::Logits { .. } | Op::MoeRoute { .. })
            && space(self.plan, op) == RowSpace::Tokens;
        let all = product && up_coarse && parts.iter().all(|p| p.affine.coarse.is_some());
        let coarse = all.then(|| Coarse { pieces: coarse_pieces(&parts), ..Coarse::default() });
        let x = self.wire(x, made);
        let keeps = op.outputs().iter().any(|v| self.plan.uses(v) > 1);
        Tiles { x, parts, finish, pieces, q8, floats, ready: false, makes: false, keeps, coarse }
    }

    fn heads(&mut self, group: &Group) -> Wide {
        let (mut rotate, mut write, mut look) = (None, None, None);
        for op in &group.wide {
            match self.plan.ops[*op] {
                Op::QkNormRope { q, k, q_norm, k_norm, eps, rope, dim, q_out, k_out } => {
                    let pairs = |r: fornax_plan::RopeId| self.plan.ropes[r.ix()].pairs;
                    let angles = rope.map(|r| (self.angles[r.ix()].clone(), pairs(r)));
                    rotate = Some(Rotate {
                        q: self.rows(q),
                        k: self.rows(k),
                        q_out: self.rows(q_out),
                        k_out: self.rows(k_out),
                        q_norm: q_norm.map(|w| self.vector(w)),
                        k_norm: k_norm.map(|w| self.vector(w)),
                        eps,
                        angles,
                        dim: dim as usize,
                    });
                }
                Op::KvWrite { k, v, kv } => {
                    write = Some(Write { k: self.rows(k), v: self.rows(v), kv });
                }
                Op::Attention { q, kv, heads, scale, softcap, sinks, out } => {
                    let window = self.plan.kv[kv.group as usize].window;
                    look = Some(Look {
                        q: self.rows(q),
                        kv,
                        heads: heads as usize,
                        window: window.map_or(usize::MAX, |w| w as usize),
                        scale,
                        cap: softcap.unwrap_or(0.0),
                        sinks: sinks.map(|w| self.vector(w)),
                        out: self.rows(out),
                        makes: false,
                        keeps: self.plan.uses(out) > 1,
                        coarse: false,
                    });
                }
                _ => unreachable!("not an op of attention"),
            }
        }
        Wide::Heads { rotate, write, look }
    }

    fn moe(&mut self, op: &Op, made: &[ValueId]) -> Wide {
        let Op::MoeMlp { x, ids, weights, gate, up, down, act, residual, out } = *op else {
            unreachable!("not a mixture")
        };
        let (gate, up, down) = (self.affine(gate), self.affine(up), self.affine(down));
        let step = |m: &Matrix, bytes| piece_tiles(m.tiles(), bytes, self.threads);
        let gate_bytes = gate.matrix.tile_bytes() + up.matrix.tile_bytes();
        Wide::Moe(Moe {
            x: self.wire(x, made),
            ids: self.wire(ids, made),
            weights: self.wire(weights, made),
            gate_tiles: step(&gate.matrix, gate_bytes),
            down_tiles: step(&down.matrix, down.matrix.tile_bytes()),
            gate,
            up,
            down,
            act,
            residual: residual.map(|r| self.rows(r)),
            out: self.rows(out),
        })
    }

    fn conv(&mut self, op: &Op) -> Wide {
        let Op::ShortConv { x, kernel, state, out } = *op else {
            unreachable!("not a convolution")
        };
        let len = |s: &fornax_plan::StateSpec| s.len as usize;
        let start = self.plan.states[..state.ix()].iter().map(len).sum();
        Wide::Conv(Conv {
            x: self.rows(x),
            taps: self.plan.weights[kernel.ix()].cols as usize,
            kernel: self.vector(kernel),
            state: start..start + len(&self.plan.states[state.ix()]),
            out: self.rows(out),
        })
    }
}

/// Lets what a stage computes be made into 8-bit activations where it is computed, if the next
/// stage takes it so and nothing comes between.
pub(crate) fn hand_over(plan: &Plan, stages: &mut [Stage]) {
    for at in 1..stages.len() {
        let (before, after) = stages.split_at_mut(at);
        let (maker, taker) = (&mut before[at - 1], &mut after[0]);
        let Wide::Tiles(tiles) = &mut taker.wide else { continue };
        if !tiles.q8 || !taker.chain.is_empty() || maker.space != taker.space {
            continue;
        }
        let is_x = |rows: Rows| rows.at == tiles.x.rows.at && rows.width == tiles.x.rows.width;
        match &mut maker.wide {
            Wide::Tiles(t) if matches!(t.finish, Finish::Gate { .. }) && is_x(t.parts[0].out) => {
                (t.makes, tiles.ready) = (true, true);
                t.keeps |= tiles.floats;
                if let (Some(maker), Some(taker)) = (&mut t.coarse, &mut tiles.coarse) {
                    (maker.makes, taker.ready) = (true, true);
                }
            }
            Wide::Heads { look: Some(look), .. }
                if is_x(look.out) && plan.kv[look.kv.group as usize].v_width.is_multiple_of(32) =>
            {
                (look.makes, tiles.ready) = (true, true);
                look.keeps |= tiles.floats || tiles.coarse.is_some();
                look.coarse = tiles.coarse.is_some();
            }
            _ => {}
        }
    }
}

/// Tiles of one piece: enough bytes to be worth a claim, few enough that every thread gets some.
fn piece_tiles(tiles: usize, tile_bytes: usize, threads: usize) -> usize {
    let fair = tiles.div_ceil(threads * 4);
    let worth = PIECE_BYTES.div_ceil(tile_bytes.max(1));
    fair.max(worth).min(tiles.div_ceil(threads)).clamp(1, PIECE_TILES)
}

/// Pieces of coarse products: as many tiles as fill a span of the next product, so that it can be quantised where it is
/// made.
fn coarse_pieces(parts: &[Part]) -> Vec<(usize, Range<usize>)> {
    let of = |(ix, part): (usize, &Part)| {
        let tiles = part.affine.matrix.tiles();
        let cut = (0..tiles).step_by(COARSE_TILES);
        cut.map(move |from| (ix, from..(from + COARSE_TILES).min(tiles)))
    };
    parts.iter().enumerate().flat_map(of).collect()
}
