//! Planes and tapes of every format that has them: blocks of a file go through both kernels of the load, and every weight on
//! every tape is then read as the products read it, and compared with the decoder of files.

use std::sync::Arc;

use fornax_gguf::{Mapping, TensorType, blocks};
use fornax_plan::WeightRef;

use crate::driver::host;
use crate::fast::planes::{PLANED, Planes};
use crate::fast::tape::lay::{Lay, Matrix};
use crate::fast::tape::share::{
    CLUSTER, Geometry, Pace, Part, SPAN, rows, shares, stage_at, unit_bytes,
};
use crate::kernels::{entry, fast_source};

/// Reads unit by unit what lies on a tape: lane l gives the 32 weights of its block.
const PROBE: &str = "
struct ProbeArgs { u32 units; };
template <class W>
__device__ void probe(const ProbeArgs& a, const u8* from, float* to) {
    __shared__ __align__(16) u8 room[LAY_MOST];
    u32 lane = threadIdx.x;
    for (u32 i = lane; i < W::SLOT; i += 32) room[i] = from[(u64)blockIdx.x * W::SLOT + i];
    __syncwarp();
    W w;
    w.load(shared_address(room), lane);
    for (u32 e = 0; e < 32; e++) {
        u32 x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        x[e / 4] = 1u << 8 * (e % 4);
        Act one = {{x[0], x[1], x[2], x[3]}, {x[4], x[5], x[6], x[7]}, 1.0f, e < 16 ? 1 : 1 << 16};
        to[((u64)blockIdx.x * 32 + lane) * 32 + e] = w.dot(one, 0.0f);
    }
}
#undef ENTRY
#define ENTRY(W, suffix, number)                                                                                       \\
    extern \"C\" __global__ void probe_##suffix(ProbeArgs a, const u8* from, float* to) { probe<Taped<P_##W>::Form>(a, from, to); }
EACH_PLANED(ENTRY)
";

/// A matrix of random blocks, and its weights.
fn matrix(ty: TensorType, rows: u32, cols: u32, seed: u64) -> (WeightRef, Vec<f32>) {
    let values: Vec<f32> =
        (0..rows * cols).map(|i| 2.0 * fornax_plan::sample::uniform(seed, i) - 1.0).collect();
    let n = (rows * cols) as usize / ty.block_len();
    let mut data = vec![0; n * ty.block_bytes()];
    blocks::quantize(ty, &values, &mut data).unwrap();
    let mut weights = vec![0.0; values.len()];
    blocks::dequantize(ty, &data, &mut weights).unwrap();
    let data = Arc::new(Mapping::from_vec(data));
    (WeightRef { name: "w".into(), ty, cols, rows, experts: 1, data, offset: 0 }, weights)
}

/// The parts that planes make one of each stage's matrix, by the columns of its rows.
fn parts(g: &Geometry, part: Part) -> (Vec<u32>, u32, bool) {
    let (q, k) = (g.heads * g.dim, g.kv_heads * g.dim);
    match part {
        Part::Qkv => (vec![q, k, k], g.width, false),
        Part::Out => (vec![g.width], q, false),
        Part::Gated => (vec![g.ff, g.ff], g.width, true),
        Part::Down => (vec![g.width], g.ff, false),
        Part::Head => (vec![g.vocab], g.width, false),
    }
}

/// Weight e of unit u of a row, 0 behind its end; of the output that is near, of the units that begin with the row.
fn wanted(g: &Geometry, part: Part, ix: u32, matrix: &[Vec<f32>], [row, u, e]: [usize; 3]) -> f32 {
    let there = |row: usize, e: usize| matrix[row].get(e).copied().unwrap_or(0.0);
    if part != Part::Out || !g.near() {
        return there(row, u * 1024 + e);
    }
    let (span, wide) = (32 * SPAN as usize, 32 * g.mix_blocks() as usize);
    let within = e % span;
    let first = (ix / CLUSTER) as usize * wide;
    if within < wide { there(row + e / span, first + within) } else { 0.0 }
}

