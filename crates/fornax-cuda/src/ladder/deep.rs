//! Attention over many keys as tapes do it on the tensor cores, run on the CPU: every block of a cluster takes its keys out of
//! a paged cache, and what they have together is compared with a softmax of doubles.

use fornax_gguf::{TensorType, blocks};
use fornax_plan::sample::uniform;

use crate::driver::host;

/// One block of a cluster, as `Attention` in heads.cuh goes about it.
const PROBE: &str = "
struct ProbeArgs { u32 rank, first, keys, own, tokens; };
extern \"C\" __global__ void probe(ProbeArgs a, const u8* keys, const u8* values, const u32* table, const float* heads,
                                 float* means, float2* marks) {
    typedef Mix<Cells> Means;
    __shared__ __align__(16) u8 room[DIM * 16];
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, n = (a.first & ~7u) + warp * TILE;
    auto cache = [&]() { return Deep{keys, values, table, a.tokens, 1, a.rank, a.keys}; };
    Tile<Cells> tile;
    tile.begin();
    tile.find(cache(), n, warps * TILE);
    tile.fetch_keys(cache(), 0);
    tile.fetch_values(cache(), 0);
    Means::split(heads, shared_address(room));
    __syncthreads();
    auto seen = [](float x) { return x; };
    Means mix;
    mix.begin(tile.lane);
    if (a.own && warp == warps - 1) mix.own(heads, seen);
    mix.over(tile, n, warps * TILE, a.first, a.keys, shared_address(room), cache, seen);
    mix.leave(means + warp * GROUP * DIM, marks + warp * GROUP);
}
";

/// The same where keys come as boxes.
const BOXES_PROBE: &str = "
struct ProbeArgs { u32 rank, first, keys, own, tokens; };
extern \"C\" __global__ void probe(ProbeArgs a, const u8* keys, const u8* values, const u32* table, const float* heads,
                                 float* means, float2* marks) {
    using namespace boxes;
    __shared__ __align__(16) u8 room[boxes::Queries::BYTES];
    __shared__ __align__(128) u8 runs[4 * boxes::Tile::EACH];
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = a.first / RUN * RUN + warp * TILE;
    auto cache = [&]() { return Cache{keys, values, 0, 0, table, a.tokens, 1, a.rank, a.keys}; };
    boxes::Tile tile;
    tile.begin({shared_address(runs), 0, 0, 4}, warp / 2, 0);
    for (u32 h = warp; h < GROUP; h += warps) {
        float values[DIM / 32];
        u32 places[DIM / 32];
        for (u32 i = 0; i < DIM / 32; i++) values[i] = heads[h * DIM + (places[i] = 32 * i + lane)];
        boxes::Queries::split(shared_address(room), h, values, places);
    }
    __syncthreads();
    boxes::Queries queries;
    queries.take(shared_address(room), lane);
    auto seen = [](float x) { return x; };
    boxes::Mix mix;
    mix.begin(lane);
    mix.over(tile, n, warps * TILE, a.first, queries, cache, seen);
    if (a.own && warp == warps - 1) mix.own(heads, seen);
    mix.leave(means + warp * GROUP * DIM, marks + warp * GROUP, tile.side());
}
";

/// How keys come, of what format.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Loads(TensorType),
    Boxes,
}

impl Form {
    fn ty(self) -> TensorType {
        match self {
            Form::Loads(ty) => ty,
            Form::Boxes => TensorType::Q8_0,
        }
    }

    /// How many of the tokens from the first on are a rank's.
    fn keys_of(self, tokens: u32, rank: u32) -> u32 {
        match self {
            Form::Loads(_) => (tokens + 7 - rank) / RANKS,
            Form::Boxes => tokens / 256 * 32 + (tokens % 256).saturating_sub(32 * rank).min(32),
        }
    }

    fn rank_of(self, token: u32) -> u32 {
        match self {
            Form::Loads(_) => token % RANKS,
            Form::Boxes => token / 32 % RANKS,
        }
    }
}

const WARPS: u32 = 8;
const RANKS: u32 = 8;
const KV_HEADS: u32 = 2;
const BLOCK: u32 = 64;

