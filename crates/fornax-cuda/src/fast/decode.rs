//! Whole decode steps, made ready: the kernels for one row and for several, and everything they are given that does not
//! change from step to step. It knows no step.

use std::sync::Arc;

use fornax_gguf::TensorType;
use fornax_plan::{Error, Limits, Op, Plan, Result};

use super::drive::{Drive, Way};
use super::planes::{Planes, number};
use super::stage::{ATTEND, DENSE, Need, PARTS, ROWS_THREADS, Room, Stage, THREADS};
use super::wire::{Attended, Wire};
use crate::args::DecodeArgs;
use crate::compiler::Compiler;
use crate::driver::{Function, Gpu, Memory};
use crate::feed::Shape;
use crate::kernels::{self, Define, slot};

/// Rows of a whole step at most.
pub(crate) const ROWS_MAX: u32 = 8;
/// Chunks of a ring at most: more is not better.
const DEPTH_MAX: u32 = 16;
/// Shared memory that kernels declare themselves.
const DECLARED: u32 = 4096;

/// A kernel for up to so many rows.
#[derive(Debug)]
struct Variant {
    rows: u32,
    function: Function,
    room: Room,
}

/// Whole steps of a plan.
#[derive(Debug)]
pub(crate) struct Decode {
    variants: Vec<Variant>,
    args: DecodeArgs,
    blocks: u32,
    starts: u32,
    /// stages, counters, bests, table, x, freqs, turns, means, scales, done.
    at: [u64; 10],
    _memory: Vec<Memory>,
}

/// What a plan needs beside its stages.
#[derive(Debug)]
pub(crate) struct Parts<'a> {
    pub(crate) gpu: &'a Arc<Gpu>,
    pub(crate) compiler: &'a Compiler,
    pub(crate) plan: &'a Plan,
    pub(crate) limits: &'a Limits,
    pub(crate) shape: &'a Shape,
}

/// The formats of these stages, as defines of the kernels want them.
pub(crate) fn formats(stages: &[Stage], table: Option<TensorType>) -> Vec<TensorType> {
    let dense = stages.iter().filter(|s| s.kind == DENSE);
    let used: Vec<u32> = dense.flat_map(|s| s.types).chain(table.and_then(number)).collect();
    let all = super::planes::PLANED.iter();
    all.filter(|ty| number(**ty).is_some_and(|n| used.contains(&n))).copied().collect()
}

/// Scratch of attention: means and scales of all parts, for the rows of a step.
pub(crate) fn merge_memory(gpu: &Arc<Gpu>, plan: &Plan) -> Result<[Memory; 2]> {
    let heads = plan.ops.iter().map(|op| match *op {
        Op::Attention { heads, kv, .. } => (heads, plan.kv[kv.group as usize].v_width),
        _ => (0, 0),
    });
    let (heads, width) = heads.fold((1, 1), |a, b| (a.0.max(b.0), a.1.max(b.1)));
    let parts = (ROWS_MAX * heads * PARTS) as usize;
    Ok([gpu.alloc(4 * parts * width as usize)?, gpu.alloc(8 * parts)?])
}

/// Pairs of the widest table of frequencies.
fn rope_pairs(plan: &Plan) -> usize {
    plan.ropes.iter().map(|r| r.inv_freq.len()).max().unwrap_or(0)
}

/// The frequencies of every table, padded to as many pairs, with the factor of each behind them.
pub(super) fn frequencies(plan: &Plan) -> Vec<u8> {
    let pairs = rope_pairs(plan);
    let mut all = Vec::new();
    for r in &plan.ropes {
        all.extend_from_slice(&r.inv_freq);
        all.resize(all.len() + pairs - r.inv_freq.len(), 0.0);
        all.push(r.magnitude);
    }
    all.iter().flat_map(|f| f.to_le_bytes()).collect()
}

impl Decode {
    /// Makes the kernels and memory for whole steps; none where an op has no stage, or where a graph is asked for.
    ///
    /// # Errors
    /// As `prepare`; `is_unsupported` where whole steps are asked for and cannot be had.
    pub(crate) fn new(
        p: &Parts<'_>,
        drive: Drive,
        (wire, merge, x): (&Wire, [Memory; 2], u64),
        planes: &mut Planes,
    ) -> Result<Option<Decode>> {
        if !drive.wants(Way::Whole) {
            return Ok(None);
        }
        let made = Decode::make(p, wire, merge, x, planes)?;
        drive.checked(Way::Whole, made, wire.lacks.as_deref().unwrap_or("its shape"))
    }

