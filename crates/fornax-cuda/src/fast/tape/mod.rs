//! Decoding one sequence from tapes: every block of threads has its weights of the whole model in the order in which it
//! reads them, and clusters of blocks share a head's attention (`kernels/tape`). It knows no step.

mod cache;
pub(crate) mod fit;
pub(crate) mod lay;
pub(crate) mod share;

use std::sync::Arc;

use fornax_gguf::TensorType;
use fornax_plan::{KvType, Result, WeightId};

use self::fit::{Fit, Layer};
use self::lay::{Lay, Matrix};
use self::share::{CLUSTER, Geometry, Pace, Part, Share};
use super::decode::{Parts, Words, frequencies};
use super::planes::{self, Planes};
use super::stage::{NORM, Stage};
use crate::args::TapeArgs;
use crate::driver::{Function, Gpu, Memory, Module};
use crate::kernels::{self, Define, Variant};

/// The GPUs that the kernel is written for.
const ARCH: u32 = 90;
/// Clusters that a GPU of this kind runs at once: its parts have more multiprocessors than a whole number of clusters.
const CLUSTERS_MAX: u32 = 15;
/// Warps that compute; one more copies.
const WARPS: u32 = 8;
/// Bytes of a unit below which a piece has four groups of rows, and not two.
const SMALL: u32 = 800;
/// Shared memory that the kernel declares itself.
const DECLARED: u32 = 512;
/// Pieces of weights that shared memory must hold: as many as a product waits for together, and one.
const SLOTS_LEAST: u32 = 5;
/// Bytes that are left free beside the tapes, for what is allocated later.
const LEFT: u64 = 256 << 20;

/// What the kernel is given of a plan.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    pub(crate) fit: Fit,
    pub(crate) layers: &'a [Layer],
    pub(crate) stages: &'a [Stage],
    /// Where the last norm's weights are, and where logits go that somebody wants.
    pub(crate) final_norm: u64,
    pub(crate) logits: u64,
}

/// What the kernel says of itself when it is compiled.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Bytes of dynamic shared memory of a block.
    shared: u32,
    /// Bytes of the global memory that blocks meet in.
    board: u32,
    threads: u32,
}

/// Decoding from tapes.
#[derive(Debug)]
pub(crate) struct Tape {
    function: Function,
    clusters: u32,
    sizes: Sizes,
    args: TapeArgs,
    /// layers, shares, tapes, table, final norm, frequencies, logits, board, boxes of the cache.
    at: [u64; 9],
    _memory: Vec<Memory>,
}