fn through(ty: TensorType, width: u32, ff: u32, heads: u32) {
    let (gpu, _) = host::gpu();
    let compiled = |folder: &str, name: &str, more: &str, entries: &[&str]| {
        let entries: Vec<String> =
            entries.iter().flat_map(|e| PLANED.iter().map(move |ty| entry(e, *ty))).collect();
        let source = fast_source(name, PLANED, &[]) + more;
        gpu.module(&host::compile(folder, &source, &entries).unwrap()).unwrap()
    };
    let mut planes = Planes::new(&gpu, compiled("fast", "retile", "", &["retile"])).unwrap();
    let laying = compiled("tape", "lay", PROBE, &["lay", "probe"]);
    let (layers, vocab) = (2, 70);
    let g = Geometry { layers, width, heads, kv_heads: 2, dim: 64, ff, vocab, types: [ty; 5] };
    let pace = Pace { clusters: 3, warps: 8, groups: 2 };
    let all = shares(&g, &pace).unwrap();
    let mut lay = Lay::new(&gpu, Arc::clone(&laying), &g, &pace, &all).unwrap();
    let mut want = Vec::new();
    for layer in 0..=layers {
        let of_layer = if layer < layers { &Part::LAYER[..] } else { &[Part::Head] };
        for part in of_layer {
            let (heights, cols, in_turn) = parts(&g, *part);
            let made: Vec<_> = heights
                .iter()
                .enumerate()
                .map(|(ix, n)| matrix(ty, *n, cols, u64::from(10 * layer) + ix as u64))
                .collect();
            let refs: Vec<&WeightRef> = made.iter().map(|m| &m.0).collect();
            let at = planes.of(&refs, in_turn).unwrap();
            let height = heights.iter().sum();
            lay.put(*part, layer, &Matrix { at, rows: height, nb: cols / 32, ty }).unwrap();
            let row = |r: u32| {
                let (ix, r) = if in_turn {
                    ((r % 2) as usize, r / 2)
                } else {
                    let ends = heights.iter().scan(0, |sum, n| {
                        *sum += n;
                        Some(*sum)
                    });
                    let ix = ends.clone().position(|end| r < end).unwrap();
                    (ix, r - ends.take(ix).last().unwrap_or(0))
                };
                made[ix].1[(r * cols) as usize..][..cols as usize].to_vec()
            };
            want.push((*part, layer, (0..height).map(row).collect::<Vec<_>>()));
            // The data lives for as long as its address tells matrices apart.
            std::mem::forget(made);
        }
    }
    let tapes = lay.finish().unwrap();
    let unit = unit_bytes(ty) as usize;
    let units = tapes.len / unit + 1;
    assert!(units > 500);
    let probe = laying.function(&entry("probe", ty)).unwrap();
    for (part, layer, matrix) in want {
        for (ix, share) in all.iter().enumerate() {
            let ix = ix as u32;
            let own = rows(&g, &pace, part, ix, share);
            let (n, per_row) = (own.len() as u32, g.units(part));
            if n == 0 {
                continue;
            }
            let out = gpu.alloc((n * per_row) as usize * 4096).unwrap();
            let from = tapes.ptr + stage_at(&g, part, layer, ix, share);
            let pointers = [from, out.ptr];
            gpu.launch(&probe, (n * per_row, 1), 32, 0, &[n * per_row], &pointers).unwrap();
            let mut bytes = vec![0; out.len];
            gpu.read(out.ptr, &mut bytes).unwrap();
            let have: Vec<f32> =
                bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            for (i, row) in own.iter().enumerate() {
                for u in 0..per_row {
                    let at = pace.place(part, n, per_row, [i as u32, u]) as usize * 1024;
                    for (e, have) in have[at..at + 1024].iter().enumerate() {
                        let want = wanted(&g, part, ix, &matrix, [*row as usize, u as usize, e]);
                        let off = (have - want).abs();
                        assert!(
                            off <= 1e-5 * (1.0 + want.abs()),
                            "{ty} {part:?} layer {layer}, block {ix}, row {row}, weight {}: {have}, expected {want}",
                            u as usize * 1024 + e
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn every_weight_of_simple_blocks_lies_where_its_block_of_threads_reads_it() {
    for ty in PLANED.iter().filter(|ty| ty.block_len() == 32) {
        through(*ty, 96, 1056, 4);
        through(*ty, 128, 1056, 8);
    }
    // Three query heads of a key head: six blocks of eight.
    through(TensorType::Q8_0, 96, 1056, 6);
}

#[test]
fn every_weight_of_super_blocks_lies_where_its_block_of_threads_reads_it() {
    for ty in PLANED.iter().filter(|ty| ty.block_len() == 256) {
        // Two query heads of a key head are no whole super-block, and four are.
        through(*ty, 256, 1280, 4);
        through(*ty, 256, 1280, 8);
    }
}