    fn make(
        p: &Parts<'_>,
        wire: &Wire,
        merge: [Memory; 2],
        x: u64,
        planes: &mut Planes,
    ) -> Result<Option<Decode>> {
        let Some(Op::Embed { table, scale, .. }) = p.plan.ops.first() else { return Ok(None) };
        let w = &p.plan.weights[table.ix()];
        let head = p.plan.ops.iter().find_map(|op| match op {
            Op::Logits { out, .. } => Some(p.plan.width(*out)),
            _ => None,
        });
        let (Some(shape), Some(code), Some(_)) = (wire.attended, number(w.ty), head) else {
            return Ok(None);
        };
        if wire.lacks.is_some() || !w.cols.is_multiple_of(32) {
            return Ok(None);
        }
        let (gpu, stages) = (p.gpu, &wire.stages);
        let pairs = rope_pairs(p.plan);
        let freqs = frequencies(p.plan);
        let types = formats(stages, Some(w.ty));
        let most = p.limits.slots.min(ROWS_MAX).next_power_of_two();
        let mut variants = Vec::new();
        for rows in if most == 1 { vec![1] } else { vec![1, most] } {
            match variant(p, stages, &types, shape, rows)? {
                Some(v) => variants.push(v),
                None if rows == 1 => return Ok(None),
                None => {}
            }
        }
        let kv_heads = p.plan.kv.iter().map(|g| g.heads).max().unwrap_or(1);
        let rows = ROWS_MAX as usize;
        let bytes: Vec<u8> = stages.iter().flat_map(|s| s.bytes()).collect();
        let memory = [
            gpu.alloc(bytes.len())?,
            gpu.alloc(4 * 64)?,
            gpu.alloc(16 * rows * gpu.units as usize)?,
            gpu.alloc(freqs.len())?,
            gpu.alloc(8 * rows * p.plan.ropes.len() * pairs)?,
            gpu.alloc(4 * rows * kv_heads as usize)?,
        ];
        gpu.write(memory[0].ptr, &bytes)?;
        gpu.write(memory[3].ptr, &freqs)?;
        let tokens = u64::from(p.limits.kv_blocks) * u64::from(crate::prepare::KV_BLOCK);
        let (first, next) = p.shape.out_counts();
        let args = DecodeArgs {
            rows: 0,
            stages: stages.len() as u32,
            rounds: 0,
            base: 0,
            turn_rows: ROWS_MAX,
            turn_pairs: pairs as u32,
            ropes: p.plan.ropes.len() as u32,
            group_words: (p.shape.tables(1).start - p.shape.tables(0).start) as u32,
            stride: p.shape.stride as u32,
            vocab: w.rows,
            width: w.cols,
            table_type: code,
            out_first: first as u32,
            out_next: next as u32,
            ring_at: 0,
            x_at: 0,
            part_at: 0,
            norms_at: 0,
            slots: 0,
            stage_at: 0,
            tokens_low: tokens as u32,
            tokens_high: (tokens >> 32) as u32,
            starts: 0,
            scale: *scale,
        };
        let m = memory.each_ref().map(|m| m.ptr);
        let table = planes.of(&[w], false)?;
        let at = [m[0], m[1], m[2], table, x, m[3], m[4], merge[0].ptr, merge[1].ptr, m[5]];
        let memory = memory.into_iter().chain(merge).collect();
        Ok(Some(Decode { variants, args, blocks: gpu.units, starts: 0, at, _memory: memory }))
    }

    /// Whether so many rows are a whole step.
    pub(crate) fn takes(&self, rows: u32) -> bool {
        rows > 0 && self.variants.iter().any(|v| rows <= v.rows)
    }