/// A pool as the cache has it, and its elements; those of tokens that are not `there` are no numbers.
fn pool(
    ty: TensorType,
    seed: u64,
    scale: f32,
    len: u32,
    there: impl Fn(u32) -> bool,
) -> (Vec<u8>, Vec<f32>) {
    let value = |i: u32| {
        let block = 4.0f32.powf(2.0 * uniform(seed + 1, i / 32) - 1.0);
        scale * block * (2.0 * uniform(seed, i) - 1.0)
    };
    let values: Vec<f32> = (0..len).map(value).collect();
    let mut data = vec![0; len as usize / ty.block_len() * ty.block_bytes()];
    blocks::quantize(ty, &values, &mut data).unwrap();
    let mut stored = vec![0.0; values.len()];
    blocks::dequantize(ty, &data, &mut stored).unwrap();
    let nan = 0x7e00u16.to_le_bytes();
    if ty == TensorType::F16 {
        for (i, half) in data.chunks_mut(2).enumerate().filter(|(i, _)| !there(*i as u32)) {
            half.copy_from_slice(&nan);
            stored[i] = f32::NAN;
        }
        return (data, stored);
    }
    // All numbers, then all scales.
    let numbers = data.chunks(34).flat_map(|b| b[2..].to_vec());
    let scale = |(b, d): (usize, &[u8])| if there(32 * b as u32) { [d[0], d[1]] } else { nan };
    let scales = data.chunks(34).enumerate().flat_map(scale);
    (numbers.chain(scales).collect(), stored)
}

/// The token at `pos` looks at what is in its window: the largest difference of a mean, as a share of the largest mean.
fn apart(probe: &Probe, (dim, group): (u32, u32), (pos, window): (u32, u32), scale: f32) -> f64 {
    let (width, ty) = (KV_HEADS * dim, probe.form.ty());
    let blocks = pos / BLOCK + 1;
    // The blocks of the sequence from the last to the first; block 0 is somebody else's.
    let place = |p: u32| (blocks - p / BLOCK) * BLOCK + p % BLOCK;
    let tokens = (blocks + 1) * BLOCK;
    let there = |i: u32| {
        let (block, slot) = (i / width / BLOCK, i / width % BLOCK);
        block > 0 && (blocks - block) * BLOCK + slot < pos
    };
    let (keys, key_values) = pool(ty, 10, 1.0, tokens * width, there);
    let (values, value_values) = pool(ty, 20, scale, tokens * width, there);
    let heads: Vec<f32> = (0..(group + 2) * dim)
        .map(|i| (2.0 * uniform(30, i) - 1.0) * if i / dim > group { scale } else { 0.5 })
        .collect();
    let of = |pool: &[f32], p: u32, e: u32, own: u32| {
        let at = if p == pos {
            heads[((group + own) * dim + e) as usize]
        } else {
            pool[(place(p) * width + dim + e) as usize]
        };
        f64::from(at)
    };
    let first = if window > 0 && pos + 1 > window { pos + 1 - window } else { 0 };
    let table: Vec<u32> = (0..blocks).map(|b| blocks - b).collect();
    let (means, marks) =
        probe.run(&keys, &values, &table, &heads, (pos, first, tokens), (dim, group));
    let (mut worst, mut most) = (0.0f64, 0.0f64);
    for h in 0..group {
        let score = |p: u32| {
            (0..dim)
                .map(|e| f64::from(heads[(h * dim + e) as usize]) * of(&key_values, p, e, 0))
                .sum::<f64>()
        };
        let scores: Vec<f64> = (first..=pos).map(score).collect();
        let high = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - high).exp2()).collect();
        let all: f64 = weights.iter().sum();
        let parts = (0..RANKS * WARPS).map(|i| i * group + h);
        let top = parts.clone().map(|i| f64::from(marks[2 * i as usize])).fold(f64::MIN, f64::max);
        let weight = |i: u32| (f64::from(marks[2 * i as usize]) - top).exp2();
        let sum: f64 =
            parts.clone().map(|i| weight(i) * f64::from(marks[2 * i as usize + 1])).sum();
        for e in 0..dim {
            let want = (first..=pos)
                .zip(&weights)
                .map(|(p, w)| w * of(&value_values, p, e, 1))
                .sum::<f64>()
                / all;
            let have = parts
                .clone()
                .map(|i| weight(i) * f64::from(means[(i * dim + e) as usize]))
                .sum::<f64>()
                / sum;
            worst = if (have - want).abs() <= worst { worst } else { (have - want).abs() };
            most = most.max(want.abs());
        }
    }
    worst / most
}

/// A kernel above for one shape and format.
struct Probe {
    form: Form,
    gpu: std::sync::Arc<crate::driver::Gpu>,
    function: crate::driver::Function,
}