impl Tape {
    /// Lays the tapes, or says why there are none.
    ///
    /// # Errors
    /// As `prepare`.
    pub(crate) fn new(
        p: &Parts<'_>,
        source: &Source<'_>,
        planes: &mut Planes,
    ) -> Result<std::result::Result<Tape, String>> {
        let (gpu, fit) = (p.gpu, &source.fit);
        if gpu.arch != ARCH {
            return Ok(Err(format!("a GPU of sm_{}, and not of sm_{ARCH}", gpu.arch)));
        }
        let g = &fit.geometry;
        let mut clusters = CLUSTERS_MAX.min(gpu.units / CLUSTER);
        let (function, pace, sizes) = loop {
            let pace = pace(g, clusters);
            if g.kv_heads > clusters {
                return Ok(Err(format!("{} key/value heads on {clusters} clusters", g.kv_heads)));
            }
            let module = compiled(p, fit, &pace)?;
            let [shared, board, threads, slots] = module.variable("tape_sizes")?;
            let sizes = Sizes { shared, board, threads };
            if let Some(why) = no_room((shared, slots), gpu.shared_max - DECLARED) {
                return Ok(Err(why));
            }
            let function = module.function("tape_decode")?;
            function.allow_shared(shared)?;
            let most = function.clusters(CLUSTER, threads, shared)?;
            if most >= clusters {
                break (function, pace, sizes);
            }
            clusters = most;
        };
        let shares = match share::shares(g, &pace) {
            Ok(shares) => shares,
            Err(why) => return Ok(Err(why)),
        };
        if let Some(why) = too_much(lay::bytes(g, &shares), gpu.free_bytes()?) {
            return Ok(Err(why));
        }
        let boxes = match cache::boxes(p, source, g) {
            Ok(boxes) => boxes,
            Err(why) => return Ok(Err(why)),
        };
        let types: Vec<_> =
            planes::PLANED.iter().filter(|t| g.types.contains(t)).copied().collect();
        let module = kernels::load(gpu, p.compiler, "lay", &types, &[])?;
        let mut lay = Lay::new(gpu, module, g, &pace, &shares)?;
        for (ix, layer) in source.layers.iter().enumerate() {
            let [qkv, _, o, gated, down] = layer.stages;
            for (part, at) in Part::LAYER.into_iter().zip([qkv, o, gated, down]) {
                lay.put(part, ix as u32, &matrix(&source.stages[at], g, part))?;
            }
        }
        let head = source.stages.last().copied().unwrap_or_default();
        lay.put(Part::Head, g.layers, &matrix(&head, g, Part::Head))?;
        let tapes = lay.finish()?;
        let table = planes.of(&[&p.plan.weights[fit.table.ix()]], false)?;
        let mut keep = Keep { gpu, memory: vec![tapes] };
        let layers: Vec<u8> = layer_bytes(p, source, &mut keep)?;
        let layers = keep.bytes(&layers)?;
        let shares = keep.bytes(&shares.iter().flat_map(share_bytes).collect::<Vec<_>>())?;
        let freqs = keep.bytes(&frequencies(p.plan))?;
        let board = keep.bytes(&vec![0; sizes.board as usize])?;
        let boxes = keep.bytes(&boxes)?;
        let at = [
            layers,
            shares,
            keep.memory[0].ptr,
            table,
            source.final_norm,
            freqs,
            source.logits,
            board,
            boxes,
        ];
        let (first, next) = p.shape.out_counts();
        let tokens = u64::from(p.limits.kv_blocks) * u64::from(crate::prepare::KV_BLOCK);
        let args = TapeArgs {
            rounds: 0,
            base: 0,
            group_words: (p.shape.tables(1).start - p.shape.tables(0).start) as u32,
            stride: p.shape.stride as u32,
            out_first: first as u32,
            out_next: next as u32,
            tokens_low: tokens as u32,
            tokens_high: (tokens >> 32) as u32,
            scale: fit.scale,
            head_scale: fit.head_scale,
            head_softcap: fit.head_softcap,
            eps: fit.eps,
        };
        let clusters = pace.clusters;
        Ok(Ok(Tape { function, clusters, sizes, args, at, _memory: keep.memory }))
    }

    /// Queues `rounds` steps of the row at `base` among all rows; with its logits, where somebody wants them.
    pub(crate) fn launch(
        &self,
        gpu: &Gpu,
        (rounds, base): (u32, u32),
        words: &Words,
        with_logits: bool,
    ) -> Result<()> {
        let args = TapeArgs { rounds, base, ..self.args };
        let [layers, shares, tapes, table, final_norm, freqs, logits, board, boxes] = self.at;
        let logits = if with_logits { logits } else { 0 };
        let Words { all_rows, wanted, last, stops, stop, outs, tables } = *words;
        let pointers = [
            layers, shares, tapes, all_rows, wanted, last, stops, stop, outs, table, final_norm,
            freqs, tables, logits, board, boxes,
        ];
        let (form, Sizes { threads, shared, .. }) = ((self.clusters, CLUSTER), self.sizes);
        gpu.launch_clusters(&self.function, form, threads, shared, &args.words(), &pointers)
    }

    /// Bytes of the second copy of the weights.
    pub(crate) fn bytes(&self) -> u64 {
        self._memory[0].len as u64
    }
}

fn pace(g: &Geometry, clusters: u32) -> Pace {
    let groups = if g.unit_max() < SMALL { 4 } else { 2 };
    Pace { clusters, warps: WARPS, groups }
}

/// Why a block's shared memory is too little for what it keeps there, and pieces of weights.
fn no_room((shared, slots): (u32, u32), limit: u32) -> Option<String> {
    if shared > limit {
        return Some(format!("{shared} bytes of shared memory for a block, and {limit} are there"));
    }
    (slots < SLOTS_LEAST).then(|| {
        format!("shared memory for {slots} pieces of weights, and {SLOTS_LEAST} are needed")
    })
}

/// Why tapes of so many bytes are too much.
fn too_much(need: u64, free: u64) -> Option<String> {
    let (mib, left) = (|bytes: u64| bytes >> 20, LEFT >> 20);
    (need + LEFT > free).then(|| {
        let (need, free) = (mib(need), mib(free));
        format!("tapes take {need} MiB, and {free} are free, of which {left} are to stay so")
    })
}

/// Memory that is written once.
struct Keep<'a> {
    gpu: &'a Arc<Gpu>,
    memory: Vec<Memory>,
}