    /// Queues `rounds` steps of `rows` rows that begin at row `base` of all rows.
    pub(crate) fn launch(
        &mut self,
        gpu: &Gpu,
        (rows, rounds, base): (u32, u32, u32),
        words: &Words,
    ) -> Result<()> {
        let Some(v) = self.variants.iter().find(|v| rows <= v.rows) else {
            return Err(Error::malformed(format!("cuda: {rows} rows are no whole step")));
        };
        let Room { stages, norms, part, x, ring, slots, bytes, .. } = v.room;
        let args = DecodeArgs {
            rows,
            rounds,
            base,
            ring_at: ring,
            x_at: x,
            part_at: part,
            norms_at: norms,
            slots,
            stage_at: stages,
            starts: self.starts,
            ..self.args
        };
        self.starts = self.starts.wrapping_add(1);
        let [stages, counters, bests, table, x, freqs, turns, means, scales, done] = self.at;
        let Words { all_rows, wanted, last, stops, stop, outs, tables } = *words;
        let pointers = [
            stages, counters, all_rows, wanted, last, stops, stop, outs, bests, table, x, freqs,
            turns, tables, means, scales, done,
        ];
        gpu.launch_together(&v.function, self.blocks, THREADS, bytes, &args.words(), &pointers)
    }
}

/// Where a step's words are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    pub(crate) all_rows: u64,
    pub(crate) wanted: u64,
    pub(crate) last: u64,
    pub(crate) stops: u64,
    pub(crate) stop: u64,
    pub(crate) outs: u64,
    pub(crate) tables: u64,
}

fn variant(
    p: &Parts<'_>,
    stages: &[Stage],
    types: &[TensorType],
    shape: Attended,
    rows: u32,
) -> Result<Option<Variant>> {
    let threads = THREADS;
    let own = if shape.share <= 4 { shape.share } else { shape.share.div_ceil(2) };
    let attention = 4 * ((shape.share + 2) * shape.dim + threads / 32 * own * shape.dim);
    let slot = slot(types);
    let kept = stages.len() as u32;
    let need = Need { stages, kept, rows, threads, slot, attention };
    let Some(room) = Room::new(&need, p.gpu.shared_max.saturating_sub(DECLARED), DEPTH_MAX) else {
        return Ok(None);
    };
    let kv = p.limits.kv_type;
    let Attended { dim, share } = shape;
    let mut defines = kernels::decode_defines((dim, share), kv, (rows, room.depth), types).to_vec();
    if stages.iter().any(|s| s.kind == ATTEND && s.softcap != 0.0) {
        defines.push(Define::number("CAPPED", 1));
    }
    let module = kernels::load(p.gpu, p.compiler, "decode", types, &defines)?;
    let function = module.function("decode")?;
    function.allow_shared(room.bytes)?;
    Ok(Some(Variant { rows, function, room }))
}

/// The kernel for any number of rows: products of eight rows at a time.
#[derive(Debug)]
pub(crate) struct RowsKernel {
    pub(crate) stage: Function,
    pub(crate) embed: Function,
    pub(crate) room: Room,
    /// Rows of a tile.
    pub(crate) rows: u32,
}

impl RowsKernel {
    /// # Errors
    /// As `prepare`; `is_unsupported` where a row is too wide for the shared memory.
    pub(crate) fn new(gpu: &Arc<Gpu>, compiler: &Compiler, stages: &[Stage]) -> Result<RowsKernel> {
        // One kernel for every format, so that it is compiled once and not for each model.
        let types = super::planes::PLANED;
        let slot = slot(types);
        let limit = gpu.shared_max.saturating_sub(DECLARED);
        let fits = |(rows, depth): (u32, u32)| {
            let threads = ROWS_THREADS;
            let need = Need { stages, kept: 0, rows, threads, slot, attention: 0 };
            Some((rows, Room::new(&need, limit, depth).filter(|r| r.depth == depth)?))
        };
        let (rows, room) =
            [(8, 4), (4, 4), (2, 4), (1, 2)].into_iter().find_map(fits).ok_or_else(|| {
                Error::unsupported(
                    "cuda: rows too wide for the GPU's shared memory; use --device cpu",
                )
            })?;
        let defines = kernels::rows_defines(rows, room.depth);
        let module = kernels::load(gpu, compiler, "rows", types, &defines)?;
        let stage = module.function("stage_rows")?;
        stage.allow_shared(room.bytes)?;
        Ok(RowsKernel { stage, embed: module.function("embed_rows")?, room, rows })
    }

    /// The constants of a stage's launch, but for the number of rows.
    pub(crate) fn args(&self) -> [u32; 6] {
        let Room { norms, part, x, ring, slots, .. } = self.room;
        [0, ring, x, part, norms, slots]
    }
}