impl Probe {
    fn new(form: Form, (dim, group): (u32, u32)) -> Probe {
        let (gpu, _) = host::gpu();
        let cells = if form.ty() == TensorType::F16 { "TileF16" } else { "TileQ8" };
        let probe = if form == Form::Boxes { BOXES_PROBE } else { PROBE };
        let source = format!(
            "#define DIM {dim}\n#define Cells {cells}\n#include \"../tensor.cuh\"\n\
             static const u32 GROUP = {group}, KV_HEADS = {KV_HEADS};\n#include \"boxes.cuh\"\n{probe}"
        );
        let code = host::compile("tape", &source, &["probe".to_string()]).unwrap();
        let function = gpu.module(&code).unwrap().function("probe").unwrap();
        Probe { form, gpu, function }
    }

    /// What all ranks and warps leave: means, and what they are relative to with the sums.
    fn run(
        &self,
        keys: &[u8],
        values: &[u8],
        table: &[u32],
        heads: &[f32],
        (pos, first, tokens): (u32, u32, u32),
        (dim, group): (u32, u32),
    ) -> (Vec<f32>, Vec<f32>) {
        let put = |bytes: &[u8]| {
            let memory = self.gpu.alloc(bytes.len()).unwrap();
            self.gpu.write(memory.ptr, bytes).unwrap();
            memory
        };
        let words: Vec<u8> = table.iter().flat_map(|w| w.to_le_bytes()).collect();
        let floats: Vec<u8> = heads.iter().flat_map(|v| v.to_le_bytes()).collect();
        let [keys, values, table, heads] = [keys, values, &words, &floats].map(put);
        let parts = (WARPS * group) as usize;
        let (means, marks) =
            (self.gpu.alloc(parts * dim as usize * 4).unwrap(), self.gpu.alloc(parts * 8).unwrap());
        let (mut all_means, mut all_marks) = (Vec::new(), Vec::new());
        for rank in 0..RANKS {
            let [from, count] = [first, pos].map(|tokens| self.form.keys_of(tokens, rank));
            let own = u32::from(self.form.rank_of(pos) == rank);
            let constants = [rank, from, count, own, tokens];
            let pointers = [&keys, &values, &table, &heads, &means, &marks].map(|m| m.ptr);
            self.gpu.launch(&self.function, (1, 1), WARPS * 32, 0, &constants, &pointers).unwrap();
            for (memory, all) in [(&means, &mut all_means), (&marks, &mut all_marks)] {
                let mut bytes = vec![0; memory.len];
                self.gpu.read(memory.ptr, &mut bytes).unwrap();
                all.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
            }
        }
        (all_means, all_marks)
    }
}

/// Every place of a last tile, windows that begin within one, small values and large ones.
fn every_length(form: Form, dims: [u32; 2]) {
    for shape in dims.into_iter().flat_map(|dim| [1, 2, 3, 4].map(|group| (dim, group))) {
        let probe = Probe::new(form, shape);
        let places = [
            ((65, 0), 1.0),
            ((1100, 0), 1e-3),
            ((1339, 300), 1.0),
            ((512, 77), 200.0),
            ((5003, 0), 1.0),
        ];
        for (at, scale) in places {
            let off = apart(&probe, shape, at, scale);
            assert!(
                off < 3e-6,
                "{form:?}, heads of {}, {} of them, position and window {at:?}: {off:e}",
                shape.0,
                shape.1
            );
        }
    }
}

#[test]
fn many_keys_of_halves_are_weighed_as_exactly_as_few() {
    every_length(Form::Loads(TensorType::F16), [64, 128]);
}

#[test]
fn many_keys_of_8_bit_blocks_are_weighed_as_exactly_as_few() {
    every_length(Form::Loads(TensorType::Q8_0), [64, 128]);
}

#[test]
fn very_many_keys_are_weighed_as_exactly_as_few() {
    every_length(Form::Boxes, [64, 128]);
}

/// A warp looks its tiles' blocks up by sixteens.
#[test]
fn more_tiles_than_are_looked_up_at_once_are_weighed_alike() {
    for form in [Form::Loads(TensorType::F16), Form::Loads(TensorType::Q8_0), Form::Boxes] {
        let shape = (64, 2);
        let off = apart(&Probe::new(form, shape), shape, (16_600, 0), 1.0);
        assert!(off < 3e-6, "{form:?}: {off:e}");
    }
}