impl Keep<'_> {
    fn bytes(&mut self, bytes: &[u8]) -> Result<u64> {
        let memory = self.gpu.alloc(bytes.len())?;
        let at = memory.ptr;
        self.memory.push(memory);
        self.gpu.write(at, bytes)?;
        Ok(at)
    }
}

/// A stage's matrix as it is in planes.
fn matrix(stage: &Stage, g: &Geometry, part: Part) -> Matrix {
    Matrix { at: stage.w[0], rows: stage.outs[0], nb: stage.nb, ty: g.types[part as usize] }
}

fn compiled(p: &Parts<'_>, fit: &Fit, pace: &Pace) -> Result<Arc<Module>> {
    let table = p.plan.weights[fit.table.ix()].ty;
    let used = |ty: &TensorType| fit.geometry.types.contains(ty) || *ty == table;
    let types: Vec<_> = planes::PLANED.iter().filter(|ty| used(ty)).copied().collect();
    let ropes = p.plan.ropes.len() as u32;
    let limit = p.gpu.shared_max.saturating_sub(DECLARED);
    let defines = defines(fit, pace, (ropes, limit), table, p.limits.kv_type);
    kernels::load(p.gpu, p.compiler, "tape", &types, &defines)
}

/// The constants of the kernel.
pub(crate) fn defines(
    fit: &Fit,
    pace: &Pace,
    (ropes, limit): (u32, u32),
    table: TensorType,
    kv: KvType,
) -> Vec<Define> {
    let g = &fit.geometry;
    let mut all: Vec<Define> = [
        ("LAYERS", g.layers),
        ("WIDTH", g.width),
        ("HEADS", g.heads),
        ("KV_HEADS", g.kv_heads),
        ("DIM", g.dim),
        ("FF", g.ff),
        ("VOCAB", g.vocab),
        ("CLUSTERS", pace.clusters),
        ("NW", pace.warps),
        ("RB", pace.groups),
        ("SHARED_LIMIT", limit),
        ("NEAR", u32::from(g.near())),
        ("PAIRS", fit.pairs),
        ("HALVES", u32::from(fit.halves)),
        ("ROPES", ropes),
        ("ACT", fit.act),
        ("HEAD_NORMS", u32::from(fit.head_norms)),
        ("BIASES", u32::from(fit.biases)),
        ("CAPPED", u32::from(fit.capped)),
    ]
    .map(|(name, value)| Define::number(name, value))
    .to_vec();
    let names = ["W_QKV", "W_O", "W_GU", "W_DOWN", "W_HEAD"];
    let formats = names.into_iter().zip(g.types).chain([("W_TABLE", table)]);
    all.extend(formats.map(|(name, ty)| Define::planes(name, ty)));
    all.push(Define::cache(kv));
    all
}

/// The kernels of known models: what is compiled ahead, and what the checks compile.
pub(crate) fn variants() -> Vec<Variant> {
    use TensorType::{Q4_K, Q6_K, Q8_0};
    let shapes = [
        (KvType::F16, [32, 960, 2560, 15, 5, 64, 49_152], Q8_0, Q8_0),
        (KvType::F16, [28, 1024, 3072, 16, 8, 128, 151_936], Q8_0, Q8_0),
        (KvType::Q8_0, [28, 1024, 3072, 16, 8, 128, 151_936], Q8_0, Q8_0),
        (KvType::F16, [16, 2048, 8192, 32, 8, 64, 128_256], Q8_0, Q8_0),
        (KvType::F16, [16, 2048, 8192, 32, 8, 64, 128_256], Q4_K, Q6_K),
        (KvType::F16, [32, 4096, 14_336, 32, 8, 128, 128_256], Q8_0, Q8_0),
        (KvType::F16, [32, 4096, 14_336, 32, 8, 128, 128_256], Q4_K, Q4_K),
    ];
    let variant = |(kv, shape, ty, head): (KvType, [u32; 7], TensorType, TensorType)| {
        let [layers, width, ff, heads, kv_heads, dim, vocab] = shape;
        let types = [ty, ty, ty, ty, head];
        let geometry = Geometry { layers, width, heads, kv_heads, dim, ff, vocab, types };
        let fit = Fit {
            geometry,
            table: WeightId(0),
            scale: 1.0,
            head_scale: 1.0,
            head_softcap: 0.0,
            eps: 1e-6,
            pairs: dim / 2,
            // As Qwen3, the one with heads of the 0.6B.
            halves: layers == 28,
            act: 0,
            head_norms: layers == 28,
            biases: false,
            capped: false,
            final_norm: WeightId(0),
        };
        let pace = pace(&geometry, CLUSTERS_MAX);
        let used = if ty == head { vec![ty] } else { vec![ty, head] };
        let defines = defines(&fit, &pace, (1, H200_SHARED - DECLARED), head, kv);
        Variant::of("tape", &used, &defines)
    };
    shapes.into_iter().map(variant).collect()
}

/// Shared memory that a block of an H200 may ask for.
const H200_SHARED: u32 = 232_448;

/// A block's share as the kernel reads it.
fn share_bytes(s: &Share) -> Vec<u8> {
    let words = [s.rows[0], s.rows[1], s.gates[0], s.gates[1], s.head[0], s.head[1]];
    let p = &s.shared;
    let shared = [p.block, p.first, p.rows, p.rank, u32::from(p.own), 0, 0, 0];
    let words = words.into_iter().chain(shared).flat_map(u32::to_le_bytes);
    s.at.to_le_bytes().into_iter().chain(words).collect()
}

/// The layers as the kernel reads them.
fn layer_bytes(p: &Parts<'_>, source: &Source<'_>, keep: &mut Keep<'_>) -> Result<Vec<u8>> {
    let mut all = Vec::new();
    for (number, layer) in source.layers.iter().enumerate() {
        let [qkv, attend, o, gated, down] = layer.stages.map(|at| &source.stages[at]);
        let norm = |s: &Stage| if s.pro == NORM { s.norm[0] } else { 0 };
        let bias = by_head(p, &source.fit.geometry, layer);
        let qkv_bias = if qkv.bias == 0 { 0 } else { keep.bytes(&bias)? };
        let addresses = [
            norm(qkv),
            norm(gated),
            attend.norm[0],
            attend.norm[1],
            qkv_bias,
            o.bias,
            gated.bias,
            down.bias,
            attend.bias,
            attend.w[0],
            attend.w[1],
        ];
        all.extend(addresses.into_iter().flat_map(u64::to_le_bytes));
        let words = [
            attend.group,
            attend.window,
            attend.rope,
            number as u32,
            attend.scale.to_bits(),
            attend.softcap.to_bits(),
            u32::from(cache::flipped([attend.w[0], attend.w[1]])),
        ];
        all.extend(words.into_iter().chain([0; 3]).flat_map(u32::to_le_bytes));
    }
    Ok(all)
}

/// The biases of Q, K and V by key/value head; zeroes where there is none.
fn by_head(p: &Parts<'_>, g: &Geometry, layer: &Layer) -> Vec<u8> {
    let biases = layer.qkv.map(|l| l.bias.map(|b| p.plan.weight_f32(b)));
    let mut all = Vec::new();
    for head in 0..g.kv_heads as usize {
        for (bias, rows) in biases.iter().zip([g.share() * g.dim, g.dim, g.dim]) {
            let rows = rows as usize;
            let own = |b: &Vec<f32>| b[head * rows..][..rows].to_vec();
            all.extend(bias.as_ref().map_or_else(|| vec![0.0; rows], own));
        }
    }
    all.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tapes_leave_memory_for_others() {
        let gib = 1 << 30;
        assert_eq!(too_much(8 * gib, 9 * gib), None);
        let why = too_much(8 * gib, 8 * gib + (100 << 20)).unwrap();
        assert_eq!(why, "tapes take 8192 MiB, and 8292 are free, of which 256 are to stay so");
    }

    #[test]
    fn shared_memory_has_to_hold_more_pieces_than_are_waited_for() {
        assert_eq!(no_room((231_000, 5), 231_936), None);
        let why = no_room((231_000, 4), 231_936).unwrap();
        assert_eq!(why, "shared memory for 4 pieces of weights, and 5 are needed");
        assert!(no_room((240_000, 9), 231_936).unwrap().starts_with("240000 bytes of shared"));
    }

    #[test]
    fn known_shapes_are_compiled_with_what_they_are() {
        let all = variants();
        let labels: Vec<String> = all.iter().map(Variant::label).collect();
        assert!(labels[1].contains("WIDTH=1024 HEADS=16 KV_HEADS=8 DIM=128"), "{}", labels[1]);
        assert!(labels[4].contains("RB=2") && labels[4].contains("W_HEAD=P_Q6_K"), "{}", labels[4]);
        assert!(labels[6].contains("RB=4"), "small units go four groups at a time: {}", labels[6]);
        assert!(all.iter().all(|v| v.runs_on(90) && !v.runs_on(80)));
    }
}
